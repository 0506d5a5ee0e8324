"""Programs of ranks that exchange collectives and messages, simulated in one process with the search for deadlocks.

A program has threads, a thread has steps. A scheduler that draws the next event runs threads, moves messages through
the sender's host and the receiver's, lets ranks report their states, and moves the reports and questions between ranks
and relay. So every order of these events occurs that a job can have.
"""

from __future__ import annotations

import itertools
import random
from collections import defaultdict, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from unicoll.net.control.deadlock_detector import DeadlockDetector
from unicoll.net.control.wait_graph import ANY, compress, lane_of

COLLECTIVE, POST, WAIT, SEND, RECV, SLEEP = "collective", "post", "wait", "send", "recv", "sleep"

Step = tuple[Any, ...]
"""COLLECTIVE group | POST group | WAIT (the oldest posted) | SEND group peer | RECV group peer | SLEEP events."""


@dataclass
class Program:
    """What the ranks of a job do.

    Attributes:
        groups: the members of each group.
        ranks: for each rank the steps of its threads.
    """

    groups: dict[str, tuple[int, ...]]
    ranks: list[list[list[Step]]]


# --- programs -------------------------------------------------------------------------------------------------------


def clean_program(draw: random.Random, any_source: float = 0.2, size: int = 0) -> Program:
    """A program that ends: all ranks make the calls of each group in one order that holds across the groups.

    Args:
        any_source: share of the ranks and groups whose receives are from any member.
        size: number of ranks; 0 draws it.
    """
    size, threads = size or draw.randint(2, 6), draw.choice((1, 1, 1, 2))
    kinds = draw.choice(((COLLECTIVE, COLLECTIVE, POST, SEND, SLEEP), (SEND,), (COLLECTIVE, SEND, SEND)))
    program = Program({}, [[[] for _ in range(threads)] for _ in range(size)])
    for thread in range(threads):
        names = [f"g{thread}.{i}" for i in range(draw.randint(1, 4))]
        for name in names:
            members = range(size) if draw.random() < 0.3 else draw.sample(range(size), draw.randint(2, size))
            program.groups[name] = tuple(members)
        from_any = {(name, r): draw.random() < any_source for name in names for r in range(size)}
        posted: dict[int, int] = defaultdict(int)
        for _ in range(draw.randint(1, 15)):
            name = draw.choice(names)
            members = program.groups[name]
            kind = draw.choice(kinds)
            if kind == SLEEP:
                program.ranks[draw.randrange(size)][thread].append((SLEEP, draw.randint(1, 60)))
            elif kind == SEND:
                source, target = draw.sample(members, 2)
                program.ranks[source][thread].append((SEND, name, target))
                peer = ANY if from_any[name, target] else source
                program.ranks[target][thread].append((RECV, name, peer))
            else:
                for rank in members:
                    program.ranks[rank][thread].append((kind, name))
                    posted[rank] += kind == POST
            for rank in range(size):
                if posted[rank] and draw.random() < 0.4:
                    posted[rank] -= 1
                    program.ranks[rank][thread].append((WAIT,))
        for rank in range(size):
            program.ranks[rank][thread] += [(WAIT,)] * posted[rank]
    return program


def deadlocked_program(draw: random.Random) -> Program:
    """A clean program in which some ranks, at some place, wait for each other in a circle.

    It has no receives from any member of larger groups: such a receive is not known to be stuck while a member runs.
    """
    program = clean_program(draw, any_source=0.0)
    size = len(program.ranks)
    circle = draw.sample(range(size), draw.randint(2, size))
    for i, rank in enumerate(circle):
        following = circle[(i + 1) % len(circle)]
        steps = program.ranks[rank][0]
        place = draw.randint(0, len(steps))
        name = f"g0.circle{i}"
        kind = draw.choice((COLLECTIVE, POST, RECV))
        program.groups[name] = (rank, following)
        before = f"g0.circle{(i - 1) % len(circle)}"
        program.groups.setdefault(before, ())
        waits: list[Step] = [(RECV, name, draw.choice((ANY, following)))] if kind == RECV else [(kind, name)]
        # waits for the steps posted before, too: they are in the order of the calls
        waits += [(WAIT,)] * (kind == POST and 1 + _pending(steps[:place]))
        steps[place:place] = waits
    for i, rank in enumerate(circle):  # what would wake the one before comes at the end
        name = f"g0.circle{(i - 1) % len(circle)}"
        previous = circle[(i - 1) % len(circle)]
        receives = any(step[:2] == (RECV, name) for step in program.ranks[previous][0])
        program.ranks[rank][0].append((SEND, name, previous) if receives else (COLLECTIVE, name))
    for rank in circle:
        _drop_waits(program.ranks[rank][0])
    return program


