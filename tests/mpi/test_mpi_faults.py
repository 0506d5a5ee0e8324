"""Failures of ranks under mpirun, and of threads of the MPI backend.

By default mpirun ends the whole job as soon as a rank dies, and names it. If it leaves the other ranks running, they
raise the errors that the tests of :mod:`test_faults` require of every backend.
"""

from __future__ import annotations

import gc
import random
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import pytest

import unicoll as dist
from mpi_comm import collectives, watchdog
from mpi_comm.backend import _LONG
from mpi_comm.p2p.matcher import RequestMatcher
from mpi_comm.runtime.communicators import WorldRanks
from mpi_comm.runtime.init_finalize import runtime
from tests.faults import fault_jobs as jobs
from tests.faults import interrupt_jobs, test_faults, test_interrupts
from tests.mpi.mpi_ranks import MpiJob, library, unavailable_reason
from tests.support.calls import EVERYTHING
from tests.support.interrupts import Interrupt
from tests.support.order import PATIENCE_S, await_true, await_word, send_word
from tests.support.outcomes import failure_of
from tests.support.ranks import Pool, joined, pools, sample_seed
from tests.support.worker import Failure, enter, send_note
from unicoll.backend import Context


def _injected(*args: Any) -> Any:
    raise OSError("injected")


def _receive(tag: int) -> Any:
    work = dist.irecv(np.zeros(3), 1 - dist.get_rank(), tag=tag)
    assert work is not None
    return work


def _await_end(work: Any) -> None:
    """Wait until a Work has ended, without running progress on this thread."""
    ended = threading.Event()
    work.add_done_callback(ended.set)
    assert ended.wait(PATIENCE_S)


def message_thread_fails() -> list[Failure | None]:
    """The message thread raises: the errors of two pending receives and of a later call."""
    dist.barrier()
    works = [_receive(1), _receive(2)]
    if dist.get_rank() == 1:
        send_word(0)  # else it may still be in the barrier when the group fails
    else:
        await_word()
        RequestMatcher.poll = _injected  # type: ignore[method-assign]
    for work in works:
        _await_end(work)
    return [failure_of(call) for call in (works[0].wait, works[1].wait, dist.barrier)]


def interrupted_polls() -> float:
    """What rank 0 receives after receives that were interrupted where MPI had been asked, and no message had come."""
    received = np.zeros(3)
    if dist.get_rank() == 0:
        real = RequestMatcher._header_arrives

        def interrupted(matcher: RequestMatcher) -> bool:
            assert not real(matcher)
            raise Interrupt("injected")

        for source in (1, None):
            RequestMatcher._header_arrives = interrupted  # type: ignore[method-assign]
            with pytest.raises(Interrupt):
                dist.recv(np.zeros(3), source)
            RequestMatcher._header_arrives = real  # type: ignore[method-assign]
        dist.barrier()
        dist.recv(received, 1)
    else:
        dist.barrier()
        dist.send(np.full(3, 7.0), 0)
    return float(received.max())


def messages_after_a_group(size: int) -> float:
    """What rank 1 receives in a new group, after a message to a group that it had destroyed; MPICH reuses contexts."""
    first = dist.new_group()
    if dist.get_rank() == 1:
        dist.destroy_process_group(first)
        send_word(0)
    else:
        await_word()
        works = [dist.isend(np.full(size, value), 1, first) for value in (1.0, 2.0)]
        dist.destroy_process_group(first)
        assert all(work is not None and work.is_completed() for work in works)
    second, received = dist.new_group(), np.zeros(3)
    if dist.get_rank() == 0:
        dist.send(np.full(3, 7.0), 1, second)
    else:
        dist.recv(received, 0, second)
    dist.barrier(second)
    dist.destroy_process_group(second)
    return float(received.max())


def interrupted_creation(where: str, in_check: bool) -> list[Failure | None]:
    """Rank 0 is interrupted in the creation of a communicator: the errors of it, of the next, and of another group.

    With ``in_check`` the failure of the first group reaches rank 1 before the end of its check of the members.
    """
    real = getattr(WorldRanks, where)

    def interrupted(*arguments: Any) -> Any:
        if where == "_check_members":
            real(*arguments)
        raise Interrupt("injected")

    def failed(ranks: WorldRanks, parent: Any, processes: list[int], context: Context, wait: Any) -> None:
        real(ranks, parent, processes, context, wait)
        failure = context.job.control.group_failure(context.name, PATIENCE_S)
        assert failure is not None
        raise failure

    def make_and_use() -> None:
        dist.barrier(dist.new_group())

    if dist.get_rank() == 0:
        setattr(WorldRanks, where, interrupted)
    elif in_check:
        setattr(WorldRanks, where, failed)
    failures: list[Failure | None] = []
    try:
        failures.append(failure_of(make_and_use))
    except Interrupt:
        failures.append(None)
    setattr(WorldRanks, where, real)
    return [*failures, failure_of(make_and_use), failure_of(dist.barrier)]


@contextmanager
def _holding_back(value: bool) -> Iterator[None]:
    """Whether the watchdog calls MPI between operations."""
    mpi = runtime()
    before, mpi.any_thread_calls = mpi.any_thread_calls, value
    try:
        yield
    finally:
        mpi.any_thread_calls = before


