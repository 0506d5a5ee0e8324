"""When a rank under mpirun dies, stops or is late.

By default mpirun ends the whole job as soon as one rank is gone, and names it. Where it lets the others live on, they
learn what the tests of :mod:`test_faults` demand of every backend.
"""

from __future__ import annotations

import random
import signal
from collections.abc import Callable, Iterator
from functools import partial

import fault_jobs as jobs
import pytest
import test_faults
from calls import EVERYTHING
from mpi_ranks import MpiJob, why_not

from unicoll.testing.ranks import Pool, drawn_seed, joined, pools
from unicoll.testing.worker import enter

if why_not():
    pytest.skip(why_not(), allow_module_level=True)

from test_faults import (  # noqa: F401
    test_a_call_has_its_own_timeout,
    test_a_killed_rank_fails_work_in_the_background,
    test_a_killed_rank_is_named_by_those_it_exchanges_messages_with,
    test_a_late_rank_is_named_with_the_place_where_it_is,
    test_a_stopped_rank_is_named_when_time_is_up,
    test_an_interrupted_rank_lets_the_others_go,
    test_destroy_while_the_others_are_in_a_collective,
    test_giving_up_waiting_does_not_end_the_operation,
    test_interpreters_end_with_work_in_flight,
    test_interpreters_end_without_destroy,
    test_survivors_make_a_smaller_world,
    test_the_death_of_a_rank_is_noticed_though_its_child_lives_on,
)


class _Lasting(MpiJob):
    """A job whose ranks outlive each other."""

    def __init__(self, size: int) -> None:
        super().__init__(size, backend="mpi", recover=True, rehearse=True)


@pytest.fixture(autouse=True)
def _under_mpirun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(test_faults, "joined", partial(joined, start=_Lasting))


@pytest.fixture(scope="module")
def pool() -> Iterator[Callable[[int], Pool]]:
    with pools(partial(MpiJob, backend="mpi", rehearse=True)) as made:
        yield made


KILLS = random.Random(drawn_seed()).sample([(name, victim) for name in EVERYTHING for victim in (0, 2)], 8)


@pytest.mark.parametrize(("name", "victim"), KILLS)
def test_a_killed_rank_is_named_by_all_others(name: str, victim: int) -> None:
    test_faults.test_a_killed_rank_is_named_by_all_others(name, victim)


@pytest.mark.parametrize("victim", [0, 2])
def test_mpirun_ends_the_job_of_a_killed_rank(victim: int) -> None:
    with MpiJob(3, backend="mpi", quiet=False) as job:
        job.call(enter)
        job.results()
        job.call(jobs.loop, "all_reduce", 1000)
        job.await_notes()
        job.signal(victim, signal.SIGKILL)
        assert set(job.wait_for_exit(30)) != {0}
        job.collect(10)
        assert "signal 9" in job.said()
