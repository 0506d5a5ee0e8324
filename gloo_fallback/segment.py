"""Shared memory between the ranks of one host: a memfd that vanishes with its last user.

One rank makes the memfd and publishes where it is; the others open it through ``/proc``, which the
kernel allows to processes of the same user only. There is no name in any file system, so nothing can be left behind,
however the processes end, and the size of /dev/shm does not matter.
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

from unicoll import settings
from unicoll.backend import Context

from . import bells

__all__ = [
    "Segment",
    "boot_id",
    "can_share",
    "create",
    "keeps_order",
    "offered",
    "open_published",
    "private",
    "taken",
]

_NAME = "unicoll"
_TOKEN = 32
"""Bytes at the start that tell the segment from any other file behind the same descriptor number."""


class Segment:
    """A mapped piece of shared memory.

    The mapping lives as long as any view of ``memory`` does; no descriptor is needed for that, so
    :meth:`close_descriptor` as soon as everybody has mapped it.

    Attributes:
        memory: the whole mapping; user data starts at ``Segment.START``.
        address: where the mapping begins in this process.
    """

    START = 4096

    def __init__(self, descriptor: int, size: int) -> None:
        self._descriptor = descriptor
        address = _mmap(None, size, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, descriptor, 0)
        if address == ctypes.c_void_p(-1).value:
            error = ctypes.get_errno()
            os.close(descriptor)
            raise OSError(error, os.strerror(error))
        block = (ctypes.c_ubyte * size).from_address(address)
        # not mmap.mmap: that keeps a descriptor, and refuses to close while an error's traceback holds a view
        weakref.finalize(block, _munmap, address, size).atexit = False
        self.address: int = address
        self.memory = memoryview(block).cast("B")

    def close_descriptor(self) -> None:
        """Nobody else can map the segment any more; idempotent."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def close(self) -> None:
        """Let go: it is unmapped with the last view."""
        self.close_descriptor()
        self.memory = memoryview(b"")


_libc = ctypes.CDLL(None, use_errno=True)
_mmap = _libc.mmap
_mmap.restype = ctypes.c_void_p
_mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
_munmap = _libc.munmap
_munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)


def can_share() -> str | None:
    """Why this process cannot share memory with others of its host, or None if it can."""
    if not hasattr(os, "memfd_create"):
        return "this kernel has no memfd"
    if not bells.has_futex():
        return f"{platform.machine()} is not known to this version"
    return None


def keeps_order() -> bool:
    """Whether this processor makes stores visible in program order, so that plain flags will do.

    ``UNICOLL_MEMORY_ORDER=weak`` says no, for tests of what other processors do.
    """
    if settings.choice("UNICOLL_MEMORY_ORDER") == "weak":
        return False
    return platform.machine() in ("x86_64", "AMD64")


def boot_id() -> str:
    """Tells this boot of this machine from every other."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        return file.read().strip()


def create(context: Context, name: str, size: int, prepare: Callable[[Segment], None]) -> Segment | None:
    """Make a segment and publish it under ``name``; None (published too) where there is no memory for it.

    ``prepare`` sets up what is in it before anybody else sees it.
    """
    key = f"shm/{context.name}/{name}"
    try:
        descriptor = os.memfd_create(_NAME, os.MFD_CLOEXEC)
        segment = _sized(descriptor, size)
        prepare(segment)
    except OSError:
        context.job.store.set(key, json.dumps(None))
        return None
    token = secrets.token_hex(_TOKEN // 2)
    segment.memory[:_TOKEN] = token.encode()
    where = {"boot": boot_id(), "pid": os.getpid(), "fd": descriptor, "size": size, "token": token}
    context.job.store.set(key, json.dumps(where))
    return segment


def private(size: int) -> Segment:
    """Memory like a shared segment's that nobody else maps."""
    segment = _sized(os.memfd_create(_NAME, os.MFD_CLOEXEC), size)
    segment.close_descriptor()
    return segment


def _sized(descriptor: int, size: int) -> Segment:
    try:
        os.fchmod(descriptor, 0o600)
        os.ftruncate(descriptor, size)
    except OSError:
        os.close(descriptor)
        raise
    return Segment(descriptor, size)


def open_published(context: Context, name: str, check: Callable[[], None]) -> Segment | None:
    """Map the segment that another rank made; None where that is not possible.

    ``check`` is called while waiting for that rank, and raises to give up.
    """
    pause = 0.0005
    while (found := context.job.store.try_get(f"shm/{context.name}/{name}")) is None:
        check()
        time.sleep(pause)
        pause = min(2 * pause, 0.05)
    where = json.loads(found)
    if where is None:
        return None
    try:
        return taken(where)
    except OSError:
        return None  # another host, container or user, or no room


def offered(size: int) -> tuple[Segment, dict[str, Any]]:
    """Make a segment for one other process; where that one finds it (:func:`taken`).

    Raises:
        OSError: there is no descriptor or no memory for it.
    """
    descriptor = os.memfd_create(_NAME, os.MFD_CLOEXEC)
    segment = _sized(descriptor, size)
    token = secrets.token_hex(_TOKEN // 2)
    segment.memory[:_TOKEN] = token.encode()
    return segment, {"boot": boot_id(), "pid": os.getpid(), "fd": descriptor, "size": size, "token": token}


def taken(where: dict[str, Any]) -> Segment:
    """Map what another process has made, which must keep its descriptor open until then.

    The address may come from a store that others can write to: nothing but a memfd of ours is mapped.

    Raises:
        OSError: it cannot be opened here, or something else is there.
    """
    try:
        pid, fd, size = (int(where[name]) for name in ("pid", "fd", "size"))
        token = str(where["token"]).encode()
        here = where["boot"] == boot_id()
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise FileNotFoundError(errno.ENOENT, f"{where!r} is no address of shared memory") from error
    if not here:
        raise FileNotFoundError(errno.ENOENT, "it is on another machine")
    descriptor = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
    status = os.fstat(descriptor)
    ours = status.st_nlink == 0 and os.readlink(f"/proc/self/fd/{descriptor}") == f"/memfd:{_NAME} (deleted)"
    # A mapping beyond a file's end is a crash when it is touched.
    if not ours or status.st_size != size or size < _TOKEN or len(token) != _TOKEN:
        os.close(descriptor)
        raise FileNotFoundError(errno.ENOENT, "something else is there")
    segment = Segment(descriptor, size)
    if segment.memory[:_TOKEN] != token:
        segment.close()
        raise FileNotFoundError(errno.ENOENT, "something else is there")
    segment.close_descriptor()
    return segment
