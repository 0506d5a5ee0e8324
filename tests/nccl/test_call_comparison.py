"""What the wait monitor and the comparison of recorded calls find over NCCL: calls that differ, operations in opposite
orders, waits that are long, ranks that have left."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

import unicoll as dist
from tests.nccl.nccl_jobs import backend_of, error_of, new_group
from tests.simulated_nccl import arrays, ranks
from tests.simulated_nccl.ranks import SimulatedJob, run
from tests.support.on_ranks import on_ranks
from tests.support.order import await_true
from tests.support.ranks import joined
from tests.support.worker import end

QUIET = {"UNICOLL_LOG_LEVEL": "error"}


def _sum(count: int = 2, group: Any = None, async_op: bool = True) -> list[float]:
    """The result of an all_reduce."""
    x = arrays.full(count, 1.0)
    work = dist.all_reduce(x, group=group, async_op=async_op)
    if work is not None:
        work.synchronize()
    return x.numpy().tolist()


def _is_compared(group: Any = None) -> bool:
    """True once the comparison has all collectives of this rank."""
    return backend_of(group).comparison.known_until == backend_of(group).sequence


def differ(way: str) -> list[str]:
    """Rank 1 makes another call than the others, each time in a group of its own: the errors."""
    odd, n = dist.get_rank() == 1, dist.get_world_size()
    x = arrays.full(2, 1.0)

    def gathered(**more: Any) -> Any:
        return dist.all_gather_into_tensor(
            arrays.full((3 if odd else 2) * n, 0.0), arrays.full(3 if odd else 2, 1.0), **more
        )

    attempts: list[Callable[..., Any]] = [
        lambda **more: dist.all_reduce(arrays.full(3 if odd else 2, 1.0), **more),
        lambda **more: dist.broadcast(x, 0, **more) if odd else dist.all_reduce(x, **more),
        lambda **more: dist.broadcast(x, 1 if odd else 0, **more),
        lambda **more: dist.all_reduce(x, dist.ReduceOp.MAX if odd else dist.ReduceOp.SUM, **more),
        lambda **more: dist.all_reduce(arrays.full(2, 1, np.int64 if odd else np.float64), **more),
        gathered,
        lambda **more: dist.barrier(**more) if odd else dist.all_reduce(x, **more),
    ]
    found = []
    for attempt in attempts:
        group = new_group()
        if way == "posted":
            found.append(error_of(attempt(group=group, async_op=True).synchronize))
        else:
            said = error_of(lambda a=attempt, g=group: a(group=g))
            # A blocking call returns once the device has it, and the failure is seen later.
            await_true(lambda g=group: error_of(g.check) != "nothing")
            found.append(error_of(group.check) if said == "nothing" else said)
        assert error_of(lambda g=group: _sum(group=g)) == found[-1]
        dist.destroy_process_group(group)
    ranks.nccl().machine.mismatches.clear()
    return found


@pytest.mark.parametrize("way", ["posted", "blocking"])
def test_calls_that_differ_raise_the_same_error_on_all_ranks(way: str) -> None:
    first, second, third = run(3, differ, way, env=QUIET)
    assert first == second == third
    assert all(text.startswith("CollectiveMismatchError: the calls #1 of the ranks") for text in first)
    assert all("ranks 0, 2: " in text and "rank 1 (" in text for text in first)
    assert all(text.count("test_call_comparison.py:") == 2 for text in first)
    for text, one, other in zip(
        first,
        [
            "all_reduce(float64[2] on cuda:0, SUM)",
            "all_reduce(",
            "broadcast(float64[2] on cuda:0, root=0)",
            "SUM)",
            "all_reduce(float64[2]",
            "all_gather_into_tensor(float64[2]",
            "all_reduce(",
        ],
        [
            "all_reduce(float64[3]",
            "broadcast(",
            "root=1)",
            "MAX)",
            "int64[2]",
            "all_gather_into_tensor(float64[3]",
            "barrier()",
        ],
        strict=True,
    ):
        assert one in text
        assert other in text


@on_ranks(3, start=run, env=QUIET)
def test_a_rank_that_does_not_come_is_named() -> None:
    group = new_group()
    _sum(group=group)
    x = arrays.full(2, 1.0)
    if dist.get_rank() != 1:
        work = dist.all_reduce(x, group=group, async_op=True, timeout=0.5)
        said = error_of(work.synchronize)
        assert said.startswith("OperationTimeoutError"), said
        assert "; missing: rank 1 (host " in said
        assert "; on the devices: rank 0: it has not ended; rank 2: it has not ended" in said
    else:
        await_true(lambda: error_of(group.check) != "nothing")
    dist.destroy_process_group(group)


@pytest.mark.parametrize("backend", ["cpu:gloo,cuda:nccl", "nccl", "cuda:nccl"])
@on_ranks(3, start=partial(run, bound=True), options=["backend"])
def test_calls_that_agree(backend: str) -> None:
    """Blocking and posted, in groups that are made in all ways; sizes that may differ; graphs of one rank only."""
    me, n = dist.get_rank(), dist.get_world_size()
    sums = []
    for group in (None, dist.new_group(), dist.split_group(split_ranks=[[0, 1], [2]])):
        x = arrays.full(4, me + 1.0)
        dist.all_reduce(x, group=group, async_op=True).wait()
        dist.all_reduce_coalesced([x, arrays.full(2, 1.0)], group=group)
        sums.append(x.numpy().tolist())
    assert sums == [[18.0] * 4, [18.0] * 4, ([6.0] * 4 if me < 2 else [3.0] * 4)]
    y, x = arrays.full(n, -1.0), arrays.full(n, float(me))
    dist.all_to_all_single(y, x)
    assert y.numpy().tolist() == [0.0, 1.0, 2.0]
    counts = [[1, 2, 3], [2, 1, 0], [0, 3, 1]]
    received = [row[me] for row in counts]
    y = arrays.full(sum(received), -1.0)
    dist.all_to_all_single(y, arrays.full(sum(counts[me]), float(me)), received, counts[me])
    assert y.numpy().tolist() == [0.0] * received[0] + [1.0] * received[1] + [2.0] * received[2]
    whole = [arrays.full(2, -1.0) for _ in range(n)]
    dist.gather(arrays.full(2, float(me)), whole if me == 0 else None, 0)
    # Equal bytes of another type, which NCCL copies.
    if me == 1:
        dist.broadcast(arrays.full(4, 1, np.int32), 0)
    else:
        dist.broadcast(arrays.full(2, 1, np.int64), 0)
    # All of them have been given to the comparison.
    await_true(_is_compared)
    dist.barrier()
    assert dist.group.WORLD.check() is None


def in_opposite_orders(way: str, connected: bool) -> str:
    """Two groups' operations, on rank 1 in the other order: the error."""
    first, second = new_group(), new_group()
    if connected:
        for group in (first, second):
            _sum(group=group)
    if dist.get_rank() == 1:
        first, second = second, first
    x, y = arrays.full(2, 1.0), arrays.full(2, 1.0)

    def attempt() -> None:
        if way == "one stream":
            dist.all_reduce(x, group=first)
        else:
            dist.all_reduce(x, group=first, async_op=True).wait()
        dist.all_reduce(y, group=second, async_op=True).synchronize()

    found = error_of(attempt)
    for group in (first, second):
        # The error of a group that no call has raised is raised here.
        assert error_of(lambda g=group: dist.destroy_process_group(g)) in ("nothing", found)
    return found


