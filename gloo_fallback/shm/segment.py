"""Shared memory between the ranks of one host: a memfd, which the kernel frees with its last user.

One rank creates the memfd and publishes its address; the others open it through ``/proc``, which
the kernel allows only to processes of the same user. The memfd has no name in a file system, so
nothing remains however the processes end, and the size of /dev/shm is irrelevant.
"""

from __future__ import annotations

import ctypes
import errno
import json
import mmap
import os
import platform
import secrets
import time
import weakref
from collections.abc import Callable
from typing import Any

from gloo_fallback.shm import futex
from unicoll.backend import Context
from unicoll.net.objects.received_json import from_store
from unicoll.process import environment
from unicoll.process.host_identity import boot_id
from unicoll.process.timeouts import backoff

_NAME = "unicoll"
_TOKEN = 32
"""Bytes of the random token at the start, which identifies the segment behind a descriptor
number."""


class SharedSegment:
    """A mapped segment of shared memory.

    The mapping lives as long as any view of ``memory``. It needs no descriptor:
    :meth:`close_descriptor` is called once all ranks have mapped the segment.

    Attributes:
        descriptor: of the memfd, which the segment closes; -1 once it is closed.
        memory: the whole mapping, once it is mapped; user data starts at ``SharedSegment.START``.
        address: start address of the mapping in this process.
    """

    START = 4096
    descriptor = -1

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self.address = 0
        self.memory = memoryview(b"")

    # An exception of a signal's handler may end the creation of the segment, or its publication, at
    # any point. Then nobody calls close(), and the descriptor would stay open.
    def __del__(self) -> None:
        self.close_descriptor()

    def map(self, size: int) -> None:
        """Map the memory.

        Raises:
            OSError: there is not enough.
        """
        address = _mmap(
            None, size, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, self.descriptor, 0
        )
        if address == ctypes.c_void_p(-1).value:
            error = ctypes.get_errno()
            raise OSError(error, os.strerror(error))
        block = (ctypes.c_ubyte * size).from_address(address)
        # This is used in place of mmap.mmap, which keeps a descriptor, and does not close while the
        # traceback of an error holds a view. Nothing is unmapped at the exit of the interpreter:
        # arrays and threads may still use the memory, and the kernel unmaps it when the process
        # ends.
        weakref.finalize(block, _munmap, address, size).atexit = False
        self.address = address
        self.memory = memoryview(block).cast("B")

    def close_descriptor(self) -> None:
        """Close the descriptor: no other process can map the segment any more. Idempotent."""
        # The attribute is cleared first. An exception of a signal's handler may come right after
        # os.close, and __del__ runs later: it would close the number again, which may by then be
        # that of another file.
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def close(self) -> None:
        """Release the memory: it is unmapped with the last view."""
        self.close_descriptor()
        self.memory = memoryview(b"")


_libc = ctypes.CDLL(None, use_errno=True)
_mmap = _libc.mmap
_mmap.restype = ctypes.c_void_p
_mmap.argtypes = (
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
)
_munmap = _libc.munmap
_munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)


def can_share() -> str | None:
    """The reason why this process cannot share memory with others of its host, or None if it
    can."""
    if not hasattr(os, "memfd_create"):
        return "this kernel has no memfd"
    if not futex.has_futex():
        return f"{platform.machine()} is not supported by this version"
    try:
        boot_id()
    except OSError:
        return "there is no /proc, by which processes map each other's memory"
    return None


def has_strong_ordering() -> bool:
    """True if this processor makes stores visible in program order, so that plain flags suffice.

    ``UNICOLL_MEMORY_ORDER=weak`` makes it False, to test the code for other processors.
    """
    if environment.choice("UNICOLL_MEMORY_ORDER") == "weak":
        return False
    return platform.machine() in ("x86_64", "AMD64")


