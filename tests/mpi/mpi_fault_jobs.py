"""What ranks do in the tests of threads of the MPI backend that fail on rank 0."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Iterator
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
from tests.support.interrupts import Interrupt
from tests.support.order import PATIENCE_S, await_true, await_word, send_word
from tests.support.outcomes import failure_of
from tests.support.worker import Failure, send_note
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
