"""Which rank waited for which: the calls of all ranks, matched by group and number, and messages in their order.

A rank waits in a collective until the last of the ranks that have made it before the rank's own call ended; a rank that
needs no other one (the root of a broadcast, for example) ends before the others come. A receive waits for the send.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from unicoll.trace.dumps import Call, Trace


@dataclass(frozen=True)
class Wait:
    """The call of a late rank, that rank's previous one, and the seconds that the other ranks waited, by rank."""

    call: Call
    previous: Call | None
    seconds: dict[int, float]

    @property
    def longest(self) -> float:
        """The longest wait of a rank, seconds."""
        return max(self.seconds.values())

    @property
    def total(self) -> float:
        """The waits of all ranks, seconds."""
        return sum(self.seconds.values())


@dataclass
class Totals:
    """All calls of one operation on one group, of all ranks.

    Attributes:
        calls: number of calls on one rank (the largest, if ranks differ).
        nbytes: bytes that a rank passed in, in all calls (the largest, if ranks differ).
        seconds: from start to end of the calls, the mean over the ranks.
        waiting: of these, how long ranks waited for late ones, the mean over the ranks.
        waited_for: seconds for which ranks waited, by late rank.
    """

    op: str
    group: str
    calls: int = 0
    nbytes: int = 0
    seconds: float = 0.0
    waiting: float = 0.0
    waited_for: dict[int, float] = field(default_factory=dict)

    @property
    def bandwidth(self) -> float:
        """Bytes for each second in which a rank did not wait; 0 if that took no time."""
        moving = self.seconds - self.waiting
        return self.nbytes / moving if moving > 0 else 0.0


def find_waits(trace: Trace) -> list[Wait]:
    """The waits that are longer than the clocks of two ranks may differ, longest first."""
    error = trace.clock_error or 0.0
    previous = _previous_calls(trace)
    waits = (_wait(calls, error, previous) for calls in (*_collectives(trace), *_messages(trace)))
    return sorted((wait for wait in waits if wait is not None), key=lambda wait: -wait.longest)


def totals(trace: Trace, waits: Iterable[Wait]) -> list[Totals]:
    """The totals of each operation and group, the one that took longest first."""
    by_rank: dict[tuple[str, str], dict[int, list[Call]]] = defaultdict(lambda: defaultdict(list))
    for dump in trace.dumps.values():
        for call in dump.calls:
            if call.ended:
                by_rank[call.op, call.group][call.rank].append(call)
    found = {}
    for (op, group), ranks in by_rank.items():
        seconds = sum((c.ended or c.created) - c.created for calls in ranks.values() for c in calls)
        found[op, group] = Totals(
            op,
            group,
            max(len(calls) for calls in ranks.values()),
            max(sum(call.nbytes for call in calls) for calls in ranks.values()),
            seconds / len(ranks),
        )
    for wait in waits:
        total = found.get((wait.call.op if not wait.call.is_message else "recv", wait.call.group))
        if total is not None:
            ranks_of = by_rank[total.op, total.group]
            total.waiting += wait.total / len(ranks_of)
            late = wait.call.rank
            total.waited_for[late] = total.waited_for.get(late, 0.0) + wait.total
    return sorted(found.values(), key=lambda total: -total.seconds)


def _previous_calls(trace: Trace) -> dict[int, Call]:
    """By ``id`` of a call: the call that its rank made before it."""
    found = {}
    for dump in trace.dumps.values():
        ordered = sorted(dump.calls, key=lambda call: call.created)
        for first, second in pairwise(ordered):
            found[id(second)] = first
    return found


def _collectives(trace: Trace) -> Iterator[list[Call]]:
    """The calls of each collective of which all ranks' are there."""
    return (calls for calls in trace.complete_collectives() if len({call.op for call in calls}) == 1)


def _messages(trace: Trace) -> Iterator[list[Call]]:
    """A send and its receive: the k-th from one rank to another with one tag.

    Those of a rank that receives from any rank, or with any tag, are left out.
    """
    sends: dict[tuple[str, int, int, int], list[Call]] = defaultdict(list)
    receives: dict[tuple[str, int, int, int], list[Call]] = defaultdict(list)
    unordered: set[tuple[str, int]] = set()
    for dump in trace.dumps.values():
        for call in sorted(dump.calls, key=lambda call: call.created):
            if not call.is_message or call.op == "probe":
                continue
            if call.peer < 0 or call.tag is None:
                unordered.add((call.group, call.rank))
                continue
            peer = call.ranks[call.peer]
            if call.op == "send":
                sends[call.group, call.rank, peer, call.tag].append(call)
            else:
                receives[call.group, peer, call.rank, call.tag].append(call)
    for key, sent in sends.items():
        received = receives.get(key, [])
        if len(sent) == len(received) and (key[0], key[2]) not in unordered:  # else some were dropped
            yield from (list(pair) for pair in zip(sent, received, strict=True))


def _wait(calls: Sequence[Call], error: float, previous: Mapping[int, Call]) -> Wait | None:
    """The wait for the latest of the calls; None if no rank waited."""
    found: dict[int, float] = {}
    late: Call | None = None
    for call in calls:
        if call.op == "send":
            continue
        end = call.ended or float("inf")
        before = [each for each in calls if each.created <= end]
        last = max(before, key=lambda each: each.created, default=call)
        if last.created - call.created > error:
            found[call.rank] = last.created - call.created
            if late is None or last.created > late.created:
                late = last
    return Wait(late, previous.get(id(late)), found) if late is not None else None
