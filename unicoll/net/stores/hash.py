"""A store inside one process."""

from __future__ import annotations

import os
from collections.abc import Sequence

from unicoll.errors import DistStoreError
from unicoll.net.stores.client import RequestStore
from unicoll.net.stores.protocol import StoreOp
from unicoll.net.stores.table import Table, WaitRequired
from unicoll.process.interrupts import Changes


class _Shared:
    """The state of a HashStore and its clones."""

    def __init__(self) -> None:
        self.table = Table()
        self.changes = Changes()
        self.pid = os.getpid()


class HashStore(RequestStore):
    """A store for the threads of one process (torch.distributed.HashStore).

    It is not shared with forked children: there its methods raise DistStoreError.
    """

    def __init__(self) -> None:
        super().__init__()
        self._shared: _Shared | None = _Shared()

    def _execute(
        self, op: StoreOp, fields: Sequence[bytes], seconds: float, name: str
    ) -> Sequence[bytes]:
        shared = self._shared
        if shared is None:
            raise self._closed_error(name)
        if shared.pid != os.getpid():
            raise DistStoreError(
                f"{name}: this HashStore belongs to process {shared.pid}; a forked child needs a"
                " FileStore or TCPStore",
                op=name,
            )
        waited, missing, reply = False, fields, fields

        def done() -> bool:
            nonlocal waited, missing, reply
            # A close() of this handle, by another thread, ends the wait.
            if self._shared is None:
                raise self._closed_error(name)
            try:
                reply = self._apply(shared, op, fields, waited)
            except WaitRequired as state:
                waited, missing = True, state.keys
                return False
            return True

        if not shared.changes.wait_for(done, seconds):
            raise self._timeout_error(missing, seconds, name)
        return reply

    def _apply(
        self, shared: _Shared, op: StoreOp, fields: Sequence[bytes], waited: bool
    ) -> Sequence[bytes]:
        try:
            return shared.table.apply(op, fields, waited)
        finally:
            # This is in a `finally`: an exception of a signal's handler may come after the change,
            # and the threads that wait for the key would not be woken.
            if shared.table.changed_keys:
                shared.table.changed_keys.clear()
                shared.changes.notify_all()

    def clone(self) -> HashStore:
        """Another handle on the same values, with its own timeout."""
        clone = HashStore()
        clone._timeout = self._timeout
        clone._shared = self._shared
        return clone

    def close(self) -> None:
        """Closes this handle; its clones stay open."""
        shared, self._shared = self._shared, None
        if shared is not None and shared.pid == os.getpid():
            # With the lock no thread is between its look at the handle and its wait.
            with shared.changes.lock:
                shared.changes.notify_all()

    def __repr__(self) -> str:
        return "HashStore()"
