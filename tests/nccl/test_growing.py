"""Groups that grow by ranks of the job, over NCCL and on the host."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import unicoll as dist
from tests.nccl import nccl_jobs as jobs
from tests.simulated_nccl.ranks import SimulatedJob
from tests.support.ranks import ProcessJob, joined
from tests.support.worker import leave


def run(size: int, job: Any, *args: object, kind: Any = SimulatedJob, **options: Any) -> list[Any]:
    """Run a function on the ranks of a new job, which must leave nothing behind."""
    with joined(size, kind, **options) as ranks:
        ranks.call(job, *args)
        values = ranks.results()
        ranks.call(leave)
        ranks.results()
        return values


@pytest.mark.every(2)
@pytest.mark.parametrize(
    ("version", "lazy", "growths"), [(23007, False, [1]), (22809, False, [0]), (23007, True, [])]
)
def test_a_group_grows_by_nccl_or_by_a_new_communicator(version: int, lazy: bool, growths: list[int]) -> None:
    for me, found in enumerate(run(4, jobs.grown, lazy, version=version)):
        assert found["ranks"] == [0, 1, 3, 2]
        assert found["sums"] == (10.0, 10.0)
        assert found["gathered"] == [0, 1, 3, 2]
        assert found["said"]
        if me < 2:
            assert found["growths"] == growths
            assert lazy or found["before"]  # the operation in flight has ended


@pytest.mark.parametrize("blocking", [True, False])
def test_non_blocking_communicators_grow(blocking: bool) -> None:
    assert run(3, jobs.grown_without_waiting, blocking) == [[6.0, 6.0]] * 3


def test_invalid_growth_is_refused() -> None:
    first, second, third = run(3, jobs.not_grown)
    for said in (first, second):
        assert "ranks [1] are in group 'group-1' already" in said[0]
        assert "ranks is empty" in said[1]
        assert "7 is not a rank of a world of 3" in said[2]
        assert said[3].startswith("GroupAbortedError")
    assert "this rank, 2, is not in ranks_to_add=[0]" in third[0]
    assert "this rank adds ranks [2, 0], but the group of ranks [0, 1] adds [2]" in third[1]
    assert "timed out on rank 2 after 0.2 s: no group was grown by ranks [2]" in third[2]


def on_the_host() -> list[float]:
    """Two ranks become three, over sockets and shared memory."""
    small: Any = dist.new_group([0, 2])
    larger = dist.grow_group([1], small)
    x = np.full(3, dist.get_rank() + 1.0)
    dist.all_reduce(x, group=larger)
    return [*map(float, x[:1]), dist.get_rank(larger)]


def test_a_group_of_host_arrays_grows() -> None:
    assert run(3, on_the_host, kind=ProcessJob) == [[6.0, 0], [6.0, 2], [6.0, 1]]
