"""Formats nccl-tests' table, with two more columns if several contenders are measured, and OSU's table.

Widths and number formats are those of nccl-tests (src/util.cu) and of the OSU micro-benchmarks
(https://mvapich.cse.ohio-state.edu/benchmarks/), so that tools that parse their output can parse this one.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass

from unicoll.bench.measure import Stats
from unicoll.bench.operations import IN, OUT, Operation

_NAME = 12
_TIME_OF_DAY = "%Y-%m-%d %H:%M:%S"


@dataclass(frozen=True)
class PlacementRow:
    """The in-place or the out-of-place results of a row.

    Attributes:
        time: the selected statistic, in microseconds.
        algbw, busbw: GB/s (1e9 bytes).
        wrong: wrong elements over all ranks; None if results were not checked.
        all_calls: calls of one rank with the untimed ones: the first, warm-up, planning and checks.
    """

    time: float
    stats: Stats
    algbw: float
    busbw: float
    wrong: int | None
    all_calls: int = 0


@dataclass(frozen=True)
class TableRow:
    """One row of the table: one contender's measurement of one size.

    Attributes:
        size, count: bytes, and elements by nccl-tests' definition.
        type, redop, root: nccl-tests' names; ``"none"`` and -1 if not applicable.
        results: results by placement; placements that were not measured are absent.
        ratio: its time divided by the first contender's; None if one of them was not measured.
    """

    size: int
    count: int
    type: str
    redop: str
    root: int
    results: Mapping[str, PlacementRow]
    contender: str
    ratio: float | None

    def compared_result(self, op: Operation) -> PlacementRow | None:
        """The result by which contenders are compared: the operation's first measured placement."""
        return next((self.results[name] for name in (*op.placements, IN, OUT) if name in self.results), None)


def float_str(value: float, width: int) -> str:
    """Format a number as nccl-tests does: as many decimals as fit."""
    if math.isnan(value):
        return f"{'N/A':>{width}}"
    power = len(str(int(value))) if value >= 1 else 0
    if power < width - 2:
        return f"{value:{width}.2f}"
    if power < width - 1:
        return f"{value:{width}.1f}"
    if power < width + 1:
        return f"{value:{width}.0f}"
    return f"{value:{width}.1e}" if width >= 7 else f"{value:{width}.0e}"


def bandwidths(op: Operation, size: int, us: float, ranks: int) -> tuple[float, float]:
    algorithm = size / 1e3 / us if us > 0 else math.nan
    return algorithm, algorithm * op.factor(ranks)


# --- nccl-tests' ----------------------------------------------------------------------------------------------------


def header(compared: bool, cpu_time: bool = False, timestamps: bool = False) -> list[str]:
    """The three header lines; ``compared`` adds the columns contender and ratio."""
    label = "cputime" if cpu_time else "time"
    lines = [
        "# {:>10}  {:>12}  {:>8}  {:>6}  {:>6}           out-of-place                       in-place          ".format(
            *[""] * 5
        )
    ]
    names = ("size", "count", "type", "redop", "root", *(label, "algbw", "busbw", "#wrong") * 2)
    units = ("(B)", "(elements)", "", "", "", *("(us)", "(GB/s)", "(GB/s)", "") * 2)
    widths = (10, 12, 8, 6, 6, *(7, 6, 6, 6) * 2)
    for columns, stamp in ((names, "timestamp"), (units, _TIME_OF_DAY)):
        text = "# " + "  ".join(f"{column:>{width}}" for column, width in zip(columns, widths, strict=True))
        lines.append(f"{text} {stamp if timestamps else '':>{19 if timestamps else 0}}")
    if compared:
        lines[1] += f"  {'contender':<{_NAME}}  {'ratio':>7}"
        lines[2] += f"  {'':<{_NAME}}  {'':>7}"
    return lines


def row(table_row: TableRow, compared: bool, timestamps: bool = False) -> str:
    """One row of the table. A placement that was not measured is printed as N/A."""
    text = f"{table_row.size:12d}  {table_row.count:12d}  {table_row.type:>8}"
    text += f"  {table_row.redop:>6}  {table_row.root:6d}"
    for name in (OUT, IN):
        result = table_row.results.get(name)
        if result is None:
            text += f"  {'N/A':>7}  {'N/A':>6}  {'N/A':>6}  {'N/A':>6}"
            continue
        wrong = "   N/A" if result.wrong is None else f"{result.wrong:6g}"
        text += f"  {float_str(result.time, 7)}  {float_str(result.algbw, 6)}  {float_str(result.busbw, 6)}  {wrong}"
    if timestamps:
        text += f"{time.strftime(_TIME_OF_DAY):>21}"
    if compared:
        ratio = "N/A" if table_row.ratio is None else f"{table_row.ratio:.2f}"
        text += f"   {table_row.contender:<{_NAME}}  {ratio:>7}"
    return text


def footer(failed: int, average: Mapping[str, float], minimum: float | None, program: str) -> list[str]:
    """The lines below the table; the first contender's average must reach 90 % of NCCL_TESTS_MIN_BW (``minimum``)."""
    lines = [f"# {'Out of bounds values':<20} : {failed} {'FAILED' if failed else 'OK'}"]
    for i, (name, bandwidth) in enumerate(average.items()):
        verdict = "" if minimum is None or i else ("FAILED" if bandwidth < minimum * 0.9 else "OK")
        suffix = [name] if len(average) > 1 else []
        lines.append(
            f"# {'Avg bus bandwidth':<20} : {bandwidth:g} " + " ".join(filter(None, [verdict, *suffix]))
        )
    return [*lines, "#", f"# Collective test concluded: {program}", "#"]


# --- OSU's ----------------------------------------------------------------------------------------------------------

_MPI_NAMES = {
    "int8": "MPI_SIGNED_CHAR",
    "uint8": "MPI_CHAR",
    "int32": "MPI_INT",
    "uint32": "MPI_UNSIGNED",
    "int64": "MPI_LONG",
    "uint64": "MPI_UNSIGNED_LONG",
    "float": "MPI_FLOAT",
    "double": "MPI_DOUBLE",
}
_FIELD = 18


def osu_header(
    op: Operation, library: str, version: str, type_name: str, full: bool, compared: bool
) -> list[str]:
    """The header lines of OSU's table, with the library's name in place of OSU's ``MPI``."""
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


def osu_line(op: Operation, table_row: TableRow, ranks: int, full: bool, compared: bool) -> str:
    """One row of OSU's table: the mean over the ranks of each rank's mean, and their minimum and maximum."""
    result = table_row.compared_result(op)
    assert result is not None
    size = table_row.size // ranks if op.osu_share else table_row.size
    if op.name == "barrier":
        text = f"{result.time:>17.2f}"
    else:
        text = f"{size:<10d}{result.time:>{_FIELD}.2f}"
    if full:
        means = [us for us in result.stats.by_rank["avg"] if not math.isnan(us)]
        text += f"{min(means):>{_FIELD}.2f}{max(means):>{_FIELD}.2f}{result.stats.calls:>12d}"
    if compared:
        ratio = "N/A" if table_row.ratio is None else f"{table_row.ratio:.2f}"
        text += f"  {table_row.contender:<{_NAME}}{ratio:>9}"
    return text
