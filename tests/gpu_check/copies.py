"""The stage on copies between host and device: what the bus gives, and what the CPU backend makes of it."""

from __future__ import annotations

from typing import Any

from . import copy_jobs
from .place import Place, joined
from .record import Reporter, Skip

__all__ = ["measure"]


def measure(reporter: Reporter, place: Place) -> None:
    """Pinned copies by the driver, each direction and both at once; then a collective of the CPU backend."""
    nbytes = 1 << 20 if place.simulated else 1 << 28
    limit = reporter.check("pinned copies", _bare, place, nbytes)
    if limit is None:
        return
    reporter.figure("pinned copies, bytes/s", limit)
    for name in place.kits:
        found = reporter.check(
            f"{name}: staged by the CPU backend", _staged, place, name, nbytes, limit, needs=6.0
        )
        if found is not None:
            reporter.figure(f"{name}: staged by the CPU backend", found)


def _bare(place: Place, nbytes: int) -> dict[str, float]:
    with joined(place, 1, []) as job:
        job.call(copy_jobs.pinned, nbytes)
        found: dict[str, float] = job.results(60.0)[0]
    assert min(found.values()) > 0, found
    return found


def _staged(place: Place, name: str, nbytes: int, limit: dict[str, float]) -> dict[str, Any]:
    from unicoll import registry

    if "cuda" not in registry.load("gloo").caps.devices:
        raise Skip("the CPU backend takes no CUDA arrays")
    with joined(place, 2, [name], backend="cpu:gloo,cuda:gloo") as job:
        job.call(copy_jobs.staged, name, nbytes)
        found: dict[str, Any] = job.results(90.0)[0]
    found["share of the slower direction"] = found["bytes/s"] / min(limit["to host"], limit["to device"])
    return found
