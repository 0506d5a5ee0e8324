"""A trace of asynchronous operations by torch's profiler: all calls of the CUDA runtime, by name."""

from __future__ import annotations

import importlib
import re
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import unicoll as dist
from tests.gpu.check.kits import kit

__all__ = ["asynchronous_stretch", "traced", "waiting"]

_STEPS = 20


def asynchronous_stretch() -> dict[str, Any] | str:
    """Asynchronous operations alternating with kernels, and one synchronization at the end."""
    torch: Any = importlib.import_module("torch")
    k = kit("torch")
    arrays = [k.full(1 << 16, 1.0) for _ in range(4)]

    def steps() -> None:
        for _ in range(_STEPS):
            works = [dist.all_reduce(x, op=dist.ReduceOp.AVG, async_op=True) for x in arrays]
            for work, x in zip(works, arrays, strict=True):
                assert work is not None
                work.wait()
                x.mul_(1.0)

    steps()
    k.synchronize()
    calls = traced(torch, steps)[0]
    k.synchronize()
    if not any(name.startswith(("cuda", "cu")) for name in calls):
        return "torch's profiler sees no calls of CUDA here"
    return {"steps": _STEPS, "operations": 4 * _STEPS, "calls": dict(calls), "waiting": waiting(calls)}


def traced(torch: Any, body: Callable[[], object]) -> tuple[Counter[str], list[Any]]:
    """Calls of the CUDA runtime and driver by name, without the profiler's own; and all events."""
    own = _calls(_profiled(torch, lambda: None))
    events = _profiled(torch, body)
    return _calls(events) - own, events


def _profiled(torch: Any, body: Callable[[], object]) -> list[Any]:
    profiler = torch.profiler
    with profiler.profile(activities=[profiler.ProfilerActivity.CPU, profiler.ProfilerActivity.CUDA]) as made:
        body()
    return list(made.events())


def _calls(events: Iterable[Any]) -> Counter[str]:
    return Counter(e.name for e in events if re.match("cuda|cu[A-Z]", e.name))


def waiting(calls: Counter[str]) -> dict[str, int]:
    """The calls that wait for the device."""
    return {name: n for name, n in calls.items() if name.endswith("Synchronize")}
