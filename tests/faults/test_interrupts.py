"""An exception of a signal's handler at each point of a call: right data or an error on all ranks, and no wait.

``interrupt_jobs`` has the operations. The interrupted rank makes three more calls on the group, or leaves it if it has
failed; the other ranks make theirs. The short run tries a part of the points.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest

import unicoll as dist
from tests.conformance.p2p_jobs import must
from tests.faults import interrupt_jobs as jobs
from tests.support.on_ranks import on_ranks
from tests.support.order import await_true
from tests.support.ranks import ProcessJob, joined, sample_seed
from tests.support.selection import is_short
from unicoll.api import objects

_SHARE = 24
"""The short run tries every nth point."""


def run(
    size: int,
    transport: str,
    names: Iterable[str],
    goes_on: bool = True,
    warm: bool = True,
    start: Callable[..., ProcessJob] = ProcessJob,
    share: int = 1,
) -> None:
    """Try operations; ``share``: the long run tries every nth point."""
    every = _SHARE if is_short() else share
    points = trials = 0
    wrong: list[str] = []
    with joined(size, start, env={"UNICOLL_TRANSPORT": transport} if transport else {}) as job:
        for name in names:
            job.call(jobs.trials, name, goes_on, warm, every, sample_seed())
            results = job.results(jobs.TRIALS_S)
            points, trials = points + results[0][0], trials + results[0][1]
            wrong += [text for result in results for text in result[2]]
        job.call(jobs.shared_descriptors)
        left = max(job.results())
    print(f"{transport or 'auto'}, {size} ranks: {points} points, {trials} trials")
    assert not wrong, "\n".join(wrong)
    # Only an interrupt directly after the system call leaves one open.
    assert left <= 8 + trials // 100


@pytest.mark.every(n=2)
@pytest.mark.parametrize("transport", ["", "tcp", pytest.param("hierarchical", marks=pytest.mark.every(n=0))])
@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.every(n=0))])
def test_the_rank_goes_on(size: int, transport: str) -> None:
    run(size, transport, jobs.ON_HOSTS)


@pytest.mark.every(n=0)
@pytest.mark.parametrize("transport", ["", "tcp"])
def test_the_rank_leaves_the_group(transport: str) -> None:
    """Not from functions that make groups: a group that has failed can be cut, so the others wait for its parts."""
    run(2, transport, [name for name in jobs.ON_HOSTS if name not in jobs.CREATIONS], goes_on=False)


@pytest.mark.every(n=0)
@pytest.mark.parametrize("transport", ["", "tcp", "hierarchical"])
def test_the_first_call_of_a_group(transport: str) -> None:
    """It selects the transport, and connects, which has some 27,000 points."""
    run(
        2,
        transport,
        ["all_reduce", "all_gather_object", "send", "recv", "irecv"],
        warm=False,
        share=4,
    )


@pytest.mark.parametrize("transport", ["", "tcp"])
def test_a_signal_at_a_random_time(transport: str) -> None:
    count = 40 if is_short() else 1000
    with joined(2, env={"UNICOLL_TRANSPORT": transport} if transport else {}) as job:
        job.call(jobs.strikes, count, sample_seed())
        results = job.results(jobs.TRIALS_S)
    struck = results[jobs.VICTIM][0]
    print(f"{transport or 'auto'}: {count} calls, {struck} interrupted")
    wrong = [text for result in results for text in result[1]]
    assert not wrong, "\n".join(wrong)
    assert struck > 0


@on_ranks(2, env={})
def test_a_wait_that_was_interrupted_can_be_repeated() -> None:
    """Ctrl-C while the group's thread executes the collective, which goes on."""
    world: Any = dist.group.WORLD
    meeting = must(dist.new_group())
    x = np.full(5, dist.get_rank() + 1.0)
    if dist.get_rank() == 0:
        work = must(dist.all_reduce(x, async_op=True))
        queue = world._backends.for_device("cpu").queue
        await_true(lambda: queue.in_background)
        with jobs.struck_while_waiting():
            work.wait()
        dist.barrier(group=meeting)
        assert work.wait()
    else:
        dist.barrier(group=meeting)
        dist.all_reduce(x)
    assert (x == 3).all()
    dist.all_reduce(x)
    assert (x == 6).all()


@on_ranks(2, env={})
def test_a_receive_ends_at_its_timeout_whatever_becomes_of_the_thread_that_runs_progress() -> None:
    world: Any = dist.group.WORLD
    if dist.get_rank() == 0:
        progress = world._backends.for_device("cpu")._p2p._progress
        held, ended = threading.Event(), threading.Event()

        def stick() -> None:
            progress.try_acquire()
            held.set()
            ended.wait(60)
            progress.release()

        stuck = threading.Thread(target=stick)
        stuck.start()
        held.wait(60)
        with pytest.raises(dist.OperationTimeoutError, match=r"recv.* timed out after 0.2 s"):
            world.using(timeout=0.2).recv(np.zeros(1), 1)
        ended.set()
        stuck.join()
    dist.barrier()


class Alarm(Exception):
    """Raised by a signal's handler."""


@on_ranks(2, env={})
def test_a_list_of_objects_is_received_as_a_whole() -> None:
    """Rank 0 is interrupted while it waits for the body, whose header it has; rank 1 sends none until that is known."""
    world: Any = dist.group.WORLD
    real = objects._transfer, objects.read_headers
    if dist.get_rank() == 1:

        def transfer(pg: Any, sending: bool, array: Any, *rest: Any) -> int:
            if len(array) != objects.HEADER.size:
                await_true(lambda: world.job.control.group_failure(world.name))
            return real[0](pg, sending, array, *rest)

        objects._transfer = transfer
        with pytest.raises(dist.GroupAbortedError, match=r"rank 0 .*Alarm"):
            dist.send_object_list([bytes(1_000_000)], 0)
    else:

        def ring(*_: object) -> None:
            raise Alarm

        def headers(*arguments: Any) -> Any:
            signal.setitimer(signal.ITIMER_REAL, 0.3)
            return real[1](*arguments)

        objects.read_headers = headers
        signal.signal(signal.SIGALRM, ring)
        with pytest.raises(Alarm):
            dist.recv_object_list([None], 1)
    objects._transfer, objects.read_headers = real
    with pytest.raises(dist.GroupAbortedError, match=r"rank 0 .*recv_object_list.*Alarm"):
        dist.all_reduce(np.ones(1))


@on_ranks(2, env={})
def test_a_rank_that_was_interrupted_before_it_was_added_calls_again() -> None:
    group: Any = dist.new_group([0])
    if dist.get_rank() == 1:

        def ring(*_: object) -> None:
            raise Alarm

        signal.signal(signal.SIGALRM, ring)
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        with pytest.raises(Alarm):
            dist.grow_group([1], group)
    dist.barrier()
    larger = dist.grow_group([1], group)
    x = np.full(1, dist.get_rank() + 1.0)
    dist.all_reduce(x, group=larger)
    assert x == 3
