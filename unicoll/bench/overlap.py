"""Measures how much of an asynchronous operation's time is hidden behind computation.

For each size and contender: the time of the operation alone, of a NumPy computation of the same duration alone, of both
in sequence, and of the computation between the start of the operation and the wait for it. Two tasks of equal duration
that overlap completely give a speed-up of 2. The computation is one thread on arrays that stay in the cache, so that it
uses a core but no memory bandwidth.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

import unicoll as dist
from unicoll.bench.measure import Series, agreed, attempt, check, over_ranks, timed

if TYPE_CHECKING:
    from unicoll.bench.session import Session

_ELEMENTS = 1 << 15
_COLUMNS = ("comm", "compute", "serial", "overlapped")


class Computation:
    """A NumPy computation with an adjustable duration."""

    def __init__(self) -> None:
        self._source = np.linspace(0.1, 1.0, _ELEMENTS, dtype=np.float32)
        self._target = np.empty_like(self._source)
        self._rounds = 1

    def __call__(self) -> None:
        for _ in range(self._rounds):
            np.sqrt(self._source, out=self._target)
            np.multiply(self._target, self._source, out=self._target)

    def calibrate(self, seconds: float) -> None:
        """Set the number of rounds so that a call takes ``seconds``; a collective with the same result on all ranks.

        All ranks calibrate at the same time, because they also compute at the same time in the measurement.
        """
        self._rounds = 100
        for calls in (3, 3, 5):  # each repetition is closer to the target duration
            duration = np.array([_median(self, calls)])
            dist.all_reduce(duration, op=dist.ReduceOp.AVG)
            self._rounds = max(1, round(self._rounds * seconds / float(duration[0])))


def _median(call: Callable[[], Any], times: int) -> float:
    return float(np.median(timed(call, times, 1, dist.barrier, None)))


@dataclass
class _OverlapPair:
    """A series, its asynchronous form, and the computation that overlaps with it."""

    series: Series
    start: Callable[[], Any]
    wait: Callable[[Any], Any]
    compute: Computation

    def alone(self) -> None:
        self.series.call()
        self.series.family.finish()

    def serial(self) -> None:
        self.alone()
        self.compute()

    def overlapped(self) -> None:
        work = self.start()
        self.compute()
        self.wait(work)
        self.series.family.finish()

    def variants(self) -> tuple[Callable[[], Any], ...]:
        """The timed functions, in the order of the columns."""
        return (self.alone, self.compute, self.serial, self.overlapped)


def sweep(session: Session) -> bool:
    """Measure and print a line per size and contender; True if anything was measured."""
    session.print_line(
        "#\n# times in us; speedup: serial / overlapped; overlap: part of the operation's time that is hidden"
    )
    names = "".join(f"  {name:>10}" for name in (*_COLUMNS, "speedup", "overlap"))
    session.print_line(f"# {'size':>10}  {'type':>8}  {'redop':>6}{names}  {'#wrong':>6}   contender")
    measured = False
    for size, dtype, type_name, redop, root in session.cases():
        session.progress.label = f"{session.options.op.name} {type_name} {size} bytes"
        pairs = []
        for contender in session.contenders:
            placements = session.placements(contender)
            case = session.case(size, dtype, redop, root, placements[0]) if placements else None
            if case is not None:
                session.progress.show(contender.name)
                series, problem = attempt(contender, case, session.options.array, session.options.unalign)
                pair, problem = (None, problem) if series is None else _pair(series)
                if pair is not None:
                    pairs.append(pair)
                else:
                    session.print_once(f"{contender.name}, asynchronous, {dtype.name}, {redop}: {problem}")
        if pairs:
            for pair, row in zip(pairs, _measure(session, pairs), strict=True):
                _print(session, pair, type_name, row)
            measured = True
    return measured


def _pair(series: Series) -> tuple[_OverlapPair | None, str | None]:
    """The asynchronous form of a series, run once; the same result on all ranks."""

    def begin() -> _OverlapPair:
        start, wait = series.contender.start(series.case, series.send, series.recv)
        wait(start())
        return _OverlapPair(series, start, wait, Computation())

    return agreed(begin, series.contender.refusals)


def _measure(session: Session, pairs: list[_OverlapPair]) -> list[list[float]]:
    """Microseconds of each pair's columns, combined over the ranks: medians, measured in alternation."""
    pace = session.options.pace
    times = np.zeros(len(pairs))
    for i, pair in enumerate(pairs):
        times[i] = _median(pair.alone, max(5, pace.warmup))
    dist.all_reduce(times, op=dist.ReduceOp.AVG)
    samples: list[list[list[float]]] = [[[] for _ in _COLUMNS] for _ in pairs]
    for pair, seconds in zip(pairs, times, strict=True):
        pair.compute.calibrate(float(seconds))
    calls = pace.iters or int(min(max(pace.budget * 2 / max(float(times.max()), 1e-6) / 6, pace.turns), 200))
    for turn in range(calls):
        for i, pair in enumerate(pairs):
            session.progress.show(f"{pair.series.contender.name}, {turn + 1} of {calls}")
            for k, call in enumerate(pair.variants()):
                samples[i][k] += timed(call, 1, 1, dist.barrier, None)
    medians = np.median(np.array(samples), axis=2) * 1e6
    gathered = np.empty((session.size, *medians.shape))
    dist.all_gather_into_tensor(gathered, medians)
    average = session.options.average
    return [[over_ranks(gathered[:, i, k], average) for k in range(len(_COLUMNS))] for i in range(len(pairs))]


def _print(session: Session, pair: _OverlapPair, type_name: str, row: list[float]) -> None:
    comm, compute, serial, overlapped = row
    case, name = pair.series.case, pair.series.contender.name
    wrong = None
    if session.options.checks:
        wrong, failed = check(pair.series, session.options.checks, pair.overlapped)
        session.failed += failed
    size = max(case.counts.send, case.counts.recv) * case.dtype.itemsize
    speedup = serial / overlapped
    hidden = max(0.0, min(1.0, (comm + compute - overlapped) / min(comm, compute)))
    redop = case.redop if case.op.reduces else "none"
    times = "".join(f"  {us:10.1f}" for us in row)
    errors = "N/A" if wrong is None else str(wrong)
    session.print_line(
        f"{size:12d}  {type_name:>8}  {redop:>6}{times}  {speedup:10.2f}  {hidden:10.0%}  {errors:>6}   {name}"
    )
    entry: dict[str, Any] = {"size": size, "type": type_name, "redop": redop, "contender": name}
    entry |= {f"{column}_us": round(us, 3) for column, us in zip(_COLUMNS, row, strict=True)}
    entry |= {"speedup": round(speedup, 4), "overlap": round(hidden, 4), "nwrong": wrong}
    session.report.results.append(entry)
