"""What ranks do in the fault tests."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import ranks
from calls import COLLECTIVES, EVERYTHING, invoke
from ranks import Failure, tell

import unicoll as dist

Story = tuple[Failure | None, float]
"""How a call ended, and how many seconds it took."""


def story_of(call: Callable[[], Any]) -> Story:
    """Make a call and tell how it ended."""
    start = time.monotonic()
    try:
        call()
    except Exception as error:
        return Failure.of(error), time.monotonic() - start
    return None, time.monotonic() - start


def loop(name: str, count: int) -> None:
    """Make a call again and again, until it fails."""
    for i in range(1_000_000):
        invoke(name, count=count)
        if i == 2:
            tell("looping")


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
            tell("looping")


def loop_async(name: str) -> None:
    """As :func:`loop`, in the background, waited for."""
    for i in range(1_000_000):
        work = invoke(name, async_op=True)
        work.wait()
        if i == 2:
            tell("looping")


_groups: dict[str, Any] = {}


def make_groups() -> None:
    """A group for each operation."""
    for name in EVERYTHING:
        _groups[name] = dist.new_group(timeout=60)


def use_groups() -> None:
    """Every operation once, so that all connections are there."""
    for name in EVERYTHING:
        invoke(name, _groups[name])


def all_at_once(names: tuple[str, ...], timeout: float) -> dict[str, Story]:
    """Each operation on its own group from its own thread; how each ended."""
    stories: dict[str, Story] = {}

    def one(name: str) -> None:
        stories[name] = story_of(lambda: invoke(name, _groups[name], timeout=timeout))

    threads = [threading.Thread(target=one, args=(name,), name=f"test-{name}") for name in names]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    return stories


def compute(seconds: float) -> None:
    """What a rank is busy with while the others wait for it."""
    time.sleep(seconds)


# --- different calls ------------------------------------------------------------------------------------------------


def differ(cases: list[tuple[str, dict[str, Any], str, dict[str, Any], int]]) -> list[Story]:
    """Each case on a group of its own: one rank makes another call than the others.

    Args:
        cases: name and options of the call of most ranks, those of the odd one's, and which rank that is.
    """
    stories = []
    for name, options, odd_name, odd_options, odd in cases:
        group = dist.new_group()
        mine, more = (odd_name, odd_options) if dist.get_rank() == odd else (name, options)
        stories.append(story_of(lambda m=mine, o=more, g=group: invoke(m, g, timeout=10, **o)))  # type: ignore[misc]
        dist.destroy_process_group(group)
    return stories


def everyone_another_root(name: str, count: int) -> Story:
    """Each rank takes the next one for the root."""
    group = dist.new_group()
    root = (dist.get_rank() + 1) % dist.get_world_size()
    story = story_of(lambda: invoke(name, group, root=root, count=count, timeout=10))
    dist.destroy_process_group(group)
    return story


def another_order(first: str, second: str) -> Story:
    """The last rank makes two calls in the wrong order."""
    group = dist.new_group()
    names = [first, second] if dist.get_rank() < dist.get_world_size() - 1 else [second, first]

    def both() -> None:
        for name in names:
            invoke(name, group, timeout=10)

    story = story_of(both)
    dist.destroy_process_group(group)
    return story


def splits_differ(count: int) -> Story:
    """In an all_to_all_single rank 1 expects more of rank 0 than it sends."""
    group = dist.new_group()
    n, me = dist.get_world_size(), dist.get_rank()
    give, take = [count] * n, [count] * n
    if me == 1:
        take[0] += 1
    given, room = np.ones(sum(give)), np.zeros(sum(take))
    story = story_of(lambda: dist.all_to_all_single(room, given, take, give, group=group, timeout=10))
    dist.destroy_process_group(group)
    return story


# --- bad arguments --------------------------------------------------------------------------------------------------


def bad_calls() -> dict[str, tuple[Callable[[], Any], str, str]]:
    """Calls that one rank alone refuses: what is called, the error's type, and a word that its message has."""
    n = dist.get_world_size()
    x, y = np.ones(4, np.float32), np.ones(3, np.float32)
    frozen = np.ones(4, np.float32)
    frozen.flags.writeable = False
    many = [np.ones(4, np.float32) for _ in range(n)]
    d: Any = dist
    op = dist.ReduceOp
    return {
        "a list": (lambda: d.all_reduce([1.0, 2.0]), "DistTypeError", "all_reduce"),
        "nothing": (lambda: d.broadcast(None, 0), "DistTypeError", "broadcast"),
        "a number": (lambda: d.reduce(3.0, 0), "DistTypeError", "reduce"),
        "an object array": (lambda: d.all_reduce(np.array([None])), "DistTypeError", "all_reduce"),
        "strings": (lambda: d.broadcast(np.array(["x"]), 0), "DistTypeError", "broadcast"),
        "dates": (lambda: d.broadcast(np.array(["2024"], "M8[D]"), 0), "DistTypeError", "broadcast"),
        "other byte order": (lambda: d.all_reduce(np.ones(4, ">f4")), "DistTypeError", "byte order"),
        "a masked array": (lambda: d.all_reduce(np.ma.masked_array([1.0])), "DistTypeError", "mask"),
        "read-only": (lambda: d.all_reduce(frozen), "DistArgumentError", "read-only"),
        "read-only output": (lambda: d.broadcast(frozen, 0), "DistArgumentError", "read-only"),
        "root too large": (lambda: d.broadcast(x, n), "DistArgumentError", "src"),
        "root negative": (lambda: d.reduce(x, -1), "DistArgumentError", "dst"),
        "root is no number": (lambda: d.gather(x, None, "0"), "DistTypeError", "dst"),
        "no root": (lambda: d.broadcast(x), "DistArgumentError", "src"),
        "two roots": (lambda: d.broadcast(x, 0, group_src=0), "DistArgumentError", "src"),
        "no operation": (lambda: d.all_reduce(x, op="AVERAGE"), "DistTypeError", "op"),
        "premul without factor": (lambda: d.all_reduce(x, op=op.PREMUL_SUM), "DistTypeError", "PREMUL_SUM"),
        "bits of floats": (lambda: d.all_reduce(x, op=op.BAND), "DistTypeError", "BAND"),
        "least of complex": (lambda: d.all_reduce(np.ones(2, "c8"), op=op.MIN), "DistTypeError", "MIN"),
        "average of bools": (lambda: d.all_reduce(np.ones(2, "?"), op=op.AVG), "DistTypeError", "AVG"),
        "half of integers": (
            lambda: d.all_reduce(np.ones(2, "i4"), op=op.PREMUL_SUM(0.5)),
            "DistTypeError",
            "factor",
        ),
        "list too short": (lambda: d.all_gather(many[:-1], x), "DistArgumentError", "all_gather"),
        "no list": (lambda: d.all_gather(None, x), "DistTypeError", "tensor_list"),
        "pieces too small": (lambda: d.all_gather([y] * n, x), "DistArgumentError", "output"),
        "output too small": (lambda: d.all_gather_into_tensor(y, x), "DistArgumentError", "output"),
        "other dtype": (
            lambda: d.all_gather_into_tensor(np.ones(4 * n), x),
            "DistTypeError",
            "all_gather_into_tensor",
        ),
        "input too small": (lambda: d.reduce_scatter_tensor(x, y), "DistArgumentError", "input"),
        "inputs too few": (lambda: d.reduce_scatter(x, many[1:]), "DistArgumentError", "reduce_scatter"),
        "gather list not on root": (lambda: d.gather(x, many, 0), "DistArgumentError", "gather"),
        "scatter list not on root": (lambda: d.scatter(x, many, 0), "DistArgumentError", "scatter"),
        "gather list missing": (lambda: d.gather(x, None, dist.get_rank()), "DistArgumentError", "gather"),
        "scatter list missing": (lambda: d.scatter(x, None, dist.get_rank()), "DistArgumentError", "scatter"),
        "uneven rows": (
            lambda: d.all_to_all_single(np.ones(n + 1), np.ones(n + 1)),
            "DistArgumentError",
            "split",
        ),
        "wrong splits": (
            lambda: d.all_to_all_single(np.ones(n), np.ones(n), [1] * n, [2] * n),
            "DistArgumentError",
            "input_split_sizes",
        ),
        "negative splits": (
            lambda: d.all_to_all_single(np.ones(n), np.ones(n), [-1] + [1] * (n - 2) + [2], [1] * n),
            "DistArgumentError",
            "output_split_sizes",
        ),
        "time is up": (lambda: d.all_reduce(x, timeout=-1), "DistArgumentError", "timeout"),
        "no time": (lambda: d.barrier(timeout=0), "DistArgumentError", "timeout"),
        "time of no kind": (lambda: d.barrier(timeout="long"), "DistTypeError", "timeout"),
        "no arrays": (lambda: d.all_reduce_coalesced([]), "DistArgumentError", "all_reduce"),
        "send to oneself": (lambda: d.send(x, dist.get_rank()), "DistArgumentError", "dst"),
        "send to nobody": (lambda: d.send(x, n), "DistArgumentError", "dst"),
        "tag of no kind": (
            lambda: d.send(x, (dist.get_rank() + 1) % n, tag="x"),
            "DistTypeError",
            "tag",
        ),
        "no P2POp": (lambda: d.batch_isend_irecv([x]), "DistTypeError", "P2POp"),
        "no group": (lambda: d.all_reduce(x, group="world"), "DistTypeError", "group"),
    }


