"""Which ranks of a job wait for each other for ever: an analysis of the states of the blocked
ranks.

A rank is blocked if every one of its threads that could call unicoll is in a blocking call. Its
state says what each of these threads waits for, and the number of the last collective that it has
posted in each of its groups. A collective ends once every member has posted it, a receive once its
message has arrived, and a send once its receiver has read it, so a rank that is not blocked can
still end any wait. :func:`find_stuck` computes the largest set of ranks of which every call can be
completed only by ranks of the set.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

ANY = -1
"""The peer of a receive from any member."""
RECEIVE, SEND = 0, -1
"""The numbers of messages, which have no sequence number."""

Ranges = tuple[tuple[int, int, int], ...]


class Wait(NamedTuple):
    """What one thread waits for.

    Attributes:
        backend_group: backend and group of the call, as ``gloo:world``; its collectives have one
            order. Messages that are numbered have an order of their two members.
        number: the sequence number in that order; or :data:`RECEIVE`, or :data:`SEND`.
        peer: for a message the other global rank, or :data:`ANY`.
        call: distinguishes the calls of one rank.
    """

    backend_group: str
    number: int
    peer: int
    call: int


class State(NamedTuple):
    """A blocked rank.

    Attributes:
        waits: one for each thread; all of them have to stay blocked for the rank to stay blocked.
        posted: for each backend and group of the rank the number of the last collective posted; of
            those that the rank has destroyed, only for those that the relay has asked for.
        groups: for each backend and group of ``waits``, and for the groups themselves if messages
            are numbered, the members' global ranks as ranges (:func:`compress`).
    """

    waits: tuple[Wait, ...]
    posted: dict[str, int]
    groups: dict[str, Ranges]

    def members(self, backend_group: str) -> tuple[int, ...]:
        """The global ranks of the group."""
        return _expand(self.groups[backend_group])


class MessageState(NamedTuple):
    """The messages between this rank and another one, as they are known here.

    Attributes:
        outgoing, incoming: the peer's ``incoming`` equals this rank's ``outgoing``, and the
            reverse, unless a message or a connection is on its way.
        delivered: True if what this rank has sent has reached the peer's host.
        read: True if all that has arrived from the peer was read.
        unsent: bytes of the first queued send for which the buffers of this rank's host have no
            space.
        receive_space: bytes from the peer for which the buffers of this rank's host have space; -1
            if a thread reads from the connection.
    """

    outgoing: int = 0
    incoming: int = 0
    delivered: bool = True
    read: bool = True
    unsent: int = 0
    receive_space: int = -1


class Edge(NamedTuple):
    """A rank that waits for another one."""

    rank: int
    wait: Wait
    blocker: int


def backend_group_of(backend: str, group: str) -> str:
    """Backend and group as one name."""
    return f"{backend}:{group}"


def group_of(backend_group: str) -> str:
    """The name of the group in such a name."""
    return backend_group.partition(":")[2]


def compress(ranks: Sequence[int]) -> Ranges:
    """Ranks as (first, number of ranks, step): short for groups whose ranks are evenly spaced."""
    found: list[tuple[int, int, int]] = []
    i = 0
    while i < len(ranks):
        step = ranks[i + 1] - ranks[i] if i + 1 < len(ranks) else 1
        count = 1
        while i + count < len(ranks) and ranks[i + count] - ranks[i + count - 1] == step:
            count += 1
        found.append((ranks[i], count, step))
        i += count
    return tuple(found)


@lru_cache(256)
def _expand(ranges: Ranges) -> tuple[int, ...]:
    return tuple(first + i * step for first, count, step in ranges for i in range(count))


def parse(message: Any, size: int) -> State:
    """The state in a message of a rank of a world of ``size``.

    Raises:
        ValueError, TypeError, KeyError: the message is not a state.
    """
    waits = tuple(
        Wait(str(backend_group), int(n), int(peer), int(call))
        for backend_group, n, peer, call in message["waits"]
    )
    posted = {
        str(backend_group): int(number) for backend_group, number in message["posted"].items()
    }
    groups = {
        str(backend_group): tuple((int(a), int(n), int(s)) for a, n, s in ranges)
        for backend_group, ranges in message["groups"].items()
    }
    # The sizes are checked before the ranges are expanded: a short message could name any number of
    # ranks. A negative count must not make room for others.
    for ranges in groups.values():
        if sum(max(1, count) for _, count, _ in ranges) > size:
            raise ValueError("a group that is larger than the world")
    if not waits or any(wait.backend_group not in groups for wait in waits):
        raise ValueError("waits without a group")
    return State(waits, posted, groups)


def _blockers(states: Mapping[int, State], rank: int, wait: Wait) -> tuple[set[int], bool]:
    """The blocked ranks that could end a wait, and True if all of them, together with no other
    rank, are needed."""
    members = states[rank].members(wait.backend_group)
    # A collective stays stuck as long as one of these ranks is, since it needs all of them. A
    # message can come from any of its senders, so one that is not blocked frees the wait.
    if wait.number > 0:
        return {
            m
            for m in members
            if m in states and states[m].posted.get(wait.backend_group, 0) < wait.number
        }, False
    senders = {m for m in members if m != rank} if wait.peer == ANY else {wait.peer}
    return (senders if senders <= states.keys() else set()), True


def find_stuck(states: Mapping[int, State]) -> set[int]:
    """The ranks that wait for each other for ever: none of them can be woken by a rank outside the
    set.

    Messages count as if nothing of them were in flight, which the caller checks.
    """
    keys: dict[Any, tuple[set[int], bool]] = {}
    # For each operation the ranks in it, with one entry for each waiting thread.
    waiting: dict[Any, list[int]] = defaultdict(list)
    # For each rank the operations that it could end.
    blocking: dict[int, list[Any]] = defaultdict(list)
    # All blocked ranks are candidates. A wait without blockers ends: its rank is removed, and
    # blocks no other wait any more. What remains is the largest set.
    stuck = set(states)
    freed: list[Any] = []
    for rank, state in states.items():
        for wait in state.waits:
            key: Any = (wait.backend_group, wait.number) if wait.number > 0 else (*wait[:3], rank)
            waiting[key].append(rank)
            # The members of a group that wait in one collective share an entry, whose blockers are
            # found once.
            if key in keys:
                continue
            keys[key] = ranks, _ = _blockers(states, rank, wait)
            for blocker in ranks:
                blocking[blocker].append(key)
            if not ranks:
                freed.append(key)
    while freed:
        for rank in waiting[freed.pop()]:
            if rank not in stuck:
                continue
            stuck.discard(rank)
            for key in blocking[rank]:
                ranks, needs_all = keys[key]
                if not ranks:
                    continue
                ranks.discard(rank)
                if needs_all:
                    ranks.clear()
                if not ranks:
                    freed.append(key)
    return stuck


def stuck_waits(states: Mapping[int, State], stuck: set[int]) -> list[tuple[int, Wait]]:
    """The waits of the stuck ranks, in order of the ranks."""
    return [(rank, wait) for rank in sorted(stuck) for wait in states[rank].waits]


def find_cycle(states: Mapping[int, State], stuck: set[int]) -> list[Edge]:
    """Stuck ranks each of which waits for the next one, and the last for the first; begins with the
    lowest rank."""
    path: dict[int, Edge] = {}
    rank = min(stuck)
    while rank not in path:
        # Any wait will do: each one of a stuck rank has a blocker that is stuck.
        wait = states[rank].waits[0]
        blocker = min(_blockers(states, rank, wait)[0] & stuck)
        path[rank] = Edge(rank, wait, blocker)
        rank = blocker
    edges = list(path.values())
    cycle = edges[list(path).index(rank) :]
    lowest = min(range(len(cycle)), key=lambda i: cycle[i].rank)
    return cycle[lowest:] + cycle[:lowest]
