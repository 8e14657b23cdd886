"""The training loop, its state on disk and its log."""
