"""Memory of NCCL groups: registration, symmetric memory that is the same on all ranks, puts and signals."""

from __future__ import annotations

import gc
import re
import threading
import time
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import unicoll as dist
from tests.nccl.nccl_jobs import busy, connect, error_of, new_group
from tests.simulated_nccl import arrays, ranks
from tests.simulated_nccl.ranks import run
from tests.support.on_ranks import on_ranks
from tests.support.order import await_true
from unicoll.api import world
from unicoll.device_collectives.communicators import communicator


class _Own:
    """Memory of ncclMemAlloc without a window, as an array of bytes."""

    def __init__(self, nbytes: int) -> None:
        code, self.ptr = ranks.nccl().mem_alloc(nbytes)
        assert code == 0
        self.__cuda_array_interface__ = self._interface(self.ptr, nbytes)

    @staticmethod
    def _interface(ptr: int, nbytes: int) -> dict[str, Any]:
        return {"shape": (nbytes,), "typestr": "|u1", "data": (ptr, False), "version": 3}

    def part(self, start: int, nbytes: int) -> Any:
        """A part of the memory."""
        return SimpleNamespace(__cuda_array_interface__=self._interface(self.ptr + start, nbytes))


class _Pool:
    """An allocator's pool that lists its memory as ``torch.cuda.MemPool`` does."""

    def __init__(self, *held: arrays.Array) -> None:
        self.held = held

    def snapshot(self) -> list[dict[str, int]]:
        return [{"device": x.device, "address": x.ptr, "total_size": x.nbytes} for x in self.held]


def _known() -> tuple[int, int]:
    """The numbers of registered windows and buffers."""
    comms = ranks.nccl().communicators
    return sum(len(c.windows) for c in comms), sum(len(c.buffers) for c in comms)


# --- registration -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("blocking", [True, False])
@on_ranks(2, start=partial(run, policy="newest"))
def test_memory_is_registered_until_closed(blocking: bool) -> None:
    """Arrays, pools and memory of ncclMemAlloc."""
    group: Any = dist.new_group(pg_options={"blocking": blocking})
    x = arrays.full(1000, dist.get_rank() + 1.0)
    with group.register(x) as made:  # it connects the group
        assert (made.nbytes, made.symmetric, made.closed, _known()) == (8000, False, False, (0, 1))
        work = dist.all_reduce(x, group=group, async_op=True)
    assert work.is_completed()  # closing waits for the operations
    work.wait()
    assert (made.closed, _known(), x.numpy()[:2].tolist()) == (True, (0, 0), [3.0, 3.0])
    made.close()
    pool = _Pool(x, arrays.empty(500))
    with group.register(pool) as made:
        assert (made.nbytes, made.symmetric, _known()) == (12000, False, (0, 2))
    own = _Own(4096)
    with group.register(own, symmetric=True) as made:
        assert (made.nbytes, made.symmetric, _known()) == (4096, True, (1, 0))
        assert "in a symmetric window of group" in error_of(lambda: group.register(own, symmetric=True))
    assert ranks.nccl().mem_free(own.ptr) == 0
    left = group.register(x)  # not closed
    del x, pool
    gc.collect()
    assert _known() == (0, 1)
    dist.destroy_process_group(group)
    assert (left.closed, _known()) == (True, (0, 0))
    left.close()


@on_ranks(2, start=run)
def test_invalid_memory_is_not_registered() -> None:
    """Nor any in a group that has failed."""
    group: Any = dist.group.WORLD
    connect()
    x = arrays.full((4, 4), 1.0)
    cupy_pool = SimpleNamespace(free_all_blocks=None)
    assert "is not contiguous" in error_of(lambda: group.register(x.T))
    for memory, words in (
        (x.T, "DistArgumentError: register: float64[4, 4] on cuda:"),
        (np.ones(2), "is not on a GPU"),
        (cupy_pool, "DistTypeError: register: CuPy's memory pools do not list"),
        (_Pool(), "the array or pool is empty"),
        (arrays.full(1, 1.0, on=1 - dist.get_rank()), "is bound to cuda:"),
        ("x", "DistTypeError: register: expected an array"),
    ):
        assert words in (said := error_of(partial(group.register, memory))), said
    assert "not made by cuMemCreate" in error_of(lambda: group.register(x, symmetric=True))
    other = new_group()
    made = other.register(arrays.full(4, 1.0))
    dist.barrier()
    other.abort()
    assert "GroupAbortedError: " in error_of(lambda: other.register(arrays.full(4, 1.0)))
    made.close()
    assert made.closed


