"""Arrays in the memory of other processes of this host, read by ``process_vm_readv`` (Linux,
"cross-memory attach").

The kernel copies from one process to the other, so large data need no copy into shared memory. It
allows that to a process that may trace the other one (ptrace(2), "Ptrace access mode checking"): by
default one of the same user. Yama's ``ptrace_scope`` and some containers forbid it; the group then
uses its slots.
"""

from __future__ import annotations

import ctypes
import os
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from unicoll.arrays.kernels import Flat
from unicoll.process import environment, logs

if TYPE_CHECKING:
    from gloo_fallback.shm.slots import Slots

log = logs.logger("gloo")

READ_MIN, OVERSUBSCRIBED_READ_MIN = 1 << 22, 1 << 24
"""Bytes of a collective from which reading is faster than slots where the system reads fast; the
second one if ranks outnumber cores."""
SLOW_SCATTER_MIN = 1 << 24
"""The same for a scatter where it reads slowly: through the slots the root makes all copies one
after the other."""
# No collective has as many bytes, so only scatters are read.
_NEVER = 1 << 62
_SAMPLE = 1 << 18
_TIMED_COPIES = 5
# It is None until the first group of the process has measured it. It depends on the processor and
# the system only, so later groups use the same result.
_reads_are_fast: bool | None = None
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


@dataclass(frozen=True, slots=True)
class PeerArray:
    """A one-dimensional array in the memory of another process, which keeps it until all have read
    it.

    Attributes:
        pid: of the process.
        address: there.
        size: elements.
        dtype: their type.
    """

    pid: int
    address: int
    size: int
    dtype: np.dtype[Any]

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


@dataclass
class PeerMemory:
    """The memory of the other ranks of this host.

    Attributes:
        pids: of the ranks of this host, in their order.
        minimum, scatter_minimum: bytes of a collective, and of a scatter, from which to read it.
    """

    pids: list[int]
    minimum: int
    scatter_minimum: int

    def arrays(
        self, addresses: Sequence[int], counts: Sequence[int], dtype: np.dtype[Any]
    ) -> list[PeerArray]:
        """One array of each rank of this host, of ``counts`` elements."""
        return [PeerArray(*at, dtype) for at in zip(self.pids, addresses, counts, strict=True)]


def find_peer_memory(slots: Slots, oversubscribed: bool) -> PeerMemory | None:
    """The memory of the ranks of ``slots``; None on all of them if one cannot read another's. They
    all call this."""
    if slots.size == 1:
        return None
    setting = environment.choice("UNICOLL_PEER_MEMORY")
    # The protocol has three steps. The first publishes the address of a random number in the memory
    # of each process. Between the first and the second each rank reads those of all others, and the
    # second tells all ranks whether every read has succeeded. Between the second and the third each
    # rank measures, unless its process has done so. The third makes the decision the same on all
    # ranks, which may have measured differently. The sample is alive until then, since others read
    # it.
    sample = np.frombuffer(secrets.token_bytes(_TOKEN.itemsize), _TOKEN).repeat(
        _SAMPLE // _TOKEN.itemsize
    )
    enabled = _read is not None and setting != "off"
    minimum = OVERSUBSCRIBED_READ_MIN if oversubscribed else READ_MIN
    slots.next_slot(slots.rank, 0, 5, _TOKEN)[:] = (
        enabled,
        os.getpid(),
        address_of(sample),
        sample[0],
        minimum,
    )
    slots.sync_step()
    rows = [slots.last_slot(rank, 0, 5, _TOKEN).tolist() for rank in range(slots.size)]
    # In another namespace of processes the number may be that of another process, which may even
    # have readable memory at this address. The random number shows that.
    able = enabled and all(
        row[0] and _reads(row[1], row[2], row[3])
        for rank, row in enumerate(rows)
        if rank != slots.rank
    )
    if not slots.sync_step_checked(None, 0 if able else -1):
        return None
    fast = setting == "always" or _measure_reading(slots, *rows[slots.rank - 1][1:3])
    fast = slots.sync_step_checked(None, 0 if fast else -1)
    # The ranks may differ in whether they outnumber their cores. Every rank has to choose the same
    # way for a collective, so the largest minimum holds for all.
    pids, minimum = [row[1] for row in rows], max(row[4] for row in rows)
    return (
        PeerMemory(pids, minimum, minimum) if fast else PeerMemory(pids, _NEVER, SLOW_SCATTER_MIN)
    )


def _measure_reading(slots: Slots, pid: int, address: int) -> bool:
    """True if the system copies a sample from another rank in less time than it takes to a slot and
    from a slot.

    That depends on the processor and the system, so a process measures it once. The slots hold
    nothing else then.
    """
    global _reads_are_fast
    if _reads_are_fast is not None:
        return _reads_are_fast
    near = np.empty(_SAMPLE // _TOKEN.itemsize, _TOKEN)
    # The contents do not matter, so it does no harm that the other rank writes its slot at the same
    # time.
    own, other = (
        slots.next_slot(rank, 0, near.size, _TOKEN) for rank in (slots.rank, slots.rank - 1)
    )
    reads, copies = [], []
    for _ in range(_TIMED_COPIES):
        start = time.perf_counter()
        try:
            _copy(pid, address, address_of(near), near.nbytes)
        except OSError:
            # The other rank has ended, which the next step reports. The result is not kept: it says
            # nothing about the system, so that the next group measures again.
            return False
        read = time.perf_counter()
        own[:] = near
        near[:] = other
        copied = time.perf_counter()
        reads.append(read - start)
        copies.append(copied - read)
    _reads_are_fast = min(reads) < min(copies)
    log.debug(
        "reading %d KiB of another rank's memory takes %.0f us, copies to and from shared memory"
        " %.0f us",
        _SAMPLE >> 10,
        min(reads) * 1e6,
        min(copies) * 1e6,
    )
    return _reads_are_fast


def is_readable(array: Flat) -> bool:
    """True if other processes can read an array of this one; false for memory that a device driver
    has mapped."""
    if not array.nbytes:
        return True
    assert _read is not None
    start, copies = address_of(array), np.empty(2, np.uint8)
    # Only the first and the last byte are tested. If memory between them cannot be read, the read
    # fails in the call, and with it the group (Slots.unreadable).
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
    # One call moves at most 2 GiB, and stops before a page that it cannot read. The next call then
    # returns the error.
    while done < nbytes:
        near, far = _Range(target + done, nbytes - done), _Range(source + done, nbytes - done)
        count = _read(pid, ctypes.byref(near), 1, ctypes.byref(far), 1, 0)
        if count <= 0:
            error = ctypes.get_errno()
            raise OSError(error, os.strerror(error))
        done += count
