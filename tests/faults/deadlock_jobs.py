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
    works: list[Any] = []
    if kind == "all_reduce":
        dist.all_reduce(x, group=group)
    elif kind == "broadcast":
        dist.broadcast(x, peer, group=group)
    elif kind == "all_gather_object":
        dist.all_gather_object([None] * group.size(), "object", group=group)
    elif kind == "async":
        works = [dist.all_reduce(x, group=group, async_op=True) for _ in range(3)]
    elif kind == "coalesced":
        dist.all_reduce_coalesced([x, x.copy()], group=group)
    elif kind == "irecv":
        works = [dist.irecv(x, src=peer, group=group)]
    elif kind == "probe":
        dist.probe(peer, group)
    elif kind == "send":
        dist.send(np.zeros(UNBUFFERED, np.uint8), peer, group=group)
    elif kind == "isend":
        works = [dist.isend(each, peer, group=group) for each in (x, np.zeros(UNBUFFERED, np.uint8))]
    else:
        dist.recv(x, src=None if kind == "recv from any" else peer, group=group)
    for work in works:
        work.wait()


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


def receive_from_each_other(group_ranks: Sequence[int]) -> Failure | None:
    """Two ranks receive from each other on the last group."""
    world = dist.group.WORLD
    assert world is not None
    when_reported(lambda: send_note("blocked"))
    me = dist.get_rank()
    peer = next(rank for rank in group_ranks if rank != me)
    return outcome_of(lambda: dist.recv(np.ones(2), peer, group=world.job.groups[-1]))[0]


def reduce_once() -> list[float]:
    """One all_reduce."""
    x = np.ones(3)
    dist.all_reduce(x)
    return x.tolist()


def send_two_tags_when_told(told: str) -> None:
    dist.send(np.full(1, 1.0), 0, tag=7)
    Path(told).read_text()
    dist.send(np.full(1, 2.0), 0, tag=-1)


def receive_with_minus_one() -> list[float]:
    found = np.empty(1), np.empty(1)
    dist.recv(found[0], 1, tag=-1)
    dist.recv(found[1], 1, tag=None)
    return [float(each[0]) for each in found]


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