@pytest.mark.parametrize(
    ("version", "attempt", "words"),
    [
        (21805, "register", "memory registration needs NCCL 2.19; this is 2.18.5"),
        (21805, "symmetric_empty", "windows need NCCL 2.27; this is 2.18.5"),
        (
            22809,
            "signal",
            "BackendUnavailableError: signal: one-sided operations need NCCL 2.29; this is 2.28.9",
        ),
    ],
)
@on_ranks(2, start=run, options=["version"])
def test_an_old_nccl_is_refused_with_the_needed_version(version: int, attempt: str, words: str) -> None:
    group: Any = dist.group.WORLD
    connect()
    attempts = {
        "register": lambda: group.register(arrays.full(4, 1.0), symmetric=True),
        "symmetric_empty": lambda: group.symmetric_empty((2, 3), "float32"),
        "signal": lambda: group.signal(0, arrays.full(1, 1.0)),
    }
    assert words in error_of(attempts[attempt])


@on_ranks(2, start=partial(run, version=22105))
def test_an_nccl_without_windows_registers_buffers() -> None:
    connect()
    with dist.group.WORLD.register(arrays.full(4, 1.0), symmetric=True) as made:  # type: ignore[union-attr]
        assert (made.symmetric, _known()) == (False, (0, 1))


def test_a_group_of_host_arrays_has_neither() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        group: Any = dist.group.WORLD
        for what, call in (
            ("memory registration", lambda: group.register(np.ones(2))),
            ("one-sided operations", lambda: group.put(np.ones(2), 0, None)),
            ("one-sided operations", lambda: group.signal(0, np.ones(2))),
            ("one-sided operations", lambda: group.wait_signal(0, np.ones(2))),
        ):
            with pytest.raises(dist.BackendUnavailableError, match=f"backend gloo does not support {what}"):
                call()
    finally:
        dist.destroy_process_group()


# --- symmetric windows are the same on all ranks ----------------------------------------------------------------------


@on_ranks(2, start=run)
def test_symmetric_memory_is_freed_when_all_ranks_have_dropped_it() -> None:
    """Rank 0 drops earlier than rank 1. A window has the same offset on all ranks, else the job leaves a mismatch
    behind."""
    group = new_group()
    first = group.symmetric_empty(16, "float64")
    if dist.get_rank() == 0:
        del first
        gc.collect()
        time.sleep(0.5)  # the watchdog sweeps
    second = group.symmetric_empty(8, "float64")
    assert _known()[0] == 2
    if dist.get_rank() == 1:
        del first
    del second
    third = group.symmetric_empty(32, "float64")
    assert _known()[0] == 1
    del third
    dist.barrier()
    assert sum("/window/" in key for key in world.current("test").store.list_keys()) == 1
    dist.barrier()
    dist.destroy_process_group(group)


@on_ranks(2, start=run)
def test_memory_that_all_have_dropped_is_freed_for_an_allocation_that_needs_it() -> None:
    group, nccl = new_group(), ranks.nccl()
    mem_alloc = nccl.mem_alloc
    nccl.mem_alloc = lambda nbytes: (1, 0) if _known()[0] else mem_alloc(nbytes)  # type: ignore[method-assign]
    group.symmetric_empty(4)  # dropped at once
    made = group.symmetric_empty(4)
    nccl.mem_alloc = mem_alloc  # type: ignore[method-assign]
    assert _known()[0] == 1
    del made
    dist.destroy_process_group(group)


