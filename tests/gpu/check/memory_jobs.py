"""Programs with registered memory, symmetric memory and one-sided operations on two ranks, and one of a growing group.

Each takes a kit, raises AssertionError for a wrong result and Skip for what NCCL does not have here, and returns what
NCCL has used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import unicoll as dist
from nccl_comm.library import locate
from tests.gpu.check.kits import Kit
from tests.gpu.check.rank_jobs import expect, sum_of_ranks
from tests.gpu.check.record import Skip
from unicoll.devices import runtimes
from unicoll.devices.device_runtime import on_device

COMPARING = {"NCCL_CHECK_MODE": "DEBUG_GLOBAL"}
"""NCCL compares the offsets of symmetric memory on the ranks. Otherwise only multicast on several GPUs would show a
difference."""
_COMPARES_SINCE = 22907

_COUNT = 1 << 12
_ROUNDS = 20
Program = Callable[[Kit], Any]


class _OwnMemory:
    """Elements of float32 in memory of ncclMemAlloc."""

    def __init__(self, ptr: int, count: int) -> None:
        interface = {"shape": (count,), "typestr": "<f4", "data": (ptr, False), "version": 3}
        self.__cuda_array_interface__ = interface | {"strides": None, "stream": None}


@contextmanager
def _own_memory(count: int) -> Iterator[_OwnMemory]:
    nccl = locate.nccl()
    with on_device(runtimes.runtime("cuda"), runtimes.runtime("cuda").current_device()):
        code, ptr = nccl.mem_alloc(4 * count)
        assert code == 0, f"ncclMemAlloc returns {code}"
        try:
            yield _OwnMemory(ptr, count)
        finally:
            nccl.mem_free(ptr)


def _group() -> Any:
    group = dist.group.WORLD
    assert group is not None
    return group


def _symmetric(count: int) -> Any:
    try:
        return _group().symmetric_empty(count)
    except dist.BackendUnavailableError as e:
        raise Skip(str(e)) from None


def registered_arrays_are_reduced(k: Kit) -> dict[str, Any]:
    """register() of an array of the library, and operations on it and on a part of it."""
    x = k.full(_COUNT, dist.get_rank() + 1)
    with _group().register(x) as made:
        dist.all_reduce(x)
        work = dist.all_reduce(x[: _COUNT // 2], async_op=True)
    assert work is not None
    assert work.is_completed(), "closing the registration did not wait for the operation"
    work.wait()
    expect(k, x[: _COUNT // 2], dist.get_world_size() * sum_of_ranks(), "all_reduce of a part")
    expect(k, x[_COUNT // 2 :], sum_of_ranks(), "all_reduce in registered memory")
    return {"bytes": made.nbytes}


def symmetric_memory_is_dropped_at_different_times(k: Kit) -> dict[str, Any]:
    """Collectives in symmetric memory, before and after rank 0 has dropped some that the others still use."""
    n, windows = dist.get_world_size(), []
    kept: list[Any] = []
    for _ in range(3):
        made = _symmetric(n * _COUNT)
        windows.append(made.window != 0)
        x = k.array(made)
        part = x[:_COUNT]
        part[...] = dist.get_rank() + 1
        dist.all_reduce(part)
        expect(k, part, sum_of_ranks(), "all_reduce in symmetric memory")
        work = dist.all_gather_into_tensor(x, k.full(_COUNT, dist.get_rank()), async_op=True)
        assert work is not None
        work.wait()
        for rank in range(n):
            expect(k, x[rank * _COUNT : (rank + 1) * _COUNT], rank, "all_gather into symmetric memory")
        if dist.get_rank():
            kept.append(x)
        del part, x, made
    return {"windows": windows}


def nccl_compares_symmetric_memory(k: Kit) -> dict[str, Any]:
    """As the program before, in processes with :data:`COMPARING`."""
    if locate.nccl().version < _COMPARES_SINCE:
        raise Skip("NCCL compares from 2.29.7 on")
    return symmetric_memory_is_dropped_at_different_times(k)


def puts_and_signals_arrive(k: Kit) -> dict[str, Any]:
    """Ranks 0 and 1 write to each other's memory in turns: from symmetric_empty() to a registered window."""
    me, other = dist.get_rank(), dist.get_rank() ^ 1
    group, source = _group(), _symmetric(8)
    with _own_memory(32) as memory, group.register(memory, symmetric=True) as window:
        if not (window.symmetric and source.window):
            raise Skip("NCCL makes no windows for these ranks")
        x, y = k.array(source), k.array(memory)
        x[...], y[...] = me, -1
        k.synchronize()
        dist.barrier()
        if me > 1:
            dist.barrier()
            return {}
        try:
            group.signal(other, x)
            group.wait_signal(other, x)
        except (dist.BackendUnavailableError, dist.DistArgumentError) as e:
            raise Skip(str(e)) from None
        for _ in range(_ROUNDS):
            if me == 0:
                group.put(x, 1, window, offset=16)
            group.wait_signal(other, y)
            x[...] = y[16:24] + 1
            if me == 1:
                group.put(x, 0, window, offset=16)
        expect(k, y[16:24], 2 * (_ROUNDS - 1) + 1 - me, "what was put")
        expect(k, y[:16], -1, "what lies before it")
        expect(k, y[24:], -1, "what lies behind it")
        dist.barrier()
    return {"rounds": _ROUNDS}


def a_non_blocking_group_is_split_and_makes_a_window(k: Kit) -> dict[str, Any]:
    """NCCL returns success for what it has only begun; operations in the part, and in its symmetric memory."""
    options = {"blocking": False}
    device = runtimes.runtime("cuda").current_device()
    group: Any = dist.new_group(backend="cuda:nccl", device_id=device, pg_options=options)
    part: Any = dist.split_group(group, [list(range(dist.get_world_size()))], pg_options=options)
    x = k.full(_COUNT, dist.get_rank() + 1)
    dist.all_reduce(x, group=part)
    expect(k, x, sum_of_ranks(), "all_reduce in the part")
    made = part.symmetric_empty(_COUNT) if locate.nccl().has("window_register") else None
    if made is not None:
        y = k.array(made)
        y[...] = dist.get_rank() + 1
        dist.all_reduce(y, group=part)
        expect(k, y, sum_of_ranks(), "all_reduce in symmetric memory")
        del y
    k.synchronize()
    dist.destroy_process_group(part)
    dist.destroy_process_group(group)
    return {"window": made is not None}


def a_group_of_two_grows_by_a_third_rank(k: Kit) -> dict[str, Any]:
    """Ranks 0 and 1 make a group and use it, rank 2 joins it; the smaller one ends."""
    me = dist.get_rank()
    small: Any = dist.new_group([0, 1], backend="cuda:nccl", device_id=0)
    x = k.full(_COUNT, me + 1)
    if me < 2:
        dist.all_reduce(x, group=small)
        expect(k, x, 3, "all_reduce of two")
    larger: Any = dist.grow_group([2], small, device_id=0)
    if me < 2:
        dist.destroy_process_group(small)
    y = k.full(_COUNT, me + 1)
    dist.all_reduce(y, group=larger)
    expect(k, y, 6, "all_reduce of three")
    dist.destroy_process_group(larger)
    return {"ncclCommGrow": locate.nccl().has("comm_grow")}


PROGRAMS: list[Program] = [
    registered_arrays_are_reduced,
    symmetric_memory_is_dropped_at_different_times,
    puts_and_signals_arrive,
    a_non_blocking_group_is_split_and_makes_a_window,
]
