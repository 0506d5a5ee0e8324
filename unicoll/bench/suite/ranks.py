"""One job of the suite, in its ranks: measures the timings of the job, each size in one alternation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

import unicoll as dist
from unicoll.arrays.types import BY_NAME
from unicoll.bench.contenders import open_contenders
from unicoll.bench.contract import BenchCase, Contender
from unicoll.bench.measure import Pace, Series, attempt, measure
from unicoll.bench.operations import OPERATIONS
from unicoll.bench.report import machine, write
from unicoll.bench.session import in_job
from unicoll.bench.suite.rows import Timing

__all__ = ["run"]

_TIMEOUT_S = 120.0
_TURNS = 8
_BYTES = 32 << 20
"""Bytes of the calls of a turn, with an overhead per call that counts as so many bytes:"""
_CALL_BYTES = 256 << 10


def run(timings: Sequence[Timing], factor: float, path: str) -> int:
    """Measure timings of one job as one of its ranks; rank 0 writes them as JSON. Returns the exit status.

    Args:
        timings: what to measure, equal on all ranks.
        factor: factor of the number of calls; each timing has one call per turn at least.
        path: the file, in which times are in microseconds.
    """
    return in_job(lambda: _measure(timings, factor, path), _TIMEOUT_S)


def _measure(timings: Sequence[Timing], factor: float, path: str) -> int:
    names = list(dict.fromkeys(timing.contender for timing in timings))
    contenders, skipped = open_contenders(names, _TIMEOUT_S, _show_nothing)
    opened = {contender.name: contender for contender in contenders}
    us: dict[str, float] = {}
    for size in sorted({timing.size for timing in timings}):
        series: dict[Timing, Series] = {}
        for timing in timings:
            if timing.size == size and timing.contender in opened:
                found, problem = _series(opened[timing.contender], timing)
                if found is not None:
                    series[timing] = found
                else:
                    skipped[str(timing)] = problem or ""
        if not series:
            continue
        calls = max(1, int(factor * _BYTES / (size + _CALL_BYTES)))
        pace = Pace(turns=_TURNS, iters=_TURNS * calls, warmup=3)
        measure(list(series.values()), size, pace, 1, _show_nothing)
        us |= {str(timing): _best_turn_us(each) for timing, each in series.items()}
        del series
    data: dict[str, Any] = {"us": us, "skipped": skipped, "machine": machine()}
    for contender in reversed(contenders):
        contender.close()
    if dist.get_rank() == 0:
        write(data, path)
    return 0


def _series(contender: Contender, timing: Timing) -> tuple[Series | None, str | None]:
    op, dtype, ranks = OPERATIONS[timing.op], BY_NAME["float32"], dist.get_world_size()
    counts = op.divide(timing.size // dtype.itemsize, ranks)
    case = BenchCase(op, op.placements[0], dtype, "sum", 0, counts, dist.get_rank(), ranks)
    series, problem = attempt(contender, case, None, 0)
    if series is not None and timing.asynchronous:
        start, wait = contender.start(case, series.send, series.recv)
        series.call = lambda: wait(start())
    return series, problem


def _best_turn_us(series: Series) -> float:
    """The lowest median of a turn, averaged over the ranks: other load hits some turns, a slower call all of them."""
    medians = np.median(np.array(series.samples).reshape(_TURNS, -1), axis=1)
    if series.case.op.name == "latency":  # the sample is a round trip
        medians /= 2
    dist.all_reduce(medians, op=dist.ReduceOp.AVG)
    return float(medians.min()) * 1e6


def _show_nothing(text: str) -> None:
    pass
