"""Frozen evaluation: who sees what, features, readouts, baselines, and the verdict with its interval."""
