"""Files made to harm whoever reads them, and proofs of what they do. See README.md."""
