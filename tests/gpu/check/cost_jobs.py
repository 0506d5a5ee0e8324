"""Functions that ranks run in the stages on costs: one line at a time, contenders in turns, with a short queue."""

from __future__ import annotations

import cProfile
import gc
import pstats
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

import unicoll as dist
from tests.gpu.check.contenders import Call, Contender, contenders
from tests.gpu.check.kits import kit

__all__ = [
    "absent",
    "begin",
    "device_lines",
    "device_time",
    "end",
    "host_lines",
    "host_time",
    "pair_lines",
    "profile",
]

SIZES = {"8 B": 8, "64 KiB": 1 << 16, "16 MiB": 1 << 24}
LARGE = {"16 MiB": 1 << 24, "64 MiB": 1 << 26, "256 MiB": 1 << 28}
_SMALL = {"8 B": 8, "4 KiB": 1 << 12}
_TOGETHER = 8
_CALLS, _FEW = 30, 10
"""Calls per turn, so few that the device's queue never fills and blocks the host."""
_WARM = 3
_DEVICE_CALLS = 10
_HEAD_START_S = 0.01

Line = dict[str, Call]
"""Calls by contender."""


_found: list[Contender] = []
_missing: dict[str, str] = {}


def begin(kits: Sequence[str]) -> None:
    """Create the contenders; the garbage collector is off until the end."""
    found, missing = contenders(kits)
    _found[:] = found
    _missing.update(missing)
    gc.collect()
    gc.disable()


def absent() -> dict[str, str]:
    """The missing contenders, with reasons."""
    return _missing


def end() -> None:
    """Close the contenders."""
    gc.enable()
    while _found:
        _found.pop().close()


def _statistics(samples: Sequence[float]) -> dict[str, float]:
    us = np.array(samples) * 1e6
    return {
        "p50_us": float(np.median(us)),
        "min_us": float(us.min()),
        "p90_us": float(np.percentile(us, 90)),
        "calls": len(us),
    }


def _host_times(call: Call, times: int) -> list[float]:
    clock, found = time.perf_counter, []
    for _ in range(times):
        start = clock()
        call()
        found.append(clock() - start)
    return found


def _in_turns(
    line: Line, turns: int, seconds: float, sample: Callable[[Contender, Call], list[float]]
) -> dict[str, dict[str, float]]:
    """Samples of every contender, in an order that rotates with each turn, as long as there is time.

    All ranks must do the same number of turns: rank 0 decides when to stop.
    """
    for one in _found:
        for _ in range(_WARM):
            line[one.name]()
        one.kit.synchronize()
    samples: dict[str, list[float]] = {name: [] for name in line}
    deadline = time.monotonic() + seconds
    for turn in range(turns):
        for i in range(len(_found)):
            one = _found[(i + turn) % len(_found)]
            samples[one.name] += sample(one, line[one.name])
        enough = [time.monotonic() > deadline]
        dist.broadcast_object_list(enough, src=0)
        if enough[0]:
            break
    for one in _found:
        one.forget()
    return {name: _statistics(times) for name, times in samples.items()}


def _host_sample(one: Contender, call: Call, calls: int = _CALLS) -> list[float]:
    one.kit.synchronize()
    times = _host_times(call, calls)
    one.kit.synchronize()
    return times


