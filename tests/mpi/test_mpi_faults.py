"""Failures of ranks under mpirun, and of threads of the MPI backend.

By default mpirun ends the whole job as soon as a rank dies, and names it. If it leaves the other ranks running, they
raise the errors that the tests of :mod:`test_faults` require of every backend.
"""

from __future__ import annotations

import random
import signal
from collections.abc import Callable, Iterator
from functools import partial

import pytest

from tests.faults import fault_jobs as jobs
from tests.faults import interrupt_jobs, test_faults, test_interrupts
from tests.mpi import mpi_fault_jobs
from tests.mpi.mpi_ranks import MpiJob, library, unavailable_reason
from tests.support.calls import EVERYTHING
from tests.support.ranks import Pool, joined, pools, sample_seed
from tests.support.worker import enter

if unavailable_reason():
    pytest.skip(unavailable_reason(), allow_module_level=True)


class _RecoverableJob(MpiJob):
    """A job whose ranks keep running when one dies."""

    def __init__(self, size: int) -> None:
        super().__init__(size, backend="mpi", recover=True, warm_up=True)


@pytest.fixture(autouse=True)
def _under_mpirun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(test_faults, "joined", partial(joined, start=_RecoverableJob))


@pytest.fixture(scope="module")
def pool() -> Iterator[Callable[[int], Pool]]:
    with pools(partial(MpiJob, backend="mpi", warm_up=True)) as made:
        yield made


KILLS = random.Random(sample_seed()).sample([(name, victim) for name in EVERYTHING for victim in (0, 2)], 8)


@pytest.mark.every(n=5)
@pytest.mark.parametrize(("name", "victim"), KILLS)
def test_a_killed_rank_is_named_by_all_others(
    name: str, victim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    transport = ("tcp", "auto")[
        KILLS.index((name, victim)) % 2
    ]  # large arrays: by MPI, or through shared memory
    monkeypatch.setenv("UNICOLL_TRANSPORT", transport)
    test_faults.test_a_killed_rank_is_named_by_all_others(name, victim)


@pytest.mark.parametrize("victim", [0, 2])
def test_mpirun_ends_the_job_of_a_killed_rank(victim: int) -> None:
    with MpiJob(3, backend="mpi", quiet=False) as job:
        job.call(enter)
        job.results()
        job.call(jobs.loop, "all_reduce", 1000)
        job.await_notes()
        job.signal(victim, signal.SIGKILL)
        assert set(job.wait_for_exit(60)) != {0}
        job.collect()
        assert "signal 9" in job.mpirun_output().lower().replace(":", "")


def test_the_root_of_a_large_scatter_dies_while_the_others_receive() -> None:
    """Large arrays are moved on another thread, which is given up, so that the job need not end."""
    with MpiJob(2, backend="mpi", quiet=False, recover=True) as job:
        job.call(enter)
        job.results()
        job.call(mpi_fault_jobs.scatter_of_a_dying_root)
        job.await_notes()
        job.signal(0, signal.SIGKILL)
        (outcome,) = job.collect(ranks=[1])
        assert outcome.value.type == "RankLostError", outcome.value.traceback
        assert outcome.value.fields["pid"] == job.pids[0]


def test_the_array_of_a_send_that_timed_out_is_released(pool: Callable[[int], Pool]) -> None:
    assert pool(2).run(mpi_fault_jobs.array_of_a_late_send) == [False] * 2


def test_mpi_is_called_where_it_may_hold_back_what_is_sent(pool: Callable[[int], Pool]) -> None:
    """Over libfabric a message could wait for the sender's next call though it was sent."""
    pool(2).run(mpi_fault_jobs.calls_of_mpi_without_operations, 3)


def test_a_receive_that_is_interrupted_before_a_message_has_come_changes_nothing(
    pool: Callable[[int], Pool],
) -> None:
    assert pool(2).run(mpi_fault_jobs.interrupted_polls) == [7.0, 0.0]


@pytest.mark.parametrize("size", [3, 100_000])  # with the header, and behind it
def test_a_message_to_a_group_that_was_destroyed_reaches_no_other(
    size: int, pool: Callable[[int], Pool]
) -> None:
    if library().name == "openmpi":
        pytest.skip(
            "Open MPI delivers nothing in the next communicator after one that was freed with messages"
        )
    assert pool(2).run(mpi_fault_jobs.messages_after_a_group, size) == [0.0, 7.0]


@pytest.mark.parametrize(
    ("where", "in_check"), [("communicator", False), ("_check_members", False), ("_check_members", True)]
)
def test_an_interrupted_creation(where: str, in_check: bool) -> None:
    """MPI matches creations in their order: none can follow one that only some ranks may have begun."""
    with MpiJob(2, backend="mpi") as job:
        job.call(enter)
        job.results()
        job.call(mpi_fault_jobs.interrupted_creation, where, in_check)
        first, second = job.results()
    assert first[0] is None
    assert second[0].type == "GroupAbortedError"
    assert "rank 0 " in second[0].message
    assert "failed while creating group 'group-1': Interrupt: injected" in second[0].message
    for _, again, other in (first, second):
        assert other is None
        if where == "communicator":  # nothing was begun
            assert again is None
        else:
            assert again.type == "DistBackendError"
            assert "creation of that of group 'group-1' was interrupted" in again.message


# --- threads that fail ----------------------------------------------------------------------------------------


def check_thread_failure(thread: str, count: int, *call: object, env: dict[str, str] | None = None) -> None:
    """All operations of both ranks end with an error that names rank 0, the thread and the cause."""
    with MpiJob(2, backend="mpi", quiet=False, env=env) as job:
        job.call(enter)
        job.results()
        job.call(*call)
        for failures in job.results():
            assert len(failures) == count
            for failure in failures:
                assert failure is not None
                assert failure.type == "GroupAbortedError", failure.traceback
                assert "rank 0 " in failure.message
                assert f"the thread {thread!r} of group 'world' failed: OSError: injected" in failure.message


def test_a_message_thread_that_fails_fails_its_group() -> None:
    check_thread_failure("unicoll-world-messages", 3, mpi_fault_jobs.message_thread_fails)


@pytest.mark.parametrize("level", ["serialized", "funneled"])
def test_an_mpi_thread_that_fails_fails_its_group(level: str) -> None:
    env = {"UNICOLL_MPI_THREAD_LEVEL": level}
    check_thread_failure("unicoll-mpi", 4, mpi_fault_jobs.mpi_thread_fails, env=env)


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.every(n=0))])
def test_an_interrupted_rank(size: int) -> None:
    """The library itself cannot be interrupted: where ranks wait in its blocking collectives, they end the job."""
    # no group can follow an interrupted creation; symmetric memory is gloo's
    without = {*interrupt_jobs.CREATIONS, "symmetric_empty"}
    if library().name == "openmpi":
        without |= {"all_reduce large", "all_gather"}
    names = [name for name in interrupt_jobs.ON_HOSTS if name not in without]
    test_interrupts.run(size, "", names, start=partial(MpiJob, backend="mpi", warm_up=True))


@pytest.mark.parametrize("where", ["_check", "_check_backend"])
def test_a_watchdog_that_fails_fails_its_groups(where: str) -> None:
    check_thread_failure("unicoll-mpi-watchdog", 1, mpi_fault_jobs.watchdog_fails, where)
