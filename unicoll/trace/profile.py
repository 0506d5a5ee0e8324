"""``with unicoll.profile(directory)``: what the calls of a job cost, and which rank the others
waited for.

At the end of the block rank 0 gets the flight recorders of all ranks, and writes their dumps, a
summary, a trace for Perfetto (https://ui.perfetto.dev) and, where matplotlib is installed, a plot
of time by operation and waiting by rank.
"""

from __future__ import annotations

import io
import json
import os
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from itertools import chain, pairwise
from pathlib import Path
from statistics import median
from typing import Any, TextIO

from unicoll.api import objects, world
from unicoll.calls import flight_recorder
from unicoll.diagnosis import flight_dump
from unicoll.diagnosis.recorder_contents import recorded_calls
from unicoll.errors import DistArgumentError
from unicoll.process.files import write_whole
from unicoll.process.formatting import printable
from unicoll.trace import dumps, perfetto
from unicoll.trace.dumps import Call, Trace
from unicoll.trace.table import aligned

_SHOWN = 8
"""Places in the summary."""


@dataclass(frozen=True)
class Wait:
    """The call of a late rank, that rank's previous one, and from when to when the other ranks
    waited, by rank."""

    call: Call
    previous: Call | None
    spans: dict[int, tuple[float, float]]

    @property
    def seconds(self) -> dict[int, float]:
        """How long the other ranks waited, by rank."""
        return {rank: end - begin for rank, (begin, end) in self.spans.items()}

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
    """All calls of one operation on one group, of all ranks. Time in several calls of a rank at
    once counts once.

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


@dataclass
class Profile:
    """The measured part of a program; see :func:`profile`.

    Attributes:
        text: the summary, on rank 0 after the block.
        totals, waits: what it is made from.
    """

    text: str = ""
    totals: list[Totals] = field(default_factory=list)
    waits: list[Wait] = field(default_factory=list)


@contextmanager
def _measured(directory: Path, calls: int, file: TextIO | None) -> Iterator[Profile]:
    made = Profile()
    _use_ring(calls)
    try:
        yield made
        _finish(made, directory, file)
    finally:
        _use_ring(None)


def _use_ring(size: int | None) -> None:
    flight_recorder.replace_ring(size)
    for group in world.current("profile").groups:
        group._dispatcher.use_ring()


def _finish(made: Profile, directory: Path, file: TextIO | None) -> None:
    job = world.current("profile")
    rank, size = world.get_rank(), world.get_world_size()
    own = flight_dump.dumper_of(job).content("profile", recorded_calls(job.number))
    parts: list[Any] | None = [None] * size if rank == 0 else None
    objects.gather_object(json.dumps(own), parts, dst=0)
    if parts is None:
        return
    for number, part in enumerate(parts):
        write_whole(str(directory / f"rank_{number}.json"), part.encode(), mode=0o644)
    found = dumps.read(str(directory))
    made.waits = find_waits(found)
    made.totals = totals(found, made.waits)
    made.text = printable(summary(found, made.totals, made.waits))
    write_whole(str(directory / "summary.txt"), f"{made.text}\n".encode(), mode=0o644)
    perfetto.write(found, str(directory / "trace.json"))
    if find_spec("matplotlib") is not None:
        _plot(made.totals, directory / "profile.svg")
    if file is not None:
        print(made.text, file=file, flush=True)


def profile(
    directory: str | os.PathLike[str], *, calls: int = 100_000, file: Any = sys.stderr
) -> AbstractContextManager[Profile]:
    """Measure the calls of all ranks in a ``with`` block, which all ranks of the job enter and
    leave.

    At its end rank 0 prints a summary by operation (calls, bytes, time, bandwidth, for whom ranks
    waited) and writes into ``directory``: ``summary.txt``, ``trace.json`` for Perfetto,
    ``profile.svg`` if matplotlib is installed, and the dumps ``rank_R.json``. If the block raises,
    nothing is written.

    Args:
        directory: made on rank 0 if it does not exist.
        calls: the most calls of a rank that are kept; earlier ones are dropped.
        file: a text file for the summary, or None.

    Raises:
        NotInitializedError: there is no default group.
        DistArgumentError: ``calls`` is not positive.
        OSError: on rank 0, if ``directory`` cannot be made; at the end, if a file cannot be
            written.
    """
    job = world.current("profile")
    if calls < 1:
        raise DistArgumentError(f"profile: calls={calls} is not positive")
    path = Path(directory)
    if job.rank == 0:
        path.mkdir(parents=True, exist_ok=True)
    return _measured(path, calls, file)


# --- which rank waited for which ------------------------------------------------------------------


def find_waits(trace: Trace) -> list[Wait]:
    """The waits that are longer than the clocks of two ranks may differ, longest first.

    A rank waits in a collective until the last of the ranks that have made it before the rank's own
    call ended; a rank that needs no other one (the root of a broadcast, for example) ends before
    the others come. A receive waits for the send.
    """
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
        seconds = sum(
            _covered((call.created, call.ended) for call in calls) for calls in ranks.values()
        )
        found[op, group] = Totals(
            op,
            group,
            max(len(calls) for calls in ranks.values()),
            max(sum(call.nbytes for call in calls) for calls in ranks.values()),
            seconds / len(ranks),
        )
    by_late: dict[tuple[str, str], dict[int, list[Wait]]] = defaultdict(lambda: defaultdict(list))
    for wait in waits:
        op = wait.call.op if not wait.call.is_message else "recv"
        by_late[op, wait.call.group][wait.call.rank].append(wait)
    for key in found.keys() & by_late.keys():
        lates = by_late[key]
        found[key].waiting = _waited(chain(*lates.values())) / len(by_rank[key])
        found[key].waited_for = {late: _waited(some) for late, some in lates.items()}
    return sorted(found.values(), key=lambda total: -total.seconds)


def _waited(waits: Iterable[Wait]) -> float:
    """The sum over the ranks of the seconds in which the rank was in at least one of the waits."""
    by_rank: dict[int, list[tuple[float, float]]] = defaultdict(list)
    for wait in waits:
        for rank, span in wait.spans.items():
            by_rank[rank].append(span)
    return sum(map(_covered, by_rank.values()))


def _covered(spans: Iterable[tuple[float, float]]) -> float:
    """The seconds of the union of intervals."""
    covered, until = 0.0, float("-inf")
    for begin, end in sorted(spans):
        covered += max(0.0, end - max(begin, until))
        until = max(until, end)
    return covered


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
    return (
        calls for calls in trace.complete_collectives() if len({call.op for call in calls}) == 1
    )


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
        # Otherwise the recorder has dropped some calls.
        if len(sent) == len(received) and (key[0], key[2]) not in unordered:
            yield from (list(pair) for pair in zip(sent, received, strict=True))


def _wait(calls: Sequence[Call], error: float, previous: Mapping[int, Call]) -> Wait | None:
    """The wait for the latest of the calls; None if no rank waited."""
    found: dict[int, tuple[float, float]] = {}
    late: Call | None = None
    for call in calls:
        if call.op == "send":
            continue
        end = call.ended or float("inf")
        before = [each for each in calls if each.created <= end]
        last = max(before, key=lambda each: each.created, default=call)
        if last.created - call.created > error:
            found[call.rank] = call.created, last.created
            if late is None or last.created > late.created:
                late = last
    return Wait(late, previous.get(id(late)), found) if late is not None else None


# --- text -----------------------------------------------------------------------------------------


def summary(trace: Trace, found: Sequence[Totals], waits: Sequence[Wait]) -> str:
    headings = ("operation", "group", "calls", "bytes", "seconds", "waiting", "GB/s", "waited for")
    rows = [headings]
    for total in found:
        most = max(total.waited_for, key=lambda rank: total.waited_for[rank], default=None)
        rows.append(
            (
                total.op,
                total.group,
                str(total.calls),
                str(total.nbytes),
                f"{total.seconds:.4f}",
                f"{total.waiting:.4f}",
                f"{total.bandwidth / 1e9:.3f}",
                "" if most is None else f"rank {most}",
            )
        )
    lines = aligned(rows, right=range(2, 7))
    size = max(dump.world_size for dump in trace.dumps.values())
    lines.append(f"(bytes and calls of one rank; seconds are the mean of {size} ranks)")
    lines += ["", *_late(waits)]
    return "\n".join(lines)


def _late(waits: Sequence[Wait]) -> list[str]:
    """A line for each place at which a rank was late, the longest waits first."""
    if not waits:
        return ["no rank waited for another one by more than the clocks may differ"]
    places: dict[tuple[object, ...], list[Wait]] = {}
    for wait in waits:
        call, before = wait.call, wait.previous
        key = (call.rank, call.text, call.group, call.site, before and (before.op, before.site))
        places.setdefault(key, []).append(wait)
    lines = ["longest waits:"]
    longest = sorted(places.values(), key=lambda some: -_waited(some))
    for some in longest[:_SHOWN]:
        call, before = some[0].call, some[0].previous
        ranks = dumps.name_ranks([rank for wait in some for rank in wait.spans])
        total = _waited(some)
        calls = f"call #{call.seq}" if len(some) == 1 and call.seq else f"{len(some)} calls"
        after = ""
        if before is not None:
            pauses = [
                w.call.created - (w.previous.ended or w.call.created)
                for w in some
                if w.previous is not None
            ]
            after = f", {median(pauses) * 1e3:.1f} ms after {before.op} at {before.place}"
        lines.append(
            f"  {ranks} waited {total * 1e3:.1f} ms (at most {some[0].longest * 1e3:.1f} ms) in"
            f" {calls} for rank {call.rank} in {call.text} of group {call.group!r}: rank"
            f" {call.rank} called it at {call.place}{after}"
        )
    return lines


def _plot(found: Sequence[Totals], path: Path) -> None:
    """Time by operation, and waiting by late rank."""
    figures: Any = import_module("matplotlib.figure")
    figure = figures.Figure(figsize=(9, 3.5), layout="constrained")
    times, ranks = figure.subplots(1, 2)
    names = [f"{total.op}\n{total.group}" for total in found]
    moving = [total.seconds - total.waiting for total in found]
    waiting = [total.waiting for total in found]
    times.bar(names, moving, color="#444444", label="moving data")
    times.bar(
        names, waiting, bottom=moving, color="#bbbbbb", hatch="//", label="waiting for other ranks"
    )
    times.set_ylabel("seconds, mean of the ranks")
    times.tick_params(axis="x", labelrotation=30)
    times.legend()
    by_rank: dict[int, float] = {}
    for total in found:
        for rank, seconds in total.waited_for.items():
            by_rank[rank] = by_rank.get(rank, 0.0) + seconds
    ranks.bar(
        [str(rank) for rank in sorted(by_rank)],
        [by_rank[rank] for rank in sorted(by_rank)],
        color="#444444",
    )
    ranks.set_xlabel("late rank")
    ranks.set_ylabel("seconds for which others waited")
    image = io.BytesIO()
    figure.savefig(image, format="svg")
    write_whole(str(path), image.getvalue(), mode=0o644)
