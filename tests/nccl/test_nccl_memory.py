"""Memory of NCCL groups: registration, symmetric memory that is the same on all ranks, puts and signals."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import unicoll as dist
from nccl_comm.communicators import communicator
from tests.nccl.nccl_jobs import busy, connect, error_of, new_group
from tests.simulated_nccl import arrays, ranks
from tests.simulated_nccl.ranks import run
from tests.support.order import await_true
from unicoll.api import world


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


def registered(blocking: bool) -> dict[str, Any]:
    """Arrays, pools and memory of ncclMemAlloc, registered and deregistered."""
    group: Any = dist.new_group(pg_options={"blocking": blocking})
    x = arrays.full(1000, dist.get_rank() + 1.0)
    found: dict[str, Any] = {}
    with group.register(x) as made:  # it connects the group
        found["array"] = (made.nbytes, made.symmetric, made.closed, _known())
        work = dist.all_reduce(x, group=group, async_op=True)
    assert work.is_completed()  # closing waits for the operations
    work.wait()
    found["closed"] = (made.closed, _known(), x.numpy()[:2].tolist())
    made.close()
    pool = _Pool(x, arrays.empty(500))
    with group.register(pool) as made:
        found["pool"] = (made.nbytes, made.symmetric, _known())
    own = _Own(4096)
    with group.register(own, symmetric=True) as made:
        found["window"] = (made.nbytes, made.symmetric, _known())
        found["twice"] = error_of(lambda: group.register(own, symmetric=True))
    assert ranks.nccl().mem_free(own.ptr) == 0
    left = group.register(x)  # not closed
    del x, pool
    gc.collect()
    found["left"] = _known()
    dist.destroy_process_group(group)
    found["after"] = (left.closed, _known())
    left.close()
    return found


@pytest.mark.parametrize("blocking", [True, False])
def test_memory_is_registered_until_closed(blocking: bool) -> None:
    for found in run(2, registered, blocking, policy="newest"):
        assert "in a symmetric window of group" in found.pop("twice")
        assert found == {
            "array": (8000, False, False, (0, 1)),
            "closed": (True, (0, 0), [3.0, 3.0]),
            "pool": (12000, False, (0, 2)),
            "window": (4096, True, (1, 0)),
            "left": (0, 1),
            "after": (True, (0, 0)),
        }


def not_registered() -> list[str]:
    """Errors for memory that cannot be registered, and for any in a group that has failed."""
    group: Any = dist.group.WORLD
    connect()
    x = arrays.full((4, 4), 1.0)
    cupy_pool = SimpleNamespace(free_all_blocks=None)
    said = [
        error_of(lambda: group.register(x.T)),
        error_of(lambda: group.register(np.ones(2))),
        error_of(lambda: group.register(cupy_pool)),
        error_of(lambda: group.register(_Pool())),
        error_of(lambda: group.register(arrays.full(1, 1.0, on=1 - dist.get_rank()))),
        error_of(lambda: group.register(x, symmetric=True)),
        error_of(lambda: group.register("x")),
    ]
    other = new_group()
    made = other.register(arrays.full(4, 1.0))
    dist.barrier()
    other.abort()
    said.append(error_of(lambda: other.register(arrays.full(4, 1.0))))
    made.close()
    assert made.closed
    return said


def test_invalid_memory_is_not_registered() -> None:
    expected = (
        "DistArgumentError: register: float64[4, 4] on cuda:",
        "is not on a GPU",
        "DistTypeError: register: CuPy's memory pools do not list",
        "the array or pool is empty",
        "is bound to cuda:",
        "not made by cuMemCreate",
        "DistTypeError: register: expected an array",
        "GroupAbortedError: ",
    )
    for said in run(2, not_registered):
        assert "is not contiguous" in said[0]
        for one, words in zip(said, expected, strict=True):
            assert words in one


def with_an_old_nccl(attempt: str) -> tuple[Any, ...]:
    """What an NCCL without windows, registration or one-sided operations does, or its error."""
    group: Any = dist.group.WORLD
    connect()
    if attempt == "register":
        try:
            with group.register(arrays.full(4, 1.0), symmetric=True) as made:
                return (made.symmetric, _known())
        except dist.DistError as e:
            return (str(e),)
    if attempt == "symmetric_empty":
        return (error_of(lambda: group.symmetric_empty((2, 3), "float32")),)
    return (error_of(lambda: group.signal(0, arrays.full(1, 1.0))),)


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
def test_an_old_nccl_is_refused_with_the_needed_version(version: int, attempt: str, words: str) -> None:
    for (said,) in run(2, with_an_old_nccl, attempt, version=version):
        assert words in said


def test_an_nccl_without_windows_registers_buffers() -> None:
    assert run(2, with_an_old_nccl, "register", version=22105) == [(False, (0, 1))] * 2


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


def dropped_at_different_times() -> list[int]:
    """Symmetric arrays that rank 0 drops earlier than rank 1: the numbers of windows after two allocations, and of the
    store's keys that are left."""
    group = new_group()
    found = []
    first = group.symmetric_empty(16, "float64")
    if dist.get_rank() == 0:
        del first
        gc.collect()
        time.sleep(0.5)  # the watchdog sweeps
    second = group.symmetric_empty(8, "float64")
    found.append(_known()[0])
    if dist.get_rank() == 1:
        del first
    del second
    third = group.symmetric_empty(32, "float64")
    found.append(_known()[0])
    del third
    dist.barrier()
    found.append(sum("/window/" in key for key in world.current("test").store.list_keys()))
    dist.barrier()
    dist.destroy_process_group(group)
    return found


