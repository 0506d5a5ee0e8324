"""Key-value stores that the processes of a job share: torch.distributed's five, by its names."""

from __future__ import annotations

from unicoll.net.stores.base import PrefixStore, Store
from unicoll.net.stores.file import FileStore
from unicoll.net.stores.hash import HashStore
from unicoll.net.stores.tcp import TCPStore

__all__ = ["FileStore", "HashStore", "PrefixStore", "Store", "TCPStore"]
