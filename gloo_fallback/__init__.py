"""The CPU backend, named ``gloo``: sockets and shared memory between processes, reductions in
NumPy.

It needs nothing but NumPy, and serves arrays in host memory on one host and several. It is no
binding of Gloo. Start with ``backend.py``; ``transport/`` chooses between shared memory and
sockets, ``algorithms/`` has the collectives, ``shm/`` and ``p2p/`` what moves the bytes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gloo_fallback.backend import GlooBackend

__all__ = ["backend_class"]


def backend_class() -> type[GlooBackend]:
    """The backend class; called by the registry."""
    from gloo_fallback.backend import GlooBackend

    return GlooBackend