@pytest.mark.parametrize("connected", [True, False])
@pytest.mark.parametrize("way", ["one stream", "a wait"])
def test_operations_of_two_groups_in_opposite_orders_are_a_deadlock(way: str, connected: bool) -> None:
    """Connected ranks have enqueued both. Ranks that connect within their first call wait in NCCL."""
    found = run(2, in_opposite_orders, way, connected, env=QUIET)
    for text in found:
        assert text.startswith("DeadlockError: deadlock: 2 ranks wait for each other in a cycle:"), text
        assert re.search(
            r"rank 0 .*: all_reduce\(.* on group 'group-1' at .*test_call_comparison.py:\d+", text
        )
        assert re.search(
            r"rank 1 .*: all_reduce\(.* on group 'group-2' at .*test_call_comparison.py:\d+", text
        )


def wait_for_rank_1(behind: bool) -> list[float]:
    """An all_reduce that rank 1 never calls, or has enqueued behind one of another group that rank 0 never calls."""
    group, other = new_group(), new_group()
    for each in (group, other):
        _sum(group=each)
    if dist.get_rank() == 1:
        if not behind:
            threading.Event().wait()
        with arrays.Stream():
            dist.all_reduce(arrays.full(2, 1.0), group=other)
            dist.all_reduce(arrays.full(2, 1.0), group=group)
        threading.Event().wait()
    return _sum(group=group)


STALL = (
    r"all_reduce\(float64\[2\], SUM\) #2 on group 'group-1' at \S+py:\d+ has waited \d+ s; arrived: ranks? {arrived};"
    r" missing: {missing}; on the devices: {devices}"
)
HOST = re.compile(
    STALL.format(
        arrived="0, 2",
        missing=r"rank 1 \(.*\): not in a collective of this group; is at \S+py:\d+, last was all_reduce\(.*\) #1",
        devices="rank 0: it has not ended; rank 2: it has not ended",
    )
)
DEVICE = re.compile(
    STALL.format(
        arrived="0, 1, 2",
        missing=r"none \(all are waiting\)",
        devices=r"rank 0: it has not ended; rank 1: it has not ended, behind all_reduce\(float64\[2\], SUM\) #2"
        r" of group 'group-2' at \S+py:\d+; rank 2: it has not ended",
    )
)