def test_symmetric_memory_is_freed_when_all_ranks_have_dropped_it() -> None:
    """A window has the same offset on all ranks, else the job leaves a mismatch behind."""
    assert run(2, dropped_at_different_times) == [[2, 1, 1]] * 2


def memory_for_a_second_attempt() -> int:
    """An allocation that succeeds only once the dropped memory is freed; the windows after it."""
    group, nccl = new_group(), ranks.nccl()
    mem_alloc = nccl.mem_alloc
    nccl.mem_alloc = lambda nbytes: (1, 0) if _known()[0] else mem_alloc(nbytes)  # type: ignore[method-assign]
    group.symmetric_empty(4)  # dropped at once
    made = group.symmetric_empty(4)
    nccl.mem_alloc = mem_alloc  # type: ignore[method-assign]
    found = _known()[0]
    del made
    dist.destroy_process_group(group)
    return found


def test_memory_that_all_have_dropped_is_freed_for_an_allocation_that_needs_it() -> None:
    assert run(2, memory_for_a_second_attempt) == [1, 1]


def dropped_in_use(by: str) -> list[tuple[str, int]]:
    """Memory dropped while an operation or kernel uses it, and new memory afterwards: the thread that frees the old
    one, and the unfinished accesses then."""
    connect()
    group: Any = dist.group.WORLD
    sim, nccl = ranks.simulation(), ranks.nccl()
    mem_free, log = nccl.mem_free, []
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
    return found


@pytest.mark.parametrize("by", ["operation", "kernel"])
def test_symmetric_memory_is_freed_after_its_last_use(by: str) -> None:
    assert run(2, dropped_in_use, by, policy="newest") == [[("MainThread", 0)]] * 2


def _group_with_deadline(seconds: float) -> Any:
    """A connected group; the deadline is that of what follows, since a rank may come late to the start."""
    group = new_group()
    dist.barrier()
    group._backends.unstaged("cuda").context.timeout = seconds
    return group


def alone_in_symmetric_memory(missing: int) -> tuple[str, str]:
    """An allocation in which a rank takes no part, and what the group does after it."""
    group = _group_with_deadline(1.0)
    said = error_of(lambda: group.symmetric_empty(4)) if dist.get_rank() != missing else ""
    dist.barrier()
    await_true(lambda: error_of(lambda: dist.barrier(group=group)) != "nothing")
    after = error_of(lambda: dist.barrier(group=group))
    dist.destroy_process_group(group)
    return said, after


