"""A store in a file that all processes can open: a log of requests, replayed by everybody.

The file begins with a line of text and goes on with requests as the wire knows them (see wire.py), each appended
under an fcntl lock, which NFS honours too. A record counts once it is complete; what a writer killed in its midst
leaves behind is cut off by the next one.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from ..errors import DistArgumentError, DistStoreError, DistTypeError
from ..forks import in_child
from .requests import RequestStore
from .table import HIDDEN, NotYet, Table
from .wire import (
    MUTATING,
    REQUEST,
    MalformedError,
    Op,
    max_request,
    max_value,
    pack_request,
    unpack_fields,
    validate,
)

__all__ = ["FileStore"]

_TITLE = b"unicoll file store 1\n"
_USERS = HIDDEN + b"users"
_LEFT = HIDDEN + b"left"

_LOCK_SECONDS = 30.0
_LOCK_PAUSES = (0.0002, 0.01)
_POLL_PAUSES = (0.001, 0.05)

_PIECE = 1 << 20
_LARGEST_FILE = 8
"""How many of the largest requests a file may hold."""


class _Log:
    """The file, opened once for all handles of this process.

    fcntl locks belong to the process, and closing any descriptor of a file drops them: hence one descriptor, and
    a thread lock before the file's.
    """

    def __init__(self, path: str, fd: int, identity: tuple[int, int]) -> None:
        self.path = path
        self.identity = identity
        self.handles = 0
        self._fd = fd
        self._threads = threading.Lock()
        self._largest = max_value()
        self._largest_file = _LARGEST_FILE * max_request(self._largest)
        self._replay_from_start()

    def _replay_from_start(self) -> None:
        self._table = Table()
        self._offset = 0

    def run(self, op: Op, fields: Sequence[bytes], record: bytes) -> Sequence[bytes]:
        """Does one operation on the file's present state; NotYet where it would have to wait.

        ``record`` is the operation as the log takes it.
        """
        with self._locked(op in MUTATING):
            self._catch_up()
            return self._change(op, fields, record) if op in MUTATING else self._table.apply(op, fields)

    def enter(self) -> bool:
        """Counts a user in, unless the file has been removed since it was opened: whether it has not."""
        with self._locked(True):
            self._catch_up()
            if not self.in_place():
                return False
            self._count(_USERS, 1)
            return True

    def leave(self, world_size: int) -> None:
        """Counts a user out, and removes the file with the last of ``world_size``."""
        with self._locked(True):
            self._catch_up()
            left, users = self._count(_LEFT, 1), self._count(_USERS, 0)
            if left >= max(users, world_size) and self.in_place():
                os.unlink(self.path)

    def _change(self, op: Op, fields: Sequence[bytes], record: bytes) -> Sequence[bytes]:
        """Does an operation that may be written down; under the lock."""
        try:
            reply = self._table.apply(op, fields)
            if self._table.touched:
                self._write(record)
        finally:
            self._table.touched.clear()
        return reply

    def _count(self, key: bytes, amount: int) -> int:
        """Adds to a number of the store's own; under the lock."""
        fields = (key, b"%d" % amount)
        return int(self._change(Op.ADD, fields, pack_request(Op.ADD, fields))[0])

    def in_place(self) -> bool:
        """Whether the path still leads to this file."""
        try:
            found = os.lstat(self.path)
        except OSError:
            return False
        return (found.st_dev, found.st_ino) == self.identity

    def private(self) -> bool:
        """Whether the file that is open belongs to this process's user, and nobody else may open it."""
        status = os.fstat(self._fd)
        return status.st_uid == os.geteuid() and not stat.S_IMODE(status.st_mode) & 0o077

    def close(self) -> None:
        with self._threads:
            if self._fd >= 0:
                os.close(self._fd)
                self._fd = -1

    def abandon(self) -> None:
        """Closes the descriptor in a forked child, whatever the parent's threads were doing."""
        os.close(self._fd)
        self._fd = -1

    @contextmanager
    def _locked(self, exclusive: bool) -> Iterator[None]:
        deadline = time.monotonic() + _LOCK_SECONDS
        if not self._threads.acquire(timeout=_LOCK_SECONDS):
            raise self._stuck("a thread of this process")
        try:
            if self._fd < 0:
                raise DistStoreError(f"FileStore {self.path} has been closed")
            self._lock_file(fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH, deadline)
            try:
                yield
            finally:
                fcntl.lockf(self._fd, fcntl.LOCK_UN)
        finally:
            self._threads.release()

    def _lock_file(self, kind: int, deadline: float) -> None:
        pause, longest = _LOCK_PAUSES
        while True:
            try:
                fcntl.lockf(self._fd, kind | fcntl.LOCK_NB)
                return
            except (BlockingIOError, PermissionError):
                if time.monotonic() >= deadline:
                    raise self._stuck("another process, perhaps a stopped one,") from None
            except OSError as error:
                raise DistStoreError(
                    f"FileStore {self.path} cannot be locked: {error.strerror}. Its file system must have fcntl locks"
                ) from error
            time.sleep(pause)
            pause = min(2 * pause, longest)

    def _stuck(self, holder: str) -> DistStoreError:
        return DistStoreError(f"FileStore {self.path}: {holder} has held its lock for {_LOCK_SECONDS:g} s")

    def _catch_up(self) -> None:
        size = os.fstat(self._fd).st_size
        if size < self._offset:
            raise DistStoreError(f"FileStore {self.path} has been truncated by another program")
        if size == self._offset:
            return
        if size > self._largest_file:
            raise DistStoreError(
                f"FileStore {self.path} has {size} bytes; the most is {self._largest_file}, which "
                "UNICOLL_STORE_MAX_VALUE changes"
            )
        if self._offset == 0:
            title = bytes(self._read(min(size, len(_TITLE))))
            if title != _TITLE[: len(title)]:
                raise DistStoreError(f"{self.path} is no file of a FileStore; it is left as it is")
            if len(title) < len(_TITLE):
                return
            self._offset = len(_TITLE)
        # In pieces: a file of another's making may be long and hold nothing.
        piece = _PIECE
        while (left := size - self._offset) > 0:
            done = self._replay(memoryview(self._read(min(left, piece))))
            if not done and piece >= left:
                return  # the last record is not complete
            self._offset += done
            piece = _PIECE if done else 2 * piece

    def _read(self, size: int) -> bytearray:
        data = bytearray(size)
        view = memoryview(data)
        at = 0
        while at < size:
            got = os.preadv(self._fd, [view[at:]], self._offset + at)
            if not got:
                raise DistStoreError(f"FileStore {self.path} has been truncated by another program")
            at += got
        return data

    def _replay(self, data: memoryview) -> int:
        """Applies the complete records in ``data``; returns their length."""
        at = 0
        while at + REQUEST.size <= len(data):
            size, code, _ = REQUEST.unpack_from(data, at)
            if size > max_request(self._largest):
                raise DistStoreError(f"FileStore {self.path} is damaged: a record of {size} bytes")
            end = at + REQUEST.size + size
            if end > len(data):
                break
            try:
                fields = unpack_fields(data[at + REQUEST.size : end])
                self._table.apply(validate(code, fields, self._largest), fields)
            except (MalformedError, NotYet, DistStoreError) as error:
                raise DistStoreError(f"FileStore {self.path} is damaged: {error}") from error
            at = end
        self._table.touched.clear()
        return at

    def _write(self, record: bytes) -> None:
        """Appends a record, over what an unfinished one may have left."""
        data = record if self._offset else _TITLE + record
        at = self._offset
        try:
            if os.fstat(self._fd).st_size > self._offset:
                os.ftruncate(self._fd, self._offset)
            while data:
                written = os.pwrite(self._fd, data, at)
                data = data[written:]
                at += written
        except OSError as error:
            self._undo()
            raise DistStoreError(
                f"FileStore {self.path} cannot be written: {error.strerror}; what it holds can still be read"
            ) from error
        self._offset = at

    def _undo(self) -> None:
        try:
            os.ftruncate(self._fd, self._offset)
        except OSError:
            # Unfinished records are passed over by readers, so this one is too.
            pass
        # The table has the change that the file has not.
        self._replay_from_start()


