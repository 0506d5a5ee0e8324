"""What ranks do in the fault tests."""

from __future__ import annotations

import os
import socket
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

import unicoll as dist
from tests.support import worker
from tests.support.calls import COLLECTIVES, EVERYTHING, invoke
from tests.support.order import await_true, await_word, send_word
from tests.support.outcomes import CallOutcome, outcome_of
from tests.support.worker import send_note


def loop(name: str, count: int) -> None:
    """Make a call again and again, until it fails."""
    for i in range(1_000_000):
        invoke(name, count=count)
        if i == 2:
            send_note("looping")


def call_on(rank: int, name: str) -> None:
    """All ranks make a call, and one rank makes it once more."""
    invoke(name, count=10)
    send_note("called")
    if dist.get_rank() == rank:
        invoke(name, count=10)


_smallest: list[Any] = []


def _smallest_group() -> Any:
    return _smallest[-1] if _smallest else dist.group.WORLD


def loop_smallest() -> None:
    """all_reduce on the group that was made last, until it fails."""
    group = _smallest_group()
    for i in range(1_000_000):
        dist.all_reduce(np.ones(1000), group=group)
        if i == 2:
            send_note("looping")


def shrink_smallest(victim: int, others: Sequence[int] = ()) -> dict[str, Any]:
    """A group without ranks of the group that was made last, and what it does."""
    group = dist.shrink_group([victim, *others], _smallest_group())
    _smallest.append(group)
    me, n = group.rank(), group.size()
    x = np.full(100_000, float(dist.get_rank()))
    dist.all_reduce(x, group=group)
    sent, received = np.array([dist.get_rank()]), np.zeros(1, np.int64)
    work = group.isend(sent, (me + 1) % n)
    group.recv(received, (me - 1) % n)
    work.wait()
    assert (x == x[0]).all()
    return {"size": n, "sum": float(x[0]), "received": int(received[0])}


def grow_pair() -> float:
    """Rank 2 joins ranks 0 and 1."""
    pair: Any = dist.new_group([0, 1])
    larger = dist.grow_group([2], pair)
    _smallest.append(larger)
    x = np.ones(1)
    dist.all_reduce(x, group=larger)
    return float(x[0])


def grow_without_rank_0() -> tuple[list[int], float]:
    """Rank 2 joins rank 1, the remaining member of a group."""
    group: Any = dist.GroupMember.NON_GROUP_MEMBER
    if dist.get_rank() == 1:
        group = dist.shrink_group([0, 2], _smallest_group())
    larger = dist.grow_group([2], group, timeout=20)
    x = np.full(1, float(dist.get_rank()))
    dist.all_reduce(x, group=larger)
    return dist.get_process_group_ranks(larger), float(x[0])


def departed_ranks(awaited: Sequence[int]) -> list[int]:
    """Who is known to be gone, once all of ``awaited`` are."""
    group = dist.group.WORLD
    assert group is not None
    control = group.job.control
    assert control is not None
    for rank in awaited:
        control.await_departure(rank, 20)
    return sorted(control.departed)


def exchange_with(who: int, count: int) -> None:
    """Messages between one rank and each other, both ways, until it fails."""
    me = dist.get_rank()
    others = [r for r in range(dist.get_world_size()) if r != who] if me == who else [who]
    x = np.ones(count)
    for i in range(1_000_000):
        for other in others:
            if me == who:
                dist.send(x, other, tag=3)
                dist.recv(x, other)
            else:
                dist.recv(x, other if i % 2 else None, tag=3)
                dist.send(x, other)
        if i == 2:
            send_note("looping")


_groups: dict[str, Any] = {}


def make_groups() -> None:
    """A group for each operation."""
    for name in EVERYTHING:
        _groups[name] = dist.new_group(timeout=60)


def use_groups() -> None:
    """Every operation once, so that all connections are there."""
    for name in EVERYTHING:
        invoke(name, _groups[name])


