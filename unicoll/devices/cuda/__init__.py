"""Devices that CuPy and torch call ``cuda``: the device runtimes of NVIDIA's driver, and of HIP on
AMD's GPUs."""
