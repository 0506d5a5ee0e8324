"""Debug level DETAIL over NCCL: calls are compared between the ranks before NCCL gets them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

import unicoll as dist
from tests.nccl.nccl_jobs import error_of
from tests.simulated_nccl import arrays
from tests.simulated_nccl.ranks import run
from tests.support.on_ranks import on_ranks

DETAIL = {"UNICOLL_DEBUG": "DETAIL", "UNICOLL_LOG_LEVEL": "warning"}


def _finish(work: Any) -> None:
    if work is not None:
        work.synchronize()


def _sum(count: int = 2, group: Any = None, async_op: bool = True) -> list[float]:
    """The result of an all_reduce."""
    x = arrays.full(count, 1.0)
    _finish(dist.all_reduce(x, group=group, async_op=async_op))
    return x.numpy().tolist()


def differ(async_op: bool) -> list[str]:
    """Rank 1 makes another call than the others, each time in a group of its own, and then the same call as they."""
    odd, n = dist.get_rank() == 1, dist.get_world_size()
    x = arrays.full(2, 1.0)

    def operations(**more: Any) -> Any:
        return dist.broadcast(x, 0, **more) if odd else dist.all_reduce(x, **more)

    def splits(**more: Any) -> Any:
        y, z = arrays.full(2 * n, 1.0), arrays.full(2 * n, 1.0)
        return dist.all_to_all_single(y, z, [3, 2, 1] if odd else [2, 2, 2], [2] * n, **more)

    def batches(**more: Any) -> Any:
        return dist.all_reduce_coalesced([arrays.full(2, 1.0) for _ in range(3 if odd else 2)], **more)

    attempts: list[Callable[..., Any]] = [
        lambda **more: dist.all_reduce(arrays.full(3 if odd else 2, 1.0), **more),
        operations,
        splits,
        batches,
    ]
    found = []
    for attempt in attempts:
        group = dist.new_group()
        found.append(error_of(lambda a=attempt, g=group: _finish(a(group=g, async_op=async_op))))
        found.append(error_of(lambda g=group: _sum(group=g, async_op=False)))
        dist.destroy_process_group(group)
    return found


@pytest.mark.parametrize("async_op", [False, True])
def test_calls_that_differ_raise_the_same_error_on_all_ranks(async_op: bool) -> None:
    first, second, third = run(3, differ, async_op, env=DETAIL)
    assert first == second == third
    assert all(text.startswith("CollectiveMismatchError") for text in first)
    sizes, _, operations, _, splits, _, batches, _ = first
    assert "rank 0: all_reduce(float64[2] on cuda:0, SUM) #1 at " in sizes
    assert "rank 1: all_reduce(float64[3] on cuda:1, SUM) #1 at " in sizes
    assert sizes.count("test_call_checks.py:") == 3
    assert "rank 1: broadcast(float64[2] on cuda:1, root=0) #1 at " in operations
    assert "rank 0 sends 2 elements to rank 1, which has room for 3" in splits
    assert "different collectives" in batches


@on_ranks(3, start=run, env=DETAIL)
def test_a_rank_that_does_not_come_is_named() -> None:
    group = dist.new_group()
    x = arrays.full(2, 1.0)
    if dist.get_rank() != 1:
        said = error_of(lambda: dist.all_reduce(x, group=group, timeout=0.5))
        assert said.startswith("OperationTimeoutError")
        assert "missing: rank 1" in said
    dist.barrier()
    dist.destroy_process_group(group)


@pytest.mark.parametrize("backend", ["cpu:gloo,cuda:nccl", "nccl", "cuda:nccl"])
@on_ranks(3, start=partial(run, bound=True), env=DETAIL, options=["backend"])
def test_calls_that_agree(backend: str) -> None:
    """Blocking and in the background, in groups that are made in all ways; and a refused one."""
    me, n = dist.get_rank(), dist.get_world_size()
    sums = []
    for group in (None, dist.new_group(), dist.split_group(split_ranks=[[0, 1], [2]])):
        x = arrays.full(4, me + 1.0)
        dist.all_reduce(x, group=group, async_op=True).wait()
        dist.all_reduce_coalesced([x, arrays.full(2, 1.0)], group=group)
        sums.append(x.numpy().tolist())
    assert sums == [[18.0] * 4, [18.0] * 4, ([6.0] * 4 if me < 2 else [3.0] * 4)]
    y, x = arrays.full(n, -1.0), arrays.full(n, float(me))
    dist.all_to_all_single(y, x)
    assert y.numpy().tolist() == [0.0, 1.0, 2.0]
    whole = [arrays.full(2, -1.0) for _ in range(n)]
    wrong = [whole[0], arrays.full(2, -1, np.int32), whole[2]]  # the root refuses its list
    refused = error_of(lambda: dist.gather(arrays.full(2, 1.0), wrong if me == 0 else None, 0))
    assert refused.startswith("DistTypeError" if me == 0 else "DistArgumentError: ")
    assert me == 0 or "rank 0, the root, refused its call" in refused
    dist.gather(arrays.full(2, float(me)), whole if me == 0 else None, 0)
    if me == 0:
        assert [one.numpy().tolist() for one in whole] == [[0.0] * 2, [1.0] * 2, [2.0] * 2]


@pytest.mark.every(n=2)
@pytest.mark.parametrize("backend", ["cpu:gloo,cuda:nccl", "nccl"])
@pytest.mark.parametrize("bound", [False, True])
@on_ranks(3, start=run, options=["backend", "bound"])
def test_a_level_that_differs_between_ranks_is_refused_on_all(backend: str, bound: bool) -> None:
    """Rank 1 alone has DETAIL when a group is made, and the others use it."""
    if dist.get_rank() == 1:
        dist.set_debug_level(dist.DebugLevel.DETAIL)

    def attempt() -> None:
        group = dist.new_group()
        dist.set_debug_level(dist.DebugLevel.OFF)
        for _ in range(2):
            _sum(group=group)

    said = error_of(attempt)
    dist.set_debug_level(dist.DebugLevel.OFF)
    assert said.startswith("DistArgumentError")
    assert "(rank 0: OFF, rank 1: DETAIL, rank 2: OFF)" in said


@pytest.mark.parametrize(
    ("made_with", "later", "error"), [("OFF", "DETAIL", ""), ("DETAIL", "OFF", "CollectiveMismatchError")]
)
@on_ranks(2, start=run, env={"UNICOLL_LOG_LEVEL": "warning"})
def test_a_later_level_of_one_rank_leaves_the_comparison_as_it_was(
    made_with: str, later: str, error: str
) -> None:
    dist.set_debug_level(dist.DebugLevel[made_with])
    group = dist.new_group()
    assert _sum(group=group) == [2.0] * 2
    if dist.get_rank() == 1:
        dist.set_debug_level(dist.DebugLevel[later])
    assert _sum(group=group) == [2.0] * 2
    if error:
        said = error_of(lambda: _sum(2 + dist.get_rank(), group, async_op=False))
        assert said.startswith(f"{error}: ")
    dist.set_debug_level(dist.DebugLevel.OFF)
