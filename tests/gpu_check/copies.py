"""The stage on copies between host and device: what the bus gives, and what backends of the host make of it."""

from __future__ import annotations

from typing import Any

from . import copy_jobs
from .place import HOST_BACKENDS, Place, host_backend, joined
from .record import Reporter

__all__ = ["STAGED_BYTES", "measure"]

STAGED_BYTES = 64 << 20
"""Of the array that is copied and broadcast."""


def measure(reporter: Reporter, place: Place) -> None:
    """Pinned copies by the driver, each direction and both at once; then a collective of each backend of the host."""
    nbytes = 1 << 20 if place.simulated else STAGED_BYTES
    limit = reporter.check("pinned copies", _bare, place, nbytes)
    if limit is None:
        return
    reporter.figure("pinned copies, bytes/s", limit)
    for backend in HOST_BACKENDS:
        for name in place.kits:
            what = f"{name}: staged by the backend {backend}"
            found = reporter.check(what, _staged, place, name, backend, nbytes, limit, needs=6.0)
            if found is not None:
                reporter.figure(what, found)


def _bare(place: Place, nbytes: int) -> dict[str, float]:
    with joined(place, 1, []) as job:
        job.call(copy_jobs.pinned, nbytes)
        found: dict[str, float] = job.results(60.0)[0]
    assert min(found.values()) > 0, found
    return found


def _staged(place: Place, name: str, backend: str, nbytes: int, limit: dict[str, float]) -> dict[str, Any]:
    host_backend(backend)
    with joined(place, 2, [name], backend=f"cpu:{backend},cuda:{backend}") as job:
        job.call(copy_jobs.staged, name, nbytes)
        found: dict[str, Any] = job.results(90.0)[0]
    bus = min(limit["to host"], limit["to device"])
    found["share of the slower direction"] = found["bytes/s"] / bus
    found["share of the slower of bus and host"] = found["bytes/s"] / min(bus, nbytes / found["host arrays, seconds"])
    return found