def create_published(
    context: Context, name: str, size: int, prepare: Callable[[SharedSegment], None]
) -> SharedSegment | None:
    """Create a segment and publish it under ``name``; None (published too) if no memory is
    available.

    ``prepare`` initializes the contents before the segment is published.
    """
    segment = location = None
    # The contents are initialized before the address is published, because another rank may map and
    # use the segment from then on. An error is published, too: the other ranks wait for the key.
    try:
        segment, location = create_offer(size)
        prepare(segment)
    except OSError:
        if segment is not None:
            segment.close()
        segment = location = None
    context.job.store.set(f"shm/{context.name}/{name}", json.dumps(location))
    return segment


def create_private(size: int) -> SharedSegment:
    """A segment that no other process maps."""
    segment = _create(size)
    segment.close_descriptor()
    return segment


def _create(size: int) -> SharedSegment:
    segment = SharedSegment(os.memfd_create(_NAME, os.MFD_CLOEXEC))
    # The kernel creates a memfd with all permissions for all users. Without them other users are
    # refused also where the kernel would let them follow the link in /proc.
    os.fchmod(segment.descriptor, 0o600)
    os.ftruncate(segment.descriptor, size)
    segment.map(size)
    return segment


def open_published(context: Context, name: str, check: Callable[[], None]) -> SharedSegment | None:
    """Map the segment that another rank has published; None if it cannot be mapped.

    ``check`` is called while waiting for that rank; it raises to stop the wait.
    """
    pauses = backoff(0.0005, 0.05)
    # The store is asked again and again, instead of once with a timeout, so that the check notices
    # a failure of the group, the deadline, and the end of that rank.
    while (published := context.job.store.try_get(f"shm/{context.name}/{name}")) is None:
        check()
        time.sleep(next(pauses))
    location = from_store(f"address of memory {name}", published, dict | None)
    if location is None:
        return None
    try:
        return open_offer(location)
    except OSError:
        # That process is on another host, in another container or of another user, or there is no
        # memory. None of these is an error: the ranks of this node use sockets then.
        return None


def create_offer(size: int) -> tuple[SharedSegment, dict[str, Any]]:
    """Create a segment for other processes; returns it and its address for :func:`open_offer`.

    Raises:
        OSError: no descriptor or no memory is available.
    """
    # A descriptor number alone does not identify the memory: the process may have closed it, and
    # opened another segment with the same number.
    token = secrets.token_hex(_TOKEN // 2)
    where = {"boot": boot_id(), "pid": os.getpid(), "size": size, "token": token}
    segment = _create(size)
    segment.memory[:_TOKEN] = token.encode()
    return segment, where | {"fd": segment.descriptor}


def open_offer(location: dict[str, Any]) -> SharedSegment:
    """Map the segment of another process, which must keep its descriptor open until then.

    The address may come from a store that other users can write to: only a memfd of this library is
    mapped.

    Raises:
        OSError: it cannot be opened by this process, or it is another file.
    """
    # The numbers are converted before they are put into a path, so that a text such as "../../file"
    # cannot lead to another file.
    try:
        pid, fd, size = (int(location[name]) for name in ("pid", "fd", "size"))
        token = str(location["token"]).encode()
        same_boot = location["boot"] == boot_id()
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise FileNotFoundError(
            errno.ENOENT, f"{location!r} is not a valid address of shared memory"
        ) from error
    if not same_boot:
        raise FileNotFoundError(errno.ENOENT, "the segment is on another machine")
    # O_NONBLOCK: a wrong address may name any open file of that process, for example a terminal or
    # a device whose opening waits.
    segment = SharedSegment(
        os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
    )
    status = os.fstat(segment.descriptor)
    is_own_memfd = (
        # The kernel lets root open those of other users, who may be able to write addresses to the
        # store.
        status.st_uid == os.geteuid()
        and status.st_nlink == 0
        and os.readlink(f"/proc/self/fd/{segment.descriptor}") == f"/memfd:{_NAME} (deleted)"
    )
    # The size is compared before anything is mapped: touching a mapping beyond the end of the file
    # raises SIGBUS, which ends the process.
    found = is_own_memfd and status.st_size == size and size >= _TOKEN and len(token) == _TOKEN
    if found:
        segment.map(size)
        found = segment.memory[:_TOKEN] == token
    segment.close_descriptor()
    if not found:
        raise FileNotFoundError(errno.ENOENT, "not a shared segment of this library")
    return segment
