"""The stages on costs: host time to enqueue, and device time, compared with torch.distributed and bare NCCL."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from tests.gpu.check import cost_jobs, rank_jobs
from tests.gpu.check.place import Place, Ranks
from tests.gpu.check.record import Reporter

__all__ = ["device_time", "enqueue"]

_NEEDS_S = 1.0
_USED = 0.6
"""The share of a stage's time for measuring; the rest is for the start of ranks."""


def enqueue(reporter: Reporter, place: Place) -> None:
    """One rank: all_reduce of three sizes, coalesced and gathered; then two ranks, sends and receives; and a
    profile."""
    one, two = cost_jobs.host_lines(place.simulated), cost_jobs.pair_lines(place.simulated)
    seconds = _USED * reporter.seconds / (len(one) + len(two))
    found: dict[str, Any] = {}

    def tell(what: str, line: dict[str, Any]) -> None:
        found[what] = line
        reporter.figure("enqueue", found)
        _say(reporter, what, line)

    _lines(reporter, place, 1, one, cost_jobs.host_time, seconds, tell)
    _lines(reporter, place, 2, two, cost_jobs.host_time, seconds, tell)


def device_time(reporter: Reporter, place: Place) -> None:
    """One rank: copies and kernels from 16 MiB up, single and grouped."""
    lines = cost_jobs.device_lines(place.simulated)
    found: dict[str, Any] = {}

    def tell(what: str, row: dict[str, Any]) -> None:
        found[what] = row
        reporter.figure("device time", found)
        _say(reporter, what, row["contenders"])

    _lines(reporter, place, 1, lines, cost_jobs.device_time, _USED * reporter.seconds / len(lines), tell)


def _lines(
    reporter: Reporter,
    place: Place,
    size: int,
    lines: Iterable[str],
    function: Callable[..., Any],
    seconds: float,
    tell: Callable[[str, Any], None],
) -> None:
    """Measure each line, as a check that is reported at its end; on one rank also a profile, once."""
    first = [*((rank_jobs.warm_up, name) for name in place.kits), (cost_jobs.begin, place.kits)]
    ranks = Ranks(place, size, first=first)
    try:
        missing = reporter.check(f"{size} ranks, and who is compared", ranks.run, cost_jobs.absent)
        if missing is None:
            return
        reporter.figure("contenders missing", missing[0])
        for what in lines:
            line = reporter.check(what, _measure, ranks, function, what, seconds, needs=_NEEDS_S)
            if line is not None:
                tell(what, line)
        if size == 1 and function is cost_jobs.host_time:
            for name in place.kits:
                _profile(reporter, ranks, name)
    finally:
        reporter.check(f"{size} ranks leave", _leave, ranks)


def _leave(ranks: Ranks) -> None:
    if ranks.running:
        ranks.run(cost_jobs.end)
    ranks.depart()


def _measure(ranks: Ranks, function: Callable[..., Any], what: str, seconds: float) -> Any:
    return ranks.run(function, what, seconds, timeout=seconds + ranks.place.patience)[0]


def _profile(reporter: Reporter, ranks: Ranks, name: str) -> None:
    """A profile of the host."""
    calls = 60 if ranks.place.simulated else 3000
    found = reporter.check(f"profile, {name}", ranks.run, cost_jobs.profile, name, calls, needs=_NEEDS_S)
    if found is not None:
        reporter.figure(f"profile, {name}", found[0])


def _say(reporter: Reporter, what: str, line: dict[str, dict[str, float]]) -> None:
    """A line of text."""
    words = "; ".join(f"{name} {stat['p50_us']:.1f}" for name, stat in line.items())
    reporter.say(f"{what} (us): {words}")
