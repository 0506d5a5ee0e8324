"""What backends implement and share. A third-party backend imports its interface from here.

:mod:`unicoll.backend.contract` describes it; docs/writing-a-backend.md builds a backend with it.
``host/`` is what backends of host arrays share, ``connections/`` their sockets.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from unicoll.backend.contract import Backend, Caps, Context, Job, Registration
from unicoll.calls.call import Call, OneSidedCall

if TYPE_CHECKING:
    from unicoll.backend.connections.member_connections import MemberConnections
    from unicoll.backend.host import HostBackend, Inbox

__all__ = [
    "Backend",
    "Call",
    "Caps",
    "Context",
    "HostBackend",
    "Inbox",
    "Job",
    "MemberConnections",
    "OneSidedCall",
    "Registration",
]

_LAZY = {
    "HostBackend": "host",
    "Inbox": "host",
    "MemberConnections": "connections.member_connections",
}


def __getattr__(name: str) -> Any:
    """Import what backends of host arrays need when it is used: ``import unicoll`` does not need
    it."""
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_LAZY[name]}"), name)
