"""Killed and stopped ranks, mismatched calls, refused arguments, malformed input."""
