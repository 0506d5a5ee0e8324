"""Shared memory between the ranks of a host: when it is used, which processes can open it, and its release."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from gloo_fallback.shm import futex, segment
from gloo_fallback.shm.slots import SLOT, SemaphoreSlots, Slots, size_of
from tests.gloo import shared_memory_jobs as jobs
from tests.support.ranks import Pool, ProcessJob, run_ranks
from tests.support.worker import enter
from unicoll.errors import GroupAbortedError
from unicoll.net.stores.hash import HashStore

Pools = Callable[[int], Pool]


@pytest.mark.parametrize("size", [2, 3, 5])
def test_ranks_of_one_host_share_memory(size: int, pool: Pools) -> None:
    assert pool(size).run(jobs.transport) == [("Slots", 1000.0 * size)] * size
    assert set(pool(size).run(jobs.reason)) == {"over shared memory: all ranks are on one host"}


def test_the_transport_is_logged() -> None:
    found = {
        "auto": "over shared memory: ",
        "tcp": "over sockets: ",
        "hierarchical": "over shared memory within ",
    }
    for transport, text in found.items():
        for logged in run_ranks(3, jobs.logged, env={"UNICOLL_TRANSPORT": transport}):
            assert len(logged) == 1
            assert logged[0].startswith(text)


@pytest.mark.parametrize("size", [2, 3])
def test_small_calls_of_few_kinds_many_times(size: int, pool: Pools, seed: int) -> None:
    assert pool(size).run(jobs.repeated_kinds, seed, 150) == [[]] * size


@pytest.mark.parametrize("transport", ["auto", "tcp", "hierarchical"])
def test_an_all_to_all_in_place(transport: str) -> None:
    with ProcessJob(3, env={"UNICOLL_TRANSPORT": transport}) as job:
        job.call(enter)
        job.results()
        for count in (5, 100_000, 700_000):  # in one step, through the slots, and from the peers' memory
            job.call(jobs.all_to_all_in_place, count)
            assert job.results() == [[]] * 3, count


def test_sizes_that_agreed_before_are_compared_again(pool: Pools) -> None:
    for failure, out in pool(3).run(jobs.sizes_change):
        assert failure is not None
        assert failure.type == "CollectiveMismatchError"
        assert "rank 0 sends 2 elements to rank 2, which has room for 3" in failure.message
        assert len(out) in (6, 9)


@pytest.mark.parametrize(
    ("job", "rank", "reason"),
    [
        (jobs.tcp_on_one_rank, 0, "UNICOLL_TRANSPORT=tcp on rank 0 "),
        (jobs.tcp_on_one_rank, 1, "UNICOLL_TRANSPORT=tcp on rank 1 "),
        (jobs.cannot_map, 2, "rank 2 "),
        (jobs.no_memory, 0, "rank 0 "),
    ],
)
def test_all_ranks_use_sockets_if_one_cannot_share(job: Callable[[int], str], rank: int, reason: str) -> None:
    reasons = run_ranks(3, job, rank)
    assert len(set(reasons)) == 1
    assert reasons[0].startswith(f"over sockets: {reason}")
    if job is not jobs.tcp_on_one_rank:
        assert reasons[0].endswith("could not map the shared memory of its host")


def test_a_rank_on_another_host_uses_sockets_and_the_others_share_memory() -> None:
    assert run_ranks(3, jobs.another_machine, 1) == [("HierarchyContext", 3000.0)] * 3


def test_unavailable_shared_memory_raises_if_required() -> None:
    with ProcessJob(3, env={"UNICOLL_TRANSPORT": "shm"}) as job:
        job.call(enter)
        job.results()
        job.call(jobs.another_machine, 1)
        for outcome in job.collect():
            assert outcome.failure is not None
            assert outcome.failure.type == "BackendUnavailableError"
            assert "UNICOLL_TRANSPORT=shm, but the ranks are on 2 hosts" in outcome.failure.message


def test_unknown_transport_raises_when_joining() -> None:
    job = ProcessJob(2, env={"UNICOLL_TRANSPORT": "infiniband"})
    try:
        job.call(enter)
        for outcome in job.collect():
            assert outcome.failure is not None
            assert (
                "UNICOLL_TRANSPORT=infiniband is none of auto, tcp, shm, hierarchical"
                in outcome.failure.message
            )
    finally:
        job.close()


@pytest.mark.parametrize("size", [2, 3])
def test_weak_memory_order_uses_semaphores(size: int) -> None:
    env = {"UNICOLL_MEMORY_ORDER": "weak"}
    assert run_ranks(size, jobs.slots_kind, env=env) == [("SemaphoreSlots", float(size))] * size


@pytest.mark.every(2)
@pytest.mark.parametrize("order", ["", "weak"])
def test_a_long_wait_sleeps_and_is_woken(order: str) -> None:
    env = {"UNICOLL_MEMORY_ORDER": order}
    for spent, total in run_ranks(3, jobs.asleep, 1.0, env=env):
        assert total == 3.0
        assert spent < 0.5


@pytest.mark.parametrize("order", ["", "weak"])
def test_signals_of_a_rank_that_left_are_valid(order: str) -> None:
    env = {"UNICOLL_MEMORY_ORDER": order}
    assert run_ranks(2, jobs.peer_leaves_after_signal, env=env) == [4.0, 4.0]


def test_descriptors_are_closed_after_mapping(pool: Pools) -> None:
    assert pool(3).run(jobs.descriptors) == [[]] * 3


def test_a_segment_that_cannot_be_prepared_is_released() -> None:
    def prepare(made: segment.SharedSegment) -> None:
        raise OSError("no semaphores")

    store = HashStore()
    context: Any = SimpleNamespace(name="g", job=SimpleNamespace(store=store))
    before = len(os.listdir("/proc/self/fd"))
    assert segment.create_published(context, "0", 8192, prepare) is None
    assert store.get("shm/g/0") == b"null"
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_rank_that_begins_to_wait_while_another_signals_is_woken() -> None:
    """Rank 1 is about to sleep on step 2 of rank 0, which has not yet left step 1."""
    connections: Any = [
        SimpleNamespace(rank=r, error=None, check_peer=lambda peer: False, wake=None) for r in (0, 1)
    ]
    made = segment.create_private(size_of(2))
    slow, fast = (Slots(one, (0, 1), made, 0) for one in connections)
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
    failure = GroupAbortedError("injected", group="world")

    def check_peer(peer: int) -> bool:
        if signals:
            following.sync_step()
        connections[0].error = failure
        raise failure

    connections: Any = [SimpleNamespace(rank=r, error=None, check_peer=check_peer, wake=None) for r in (0, 1)]
    made = segment.create_private(size_of(2))
    if kind is SemaphoreSlots:
        SemaphoreSlots.prepare(made, 2)
    waiting, following = (kind(one, (0, 1), made, 0) for one in connections)
    vars(following).update(_others=[], _from=[])
    with pytest.raises(GroupAbortedError) if not signals else nullcontext():
        waiting.sync_step()


def test_memory_does_not_grow_with_the_arrays(pool: Pools) -> None:
    for before, after in pool(3).run(jobs.staging):
        assert before == after
        assert 2 * 3 * SLOT <= before <= size_of(3) + 8192


def test_another_user_cannot_open_the_segment() -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root, to become another user")
    job = ProcessJob(1)
    try:
        job.call(enter)
        job.results()
        job.call(jobs.where)
        pid, descriptor = job.results()[0]
        program = (
            "import os, sys\nos.setgroups([])\nos.setgid(65534)\nos.setuid(65534)\n"
            "try:\n    os.open(sys.argv[1], os.O_RDWR)\nexcept PermissionError:\n    print('refused')\n"
        )
        path = f"/proc/{pid}/fd/{descriptor}"
        os.close(os.open(path, os.O_RDWR))
        done = subprocess.run(
            [sys.executable, "-c", program, path], capture_output=True, text=True, timeout=30
        )
        assert done.stdout == "refused\n", done.stderr
    finally:
        job.close()


def shared_files(pid: int) -> set[str]:
    """Files that a process maps for writing and shares with others, and its open files of /dev/shm."""
    maps = [line.split(maxsplit=5) for line in Path(f"/proc/{pid}/maps").read_text().splitlines()]
    mapped = {fields[5] for fields in maps if fields[1] == "rw-s" and len(fields) == 6}
    opened = {os.path.realpath(entry) for entry in Path(f"/proc/{pid}/fd").iterdir()}
    return mapped | {path for path in opened if path.startswith("/dev/shm/")}


def test_nothing_remains_when_all_ranks_are_killed() -> None:
    job = ProcessJob(3)
    try:
        job.call(enter)
        job.results()
        job.call(jobs.transport)
        assert {t for t, _ in job.results()} == {"Slots"}
        files = {file for pid in job.pids for file in shared_files(pid)}
        assert any("memfd:unicoll" in file for file in files), files
        for rank in range(3):
            job.signal(rank, signal.SIGKILL)
        assert job.wait_for_exit() == [-signal.SIGKILL] * 3
    finally:
        job.close()
    assert [file for file in files if os.path.exists(file)] == []
