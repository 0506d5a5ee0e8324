"""Device arrays over backends of host arrays, where no backend takes device arrays.

Chunks are copied through pinned memory; a CUDA-aware MPI gets device pointers. The runtimes of the
devices are in :mod:`unicoll.devices`. Start with ``backend.py``.
"""
