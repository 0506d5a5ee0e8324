"""What backends implement and share. A third-party backend imports its contract from here.

:mod:`unicoll.backend.contract` describes it; docs/writing-a-backend.md builds a backend with it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from unicoll.backend.call import Call, OneSidedCall
from unicoll.backend.contract import Backend, Caps, Context, Job, Registration

if TYPE_CHECKING:
    from unicoll.backend.host_backend import HostBackend

__all__ = ["Backend", "Call", "Caps", "Context", "HostBackend", "Job", "OneSidedCall", "Registration"]


def __getattr__(name: str) -> Any:
    """Import the base class of host backends when it is used: ``import unicoll`` does not need it."""
    if name != "HostBackend":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from unicoll.backend.host_backend import HostBackend

    return HostBackend
