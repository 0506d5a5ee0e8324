"""The tables: nccl-tests', with two more columns where several contenders are measured, OSU's, and that of overlap.

Widths and number formats are those of nccl-tests (src/util.cu) and of the OSU micro-benchmarks
(https://mvapich.cse.ohio-state.edu/benchmarks/), so that what reads theirs reads ours.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .operations import IN, OUT, Operation

__all__ = ["Half", "Line", "bandwidths", "float_str", "footer", "header", "osu_header", "osu_line", "row"]

_NAME = 12
_TIME_OF_DAY = "%Y-%m-%d %H:%M:%S"


@dataclass(frozen=True)
class Half:
    """One half of a line: what was measured in place, or out of place.

    Attributes:
        time: microseconds.
        stats: all statistics of it, microseconds over the ranks.
        algbw, busbw: GB/s (1e9 bytes).
        wrong: wrong elements of all ranks; None where it was not checked.
        calls: timed calls of one rank.
        by_rank: the statistics of each rank.
    """

    time: float
    stats: Mapping[str, float]
    algbw: float
    busbw: float
    wrong: int | None
    calls: int
    by_rank: Mapping[str, Sequence[float]]


@dataclass(frozen=True)
class Line:
    """One line of the table: one contender's measurement of one size.

    Attributes:
        size, count: bytes, and elements as nccl-tests counts them.
        type, redop, root: nccl-tests' names; ``"none"`` and -1 where there is none.
        halves: what was measured; a half that was not is absent.
        contender: who.
        ratio: its time divided by the first contender's; None where one of them was not measured.
    """

    size: int
    count: int
    type: str
    redop: str
    root: int
    halves: Mapping[str, Half]
    contender: str
    ratio: float | None

    def half(self, op: Operation) -> Half | None:
        """The half that contenders are compared by: the operation's first that was measured."""
        return next((self.halves[name] for name in (*op.halves, IN, OUT) if name in self.halves), None)


def float_str(value: float, width: int) -> str:
    """A number as nccl-tests prints it: as many decimals as fit."""
    if math.isnan(value):
        return f"{'N/A':>{width}}"
    power = 0
    while value >= 10**power:
        power += 1
    if power < width - 2:
        return f"{value:{width}.2f}"
    if power < width - 1:
        return f"{value:{width}.1f}"
    if power < width + 1:
        return f"{value:{width}.0f}"
    return f"{value:{width}.1e}" if width >= 7 else f"{value:{width}.0e}"


def bandwidths(op: Operation, size: int, us: float, ranks: int) -> tuple[float, float]:
    """Algorithm and bus bandwidth in GB/s."""
    algorithm = size / 1e3 / us if us > 0 else math.nan
    return algorithm, algorithm * op.factor(ranks)


# --- nccl-tests' ----------------------------------------------------------------------------------------------------


def header(compared: bool, cpu_time: bool = False, timestamps: bool = False) -> list[str]:
    """The three lines over the table; ``compared`` adds the contender and its ratio."""
    label = "cputime" if cpu_time else "time"
    lines = [
        "# {:>10}  {:>12}  {:>8}  {:>6}  {:>6}           out-of-place                       in-place          ".format(
            *[""] * 5
        )
    ]
    names = ("size", "count", "type", "redop", "root", *(label, "algbw", "busbw", "#wrong") * 2)
    units = ("(B)", "(elements)", "", "", "", *("(us)", "(GB/s)", "(GB/s)", "") * 2)
    widths = (10, 12, 8, 6, 6, *(7, 6, 6, 6) * 2)
    for words, stamp in ((names, "timestamp"), (units, _TIME_OF_DAY)):
        text = "# " + "  ".join(f"{word:>{width}}" for word, width in zip(words, widths, strict=True))
        lines.append(f"{text} {stamp if timestamps else '':>{19 if timestamps else 0}}")
    if compared:
        lines[1] += f"  {'contender':<{_NAME}}  {'ratio':>7}"
        lines[2] += f"  {'':<{_NAME}}  {'':>7}"
    return lines


