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

from unicoll.net.control import wait_graph
from unicoll.net.control.deadlock_detector import DeadlockDetector
from unicoll.net.control.wait_graph import ANY, MessageState, backend_group_of, compress

COLLECTIVE, POST, WAIT, SEND, RECV, SLEEP = "collective", "post", "wait", "send", "recv", "sleep"
LARGE = "large"

ROOM = 1
"""Large messages that a pair of ranks buffers in each direction of a group."""

Step = tuple[Any, ...]
"""COLLECTIVE group | POST group | WAIT (the oldest posted) | SEND group peer | LARGE group peer (it may wait) |
RECV group peer | SLEEP events."""


@dataclass
class Program:
    """What the ranks of a job do.

    Attributes:
        groups: the members of each group.
        ranks: for each rank the steps of its threads.
        counted: True if ranks count messages instead of looking at their sockets, as the backend mpi does; its sends
            are not known to wait.
    """

    groups: dict[str, tuple[int, ...]]
    ranks: list[list[list[Step]]]
    counted: bool = False


# --- programs -------------------------------------------------------------------------------------------------------


def clean_program(
    draw: random.Random, any_source: float = 0.2, size: int = 0, large: float = 0.4, buffered: bool = True
) -> Program:
    """A program that ends: all ranks make the calls of each group in one order that holds across the groups.

    In some programs large sends end although the receiver makes another call first: one that reads them, or one before
    which it has made room.

    Args:
        any_source: share of the ranks whose receives are from any member, in groups whose sends never wait: a send that
            waits needs a receive for it alone.
        size: number of ranks; 0 draws it.
        large: share of the groups whose sends may wait.
        buffered: True to include programs that need the room of :data:`ROOM` messages.
    """
    size, threads = size or draw.randint(2, 6), draw.choice((1, 1, 1, 2))
    kinds = draw.choice(((COLLECTIVE, COLLECTIVE, POST, SEND, SLEEP), (SEND,), (COLLECTIVE, SEND, SEND)))
    program = Program({}, [[[] for _ in range(threads)] for _ in range(size)], draw.random() < 0.3)
    for thread in range(threads):
        names = [f"g{thread}.{i}" for i in range(draw.randint(1, 4))]
        for name in names:
            members = range(size) if draw.random() < 0.3 else draw.sample(range(size), draw.randint(2, size))
            program.groups[name] = tuple(members)
        waiting = {name for name in names if draw.random() < large}
        from_any = {
            (n, r): n not in waiting and draw.random() < any_source for n in names for r in range(size)
        }
        posted: dict[int, int] = defaultdict(int)
        for _ in range(draw.randint(1, 15)):
            name = draw.choice(names)
            members = program.groups[name]
            kind = draw.choice(kinds)
            if kind == SLEEP:
                program.ranks[draw.randrange(size)][thread].append((SLEEP, draw.randint(1, 60)))
            elif kind == SEND:
                source, target = draw.sample(members, 2)
                program.ranks[source][thread].append((LARGE if name in waiting else SEND, name, target))
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
            if large and draw.random() < 0.1:
                _add_early_call(program, draw, thread, buffered)
        for rank in range(size):
            program.ranks[rank][thread] += [(WAIT,)] * posted[rank]
    return program


def _add_early_call(program: Program, draw: random.Random, thread: int, buffered: bool) -> None:
    """Calls in which the receiver of large messages makes another call before it receives the last of them."""
    size = len(program.ranks)
    source, target, third = draw.sample(range(size), 3) if size > 2 else (*draw.sample(range(size), 2), -1)
    name = f"g{thread}.early{len(program.groups)}"
    sends, receives = [(LARGE, name, target)] * (ROOM + 1), [(RECV, name, source)] * (ROOM + 1)
    ranks = [steps[thread] for steps in program.ranks]
    if third >= 0 and not (buffered and draw.random() < 0.5):
        program.groups[name] = (source, target, third)
        program.groups[f"{name}.pair"] = (source, third)
        ranks[source] += [*sends, (COLLECTIVE, f"{name}.pair")]
        ranks[third] += [(COLLECTIVE, f"{name}.pair"), (SEND, name, target)]
        ranks[target] += [(RECV, name, third), *receives]
    elif buffered:
        program.groups[name] = (source, target)
        ranks[source] += [*sends, (COLLECTIVE, name)]
        ranks[target] += [receives[0], (COLLECTIVE, name), *receives[1:]]


