"""The NCCL backend: arrays on NVIDIA GPUs, ordered by streams."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from unicoll.backend import Backend

__all__ = ["backend_class"]


def backend_class() -> type[Backend]:
    """The backend, for the registry."""
    from nccl_comm.backend import NCCLBackend

    return NCCLBackend
