"""Measures how much of an asynchronous operation's time is hidden behind computation.

For each size and contender: the time of the operation alone, of a NumPy computation of the same
duration alone, of both in sequence, and of the computation between the start of the operation and
the wait for it. Two tasks of equal duration that overlap completely give a speed-up of 2. The
computation is one thread on arrays that stay in the cache, so that it uses a core but no memory
bandwidth.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

import unicoll as dist
from unicoll.bench.contenders import label
from unicoll.bench.contract import Call, agreed
from unicoll.bench.measure import Series, check, measure, timed

if TYPE_CHECKING:
    from unicoll.bench.session import Session

_ELEMENTS = 1 << 15
_COLUMNS = ("comm", "compute", "serial", "overlapped")


class Computation:
    """A NumPy computation with an adjustable duration."""

    def __init__(self) -> None:
        self._source = np.linspace(0.1, 1.0, _ELEMENTS, dtype=np.float32)
        self._target = np.empty_like(self._source)
        self._rounds = 100

    def __call__(self) -> None:
        for _ in range(self._rounds):
            np.sqrt(self._source, out=self._target)
            np.multiply(self._target, self._source, out=self._target)

    def calibrate(self, call: Call) -> None:
        """Set the number of rounds so that it takes as long as ``call``; the result is the same on
        all ranks.

        All ranks calibrate at the same time, because they also compute at the same time in the
        measurement.
        """
        seconds = _average(call, 5)
        # Each repetition is closer to the target duration.
        for times in (3, 3, 5):
            self._rounds = max(1, round(self._rounds * seconds / _average(self, times)))


def _average(call: Call, times: int) -> float:
    """The median of a call's seconds, averaged over the ranks."""
    median = np.array([np.median(timed(call, times, 1, dist.barrier, None))])
    dist.all_reduce(median, op=dist.ReduceOp.AVG)
    return float(median[0])


def _variants(series: Series, compute: Computation) -> list[Series]:
    """What is timed for a contender, in the order of the columns; the asynchronous form is run
    once."""
    start, wait = series.contender.start(series.case, series.send, series.recv)

    def serial() -> None:
        series.run_once()
        compute()

    def overlapped() -> None:
        work = start()
        compute()
        wait(work)
        series.family.finish()

    wait(start())
    calls: tuple[Call, ...] = (series.run_once, compute, serial, overlapped)
    return [replace(series, call=call, samples=[]) for call in calls]


def sweep(session: Session) -> bool:
    """Measure and print a line per size and contender; True if anything was measured."""
    session.print_line(
        "#\n# times in us; speedup: serial / overlapped; overlap: part of the operation's time that"
        " is hidden"
    )
    names = "".join(f"  {name:>10}" for name in (*_COLUMNS, "speedup", "overlap"))
    session.print_line(
        f"# {'size':>10}  {'type':>8}  {'redop':>6}{names}  {'#wrong':>6}   contender"
    )
    options = replace(
        session.options,
        turns=min(5, session.options.turns),
        budget=session.options.budget / len(_COLUMNS),
        aggregate=1,
        blocking=True,
        host_time=False,
        events=False,
    )
    measured = False
    for size, dtype, type_name, redop, root in session.cases():
        every: list[Series] = []
        for series in session.series(size, dtype, redop, root, places=1):
            compute = Computation()
            variants, problem = agreed(
                partial(_variants, series, compute), series.contender.refusals
            )
            if variants is not None:
                compute.calibrate(series.run_once)
                every += variants
            else:
                name = label(series.contender.name)
                session.print_once(f"{name}, asynchronous, {dtype.name}, {redop}: {problem}")
        if not every:
            continue
        measured = True
        stats = measure(every, size, options)
        for i in range(0, len(every), len(_COLUMNS)):
            us = [each["us"]["p50"] for each in stats[i : i + len(_COLUMNS)]]
            _print(session, every[i + len(_COLUMNS) - 1], type_name, us)
    return measured


def _print(session: Session, overlapped: Series, type_name: str, us: list[float]) -> None:
    comm, compute, serial, both = us
    case, name = overlapped.case, overlapped.contender.name
    wrong = None
    if session.options.checks:
        wrong, failed = check(overlapped, session.options.checks)
        session.failed += failed
    size = max(case.counts.send, case.counts.recv) * case.dtype.itemsize
    speedup = serial / both
    hidden = max(0.0, min(1.0, (comm + compute - both) / min(comm, compute)))
    redop = case.redop if case.op.reduces else "none"
    times = "".join(f"  {each:10.1f}" for each in us)
    errors = "N/A" if wrong is None else str(wrong)
    text = (
        f"{size:12d}  {type_name:>8}  {redop:>6}{times}  {speedup:10.2f}  {hidden:10.0%} "
        f" {errors:>6}"
    )
    session.print_line(f"{text}   {label(name)}")
    entry: dict[str, Any] = {"size": size, "type": type_name, "redop": redop, "contender": name}
    entry |= {f"{column}_us": each for column, each in zip(_COLUMNS, us, strict=True)}
    session.data["results"].append(entry | {"speedup": speedup, "overlap": hidden, "nwrong": wrong})