@pytest.mark.parametrize("by", ["operation", "kernel"])
@on_ranks(2, start=partial(run, policy="newest"))
def test_symmetric_memory_is_freed_after_its_last_use(by: str) -> None:
    """Memory is dropped while an operation or kernel uses it, and new memory is made afterwards."""
    connect()
    group: Any = dist.group.WORLD
    sim, nccl = ranks.simulation(), ranks.nccl()
    mem_free = nccl.mem_free
    log: list[tuple[str, int]] = []  # the thread that frees the memory, and the unfinished accesses then
    made = group.symmetric_empty((4,), "float64")
    ptr = made.__cuda_array_interface__["data"][0]

    def freeing(address: int) -> Any:
        block = sim.memory.find(address)
        assert block is not None
        used = sum(not access.op.done for access in block.accesses)
        if address == ptr:
            log.append((threading.current_thread().name, used))
        return 0 if used else mem_free(address)

    nccl.mem_free = freeing  # type: ignore[method-assign]
    stream = arrays.Stream()
    with stream:
        view = arrays.adopt(made)
        view.fill(1.0)
        sim.synchronize()
        finish = busy(stream.ptr)
        if by == "operation":
            work = dist.all_reduce(view, async_op=True)
            work.wait()
            del work
        else:
            view += 1.0
        del view, made
        gc.collect()
        others = [group.symmetric_empty((4,), "float64")]
        early = list(log)
        finish()
        stream.synchronize()
        others.append(group.symmetric_empty((4,), "float64"))
        found = early or list(log)
    del nccl.mem_free
    assert found == [("MainThread", 0)]


def _group_with_deadline(seconds: float) -> Any:
    """A connected group; the deadline is that of what follows, since a rank may come late to the start."""
    group = new_group()
    dist.barrier()
    group._backends.unstaged("cuda").context.timeout = seconds
    return group


@pytest.mark.every(n=2)
@pytest.mark.parametrize("missing", [0, 1])
@on_ranks(2, start=run)
def test_a_rank_that_allocates_no_symmetric_memory_is_named_at_the_deadline(missing: int) -> None:
    group = _group_with_deadline(1.0)
    if dist.get_rank() != missing:
        said = error_of(lambda: group.symmetric_empty(4))
        assert said.startswith("OperationTimeoutError: registering memory (symmetric_empty) for group")
        assert f"missing: rank {missing} (" in said
    dist.barrier()
    await_true(lambda: error_of(lambda: dist.barrier(group=group)) != "nothing")
    assert error_of(lambda: dist.barrier(group=group)).startswith("OperationTimeoutError")
    dist.destroy_process_group(group)


@on_ranks(2, start=run)
def test_a_registration_that_hangs_fails_the_group_at_its_deadline() -> None:
    """NCCL does not return from a registration, as some versions do that lose a message."""
    communicator.END_S = 120.0  # the registration returns below, whatever the load
    group = _group_with_deadline(0.5)
    nccl: Any = ranks.nccl()
    released, done, memory = threading.Event(), threading.Event(), []

    def window_register(comm: int, ptr: int, nbytes: int, symmetric: bool) -> Any:
        memory.append(ptr)
        released.wait(30.0)
        done.set()
        return 3, SimpleNamespace(value=None)

    nccl.window_register = window_register
    said = error_of(lambda: group.symmetric_empty(4))
    assert said.startswith("OperationTimeoutError: ncclCommWindowRegister of 16 bytes on group")
    assert error_of(lambda: dist.barrier(group=group)).startswith("OperationTimeoutError")
    del nccl.window_register
    assert ranks.simulation().cuda.device_of(memory[0]) >= 0  # NCCL may still use it
    released.set()
    done.wait(30.0)
    assert nccl.mem_free(memory[0]) == 0
    dist.destroy_process_group(group)


@on_ranks(2, start=run)
def test_windows_that_differ_between_ranks_are_refused_on_all() -> None:
    """They do not fit together, or an allocation fails on one rank; then all is well."""
    me, group, own, nccl = dist.get_rank(), new_group(), _Own(1 << 14), ranks.nccl()
    for call, words in (
        (lambda: group.symmetric_empty(4 + me), ["DistArgumentError: symmetric_empty: ", "rank 0", "rank 1"]),
        (lambda: group.register(own.part(4096 * me, 4096), symmetric=True), ["at 4096"]),
        (lambda: group.register(own.part(512 * me, 4096), symmetric=True), ["rank 1", "512 bytes too far"]),
        (
            lambda: group.symmetric_empty(4096) if me else group.register(own, symmetric=True),
            ["register", "symmetric_empty"],
        ),
    ):
        said = error_of(call)
        assert all(word in said for word in words), said
    mem_alloc = nccl.mem_alloc
    if me == 1:
        nccl.mem_alloc = lambda nbytes: (1, 0)  # type: ignore[method-assign]
    said = error_of(lambda: group.symmetric_empty(4))
    assert re.match("(Device|DistBackend)Error: .*rank 1", said, re.DOTALL), said
    nccl.mem_alloc = mem_alloc  # type: ignore[method-assign]
    with group.register(own.part(4096, 4096), symmetric=True) as made:
        assert (made.symmetric, _known()) == (True, (1, 0))
    dist.destroy_process_group(group)
    assert nccl.mem_free(own.ptr) == 0


