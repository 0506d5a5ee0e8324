"""FileStore: a store in a file that all processes can open."""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Sequence

from unicoll.errors import DistArgumentError, DistStoreError, DistTypeError
from unicoll.net.stores import file_log
from unicoll.net.stores.client import RequestStore
from unicoll.net.stores.file_log import FileLog
from unicoll.net.stores.protocol import StoreOp
from unicoll.net.stores.table import WaitRequired
from unicoll.process.timeouts import backoff, seconds_left

_POLL_PAUSES = (0.001, 0.05, 1.5)


class FileStore(RequestStore):
    """A store in a file, on a file system that all processes share (torch.distributed.FileStore).

    The file is created if it does not exist, accessible to its owner only; it never shrinks. A
    waiting call reads it every 1 to 50 ms. A file left over from an earlier job still has that
    job's keys: use a new name for each job.

    Args:
        file_name: the file's path.
        world_size: if positive, the file is removed once that many users have closed their stores.

    Raises:
        DistStoreError: the file cannot be opened, is a link, or belongs to another program.
    """

    def __init__(self, file_name: str, world_size: int = -1) -> None:
        super().__init__()
        if not isinstance(file_name, (str, os.PathLike)):
            raise DistTypeError(f"FileStore: file_name is a path, not {type(file_name).__name__}")
        if isinstance(world_size, bool) or not isinstance(world_size, int):
            raise DistTypeError(f"FileStore: world_size is an int, not {type(world_size).__name__}")
        if world_size == 0:
            raise DistArgumentError(
                "FileStore: world_size is positive, or -1 if the number is not fixed"
            )
        path = os.path.abspath(file_name)
        self._attach(path, world_size)
        # The last user of an earlier store may remove the file between the open and the lock.
        while world_size > 0 and not self._log.add_user():
            # The handle is not closed, which would count it as a user that has left.
            self._finalizer.detach()
            file_log.close_log(self._log)
            self._attach(path, world_size)

    def _attach(self, path: str, world_size: int) -> None:
        self._path = path
        self._pid = os.getpid()
        self._log = file_log.open_log(path)
        self._finalizer = weakref.finalize(self, _close_handle, self._log, world_size, self._pid)

    @property
    def path(self) -> str:
        """The file's absolute path."""
        return self._path

    @property
    def private(self) -> bool:
        """True if only this process's user can access the open file, to which the path may no
        longer refer."""
        return self._finalizer.alive and self._log.private()

    def _execute(
        self, op: StoreOp, fields: Sequence[bytes], seconds: float, name: str
    ) -> Sequence[bytes]:
        if self._pid != os.getpid():
            # A forked child opens the file itself, since the locks and descriptors are its
            # parent's. It is no user of its own: that is the parent.
            if self._finalizer.detach() is None:
                raise self._closed_error(name)
            self._attach(self._path, -1)
        record = self._pack(op, fields, 0.0, name)
        deadline = time.monotonic() + seconds
        pauses = backoff(*_POLL_PAUSES)
        # Another thread may close the store while this one sleeps.
        while self._finalizer.alive:
            try:
                return self._log.execute(op, fields, record)
            except WaitRequired as state:
                left = seconds_left(deadline)
                if not left:
                    note = (
                        ""
                        if self._log.is_current()
                        else " (the file has been deleted or replaced meanwhile)"
                    )
                    raise self._timeout_error(state.keys, seconds, name, note) from None
            time.sleep(min(next(pauses), left))
        raise self._closed_error(name)

    def clone(self) -> FileStore:
        """Another handle on the same file, with its own timeout; it does not count as a user."""
        if not self._finalizer.alive:
            raise self._closed_error("clone")
        clone = FileStore(self._path)
        clone._timeout = self._timeout
        return clone

    def close(self) -> None:
        """Closes the file, and removes it after the last of ``world_size`` users."""
        self._finalizer()

    def __repr__(self) -> str:
        return f"FileStore({self._path!r})"


def _close_handle(log: FileLog, world_size: int, pid: int) -> None:
    # This is the copy of a handle in a child that has not used it.
    if pid != os.getpid():
        return
    try:
        if world_size > 0:
            log.remove_user(world_size)
    except (DistStoreError, OSError):
        # Best effort: closing must not fail because of a full disk or a removed file.
        pass
    finally:
        file_log.close_log(log)
