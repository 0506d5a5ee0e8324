"""The NCCL backend: arrays on NVIDIA's GPUs, and on AMD's by RCCL.

It is the binding of the library; streams, arrays in flight and failures are in
:mod:`unicoll.device_collectives`. Start with ``library/nccl.py``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from unicoll.backend import Backend

__all__ = ["backend_class"]


def backend_class() -> type[Backend]:
    """The backend, for the registry."""
    from nccl_comm.backend import NCCLBackend

    return NCCLBackend
