"""NCCL communicators: creating, splitting, growing and destroying them."""
