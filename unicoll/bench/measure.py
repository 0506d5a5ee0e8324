"""Measuring one line of the table: several contenders, turn by turn, and what their results are worth.

A *lane* is one contender on one half of the line, with its arrays and its call. In each turn every lane gets a batch
of calls, and the order of the lanes moves on by one from turn to turn: what disturbs the machine meanwhile disturbs all
of them. All ranks leave a barrier (unicoll's, the same for all lanes) before each batch, and for large arrays before
each call.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

import unicoll as dist

from .arrays import Family
from .contract import Case, Contender
from .operations import IN, Place, Segment
from .values import Values

__all__ = [
    "STATISTICS",
    "Lane",
    "Pace",
    "Stats",
    "agree",
    "attempt",
    "check",
    "measure",
    "over_ranks",
    "timed",
]

Call = Callable[[], Any]
Tell = Callable[[str], None]

STATISTICS = ("p50", "avg", "min", "p99", "max")
"""What is kept of the samples of a rank, in microseconds."""
SYNC_FROM = 1 << 19
"""Bytes from which all ranks meet before each call, not only before each batch."""
_MOST = 100_000
"""Samples of a lane in a turn: what memory is spent on them stays small."""
_DEVICE_BATCH = 20
"""Calls on a CUDA device between two waits for it, nccl-tests' default number of iterations."""


@dataclass(frozen=True)
class Pace:
    """How much is measured.

    Attributes:
        turns: how often every lane gets a batch.
        iters: calls of a lane in all turns together; None to go by the budget.
        budget: seconds for the calls of one lane and line.
        warmup: calls before anything is timed.
        aggregate: calls between two looks at the clock.
        sync: whether all ranks meet before each call whatever its size.
        host_time: on a CUDA device, time the call alone, without waiting for the device.
        events: on a CUDA device, time between events before and after the calls, not by the host's clock.
    """

    turns: int = 10
    iters: int | None = None
    budget: float = 1.0
    warmup: int = 1
    aggregate: int = 1
    sync: bool = False
    host_time: bool = False
    events: bool = False


@dataclass
class Stats:
    """What a lane's samples say, in microseconds: per rank, and over the ranks as the user asked.

    Attributes:
        over_ranks: :data:`STATISTICS` as one number each.
        by_rank: the same for each rank; NaN where a rank takes no part.
        calls: timed calls of one rank.
    """

    over_ranks: dict[str, float]
    by_rank: dict[str, list[float]]
    calls: int


@dataclass
class Lane:
    """One contender on one half of a line.

    Attributes:
        contender: who.
        case: what.
        family: whose arrays.
        send, recv: the arrays; in place the same, or one a part of the other.
        call: does it once.
        values: source data and results.
        samples: seconds per call, of this rank.
    """

    contender: Contender
    case: Case
    family: Family
    values: Values
    send: Any
    recv: Any
    call: Call
    samples: list[float] = field(default_factory=list)
    aggregate: int = 1
    per_turn: int = 1

    @classmethod
    def make(cls, contender: Contender, case: Case, wanted: str | None, unalign: int) -> Lane:
        """Allocate the arrays of a case and prepare its call.

        Raises:
            Unsupported, or another of the contender's refusals: it cannot do this.
        """
        family = contender.family(wanted, case.dtype)
        send, recv = _arrays(family, case, unalign)
        values = Values(case.dtype, case.redop if case.op.reduces else None, case.size)
        lane = cls(contender, case, family, values, send, recv, contender.call(case, send, recv))
        lane.rest()
        return lane

    @property
    def place(self) -> Place:
        """Who we are in the call."""
        return Place(self.case.rank, self.case.size, self.case.root)

    def rest(self) -> None:
        """Fill the arrays with what repeated calls leave as it is."""
        for array, count in ((self.send, self.case.counts.send), (self.recv, self.case.counts.recv)):
            self.family.put(array, self.values.still(count))

    def load(self, iteration: int) -> None:
        """Source data into the send array, poison into the receive array."""
        case = self.case
        self.family.put(self.recv, self.values.poison(case.counts.recv))
        given = case.op.given(self.place, case.counts.shown)
        if given:
            self.family.put(self.send, self.values.made(given, iteration))
        elif self.send is not self.recv:
            self.family.put(self.send, self.values.poison(case.counts.send))
        self.family.finish()

    def wrong(self, iteration: int) -> int:
        """Elements of the receive array that are not what they must be."""
        due: list[Segment] = self.case.op.due(self.place, self.case.counts.shown)
        if not due:
            return 0
        self.family.finish()
        return self.values.wrong(self.family.get(self.recv).view(self.case.dtype.storage), due, iteration)


