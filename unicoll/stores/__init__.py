"""Key-value stores that the processes of a job share: torch.distributed's five, by its names."""

from __future__ import annotations

from .base import PrefixStore, Store
from .file import FileStore
from .hash import HashStore
from .tcp import TCPStore

__all__ = ["FileStore", "HashStore", "PrefixStore", "Store", "TCPStore"]
