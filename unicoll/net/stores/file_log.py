"""The log file of a FileStore: requests that every process replays.

The file has one line of text and then requests in the format of :mod:`unicoll.net.stores.protocol`,
each appended under an fcntl lock, which NFS supports too. A record counts once it is complete; the
next writer truncates an incomplete record that a killed process has left.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import threading
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from unicoll.errors import DistStoreError
from unicoll.net.stores.protocol import (
    REQUEST,
    MalformedError,
    StoreOp,
    max_request,
    max_value,
    pack_request,
    unpack_fields,
    validate,
)
from unicoll.net.stores.table import HIDDEN, Table, WaitRequired
from unicoll.net.wire import peer_credentials
from unicoll.process.fork_safety import in_child
from unicoll.process.interrupts import raised_by_handler
from unicoll.process.timeouts import backoff

FIRST_LINE = b"unicoll file store 1\n"
T = TypeVar("T")

_JOINED = HIDDEN + b"users"
_LEFT = HIDDEN + b"left"

_LOCK_SECONDS = 30.0
_LOCK_PAUSES = (0.0002, 0.01)

_CHUNK_SIZE = 1 << 20
_MAX_LARGEST_REQUESTS = 8
"""Maximum size of the file, in requests of the largest size."""


class FileLog:
    """The file, opened once for all handles of this process.

    fcntl locks belong to the process, and closing any descriptor of a file releases them. So there
    is one descriptor, and a thread lock is taken before the file's lock.

    An exception of a signal's handler may leave a record incomplete, as a killed process does, or
    complete. This process then reads the file from its beginning.
    """

    def __init__(self, path: str, fd: int, identity: tuple[int, int]) -> None:
        self.path = path
        self.identity = identity
        self.handles = 0
        self._fd = fd
        # This is no Lock, although _with_lock() does not let a thread take it twice: release() of
        # an RLock raises an error in a thread that does not hold it, where that of a Lock would
        # release the lock of another thread.
        self._thread_lock = threading.RLock()
        # The thread that has the locks: a signal's handler on it may not use the file in the middle
        # of an operation.
        self._holder: int | None = None
        self._max_value = max_value()
        self._max_file_size = _MAX_LARGEST_REQUESTS * max_request(self._max_value)
        self._replay_from_start()

    def _replay_from_start(self) -> None:
        # After an exception before the end the next operation begins here again.
        self._in_doubt = True
        self._table = Table()
        self._offset = 0
        # True while the table and the offset may not fit together.
        self._in_doubt = False

    def execute(self, op: StoreOp, fields: Sequence[bytes], record: bytes) -> Sequence[bytes]:
        """Executes one operation on the present state of the file; ``record`` is the request for
        the log.

        Raises:
            WaitRequired: the operation has to wait for keys.
        """

        def run() -> Sequence[bytes]:
            self._replay_new_records()
            return self._mutate(op, fields, record) if op.mutates else self._table.apply(op, fields)

        return self._with_lock(op.mutates, run)

    def add_user(self) -> bool:
        """Counts a new user; False if the file was removed after it was opened."""

        def run() -> bool:
            self._replay_new_records()
            # The last user removes the file under the lock, too, so the answer stays true until the
            # count is written.
            if not self.is_current():
                return False
            self._count(_JOINED, 1)
            return True

        return self._with_lock(True, run)

    def remove_user(self, world_size: int) -> None:
        """Counts a user that leaves, and removes the file after the last of ``world_size``."""

        def run() -> None:
            self._replay_new_records()
            left, users = self._count(_LEFT, 1), self._count(_JOINED, 0)
            if left >= max(users, world_size) and self.is_current():
                os.unlink(self.path)

        self._with_lock(True, run)

    def _mutate(self, op: StoreOp, fields: Sequence[bytes], record: bytes) -> Sequence[bytes]:
        """Executes a mutating operation, and appends it to the log if it has changed a key; under
        the lock."""
        self._in_doubt = True
        try:
            # The table comes first: only it shows whether the operation is possible, and changes a
            # key. Until the record is written, the two differ.
            reply = self._table.apply(op, fields)
            if self._table.changed_keys:
                self._append(record)
        except (WaitRequired, DistStoreError):
            # The table raises these errors before it changes anything. If the write has failed,
            # _append() has discarded the table.
            self._in_doubt = False
            raise
        self._table.changed_keys.clear()
        self._in_doubt = False
        return reply

    def _count(self, key: bytes, amount: int) -> int:
        """Adds to one of the store's own counters; under the lock."""
        fields = (key, b"%d" % amount)
        return int(self._mutate(StoreOp.ADD, fields, pack_request(StoreOp.ADD, fields))[0])

    def is_current(self) -> bool:
        """True if the path still refers to this file."""
        try:
            found = os.lstat(self.path)
        except OSError:
            return False
        return (found.st_dev, found.st_ino) == self.identity

    def private(self) -> bool:
        """True if the open file belongs to this process's user, and no other user may open it."""
        status = os.fstat(self._fd)
        return peer_credentials.is_own(status.st_uid) and not stat.S_IMODE(status.st_mode) & 0o077

    def close(self) -> None:
        with self._thread_lock:
            if self._fd >= 0:
                os.close(self._fd)
                self._fd = -1

    def close_in_child(self) -> None:
        """Closes the descriptor in a forked child, without locks, which the parent's threads may
        hold."""
        os.close(self._fd)
        self._fd = -1

    def _with_lock(self, exclusive: bool, run: Callable[[], T]) -> T:
        """The result of ``run``, called with the locks.

        Each lock is taken within the ``try`` that releases it, and by no context manager written in
        Python: an exception of a signal's handler may come after any call.
        """
        me = threading.get_ident()
        if self._holder == me:
            raise DistStoreError(
                f"FileStore {self.path}: a signal's handler uses it within an operation"
            )
        deadline = time.monotonic() + _LOCK_SECONDS
        try:
            if not self._thread_lock.acquire(timeout=_LOCK_SECONDS):
                raise self._lock_timeout_error("a thread of this process")
            self._holder = me
            if self._fd < 0:
                raise DistStoreError(f"FileStore {self.path} has been closed")
            try:
                self._lock_file(fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH, deadline)
                return run()
            finally:
                # This has no effect if the lock was not taken.
                fcntl.lockf(self._fd, fcntl.LOCK_UN)
        finally:
            # This comes before the release, after which the holder may be another thread.
            if self._holder == me:
                self._holder = None
            try:
                self._thread_lock.release()
            except RuntimeError:
                # This thread has not acquired it.
                pass

    def _lock_file(self, kind: int, deadline: float) -> None:
        pauses = backoff(*_LOCK_PAUSES)
        while True:
            try:
                # The lock is polled: a wait for it in the kernel has no timeout, and a stopped
                # process may hold it.
                fcntl.lockf(self._fd, kind | fcntl.LOCK_NB)
                return
            # Some systems say EACCES, in place of EAGAIN, if another process has the lock.
            except (BlockingIOError, PermissionError):
                if time.monotonic() >= deadline:
                    raise self._lock_timeout_error(
                        "another process, perhaps a stopped one,"
                    ) from None
            except OSError as error:
                if raised_by_handler(error):
                    raise
                raise DistStoreError(
                    f"FileStore {self.path} cannot be locked: {error.strerror}. The file system"
                    " must have fcntl locks"
                ) from error
            time.sleep(next(pauses))

    def _lock_timeout_error(self, holder: str) -> DistStoreError:
        return DistStoreError(
            f"FileStore {self.path}: {holder} has held its lock for {_LOCK_SECONDS:g} s"
        )

    def _replay_new_records(self) -> None:
        if self._in_doubt:
            self._replay_from_start()
        size = os.fstat(self._fd).st_size
        if size < self._offset:
            raise DistStoreError(f"FileStore {self.path} has been truncated by another program")
        if size == self._offset:
            return
        if size > self._max_file_size:
            raise DistStoreError(
                f"FileStore {self.path} has {size} bytes; the maximum is {self._max_file_size} "
                "(UNICOLL_STORE_MAX_VALUE)"
            )
        if self._offset == 0:
            line = bytes(self._read(min(size, len(FIRST_LINE))))
            if line != FIRST_LINE[: len(line)]:
                raise DistStoreError(
                    f"{self.path} is not a file of a FileStore; it was not changed"
                )
            # A killed process has left a part of the line. The next writer writes all of it.
            if len(line) < len(FIRST_LINE):
                return
            self._offset = len(FIRST_LINE)
        self._in_doubt = True
        # In chunks: a file from elsewhere may be large and sparse.
        chunk = _CHUNK_SIZE
        while (left := size - self._offset) > 0:
            done = self._replay(memoryview(self._read(min(left, chunk))))
            if not done and chunk >= left:
                # The last record is not complete, since its writer was killed. The next writer
                # truncates it.
                break
            self._offset += done
            # Without a complete record the chunk is smaller than the next record.
            chunk = _CHUNK_SIZE if done else 2 * chunk
        self._in_doubt = False

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
            if size > max_request(self._max_value):
                raise DistStoreError(f"FileStore {self.path} is damaged: a record of {size} bytes")
            end = at + REQUEST.size + size
            if end > len(data):
                break
            try:
                fields = unpack_fields(data[at + REQUEST.size : end])
                self._table.apply(validate(code, fields, self._max_value), fields)
            except (MalformedError, WaitRequired, DistStoreError) as error:
                raise DistStoreError(f"FileStore {self.path} is damaged: {error}") from error
            at = end
        self._table.changed_keys.clear()
        return at

    def _append(self, record: bytes) -> None:
        """Appends a record, in place of an incomplete one."""
        data = record if self._offset else FIRST_LINE + record
        at = self._offset
        try:
            if os.fstat(self._fd).st_size > self._offset:
                os.ftruncate(self._fd, self._offset)
            while data:
                written = os.pwrite(self._fd, data, at)
                data = data[written:]
                at += written
        except OSError as error:
            if raised_by_handler(error):
                raise
            self._undo_append()
            raise DistStoreError(
                f"FileStore {self.path} cannot be written: {error.strerror}; its present keys can"
                " still be read"
            ) from error
        self._offset = at

    def _undo_append(self) -> None:
        try:
            os.ftruncate(self._fd, self._offset)
        except OSError:
            # Readers ignore incomplete records, and so this one.
            pass
        # The table has a change that is not in the file.
        self._replay_from_start()


