"""Experiments with a fixed protocol: the published labs, to the digit and over many seeds."""
