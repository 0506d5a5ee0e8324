"""Measures one size: times several contenders in alternation, computes statistics and checks
results.

A *series* is one contender in one placement (in place or out of place), with its arrays and its
call. In each turn every series runs one batch of calls, and the order of the series rotates by one
per turn, so that other load on the machine affects all of them equally. All ranks pass a barrier
(unicoll's, the same for all series) before each batch, and for large arrays before each call.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

import unicoll as dist
from unicoll.bench.arrays import BenchArrays
from unicoll.bench.contract import BenchCase, Call, Contender, agreed
from unicoll.bench.operations import IN, SourceRange
from unicoll.bench.values import Values

if TYPE_CHECKING:
    from unicoll.bench.args import BenchOptions

Stats = dict[str, Any]
"""Statistics of a series, as in the JSON: ``us``, combined over the ranks by ``-a``, ``us_by_rank``
with NaN for a rank that does not take part, and ``iterations``, the timed calls of one rank."""
STATISTICS = ("p50", "avg", "min", "p99", "max")
"""Statistics of the samples of a rank, in microseconds."""
SYNC_FROM = 1 << 19
"""Size in bytes from which a barrier precedes each call, not only each batch."""
_MAX_SAMPLES = 100_000
"""Limit on the samples of a series per turn, which bounds their memory."""
_DEVICE_BATCH = 20
"""Calls on a CUDA device between two synchronizations: nccl-tests' default number of iterations."""


@dataclass
class Series:
    """One contender, one case, and its timed samples.

    Attributes:
        send, recv: the arrays; in place the same array, or one is a part of the other.
        samples: seconds per call on this rank.
        aggregate: calls per sample.
        per_turn: samples per turn.
        calls: calls of this rank so far, timed or not.
    """

    contender: Contender
    case: BenchCase
    family: BenchArrays
    values: Values
    send: Any
    recv: Any
    call: Call
    samples: list[float] = field(default_factory=list)
    aggregate: int = 1
    per_turn: int = 1
    calls: int = 0

    @classmethod
    def make(cls, contender: Contender, case: BenchCase, options: BenchOptions) -> Series:
        """Allocate the arrays of a case and prepare its call.

        Raises:
            Unsupported, or another of the contender's refusals: it does not support the case.
        """
        family = contender.family(options.array, case.dtype)
        send, recv = _arrays(family, case, options.unalign)
        redop = case.redop if case.op.reduces else None
        values = Values(case.dtype, redop, case.size, contender.compression)
        series = cls(contender, case, family, values, send, recv, contender.call(case, send, recv))
        for array, count in ((send, case.counts.send), (recv, case.counts.recv)):
            family.put(array, values.idle(count))
        return series

    def fill_inputs(self, iteration: int) -> None:
        """Fill the send array with source data and the receive array with poison."""
        case = self.case
        self.family.put(self.recv, self.values.poison(case.counts.recv))
        source = case.op.source(case.call_rank, case.counts.shown)
        if source:
            self.family.put(self.send, self.values.elements(source, iteration))
        elif self.send is not self.recv:
            self.family.put(self.send, self.values.poison(case.counts.send))
        self.family.finish()

    def run_once(self) -> None:
        """Make one untimed call; on a device it is complete when this returns."""
        self.calls += 1
        self.call()
        self.family.finish()

    def timed(
        self, times: int, aggregate: int, sync: Call | None, options: BenchOptions
    ) -> list[float]:
        """Seconds per call, ``times`` samples of ``aggregate`` calls each; ``sync`` is called
        before each, not timed.

        On a device the time includes the wait for it, or is that between events on it, or excludes
        that wait.
        """
        self.calls += times * aggregate
        family = self.family
        if family.device == "cpu" or not options.events:
            on_host = family.device == "cpu" or options.host_time
            return timed(self.call, times, aggregate, sync, None if on_host else family.finish)
        samples = []
        for _ in range(times):
            if sync is not None:
                sync()
            first = family.mark()
            for _ in range(aggregate):
                self.call()
            last = family.mark()
            family.finish()
            samples.append(family.between(first, last) / aggregate)
        return samples

    def wrong(self, iteration: int) -> int:
        """Number of wrong elements in the receive array."""
        expected: list[SourceRange] = self.case.op.expected(
            self.case.call_rank, self.case.counts.shown
        )
        if not expected:
            return 0
        self.family.finish()
        return self.values.wrong(self.family.get(self.recv), expected, iteration)


def _arrays(family: BenchArrays, case: BenchCase, unalign: int) -> tuple[Any, Any]:
    counts = case.counts

    def array(count: int) -> Any:
        whole = family.empty(count + unalign, case.dtype)
        return whole[unalign:] if unalign else whole

    if case.placement != IN:
        return array(counts.send), array(counts.recv)
    larger = array(max(counts.send, counts.recv))
    if counts.send == counts.recv:
        return larger, larger
    part = min(counts.send, counts.recv)
    own_part = larger[case.rank * part : (case.rank + 1) * part]
    return (own_part, larger) if counts.send < counts.recv else (larger, own_part)