def refuse_each(who: int) -> dict[str, Failure | None]:
    """Rank ``who`` makes all bad calls; after each, all ranks make good ones."""
    stories: dict[str, Failure | None] = {}
    for name, (call, _, _) in bad_calls().items():
        if dist.get_rank() == who:
            stories[name] = story_of(call)[0]
        x = np.ones(3)
        dist.all_reduce(x, timeout=20)
        assert (x == dist.get_world_size()).all(), name
    return stories


# --- ends -----------------------------------------------------------------------------------------------------------


def end_differently(how: str, who: int) -> Any:
    """One rank ends; the others wait for it in a barrier, and are asked to end afterwards."""
    dist.barrier()
    if dist.get_rank() != who:
        return story_of(lambda: dist.barrier(timeout=20))
    if how == "sys.exit":
        sys.exit(3)
    if how == "os._exit":
        os._exit(4)
    if how == "exception":
        raise ranks.Uncaught("the reason why")
    if how == "destroy":
        dist.destroy_process_group()
        return None
    assert how == "return"
    return ranks.end()


def leave_work_behind() -> str:
    """End with operations in flight that nobody will match, from several threads."""
    me, n = dist.get_rank(), dist.get_world_size()
    group = dist.new_group()
    dist.barrier()
    if me == 0:
        works = [dist.all_reduce(np.ones(10), async_op=True) for _ in range(3)]
        works.append(dist.irecv(np.ones(3), src=1, tag=5))
        works.append(dist.isend(np.ones(1 << 22), dst=1, tag=6))
        threading.Thread(target=story_of, args=(group.barrier,), daemon=True).start()
        time.sleep(0.2)
        for w in works:
            assert w is not None
            w._waited = True  # no complaint about what is dropped on purpose
    else:
        if me == n - 1:
            dist.irecv(np.ones(3), tag=77)._waited = True  # type: ignore[union-attr]
        time.sleep(0.5)
    return ranks.end()


