"""Functions that ranks run in the stage on faults; they return errors."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np

import unicoll as dist
from tests.gpu.check.kits import kit

_COUNT = 1 << 16
_kept: list[Any] = []
"""What lives as long as the program."""


def _outcome_of(call: Callable[[], Any]) -> dict[str, Any]:
    """The end of a call: the error's name and text, or the result, and the seconds it took."""
    began = time.monotonic()
    error, message, value = None, "", None
    try:
        value = call()
    except dist.DistError as e:
        error, message = type(e).__name__, str(e)
    return {"error": error, "message": message, "value": value, "seconds": time.monotonic() - began}


def call_behind_a_kernel(name: str, timeout: float, seconds: float) -> dict[str, Any]:
    """An all_reduce that begins after a kernel of some seconds."""
    kit(name).delay(seconds)
    return call_alone(name, timeout)


def destroy_behind_a_kernel(name: str, seconds: float) -> dict[str, Any]:
    """The sum of an all_reduce behind a kernel of some seconds, whose group is destroyed at once."""
    k = kit(name)
    group: Any = dist.new_group(list(range(dist.get_world_size())))
    _total(name, group)
    k.delay(seconds)
    x = k.full(_COUNT, float(dist.get_rank() + 1))
    dist.all_reduce(x, group=group)
    began = time.monotonic()
    dist.destroy_process_group(group)
    return {"sum": float(np.asarray(k.numpy(x))[-1]), "seconds": time.monotonic() - began}


def call_alone(name: str, timeout: float) -> dict[str, Any]:
    """An all_reduce in which not all ranks take part."""
    x = kit(name).full(_COUNT, 1.0)

    def call() -> None:
        work = dist.all_reduce(x, async_op=True, timeout=timeout)
        assert work is not None
        work.wait()
        work.synchronize()

    return _outcome_of(call)


def abort(reason: str) -> None:
    """End the default group's operations on all ranks."""
    group = dist.group.WORLD
    assert group is not None
    group.abort(reason)


def _total(name: str, group: Any = None) -> float:
    k = kit(name)
    x = k.full(8, float(dist.get_rank() + 1))
    dist.all_reduce(x, group=group)
    return float(np.asarray(k.numpy(x))[0])


def go_on_without(name: str, excluded: list[int]) -> dict[str, Any]:
    """A smaller group, and an operation in it."""
    group: Any = dist.shrink_group(excluded)
    found = _total(name, group)
    dist.destroy_process_group(group)
    return {"sum": found}


def leave_work_behind(name: str) -> None:
    """Operations in flight, behind a late kernel, without a wait; the program ends meanwhile."""
    k = kit(name)
    k.delay(0.3)
    for _ in range(4):
        work = dist.all_reduce(k.full(_COUNT, 1.0), async_op=True)
        assert work is not None
        work.wait()


def leave_a_graph_behind(name: str) -> None:
    """A graph that has recorded an operation, and lives as long as the program."""
    k = kit(name)
    x = k.full(_COUNT, 1.0)
    stream = k.stream()
    k.synchronize()
    _kept.append((x, k.capture(stream, lambda: dist.all_reduce(x))))


def first_operation(name: str) -> dict[str, Any]:
    """An operation that connects the ranks."""
    return _outcome_of(lambda: _total(name))


def bound(name: str) -> dict[str, Any]:
    """A barrier before any array, a group split from the world, and operations in both."""
    began = time.monotonic()
    dist.barrier()
    group: Any = dist.new_group(list(range(dist.get_world_size())))
    dist.barrier(group=group)
    took = time.monotonic() - began
    found = _total(name, group)
    assert found == _total(name)
    dist.destroy_process_group(group)
    return {"sum": found, "seconds": took}
