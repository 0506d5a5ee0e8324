"""Device runtimes: memory, streams and events of CUDA, HIP and SYCL devices, by one interface.

Arrays are those of :mod:`unicoll.arrays`. Start with ``device_runtime.py``; ``runtimes.py`` finds
the one of a device type.
"""
