"""``with unicoll.profile(directory)``: what the calls of a job cost, and which rank the others waited for.

At the end of the block rank 0 gets the flight recorders of all ranks, and writes their dumps, a summary, a trace for
Perfetto (https://ui.perfetto.dev) and, where matplotlib is installed, a plot of time by operation and waiting by rank.
"""

from __future__ import annotations

import io
import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any, TextIO

from unicoll.api import objects, world
from unicoll.backend import flight_recorder
from unicoll.bootstrap import flight_dump
from unicoll.errors import DistArgumentError
from unicoll.group.recorded_calls import recorded_calls
from unicoll.net.files import write_whole
from unicoll.net.formatting import printable
from unicoll.trace import dumps, perfetto
from unicoll.trace.dumps import Trace
from unicoll.trace.table import aligned
from unicoll.trace.waits import Totals, Wait, find_waits, totals

_SHOWN = 8
"""Places in the summary."""


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
    for group in world.current("profile").job.groups:
        group._dispatcher.use_ring()


def _finish(made: Profile, directory: Path, file: TextIO | None) -> None:
    dumper = flight_dump.current()
    assert dumper is not None
    rank, size = world.get_rank(), world.get_world_size()
    own = dumper.content("profile", recorded_calls())
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
    """Measure the calls of all ranks in a ``with`` block, which all ranks of the job enter and leave.

    At its end rank 0 prints a summary by operation (calls, bytes, time, bandwidth, for whom ranks waited) and writes
    into ``directory``: ``summary.txt``, ``trace.json`` for Perfetto, ``profile.svg`` if matplotlib is installed, and
    the dumps ``rank_R.json``. If the block raises, nothing is written.

    Args:
        directory: made on rank 0 if it does not exist.
        calls: the most calls of a rank that are kept; earlier ones are dropped.
        file: a text file for the summary, or None.

    Raises:
        NotInitializedError: there is no default group.
        DistArgumentError: ``calls`` is not positive.
        OSError: on rank 0, if ``directory`` cannot be made; at the end, if a file cannot be written.
    """
    job = world.current("profile").job
    if calls < 1:
        raise DistArgumentError(f"profile: calls={calls} is not positive")
    path = Path(directory)
    if job.rank == 0:
        path.mkdir(parents=True, exist_ok=True)
    return _measured(path, calls, file)


# --- text -----------------------------------------------------------------------------------------------------------


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
    longest = sorted(places.values(), key=lambda some: -sum(wait.total for wait in some))
    for some in longest[:_SHOWN]:
        call, before = some[0].call, some[0].previous
        ranks = dumps.name_ranks([rank for wait in some for rank in wait.seconds])
        total = sum(wait.total for wait in some)
        calls = f"call #{call.seq}" if len(some) == 1 and call.seq else f"{len(some)} calls"
        after = ""
        if before is not None:
            pauses = [
                w.call.created - (w.previous.ended or w.call.created) for w in some if w.previous is not None
            ]
            after = f", {median(pauses) * 1e3:.1f} ms after {before.op} at {before.place}"
        lines.append(
            f"  {ranks} waited {total * 1e3:.1f} ms (at most {some[0].longest * 1e3:.1f} ms) in {calls} for rank"
            f" {call.rank} in {call.text} of group {call.group!r}: rank {call.rank} called it at {call.place}{after}"
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
    times.bar(names, waiting, bottom=moving, color="#bbbbbb", hatch="//", label="waiting for other ranks")
    times.set_ylabel("seconds, mean of the ranks")
    times.tick_params(axis="x", labelrotation=30)
    times.legend()
    by_rank: dict[int, float] = {}
    for total in found:
        for rank, seconds in total.waited_for.items():
            by_rank[rank] = by_rank.get(rank, 0.0) + seconds
    ranks.bar(
        [str(rank) for rank in sorted(by_rank)], [by_rank[rank] for rank in sorted(by_rank)], color="#444444"
    )
    ranks.set_xlabel("late rank")
    ranks.set_ylabel("seconds for which others waited")
    image = io.BytesIO()
    figure.savefig(image, format="svg")
    write_whole(str(path), image.getvalue(), mode=0o644)
