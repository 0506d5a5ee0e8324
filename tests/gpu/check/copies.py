"""The stage on copies between host and device: bandwidth of the bus, and the share that host backends reach."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np

import unicoll as dist
from tests.gpu.check.kits import kit
from tests.gpu.check.place import HOST_BACKENDS, Place, called, host_backend, joined, leave
from tests.gpu.check.record import Reporter
from unicoll.devices import runtimes
from unicoll.devices.device_runtime import await_event

_NEEDS_S = 2.0
_BYTES = 64 << 20
"""Bytes of the array that is copied and broadcast."""
_TURNS = 5
_PATIENCE_S = 30.0


def measure(reporter: Reporter, place: Place) -> None:
    """Pinned copies by the driver, in each direction and both at once; then a collective of each host backend."""
    nbytes = 1 << 20 if place.simulated else _BYTES
    limit = reporter.check("pinned copies", _bare, reporter, place, nbytes)
    for backend in HOST_BACKENDS if limit is not None else ():
        words = f"staged by the backend {backend}"
        reporter.check(words, _staged, reporter, place, backend, nbytes, limit, needs=_NEEDS_S)


def _bare(reporter: Reporter, place: Place, nbytes: int) -> dict[str, float]:
    with joined(place, 1, []) as job:
        found: dict[str, float] = called(place, job, pinned, nbytes)[0]
        reporter.figure("pinned copies, bytes/s", found)
        assert min(found.values()) > 0, found
        leave(place, job)
    return found


def _staged(reporter: Reporter, place: Place, backend: str, nbytes: int, limit: dict[str, float]) -> None:
    host_backend(backend)
    with joined(place, 2, backend=f"cpu:{backend},cuda:{backend}") as job:
        for name in place.kits:
            found = called(place, job, staged, name, nbytes)[0]
            bus = min(limit["to host"], limit["to device"])
            share = found["bytes/s"] / min(bus, nbytes / found["host arrays, seconds"])
            shares = {
                "share of the slower direction": found["bytes/s"] / bus,
                "share of the slower of bus and host": share,
            }
            reporter.figure(f"{name}: staged by the backend {backend}", found | shares)
        leave(place, job)


# --- functions of ranks -----------------------------------------------------------------------------------------------


def _best(call: Callable[[], object], before: Callable[[], object] = lambda: None) -> float:
    """Seconds of a call: the shortest of several turns."""
    times = []
    for _ in range(_TURNS):
        before()
        began = time.perf_counter()
        call()
        times.append(time.perf_counter() - began)
    return min(times)


def pinned(nbytes: int) -> dict[str, float]:
    """Bytes per second of copies between pinned and device memory."""
    cuda = runtimes.runtime("cuda")
    cuda.set_device(0)
    lanes = [cuda.create_stream(0), cuda.create_stream(0)]
    events = [cuda.create_event(0), cuda.create_event(0)]
    host = [cuda.pin(nbytes), cuda.pin(nbytes)]
    device = [cuda.allocate(0, nbytes), cuda.allocate(0, nbytes)]

    def down() -> None:
        cuda.copy(host[0], device[0], nbytes, lanes[0])

    def up() -> None:
        cuda.copy(device[1], host[1], nbytes, lanes[1])

    def rate(*copies: Callable[[], None]) -> float:
        def call() -> None:
            for copy in copies:
                copy()
            for event, lane in zip(events, lanes, strict=True):
                cuda.record(event, lane)
            for event in events:
                assert await_event(cuda, event, time.monotonic() + _PATIENCE_S)

        return nbytes * len(copies) / _best(call)

    found = {"to host": rate(down), "to device": rate(up), "both at once": rate(down, up)}
    for event, lane in zip(events, lanes, strict=True):
        cuda.destroy_event(event)
        cuda.destroy_stream(lane)
    for h, d in zip(host, device, strict=True):
        cuda.unpin(h)
        cuda.free(d)
    return found


def staged(name: str, nbytes: int) -> dict[str, Any]:
    """A broadcast from one rank's device memory to the other's, compared with one in host memory."""
    k, value = kit(name), float(dist.get_rank())
    x, on_host = k.full(nbytes // 4, value), np.full(nbytes // 4, value, np.float32)

    def seconds(array: Any) -> float:
        def call() -> None:
            dist.broadcast(array, 0)
            k.synchronize()

        return _best(call, dist.barrier)

    device_s, host_s = seconds(x), seconds(on_host)
    assert (np.asarray(k.numpy(x)) == 0).all()
    return {
        "bytes": nbytes,
        "seconds": device_s,
        "host arrays, seconds": host_s,
        "bytes/s": nbytes / device_s,
    }