_registry_lock = threading.RLock()
_logs: dict[tuple[int, int], _Log] = {}


def _open_log(path: str) -> _Log:
    with _registry_lock:
        try:
            found = os.lstat(path)
            log = _logs.get((found.st_dev, found.st_ino))
        except OSError:
            log = None
        if log is None:
            log = _open_file(path)
            _logs[log.identity] = log
        log.handles += 1
        return log


def _open_file(path: str) -> _Log:
    try:
        # Not through a symbolic link: in a folder that others can write to, it may lead to any file of this user.
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise DistStoreError(f"FileStore {path} is a symbolic link, which is not followed") from error
        raise DistStoreError(f"FileStore {path} cannot be opened: {error.strerror}") from error
    status = os.fstat(fd)
    why = None
    if not stat.S_ISREG(status.st_mode):
        why = "is no regular file"
    elif status.st_nlink > 1:
        why = "has a second name (a hard link): it may be any file of this user"
    if why:
        os.close(fd)
        raise DistStoreError(f"FileStore {path} {why}")
    return _Log(path, fd, (status.st_dev, status.st_ino))


def _close_log(log: _Log) -> None:
    with _registry_lock:
        log.handles -= 1
        if log.handles == 0:
            _logs.pop(log.identity, None)
            log.close()


