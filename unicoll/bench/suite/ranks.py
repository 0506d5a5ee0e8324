"""One job of the suite, in its ranks: measures the timings of the job, each size in one alternation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

import unicoll as dist
from unicoll.arrays.types import BY_NAME
from unicoll.backend import flight_recorder
from unicoll.bench.contenders import open_contenders
from unicoll.bench.contract import BenchCase, Contender
from unicoll.bench.measure import Pace, Series, attempt, measure
from unicoll.bench.operations import OPERATIONS
from unicoll.bench.report import machine, write
from unicoll.bench.session import in_job
from unicoll.bench.suite.rows import Timing

_TIMEOUT_S = 120.0
_TURNS = 8
_BYTES = 32 << 20
"""Bytes of the calls of a turn, with an overhead per call that counts as this many bytes:"""
_CALL_BYTES = 256 << 10


def run(timings: Sequence[Timing], factor: float, path: str) -> int:
    """Measure timings of one job as one of its ranks; rank 0 writes them as JSON. Returns the exit status.

    ``factor`` is that of the number of calls; each timing has one call per turn at least.
    """
    return in_job(lambda: _measure(timings, factor, path), _TIMEOUT_S)


def _measure(timings: Sequence[Timing], factor: float, path: str) -> int:
    contenders: list[Contender] = []
    opened: dict[tuple[str, bool], Contender] = {}
    skipped: dict[str, str] = {}
    for recorded in (True, False):
        names = list(dict.fromkeys(t.contender for t in timings if t.recorded == recorded))
        if names:
            made, missing = _open(names, recorded)
            contenders += made
            opened |= {(contender.name, recorded): contender for contender in made}
            skipped |= missing
    us: dict[str, float] = {}
    for size in sorted({timing.size for timing in timings}):
        series: dict[Timing, Series] = {}
        for timing in timings:
            contender = opened.get((timing.contender, timing.recorded))
            if timing.size == size and contender is not None:
                found, problem = _series(contender, timing)
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


def _open(names: Sequence[str], recorded: bool) -> tuple[list[Contender], dict[str, str]]:
    """Open contenders; groups that are made while the flight recorder keeps nothing do not record their calls."""
    if recorded:
        return open_contenders(names, _TIMEOUT_S, _show_nothing)
    flight_recorder.replace_ring(0)
    try:
        return open_contenders(names, _TIMEOUT_S, _show_nothing)
    finally:
        flight_recorder.replace_ring(None)


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
