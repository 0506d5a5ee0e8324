"""The XCCL backend: Intel's oneCCL, on XPU arrays, or with its CPU plug-in on host memory.

It is the binding of the library; streams, arrays in flight and failures are in
:mod:`unicoll.device_collectives`. Start with ``backend.py``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from unicoll.backend import Backend

__all__ = ["backend_class"]


def backend_class() -> type[Backend]:
    """The backend, for the registry."""
    from xccl_comm.backend import HostXCCLBackend, XCCLBackend
    from xccl_comm.library.locate import serves_xpu

    return XCCLBackend if serves_xpu() else HostXCCLBackend
