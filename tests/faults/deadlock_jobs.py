"""What ranks do in the tests of deadlocks and of warnings about calls that wait."""

from __future__ import annotations

import random
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

import unicoll as dist
from tests.support.order import await_word, send_word
from tests.support.outcomes import outcome_of
from tests.support.worker import Failure, send_note
from tests.unit.simulated_programs import ANY, COLLECTIVE, LARGE, POST, RECV, SEND, SLEEP, clean_program

_BUFFERS = [int(Path(f"/proc/sys/net/ipv4/tcp_{which}mem").read_text().split()[2]) for which in "rw"]
UNBUFFERED = 2 * sum(_BUFFERS) + (4 << 20)
"""Bytes of a message of which the hosts' buffers, once they are full, do not take the rest in any case."""
SENDS = ("send", "isend") if UNBUFFERED <= 1 << 28 else ()
CALLS_OF_MPI = (
    "all_reduce",
    "broadcast",
    "all_gather_object",
    "async",
    "recv",
    "recv from any",
    "irecv",
    "probe",
    "coalesced",
)
"""Calls that are known to wait, with the backend mpi, too."""
CALLS = (*CALLS_OF_MPI, *SENDS)
THREADS = ("main", "joined thread", "pool")
LARGE_ELEMENTS = 1 << 19
"""Of messages that are larger than the shared memory between two ranks."""


def block(kind: str, group: Any, peer: int) -> None:
    """A call that waits for rank ``peer``."""
    x = np.ones(3)
    if kind == "all_reduce":
        dist.all_reduce(x, group=group)
    elif kind == "broadcast":
        dist.broadcast(x, peer, group=group)
    elif kind == "all_gather_object":
        dist.all_gather_object([None] * group.size(), "object", group=group)
    elif kind == "async":
        works = [dist.all_reduce(x, group=group, async_op=True) for _ in range(3)]
        for work in works:
            assert work is not None
            work.wait()
    elif kind == "coalesced":
        dist.all_reduce_coalesced([x, x.copy()], group=group)
    elif kind == "irecv":
        received = dist.irecv(x, src=peer, group=group)
        assert received is not None
        received.wait()
    elif kind == "probe":
        dist.probe(peer, group)
    elif kind == "send":
        dist.send(np.zeros(UNBUFFERED, np.uint8), peer, group=group)
    elif kind == "isend":
        works = [
            dist.isend(x, peer, group=group),
            dist.isend(np.zeros(UNBUFFERED, np.uint8), peer, group=group),
        ]
        for work in works:
            assert work is not None
            work.wait()
    else:
        dist.recv(x, src=None if kind == "recv from any" else peer, group=group)


def run_in(where: str, call: Callable[[], Any]) -> Any:
    """Make a call on the main thread, a thread that it joins, or a thread of a pool."""
    if where == "main":
        return call()
    if where == "pool":
        with ThreadPoolExecutor(2) as pool:
            pool.submit(int).result()
            return pool.submit(call).result()
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(call()), name="test-blocked")
    thread.start()
    thread.join()
    return results[0]


def when_reported(act: Callable[[], object]) -> None:
    """Do something when this rank has reported to the relay that it is blocked, on the thread that reports it."""
    world: Any = dist.group.WORLD
    control = world.job.control
    send = control.send

    def send_and_act(message: dict[str, Any]) -> None:
        send(message)
        if message["t"] == "waiting" and message["state"] is not None and control.send is send_and_act:
            control.send = send
            act()

    control.send = send_and_act


def circle(draw: str, kinds: Sequence[str] = CALLS) -> dict[str, Any]:
    """Some ranks wait for each other in a cycle, others for one of them, others sleep; what becomes of this rank."""
    rng, size, me = random.Random(draw), dist.get_world_size(), dist.get_rank()
    ranks = rng.sample(range(size), rng.randint(2, size))
    used = rng.random() < 0.5
    calls: dict[int, tuple[str, Any, int, str, float]] = {}
    for i, rank in enumerate(ranks):
        following = ranks[(i + 1) % len(ranks)]
        made = dist.new_group(sorted((rank, following)))
        calls[rank] = rng.choice(kinds), made, following, rng.choice(THREADS), rng.random() * 0.5
        if used and me in (rank, following):
            dist.barrier(made)
    for rank in set(range(size)) - calls.keys():
        made = dist.new_group(sorted((rank, ranks[0])))
        if rng.random() < 0.3:
            calls[rank] = rng.choice(kinds), made, ranks[0], "main", rng.random() * 0.2
    found: dict[str, Any] = {"circle": ranks, "stuck": sorted(calls), "failure": None}
    if me in calls:
        kind, made, peer, where, delay = calls[me]
        if me not in ranks:
            when_reported(lambda: send_word(ranks[0]))
        elif me == ranks[0]:  # the circle closes when those who wait for it are known to be blocked
            for _ in range(len(calls) - len(ranks)):
                await_word()
        time.sleep(delay)
        found["entered"], found["group"] = time.monotonic(), made.name
        found["failure"], _ = run_in(where, lambda: outcome_of(lambda: block(kind, made, peer)))
        found["raised"] = time.monotonic()
    return found


