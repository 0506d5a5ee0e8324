"""Calls and bytes of recorded calls or of a dry run, added up by operation and group.

``python -m unicoll.trace.summary --dry-run --world-size 256 train.py ...`` runs a program as one
rank of a job of any size with the backend ``fake`` (:mod:`unicoll.backend.host.fake`) and prints
the table; with flight recorder dumps, or their directory, in place of a program it prints the sums
over those. :func:`add_up` and :func:`dry_run_summary` return it. docs/scaling.md says what a call
of so many bytes sends. Coalesced calls are counted one by one.
"""

from __future__ import annotations

import argparse
import os
import runpy
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unicoll.backend.host import fake
from unicoll.bootstrap.resolve import JoinRequest
from unicoll.calls.flight_recorder import CallKind
from unicoll.diagnosis.recorder_contents import RecordedCall
from unicoll.errors import DistArgumentError
from unicoll.net.objects.received_json import MALFORMED, read_json
from unicoll.process.formatting import print_text
from unicoll.trace.dumps import Call, call_of
from unicoll.trace.table import aligned

Recorded = RecordedCall | CallKind


@dataclass
class Line:
    """The calls of one operation and compression in one group.

    Attributes:
        nbytes: bytes of the inputs, or of the outputs where a rank has no inputs.
    """

    op: str
    group: str
    ranks: int
    calls: int = 0
    nbytes: int = 0
    compression: str = ""


@dataclass(frozen=True)
class Summary:
    """The table: a line for each operation, compression and group, the most bytes first."""

    lines: tuple[Line, ...]

    @property
    def total(self) -> Line:
        """The sums over all lines; its group is "", its number of ranks the largest."""
        ranks = max((line.ranks for line in self.lines), default=0)
        calls = sum(line.calls for line in self.lines)
        return Line("total", "", ranks, calls, sum(line.nbytes for line in self.lines))

    def __str__(self) -> str:
        rows = [("operation", "group", "ranks", "calls", "bytes")]
        for line in (*self.lines, self.total):
            op = f"{line.op}, {line.compression}" if line.compression else line.op
            numbers = (str(line.ranks), str(line.calls), _bytes(line.nbytes))
            rows.append((op, line.group, *numbers))
        return "\n".join(aligned(rows, right=range(2, 5)))


def add_up(calls: Iterable[Recorded | tuple[Recorded, int]]) -> Summary:
    """The table of recorded calls (:func:`unicoll.diagnosis.recorder_contents.recorded_calls`).

    Args:
        calls: each one alone, or with the number of times that it was made; failed ones do not
            count.
    """
    lines: dict[tuple[str, str, str], Line] = {}
    for item in calls:
        call, number = item if isinstance(item, tuple) else (item, 1)
        if getattr(call, "state", "") == "failed":
            continue
        key = call.op, call.group, call.compression
        line = lines.setdefault(
            key, Line(call.op, call.group, len(call.ranks), compression=call.compression)
        )
        line.calls += number
        line.nbytes += number * call.nbytes
    return Summary(tuple(sorted(lines.values(), key=lambda line: -line.nbytes)))


def dry_run_summary() -> Summary:
    """The table of all calls since ``init_process_group("fake")``, however many; also after the
    job's end."""
    return add_up(fake.counts())


def from_dump(content: dict[str, Any]) -> list[Call]:
    """The calls of a flight recorder dump, parsed from JSON; DistArgumentError if it is none."""
    try:
        return [call_of(content.get("rank", -1), entry) for entry in content["calls"]]
    except MALFORMED as error:
        raise DistArgumentError(
            f"not a dump of the flight recorder: {type(error).__name__}: {error}"
        ) from error


_SIZES = {"": 1.0, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}


def _bytes(value: float) -> str:
    unit = next((u for u, scale in reversed(_SIZES.items()) if value >= scale), "")
    return f"{value / _SIZES[unit]:.4g} {unit}B"


# --- command line ---------------------------------------------------------------------------------


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code of the program, or 0."""
    parser = argparse.ArgumentParser(
        prog="python -m unicoll.trace.summary", description=__doc__.split("\n")[0]
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="run a program with the backend fake"
    )
    parser.add_argument("--world-size", type=int, default=1, help="number of ranks of the dry run")
    parser.add_argument("--rank", type=int, default=0, help="rank of the dry run (default 0)")
    parser.add_argument(
        "--nproc-per-node", type=int, default=1, help="ranks of each host (default 1)"
    )
    parser.add_argument(
        "what", nargs=argparse.REMAINDER, help="dumps, or a program and its arguments"
    )
    options = parser.parse_args(argv)
    if not options.what:
        parser.error("give a program with --dry-run, or dumps of the flight recorder")
    if not options.dry_run:
        calls: list[Call] = []
        given = [Path(path) for path in options.what]
        paths = [p for g in given for p in (sorted(g.glob("rank_*.json")) if g.is_dir() else [g])]
        if not paths:
            parser.error(f"{', '.join(options.what)}: no dump of a flight recorder (rank_R.json)")
        for path in paths:
            try:
                calls += from_dump(read_json(str(path)))
            except (OSError, ValueError, DistArgumentError) as error:
                parser.error(f"{path}: {error}")
        print_text(str(add_up(calls)))
        return 0
    if options.nproc_per_node < 1:
        parser.error(f"--nproc-per-node {options.nproc_per_node} is not positive")
    if not 0 <= options.rank < options.world_size:
        parser.error(f"--rank {options.rank} is not below --world-size {options.world_size}")
    if not os.path.exists(options.what[0]):
        parser.error(f"{options.what[0]}: no such file")
    code = _dry_run(options.what, options.rank, options.world_size, options.nproc_per_node)
    print_text(str(dry_run_summary()))
    return code


def _dry_run(program: list[str], rank: int, size: int, per_node: int) -> int:
    """Run a program in this process, with torchrun's variables; returns its exit code."""
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(size),
        LOCAL_RANK=str(rank % per_node),
        LOCAL_WORLD_SIZE=str(min(per_node, size)),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT="29500",
    )
    JoinRequest.override = "fake"
    sys.argv = program
    sys.path[0] = str(Path(program[0]).resolve().parent)
    try:
        runpy.run_path(program[0], run_name="__main__")
    except SystemExit as end:
        if isinstance(end.code, int) or end.code is None:
            return end.code or 0
        print(end.code, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
