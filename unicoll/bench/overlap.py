"""An operation in the background beside computation: what of its time is hidden.

For each size and contender: the time of the operation alone, of a NumPy computation of the same length alone, of the
two one after the other, and of the computation between starting the operation and waiting for it. Two things of equal
length that do not disturb each other at all take half the time side by side: a speed-up of 2. What computes is one
thread, on arrays that stay in the cache, so that it wants a core and not the memory.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

import unicoll as dist

from .measure import Lane, agree, attempt, over_ranks
from .operations import IN, OUT

if TYPE_CHECKING:
    from .session import Session

__all__ = ["Computation", "sweep"]

_ELEMENTS = 1 << 15
_COLUMNS = ("comm", "compute", "serial", "overlapped")
_PLACES = {"both": (OUT, IN), "out": (OUT,), "in": (IN,)}


class Computation:
    """NumPy computation that can be made to take about a given time."""

    def __init__(self) -> None:
        self._source = np.linspace(0.1, 1.0, _ELEMENTS, dtype=np.float32)
        self._target = np.empty_like(self._source)
        self._rounds = 1

    def __call__(self) -> None:
        for _ in range(self._rounds):
            np.sqrt(self._source, out=self._target)
            np.multiply(self._target, self._source, out=self._target)

    def last(self, seconds: float) -> None:
        """Choose the number of rounds such that a call takes so long; all ranks together, and all choose the same.

        They calibrate at the same time, because they also compute at the same time when they are measured.
        """
        self._rounds = 100
        for calls in (3, 3, 5):  # each closer to the length that is wanted, and so less disturbed
            took = np.array([np.median([_timed(self) for _ in range(calls)])])
            dist.all_reduce(took, op=dist.ReduceOp.AVG)
            self._rounds = max(1, round(self._rounds * seconds / float(took[0])))


def _seconds(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


@dataclass
class _Pair:
    """A lane, its form in the background, and the computation that runs beside it."""

    lane: Lane
    begin: Callable[[], Any]
    wait: Callable[[Any], Any]
    compute: Computation

    def alone(self) -> None:
        self.lane.call()
        self.lane.family.finish()

    def serial(self) -> None:
        self.alone()
        self.compute()

    def overlapped(self) -> None:
        under_way = self.begin()
        self.compute()
        self.wait(under_way)
        self.lane.family.finish()

    def ways(self) -> tuple[Callable[[], Any], ...]:
        """What is timed, in the order of the columns."""
        return (self.alone, self.compute, self.serial, self.overlapped)


def sweep(session: Session) -> bool:
    """Measure and print a line per size and contender; whether any was."""
    session.say(
        "#\n# times in us; speedup: serial / overlapped; overlap: part of the operation's time that is hidden"
    )
    names = "".join(f"  {name:>10}" for name in (*_COLUMNS, "speedup", "overlap"))
    session.say(f"# {'size':>10}  {'type':>8}  {'redop':>6}{names}  {'#wrong':>6}   contender")
    measured = False
    for size, dtype, type_name, redop, root in session.cases():
        session.progress.what = f"{session.options.op.name} {type_name} {size} bytes"
        pairs = []
        for one in session.contenders:
            half = next(h for h in one.halves(session.options.op) if h in _PLACES[session.options.halves])
            case = session.case(size, dtype, redop, root, half)
            if case is not None:
                session.progress.tell(one.name)
                lane, problem = attempt(one, case, session.options.array, session.options.unalign)
                pair, problem = (None, problem) if lane is None else _pair(lane)
                if pair is not None:
                    pairs.append(pair)
                else:
                    session.say_once(f"{one.name}, in the background, {dtype.name}, {redop}: {problem}")
        if pairs:
            for pair, row in zip(pairs, _measure(session, pairs), strict=True):
                _print(session, pair, type_name, row)
            measured = True
    return measured


def _pair(lane: Lane) -> tuple[_Pair | None, str | None]:
    """The lane's form in the background, tried once; the same answer on all ranks."""
    problem = None
    try:
        begin, wait = lane.contender.begin(lane.case, lane.send, lane.recv)
        wait(begin())
    except lane.contender.refusals as e:
        problem = f"{type(e).__name__}: {e}"
    common = agree(problem)
    return (None, common) if common is not None else (_Pair(lane, begin, wait, Computation()), None)


def _measure(session: Session, pairs: list[_Pair]) -> list[list[float]]:
    """Microseconds of each pair's columns over the ranks: medians, measured in turns."""
    pace = session.options.pace
    times = np.zeros(len(pairs))
    for i, pair in enumerate(pairs):
        dist.barrier()
        times[i] = np.median([_timed(pair.alone) for _ in range(max(5, pace.warmup))])
    dist.all_reduce(times, op=dist.ReduceOp.AVG)
    samples: list[list[list[float]]] = [[[] for _ in _COLUMNS] for _ in pairs]
    for pair, seconds in zip(pairs, times, strict=True):
        pair.compute.last(float(seconds))
    calls = pace.iters or int(min(max(pace.budget * 2 / max(float(times.max()), 1e-6) / 6, pace.turns), 200))
    for turn in range(calls):
        for i, pair in enumerate(pairs):
            session.progress.tell(f"{pair.lane.contender.name}, {turn + 1} of {calls}")
            for k, way in enumerate(pair.ways()):
                samples[i][k].append(_timed(way))
    mine = np.median(np.array(samples), axis=2) * 1e6
    everyones = np.empty((session.size, *mine.shape))
    dist.all_gather_into_tensor(everyones, mine)
    average = session.options.average
    return [
        [over_ranks(everyones[:, i, k], average) for k in range(len(_COLUMNS))] for i in range(len(pairs))
    ]


def _timed(way: Callable[[], Any]) -> float:
    dist.barrier()
    return _seconds(way)


def _check(session: Session, pair: _Pair) -> int | None:
    """Wrong elements of a checked operation in the background, of all ranks."""
    if not session.options.checks:
        return None
    found = np.zeros(2, np.int64)
    for iteration in range(1, session.options.checks + 1):
        pair.lane.load(iteration)
        dist.barrier()
        pair.overlapped()
        wrong = pair.lane.wrong(iteration)
        found += (wrong, wrong > 0)
        dist.barrier()
    dist.all_reduce(found)
    session.failed += int(found[1])
    return int(found[0])


def _print(session: Session, pair: _Pair, type_name: str, row: list[float]) -> None:
    comm, compute, serial, overlapped = row
    case, name = pair.lane.case, pair.lane.contender.name
    wrong = _check(session, pair)
    size = max(case.counts.send, case.counts.recv) * case.dtype.itemsize
    speedup = serial / overlapped
    hidden = max(0.0, min(1.0, (comm + compute - overlapped) / min(comm, compute)))
    redop = case.redop if case.op.reduces else "none"
    times = "".join(f"  {us:10.1f}" for us in row)
    verdict = "N/A" if wrong is None else str(wrong)
    session.say(
        f"{size:12d}  {type_name:>8}  {redop:>6}{times}  {speedup:10.2f}  {hidden:10.0%}  {verdict:>6}   {name}"
    )
    entry: dict[str, Any] = {"size": size, "type": type_name, "redop": redop, "contender": name}
    entry |= {f"{column}_us": round(us, 3) for column, us in zip(_COLUMNS, row, strict=True)}
    session.report.add_overlap(
        entry | {"speedup": round(speedup, 4), "overlap": round(hidden, 4), "nwrong": wrong}
    )
