"""Collectives between device arrays through a library with NCCL's API: what NCCL, RCCL and
oneCCL share.

It is written once over two interfaces, that of the library (``interface.py``) and that of the
device (:mod:`unicoll.devices.device_runtime`). Start with ``backend.py``; ``in_flight.py`` and
``stream_order.py`` say when an array may be used again, ``failure_detection.py`` how a group ends.
"""