def deadlocked_program(draw: random.Random) -> Program:
    """A clean program in which some ranks, at some place, wait for each other in a cycle.

    It has no receives from any member of larger groups: such a receive is not known to be stuck while a member runs. If
    the ranks count messages it has no sends that wait, which are not known to be stuck either.
    """
    counted = draw.random() < 0.3
    program = clean_program(draw, any_source=0.0, large=0.0 if counted else 0.4)
    program.counted = counted
    size = len(program.ranks)
    circle = draw.sample(range(size), draw.randint(2, size))
    for i, rank in enumerate(circle):
        following = circle[(i + 1) % len(circle)]
        steps = program.ranks[rank][0]
        place = draw.randint(0, len(steps))
        name = f"g0.circle{i}"
        kind = draw.choice((COLLECTIVE, POST, RECV, COLLECTIVE if program.counted else LARGE))
        program.groups[name] = (rank, following)
        before = f"g0.circle{(i - 1) % len(circle)}"
        program.groups.setdefault(before, ())
        waits: list[Step] = [(kind, name)]
        if kind == RECV:
            waits = [(RECV, name, draw.choice((ANY, following)))]
        elif kind == LARGE:  # the last one waits
            waits = [(LARGE, name, following)] * (ROOM + 1)
        # waits for the steps posted before, too: they are in the order of the calls
        waits += [(WAIT,)] * (kind == POST and 1 + _pending(steps[:place]))
        steps[place:place] = waits
    for i, rank in enumerate(circle):  # what would wake the one before comes at the end
        name = f"g0.circle{(i - 1) % len(circle)}"
        previous = circle[(i - 1) % len(circle)]
        waited = {step[0] for step in program.ranks[previous][0] if step[1:2] == (name,)}
        if LARGE in waited:
            program.ranks[rank][0] += [(RECV, name, previous)] * (ROOM + 1)
        else:
            program.ranks[rank][0].append((SEND, name, previous) if RECV in waited else (COLLECTIVE, name))
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

_TAKES, _MORE = 10, 20
"""Bytes that a host takes of what nobody reads, and bytes of a large message that waits."""


@dataclass
class _Thread:
    """A thread of a rank; ``call`` numbers the call in which it is blocked.

    Attributes:
        matched: the receive has its message.
    """

    steps: deque[Step]
    call: int = 0
    collective: tuple[str, int] | None = None
    receive: tuple[str, int] | None = None
    send: tuple[str, int] | None = None
    matched: bool = False
    sleeps: int = 0
    posted: deque[tuple[str, int]] = field(default_factory=deque)

    @property
    def blocked(self) -> bool:
        return self.collective is not None or self.message is not None

    @property
    def message(self) -> tuple[str, int] | None:
        """Group and peer of the message that it waits for."""
        return self.receive or self.send

    @property
    def ended(self) -> bool:
        return not self.steps and not self.blocked and not self.sleeps


@dataclass
class _Link:
    """Messages of one direction.

    Attributes:
        flying, arrived: on their way, and in the receiver's socket.
        sent, received: numbers of those that the sender has sent and the receiver has read.
        large: in the receiver's part of the buffer for large messages, of which :data:`ROOM` have place.
        room: large messages that the sender may write now.
        flying_credit, arrived_credit: messages of credit for room, on their way to the sender and in its socket.
    """

    flying: int = 0
    arrived: int = 0
    sent: int = 0
    received: int = 0
    large: int = 0
    room: int = ROOM
    flying_credit: int = 0
    arrived_credit: int = 0


