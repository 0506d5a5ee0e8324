"""What ranks do in the fault tests."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import sys
import threading
import time
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
from unicoll.backend.endpoint import Endpoint


def loop(name: str, count: int) -> None:
    """Make a call again and again, until it fails."""
    for i in range(1_000_000):
        invoke(name, count=count)
        if i == 2:
            send_note("looping")


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


def loop_async(name: str) -> None:
    """As :func:`loop`, in the background, waited for."""
    for i in range(1_000_000):
        work = invoke(name, async_op=True)
        work.wait()
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
        await_true(lambda: all(_in_a_collective(_groups[name]) for name in names))
        send_word(0)
    for t in threads:
        t.join()
    return outcomes


def _in_a_collective(group: Any = None) -> bool:
    """True if this rank has begun a collective of a group, and has not ended it."""
    return (group or dist.group.WORLD)._backends.for_device("cpu")._record.call is not None


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
        await_true(lambda: _in_a_collective() and _in_a_collective(group))
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


def destroy_early(who: int) -> CallOutcome:
    """Rank ``who`` destroys its groups while the others are in a collective."""
    dist.barrier()
    if dist.get_rank() == who:
        for _ in range(dist.get_world_size() - 1):
            await_word()
        return outcome_of(dist.destroy_process_group)

    def tell() -> None:
        await_true(_in_a_collective)
        send_word(who)

    thread = threading.Thread(target=tell)
    thread.start()
    outcome = outcome_of(lambda: dist.all_reduce(np.ones(5), timeout=60))
    thread.join()
    return outcome


def start_anew(path: str, survivors: list[int]) -> list[float]:
    """After a failure: the survivors end their groups and make a smaller world."""
    dist.destroy_process_group()
    me = survivors.index(worker._rank)
    dist.init_process_group("gloo", f"file://{path}", world_size=len(survivors), rank=me, timeout=30)
    x = np.ones(3)
    dist.all_reduce(x)
    return [float(v) for v in x]


def keep_the_gil(fifo: str) -> None:
    """Once it is initialized, rank 0 keeps the GIL until the other rank is, as MPI_Init does."""
    descriptor = os.open(fifo, os.O_RDWR)
    if worker._rank == 1:
        read_directory = Endpoint.read_directory

        def late(self: Endpoint) -> None:
            time.sleep(0.5)
            read_directory(self)

        Endpoint.read_directory = late  # type: ignore[method-assign]
    worker.enter()
    if worker._rank == 0:
        ctypes.PyDLL(None).read(descriptor, ctypes.create_string_buffer(1), 1)
    else:
        os.write(descriptor, b"x")
    os.close(descriptor)


# --- interruptions and clocks -------------------------------------------------------------------------------


def interrupted() -> Any:
    """Rank 1 gets SIGINT in the midst of a collective that rank 0 does not make."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    dist.barrier()
    if dist.get_rank() == 0:
        world: Any = dist.group.WORLD
        await_true(lambda: world.job.control.group_failure(world.name))
        return outcome_of(lambda: dist.all_reduce(np.ones(4), timeout=60))
    if dist.get_rank() == 1:
        threading.Thread(target=_note_in_a_call).start()
        try:
            dist.all_reduce(np.ones(4), timeout=60)
        except KeyboardInterrupt:
            return "interrupted"
        return "not interrupted"
    return outcome_of(lambda: dist.all_reduce(np.ones(4), timeout=60))


def _note_in_a_call() -> None:
    await_true(_in_a_collective)
    send_note("in the collective")


def wait_with_a_timeout() -> dict[str, Any]:
    """``work.wait(timeout)`` gives up waiting, not the operation; a call's own timeout ends it."""
    me = dist.get_rank()
    x = np.ones(4)
    if me == 0:
        await_word()
        dist.all_reduce(x)
        return {"sum": x.tolist()}
    work = dist.all_reduce(x, async_op=True)
    assert work is not None
    first = outcome_of(lambda: work.wait(0.2))
    state = (work.is_completed(), work.exception())
    send_word(0)
    work.wait()
    return {"first": first, "state": state, "sum": x.tolist()}


def own_timeout(name: str) -> CallOutcome | None:
    """Only rank 0 makes a call, with a timeout of its own."""
    group = dist.new_group(timeout=60)
    dist.barrier()
    outcome = None
    if dist.get_rank() == 0:
        if name == "work.wait":
            work = dist.all_reduce(np.ones(4), group=group, async_op=True, timeout=0.5)
            assert work is not None
            outcome = outcome_of(work.wait)
        elif name == "recv":
            outcome = outcome_of(lambda: dist.recv(np.ones(4), src=1, group=group, timeout=0.5))
        elif name == "recv from any":
            outcome = outcome_of(lambda: dist.recv(np.ones(4), group=group, timeout=0.5))
        else:
            outcome = outcome_of(lambda: invoke(name, group, timeout=0.5))
    dist.barrier()
    dist.destroy_process_group(group)
    return outcome


# --- unauthenticated clients and children --------------------------------------------------------------------


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


def work_with_child(how: str) -> Any:
    """Rank 1 has a forked child while all work on; then rank 1 waits to be killed."""
    dist.barrier()
    child = 0
    if dist.get_rank() == 1:
        child = _fork(how)
    for i in range(20):
        for name in COLLECTIVES:
            invoke(name, timeout=20)
        if i == 10 and child and how != "lives on":
            assert os.waitpid(child, 0) == (child, 0)
    if how != "lives on":
        return None
    send_note("worked")
    return loop("all_reduce", 4)


def _fork(how: str) -> int:
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of fork in a process with threads
        child = os.fork()
    if child:
        return child
    if how == "exits":
        os._exit(0)
    if how == "leaves":
        assert not dist.is_initialized()
        try:
            dist.barrier()
        except dist.NotInitializedError as error:
            told = "forked" in str(error)
        assert told
        sys.stderr.flush()
        sys.exit(0)
    time.sleep(600)
    os._exit(1)


def hostname() -> str:
    return socket.gethostname()