# --- time -----------------------------------------------------------------------------------------


def timed(
    call: Call, times: int, aggregate: int, sync: Call | None, finish: Call | None
) -> list[float]:
    """Seconds per call, ``times`` samples of ``aggregate`` calls each; ``finish`` is timed,
    ``sync`` is not."""
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


@contextmanager
def _no_collection() -> Iterator[None]:
    """Disable the garbage collector, as timeit does."""
    enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def measure(series_list: Sequence[Series], size: int, options: BenchOptions) -> list[Stats]:
    """Time all series of one size in bytes, in alternation; called on all ranks with the same order
    of series."""
    sync = dist.barrier if options.blocking or size >= SYNC_FROM else None
    with _no_collection():
        _plan(series_list, options, sync)
        for turn in range(options.turns):
            for i in range(len(series_list)):
                series = series_list[(i + turn) % len(series_list)]
                times = _batch(series, turn, options)
                dist.barrier()
                series.samples += series.timed(times, series.aggregate, sync, options)
                if options.host_time:
                    series.family.finish()
    return _statistics(series_list, options.average)


def _batch(series: Series, turn: int, options: BenchOptions) -> int:
    """Number of samples of a series in a turn; a fixed number of calls is divided among the
    turns."""
    if options.iters is None:
        return series.per_turn
    total = math.ceil(options.iters / series.aggregate)
    return total // options.turns + (turn < total % options.turns)


def _plan(series_list: Sequence[Series], options: BenchOptions, sync: Call | None) -> None:
    """Warm up every series and compute how many calls fit its budget; the result is equal on all
    ranks."""
    seconds = np.zeros(len(series_list))
    by_host = replace(options, events=False)
    for i, series in enumerate(series_list):
        dist.barrier()
        series.timed(options.warmup, 1, sync, by_host)
        dist.barrier()
        seconds[i] = float(np.median(series.timed(3, 1, sync, by_host)))
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    for series, call_time in zip(series_list, seconds, strict=True):
        series.aggregate = options.aggregate
        if series.family.device != "cpu" and options.aggregate == 1 and sync is None:
            series.aggregate = _DEVICE_BATCH
        fitting = options.budget / options.turns / max(float(call_time) * series.aggregate, 1e-7)
        series.per_turn = int(min(max(fitting, 2), _MAX_SAMPLES))


def _statistics(series_list: Sequence[Series], average: int) -> list[Stats]:
    """Statistics of each rank's samples, gathered and combined over the ranks."""
    mine = np.full((len(series_list), len(STATISTICS)), np.nan)
    for row, series in zip(mine, series_list, strict=True):
        if series.samples and series.case.op.takes_part(series.case.rank):
            # A sample of latency is a round trip; the table shows half of it.
            us = np.array(series.samples) * (0.5e6 if series.case.op.name == "latency" else 1e6)
            row[:] = np.median(us), us.mean(), us.min(), np.percentile(us, 99), us.max()
    gathered = np.empty((dist.get_world_size(), *mine.shape))
    dist.all_gather_into_tensor(gathered, mine)
    stats = []
    for i, series in enumerate(series_list):
        by_rank = dict(zip(STATISTICS, gathered[:, i].T.tolist(), strict=True))
        combined = {
            name: over_ranks(gathered[:, i, k], average) for k, name in enumerate(STATISTICS)
        }
        calls = len(series.samples) * series.aggregate
        stats.append({"iterations": calls, "us": combined, "us_by_rank": by_rank})
    return stats


def over_ranks(values: npt.NDArray[np.float64], average: int) -> float:
    """One value for all ranks, by nccl-tests' ``-a``: 0 rank 0's, 1 mean, 2 minimum, 3 maximum."""
    present = values[~np.isnan(values)]
    if average == 0 or not present.size:
        return float(values[0])
    return float((present.mean, present.min, present.max)[average - 1]())


# --- results --------------------------------------------------------------------------------------


def check(series: Series, iterations: int) -> tuple[int, int]:
    """Run calls with checked results on all ranks.

    Returns:
        Number of wrong elements over all ranks and iterations, and number of (rank, iteration)
        pairs that had any.
    """
    found = np.zeros(2, np.int64)
    for iteration in range(1, iterations + 1):
        series.fill_inputs(iteration)
        dist.barrier()
        series.run_once()
        wrong = series.wrong(iteration)
        found += (wrong, wrong > 0)
        dist.barrier()
    dist.all_reduce(found)
    return int(found[0]), int(found[1])


def attempt(
    contender: Contender, case: BenchCase, options: BenchOptions
) -> tuple[Series | None, str | None]:
    """Make a series and run its call once; returns the series or the reason for failure, consistent
    on all ranks."""
    refusals: tuple[type[Exception], ...] = (MemoryError, *contender.refusals)
    series, problem = agreed(lambda: Series.make(contender, case, options), refusals)
    if series is not None:
        _, problem = agreed(series.run_once, refusals)
    return (series, None) if problem is None else (None, problem)
