"""The stage on copies between host and device: bandwidth of the bus, and the share that host backends reach."""

from __future__ import annotations

from tests.gpu.check import copy_jobs
from tests.gpu.check.place import HOST_BACKENDS, Place, called, host_backend, joined, leave
from tests.gpu.check.record import Reporter

__all__ = ["STAGED_BYTES", "measure"]

_NEEDS_S = 2.0
STAGED_BYTES = 64 << 20
"""Bytes of the array that is copied and broadcast."""


def measure(reporter: Reporter, place: Place) -> None:
    """Pinned copies by the driver, in each direction and both at once; then a collective of each host backend."""
    nbytes = 1 << 20 if place.simulated else STAGED_BYTES
    limit = reporter.check("pinned copies", _bare, reporter, place, nbytes)
    if limit is None:
        return
    for backend in HOST_BACKENDS:
        reporter.check(
            f"staged by the backend {backend}",
            _staged,
            reporter,
            place,
            backend,
            nbytes,
            limit,
            needs=_NEEDS_S,
        )


def _bare(reporter: Reporter, place: Place, nbytes: int) -> dict[str, float]:
    with joined(place, 1, []) as job:
        found: dict[str, float] = called(place, job, copy_jobs.pinned, nbytes)[0]
        reporter.figure("pinned copies, bytes/s", found)
        assert min(found.values()) > 0, found
        leave(place, job)
    return found


def _staged(reporter: Reporter, place: Place, backend: str, nbytes: int, limit: dict[str, float]) -> None:
    host_backend(backend)
    with joined(place, 2, backend=f"cpu:{backend},cuda:{backend}") as job:
        for name in place.kits:
            found = called(place, job, copy_jobs.staged, name, nbytes)[0]
            bus = min(limit["to host"], limit["to device"])
            share = found["bytes/s"] / min(bus, nbytes / found["host arrays, seconds"])
            shares = {
                "share of the slower direction": found["bytes/s"] / bus,
                "share of the slower of bus and host": share,
            }
            reporter.figure(f"{name}: staged by the backend {backend}", found | shares)
        leave(place, job)