# --- puts and signals -------------------------------------------------------------------------------------------------


def _filled_on_all() -> None:
    """All ranks' arrays have their values: a put must not come before the fill that it would be lost to."""
    ranks.simulation().synchronize()
    dist.barrier()  # a barrier of the host does not wait for the device


@pytest.mark.parametrize("policy", ["oldest", "newest"])
@pytest.mark.parametrize("blocking", [True, False])
@on_ranks(2, start=run, options=["policy"])
def test_two_ranks_write_to_each_others_memory(blocking: bool, policy: str) -> None:
    """In turns, each adding one; then signals alone."""
    me = dist.get_rank()
    group = new_group(blocking=blocking)
    source, own = group.symmetric_empty(4, "float64"), _Own(64)
    window = group.register(own, symmetric=True)
    x, y = arrays.adopt(source, "float64"), arrays.adopt(own, "float64")
    x.fill(0.0)
    y.fill(0.0)
    _filled_on_all()
    for _ in range(5):
        if me == 0:
            group.put(x[:2], 1, window, offset=3)
        group.wait_signal(1 - me, y)
        x[:2] = y[3:5]
        x += 1.0
        if me == 1:
            group.put(x[:2], 0, window, offset=3)
    written = 8.0 if me else 9.0
    assert y.numpy().tolist() == [0.0, 0.0, 0.0, written, written, 0.0, 0.0, 0.0]
    for _ in range(3):
        group.signal(1 - me, x)
    group.signal(me, x)
    group.wait_signal({1 - me: 3, me: 1}, x)
    assert x.numpy()[:2].tolist() == [written + 1.0] * 2
    window.close()
    del x, y, source
    dist.destroy_process_group(group)
    ranks.nccl().mem_free(own.ptr)


@on_ranks(2, start=run)
def test_invalid_puts_are_refused_and_a_missing_signal_has_a_deadline() -> None:
    group = new_group()
    source = group.symmetric_empty(4, "float64")
    x, plain = arrays.adopt(source, "float64"), arrays.full(4, 1.0)
    with group.register(plain) as registered:
        for call, words in (
            (lambda: group.put(x, 2, source), "put: no ranks of a group of 2: [2]"),
            (lambda: group.put(x, 1, registered), "is no symmetric window of this group"),
            (lambda: group.put(plain, 1, source), "is in no symmetric window of this group"),
            (lambda: group.put(x, 1, source, offset=1), "at offset 1 goes beyond the window of 32 bytes"),
            (lambda: group.put(x[::2], 1, source), "put: float64[2]"),
            (lambda: group.wait_signal(0, x, 0), "signals at offset 0: too few"),
            (lambda: group.signal(0, np.ones(1)), "is not on a GPU"),
        ):
            assert words in (said := error_of(call)), said
    if dist.get_rank() == 0:
        group.wait_signal(1, x, timeout=0.5)

    def until_it_fails() -> None:
        while True:
            group.signal(dist.get_rank(), arrays.full(1, 1.0))
            time.sleep(0.05)

    said = error_of(until_it_fails)
    assert said.startswith("OperationTimeoutError")
    assert "wait_signal" in said
    dist.destroy_process_group(group)
    x = source = None  # the group's error holds this frame


@pytest.mark.parametrize("version", [23007, 23203])
@on_ranks(3, start=run, options=["version"])
def test_ranks_without_one_sided_calls_hold_nobody_up(version: int) -> None:
    """NCCL 2.29 and 2.30 wait for all ranks within the first one-sided call of each; all need a window before."""
    me, group = dist.get_rank(), new_group()
    said = error_of(lambda: group.signal(0, arrays.full(1, 1.0)))
    assert said.startswith("DistArgumentError: signal: group")
    assert "symmetric_empty" in said
    own = group.symmetric_empty(4, "float64")
    x = arrays.adopt(own, "float64")
    x.fill(float(me))
    _filled_on_all()
    if me == 0:  # it writes to rank 1, and rank 2 makes no one-sided call
        x.fill(7.0)
        group.put(x, 1, own)
    dist.barrier()
    if me == 1:
        group.wait_signal(0, x)
    assert x.numpy().tolist() == [2.0 if me == 2 else 7.0] * 4
    del x, own
    dist.destroy_process_group(group)