@pytest.mark.every(2)
@pytest.mark.parametrize("missing", [0, 1])
def test_a_rank_that_allocates_no_symmetric_memory_is_named_at_the_deadline(missing: int) -> None:
    found = run(2, alone_in_symmetric_memory, missing)
    said, after = found[1 - missing]
    assert said.startswith("OperationTimeoutError: registering memory (symmetric_empty) for group")
    assert f"missing: rank {missing} (" in said
    for _, after in found:
        assert after.startswith("OperationTimeoutError")


def registration_that_hangs() -> list[str]:
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
    said = [error_of(lambda: group.symmetric_empty(4)), error_of(lambda: dist.barrier(group=group))]
    del nccl.window_register
    assert ranks.simulation().cuda.device_of(memory[0]) >= 0  # NCCL may still use it
    released.set()
    done.wait(30.0)
    assert nccl.mem_free(memory[0]) == 0
    dist.destroy_process_group(group)
    return said


def test_a_registration_that_hangs_fails_the_group_at_its_deadline() -> None:
    for said in run(2, registration_that_hangs):
        assert said[0].startswith("OperationTimeoutError: ncclCommWindowRegister of 16 bytes on group")
        assert said[1].startswith("OperationTimeoutError")


def different_symmetric_memory() -> list[str]:
    """Windows that do not fit together, and an allocation that fails on one rank; then all is well."""
    me, group, own, nccl = dist.get_rank(), new_group(), _Own(1 << 14), ranks.nccl()
    mem_alloc = nccl.mem_alloc
    said = [
        error_of(lambda: group.symmetric_empty(4 + me)),
        error_of(lambda: group.register(own.part(4096 * me, 4096), symmetric=True)),
        error_of(lambda: group.register(own.part(512 * me, 4096), symmetric=True)),
        error_of(lambda: group.symmetric_empty(4096) if me else group.register(own, symmetric=True)),
    ]
    if me == 1:
        nccl.mem_alloc = lambda nbytes: (1, 0)  # type: ignore[method-assign]
    said.append(error_of(lambda: group.symmetric_empty(4)))
    nccl.mem_alloc = mem_alloc  # type: ignore[method-assign]
    with group.register(own.part(4096, 4096), symmetric=True) as made:
        said.append(f"{made.symmetric} {_known()}")
    dist.destroy_process_group(group)
    assert nccl.mem_free(own.ptr) == 0
    return said


def test_windows_that_differ_between_ranks_are_refused_on_all() -> None:
    expected = [
        ("DistArgumentError: symmetric_empty: ", "rank 0", "rank 1"),
        ("at 4096",),
        ("rank 1", "512 bytes too far"),
        ("register", "symmetric_empty"),
        ("Error: ", "rank 1"),
        ("True (1, 0)",),
    ]
    for found in run(2, different_symmetric_memory):
        for said, words in zip(found, expected, strict=True):
            assert all(word in said for word in words), said
        assert found[4].startswith(("CudaError: ", "DistBackendError: "))


# --- puts and signals -------------------------------------------------------------------------------------------------


def ping_pong(rounds: int, blocking: bool) -> list[Any]:
    """Two ranks write to each other's memory in turns, each adding one; then signals alone."""
    me = dist.get_rank()
    group = new_group(blocking=blocking)
    source, own = group.symmetric_empty(4, "float64"), _Own(64)
    window = group.register(own, symmetric=True)
    x, y = arrays.adopt(source, "float64"), arrays.adopt(own, "float64")
    x.fill(0.0)
    y.fill(0.0)
    for _ in range(rounds):
        if me == 0:
            group.put(x[:2], 1, window, offset=3)
        group.wait_signal(1 - me, y)
        x[:2] = y[3:5]
        x += 1.0
        if me == 1:
            group.put(x[:2], 0, window, offset=3)
    found = [y.numpy().tolist()]
    for _ in range(3):
        group.signal(1 - me, x)
    group.signal(me, x)
    group.wait_signal({1 - me: 3, me: 1}, x)
    found.append(x.numpy()[:2].tolist())
    window.close()
    del x, y, source
    dist.destroy_process_group(group)
    ranks.nccl().mem_free(own.ptr)
    return found