def destroy_early(who: int, seconds: float) -> Story:
    """Rank ``who`` destroys its groups while the others are in a collective."""
    dist.barrier()
    if dist.get_rank() == who:
        time.sleep(seconds)
        return story_of(dist.destroy_process_group)
    return story_of(lambda: dist.all_reduce(np.ones(5), timeout=20))


def start_anew(path: str, survivors: list[int]) -> list[float]:
    """After a failure: the survivors end their groups and make a smaller world."""
    dist.destroy_process_group()
    me = survivors.index(ranks._rank)
    dist.init_process_group("gloo", f"file://{path}", world_size=len(survivors), rank=me, timeout=30)
    x = np.ones(3)
    dist.all_reduce(x)
    return [float(v) for v in x]


# --- interruptions and clocks -----------------------------------------------------------------------------------------


def interrupted() -> Any:
    """Rank 1 gets SIGINT in the midst of a collective that rank 0 does not make."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    dist.barrier()
    if dist.get_rank() == 0:
        time.sleep(1.0)
        return story_of(lambda: dist.all_reduce(np.ones(4), timeout=20))
    if dist.get_rank() == 1:
        tell("in the collective")
        try:
            dist.all_reduce(np.ones(4), timeout=20)
        except KeyboardInterrupt:
            return "interrupted"
        return "not interrupted"
    return story_of(lambda: dist.all_reduce(np.ones(4), timeout=20))


def impatient() -> dict[str, Any]:
    """``work.wait(timeout)`` gives up waiting, not the operation; a call's own timeout ends it."""
    me = dist.get_rank()
    x = np.ones(4)
    if me == 0:
        time.sleep(1.0)
        dist.all_reduce(x)
        return {"sum": x.tolist()}
    work = dist.all_reduce(x, async_op=True)
    assert work is not None
    first = story_of(lambda: work.wait(0.2))
    state = (work.is_completed(), work.exception())
    work.wait()
    return {"first": first, "state": state, "sum": x.tolist()}


def own_timeout(name: str) -> Story | None:
    """Only rank 0 makes a call, with a timeout of its own."""
    group = dist.new_group(timeout=60)
    dist.barrier()
    story = None
    if dist.get_rank() == 0:
        if name == "work.wait":
            work = dist.all_reduce(np.ones(4), group=group, async_op=True, timeout=0.5)
            assert work is not None
            story = story_of(work.wait)
        elif name == "recv":
            story = story_of(lambda: dist.recv(np.ones(4), src=1, group=group, timeout=0.5))
        elif name == "recv from any":
            story = story_of(lambda: dist.recv(np.ones(4), group=group, timeout=0.5))
        else:
            story = story_of(lambda: invoke(name, group, timeout=0.5))
    dist.barrier()
    dist.destroy_process_group(group)
    return story


# --- strangers and children -------------------------------------------------------------------------------------------


def ports() -> list[tuple[str, int]]:
    """Where this process accepts connections."""
    return ranks.listening_ports()


def work_for(seconds: float) -> int:
    """Collectives and messages of all sizes for a while, on groups old and new; how many rounds."""
    rounds, stop = 0, np.zeros(1, np.int32)
    started = time.monotonic()
    while not stop[0]:
        group = dist.new_group() if rounds % 5 == 0 else None
        for name in COLLECTIVES:
            invoke(name, group, count=7 if rounds % 2 else 5000)
        invoke("send and recv", group)
        if group is not None:
            dist.destroy_process_group(group)
        rounds += 1
        stop[0] = dist.get_rank() == 0 and time.monotonic() - started > seconds
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
    tell("worked")
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
        sys.stderr.flush()
        sys.exit(0)
    time.sleep(600)
    os._exit(1)


def hostname() -> str:
    return socket.gethostname()
