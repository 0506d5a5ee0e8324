"""What ranks do in the tests of messages through shared memory."""

from __future__ import annotations

import logging
import os
import threading
import time
from typing import Any

import numpy as np
from p2p_jobs import me, must, size
from stories import Story, failure_of, story_of

import unicoll as dist
from gloo_fallback.ring import PART, RING, SHARED_FROM
from unicoll.testing.worker import Failure, tell

LARGE = 3 * RING + 12_345


def mailroom(group: Any = None) -> Any:
    """This rank's mailroom of a group."""
    return (group or dist.group.WORLD)._host._mail


def rings(group: Any = None) -> list[tuple[bool, bool]]:
    """Of each connection whether messages go out, and come in, through a ring; by the peer's rank."""
    lines = [line for line in mailroom(group)._lines if line is not None]
    return [(n.outlet is not None and n.outlet.ready, n.inlet is not None) for n in lines]


def bytes_of(count: int, seed: int) -> Any:
    return np.random.default_rng(seed).integers(0, 256, count, np.uint8)


def exchange(count: int, seed: int = 0, group: Any = None) -> None:
    """Two ranks send each other so many bytes."""
    other, room = 1 - me(), np.zeros(count, np.uint8)
    work = must(dist.isend(bytes_of(count, seed + me()), other, group=group))
    dist.recv(room, other, group=group)
    work.wait()
    assert (room == bytes_of(count, seed + other)).all()


def sizes(counts: list[int]) -> list[tuple[bool, bool]]:
    """Messages of these sizes, both ways; what was used."""
    for i, count in enumerate(counts):
        exchange(count, 10 * i)
    return rings()


def one_way(count: int, rounds: int) -> list[tuple[bool, bool]]:
    """Rank 0 only ever sends, rank 1 only ever receives."""
    for i in range(rounds):
        if me() == 0:
            dist.send(bytes_of(count, i), 1)
        else:
            x = np.zeros(count, np.uint8)
            dist.recv(x, 0)
            assert (x == bytes_of(count, i)).all()
        dist.barrier()  # the ring has been offered and the answer is there, or nothing waits for it
    return rings()


def behind_a_large_one() -> None:
    """What comes behind large messages that nobody has asked for can be had before them."""
    exchange(LARGE)
    if me() == 0:
        works = [must(dist.isend(bytes_of(LARGE, tag), 1, tag=tag)) for tag in range(3)]
        dist.send(np.full(5, 7, np.uint8), 1, tag=9)
        for work in works:
            work.wait()
    else:
        small, x = np.zeros(5, np.uint8), np.zeros(LARGE, np.uint8)
        dist.recv(small, 0, tag=9)
        assert (small == 7).all()
        for tag in (2, 0, 1):
            dist.recv(x, 0, tag=tag)
            assert (x == bytes_of(LARGE, tag)).all()


def asked_for_halfway() -> None:
    """A receive that comes when half of its message has."""
    exchange(LARGE)
    if me() == 0:
        dist.barrier()
        dist.send(bytes_of(8 * LARGE, 5), 1, tag=5)
    else:
        idle = must(dist.irecv(np.zeros(1, np.uint8), 0, tag=6))  # so that the thread takes what comes
        dist.barrier()
        deadline = time.monotonic() + 20
        while mailroom()._lines[0].message is None and time.monotonic() < deadline:
            time.sleep(0)
        x = np.zeros(8 * LARGE, np.uint8)
        dist.recv(x, 0, tag=5)
        assert (x == bytes_of(8 * LARGE, 5)).all()
    if me() == 0:
        dist.send(np.ones(1, np.uint8), 1, tag=6)
    else:
        idle.wait()


def from_anyone(each: int, count: int) -> list[int]:
    """Rank 0 takes large messages from all others, as they come; whose they were."""
    sources = []
    if me() == 0:
        x = np.zeros(count, np.uint8)
        for _ in range(each * (size() - 1)):
            source = dist.recv(x)
            assert (x == source).all()
            sources.append(source)
    else:
        for _ in range(each):
            dist.send(np.full(count, me(), np.uint8), 0)
    return sources


