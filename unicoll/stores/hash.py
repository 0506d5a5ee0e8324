"""A store inside one process."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence

from ..errors import DistStoreError
from .requests import RequestStore, seconds_left
from .table import NotYet, Table
from .wire import Op

__all__ = ["HashStore"]


class _Shared:
    """What a HashStore and its clones have in common."""

    def __init__(self) -> None:
        self.table = Table()
        self.changed = threading.Condition()
        self.pid = os.getpid()


class HashStore(RequestStore):
    """A store for the threads of one process (torch.distributed.HashStore).

    It does not reach into forked children: there its methods raise DistStoreError.
    """

    def __init__(self) -> None:
        super().__init__()
        self._shared: _Shared | None = _Shared()

    def _run(self, op: Op, fields: Sequence[bytes], seconds: float, name: str) -> Sequence[bytes]:
        shared = self._shared
        if shared is None:
            raise self._closed(name)
        if shared.pid != os.getpid():
            raise DistStoreError(
                f"{name}: this HashStore belongs to process {shared.pid}; a forked child needs a FileStore or TCPStore",
                op=name,
            )
        deadline = time.monotonic() + seconds
        with shared.changed:
            while self._shared is not None:
                try:
                    return self._apply(shared, op, fields)
                except NotYet as state:
                    if not shared.changed.wait(seconds_left(deadline)) and time.monotonic() >= deadline:
                        raise self._timed_out(state.keys, seconds, name) from None
        raise self._closed(name)

    def _apply(self, shared: _Shared, op: Op, fields: Sequence[bytes]) -> Sequence[bytes]:
        reply = shared.table.apply(op, fields)
        if shared.table.touched:
            shared.table.touched.clear()
            shared.changed.notify_all()
        return reply

    def clone(self) -> HashStore:
        """A further handle on the same values, with its own timeout."""
        twin = HashStore()
        twin._timeout = self._timeout
        twin._shared = self._shared
        return twin

    def close(self) -> None:
        """Closes this handle; its clones go on."""
        shared, self._shared = self._shared, None
        if shared is not None and shared.pid == os.getpid():
            with shared.changed:
                shared.changed.notify_all()

    def __repr__(self) -> str:
        return "HashStore()"
