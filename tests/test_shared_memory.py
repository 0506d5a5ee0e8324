"""Shared memory between the ranks of a host: when it is used, who can see it, and what is left of it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable

import pytest
import shared_memory_jobs as jobs

from gloo_fallback.board import SLOT, size_of
from unicoll.testing.ranks import Job, Pool, run_ranks
from unicoll.testing.worker import enter

Pools = Callable[[int], Pool]


@pytest.mark.parametrize("size", [2, 3, 5])
def test_ranks_of_one_host_share_memory(size: int, pool: Pools) -> None:
    assert pool(size).run(jobs.transport) == [("Board", 1000.0 * size)] * size
    assert set(pool(size).run(jobs.reason)) == {"over shared memory: all ranks are on one host"}


@pytest.mark.parametrize(
    ("job", "rank", "why"),
    [
        (jobs.unwilling, 0, "UNICOLL_TRANSPORT=tcp on rank 0 "),
        (jobs.unwilling, 1, "UNICOLL_TRANSPORT=tcp on rank 1 "),
        (jobs.unable, 2, "rank 2 "),
        (jobs.no_room, 0, "rank 0 "),
    ],
)
def test_one_that_will_not_or_cannot_makes_all_use_sockets(
    job: Callable[[int], str], rank: int, why: str
) -> None:
    reasons = run_ranks(3, job, rank)
    assert len(set(reasons)) == 1
    assert reasons[0].startswith(f"over sockets: {why}")
    if job is not jobs.unwilling:
        assert reasons[0].endswith("could not map the shared memory of its host")


def test_a_rank_on_another_machine_is_reached_by_sockets_and_the_others_share_memory() -> None:
    assert run_ranks(3, jobs.another_machine, 1) == [("Cluster", 3000.0)] * 3


def test_shared_memory_that_was_asked_for_and_cannot_be_had_is_an_error() -> None:
    with Job(3, env={"UNICOLL_TRANSPORT": "shm"}) as job:
        job.call(enter)
        job.results()
        job.call(jobs.another_machine, 1)
        for outcome in job.collect():
            assert outcome.failure is not None
            assert outcome.failure.type == "BackendUnavailableError"
            assert "UNICOLL_TRANSPORT=shm, but the ranks are on 2 hosts" in outcome.failure.message


def test_a_transport_that_does_not_exist_is_refused_when_joining() -> None:
    job = Job(2, env={"UNICOLL_TRANSPORT": "carrier-pigeon"})
    try:
        job.call(enter)
        for outcome in job.collect():
            assert outcome.failure is not None
            assert "UNICOLL_TRANSPORT=carrier-pigeon is none of auto, tcp, shm, hierarchical" in outcome.failure.message
    finally:
        job.close()


@pytest.mark.parametrize("size", [2, 3])
def test_a_processor_with_a_weaker_memory_order_uses_semaphores(size: int) -> None:
    env = {"UNICOLL_MEMORY_ORDER": "weak"}
    assert run_ranks(size, jobs.board_kind, env=env) == [("SemaphoreBoard", float(size))] * size


@pytest.mark.parametrize("order", ["", "weak"])
def test_a_long_wait_sleeps_and_is_woken(order: str) -> None:
    env = {"UNICOLL_MEMORY_ORDER": order}
    for spent, total in run_ranks(3, jobs.asleep, 1.0, env=env):
        assert total == 3.0
        assert spent < 0.5


@pytest.mark.parametrize("order", ["", "weak"])
def test_what_a_rank_did_before_it_left_counts(order: str) -> None:
    env = {"UNICOLL_MEMORY_ORDER": order}
    assert run_ranks(2, jobs.a_peer_that_goes_at_once, env=env) == [4.0, 4.0]


def test_nothing_is_left_to_open_once_all_have_it(pool: Pools) -> None:
    assert pool(3).run(jobs.descriptors) == [[]] * 3


def test_the_memory_does_not_grow_with_the_arrays(pool: Pools) -> None:
    for before, after in pool(3).run(jobs.staging):
        assert before == after
        assert 2 * 3 * SLOT <= before <= size_of(3) + 8192


def test_another_user_cannot_open_it() -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root, to become somebody else")
    job = Job(1)
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
        done = subprocess.run([sys.executable, "-c", program, path], capture_output=True, text=True, timeout=30)
        assert done.stdout == "refused\n", done.stderr
    finally:
        job.close()


def test_nothing_is_left_when_all_ranks_are_killed() -> None:
    before = {name for name in os.listdir("/dev/shm") if not name.startswith("sem.mp-")}
    job = Job(3)
    try:
        job.call(enter)
        job.results()
        job.call(jobs.transport)
        assert {t for t, _ in job.results()} == {"Board"}
        for rank in range(3):
            job.signal(rank, signal.SIGKILL)
        assert job.wait_for_exit() == [-signal.SIGKILL] * 3
    finally:
        job.close()
    assert {name for name in os.listdir("/dev/shm") if not name.startswith("sem.mp-")} == before