def end_groups() -> None:
    """Destroy all groups but the world."""
    world = dist.group.WORLD
    assert world is not None
    for group in [*world.job.groups]:
        if group is not world:
            dist.destroy_process_group(group)


def programs(seeds: Sequence[str]) -> list[Failure | None]:
    """Random programs that end; the first failure of each on this rank."""
    return [_program(seed) for seed in seeds]


def _program(seed: str) -> Failure | None:
    draw = random.Random(seed)
    program = clean_program(draw, size=dist.get_world_size(), buffered=False)
    groups = {name: dist.new_group(list(members)) for name, members in program.groups.items()}
    large = {step[1] for rank in program.ranks for steps in rank for step in steps if step[0] == LARGE}
    messages = {name: np.ones(LARGE_ELEMENTS if name in large else 3) for name in groups}
    failures: list[Failure | None] = []

    def run(steps: list[Any]) -> None:
        failures.append(outcome_of(lambda: _steps(steps, groups, messages))[0])

    threads = [
        threading.Thread(target=run, args=(steps,), name=f"test-{i}")
        for i, steps in enumerate(program.ranks[dist.get_rank()])
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return next((failure for failure in failures if failure is not None), None)


def _steps(steps: list[Any], groups: dict[str, Any], messages: dict[str, np.ndarray]) -> None:
    posted: deque[Any] = deque()
    x = np.ones(3)
    for kind, *args in steps:
        group = groups.get(args[0]) if args else None
        if kind == COLLECTIVE:
            dist.all_reduce(x, group=group)
        elif kind == POST:
            work = dist.all_reduce(x.copy(), group=group, async_op=True)
            assert work is not None
            work.add_done_callback(int)
            posted.append(work)
        elif kind in (SEND, LARGE):
            dist.send(messages[args[0]], args[1], group=group)
        elif kind == RECV:
            dist.recv(messages[args[0]], None if args[1] == ANY else args[1], group=group)
        elif kind == SLEEP:
            time.sleep(args[0] / 60)
        else:
            posted.popleft().wait()


def ping_pong(seconds: float) -> int:
    """Messages to and fro, each rank always waiting for the other; how many."""
    me, count = dist.get_rank(), 0
    x, stop = np.zeros(1), time.monotonic() + seconds
    while True:
        x[0] = count > 10 and time.monotonic() > stop
        if me == 0:
            dist.send(x, 1)
            done = bool(x[0])
            dist.recv(x, 1)
            if done:
                return count
        else:
            dist.recv(x, 0)
            done = bool(x[0])
            dist.send(x, 0)
            if done:
                return count
        count += 1


def callback_ends_the_wait() -> list[float]:
    """Rank 1 waits for a call that a callback on rank 0 makes, after work for which rank 2 comes late."""
    me = dist.get_rank()
    first, second, third = dist.new_group(), dist.new_group([0, 1]), dist.new_group([0, 1])
    x, y = np.ones(2), np.ones(2)
    if me == 2:
        time.sleep(1.5)
        dist.all_reduce(x, group=first)
        return x.tolist()
    if me == 1:
        work = dist.all_reduce(x, group=first, async_op=True)
        dist.all_reduce(y, group=second)
        dist.barrier(third)
    else:
        work = dist.all_reduce(x, group=first, async_op=True)
        assert work is not None
        work.add_done_callback(lambda: dist.all_reduce(y, group=second))
        dist.barrier(third)
    assert work is not None
    work.wait()
    return x.tolist()


def limited_wait() -> tuple[str, list[float]]:
    """Rank 0 gives up waiting for rank 1 in time, then does what that waits for."""
    first, second = dist.new_group(), dist.new_group()
    x = np.ones(2)
    kind = ""
    if dist.get_rank() == 0:
        failure, _ = outcome_of(lambda: dist.all_reduce(x.copy(), group=first, timeout=1.5))
        kind = failure.type if failure is not None else ""
    dist.all_reduce(x, group=second)
    return kind, x.tolist()


def receive_from_each_other(group_ranks: Sequence[int]) -> Failure | None:
    """Two ranks receive from each other on the last group."""
    world = dist.group.WORLD
    assert world is not None
    when_reported(lambda: send_note("blocked"))
    me = dist.get_rank()
    peer = next(rank for rank in group_ranks if rank != me)
    return outcome_of(lambda: dist.recv(np.ones(2), peer, group=world.job.groups[-1]))[0]


def make_group(ranks: Sequence[int]) -> None:
    """A group of some ranks, with connections."""
    group = dist.new_group(list(ranks))
    if dist.get_rank() in ranks:
        dist.barrier(group)


def reduce_once() -> list[float]:
    """One all_reduce."""
    x = np.ones(3)
    dist.all_reduce(x)
    return x.tolist()


def receive_once() -> int:
    """Receive from rank 1."""
    x = np.zeros(1)
    return dist.recv(x, 1)


def send_when_told(fifo: str) -> None:
    """Send to rank 0 once the test opens a named pipe."""
    Path(fifo).read_bytes()
    dist.send(np.ones(1), 0)


def reduce_when_told(fifo: str) -> list[float]:
    """Make the call that the others are in once the test opens a named pipe."""
    Path(fifo).read_bytes()
    return reduce_once()


def late(seconds: float) -> list[float]:
    """Sleep, then make the call that the others are in."""
    time.sleep(seconds)
    return reduce_once()


def daemon_thread_ends_the_wait() -> list[float]:
    """Rank 0 waits for rank 1, which waits for a daemon thread of rank 0 that sleeps."""
    first, second = dist.new_group(), dist.new_group()
    x = np.ones(2)

    def later() -> None:
        time.sleep(1.5)
        dist.all_reduce(x, group=second)

    if dist.get_rank() == 0:
        thread = threading.Thread(target=later, name="test-later", daemon=True)
        thread.start()
        dist.barrier(first)
        thread.join()
    else:
        dist.all_reduce(x, group=second)
        dist.barrier(first)
    return x.tolist()


def circle_beside_a_daemon_thread() -> Failure | None:
    """Two ranks receive from each other while a daemon thread, which cannot call unicoll, waits."""
    end = threading.Event()
    thread = threading.Thread(target=end.wait, name="test-idle", daemon=True)
    thread.start()
    group = dist.new_group()
    failure, _ = outcome_of(lambda: dist.recv(np.ones(2), 1 - dist.get_rank(), group=group))
    end.set()
    thread.join()
    return failure


def receive_from_itself() -> Failure | None:
    """Rank 0 receives from itself what it has not sent."""
    group = dist.new_group()
    if dist.get_rank():
        return None
    dist.send(np.ones(2), 0, group, 1)
    return outcome_of(lambda: dist.recv(np.ones(2), 0, group, 2))[0]


def send_through_rings(asynchronous: bool) -> dict[str, Any]:
    """Rank 0 sends more than the shared memory between the ranks holds, rank 1 waits for another call of rank 0."""
    group, other, me = dist.new_group(), dist.new_group(), dist.get_rank()
    x = np.ones(1 << 16, np.uint8)
    for _ in range(3):  # the shared memory is used from the second message on
        if me == 0:
            dist.send(x, 1, group=group)
        else:
            dist.recv(x, 0, group=group)
        dist.barrier(group)
    sent = 0

    def run() -> None:
        nonlocal sent
        if me == 1:
            dist.barrier(other)
        for sent in range(1000):  # noqa: B007
            if asynchronous:
                work = dist.isend(x, 1, group=group)
                assert work is not None
                work.wait()
            else:
                dist.send(x, 1, group=group)

    failure, _ = outcome_of(run)
    return {"failure": failure, "sent": sent}


def sends_that_are_read(count: int) -> list[float]:
    """Rank 0 sends to rank 1, which first receives from rank 2, which waits for a call of rank 0 after its sends."""
    group, pair, me = dist.new_group(), dist.new_group([0, 2]), dist.get_rank()
    x, y = np.full(min(UNBUFFERED, 1 << 28) >> 3, 3.0), np.ones(1)
    for _ in range(count):
        if me == 0:
            for _ in range(2):
                dist.send(x, 1, group=group)
            dist.barrier(pair)
        elif me == 2:
            dist.barrier(pair)
            dist.send(y, 1, group=group)
        else:
            dist.recv(y, 2, group=group)
            for _ in range(2):
                dist.recv(x, 0, group=group)
    return [x[0], x[-1]]


def receive_what_was_sent_before() -> Failure | None:
    """Rank 0 sends and receives, rank 1 first waits for another call of rank 0: the message that it has not read."""
    group, other = dist.new_group(), dist.new_group()

    def run() -> None:
        if dist.get_rank() == 0:
            dist.send(np.ones(3), 1, group=group)
            dist.recv(np.ones(3), 1, group=group)
        else:
            dist.barrier(other)

    return outcome_of(run)[0]
