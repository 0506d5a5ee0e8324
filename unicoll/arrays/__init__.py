"""Memory and arithmetic: adapters of array families, element types, reductions in NumPy, CUDA
streams and driver."""
