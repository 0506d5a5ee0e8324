"""The stages on costs: host time to enqueue, and device time, compared with torch.distributed and bare NCCL.

Ranks measure one line at a time, the contenders in turns, with a short queue.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

import unicoll as dist
from tests.gpu.check import rank_jobs
from tests.gpu.check.contenders import TOGETHER, Call, Contender, contenders
from tests.gpu.check.place import Place, Ranks
from tests.gpu.check.record import Reporter
from unicoll.bench.measure import timed

_NEEDS_S = 1.0
_USED = 0.6
"""The share of a stage's time for measuring; the rest is for the start of ranks."""
_SIZES = {"8 B": 8, "64 KiB": 1 << 16, "16 MiB": 1 << 24}
_LARGE = {"16 MiB": 1 << 24, "64 MiB": 1 << 26, "256 MiB": 1 << 28}
_SMALL = {"8 B": 8, "4 KiB": 1 << 12}
"""The sizes of a simulated run."""
_CALLS, _FEW = 30, 10
"""Calls per turn, so few that the device's queue never fills and blocks the host."""
_WARM = 3
_DEVICE_CALLS = 10
_HEAD_START_S = 0.01

Line = tuple[str, int]
"""The contenders' method that makes the call, and its bytes."""


def _host_lines(simulated: bool) -> dict[str, Line]:
    """The measurements of host time on one rank, by name."""
    sizes = _SMALL if simulated else _SIZES
    middle, nbytes = list(sizes.items())[1]
    return {
        **{f"blocking all_reduce, {words}": ("all_reduce", n) for words, n in sizes.items()},
        **_background_lines(sizes, ""),
        f"{TOGETHER} all_reduces coalesced, {middle} each": ("together", nbytes),
        f"blocking all_gather_into_tensor, {middle}": ("gather", nbytes),
    }


def _background_lines(sizes: dict[str, int], ranks: str) -> dict[str, Line]:
    name = "all_reduce in the background and wait"
    return {f"{name}, {ranks}{words}": ("background", n) for words, n in sizes.items()}


def _pair_lines(simulated: bool) -> dict[str, Line]:
    """The measurements on two ranks: sends and receives in both directions, and an all_reduce."""
    sizes = {"8 B": 8} if simulated else {"8 B": 8, "64 KiB": 1 << 16}
    exchanges = {f"exchange of messages, 2 ranks, {words}": ("exchange", n) for words, n in sizes.items()}
    return {**exchanges, **_background_lines(sizes, "2 ranks, ")}


def _device_lines(simulated: bool) -> dict[str, Line]:
    """The measurements of device time on one rank."""
    methods = {
        "all_reduce (with a factor), {}": "scaled",
        "all_gather_into_tensor, {}": "gather",
        "4 all_gathers grouped, {} together": "gathers",
        "all_reduce in the background, {}": "background",
    }
    sizes = _SMALL if simulated else _LARGE
    return {what.format(words): (method, n) for words, n in sizes.items() for what, method in methods.items()}


# --- the stages -------------------------------------------------------------------------------------------------------


def enqueue(reporter: Reporter, place: Place) -> None:
    """One rank: all_reduce of three sizes, coalesced and gathered; then two ranks, sends and receives."""
    one, two = _host_lines(place.simulated), _pair_lines(place.simulated)
    seconds = _USED * reporter.seconds / (len(one) + len(two))
    found: dict[str, Any] = {}

    def tell(what: str, line: dict[str, Any]) -> None:
        found[what] = line
        reporter.figure("enqueue", found)
        _say(reporter, what, line)

    measure_lines(reporter, place, 1, [*one], host_us, seconds, tell)
    measure_lines(reporter, place, 2, [*two], host_us, seconds, tell)


def device_time(reporter: Reporter, place: Place) -> None:
    """One rank: copies and kernels from 16 MiB up, single and grouped."""
    lines = _device_lines(place.simulated)
    found: dict[str, Any] = {}

    def tell(what: str, row: dict[str, Any]) -> None:
        found[what] = row
        reporter.figure("device time", found)
        _say(reporter, what, row["contenders"])

    measure_lines(reporter, place, 1, [*lines], device_us, _USED * reporter.seconds / len(lines), tell)


