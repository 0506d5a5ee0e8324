"""A simulated CUDA device and NCCL between processes."""