@in_child
def _forget_logs() -> None:
    global _registry_lock
    _registry_lock = threading.RLock()
    for log in _logs.values():
        log.abandon()
    _logs.clear()


class FileStore(RequestStore):
    """A store in a file, on a file system that all processes share (torch.distributed.FileStore).

    The file is made if it is not there, for its owner alone, and only grows. Waiting looks at it every 1 to 50 ms.
    A file left over by another job keeps that job's keys: use a fresh name for each.

    Args:
        file_name: the file's path.
        world_size: if positive, the file is removed when that many users have closed their stores.

    Raises:
        DistStoreError: the file cannot be opened, is a link, or is another program's.
    """

    def __init__(self, file_name: str, world_size: int = -1) -> None:
        super().__init__()
        if not isinstance(file_name, (str, os.PathLike)):
            raise DistTypeError(f"FileStore: file_name is a path, not {type(file_name).__name__}")
        if isinstance(world_size, bool) or not isinstance(world_size, int):
            raise DistTypeError(f"FileStore: world_size is an int, not {type(world_size).__name__}")
        if world_size == 0:
            raise DistArgumentError("FileStore: world_size is positive, or -1 for a number not fixed")
        path = os.path.abspath(file_name)
        self._use(path, world_size)
        while world_size > 0 and not self._log.enter():
            self._finalizer.detach()
            _close_log(self._log)
            self._use(path, world_size)

    def _use(self, path: str, world_size: int) -> None:
        self._path = path
        self._pid = os.getpid()
        self._log = _open_log(path)
        self._finalizer = weakref.finalize(self, _leave, self._log, world_size, self._pid)

    @property
    def path(self) -> str:
        """The file's absolute path."""
        return self._path

    @property
    def private(self) -> bool:
        """Whether the open file, whatever the path leads to by now, is this process's user's alone."""
        return self._finalizer.alive and self._log.private()

    def _run(self, op: Op, fields: Sequence[bytes], seconds: float, name: str) -> Sequence[bytes]:
        if self._pid != os.getpid():
            # A forked child opens the file for itself, for locks and descriptors are the parent's.
            if self._finalizer.detach() is None:
                raise self._closed(name)
            self._use(self._path, -1)
        record = self._pack(op, fields, 0.0, name)
        deadline = time.monotonic() + seconds
        pause, longest = _POLL_PAUSES
        while self._finalizer.alive:
            try:
                return self._log.run(op, fields, record)
            except NotYet as state:
                left = deadline - time.monotonic()
                if left <= 0:
                    note = (
                        ""
                        if self._log.in_place()
                        else " (and the file has been deleted or replaced meanwhile)"
                    )
                    raise self._timed_out(state.keys, seconds, name, note) from None
            time.sleep(min(pause, left))
            pause = min(1.5 * pause, longest)
        raise self._closed(name)

    def clone(self) -> FileStore:
        """A further handle on the same file, with its own timeout; it does not count as a user."""
        if not self._finalizer.alive:
            raise self._closed("clone")
        twin = FileStore(self._path)
        twin._timeout = self._timeout
        return twin

    def close(self) -> None:
        """Closes the file, and removes it if this was the last of ``world_size`` users."""
        self._finalizer()

    def __repr__(self) -> str:
        return f"FileStore({self._path!r})"


def _leave(log: _Log, world_size: int, pid: int) -> None:
    if pid != os.getpid():
        return
    try:
        if world_size > 0:
            log.leave(world_size)
    except (DistStoreError, OSError):
        # Best effort: a full disk or a file that has gone must not make closing fail.
        pass
    finally:
        _close_log(log)