@pytest.mark.parametrize(("behind", "words"), [(False, HOST), (True, DEVICE)], ids=["host", "device"])
def test_a_warning_tells_a_wait_for_a_host_from_one_for_a_device(
    behind: bool, words: re.Pattern[str]
) -> None:
    with joined(3, SimulatedJob, env={"UNICOLL_STALL_WARNING": "1"}, quiet=False) as job:
        job.call(wait_for_rank_1, behind)
        lines: list[str] = []

        def is_there() -> bool:
            lines[:] = [
                line for rank in range(3) for line in job.stderr(rank).splitlines() if "has waited" in line
            ]
            return any(map(words.search, lines))

        await_true(is_there)


def leave_early() -> str:
    """Rank 1 leaves the job without the all_reduce that the others wait in; rank 0 has the control plane."""
    group = new_group()
    _sum(group=group)
    return "" if dist.get_rank() == 1 else error_of(lambda: _sum(group=group))


def test_a_rank_that_leaves_without_a_collective_ends_it() -> None:
    with joined(3, SimulatedJob, env=QUIET) as job:
        job.call(leave_early)
        assert job.collect(60, [1])[0].value == ""
        job.call(end, ranks=[1])
        for outcome in job.collect(60, [0, 2]):
            assert re.fullmatch(
                r"RankLostError: all_reduce\(.*\) #2 on group 'group-1': rank 1 \(.*\) has left the job: .*",
                outcome.value,
            ), outcome.value


@on_ranks(2, start=run, env=QUIET)
def test_calls_of_one_rank_only_do_not_shift_the_numbers_of_collectives() -> None:
    """Messages, signals, and a collective in a graph."""
    group: Any = new_group()
    lazy: Any = dist.new_group(backend="cuda:nccl")
    me, sim = dist.get_rank(), ranks.simulation()
    x = arrays.full(2, 1.0)
    _sum(group=group)
    window = group.symmetric_empty(2, "float64")
    if me == 0:
        group.signal(1, x)
        dist.send(x, 1, group=group)
        stream = arrays.Stream()
        with stream:
            y = arrays.full(2, 1.0)
            stream.synchronize()
            with sim.capture(stream.ptr) as graphs:
                dist.all_reduce(y, group=group)
        graphs[0].destroy()
    else:
        group.wait_signal(0, x)
        dist.recv(x, 0, group=group)
    assert backend_of(group).sequence == 1
    work = dist.all_gather_into_tensor(arrays.full(4, 0.0), x, group=lazy, async_op=True)
    work.wait()
    sequences = [backend_of(each).sequence for each in (group, lazy)]
    for each in (group, lazy):
        dist.broadcast(x, 0, group=each, async_op=True).synchronize()
        await_true(partial(_is_compared, each))
        assert each.check() is None
    assert sequences == [1, 1]
    del window
    for each in (group, lazy):
        dist.destroy_process_group(each)


@on_ranks(2, start=run, env=QUIET)
def test_the_deadline_of_a_message_says_what_its_peer_does() -> None:
    group = new_group()
    _sum(group=group)
    if dist.get_rank() == 0:
        x = arrays.full(2, 1.0)
        said = error_of(lambda: group.using(timeout=0.5).isend(x, 1).synchronize())
        assert re.match(
            r"OperationTimeoutError: send\(float64\[2\].*\) on group 'group-1' timed out after 0.5 s;"
            r" rank 1 \(.*\): not in a collective of this group; is at \S+py:\d+, last was all_reduce\(.*\) #1",
            said,
        ), said
    else:
        await_true(lambda: error_of(group.check) != "nothing")
    dist.destroy_process_group(group)


@on_ranks(2, start=run, env=QUIET)
def test_a_call_that_connects_behind_another_group_is_no_deadlock() -> None:
    """Rank 0 is in NCCL with a scatter, behind operations that rank 1 calls a second later."""
    group, other = new_group(), new_group()
    for each in (group, other):
        _sum(group=each)
    x, me = arrays.full(2, 1.0), dist.get_rank()
    if me == 1:
        time.sleep(1.0)
    dist.all_reduce(x, group=other)
    dist.all_reduce(x, group=group)
    dist.scatter(x, [arrays.full(2, 5.0), arrays.full(2, 6.0)] if me == 0 else None, 0, group=group)
    assert x.numpy().tolist() == [5.0 + me] * 2
    for each in (group, other):
        dist.destroy_process_group(each)
