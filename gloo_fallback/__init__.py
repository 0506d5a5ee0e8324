"""The CPU backend, ``gloo``: sockets between processes, NumPy for the arithmetic, nothing else needed."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .backend import GlooBackend

__all__ = ["backend_class"]


def backend_class() -> type[GlooBackend]:
    """The backend, for the registry."""
    from .backend import GlooBackend

    return GlooBackend
