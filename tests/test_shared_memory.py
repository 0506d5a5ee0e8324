"""Shared memory between the ranks of a host: when it is used, who can see it, and what is left of it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable

import pytest
import shared_memory_jobs as jobs
from ranks import Job, Pool, run_ranks
from worker import enter

from gloo_fallback.board import SLOT, size_of

Pools = Callable[[int], Pool]


@pytest.mark.parametrize("size", [2, 3, 5])
def test_ranks_of_one_host_share_memory(size: int, pool: Pools) -> None:
    assert pool(size).run(jobs.transport) == [("shared memory", 1000.0 * size)] * size


@pytest.mark.parametrize(
    ("reason", "rank"),
    [(jobs.unwilling, 0), (jobs.unwilling, 1), (jobs.another_machine, 1), (jobs.another_machine, 2)],
)
def test_one_that_will_not_or_cannot_makes_all_use_sockets(
    reason: Callable[[int], tuple[str, float]], rank: int
) -> None:
    assert run_ranks(3, reason, rank) == [("sockets", 3000.0)] * 3


def test_a_processor_with_a_weaker_memory_order_uses_sockets() -> None:
    assert run_ranks(2, jobs.arm) == [("sockets", 2000.0)] * 2


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
        assert {t for t, _ in job.results()} == {"shared memory"}
        for rank in range(3):
            job.signal(rank, signal.SIGKILL)
        assert job.wait_for_exit() == [-signal.SIGKILL] * 3
    finally:
        job.close()
    assert {name for name in os.listdir("/dev/shm") if not name.startswith("sem.mp-")} == before
