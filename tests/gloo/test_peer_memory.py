"""Large arrays that ranks read from each other's processes: when they do, and failures; results: test_symmetric.py."""

from __future__ import annotations

import mmap
import os
from typing import Any

import numpy as np
import pytest

import unicoll as dist
from gloo_fallback.shm import process_memory
from gloo_fallback.shm.process_memory import PeerArray
from tests.gloo.symmetric_jobs import read_from
from tests.support.on_ranks import on_ranks
from unicoll.arrays.conversion import as_buffer
from unicoll.calls.ops import OPS

_READS: list[int] = []
"""Bytes of each array that was copied from another process."""


def _watch() -> None:
    """Note in _READS what is copied from other processes."""
    _READS.clear()
    if hasattr(PeerArray.copy_to, "watched"):
        return
    copy_to = PeerArray.copy_to

    def watched(self: PeerArray, target: Any) -> None:
        copy_to(self, target)
        _READS.append(target.nbytes)

    watched.watched = True  # type: ignore[attr-defined]
    PeerArray.copy_to = watched  # type: ignore[method-assign]


def _bytes_read(nbytes: int) -> int:
    """Bytes that this rank copies from other processes in an all_gather of ``nbytes``."""
    rank, size = dist.get_rank(), dist.get_world_size()
    whole, part = np.empty(nbytes, np.uint8), np.full(nbytes // size, rank, np.uint8)
    _watch()
    dist.all_gather_into_tensor(whole, part)
    assert (whole == np.repeat(np.arange(size, dtype=np.uint8), nbytes // size)).all()
    return sum(_READS)


@pytest.mark.parametrize("size", [2, 3])
@on_ranks()
def test_an_output_that_is_not_the_input(size: int) -> None:
    """An all_reduce as of device arrays in host memory."""
    read_from(1)
    rank, count, group = dist.get_rank(), 100_003, dist.group.WORLD
    source = np.arange(count) * (rank + 1)
    out = np.empty_like(source)
    buffers = [(as_buffer(array, "test"),) for array in (source, out)]
    _watch()
    group._dispatcher.start(group._settings, OPS["all_reduce"], *buffers, False, None, dist.ReduceOp.SUM)  # type: ignore[union-attr]
    assert (source == np.arange(count) * (rank + 1)).all()
    assert (out == np.arange(count) * (size * (size + 1) // 2)).all()
    # of each other rank this rank's part of the input, and that rank's part of the result
    part = count * (rank + 1) // size - count * rank // size
    assert sum(_READS) == 8 * ((size - 1) * part + count - part)


@on_ranks(3)
def test_arrays_below_the_threshold_take_the_slots() -> None:
    nbytes = 6 << 20
    read_from(nbytes + 1)
    assert _bytes_read(nbytes) == 0
    read_from(nbytes)
    assert _bytes_read(nbytes) == nbytes * 2 // 3


@pytest.mark.every(n=2)
@pytest.mark.parametrize("env", [{"UNICOLL_PEER_MEMORY": "always"}, {"UNICOLL_PEER_MEMORY": "off"}], ids=str)
@on_ranks(2)
def test_the_setting(env: dict[str, str]) -> None:
    assert _bytes_read(64 << 20) == (32 << 20 if env["UNICOLL_PEER_MEMORY"] == "always" else 0)


@pytest.mark.parametrize("fast", [(True, True), (True, False), (False, False)])
@on_ranks(2, env={})
def test_all_ranks_use_the_slots_where_one_reads_slowly(fast: tuple[bool, bool]) -> None:
    """Except in a scatter, in which the root alone would copy."""
    rank, half = dist.get_rank(), 16 << 20
    process_memory._reads_are_fast = fast[rank]  # as if measured before
    assert _bytes_read(2 * half) == (half if all(fast) else 0)
    out = np.empty(half, np.uint8)
    parts = [np.full(half, r, np.uint8) for r in range(2)] if rank == 0 else None
    _READS.clear()
    dist.scatter(out, parts)
    assert (out == rank).all()
    assert (sum(_READS) > 15 << 20) == (rank == 1)


def _new_group_reads() -> bool:
    """True if the ranks of a new group read large arrays from each other."""
    group: Any = dist.new_group()
    dist.barrier(group=group)
    reads = bool(group._dispatcher._backends.host._transport.slots.may_read(1 << 30))
    dist.destroy_process_group(group)
    return reads


@on_ranks(2, env={})
def test_a_process_measures_once() -> None:
    """The result is a property of the processor and the system; here it may be either."""
    copy = process_memory._copy

    def without_samples(pid: int, source: int, target: int, nbytes: int) -> None:
        assert nbytes != process_memory._SAMPLE, "measured again"
        copy(pid, source, target, nbytes)

    dist.barrier()
    measured = process_memory._reads_are_fast
    process_memory._copy = without_samples
    reads = _new_group_reads()
    assert measured is not None
    assert measured or not reads


@on_ranks(2, env={})
def test_a_read_that_fails_while_it_is_timed_is_not_raised() -> None:
    """As if the other rank had ended: that is named by the step that follows."""
    copy, rank = process_memory._copy, dist.get_rank()

    def failing(pid: int, source: int, target: int, nbytes: int) -> None:
        if nbytes == process_memory._SAMPLE:
            raise ProcessLookupError(3, "No such process")
        copy(pid, source, target, nbytes)

    dist.barrier()
    process_memory._reads_are_fast = None if rank else True
    if rank:
        process_memory._copy = failing
    assert not _new_group_reads()
    assert process_memory._reads_are_fast is (None if rank else True)


@pytest.mark.parametrize("odd", [0, 1])
@on_ranks(2, env={})
def test_a_system_that_forbids_it(odd: int) -> None:
    def refused(*args: Any) -> int:
        process_memory.ctypes.set_errno(1)
        return -1

    if dist.get_rank() == odd:
        process_memory._read = refused
    dist.barrier()
    read_from(1)
    assert _bytes_read(6 << 20) == 0
    assert "all ranks are on one host, and cannot read each other's memory" in dist.explain()


@on_ranks(2)
def test_files_and_shared_mappings() -> None:
    """And private mappings; not at the start of a page."""
    read_from(1)
    descriptor = os.memfd_create("test", os.MFD_CLOEXEC)
    os.ftruncate(descriptor, 2 << 20)
    for memory in (
        mmap.mmap(descriptor, 2 << 20),
        mmap.mmap(-1, 2 << 20),
        mmap.mmap(-1, 2 << 20, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS),
    ):
        array = np.frombuffer(memory, np.float32)[1:]
        array[:] = dist.get_rank() + 1
        _watch()
        dist.all_reduce(array)
        assert (array == 3).all()
        assert sum(_READS) == (2 << 20) - 4
    os.close(descriptor)


def test_memory_that_is_not_mapped_is_not_readable() -> None:
    array = np.zeros(8, np.uint8)
    assert process_memory.is_readable(array)
    assert process_memory.is_readable(array[:0])
    assert not process_memory.is_readable(np.lib.stride_tricks.as_strided(array, (1 << 46,), (1,)))


# --- failures -------------------------------------------------------------------------------------------------------


@on_ranks(3)
def test_a_small_array_on_one_rank_is_named() -> None:
    """Which is not read from the process's memory; other calls are in test_algorithm_faults.py."""
    group: Any = dist.new_group()
    read_from(1, group)
    array = np.ones(200_000, np.float32)
    with pytest.raises(dist.CollectiveMismatchError) as raised:
        dist.all_reduce(array[:8] if dist.get_rank() == 1 else array, group=group)
    for word in ("all_reduce(float32[200000]", "float32[8]", "test_peer_memory.py"):
        assert word in str(raised.value)
    dist.destroy_process_group(group)


@on_ranks(3)
def test_a_rank_whose_array_is_gone_is_named() -> None:
    """One rank's read fails in the middle, as if the other one had freed its array."""
    group: Any = dist.new_group()
    read_from(1, group)
    if dist.get_rank() == 1:
        copy_to = PeerArray.copy_to

        def failing(self: PeerArray, target: Any) -> None:
            PeerArray.copy_to = copy_to  # type: ignore[method-assign]
            PeerArray(self.pid, 4096, self.size, self.dtype).copy_to(target)

        PeerArray.copy_to = failing  # type: ignore[method-assign]
    with pytest.raises(dist.RankLostError) as raised:
        dist.all_reduce(np.ones(1 << 20, np.float32), group=group, timeout=20)
    assert str(raised.value).startswith("all_reduce(float32[1048576], SUM)")
    assert "has an array that cannot be read: [Errno 14] Bad address" in str(raised.value)
    dist.destroy_process_group(group)
