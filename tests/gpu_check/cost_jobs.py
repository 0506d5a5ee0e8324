"""What ranks do in the stages on costs: contenders take turns, the device is never far behind."""

from __future__ import annotations

import cProfile
import gc
import pstats
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

import unicoll as dist

from .contenders import Call, Contender, contenders
from .kits import kit

__all__ = ["device_time", "enqueue", "exchanges", "profile"]

SIZES = {"8 B": 8, "64 KiB": 1 << 16, "16 MiB": 1 << 24}
LARGE = {"16 MiB": 1 << 24, "64 MiB": 1 << 26, "256 MiB": 1 << 28}
_SMALL = {"8 B": 8, "4 KiB": 1 << 12}
_TOGETHER = 8
_CALLS, _FEW = 30, 10
"""Calls in a turn: few enough that the device's queue never fills and stops the host."""
_WARM = 3
_DEVICE_CALLS = 10
_HEAD_START_S = 0.01

Line = dict[str, Call]
"""Calls by contender."""


@contextmanager
def _open(kits: Sequence[str]) -> Iterator[tuple[list[Contender], dict[str, str]]]:
    """The contenders, and no garbage collector meanwhile."""
    found, missing = contenders(kits)
    gc.collect()
    gc.disable()
    try:
        yield found, missing
    finally:
        gc.enable()
        for one in reversed(found):
            one.close()


def _statistics(samples: Sequence[float]) -> dict[str, float]:
    us = np.array(samples) * 1e6
    return {
        "p50_us": float(np.median(us)), "min_us": float(us.min()), "p90_us": float(np.percentile(us, 90)),
        "calls": len(us),
    }  # fmt: skip


def _host_times(call: Call, times: int) -> list[float]:
    clock, found = time.perf_counter, []
    for _ in range(times):
        start = clock()
        call()
        found.append(clock() - start)
    return found


def _in_turns(
    lines: dict[str, Line],
    found: Sequence[Contender],
    turns: int,
    seconds: float,
    sample: Callable[[Contender, Call], list[float]],
) -> dict[str, dict[str, dict[str, float]]]:
    """Samples of every line of every contender, the order moving on from turn to turn, as long as there is time.

    On several ranks all must do the same number of turns: rank 0 says when it is enough.
    """
    samples: dict[str, dict[str, list[float]]] = {
        what: {name: [] for name in line} for what, line in lines.items()
    }
    end = time.monotonic() + seconds
    for turn in range(turns):
        for what, line in lines.items():
            for i in range(len(found)):
                one = found[(i + turn) % len(found)]
                if one.name in line:
                    samples[what][one.name] += sample(one, line[one.name])
        enough = [time.monotonic() > end]
        dist.broadcast_object_list(enough, src=0)
        if enough[0]:
            break
    return {
        what: {name: _statistics(times) for name, times in line.items() if times} for what, line in samples.items()
    }  # fmt: skip


def _host_sample(one: Contender, call: Call, calls: int = _CALLS) -> list[float]:
    one.kit.synchronize()
    times = _host_times(call, calls)
    one.kit.synchronize()
    return times