class Simulation:
    """Runs a program with the search for deadlocks.

    Attributes:
        failures: what the search has found: group, members and error of each failed group.
    """

    def __init__(self, program: Program, draw: random.Random) -> None:
        self._groups = program.groups
        self._counted = program.counted
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
        # of ranks that have looked at their connections for an answer, and not yet at their threads
        self._looked: list[tuple[dict[str, Any], list[MessageState]] | None] = [None] * self._size
        self.failures: list[tuple[str, tuple[int, ...], dict[str, Any]]] = []
        self._detector = DeadlockDetector(
            self._size,
            lambda rank, message: self._to_ranks[rank].append(message),
            lambda group, members, error: self.failures.append((group, members, error)),
            lambda rank: f"rank {rank}",
            lambda group: False,
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
        if self._looked[rank] is not None and kind in (0, 2):
            self._answer(rank)
        elif kind == 0:
            self._report(rank)
        elif kind == 1 and self._to_relay[rank]:
            self._detector.handle(rank, self._to_relay[rank].popleft())
        elif kind == 2 and self._to_ranks[rank]:
            self._look(rank, self._to_ranks[rank].popleft())
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
            elif link.arrived and self._reads(target, name):
                yield lambda link=link, at=(name, source, target): self._read(link, *at)
            if link.large and target in connected and self._reads(target, name):
                yield lambda link=link, at=(name, source, target): self._read_large(link, *at)
            if link.flying_credit:
                yield lambda link=link: self._fly_credit(link)
            if link.arrived_credit and self._reads(source, name):
                yield lambda link=link: self._read_credit(link)

    def _can_step(self, rank: int, thread: _Thread) -> bool:
        if thread.receive is not None:
            return thread.matched
        if thread.send is not None:
            name, peer = thread.send
            return self._links[name, rank, peer].room > 0
        if thread.collective is not None:
            name, number = thread.collective
            return all(self._posted[member][name] >= number for member in self._groups[name])
        return True

    def _step(self, rank: int, thread: _Thread) -> None:
        if thread.sleeps:
            thread.sleeps -= 1
        elif thread.blocked:
            if self._can_step(rank, thread):
                if thread.send is not None:
                    self._write_large(rank, *thread.send)
                thread.collective = thread.receive = thread.send = None
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
            self._links[name, rank, peer].sent += 1
        elif kind == LARGE:
            name, peer = args
            self._connection(name, rank, peer).add(rank)
            if self._links[name, rank, peer].room:
                self._write_large(rank, name, peer)
            else:
                thread.send = name, peer
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

    def _reads(self, rank: int, name: str) -> bool:
        """True if a thread of the rank reads from the connections of a group, because it waits for a message."""
        return any(thread.message is not None and thread.message[0] == name for thread in self.threads[rank])

    def _write_large(self, rank: int, name: str, peer: int) -> None:
        link = self._links[name, rank, peer]
        link.room -= 1
        link.large += 1
        link.sent += 1

    def _read_large(self, link: _Link, name: str, source: int, target: int) -> None:
        link.large -= 1
        link.flying_credit += 1
        link.arrived += 1
        self._read(link, name, source, target)

    def _fly_credit(self, link: _Link) -> None:
        link.flying_credit -= 1
        link.arrived_credit += 1

    def _read_credit(self, link: _Link) -> None:
        link.arrived_credit -= 1
        link.room += 1

    def _fly(self, link: _Link) -> None:
        link.flying -= 1
        link.arrived += 1

    def _read(self, link: _Link, name: str, source: int, target: int) -> None:
        link.arrived -= 1
        link.received += 1
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
            if thread.send is not None and (self._counted or not self._is_full(rank, *thread.send)):
                return None
            name = (thread.collective or thread.message or ("",))[0]
            lane = backend_group_of("sim", name)
            groups[lane] = compress(self._groups[name])
            if thread.collective is not None:
                waits.append([lane, thread.collective[1], ANY, thread.call])
            else:
                assert thread.message is not None
                kind = wait_graph.RECEIVE if thread.receive is not None else wait_graph.SEND
                waits.append([lane, kind, thread.message[1], thread.call])
        posted = {backend_group_of("sim", name): number for name, number in self._posted[rank].items()}
        return {"waits": waits, "posted": posted, "groups": groups} if waits else None

    def _report(self, rank: int) -> None:
        state = self._state(rank)
        if state != self._sent[rank]:
            self._sent[rank] = state
            self._to_relay[rank].append({"t": "waiting", "state": state})

    def _is_full(self, rank: int, name: str, peer: int) -> bool:
        """True if a large message cannot be written, as far as the sender knows."""
        link = self._links[name, rank, peer]
        return not link.room and not link.arrived_credit

    def _look(self, rank: int, question: dict[str, Any]) -> None:
        links = [self._link_state(rank, lane.partition(":")[2], peer) for lane, peer in question["links"]]
        self._looked[rank] = question, links

    def _link_state(self, rank: int, name: str, peer: int) -> MessageState:
        out, incoming = self._links[name, rank, peer], self._links[name, peer, rank]
        if self._counted:
            return MessageState(out.sent, incoming.received)
        there = rank in self._connection(name, rank, peer)
        # a large message announces itself through the socket
        unread = there and (incoming.arrived or incoming.large or out.arrived_credit)
        waits = any(thread.send == (name, peer) for thread in self.threads[rank])
        delivered = not (out.flying or incoming.flying_credit or waits)
        takes = -1 if not there or self._reads(rank, name) or incoming.flying_credit else _TAKES
        unsent = _MORE if waits and self._is_full(rank, name, peer) else 0
        return MessageState(there, there, delivered, not unread, unsent, takes)

    def _answer(self, rank: int) -> None:
        looked = self._looked[rank]
        assert looked is not None
        question, links = looked
        self._looked[rank] = None
        # a thread that runs for a moment, as one that looks at its deadline does, counts as not blocked
        self._sent[rank] = state = self._state(rank) if self._draw.random() < 0.9 else None
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
            elif thread.send is not None:
                if thread.send[1] == blocker:
                    return True
            elif thread.receive is not None and not thread.matched:
                name, peer = thread.receive
                if peer == blocker or (peer == ANY and blocker in self._groups[name]):
                    return True
        return False
