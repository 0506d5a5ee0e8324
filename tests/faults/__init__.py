"""Killed and stopped ranks, mismatched calls, refused arguments, hostile peers."""