def measure_lines(
    reporter: Reporter,
    place: Place,
    size: int,
    lines: Sequence[str],
    function: Callable[..., Any],
    seconds: float,
    tell: Callable[[str, Any], None],
) -> None:
    """Measure each line by a function of ranks, as a check that is reported at its end."""
    ranks = Ranks(
        place, size, first=[*((rank_jobs.warm_up, name) for name in place.kits), (begin, place.kits)]
    )
    try:
        missing = reporter.check(f"{size} ranks, and who is compared", ranks.run, absent)
        if missing is None:
            return
        reporter.figure("contenders missing", missing[0])
        for what in lines:
            line = reporter.check(what, _measure, ranks, function, what, seconds, needs=_NEEDS_S)
            if line is not None:
                tell(what, line)
    finally:
        reporter.check(f"{size} ranks leave", _leave, ranks)


def _measure(ranks: Ranks, function: Callable[..., Any], what: str, seconds: float) -> Any:
    return ranks.run(function, what, seconds, timeout=seconds + ranks.place.patience)[0]


def _leave(ranks: Ranks) -> None:
    if ranks.running:
        ranks.run(end)
    ranks.depart()


def _say(reporter: Reporter, what: str, line: dict[str, dict[str, float]]) -> None:
    """A line of text."""
    words = "; ".join(f"{name} {stat['p50_us']:.1f}" for name, stat in line.items())
    reporter.say(f"{what} (us): {words}")


# --- functions of ranks -----------------------------------------------------------------------------------------------

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


def _in_turns(
    line: Line, turns: int, seconds: float, sample: Callable[[Contender, Call], list[float]]
) -> dict[str, dict[str, float]]:
    """Samples of every contender, in an order that rotates with each turn, as long as there is time.

    All ranks must do the same number of turns: rank 0 decides when to stop.
    """
    method, nbytes = line
    calls = {one.name: getattr(one, method)(nbytes) for one in _found}
    for one in _found:
        for _ in range(_WARM):
            calls[one.name]()
        one.kit.synchronize()
    samples: dict[str, list[float]] = {name: [] for name in calls}
    deadline = time.monotonic() + seconds
    for turn in range(turns):
        for i in range(len(_found)):
            one = _found[(i + turn) % len(_found)]
            samples[one.name] += sample(one, calls[one.name])
        enough = [time.monotonic() > deadline]
        dist.broadcast_object_list(enough, src=0)
        if enough[0]:
            break
    for one in _found:
        one.forget()
    return {name: _statistics(times) for name, times in samples.items()}


def _statistics(samples: Sequence[float]) -> dict[str, float]:
    us = np.array(samples) * 1e6
    return {
        "p50_us": float(np.median(us)),
        "min_us": float(us.min()),
        "p90_us": float(np.percentile(us, 90)),
        "calls": len(us),
    }


def host_us(what: str, seconds: float) -> dict[str, dict[str, float]]:
    """Microseconds of the host per call of a line, by contender."""
    simulated, alone = _found[0].kit.simulated, dist.get_world_size() == 1
    together = np.zeros(1)

    def sample(one: Contender, call: Call) -> list[float]:
        if not alone:
            dist.all_reduce(together)  # in host memory
        one.kit.synchronize()
        times = timed(call, _CALLS if alone else _FEW, 1, None, None)
        one.kit.synchronize()
        return times

    line = (_host_lines if alone else _pair_lines)(simulated)[what]
    return _in_turns(line, 2 if simulated else 400 if alone else 100, seconds, sample)


def device_us(what: str, seconds: float) -> dict[str, Any]:
    """Microseconds of the device per call of a line, between events, with the host ahead of the device."""
    simulated = _found[0].kit.simulated
    line = _device_lines(simulated)[what]

    def sample(one: Contender, call: Call) -> list[float]:
        def body() -> None:
            for _ in range(_DEVICE_CALLS):
                call()

        return [one.kit.elapsed(body, _HEAD_START_S) / _DEVICE_CALLS]

    found = _in_turns(line, 2 if simulated else 60, seconds, sample)
    asynchronous = "background" in what
    named = {("async " if asynchronous and n.startswith("unicoll") else "") + n: s for n, s in found.items()}
    return {"bytes": line[1], "contenders": named}