def _arrays(family: Family, case: Case, unalign: int) -> tuple[Any, Any]:
    counts = case.counts

    def array(count: int) -> Any:
        whole = family.empty(count + unalign, case.dtype)
        return whole[unalign:] if unalign else whole

    if case.half != IN:
        return array(counts.send), array(counts.recv)
    larger = array(max(counts.send, counts.recv))
    if counts.send == counts.recv:
        return larger, larger
    share = min(counts.send, counts.recv)
    mine = larger[case.rank * share : (case.rank + 1) * share]
    return (mine, larger) if counts.send < counts.recv else (larger, mine)


# --- time -----------------------------------------------------------------------------------------------------------


def timed(call: Call, times: int, aggregate: int, sync: Call | None, finish: Call | None) -> list[float]:
    """Seconds per call, ``times`` samples of ``aggregate`` calls each.

    Args:
        call: what is timed.
        times, aggregate: how many samples, of how many calls.
        sync: done before each sample, outside its time.
        finish: done at the end of each sample, within its time.
    """
    clock = time.perf_counter
    samples = []
    for _ in range(times):
        if sync is not None:
            sync()
        start = clock()
        if aggregate == 1:
            call()
        else:
            for _ in range(aggregate):
                call()
        if finish is not None:
            finish()
        samples.append((clock() - start) / aggregate)
    return samples


def timed_on_device(
    call: Call, times: int, aggregate: int, sync: Call | None, family: Family
) -> list[float]:
    """As :func:`timed`, between events on the current stream."""
    samples = []
    for _ in range(times):
        if sync is not None:
            sync()
        first = family.mark()
        for _ in range(aggregate):
            call()
        last = family.mark()
        family.finish()
        samples.append(family.between(first, last) / aggregate)
    return samples


@contextmanager
def _no_collection() -> Iterator[None]:
    """Without the garbage collector, as timeit does it."""
    enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def measure(lanes: Sequence[Lane], size: int, pace: Pace, average: int, tell: Tell) -> list[Stats]:
    """Time all lanes of a line, turn by turn; called on all ranks.

    Args:
        lanes: who is measured, in the same order on all ranks.
        size: bytes of the line.
        pace: how much.
        average: over the ranks: 0 rank 0's, 1 the mean, 2 the least, 3 the most.
        tell: is told what is going on.
    """
    meet = dist.barrier
    sync = meet if pace.sync or size >= SYNC_FROM else None
    with _no_collection():
        _plan(lanes, pace, sync, tell)
        for turn in range(pace.turns):
            for i in range(len(lanes)):
                lane = lanes[(i + turn) % len(lanes)]
                tell(f"{lane.contender.name}, turn {turn + 1} of {pace.turns}")
                times = _batch(lane, turn, pace)
                meet()
                if pace.events and lane.family.device != "cpu":
                    lane.samples += timed_on_device(lane.call, times, lane.aggregate, sync, lane.family)
                    continue
                lane.samples += timed(lane.call, times, lane.aggregate, sync, _finish(lane, pace))
                if pace.host_time:
                    lane.family.finish()
    return _statistics(lanes, average)


def _finish(lane: Lane, pace: Pace) -> Call | None:
    return None if lane.family.device == "cpu" or pace.host_time else lane.family.finish


def _batch(lane: Lane, turn: int, pace: Pace) -> int:
    """Samples of a lane in a turn; with a given number of calls they are shared out to the last one."""
    if pace.iters is None:
        return lane.per_turn
    total = math.ceil(pace.iters / lane.aggregate)
    return total // pace.turns + (turn < total % pace.turns)


