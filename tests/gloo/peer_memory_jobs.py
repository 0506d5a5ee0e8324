"""What the ranks of test_peer_memory.py do."""

from __future__ import annotations

import mmap
import os
from typing import Any

import numpy as np

import unicoll as dist
from gloo_fallback.shm import peer_memory
from gloo_fallback.shm.peer_memory import PeerArray
from tests.gloo.symmetric_jobs import read_from
from unicoll.arrays.conversion import as_buffer
from unicoll.backend.ops import OPS

_READS: list[int] = []
"""Bytes of each array that was copied from another process."""


def _watch() -> None:
    """Note in _READS what is copied from other processes."""
    if hasattr(PeerArray.copy_to, "watched"):
        return
    copy_to = PeerArray.copy_to

    def watched(self: PeerArray, target: Any) -> None:
        copy_to(self, target)
        _READS.append(target.nbytes)

    watched.watched = True  # type: ignore[attr-defined]
    PeerArray.copy_to = watched  # type: ignore[method-assign]


def bytes_read(nbytes: int, minimum: int | None = None) -> int:
    """Bytes that this rank copies from other processes in an all_gather of ``nbytes``, with the usual threshold."""
    _watch()
    rank, size = dist.get_rank(), dist.get_world_size()
    if minimum is not None:
        read_from(minimum)
    whole, part = np.empty(nbytes, np.uint8), np.full(nbytes // size, rank, np.uint8)
    _READS.clear()
    dist.all_gather_into_tensor(whole, part)
    assert (whole == np.repeat(np.arange(size, dtype=np.uint8), nbytes // size)).all()
    return sum(_READS)


def out_of_place(count: int) -> int:
    """An all_reduce whose output is another array, as device arrays in host memory have it; returns the bytes read."""
    _watch()
    read_from(1)
    rank, size = dist.get_rank(), dist.get_world_size()
    _READS.clear()
    group = dist.group.WORLD
    source = np.arange(count) * (rank + 1)
    out = np.empty_like(source)
    buffers = [(as_buffer(array, "test"),) for array in (source, out)]
    group._dispatcher.start(group._settings, OPS["all_reduce"], *buffers, False, None, dist.ReduceOp.SUM)
    assert (source == np.arange(count) * (rank + 1)).all()
    assert (out == np.arange(count) * (size * (size + 1) // 2)).all()
    return sum(_READS)


def refused_by_the_system(rank: int, size: int, folder: str, odd: int) -> tuple[int, str]:
    """The kernel forbids one rank to read the others' memory; bytes read then, and how the group works."""
    _watch()

    def refused(*args: Any) -> int:
        peer_memory.ctypes.set_errno(1)
        return -1

    if rank == odd:
        peer_memory._read = refused
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size)
    dist.barrier()
    read_from(1)
    found = bytes_read(6 << 20)
    text = dist.explain()
    dist.destroy_process_group()
    return found, text


def reads_of(fast: bool, rank: int, size: int, folder: str) -> tuple[int, int]:
    """Bytes read in an all_gather and in a scatter.

    Args:
        fast: what this rank has measured.
    """
    _watch()
    peer_memory._reads_are_fast = fast
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size)
    large = 32 << 20
    gathered = bytes_read(large)
    out = np.empty(large // size, np.uint8)
    parts = [np.full(large // size, r, np.uint8) for r in range(size)] if rank == 0 else None
    _READS.clear()
    dist.scatter(out, parts)
    assert (out == rank).all()
    scattered = sum(_READS)
    dist.destroy_process_group()
    return gathered, scattered


def _new_group_reads() -> bool:
    """True if the ranks of a new group read large arrays from each other."""
    group: Any = dist.new_group()
    dist.barrier(group=group)
    reads = bool(group._dispatcher._backends.host._transport.slots.may_read(1 << 30))
    dist.destroy_process_group(group)
    return reads


def measurements() -> bool:
    """True if the first group has measured how fast reading is, and another group reads or not, accordingly.

    That group does not measure again.
    """
    copy = peer_memory._copy

    def without_samples(pid: int, source: int, target: int, nbytes: int) -> None:
        assert nbytes != peer_memory._SAMPLE, "measured again"
        copy(pid, source, target, nbytes)

    dist.barrier()
    measured = peer_memory._reads_are_fast
    peer_memory._copy = without_samples
    reads = _new_group_reads()
    return measured is not None and (measured or not reads)


def unreadable_sample(odd: int) -> tuple[bool, bool | None]:
    """One rank cannot read while it times that, as if the other had ended; whether the group reads, and the result."""
    copy = peer_memory._copy

    def failing(pid: int, source: int, target: int, nbytes: int) -> None:
        if nbytes == peer_memory._SAMPLE:
            raise ProcessLookupError(3, "No such process")
        copy(pid, source, target, nbytes)

    dist.barrier()
    peer_memory._reads_are_fast = True
    if dist.get_rank() == odd:
        peer_memory._reads_are_fast = None
        peer_memory._copy = failing
    return _new_group_reads(), peer_memory._reads_are_fast


def unusual_memory() -> list[int]:
    """Arrays in a file, in shared and in private memory, not at the start of a page; bytes read of each."""
    _watch()
    read_from(1)
    rank, size = dist.get_rank(), dist.get_world_size()
    found = []
    descriptor = os.memfd_create("test", os.MFD_CLOEXEC)
    os.ftruncate(descriptor, 2 << 20)
    for memory in (
        mmap.mmap(descriptor, 2 << 20),
        mmap.mmap(-1, 2 << 20),
        mmap.mmap(-1, 2 << 20, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS),
    ):
        array = np.frombuffer(memory, np.float32)[1:]
        array[:] = rank + 1
        _READS.clear()
        dist.all_reduce(array)
        assert (array == size * (size + 1) / 2).all()
        found.append(sum(_READS))
    os.close(descriptor)
    return found


def array_is_gone(odd: int) -> str:
    """One rank's read fails in the middle, as if the other one had freed its array; returns the error."""
    read_from(1)
    group = dist.new_group()
    dist.barrier(group=group)
    backends: Any = group._dispatcher._backends
    backends.host._transport.slots.peers.minimum = 1
    if dist.get_rank() == odd:
        copy_to = PeerArray.copy_to

        def failing(self: PeerArray, target: Any) -> None:
            PeerArray.copy_to = copy_to  # type: ignore[method-assign]
            PeerArray(self.pid, 4096, self.size, self.dtype).copy_to(target)

        PeerArray.copy_to = failing  # type: ignore[method-assign]
    try:
        dist.all_reduce(np.ones(1 << 20, np.float32), group=group, timeout=20)
        return "none"
    except dist.DistError as e:
        return f"{type(e).__name__}: {e}"
    finally:
        dist.destroy_process_group(group)


def mismatch(how: str) -> str:
    """One rank makes another call on a large array."""
    group = dist.new_group()
    dist.barrier(group=group)
    backends: Any = group._dispatcher._backends
    backends.host._transport.slots.peers.minimum = 1
    array = np.ones(200_000, np.float32)
    try:
        if dist.get_rank() != 1:
            dist.all_reduce(array, group=group)
        elif how == "operation":
            dist.broadcast(array, src=0, group=group)
        elif how == "size":
            dist.all_reduce(array[:-1], group=group)
        else:
            dist.all_reduce(array[:8], group=group)
        return "none"
    except dist.CollectiveMismatchError as e:
        return str(e)
    finally:
        dist.destroy_process_group(group)
