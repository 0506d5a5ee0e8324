"""The stages on streams and lifetimes: results that races would make wrong, and calls that wait for the device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tests.gpu.check import graph_jobs, rank_jobs, streaming_jobs, trace_jobs
from tests.gpu.check.place import Place, Ranks
from tests.gpu.check.record import Reporter, Skip

__all__ = ["done", "one", "two", "work_through"]

_NEEDS_S = 1.0


def one(reporter: Reporter, place: Place) -> None:
    """All programs on one rank."""
    _streams(reporter, place, 1)


def two(reporter: Reporter, place: Place) -> None:
    """All programs on two ranks of one GPU, where another rank can be late."""
    _streams(reporter, place, 2)


def _streams(reporter: Reporter, place: Place, size: int) -> None:
    for name in place.kits:
        first = [(rank_jobs.warm_up, name)]
        ranks = Ranks(place, size, [name], first, counting=True, timeout=40.0)
        try:
            for program in (*streaming_jobs.PROGRAMS, *graph_jobs.PROGRAMS):
                work_through(reporter, ranks, name, program)
            if name == "torch":
                found = reporter.check("torch: trace of the runtime's calls", _trace, ranks, needs=_NEEDS_S)
                reporter.figure("torch: runtime's calls in an asynchronous stretch", found)
        finally:
            reporter.check(f"{name}: the ranks leave", ranks.depart)


def work_through(reporter: Reporter, ranks: Ranks, name: str, program: Callable[[Any], Any]) -> None:
    """Run a program with an array library on all ranks as a check; skip it if one of them cannot run it."""
    words = f"{name}: {program.__name__.replace('_', ' ')}"
    found = reporter.check(words, _call, ranks, name, program, needs=_NEEDS_S)
    if found is not None and found[0] is not None:
        reporter.figure(words, found)


def _call(ranks: Ranks, name: str, program: Callable[[Any], Any]) -> list[object]:
    return done(ranks.run(rank_jobs.run, name, program.__module__, program.__name__))


def done(found: Sequence[tuple[str, Any]]) -> list[Any]:
    """The results of a program; Skip if a rank has not run it."""
    reasons = [value[1] for value in found if value[0] == "skip"]
    if reasons:
        raise Skip(reasons[0])
    return [value[1] for value in found]


def _trace(ranks: Ranks) -> list[object]:
    found = ranks.run(
        trace_jobs.asynchronous_stretch, timeout=2 * ranks.place.patience
    )  # the profiler starts, too
    for each in found:
        if isinstance(each, str):
            raise Skip(each)
        assert not each["waiting"], f"calls that wait for the device: {each['waiting']}"
    return found