def calls_of_mpi_without_operations(count: int) -> None:
    """MPI is called so often while a group exists and the program calls nothing."""
    mpi, calls = runtime(), []
    make_progress = mpi.make_progress

    def counted() -> None:
        make_progress()
        calls.append(1)

    mpi.make_progress = counted  # type: ignore[method-assign]
    try:
        with _holding_back(True):
            await_true(lambda: len(calls) >= count)
    finally:
        del mpi.make_progress
    dist.barrier()


def array_of_a_late_send() -> bool:
    """True if rank 0 keeps the array of a send that has timed out, once rank 1 has received it."""
    beside = dist.new_group(backend="gloo")
    x = np.ones(1 << 20)
    with _holding_back(False):  # rank 1 does not call MPI while rank 0 sends
        dist.barrier(group=beside)
        if dist.get_rank() == 0:
            assert failure_of(partial(dist.group.WORLD.send, x, 1, timeout=0.2)) is not None
        dist.barrier(group=beside)
    if dist.get_rank() == 1:
        dist.recv(x, 0)
    array = weakref.ref(x)
    del x
    dist.barrier(group=beside)
    for _ in range(3):  # messages, with which MPI makes progress
        dist.send(np.ones(1), 1 - dist.get_rank())
        dist.recv(np.ones(1), 1 - dist.get_rank())
    gc.collect()
    dist.destroy_process_group(beside)
    return array() is not None


def scatter_of_a_dying_root() -> Failure | None:
    """The root of a large scatter is killed when it is about to send, and the other rank receives: its error."""
    out = np.zeros(_LONG // 8)
    arrays = [out, np.zeros(out.size)] if dist.get_rank() == 0 else None
    if dist.get_rank() == 0:

        def stall(*args: Any) -> None:
            send_note("about to send")
            time.sleep(1000)

        collectives._send = stall
    else:
        send_note("scattering")
    return failure_of(lambda: dist.scatter(out, arrays, src=0))


def mpi_thread_fails() -> list[Failure | None]:
    """The thread that makes all MPI calls raises: the errors of a receive, two collectives and a later call."""
    dist.barrier()
    receive = _receive(1)
    if dist.get_rank() == 0:
        await_word()
        mpi_thread: Any = runtime().mpi_thread
        mpi_thread._test_requests = _injected
    x = np.ones(1000)  # not part of the agreement, which rank 1 could complete
    works: list[Any] = [dist.all_reduce(x, async_op=True) for _ in range(2)]
    if dist.get_rank() == 1:
        send_word(0)  # else the group may fail before these calls
    _await_end(receive)
    return [failure_of(call) for call in (receive.wait, works[0].wait, works[1].wait, dist.barrier)]


def watchdog_fails(where: str) -> list[Failure | None]:
    """The watchdog raises when it checks a collective inside MPI, or by itself: the error of a later call."""
    dist.barrier()
    if dist.get_rank() == 1:
        send_word(0)  # else it may still be in the barrier when the group fails
    else:
        await_word()
        (communicator,) = (backend.communicator for backend in watchdog._backends)
        assert communicator is not None
        setattr(watchdog, where, _injected)
        communicator.in_mpi_since = time.monotonic() - 10
        await_true(lambda: communicator.state.error)
    return [failure_of(dist.barrier)]


# --- tests ------------------------------------------------------------------------------------------

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
        job.call(scatter_of_a_dying_root)
        job.await_notes()
        job.signal(0, signal.SIGKILL)
        (outcome,) = job.collect(ranks=[1])
        assert outcome.value.type == "RankLostError", outcome.value.traceback
        assert outcome.value.fields["pid"] == job.pids[0]


def test_the_array_of_a_send_that_timed_out_is_released(pool: Callable[[int], Pool]) -> None:
    assert pool(2).run(array_of_a_late_send) == [False] * 2


def test_mpi_is_called_where_it_may_hold_back_what_is_sent(pool: Callable[[int], Pool]) -> None:
    """Over libfabric a message could wait for the sender's next call though it was sent."""
    pool(2).run(calls_of_mpi_without_operations, 3)


def test_a_receive_that_is_interrupted_before_a_message_has_come_changes_nothing(
    pool: Callable[[int], Pool],
) -> None:
    assert pool(2).run(interrupted_polls) == [7.0, 0.0]


@pytest.mark.parametrize("size", [3, 100_000])  # with the header, and behind it
def test_a_message_to_a_group_that_was_destroyed_reaches_no_other(
    size: int, pool: Callable[[int], Pool]
) -> None:
    if library().name == "openmpi":
        pytest.skip(
            "Open MPI delivers nothing in the next communicator after one that was freed with messages"
        )
    assert pool(2).run(messages_after_a_group, size) == [0.0, 7.0]


@pytest.mark.parametrize(
    ("where", "in_check"), [("communicator", False), ("_check_members", False), ("_check_members", True)]
)
def test_an_interrupted_creation(where: str, in_check: bool) -> None:
    """MPI matches creations in their order: none can follow one that only some ranks may have begun."""
    with MpiJob(2, backend="mpi") as job:
        job.call(enter)
        job.results()
        job.call(interrupted_creation, where, in_check)
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
    check_thread_failure("unicoll-world-messages", 3, message_thread_fails)


@pytest.mark.parametrize("level", ["serialized", "funneled"])
def test_an_mpi_thread_that_fails_fails_its_group(level: str) -> None:
    env = {"UNICOLL_MPI_THREAD_LEVEL": level}
    check_thread_failure("unicoll-mpi", 4, mpi_thread_fails, env=env)


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
    check_thread_failure("unicoll-mpi-watchdog", 1, watchdog_fails, where)
