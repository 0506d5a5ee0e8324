"""The CPU backend, named ``gloo``: sockets and shared memory between processes, reductions in
NumPy."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gloo_fallback.backend import GlooBackend

__all__ = ["backend_class"]


def backend_class() -> type[GlooBackend]:
    """The backend class; called by the registry."""
    from gloo_fallback.backend import GlooBackend

    return GlooBackend
