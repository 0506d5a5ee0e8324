"""Functions that ranks run in the stage on copies."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np

import unicoll as dist
from tests.gpu.check.kits import kit
from unicoll.arrays import cuda as streams

__all__ = ["pinned", "staged"]

_TURNS = 5
_PATIENCE_S = 30.0


def pinned(nbytes: int) -> dict[str, float]:
    """Bytes per second of copies between pinned and device memory: the best of several turns."""
    cuda = streams.cuda()
    cuda.set_device(0)
    lanes = [cuda.create_stream(0), cuda.create_stream(0)]
    events = [cuda.create_event(0), cuda.create_event(0)]
    host = [cuda.pin(nbytes), cuda.pin(nbytes)]
    device = [cuda.allocate(0, nbytes), cuda.allocate(0, nbytes)]

    def down() -> None:
        cuda.copy(host[0], device[0], nbytes, lanes[0])

    def up() -> None:
        cuda.copy(device[1], host[1], nbytes, lanes[1])

    def timed(*copies: Callable[[], None]) -> float:
        best = float("inf")
        for _ in range(_TURNS):
            began = time.perf_counter()
            for copy in copies:
                copy()
            for event, lane in zip(events, lanes, strict=True):
                cuda.record(event, lane)
            for event in events:
                assert streams.await_event(cuda, event, time.monotonic() + _PATIENCE_S)
            best = min(best, time.perf_counter() - began)
        return nbytes * len(copies) / best

    found = {"to host": timed(down), "to device": timed(up), "both at once": timed(down, up)}
    for event, lane in zip(events, lanes, strict=True):
        cuda.destroy_event(event)
        cuda.destroy_stream(lane)
    for h, d in zip(host, device, strict=True):
        cuda.unpin(h)
        cuda.free(d)
    return found


def staged(name: str, nbytes: int) -> dict[str, Any]:
    """A broadcast from one rank's device memory to the other's, compared with one in host memory."""
    k = kit(name)
    count = nbytes // 4
    x, on_host = k.full(count, float(dist.get_rank())), np.full(count, float(dist.get_rank()), np.float32)

    def timed(call: Callable[[], Any]) -> float:
        best = float("inf")
        for _ in range(_TURNS):
            dist.barrier()
            began = time.perf_counter()
            call()
            k.synchronize()
            best = min(best, time.perf_counter() - began)
        return best

    device_s = timed(lambda: dist.broadcast(x, 0))
    host_s = timed(lambda: dist.broadcast(on_host, 0))
    assert (np.asarray(k.numpy(x)) == 0).all()
    return {
        "bytes": nbytes,
        "seconds": device_s,
        "host arrays, seconds": host_s,
        "bytes/s": nbytes / device_s,
    }
