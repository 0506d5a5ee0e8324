"""The NCCL backend on the simulated device."""