def _plan(lanes: Sequence[Lane], pace: Pace, sync: Call | None, tell: Tell) -> None:
    """Warm every lane up and decide, on all ranks alike, how many calls fit its share of the budget."""
    seconds = np.zeros(len(lanes))
    for i, lane in enumerate(lanes):
        tell(f"{lane.contender.name}, warm-up")
        dist.barrier()
        timed(lane.call, pace.warmup, 1, sync, _finish(lane, pace))
        dist.barrier()
        seconds[i] = float(np.median(timed(lane.call, 3, 1, sync, _finish(lane, pace))))
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    for lane, one in zip(lanes, seconds, strict=True):
        lane.aggregate = pace.aggregate
        if lane.family.device != "cpu" and pace.aggregate == 1 and sync is None:
            lane.aggregate = _DEVICE_BATCH
        fitting = pace.budget / pace.turns / max(float(one) * lane.aggregate, 1e-7)
        lane.per_turn = int(min(max(fitting, 2), _MOST))


def _statistics(lanes: Sequence[Lane], average: int) -> list[Stats]:
    """Every rank's samples condensed, exchanged, and condensed over the ranks."""
    mine = np.full((len(lanes), len(STATISTICS)), np.nan)
    for row, lane in zip(mine, lanes, strict=True):
        if lane.samples and (lane.case.op.name != "latency" or lane.case.rank < 2):
            us = np.array(lane.samples) * 1e6
            row[:] = np.median(us), us.mean(), us.min(), np.percentile(us, 99), us.max()
    everyone = np.empty((dist.get_world_size(), *mine.shape))
    dist.all_gather_into_tensor(everyone, mine)
    stats = []
    for i, lane in enumerate(lanes):
        by_rank = dict(zip(STATISTICS, everyone[:, i].T.tolist(), strict=True))
        over = {name: over_ranks(everyone[:, i, k], average) for k, name in enumerate(STATISTICS)}
        if lane.case.op.name == "latency":  # there and back
            by_rank = {name: [us / 2 for us in all_us] for name, all_us in by_rank.items()}
            over = {name: us / 2 for name, us in over.items()}
        stats.append(Stats(over, by_rank, len(lane.samples) * lane.aggregate))
    return stats


def over_ranks(values: npt.NDArray[np.float64], average: int) -> float:
    """One number for all ranks, as nccl-tests' ``-a`` says: 0 rank 0's, 1 mean, 2 minimum, 3 maximum."""
    there = values[~np.isnan(values)]
    if average == 0 or not there.size:
        return float(values[0])
    return float((there.mean, there.min, there.max)[average - 1]())


# --- results --------------------------------------------------------------------------------------------------------


def check(lane: Lane, iterations: int) -> tuple[int, int]:
    """Do checked calls on all ranks.

    Returns:
        Wrong elements of all ranks and iterations, and how many (rank, iteration) had any.
    """
    found = np.zeros(2, np.int64)
    for iteration in range(1, iterations + 1):
        lane.load(iteration)
        dist.barrier()
        lane.call()
        wrong = lane.wrong(iteration)
        found += (wrong, wrong > 0)
        dist.barrier()
    dist.all_reduce(found)
    return int(found[0]), int(found[1])


def agree(problem: str | None) -> str | None:
    """The first rank's problem that has one, on all ranks; None when none has."""
    everyones: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyones, problem)
    return next((p for p in everyones if p is not None), None)


def attempt(
    contender: Contender, case: Case, wanted: str | None, unalign: int
) -> tuple[Lane | None, str | None]:
    """A lane that has done its call once, or the reason why there is none; the same answer on all ranks."""
    lane, problem = None, None
    try:
        lane = Lane.make(contender, case, wanted, unalign)
    except contender.refusals as e:
        problem = _words(e)
    if (common := agree(problem)) is not None or lane is None:
        return None, common
    try:
        lane.call()
        lane.family.finish()
    except contender.refusals as e:
        problem = _words(e)
    common = agree(problem)
    return (None, common) if common is not None else (lane, None)


def _words(error: Exception) -> str:
    first = str(error).strip().split("\n")[0]
    return first if type(error).__name__ == "Unsupported" else f"{type(error).__name__}: {first}"
