"""Shared memory between the ranks of a host: when it is used, which processes can open it, and its release."""

from __future__ import annotations

import gc
import os
import random
import signal
import threading
import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest

import unicoll as dist
from gloo_fallback.shm import futex, segment, slots
from gloo_fallback.shm.slots import SLOT, SemaphoreSlots, Slots, size_of
from gloo_fallback.transport import topology
from tests.support.log import Log
from tests.support.memory import mapped_bytes, memory_files
from tests.support.on_ranks import on_ranks
from tests.support.outcomes import failures_of
from tests.support.programs import python
from tests.support.ranks import ProcessJob, joined
from tests.support.worker import enter
from unicoll.backend import Call, Context
from unicoll.backend.group_state import GroupState
from unicoll.calls.ops import OPS
from unicoll.errors import GroupAbortedError
from unicoll.net.stores.hash import HashStore
from unicoll.testing.cases import Case, run_cases


def transport() -> Any:
    """The transport of this rank's world group; None before its first collective."""
    group: Any = dist.group.WORLD
    return group._backends.for_device("cpu")._transport


def _sum(count: int = 1000) -> None:
    """A correct all_reduce."""
    x = np.ones(count)
    dist.all_reduce(x)
    assert (x == dist.get_world_size()).all()


# --- which transport a group uses -----------------------------------------------------------------------------------


@pytest.mark.every(n=2)
@pytest.mark.parametrize("size", [2, 3, 5])
@on_ranks()
def test_ranks_of_one_host_share_memory(size: int) -> None:
    _sum()
    assert type(transport().target) is Slots
    assert transport().description == "over shared memory: all ranks are on one host"


LOGGED = {
    "auto": "over shared memory: ",
    "tcp": "over sockets: ",
    "hierarchical": "over shared memory within ",
}


@pytest.mark.every(n=2)
@pytest.mark.parametrize("env", [{"UNICOLL_TRANSPORT": name} for name in LOGGED], ids=str)
@on_ranks(3)
def test_the_transport_is_logged(env: dict[str, str]) -> None:
    with Log() as log:
        group = dist.new_group()
        dist.barrier(group)
        dist.destroy_process_group(group)
    (line,) = [line.partition("' ")[2] for line in log.lines if " over " in line]
    assert line.startswith(LOGGED[env["UNICOLL_TRANSPORT"]])


def _full(*_: object) -> int:
    raise OSError(28, "No space left on device")


@pytest.mark.every(n=2)
@pytest.mark.parametrize(
    ("what", "odd"), [("tcp", 0), ("tcp", 1), ("cannot map", 2), ("no memory", 0), ("another host", 1)]
)
@on_ranks(3, env={})
def test_a_rank_that_cannot_share(what: str, odd: int) -> None:
    """All ranks use sockets; those of a host share memory if only a rank on another host does not."""
    if dist.get_rank() == odd:
        if what == "tcp":
            os.environ["UNICOLL_TRANSPORT"] = "tcp"
        elif what == "cannot map":
            topology.open_published = lambda *_: None  # type: ignore[assignment]
        elif what == "no memory":
            os.memfd_create = _full  # type: ignore[assignment]
        else:
            topology.boot_id = lambda: "another boot"
    _sum()
    description = transport().description
    if what == "another host":
        assert type(transport().target).__name__ == "HierarchyContext"
        return
    assert description.startswith(f"over sockets: {'UNICOLL_TRANSPORT=tcp on ' * (what == 'tcp')}rank {odd} ")
    assert what == "tcp" or description.endswith("could not map the shared memory of its host")


@on_ranks(3, env={"UNICOLL_TRANSPORT": "shm"})
def test_unavailable_shared_memory_raises_if_required() -> None:
    if dist.get_rank() == 1:
        topology.boot_id = lambda: "another boot"
    words = "UNICOLL_TRANSPORT=shm, but the ranks are on 2 hosts"
    with pytest.raises(dist.BackendUnavailableError, match=words):
        _sum()


def test_unknown_transport_raises_when_joining() -> None:
    with ProcessJob(2, env={"UNICOLL_TRANSPORT": "infiniband"}) as job:
        job.call(enter)
        words = "UNICOLL_TRANSPORT=infiniband is none of auto, tcp, shm, hierarchical"
        failures_of(job, range(2), "DistArgumentError", words)


@pytest.mark.parametrize("size", [2, 3])
@on_ranks(env={"UNICOLL_MEMORY_ORDER": "weak"})
def test_weak_memory_order_uses_semaphores(size: int) -> None:
    _sum(500_000)
    assert type(transport().slots) is SemaphoreSlots


