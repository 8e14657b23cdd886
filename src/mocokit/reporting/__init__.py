"""Pictures and pages about a run."""