def all_at_once(names: tuple[str, ...], timeout: float) -> dict[str, CallOutcome]:
    """Each operation on its own group from its own thread; how each ended.

    Rank 0 begins, with the timeout, when rank 1 is in all operations with the groups' timeout.
    """
    outcomes: dict[str, CallOutcome] = {}
    me = dist.get_rank()
    limit = timeout if me == 0 else None
    if me == 0:
        await_word()

    def one(name: str) -> None:
        outcomes[name] = outcome_of(lambda: invoke(name, _groups[name], timeout=limit))

    threads = [threading.Thread(target=one, args=(name,), name=f"test-{name}") for name in names]
    for t in threads:
        t.start()
    if me == 1:
        await_true(lambda: all(in_a_collective(_groups[name]) for name in names))
        send_word(0)
    for t in threads:
        t.join()
    return outcomes


def in_a_collective(group: Any = None) -> bool:
    """True if this rank has begun a collective of a group, and has not ended it."""
    return (group or dist.group.WORLD)._backends.for_device("cpu").state.call is not None


def compute(fifo: str) -> None:
    """What a rank is busy with while the others wait for it, until the test opens a named pipe."""
    Path(fifo).read_bytes()


# --- ends ---------------------------------------------------------------------------------------------------


def end_differently(how: str, who: int) -> Any:
    """One rank ends; the others wait for it in a barrier, and are asked to end afterwards."""
    dist.barrier()
    if dist.get_rank() != who:
        return outcome_of(lambda: dist.barrier(timeout=60))
    if how == "sys.exit":
        sys.exit(3)
    if how == "os._exit":
        os._exit(4)
    if how == "exception":
        raise worker.Uncaught("the reason why")
    if how == "destroy":
        dist.destroy_process_group()
        return None
    assert how == "return"
    return worker.end()


def leave_work_behind() -> str:
    """End with operations in flight that nobody will match, from several threads."""
    me, n = dist.get_rank(), dist.get_world_size()
    group = dist.new_group()
    dist.barrier()
    if me == 0:
        works = [dist.all_reduce(np.ones(10), async_op=True) for _ in range(3)]
        works.append(dist.irecv(np.ones(3), src=1, tag=5))
        works.append(dist.isend(np.ones(1 << 22), dst=1, tag=6))
        threading.Thread(target=outcome_of, args=(group.barrier,), daemon=True).start()
        await_true(lambda: in_a_collective() and in_a_collective(group))
        for rank in range(1, n):
            send_word(rank)
        for w in works:
            assert w is not None
            w._waited = True  # no complaint about what is dropped on purpose
    else:
        if me == n - 1:
            dist.irecv(np.ones(3), tag=77)._waited = True  # type: ignore[union-attr]
        await_word()
    return worker.end()


def start_anew(path: str, survivors: list[int]) -> list[float]:
    """After a failure: the survivors end their groups and make a smaller world."""
    dist.destroy_process_group()
    me = survivors.index(worker._rank)
    dist.init_process_group("gloo", f"file://{path}", world_size=len(survivors), rank=me, timeout=30)
    x = np.ones(3)
    dist.all_reduce(x)
    return [float(v) for v in x]


def work_until(path: str) -> int:
    """Collectives and messages of all sizes, on groups old and new, until a file is there and five rounds are done."""
    rounds, stop = 0, np.zeros(1, np.int32)
    while not stop[0]:
        group = dist.new_group() if rounds % 5 == 0 else None
        for name in COLLECTIVES:
            invoke(name, group, count=7 if rounds % 2 else 5000)
        invoke("send and recv", group)
        if group is not None:
            dist.destroy_process_group(group)
        rounds += 1
        stop[0] = dist.get_rank() == 0 and rounds >= 5 and Path(path).exists()
        dist.broadcast(stop, 0)
    return rounds


def hostname() -> str:
    return socket.gethostname()