def enqueue(kits: Sequence[str], seconds: float) -> dict[str, Any]:
    """Microseconds of the host per call, by what is called and by whom."""
    with _open(kits) as (found, missing):
        sizes = _SMALL if found[0].kit.simulated else SIZES
        lines: dict[str, Line] = {}
        for words, nbytes in sizes.items():
            arrays = {one.name: one.kit.full(nbytes // 4, 0.0) for one in found}
            lines[f"blocking all_reduce, {words}"] = {o.name: o.all_reduce(arrays[o.name]) for o in found}
            lines[f"all_reduce in the background and wait, {words}"] = {
                o.name: o.background(arrays[o.name]) for o in found
            }
        words, nbytes = list(sizes.items())[1]
        several = {o.name: [o.kit.full(nbytes // 4, 0.0) for _ in range(_TOGETHER)] for o in found}
        lines[f"{_TOGETHER} all_reduces coalesced, {words} each"] = {
            o.name: o.together(several[o.name]) for o in found
        }
        pairs = {
            o.name: (o.kit.full(nbytes // 4 * dist.get_world_size(), 0.0), o.kit.full(nbytes // 4, 0.0))
            for o in found
        }
        lines[f"blocking all_gather_into_tensor, {words}"] = {o.name: o.gather(*pairs[o.name]) for o in found}
        _warm(lines, found)
        turns = 2 if found[0].kit.simulated else 400
        return {"missing": missing, "enqueue": _in_turns(lines, found, turns, seconds, _host_sample)}


def _warm(lines: dict[str, Line], found: Sequence[Contender]) -> None:
    for line in lines.values():
        for one in found:
            for _ in range(_WARM):
                line[one.name]()
            one.kit.synchronize()


def exchanges(kits: Sequence[str], seconds: float) -> dict[str, Any]:
    """The same on two ranks: messages there and back at once, and an all_reduce with somebody else in it."""
    peer = 1 - dist.get_rank()
    with _open(kits) as (found, missing):
        lines: dict[str, Line] = {}
        for words, nbytes in (
            {"8 B": 8} if found[0].kit.simulated else {"8 B": 8, "64 KiB": 1 << 16}
        ).items():
            pairs = {o.name: (o.kit.full(nbytes // 4, 0.0), o.kit.full(nbytes // 4, 0.0)) for o in found}
            lines[f"exchange of messages, 2 ranks, {words}"] = {
                o.name: o.exchange(*pairs[o.name], peer) for o in found
            }
            lines[f"all_reduce in the background and wait, 2 ranks, {words}"] = {
                o.name: o.background(pairs[o.name][0]) for o in found
            }
        _warm(lines, found)

        together = np.zeros(1)

        def sample(one: Contender, call: Call) -> list[float]:
            dist.all_reduce(together)  # in host memory
            return _host_sample(one, call, _FEW)

        turns = 2 if found[0].kit.simulated else 100
        return {"missing": missing, "enqueue": _in_turns(lines, found, turns, seconds, sample)}


def device_time(kits: Sequence[str], seconds: float) -> dict[str, Any]:
    """Microseconds of the device per call, between events; the host is ahead of it."""
    with _open(kits) as (found, missing):
        simulated = found[0].kit.simulated
        sizes = _SMALL if simulated else LARGE
        result: dict[str, Any] = {}
        for words, nbytes in sizes.items():
            lines = _device_lines(found, nbytes, words)
            _warm(lines, found)

            def sample(one: Contender, call: Call) -> list[float]:
                def body() -> None:
                    for _ in range(_DEVICE_CALLS):
                        call()

                return [one.kit.elapsed(body, _HEAD_START_S) / _DEVICE_CALLS]

            stats = _in_turns(lines, found, 2 if simulated else 60, seconds / len(sizes), sample)
            for what, by_name in stats.items():
                background = "background" in what
                named = {
                    ("async " if background else "") + n if n.startswith("unicoll") else n: s
                    for n, s in by_name.items()
                }
                result[what] = {"bytes": nbytes, "contenders": named}
        return {"missing": missing, "device time": result}


def _device_lines(found: Sequence[Contender], nbytes: int, words: str) -> dict[str, Line]:
    """What is measured at a size; two arrays of each contender are all the memory it takes."""
    size, count = dist.get_world_size(), nbytes // 4
    x = {o.name: o.kit.full(count, 0.0) for o in found}
    out = {o.name: o.kit.full(count * size, 0.0) for o in found}
    quarter = max(1, count // 4)
    parts = {
        o.name: [
            (
                out[o.name][i * quarter * size : (i + 1) * quarter * size],
                x[o.name][i * quarter : (i + 1) * quarter],
            )
            for i in range(4)
        ]
        for o in found
    }
    return {
        f"all_reduce (average), {words}": {o.name: o.average(x[o.name]) for o in found},
        f"all_gather_into_tensor, {words}": {o.name: o.gather(out[o.name], x[o.name]) for o in found},
        f"4 all_gathers grouped, {words} together": {o.name: o.gathers(parts[o.name]) for o in found},
        f"all_reduce in the background, {words}": {o.name: o.background(x[o.name]) for o in found},
    }


def profile(name: str, calls: int) -> dict[str, Any]:
    """Where the host's time goes in asynchronous all_reduces of 8 B: functions by their own time."""
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
                "function": f"{file.rpartition('/')[2]}:{line} {what}", "own_us": own / done * 1e6,
                "with_callees_us": whole / done * 1e6, "times": times / done,
            }
            for (file, line, what), (_, times, own, whole, _callers) in rows
        ],
    }  # fmt: skip