# The lock is reentrant: the garbage collector may close one store while another one is opened.
_registry_lock = threading.RLock()
_logs: dict[tuple[int, int], FileLog] = {}


def open_log(path: str) -> FileLog:
    """The log at ``path``, shared by the handles of this process; :func:`close_log` it.

    Raises:
        DistStoreError: the file cannot be opened, is a link, or is not a regular file.
    """
    with _registry_lock:
        try:
            # The registry is by file, not by path: a second descriptor of the same file would, when
            # it is closed, release the locks of the first one.
            found = os.lstat(path)
            log = _logs.get((found.st_dev, found.st_ino))
        except OSError:
            log = None
        if log is None:
            log = _open_file(path)
            _logs[log.identity] = log
        log.handles += 1
        return log


def _open_file(path: str) -> FileLog:
    try:
        # No symbolic links: in a directory that others can write to, one may lead to any file of
        # this user.
        fd = os.open(
            path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600
        )
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise DistStoreError(
                f"FileStore {path} is a symbolic link, which is not followed"
            ) from error
        raise DistStoreError(f"FileStore {path} cannot be opened: {error.strerror}") from error
    status = os.fstat(fd)
    reason = None
    if not stat.S_ISREG(status.st_mode):
        reason = "is not a regular file"
    elif status.st_nlink > 1:
        reason = "has a second name (a hard link): it may be any file of this user"
    if reason:
        os.close(fd)
        raise DistStoreError(f"FileStore {path} {reason}")
    return FileLog(path, fd, (status.st_dev, status.st_ino))


def close_log(log: FileLog) -> None:
    """Close one handle of a log."""
    with _registry_lock:
        log.handles -= 1
        if log.handles == 0:
            _logs.pop(log.identity, None)
            log.close()


@in_child
def _clear_in_child() -> None:
    global _registry_lock
    # A thread of the parent may have held it at the fork.
    _registry_lock = threading.RLock()
    for log in _logs.values():
        log.close_in_child()
    _logs.clear()
