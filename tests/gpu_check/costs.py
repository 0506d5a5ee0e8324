"""The stages on costs: the host's time to enqueue, and the device's time, beside torch.distributed and bare NCCL."""

from __future__ import annotations

from typing import Any

from unicoll.testing.ranks import Job

from . import cost_jobs, rank_jobs
from .place import Place, joined
from .record import Reporter

__all__ = ["device_time", "enqueue"]


def enqueue(reporter: Reporter, place: Place) -> None:
    """One rank: all_reduce of three sizes, coalesced and gathered; then two ranks, messages. And a profile."""
    lines: dict[str, Any] = {}
    half = max(0.5, reporter.seconds * 0.4)
    found = reporter.check("host time to enqueue, one rank", _enqueue, place, half)
    if found is not None:
        costs, profiles = found
        reporter.figure("contenders missing", costs["missing"])
        lines |= costs["enqueue"]
        reporter.figure("enqueue", lines)
        for name, profile in profiles.items():
            reporter.figure(f"profile, {name}", profile)
        _tell(reporter, costs["enqueue"])
    quarter = max(0.5, reporter.seconds * 0.2)
    found = reporter.check(
        "host time to enqueue, two ranks", _with_ranks, place, 2, cost_jobs.exchanges, quarter,
        needs=0.0 if place.simulated else quarter + 10.0,
    )  # fmt: skip
    if found is not None:
        lines |= found["enqueue"]
        reporter.figure("enqueue", lines)
        _tell(reporter, found["enqueue"])


def device_time(reporter: Reporter, place: Place) -> None:
    """One rank: copies and kernels from 16 MiB up, single and grouped."""
    seconds = max(0.5, reporter.seconds * 0.6)
    found = reporter.check(
        "time of the device, one rank", _with_ranks, place, 1, cost_jobs.device_time, seconds
    )
    if found is not None:
        reporter.figure("device time", found["device time"])
        _tell(reporter, {what: row["contenders"] for what, row in found["device time"].items()})


def _with_ranks(place: Place, size: int, function: Any, seconds: float) -> dict[str, Any]:
    with joined(place, size) as job:
        return _cost(place, job, function, seconds)


def _cost(place: Place, job: Job, function: Any, seconds: float) -> dict[str, Any]:
    for name in place.kits:
        job.call(rank_jobs.warm_up, name)
        job.results(90.0)
    job.call(function, place.kits, seconds)
    found: dict[str, Any] = job.results(seconds + 60.0)[0]
    return found


def _enqueue(place: Place, seconds: float) -> tuple[dict[str, Any], dict[str, Any]]:
    """The costs, and for each array library where the host's time goes."""
    with joined(place, 1) as job:
        costs, profiles = _cost(place, job, cost_jobs.enqueue, seconds), {}
        for name in place.kits:
            job.call(cost_jobs.profile, name, 60 if place.simulated else 3000)
            profiles[name] = job.results(60.0)[0]
    return costs, profiles


def _tell(reporter: Reporter, lines: dict[str, dict[str, dict[str, float]]]) -> None:
    """A line for people on each."""
    for what, line in lines.items():
        words = "; ".join(f"{name} {stat['p50_us']:.1f}" for name, stat in line.items())
        reporter.say(f"{what} (us): {words}")
