"""Memory registered with the library: symmetric allocations, buffers and windows; one-sided
operations."""
