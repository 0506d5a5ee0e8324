"""Formats nccl-tests' table, with two more columns if several contenders are measured, and OSU's
table.

Widths and number formats are those of nccl-tests (src/util.cu) and of the OSU micro-benchmarks
(https://mvapich.cse.ohio-state.edu/benchmarks/), so that tools that parse their output can parse
this one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from unicoll.bench.contenders import label
from unicoll.bench.operations import IN, OUT, Operation

Row = Mapping[str, Any]
"""One contender's measurement of one size: an entry of the JSON's ``results``, in which numbers may
be NaN."""
_NAME = 19


def compared_result(op: Operation, row: Row) -> dict[str, Any] | None:
    """The result by which contenders are compared: that of the operation's first measured
    placement."""
    return next((row[name] for name in (*op.placements, IN, OUT) if row[name] is not None), None)


def time_us(result: Mapping[str, Any]) -> float:
    """The selected statistic, in microseconds."""
    us: float = result["cpu_time"] if "cpu_time" in result else result["time"]
    return us


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


# --- nccl-tests' ----------------------------------------------------------------------------------


def header(compared: bool, cpu_time: bool = False) -> list[str]:
    """The three header lines; ``compared`` adds the columns contender and ratio."""
    time = "cputime" if cpu_time else "time"
    names = ("size", "count", "type", "redop", "root", *(time, "algbw", "busbw", "#wrong") * 2)
    units = ("(B)", "(elements)", "", "", "", *("(us)", "(GB/s)", "(GB/s)", "") * 2)
    widths = (10, 12, 8, 6, 6, *(7, 6, 6, 6) * 2)
    lines = [f"#{'out-of-place':>74}{'in-place':>31}{'':10}"]
    for columns, more in ((names, ("contender", "ratio")), (units, ("", ""))):
        text = "# " + "  ".join(
            f"{column:>{width}}" for column, width in zip(columns, widths, strict=True)
        )
        lines.append(f"{text}   {more[0]:<{_NAME}}  {more[1]:>7}" if compared else f"{text} ")
    return lines


def line(row: Row, compared: bool) -> str:
    """One line of the table. A placement that was not measured is printed as N/A."""
    text = (
        f"{row['size']:12d}  {row['count']:12d}  {row['type']:>8}  {row['redop']:>6} "
        f" {row['root']:>6}"
    )
    for name in (OUT, IN):
        result = row[name]
        if result is None:
            text += f"  {'N/A':>7}  {'N/A':>6}  {'N/A':>6}  {'N/A':>6}"
            continue
        wrong = "   N/A" if result["nwrong"] is None else f"{result['nwrong']:6g}"
        text += f"  {float_str(time_us(result), 7)}  {float_str(result['alg_bw'], 6)}"
        text += f"  {float_str(result['bus_bw'], 6)}  {wrong}"
    return text + (_comparison(row) if compared else "")


def _comparison(row: Row) -> str:
    ratio = "N/A" if row["ratio"] is None else f"{row['ratio']:.2f}"
    return f"   {label(row['contender']):<{_NAME}}  {ratio:>7}"


def footer(
    failed: int, average: Mapping[str, float], minimum: float | None, program: str
) -> list[str]:
    """The lines below the table; the first contender's average must reach 90 % of NCCL_TESTS_MIN_BW
    (``minimum``)."""
    lines = [f"# {'Out of bounds values':<20} : {failed} {'FAILED' if failed else 'OK'}"]
    for i, (name, bandwidth) in enumerate(average.items()):
        verdict = "" if minimum is None or i else ("FAILED" if bandwidth < minimum * 0.9 else "OK")
        suffix = [label(name)] if len(average) > 1 else []
        lines.append(
            f"# {'Avg bus bandwidth':<20} : {bandwidth:g} "
            + " ".join(filter(None, [verdict, *suffix]))
        )
    return [*lines, "#", f"# Collective test concluded: {program}", "#"]


# --- OSU's ----------------------------------------------------------------------------------------

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
        text += f"   {'Contender':<{_NAME}}{'Ratio':>9}"
    return [*lines, text]


def osu_line(op: Operation, row: Row, ranks: int, full: bool, compared: bool) -> str:
    """One line of OSU's table: the mean over the ranks of each rank's mean, and their minimum and
    maximum."""
    result = compared_result(op, row)
    assert result is not None
    us = time_us(result)
    size = row["size"] // ranks if op.osu_share else row["size"]
    text = f"{us:>17.2f}" if op.name == "barrier" else f"{size:<10d}{us:>{_FIELD}.2f}"
    if full:
        means = [us for us in result["us_by_rank"]["avg"] if not math.isnan(us)]
        text += f"{min(means):>{_FIELD}.2f}{max(means):>{_FIELD}.2f}{result['iterations']:>12d}"
    return text + (_comparison(row) if compared else "")