def _all_reduce(one: Contender, nbytes: int) -> Call:
    return one.all_reduce(one.kit.full(nbytes // 4, 0.0))


def _background(one: Contender, nbytes: int) -> Call:
    return one.background(one.kit.full(nbytes // 4, 0.0))


def _together(one: Contender, nbytes: int) -> Call:
    return one.together([one.kit.full(nbytes // 4, 0.0) for _ in range(_TOGETHER)])


def _gather(one: Contender, nbytes: int) -> Call:
    size, count = dist.get_world_size(), nbytes // 4
    return one.gather(one.kit.full(count * size, 0.0), one.kit.full(count, 0.0))


def _exchange(one: Contender, nbytes: int) -> Call:
    count = nbytes // 4
    return one.exchange(one.kit.full(count, 0.0), one.kit.full(count, 0.0), 1 - dist.get_rank())


def _scaled(one: Contender, nbytes: int) -> Call:
    return one.scaled(one.kit.full(nbytes // 4, 0.0))


def _gathers(one: Contender, nbytes: int) -> Call:
    size, quarter = dist.get_world_size(), max(1, nbytes // 16)
    return one.gathers([(one.kit.full(quarter * size, 0.0), one.kit.full(quarter, 0.0)) for _ in range(4)])


Row = tuple[Callable[[Contender, int], Call], int]
"""The function that makes a contender's call, and its bytes."""


def host_lines(simulated: bool) -> dict[str, Row]:
    """The measurements of host time on one rank, by name."""
    sizes = _SMALL if simulated else SIZES
    middle, nbytes = list(sizes.items())[1]
    return {
        **{f"blocking all_reduce, {words}": (_all_reduce, n) for words, n in sizes.items()},
        **{f"all_reduce in the background and wait, {words}": (_background, n) for words, n in sizes.items()},
        f"{_TOGETHER} all_reduces coalesced, {middle} each": (_together, nbytes),
        f"blocking all_gather_into_tensor, {middle}": (_gather, nbytes),
    }


def pair_lines(simulated: bool) -> dict[str, Row]:
    """The measurements on two ranks: sends and receives in both directions, and an all_reduce."""
    sizes = {"8 B": 8} if simulated else {"8 B": 8, "64 KiB": 1 << 16}
    return {
        **{f"exchange of messages, 2 ranks, {words}": (_exchange, n) for words, n in sizes.items()},
        **{
            f"all_reduce in the background and wait, 2 ranks, {words}": (_background, n)
            for words, n in sizes.items()
        },
    }


def device_lines(simulated: bool) -> dict[str, Row]:
    """The measurements of device time on one rank."""
    makers = {
        "all_reduce (with a factor), {}": _scaled,
        "all_gather_into_tensor, {}": _gather,
        "4 all_gathers grouped, {} together": _gathers,
        "all_reduce in the background, {}": _background,
    }
    sizes = _SMALL if simulated else LARGE
    return {what.format(words): (maker, n) for words, n in sizes.items() for what, maker in makers.items()}


def _line(row: Row) -> Line:
    maker, nbytes = row
    return {one.name: maker(one, nbytes) for one in _found}


def host_time(what: str, seconds: float) -> dict[str, dict[str, float]]:
    """Microseconds of the host per call of a line, by contender."""
    simulated = _found[0].kit.simulated
    if dist.get_world_size() == 1:
        return _in_turns(_line(host_lines(simulated)[what]), 2 if simulated else 400, seconds, _host_sample)
    together = np.zeros(1)

    def sample(one: Contender, call: Call) -> list[float]:
        dist.all_reduce(together)  # in host memory
        return _host_sample(one, call, _FEW)

    return _in_turns(_line(pair_lines(simulated)[what]), 2 if simulated else 100, seconds, sample)


def device_time(what: str, seconds: float) -> dict[str, Any]:
    """Microseconds of the device per call of a line, between events, with the host ahead of the device."""
    simulated = _found[0].kit.simulated
    row = device_lines(simulated)[what]

    def sample(one: Contender, call: Call) -> list[float]:
        def body() -> None:
            for _ in range(_DEVICE_CALLS):
                call()

        return [one.kit.elapsed(body, _HEAD_START_S) / _DEVICE_CALLS]

    found = _in_turns(_line(row), 2 if simulated else 60, seconds, sample)
    asynchronous = "background" in what
    named = {("async " if asynchronous and n.startswith("unicoll") else "") + n: s for n, s in found.items()}
    return {"bytes": row[1], "contenders": named}


def profile(name: str, calls: int) -> dict[str, Any]:
    """A profile of asynchronous all_reduces of 8 B: functions by their own time."""
    k = kit(name)
    x = k.full(2, 0.0)

    def call() -> None:
        work: Any = dist.all_reduce(x, async_op=True)
        work.wait()

    for _ in range(_WARM):
        call()
    k.synchronize()
    profiler = cProfile.Profile()
    for _ in range(max(1, calls // _CALLS)):
        profiler.enable()
        for _ in range(_CALLS):
            call()
        profiler.disable()
        k.synchronize()
    done = max(1, calls // _CALLS) * _CALLS
    table: Any = pstats.Stats(profiler)
    rows = sorted(table.stats.items(), key=lambda item: -item[1][2])[:30]
    return {
        "calls": done,
        "functions": [
            {
                "function": f"{file.rpartition('/')[2]}:{line} {what}",
                "own_us": own / done * 1e6,
                "with_callees_us": whole / done * 1e6,
                "times": times / done,
            }
            for (file, line, what), (_, times, own, whole, _callers) in rows
        ],
    }
