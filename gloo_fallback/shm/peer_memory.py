"""Arrays in the memory of other processes of this host, read by ``process_vm_readv`` (Linux, "cross-memory attach").

The kernel copies from one process to the other, so large data need no copy into shared memory. It allows that to a
process that may trace the other one (ptrace(2), "Ptrace access mode checking"): by default one of the same user. Yama's
``ptrace_scope`` and some containers forbid it; the group then uses its slots.
"""

from __future__ import annotations

import ctypes
import os
import secrets
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from unicoll.arrays.kernels import Flat
from unicoll.net import settings

if TYPE_CHECKING:
    from gloo_fallback.shm.slots import Slots

READ_MIN, OVERSUBSCRIBED_READ_MIN = 1 << 22, 1 << 24
"""Bytes of a collective from which reading is faster than slots; the second one if ranks outnumber cores."""
_TOKEN = np.dtype(np.int64)


class _Range(ctypes.Structure):
    """``struct iovec``."""

    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


_read = getattr(ctypes.CDLL(None, use_errno=True), "process_vm_readv", None)
if _read is not None:
    _ranges, _count = ctypes.POINTER(_Range), ctypes.c_ulong
    _read.restype = ctypes.c_ssize_t
    _read.argtypes = (ctypes.c_int, _ranges, _count, _ranges, _count, _count)


def address_of(array: Flat) -> int:
    """The address of an array's first element."""
    address: int = array.__array_interface__["data"][0]
    return address


class PeerArray:
    """A one-dimensional array in the memory of another process, which keeps it until all have read it.

    Args:
        pid: of the process.
        address: there.
        size: elements.
        dtype: their type.
    """

    __slots__ = ("address", "dtype", "pid", "size")

    def __init__(self, pid: int, address: int, size: int, dtype: np.dtype[Any]) -> None:
        self.pid = pid
        self.address = address
        self.size = size
        self.dtype = dtype

    def __getitem__(self, part: slice) -> PeerArray:
        start, stop, _ = part.indices(self.size)
        item = self.dtype.itemsize
        return PeerArray(self.pid, self.address + start * item, max(stop - start, 0), self.dtype)

    def copy_to(self, target: Flat) -> None:
        """Copy to an array of this process of the same size and type.

        Raises:
            OSError: the process has ended, or has no memory there.
        """
        _copy(self.pid, self.address, address_of(target), target.nbytes)


class PeerMemory:
    """The memory of the other ranks of this host.

    Args:
        pids: of the ranks of this host, in their order.
        minimum: bytes of a collective from which to read it.
    """

    def __init__(self, pids: list[int], minimum: int) -> None:
        self._pids = pids
        self.minimum = minimum

    def arrays(
        self, addresses: Sequence[int], counts: Sequence[int], dtype: np.dtype[Any]
    ) -> list[PeerArray]:
        """One array of each rank of this host, of ``counts`` elements."""
        return [PeerArray(*at, dtype) for at in zip(self._pids, addresses, counts, strict=True)]


def find_peer_memory(slots: Slots, oversubscribed: bool) -> PeerMemory | None:
    """The memory of the ranks of ``slots``; None on all of them if one cannot read another's. They all call this."""
    if slots.size == 1:
        return None
    token = np.frombuffer(secrets.token_bytes(_TOKEN.itemsize), _TOKEN)
    enabled = _read is not None and settings.choice("UNICOLL_PEER_MEMORY") == "auto"
    minimum = OVERSUBSCRIBED_READ_MIN if oversubscribed else READ_MIN
    slots.slot(slots.rank, 0, 5, _TOKEN)[:] = (enabled, os.getpid(), address_of(token), token[0], minimum)
    slots.sync_step()
    rows = [slots.slot(rank, 0, 5, _TOKEN, 0).tolist() for rank in range(slots.size)]
    # in another namespace of processes the number may be that of another one: the token shows that
    able = enabled and all(
        row[0] and _reads(row[1], row[2], row[3]) for rank, row in enumerate(rows) if rank != slots.rank
    )
    if not slots.sync_step_checked(None, 0 if able else -1):
        return None
    return PeerMemory([row[1] for row in rows], max(row[4] for row in rows))


def is_readable(array: Flat) -> bool:
    """True if other processes can read an array of this one; false for memory that a device driver has mapped."""
    if not array.nbytes:
        return True
    assert _read is not None
    start, copies = address_of(array), np.empty(2, np.uint8)
    near = _Range(address_of(copies), 2)
    first_and_last = (_Range * 2)(_Range(start, 1), _Range(start + array.nbytes - 1, 1))
    return bool(_read(os.getpid(), ctypes.byref(near), 1, first_and_last, 2, 0) == 2)


def _reads(pid: int, address: int, expected: int) -> bool:
    found = np.zeros(1, _TOKEN)
    try:
        _copy(pid, address, address_of(found), found.nbytes)
    except OSError:
        return False
    return bool(found[0] == expected)


def _copy(pid: int, source: int, target: int, nbytes: int) -> None:
    assert _read is not None
    done = 0
    while done < nbytes:
        near, far = _Range(target + done, nbytes - done), _Range(source + done, nbytes - done)
        count = _read(pid, ctypes.byref(near), 1, ctypes.byref(far), 1, 0)
        if count <= 0:
            error = ctypes.get_errno()
            raise OSError(error, os.strerror(error))
        done += count
