"""What ranks with a simulated device do at debug level DETAIL."""

from __future__ import annotations

from typing import Any

import numpy as np

import unicoll as dist
from tests.simulated_nccl import arrays
from tests.support.outcomes import failure_of
from tests.support.worker import Failure


def differ(async_op: bool) -> list[Failure | None]:
    """Rank 1 makes another call than the others, each time in a group of its own."""
    odd = dist.get_rank() == 1

    def sizes(group: Any) -> Any:
        return dist.all_reduce(arrays.full(3 if odd else 2, 1.0), group=group, async_op=async_op)

    def operations(group: Any) -> Any:
        x = arrays.full(2, 1.0)
        if odd:
            return dist.broadcast(x, 0, group=group, async_op=async_op)
        return dist.all_reduce(x, group=group, async_op=async_op)

    def splits(group: Any) -> Any:
        n = dist.get_world_size()
        x, y = arrays.full(2 * n, 1.0), arrays.full(2 * n, 1.0)
        wanted = [3, 2, 1] if odd else [2, 2, 2]
        return dist.all_to_all_single(y, x, wanted, [2] * n, group=group, async_op=async_op)

    def batches(group: Any) -> Any:
        several = [arrays.full(2, 1.0) for _ in range(3 if odd else 2)]
        return dist.all_reduce_coalesced(several, group=group, async_op=async_op)

    outcomes = []
    for attempt in (sizes, operations, splits, batches):
        group = dist.new_group()
        outcomes.append(failure_of(lambda a=attempt, g=group: _finish(a(g))))  # type: ignore[misc]
        outcomes.append(failure_of(lambda g=group: dist.all_reduce(arrays.full(2, 1.0), group=g)))  # type: ignore[misc]
        dist.destroy_process_group(group)
    return outcomes


def late() -> Failure | None:
    """Rank 1 does not come."""
    group = dist.new_group()
    found = None
    if dist.get_rank() != 1:
        found = failure_of(lambda: dist.all_reduce(arrays.full(2, 1.0), group=group, timeout=0.5))
    dist.barrier()
    dist.destroy_process_group(group)
    return found


def equal() -> dict[str, Any]:
    """Calls that agree, blocking and in the background, in groups that are made in all ways."""
    me, n = dist.get_rank(), dist.get_world_size()
    found: dict[str, Any] = {"refused": []}
    first = dist.new_group()
    half = dist.split_group(split_ranks=[[0, 1], [2]])
    assert half is not None
    for name, group in (("world", None), ("first", first), ("half", half)):
        x = arrays.full(4, me + 1.0)
        work = dist.all_reduce(x, group=group, async_op=True)
        assert work is not None
        work.wait()
        dist.all_reduce_coalesced([x, arrays.full(2, 1.0)], group=group)
        found[name] = x.numpy().tolist()
    y, x = arrays.full(n, -1.0), arrays.full(n, float(me))
    dist.all_to_all_single(y, x)
    found["exchanged"] = y.numpy().tolist()
    whole = [arrays.full(2, -1.0) for _ in range(n)]
    if me == 0:
        whole[1] = arrays.full(2, -1, np.int32)  # the root refuses its list
    try:
        dist.gather(arrays.full(2, float(me)), whole if me == 0 else None, 0)
    except dist.DistArgumentError as e:
        found["refused"].append(str(e))
    whole[1] = arrays.full(2, -1.0)
    dist.gather(arrays.full(2, float(me)), whole if me == 0 else None, 0)
    if me == 0:
        found["gathered"] = [one.numpy().tolist() for one in whole]
    return found


def other_level() -> Failure | None:
    """Rank 1 alone has DETAIL when a group is made, and the others use it."""

    def attempt() -> None:
        if dist.get_rank() == 1:
            dist.set_debug_level(dist.DebugLevel.DETAIL)
        try:
            group = dist.new_group()
        finally:
            dist.set_debug_level(dist.DebugLevel.OFF)
        for _ in range(2):
            _finish(dist.all_reduce(arrays.full(2, 1.0), group=group, async_op=True))

    return failure_of(attempt)


def later_level(made_with: str, later: str) -> tuple[list[Any], Failure | None]:
    """Rank 1 alone changes its level after a group was made: results of the group, and what a wrong call raises."""
    try:
        dist.set_debug_level(dist.DebugLevel[made_with])
        group = dist.new_group()
        results = []
        for _ in range(2):
            x = arrays.full(2, 1.0)
            _finish(dist.all_reduce(x, group=group, async_op=True))
            results.append(x.numpy().tolist())
            if dist.get_rank() == 1:
                dist.set_debug_level(dist.DebugLevel[later])
        if made_with != "DETAIL":
            return results, None
        wrong = arrays.full(2 + dist.get_rank(), 1.0)
        return results, failure_of(lambda: dist.all_reduce(wrong, group=group))
    finally:
        dist.set_debug_level(dist.DebugLevel.OFF)


def _finish(work: Any) -> None:
    if work is not None:
        work.synchronize()
