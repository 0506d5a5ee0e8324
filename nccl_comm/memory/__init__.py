"""Memory registered with NCCL: symmetric allocations, buffers and windows; one-sided operations."""