def _pending(steps: list[Step]) -> int:
    return sum(step[0] == POST for step in steps) - sum(step[0] == WAIT for step in steps)


def _drop_waits(steps: list[Step]) -> None:
    """Remove waits for which nothing is posted any more."""
    pending, kept = 0, []
    for step in steps:
        if step[0] == WAIT and not pending:
            continue
        pending += (step[0] == POST) - (step[0] == WAIT)
        kept.append(step)
    steps[:] = kept


# --- execution ------------------------------------------------------------------------------------------------------


@dataclass
class _Thread:
    """A thread of a rank; ``call`` numbers the call in which it is blocked."""

    steps: deque[Step]
    call: int = 0
    collective: tuple[str, int] | None = None
    receive: tuple[str, int] | None = None
    matched: bool = False
    sleeps: int = 0
    posted: deque[tuple[str, int]] = field(default_factory=deque)

    @property
    def blocked(self) -> bool:
        return self.collective is not None or self.receive is not None

    @property
    def ended(self) -> bool:
        return not self.steps and not self.blocked and not self.sleeps


@dataclass
class _Link:
    """Messages of one direction: on their way, and in the receiver's socket."""

    flying: int = 0
    arrived: int = 0


class Simulation:
    """Runs a program with the search for deadlocks.

    Attributes:
        failures: what the search has found: group, members and error of each failed group.
    """

    def __init__(self, program: Program, draw: random.Random) -> None:
        self._groups = program.groups
        self._draw = draw
        self._network = draw.choice((1.0, 0.2, 0.05))  # how often a message moves when it could
        self._size = len(program.ranks)
        self.threads = [[_Thread(deque(steps)) for steps in rank] for rank in program.ranks]
        self._posted: list[dict[str, int]] = [defaultdict(int) for _ in range(self._size)]
        self._links: dict[tuple[str, int, int], _Link] = defaultdict(_Link)
        # for each pair of ranks that has a connection in a group those which know of it; the first one has dialled
        self._connected: dict[tuple[str, int, int], set[int]] = defaultdict(set)
        self._unexpected: list[list[tuple[str, int]]] = [[] for _ in range(self._size)]
        self._calls = itertools.count(1)
        self._time = 0.0
        self._to_relay: list[deque[dict[str, Any]]] = [deque() for _ in range(self._size)]
        self._to_ranks: list[deque[dict[str, Any]]] = [deque() for _ in range(self._size)]
        self._sent: list[Any] = [None] * self._size
        self.failures: list[tuple[str, tuple[int, ...], dict[str, Any]]] = []
        self._detector = DeadlockDetector(
            self._size,
            lambda rank, message: self._to_ranks[rank].append(message),
            lambda group, members, error: self.failures.append((group, members, error)),
            lambda rank: f"rank {rank}",
            lambda: self._time,
        )

    def run(self, most_idle: int = 3000) -> set[int]:
        """Run until the search has found a deadlock, or all ranks have ended; returns those that have not.

        Raises:
            AssertionError: neither happens.
        """
        idle = 0
        while not self.failures:
            left = {r for r in range(self._size) if not all(thread.ended for thread in self.threads[r])}
            if not left:
                return left
            progress = self._advance()
            idle = 0 if progress else idle + 1
            assert idle < most_idle * self._size, f"ranks {left} are stuck, but no deadlock was found"
        return self.stuck()

    def stuck(self) -> set[int]:
        """The ranks that do not end when all that can happen has happened."""
        while any(self._events()):
            for event in list(self._events()):
                event()
        return {r for r in range(self._size) if not all(thread.ended for thread in self.threads[r])}

    def _advance(self) -> bool:
        """One event, drawn; True if it is of the program."""
        self._time += self._draw.choice((0.0, 0.001, 0.02))
        rank = self._draw.randrange(self._size)
        kind = self._draw.randrange(7)
        if kind == 0:
            self._report(rank)
        elif kind == 1 and self._to_relay[rank]:
            self._detector.handle(rank, self._to_relay[rank].popleft())
        elif kind == 2 and self._to_ranks[rank]:
            self._answer(rank, self._to_ranks[rank].popleft())
        elif kind == 3:
            self._detector.tick()
        else:
            events = list(self._events(self._draw.random() < self._network))
            if events:
                self._draw.choice(events)()
                return True
        return False

    # --- the program ------------------------------------------------------------------------------------------------

    def _events(self, network: bool = True) -> Iterator[Any]:
        """What can happen next; without the network only in the ranks' threads."""
        for rank, threads in enumerate(self.threads):
            for thread in threads:
                if not thread.ended and self._can_step(rank, thread):
                    yield lambda rank=rank, thread=thread: self._step(rank, thread)
        for (name, source, target), link in list(self._links.items()) if network else ():
            if link.flying:
                yield lambda link=link: self._fly(link)
            connected = self._connection(name, source, target)
            if target not in connected:
                yield lambda connected=connected, target=target: connected.add(target)
            elif link.arrived:
                yield lambda link=link, at=(name, source, target): self._read(link, *at)

    def _can_step(self, rank: int, thread: _Thread) -> bool:
        if thread.receive is not None:
            return thread.matched
        if thread.collective is not None:
            name, number = thread.collective
            return all(self._posted[member][name] >= number for member in self._groups[name])
        return True

    def _step(self, rank: int, thread: _Thread) -> None:
        if thread.sleeps:
            thread.sleeps -= 1
        elif thread.blocked:
            if self._can_step(rank, thread):
                thread.collective = thread.receive = None
        else:
            self._begin(rank, thread, *thread.steps.popleft())

    def _begin(self, rank: int, thread: _Thread, kind: str, *args: Any) -> None:
        thread.call = next(self._calls)
        if kind == SLEEP:
            thread.sleeps = args[0]
        elif kind in (COLLECTIVE, POST):
            self._posted[rank][args[0]] += 1
            operation = args[0], self._posted[rank][args[0]]
            if kind == POST:
                thread.posted.append(operation)
            else:
                thread.collective = operation
        elif kind == WAIT:
            thread.collective = thread.posted.popleft()
        elif kind == SEND:
            name, peer = args
            self._connection(name, rank, peer).add(rank)
            self._links[name, rank, peer].flying += 1
        else:
            name, peer = args
            thread.receive, thread.matched = (name, peer), False
            for message in self._unexpected[rank]:
                if message[0] == name and peer in (message[1], ANY):
                    self._unexpected[rank].remove(message)
                    thread.matched = True
                    break

    def _connection(self, name: str, a: int, b: int) -> set[int]:
        return self._connected[name, min(a, b), max(a, b)]

    def _fly(self, link: _Link) -> None:
        link.flying -= 1
        link.arrived += 1

    def _read(self, link: _Link, name: str, source: int, target: int) -> None:
        link.arrived -= 1
        for thread in self.threads[target]:
            if thread.receive is not None and not thread.matched:
                group, peer = thread.receive
                if group == name and peer in (source, ANY):
                    thread.matched = True
                    return
        self._unexpected[target].append((name, source))

    # --- what ranks tell the relay ----------------------------------------------------------------------------------

    def _state(self, rank: int) -> dict[str, Any] | None:
        waits, groups = [], {}
        for thread in self.threads[rank]:
            if thread.ended:
                continue
            if not thread.blocked or (thread.matched and thread.receive is not None):
                return None
            name = (thread.collective or thread.receive or ("",))[0]
            lane = lane_of("sim", name)
            groups[lane] = compress(self._groups[name])
            if thread.collective is not None:
                waits.append([lane, thread.collective[1], ANY, thread.call])
            else:
                assert thread.receive is not None
                waits.append([lane, 0, thread.receive[1], thread.call])
        posted = {lane_of("sim", name): number for name, number in self._posted[rank].items()}
        return {"waits": waits, "posted": posted, "groups": groups} if waits else None

    def _report(self, rank: int) -> None:
        state = self._state(rank)
        if state != self._sent[rank]:
            self._sent[rank] = state
            self._to_relay[rank].append({"t": "waiting", "state": state})

    def _answer(self, rank: int, question: dict[str, Any]) -> None:
        # a thread that runs for a moment, as one that looks at its deadline does, counts as not blocked
        state = self._sent[rank] = self._state(rank) if self._draw.random() < 0.9 else None
        links = []
        for lane, peer in question["links"]:
            name = lane.partition(":")[2]
            there = rank in self._connection(name, rank, peer)
            out, incoming = self._links[name, rank, peer], self._links[name, peer, rank]
            quiet = not out.flying and not (there and incoming.arrived)
            links.append((there, quiet))
        texts = [f"call {wait[3]}" for wait in state["waits"]] if state is not None else []
        self._to_relay[rank].append(
            {"t": "confirmed", "id": question["id"], "state": state, "texts": texts, "links": links}
        )

    def waits_for(self, rank: int, blocker: int) -> bool:
        """True if a thread of a rank is blocked in a call that waits for the other one."""
        for thread in self.threads[rank]:
            if thread.collective is not None:
                name, number = thread.collective
                if blocker in self._groups[name] and self._posted[blocker][name] < number:
                    return True
            elif thread.receive is not None and not thread.matched:
                name, peer = thread.receive
                if peer == blocker or (peer == ANY and blocker in self._groups[name]):
                    return True
        return False