# --- results --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [2, 3])
@on_ranks()
def test_small_calls_of_few_kinds_many_times(size: int, seed: int) -> None:
    """In random order; equal and different sizes of the ranks alternate."""
    rng = random.Random(seed)
    names = (
        "all_gather_into_tensor",
        "all_gather",
        "gather",
        "scatter",
        "reduce_scatter_tensor",
        "reduce_scatter",
    )
    kinds = [
        Case(op, "float64", "SUM" if OPS[op].reduces else None, count, in_place=i % 3 == 0, uneven=i % 2 == 1)
        for op in (*names, "all_to_all_single", "all_to_all")
        for i, count in enumerate((0, 3, 3, 6, 9))
    ]
    kinds += [Case(op, "float64", "AVG", count) for op in ("all_reduce", "reduce") for count in (3, 30_001)]
    cases = [replace(rng.choice(kinds), seed=rng.randrange(1000)) for _ in range(300)]
    cases = [case if OPS[case.op].uneven else replace(case, uneven=False) for case in cases]
    assert [verdict for verdict in run_cases(cases) if verdict is None or verdict[0]] == []


@pytest.mark.every(n=2)
@pytest.mark.parametrize("env", [{"UNICOLL_TRANSPORT": name} for name in LOGGED], ids=str)
@on_ranks(3)
def test_an_all_to_all_in_place(env: dict[str, str]) -> None:
    me = dist.get_rank()
    for count in (5, 100_000, 700_000):  # in one step, through the slots, and from the peers' memory
        sent = [np.arange(count) + 1000.0 * (3 * me + r) for r in range(3)]
        expected = [np.arange(count) + 1000.0 * (3 * r + me) for r in range(3)]
        whole = np.concatenate(sent)
        dist.all_to_all_single(whole, whole)
        dist.all_to_all(sent[::-1], sent)  # entry i of the outputs is entry size - 1 - i of the inputs
        assert np.array_equal(whole, np.concatenate(expected)), count
        assert np.array_equal(sent[::-1], expected), count


@on_ranks(3)
def test_sizes_that_agreed_before_are_compared_again() -> None:
    group = dist.new_group()
    out, given = np.zeros(6), np.arange(6.0)
    for _ in range(4):
        dist.all_to_all_single(out, given, group=group)
    if dist.get_rank() == 2:
        out, given = np.zeros(9), np.arange(9.0)
    words = "rank 0 sends 2 elements to rank 2, which has room for 3"
    with pytest.raises(dist.CollectiveMismatchError, match=words):
        dist.all_to_all_single(out, given, group=group)
    dist.destroy_process_group(group)


# --- waiting and signals --------------------------------------------------------------------------------------------

ORDERS = pytest.mark.parametrize(
    "env", [{"UNICOLL_MEMORY_ORDER": "auto"}, {"UNICOLL_MEMORY_ORDER": "weak"}], ids=str
)


@pytest.mark.every(n=2)
@ORDERS
@on_ranks(3)
def test_a_long_wait_sleeps_and_is_woken(env: dict[str, str]) -> None:
    dist.barrier()
    started = time.process_time()
    if dist.get_rank() == 0:
        time.sleep(1.0)
    _sum(10)
    assert time.process_time() - started < 0.5


@ORDERS
@on_ranks(2)
def test_signals_of_a_rank_that_left_are_valid(env: dict[str, str]) -> None:
    """Rank 0 signals and leaves the job, while rank 1 sleeps until it is notified of that."""
    x = np.ones(3)
    dist.all_reduce(x)
    if dist.get_rank() == 0:
        time.sleep(0.3)
        dist.all_reduce(x)
        dist.destroy_process_group()
    else:
        control = dist.group.WORLD.job.control  # type: ignore[union-attr]

        def sleep(*arguments: Any) -> int:
            assert control.await_departure(0, 20.0) is not None
            return 1

        futex.sleep = sleep  # type: ignore[assignment]
        futex.timed_wait = lambda *arguments: sleep() == 0  # type: ignore[assignment]
        slots._YIELDS = slots._OVERSUBSCRIBED_YIELDS = 0
        transport().slots._yields = transport().slots._spins = 0
        dist.all_reduce(x)
    assert (x == 4).all()


def state_of(rank: int) -> GroupState:
    """The state of a group of two ranks, in a call."""
    job: Any = SimpleNamespace(rank=rank, control=None)
    state = GroupState(Context(job, "world", (0, 1), 60.0))
    state.call = Call(OPS["barrier"], (), (), 60.0)
    return state