def everybody_at_once(count: int, rounds: int) -> None:
    """All pairs, both ways, by blocking calls in threads and work in the background."""
    others = [r for r in range(size()) if r != me()]
    for i in range(rounds):
        rooms = {r: np.zeros(count + 13 * r, np.uint8) for r in others}
        works = [must(dist.irecv(room, r, tag=i)) for r, room in rooms.items()]
        threads = [
            threading.Thread(target=dist.send, args=(bytes_of(count + 13 * me(), me()), r), kwargs={"tag": i})
            for r in others
        ]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        for work in works:
            work.wait()
        for r, room in rooms.items():
            assert (room == bytes_of(count + 13 * r, r)).all()


def misfits() -> list[Failure | None]:
    """Large messages of another size or type than their receivers', asked for before and after they come."""
    exchange(LARGE)
    failures = []
    given: tuple[Any, ...] = (np.ones(LARGE, np.uint8), np.ones(10, np.uint8), np.ones(LARGE, np.int8))
    rooms = (np.zeros(LARGE + 1, np.uint8), np.zeros(LARGE, np.uint8), np.zeros(LARGE, np.uint8))
    for before in (False, True):
        for x, room in zip(given, rooms, strict=True):
            if me() == 0:
                work = must(dist.isend(x, 1, tag=1))
                dist.barrier()
                work.wait()
            elif before:
                work = must(dist.irecv(room, 0, tag=1))
                dist.barrier()
                failures.append(failure_of(work.wait))
            else:
                dist.barrier()
                failures.append(failure_of(lambda r=room: dist.recv(r, 0, tag=1)))  # type: ignore[misc]
            assert not room.any()
            exchange(LARGE, 3)
    return failures


def in_a_callback() -> list[int]:
    """A callback of a receive in the background does blocking messages of its own."""
    answers: list[int] = []
    if me() == 0:
        dist.send(np.full(1, 4), 1)
        x = np.zeros(LARGE, np.uint8)
        dist.recv(x, 1, tag=1)
        dist.send(np.full(2, int(x[0])), 1, tag=2)
        dist.barrier()
        return answers
    x = np.zeros(1, np.int64)
    work = must(dist.irecv(x, 0))
    over = threading.Event()

    def answer(_: Any) -> None:
        dist.send(np.full(LARGE, int(x[0]) + 1, np.uint8), 0, tag=1)
        y = np.zeros(2, np.int64)
        dist.recv(y, 0, tag=2)
        answers.append(int(y[1]))
        over.set()

    work.get_future().add_done_callback(answer)
    assert over.wait(30)
    dist.barrier()
    return answers


# --- where memory cannot be shared ------------------------------------------------------------------------------


class Log(logging.Handler):
    """Keeps what the library says."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())

    def __enter__(self) -> Log:
        self._before = logging.getLogger("unicoll").level
        logging.getLogger("unicoll").setLevel(logging.INFO)
        logging.getLogger("unicoll").addHandler(self)
        return self

    def __exit__(self, *_: object) -> None:
        logging.getLogger("unicoll").removeHandler(self)
        logging.getLogger("unicoll").setLevel(self._before)


def without(what: str, rank: int) -> tuple[list[tuple[bool, bool]], list[str]]:
    """Large messages where one rank cannot map, or cannot make, shared memory; what was used, and said."""
    from gloo_fallback import ring

    def refuse(*_: object) -> Any:
        raise (
            PermissionError(13, "Permission denied")
            if what == "taken"
            else OSError(24, "Too many open files")
        )

    if me() == rank:
        setattr(ring, what, refuse)
    with Log() as log:
        for i in range(3):
            exchange(LARGE, i)
        dist.barrier()
    return rings(), log.lines


def unwilling(rank: int) -> tuple[list[tuple[bool, bool]], list[str]]:
    """As :func:`without`, where one rank of a group uses sockets only."""
    if me() == rank:
        os.environ["UNICOLL_TRANSPORT"] = "tcp"
    group = dist.new_group()
    os.environ.pop("UNICOLL_TRANSPORT", None)
    with Log() as log:
        for i in range(3):
            exchange(LARGE, i, group)
        dist.barrier()
    used = rings(group)
    dist.barrier()
    dist.destroy_process_group(group)
    return used, log.lines


# --- what is held -------------------------------------------------------------------------------------------------


def ours() -> list[str]:
    """Lines of this process's table of mappings that are ours."""
    with open("/proc/self/maps") as file:
        return [line for line in file if "memfd:unicoll" in line]


