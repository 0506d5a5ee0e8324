"""Debug level DETAIL over NCCL: calls are compared between the ranks before NCCL gets them."""

from __future__ import annotations

import pytest

from tests.nccl import call_check_jobs as jobs
from tests.simulated_nccl.ranks import run

DETAIL = {"UNICOLL_DEBUG": "DETAIL", "UNICOLL_LOG_LEVEL": "warning"}


@pytest.mark.parametrize("async_op", [False, True])
def test_calls_that_differ_raise_the_same_error_on_all_ranks(async_op: bool) -> None:
    failures = run(3, jobs.differ, async_op, env=DETAIL)
    for outcomes in zip(*failures, strict=True):
        assert {one.type if one else "" for one in outcomes} == {"CollectiveMismatchError"}
        assert len({one.message for one in outcomes}) == 1
    sizes, _, operations, _, splits, _, batches, _ = [one.message for one in failures[0]]
    assert "rank 0: all_reduce(float64[2] on cuda:0, SUM) #1 at " in sizes
    assert "rank 1: all_reduce(float64[3] on cuda:1, SUM) #1 at " in sizes
    assert sizes.count("call_check_jobs.py:") == 3
    assert "rank 1: broadcast(float64[2] on cuda:1, root=0) #1 at " in operations
    assert "rank 0 sends 2 elements to rank 1, which has room for 3" in splits
    assert "different collectives" in batches


def test_a_rank_that_does_not_come_is_named() -> None:
    first, _, third = run(3, jobs.late, env=DETAIL)
    for one in (first, third):
        assert one.type == "OperationTimeoutError"
        assert "missing: rank 1" in one.message


@pytest.mark.parametrize("backend", ["cpu:gloo,cuda:nccl", "nccl", "cuda:nccl"])
def test_calls_that_agree(backend: str) -> None:
    for me, found in enumerate(run(3, jobs.equal, backend=backend, bound=True, env=DETAIL)):
        assert found["world"] == found["first"] == [18.0] * 4
        assert found["half"] == ([6.0] * 4 if me < 2 else [3.0] * 4)
        assert found["exchanged"] == [0.0, 1.0, 2.0]
        assert len(found["refused"]) == 1
        if me != 0:
            assert "rank 0, the root, refused its call" in found["refused"][0]
        else:
            assert found["gathered"] == [[0.0] * 2, [1.0] * 2, [2.0] * 2]


@pytest.mark.every(2)
@pytest.mark.parametrize("backend", ["cpu:gloo,cuda:nccl", "nccl"])
@pytest.mark.parametrize("bound", [False, True])
def test_a_level_that_differs_between_ranks_is_refused_on_all(backend: str, bound: bool) -> None:
    for failure in run(3, jobs.other_level, backend=backend, bound=bound):
        assert failure is not None
        assert failure.type == "DistArgumentError"
        assert "(rank 0: OFF, rank 1: DETAIL, rank 2: OFF)" in failure.message


@pytest.mark.parametrize(("made_with", "later"), [("OFF", "DETAIL"), ("DETAIL", "OFF")])
def test_a_later_level_of_one_rank_leaves_the_comparison_as_it_was(made_with: str, later: str) -> None:
    env = {"UNICOLL_LOG_LEVEL": "warning"}
    for results, failure in run(2, jobs.later_level, made_with, later, env=env):
        assert results == [[2.0] * 2] * 2
        assert (failure.type if failure else "") == (
            "CollectiveMismatchError" if made_with == "DETAIL" else ""
        )
