"""Shared memory between the ranks of a host: segments, slots, futexes, and rings for large
messages."""
