"""The stage on torch.distributed: two ranks on the one GPU whose backend is unicoll's, by way of its torch plug-in."""

from __future__ import annotations

import importlib.util
from typing import Any

from unicoll.testing.ranks import Job, RanksFailed

from . import plugin_jobs
from .place import Place
from .record import Reporter, Skip

__all__ = ["two"]

_TIMEOUT_S = 20.0
"""Of the group: a program that hangs ends with its error."""
_PATIENCE_S = 60.0
_NEEDS_S = 10.0


def two(reporter: Reporter, place: Place) -> None:
    """Every program, each reported as soon as it is over; after one that failed the next has new ranks."""
    ranks = _Ranks(place)
    try:
        for program in plugin_jobs.PROGRAMS:
            words = program.__name__.replace("_", " ")
            found = reporter.check(words, ranks.run, program, needs=0.0 if place.simulated else _NEEDS_S)
            if found is not None and found[0] is not None:
                reporter.figure(words, found)
        reporter.check("the ranks leave", ranks.leave)
    finally:
        ranks.close()


class _Ranks:
    """Ranks that are started when they are needed."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._job: Job | None = None

    def run(self, program: Any) -> list[Any]:
        """Each rank's result of a program."""
        if importlib.util.find_spec("torch") is None or not {"torch", "simulated"} & set(self._place.kits):
            raise Skip("torch is not here, or has no CUDA")
        try:
            if self._job is None:
                self._job = self._place.job(2, "cpu:gloo,cuda:nccl", ["torch"])
                self._call(plugin_jobs.enter, self._place.simulated, _TIMEOUT_S)
            found = self._call(plugin_jobs.run, program.__name__)
        except BaseException:
            self.close()
            raise
        reasons = [value[1] for value in found if value[0] == "skip"]
        if reasons:
            raise Skip(reasons[0])
        return [value[1] for value in found]

    def _call(self, function: Any, *args: Any) -> list[Any]:
        assert self._job is not None
        self._job.call(function, *args)
        return self._job.results(_PATIENCE_S)

    def leave(self) -> None:
        """Leave the job; nothing of ours may be left behind."""
        if self._job is None:
            raise Skip("there are no ranks any more")
        left = self._call(plugin_jobs.leave)
        if any(left):
            raise RanksFailed(f"left over: {left}\n{self._job.report()}")

    def close(self) -> None:
        """End the ranks, wherever they are."""
        job, self._job = self._job, None
        if job is not None:
            job.close()