def test_a_rank_that_begins_to_wait_while_another_signals_is_woken() -> None:
    """Rank 1 is about to sleep on step 2 of rank 0, which has not yet left step 1."""
    made = segment.create_private(size_of(2))
    slow, fast = (Slots(state_of(rank), (0, 1), made, 0) for rank in (0, 1))
    sleeps, leaves = threading.Event(), threading.Event()
    wakes: list[int] = []

    class Flags:
        """The flags as rank 0 sees them: between two accesses rank 1 gets as far as it can."""

        def __init__(self, flags: Any) -> None:
            self._flags = flags

        def __getitem__(self, place: int) -> int:
            found: int = self._flags[place]
            if place == 1 and not other.is_alive():
                other.start()
                assert sleeps.wait(10)
            return found

        def __setitem__(self, place: int, value: int) -> None:
            self._flags[place] = value

    def proceed() -> None:
        fast.sync_step()
        fast.sync_step()

    def sleep(address: int, expected: int, seconds: float) -> None:
        sleeps.set()
        assert leaves.wait(10)

    other = threading.Thread(target=proceed)
    flags: Any = Flags(slow._flags)
    slow._flags[1] = 1  # rank 1 has slept before
    slow._flags = flags
    with mock.patch.multiple(futex, sleep=sleep, wake=wakes.append):
        slow.sync_step()
        wakes.clear()
        slow._others = []
        slow.sync_step()
        leaves.set()
        other.join(10)
    assert wakes, "rank 1 would sleep until its next look at the deadline"


@pytest.mark.parametrize("kind", [Slots, SemaphoreSlots])
@pytest.mark.parametrize("signals", [True, False])
def test_a_signal_from_before_the_group_failed_is_valid(kind: type[Slots], signals: bool) -> None:
    """While rank 0 sleeps, rank 1 may signal, and the group fails."""
    states = [state_of(rank) for rank in (0, 1)]

    def tick() -> None:
        if signals:
            following.sync_step()
        states[0].abort(GroupAbortedError("injected", group="world"))
        states[0].check()

    states[0].tick = tick  # type: ignore[method-assign]
    made = segment.create_private(size_of(2))
    if kind is SemaphoreSlots:
        SemaphoreSlots.prepare(made, 2)
    waiting, following = (kind(state, (0, 1), made, 0) for state in states)
    vars(following).update(_others=[], _from=[])
    with pytest.raises(GroupAbortedError) if not signals else nullcontext():
        waiting.sync_step()


# --- memory and its release -----------------------------------------------------------------------------------------


@on_ranks(3)
def test_memory_does_not_grow_with_the_arrays_and_needs_no_descriptor() -> None:
    _sum()
    gc.collect()  # a group that has failed may wait for it
    before = mapped_bytes()
    _sum(3_000_000)
    assert mapped_bytes() == before
    assert 2 * 3 * SLOT <= before <= size_of(3) + 8192
    assert memory_files() == []


def test_a_segment_that_cannot_be_prepared_is_released() -> None:
    def prepare(made: segment.SharedSegment) -> None:
        raise OSError("no semaphores")

    store = HashStore()
    context: Any = SimpleNamespace(name="g", job=SimpleNamespace(store=store))
    before = len(os.listdir("/proc/self/fd"))
    assert segment.create_published(context, "0", 8192, prepare) is None
    assert store.get("shm/g/0") == b"null"
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become another user")
def test_another_user_cannot_open_the_segment() -> None:
    made, _ = segment.create_offer(8192)
    program = (
        "import os, sys\nos.setgroups([])\nos.setgid(65534)\nos.setuid(65534)\n"
        "try:\n    os.open(sys.argv[1], os.O_RDWR)\nexcept PermissionError:\n    print('refused')\n"
    )
    try:
        path = f"/proc/{os.getpid()}/fd/{made.descriptor}"
        os.close(os.open(path, os.O_RDWR))
        done = python("-c", program, path)
        assert done.stdout == "refused\n", done.stderr
    finally:
        made.close()


def shared_files(pid: int) -> set[str]:
    """Files that a process maps for writing and shares with others, and its open files of /dev/shm."""
    maps = [line.split(maxsplit=5) for line in Path(f"/proc/{pid}/maps").read_text().splitlines()]
    mapped = {fields[5] for fields in maps if fields[1] == "rw-s" and len(fields) == 6}
    opened = {os.path.realpath(entry) for entry in Path(f"/proc/{pid}/fd").iterdir()}
    return mapped | {path for path in opened if path.startswith("/dev/shm/")}


def test_nothing_remains_when_all_ranks_are_killed() -> None:
    with joined(3) as job:
        job.call(_sum)
        job.results()
        files = {file for pid in job.pids for file in shared_files(pid)}
        assert any("memfd:unicoll" in file for file in files), files
        for rank in range(3):
            job.signal(rank, signal.SIGKILL)
        assert job.wait_for_exit() == [-signal.SIGKILL] * 3
    assert [file for file in files if os.path.exists(file)] == []
