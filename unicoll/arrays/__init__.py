"""Arrays in memory, and arithmetic on the host: families of arrays, element types, reductions.

An array of NumPy, torch, CuPy or another library becomes a :class:`~unicoll.arrays.buffer.Buffer`.
Nothing here depends on a group; memory, streams and events of devices are in
:mod:`unicoll.devices`. Start with ``conversion.py`` and ``buffer.py``, then ``kernels.py``.
"""