def row(line: Line, compared: bool, timestamps: bool = False) -> str:
    """One line of the table. A half that was not measured is N/A: no number is made up."""
    text = f"{line.size:12d}  {line.count:12d}  {line.type:>8}  {line.redop:>6}  {line.root:6d}"
    for name in (OUT, IN):
        half = line.halves.get(name)
        if half is None:
            text += f"  {'N/A':>7}  {'N/A':>6}  {'N/A':>6}  {'N/A':>6}"
            continue
        wrong = "   N/A" if half.wrong is None else f"{half.wrong:6g}"
        text += (
            f"  {float_str(half.time, 7)}  {float_str(half.algbw, 6)}  {float_str(half.busbw, 6)}  {wrong}"
        )
    if timestamps:
        text += f"{time.strftime(_TIME_OF_DAY):>21}"
    if compared:
        ratio = "N/A" if line.ratio is None else f"{line.ratio:.2f}"
        text += f"   {line.contender:<{_NAME}}  {ratio:>7}"
    return text


def footer(failed: int, average: Mapping[str, float], least: float | None, program: str) -> list[str]:
    """The lines under the table.

    Args:
        failed: checks that found something wrong.
        average: bus bandwidth of each contender over all its measurements.
        least: what the first contender's must reach nine tenths of (NCCL_TESTS_MIN_BW).
        program: nccl-tests' program.
    """
    lines = [f"# {'Out of bounds values':<20} : {failed} {'FAILED' if failed else 'OK'}"]
    for i, (name, bandwidth) in enumerate(average.items()):
        verdict = "" if least is None or i else ("FAILED" if bandwidth < least * 0.9 else "OK")
        who = [name] if len(average) > 1 else []
        lines.append(
            f"# {'Avg bus bandwidth':<20} : {bandwidth:g} " + " ".join(filter(None, [verdict, *who]))
        )
    return [*lines, "#", f"# Collective test concluded: {program}", "#"]


# --- OSU's ----------------------------------------------------------------------------------------------------------

_MPI_NAMES = {
    "int8": "MPI_SIGNED_CHAR", "uint8": "MPI_CHAR", "int32": "MPI_INT", "uint32": "MPI_UNSIGNED",
    "int64": "MPI_LONG", "uint64": "MPI_UNSIGNED_LONG", "float": "MPI_FLOAT", "double": "MPI_DOUBLE",
}  # fmt: skip
_FIELD = 18


def osu_header(
    op: Operation, library: str, version: str, type_name: str, full: bool, compared: bool
) -> list[str]:
    """The lines over OSU's table; what is measured is named where OSU has ``MPI``."""
    lines = [" ".join(filter(None, ("# OSU", library, op.title, f"Latency Test v{version}")))]
    if op.name != "barrier":
        lines.append(f"# Datatype: {_MPI_NAMES.get(type_name, type_name)}.")
        text = f"{'# Size':<10}{'Avg Latency(us)':>{_FIELD}}"
    else:
        text = "# Avg Latency(us)"
    if full:
        text += f"{'Min Latency(us)':>{_FIELD}}{'Max Latency(us)':>{_FIELD}}{'Iterations':>12}"
    if compared:
        text += f"  {'Contender':<{_NAME}}{'Ratio':>9}"
    return [*lines, text]


def osu_line(op: Operation, line: Line, ranks: int, full: bool, compared: bool) -> str:
    """One line of OSU's table: the mean over the ranks of each rank's mean, and the least and most of those."""
    half = line.half(op)
    assert half is not None
    size = line.size // ranks if op.osu_share else line.size
    if op.name == "barrier":
        text = f"{half.time:>17.2f}"
    else:
        text = f"{size:<10d}{half.time:>{_FIELD}.2f}"
    if full:
        means = [us for us in half.by_rank["avg"] if not math.isnan(us)]
        text += f"{min(means):>{_FIELD}.2f}{max(means):>{_FIELD}.2f}{half.calls:>12d}"
    if compared:
        ratio = "N/A" if line.ratio is None else f"{line.ratio:.2f}"
        text += f"  {line.contender:<{_NAME}}{ratio:>9}"
    return text
