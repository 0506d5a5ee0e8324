"""The documentation, the tutorial and the quick start."""
