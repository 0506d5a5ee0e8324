"""The backend xccl with the real oneCCL on host memory (scripts/test_xccl)."""