def held() -> tuple[list[str], int, int]:
    """Descriptors of shared memory; bytes of it, after a first large message and after larger ones."""

    def mapped() -> int:
        ends = [[int(x, 16) for x in line.split()[0].split("-")] for line in ours()]
        return sum(b - a for a, b in ends)

    for i in range(2):
        exchange(SHARED_FROM, i)
    before = mapped()
    exchange(20 * LARGE)
    links = []
    for name in os.listdir("/proc/self/fd"):
        try:
            links.append(os.readlink(f"/proc/self/fd/{name}"))
        except FileNotFoundError:
            continue
    return [link for link in links if "memfd" in link], before, mapped()


def inodes() -> list[str]:
    """Which pieces of shared memory this process has mapped, once rings are in use."""
    for i in range(2):
        exchange(LARGE, i)
    return sorted({line.split()[4] for line in ours()})


def groups_come_and_go(rounds: int) -> int:
    """Groups with rings, made and destroyed; how many mappings are left."""
    for i in range(rounds):
        group = dist.new_group()
        exchange(LARGE, i, group)
        exchange(LARGE, i, group)
        assert all(rings(group)[0])
        dist.barrier(group=group)
        dist.destroy_process_group(group)
    return len(ours())


# --- faults -------------------------------------------------------------------------------------------------------


def stream(sender: int) -> None:
    """One rank sends large messages to the other, until something fails."""
    exchange(LARGE)
    x = np.zeros(32 << 20, np.uint8)
    for i in range(1_000_000):
        if me() == sender:
            dist.send(x, 1 - sender)
        else:
            dist.recv(x, sender)
        if i == 2:
            tell("streaming")


def settle() -> None:
    """There are rings, and nobody's thread looks at the connections any more."""
    exchange(LARGE)
    exchange(LARGE)
    dist.barrier()
    time.sleep(0.3)


def stuck(timeout: float) -> Story:
    """Rank 0 is in the middle of a message that rank 1 takes no more of."""
    settle()
    if me() == 1:
        tell("idle")
        time.sleep(60)
    tell("sending")
    return story_of(lambda: dist.send(np.zeros(LARGE, np.uint8), 1, timeout=timeout))


def waits_in_the_middle(timeout: float) -> Story:
    """Rank 0 has got the beginning of a message, and no more comes."""
    exchange(LARGE)
    exchange(LARGE)
    if me() == 1:
        line = mailroom()._lines[0]
        put = line.outlet.put

        def once(view: memoryview) -> None:
            put(view)
            line.outlet.part = lambda left, size: 0

        line.outlet.put = once
        must(dist.isend(np.zeros(LARGE, np.uint8), 0))._waited = True
        tell("sending")
        time.sleep(60)
    tell("receiving")
    return story_of(lambda: dist.recv(np.zeros(LARGE, np.uint8), 1, timeout=timeout))


def timed_out_in_the_queue() -> list[Failure | None]:
    """A send that found the ring full, and gave up before anything of it had left, leaves no trace."""
    settle()
    failures: list[Failure | None] = []
    x = np.zeros(SHARED_FROM, np.uint8)  # small enough to go in one part
    if me() == 0:
        sent = 0
        while not failures and sent <= RING // SHARED_FROM:
            x[:] = sent % 251
            failure = failure_of(lambda: dist.send(x, 1, timeout=0.3))
            if failure is None:
                sent += 1
            else:
                failures.append(failure)
        assert sent > 0
        dist.barrier()
        dist.send(np.full(1, sent), 1, tag=1)
        x[:] = 252
        dist.send(x, 1)
    else:
        dist.barrier()
        count = np.zeros(1, np.int64)
        dist.recv(count, 0, tag=1)
        for i in [*(k % 251 for k in range(int(count[0]))), 252]:
            dist.recv(x, 0)
            assert (x == i).all(), (i, x[0])
    exchange(LARGE)
    return failures


def last_words(count: int) -> list[int]:
    """Rank 0 sends large and small messages and leaves; rank 1 takes them afterwards."""
    settle()
    parts = RING // PART - 1
    if me() == 0:
        for i in range(parts):
            dist.send(np.full(PART, i, np.uint8), 1)
        for i in range(count):
            dist.send(np.full(5000, i % 251, np.uint8), 1, tag=1)
        dist.destroy_process_group()
        tell("left")
        return []
    tell("waits")
    time.sleep(1.0)
    x, y = np.zeros(PART, np.uint8), np.zeros(5000, np.uint8)
    for i in range(parts):
        dist.recv(x, 0)
        assert (x == i).all()
    taken = []
    for i in range(count):
        dist.recv(y, 0, tag=1)
        assert (y == i % 251).all()
        taken.append(i)
    return taken