@pytest.mark.parametrize("policy", ["oldest", "newest"])
@pytest.mark.parametrize("blocking", [True, False])
def test_two_ranks_write_to_each_others_memory(blocking: bool, policy: str) -> None:
    first, second = run(2, ping_pong, 5, blocking, policy=policy)
    assert first == [[0.0, 0.0, 0.0, 9.0, 9.0, 0.0, 0.0, 0.0], [10.0, 10.0]]
    assert second == [[0.0, 0.0, 0.0, 8.0, 8.0, 0.0, 0.0, 0.0], [9.0, 9.0]]


def not_put() -> list[str]:
    """Errors of puts, and a signal that does not arrive."""
    group = new_group()
    source = group.symmetric_empty(4, "float64")
    x, plain = arrays.adopt(source, "float64"), arrays.full(4, 1.0)
    with group.register(plain) as registered:
        attempts: list[Callable[[], Any]] = [
            lambda: group.put(x, 2, source),
            lambda: group.put(x, 1, registered),
            lambda: group.put(plain, 1, source),
            lambda: group.put(x, 1, source, offset=1),
            lambda: group.put(x[::2], 1, source),
            lambda: group.wait_signal(0, x, 0),
            lambda: group.signal(0, np.ones(1)),
        ]
        said = [error_of(attempt) for attempt in attempts]
    if dist.get_rank() == 0:
        group.wait_signal(1, x, timeout=0.5)

    def until_it_fails() -> None:
        while True:
            group.signal(dist.get_rank(), arrays.full(1, 1.0))
            time.sleep(0.05)

    said.append(error_of(until_it_fails))
    dist.destroy_process_group(group)
    x = source = None  # the group's error holds this frame
    return said


def test_invalid_puts_are_refused_and_a_missing_signal_has_a_deadline() -> None:
    expected = (
        "put: no ranks of a group of 2: [2]",
        "is no symmetric window of this group",
        "is in no symmetric window of this group",
        "at offset 1 goes beyond the window of 32 bytes",
        "put: float64[2]",
        "signals at offset 0: too few",
        "is not on a GPU",
        "wait_signal",
    )
    for found in run(2, not_put):
        for said, words in zip(found, expected, strict=True):
            assert words in said
        assert found[7].startswith("OperationTimeoutError")


def put_among_three() -> list[Any]:
    """A signal before any window; then rank 0 writes to rank 1, and rank 2 makes no one-sided call."""
    me, group = dist.get_rank(), new_group()
    said = error_of(lambda: group.signal(0, arrays.full(1, 1.0)))
    own = group.symmetric_empty(4, "float64")
    x = arrays.adopt(own, "float64")
    x.fill(float(me))
    dist.barrier()
    if me == 0:
        x.fill(7.0)
        group.put(x, 1, own)
    dist.barrier()
    if me == 1:
        group.wait_signal(0, x)
    found = [said, x.numpy().tolist()]
    del x, own
    dist.destroy_process_group(group)
    return found


@pytest.mark.parametrize("version", [23007, 23203])
def test_ranks_without_one_sided_calls_hold_nobody_up(version: int) -> None:
    """NCCL 2.29 and 2.30 wait for all ranks within the first one-sided call of each; all need a window before."""
    found = run(3, put_among_three, version=version)
    assert [values for _, values in found] == [[7.0] * 4, [7.0] * 4, [2.0] * 4]
    for said, _ in found:
        assert said.startswith("DistArgumentError: signal: group")
        assert "symmetric_empty" in said
