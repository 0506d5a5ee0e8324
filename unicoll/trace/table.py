"""The last calls of each group as text: one line for the ranks whose calls are alike."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from unicoll.process.formatting import ranks_text
from unicoll.trace.dumps import Call, Group, Trace, name_ranks
from unicoll.trace.findings import Diagnosis

_WIDTH = 120
_BEFORE, _AFTER, _MESSAGES = 5, 2, 10
_HEADINGS = ("#", "ranks", "call", "state", "begun", "took", "at")


_Row = tuple[str, ...]
"""The cells below the headings."""


def tables(trace: Trace, diagnosis: Diagnosis, everything: bool = False) -> str:
    """A table for each group: the calls around the failed one, or its last calls, or with
    ``everything`` all calls."""
    parts = []
    for group in trace.groups.values():
        rows = _collectives(trace, group, diagnosis, everything)
        messages = _messages(trace, group, everything)
        if rows or messages:
            title = f"group {group.name!r} ({name_ranks(group.ranks)}; {group.backends})"
            parts.append("\n".join([title, *_aligned([*rows, *messages])]))
    return "\n\n".join(parts)


def _collectives(trace: Trace, group: Group, diagnosis: Diagnosis, everything: bool) -> list[_Row]:
    by_rank = trace.collectives(group)
    numbers = sorted({seq for calls in by_rank.values() for seq in calls})
    if not everything:
        unfinished = [
            seq for calls in by_rank.values() for seq, call in calls.items() if call.is_open
        ]
        center = (
            diagnosis.seq
            if diagnosis.group == group.name and diagnosis.seq
            else min(unfinished, default=0)
        )
        if center:
            numbers = [seq for seq in numbers if center - _BEFORE <= seq <= center + _AFTER]
        else:
            numbers = numbers[-_BEFORE - _AFTER :]
    rows: list[_Row] = []
    for seq in numbers:
        there = [calls[seq] for calls in by_rank.values() if seq in calls]
        rows += [_row(trace, str(seq), alike) for alike in _alike(there)]
        absent = [rank for rank, calls in by_rank.items() if max(calls, default=0) < seq]
        if absent:
            rows.append((str(seq), _short(absent), "not called", "", "", "", _at(trace, absent)))
    return rows


def _messages(trace: Trace, group: Group, everything: bool) -> list[_Row]:
    calls = [
        c for d in trace.dumps.values() for c in d.calls if c.group == group.name and c.is_message
    ]
    calls.sort(key=lambda call: (call.is_open, call.created))
    if not everything:
        calls = calls[-_MESSAGES:]
    return [_row(trace, "", [call]) for call in calls]


def _alike(calls: Iterable[Call]) -> list[list[Call]]:
    found: dict[tuple[str, str, str], list[Call]] = {}
    for call in calls:
        found.setdefault((call.text, call.state, call.site), []).append(call)
    return list(found.values())


def _row(trace: Trace, seq: str, calls: Sequence[Call]) -> _Row:
    begun = min(call.created for call in calls) - trace.end
    took = max((call.ended or trace.dumps[call.rank].written) - call.created for call in calls)
    first = calls[0]
    ranks = _short([call.rank for call in calls])
    return (seq, ranks, first.text, first.state, f"{begun:.4f}", f"{took:.4f}", first.place)


def _at(trace: Trace, ranks: Sequence[int]) -> str:
    places = list(dict.fromkeys(trace.dumps[rank].place for rank in ranks))
    return places[0] + (f" and {len(places) - 1} other places" if len(places) > 1 else "")


def _short(ranks: Sequence[int]) -> str:
    return ranks_text(ranks).partition(" ")[2]


def _aligned(rows: Sequence[_Row]) -> list[str]:
    """The rows below their headings; long calls and places are cut."""
    lines = [_HEADINGS, *rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(_HEADINGS))]
    spare = _WIDTH - 2 * len(_HEADINGS) - sum(widths) + widths[1] + widths[2] + widths[6]
    widths[1] = min(widths[1], max(12, spare // 4))
    widths[6] = min(widths[6], max(20, (spare - widths[1]) // 2))
    widths[2] = min(widths[2], max(20, spare - widths[1] - widths[6]))
    return [f"  {line}".rstrip() for line in aligned(lines, right=(0, 4, 5), widths=widths)]


def aligned(
    rows: Sequence[Sequence[str]], right: Collection[int], widths: Sequence[int] | None = None
) -> list[str]:
    """Lines with the cells of rows in columns, of which those in ``right`` are aligned at the
    right.

    Cells that are longer than ``widths`` are cut; None is the widths of the longest cells.
    """
    widths = widths or [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cut = [
            cell if len(cell) <= width else cell[: width - 3] + "..."
            for cell, width in zip(row, widths, strict=True)
        ]
        cells = [
            cell.rjust(width) if column in right else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(cut, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return lines
