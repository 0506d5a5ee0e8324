"""The calls of all ranks as a trace in Chrome's format, which https://ui.perfetto.dev and
chrome://tracing show."""

from __future__ import annotations

import json
from typing import Any

from unicoll.process.files import write_whole
from unicoll.trace.dumps import Call, Trace

Event = dict[str, Any]


def write(trace: Trace, path: str) -> None:
    """Write the trace to a file; OSError if that is impossible."""
    write_whole(path, json.dumps(chrome_trace(trace)).encode(), mode=0o644)


def chrome_trace(trace: Trace) -> Event:
    """One process per rank, a track per group and one for messages; more tracks where calls
    overlap.

    Times are microseconds since the first call, on rank 0's clock. A call that has not ended lasts
    until its rank's dump. An arrow leads from the rank that makes a collective first to the others.
    """
    calls = [call for dump in trace.dumps.values() for call in dump.calls]
    begin = min((call.created for call in calls), default=0.0)
    events: list[Event] = []
    # For each collective its calls and their tracks.
    arrivals: dict[tuple[str, int], list[tuple[Call, int]]] = {}
    # For each track title its number, which is equal in all ranks.
    numbers: dict[str, int] = {}
    for rank, dump in trace.dumps.items():
        title = f"rank {rank} ({dump.host}, pid {dump.pid})"
        events.append({"ph": "M", "pid": rank, "name": "process_name", "args": {"name": title}})
        events.append(
            {"ph": "M", "pid": rank, "name": "process_sort_index", "args": {"sort_index": rank}}
        )
        # For each title the times at which its tracks are free.
        free: dict[str, list[float]] = {}
        for call in sorted(dump.calls, key=lambda call: call.created):
            end = call.ended or dump.written
            track = _track(call, free, end)
            if track not in numbers:
                numbers[track] = len(numbers) + 1
            if f"{rank} {track}" not in free:
                free[f"{rank} {track}"] = []
                shown = {"name": track}
                events.append(
                    {
                        "ph": "M",
                        "pid": rank,
                        "tid": numbers[track],
                        "name": "thread_name",
                        "args": shown,
                    }
                )
            events.append(_slice(call, begin, end, numbers[track]))
            if call.seq and not call.is_message:
                arrivals.setdefault((call.group, call.seq), []).append((call, numbers[track]))
    for callers in arrivals.values():
        events += _arrows(callers, begin)
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _track(call: Call, free: dict[str, list[float]], end: float) -> str:
    """The title of the first track on which no call is in progress."""
    title = f"messages of group {call.group!r}" if call.is_message else f"group {call.group!r}"
    tracks = free.setdefault(title, [])
    for index, time in enumerate(tracks):
        if time <= call.created:
            tracks[index] = end
            break
    else:
        index = len(tracks)
        tracks.append(end)
    return title if index == 0 else f"{title} ({index + 1})"


def _slice(call: Call, begin: float, end: float, track: int) -> Event:
    arguments = {
        "call": call.text,
        "seq": call.seq,
        "state": call.state,
        "site": call.site,
        "inputs": [f"{dtype.name}{list(shape)}" for dtype, shape in call.inputs],
        "outputs": [f"{dtype.name}{list(shape)}" for dtype, shape in call.outputs],
        "bytes": call.nbytes,
        "backend": call.backend,
    }
    if call.error:
        arguments["error"] = call.error
    return {
        "ph": "X",
        "pid": call.rank,
        "tid": track,
        "ts": _microseconds(call.created, begin),
        "dur": max(0.0, _microseconds(end, call.created)),
        "name": f"{call.op} #{call.seq}" if call.seq else call.op,
        "cat": call.group,
        "args": arguments,
    }


def _arrows(callers: list[tuple[Call, int]], begin: float) -> list[Event]:
    """Arrows from the first call of a collective to those of the other ranks."""
    first, *others = sorted(callers, key=lambda caller: (caller[0].created, caller[0].rank))
    events = []
    for other in others:
        for phase, (call, track) in (("s", first), ("f", other)):
            events.append(
                {
                    "ph": phase,
                    "bp": "e",
                    "id": f"{call.group} {call.seq} {other[0].rank}",
                    "pid": call.rank,
                    "tid": track,
                    "ts": _microseconds(call.created, begin),
                    "name": "arrival",
                    "cat": call.group,
                }
            )
    return events


def _microseconds(moment: float, begin: float) -> float:
    return round((moment - begin) * 1e6, 3)
