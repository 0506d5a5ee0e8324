"""Shared memory between the ranks of a group on one host: a memfd that vanishes with its last user.

The group's first rank makes the memfd and publishes where it is; the others open it through ``/proc``, which the
kernel allows to processes of the same user only. There is no name in any file system, so nothing can be left behind,
however the processes end, and the size of /dev/shm does not matter.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import platform
import secrets
import time
import weakref
from collections.abc import Callable

from unicoll.backend import Context

__all__ = ["Segment", "can_share", "create", "open_published"]

_TOKEN = 32
"""Bytes at the start that tell the segment from any other file behind the same descriptor number."""


class Segment:
    """A mapped piece of shared memory.

    The mapping lives as long as any view of ``memory`` does; no descriptor is needed for that, so
    :meth:`close_descriptor` as soon as everybody has mapped it.

    Attributes:
        memory: the whole mapping; user data starts at ``Segment.START``.
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
    """Why ranks of this machine cannot share memory, or None if they can.

    The flags rely on stores becoming visible in program order, which x86 guarantees and other processors do not.
    """
    if os.environ.get("UNICOLL_TRANSPORT", "").lower() == "tcp":
        return "UNICOLL_TRANSPORT=tcp"
    if platform.machine() not in ("x86_64", "AMD64"):
        return f"the memory order of {platform.machine()} needs more than plain flags"
    if not hasattr(os, "memfd_create"):
        return "this kernel has no memfd"
    return None


def _boot() -> str:
    with open("/proc/sys/kernel/random/boot_id") as file:
        return file.read().strip()


def create(context: Context, size: int, willing: bool) -> Segment | None:
    """Make the group's segment and publish it; None (published too) if not willing, or out of memory."""
    key = f"shm/{context.name}"
    if not willing:
        context.job.store.set(key, json.dumps(None))
        return None
    try:
        descriptor = os.memfd_create("unicoll", os.MFD_CLOEXEC)
        segment = _sized(descriptor, size)
    except OSError:
        context.job.store.set(key, json.dumps(None))
        return None
    token = secrets.token_hex(_TOKEN // 2)
    segment.memory[:_TOKEN] = token.encode()
    where = {"boot": _boot(), "pid": os.getpid(), "fd": descriptor, "size": size, "token": token}
    context.job.store.set(key, json.dumps(where))
    return segment


def _sized(descriptor: int, size: int) -> Segment:
    try:
        os.fchmod(descriptor, 0o600)
        os.ftruncate(descriptor, size)
    except OSError:
        os.close(descriptor)
        raise
    return Segment(descriptor, size)


def open_published(context: Context, check: Callable[[], None]) -> Segment | None:
    """Map the segment that the group's first rank made; None where that is not possible.

    ``check`` is called while waiting for the first rank, and raises to give up.
    """
    pause = 0.0005
    while (found := context.job.store.try_get(f"shm/{context.name}")) is None:
        check()
        time.sleep(pause)
        pause = min(2 * pause, 0.05)
    where = json.loads(found)
    if where is None or where["boot"] != _boot():
        return None
    try:
        descriptor = os.open(f"/proc/{where['pid']}/fd/{where['fd']}", os.O_RDWR | os.O_CLOEXEC)
        segment = Segment(descriptor, where["size"])
    except OSError:
        return None  # another container or user, or no room
    if segment.memory[:_TOKEN] != where["token"].encode():
        segment.close()
        return None
    return segment
