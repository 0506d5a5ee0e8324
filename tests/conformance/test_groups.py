"""Groups: making, splitting, using several at once, ending, and joining the job again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import unicoll as dist
from tests.conformance import group_jobs as jobs
from tests.support.ranks import Pool, ProcessJob, end_cleanly
from tests.support.worker import enter

Pools = Callable[[int], Pool]


@pytest.mark.parametrize("size", [1, 3])
def test_the_world_knows_itself(size: int, pool: Pools) -> None:
    for rank, facts in enumerate(pool(size).run(jobs.facts)):
        assert facts["rank"] == (rank,) * 3
        assert facts["size"] == (size,) * 3
        assert facts["ranks"] == (list(range(size)),) * 3
        assert facts["backend"] == ("gloo",) * 3
        assert facts["initialized"]
        assert facts["count"] == 1
        assert f"rank {rank} of {size}" in facts["explained"]
        assert "gloo" in facts["explained"]


@pytest.mark.parametrize(
    ("members", "sort"),
    [([0, 1, 2, 3], True), ([1, 3], True), ([3, 0, 2], True), ([3, 0, 2], False), ([2], True)],
)
def test_a_group_of_some(members: list[int], sort: bool, pool: Pools) -> None:
    expected = ["member" if r in members else None for r in range(4)]
    assert pool(4).run(jobs.subset_of, members, sort) == expected


def test_a_group_that_only_its_members_make(pool: Pools) -> None:
    assert pool(4).run(jobs.local_group, [1, 2]) == [None, (3.0, 3.0), (3.0, 3.0), None]


def test_subgroups(pool: Pools) -> None:
    pool(4).run(jobs.subgroups)


def test_splits(pool: Pools) -> None:
    pool(4).run(jobs.splits)


def test_pickled_objects(pool: Pools) -> None:
    pool(3).run(jobs.pickled_objects)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_overlapping_groups_work_at_the_same_time(size: int, pool: Pools) -> None:
    assert pool(size).run(jobs.concurrent_groups, 25) == [[]] * size


def test_groups_shrink_by_ranks_of_theirs(pool: Pools) -> None:
    for rank, (empty, twice, absent, mine, *groups, world) in enumerate(pool(4).run(jobs.shrunk)):
        assert (empty, twice) == ("ranks is empty", "ranks [0, 0] has duplicates")
        assert absent == "9 is not a rank of a world of 4"
        assert "the caller is among the excluded" in mine
        assert world == 6.0
        if rank == 1:
            assert groups == []
            continue
        assert groups[0] == ((0, 2, 3), (0, 2, 3).index(rank), 5.0)
        assert groups[1:] == ([((0, 2), 2.0)] if rank != 3 else [])


def test_fifty_groups(pool: Pools) -> None:
    first = pool(3).run(jobs.many_groups, 50)
    second = pool(3).run(jobs.many_groups, 50)
    assert max(map(sum, zip(second, [-n for n in first], strict=True))) <= 0, "threads of groups live on"


def test_a_second_init_is_refused(pool: Pools) -> None:
    for failure in pool(2).run(jobs.twice_refused):
        assert failure is not None
        assert failure.type == "DistArgumentError"
        assert "exists already" in failure.message


def test_an_end_without_a_job_is_refused() -> None:
    with pytest.raises(dist.NotInitializedError, match="destroy_process_group: there is no default"):
        dist.destroy_process_group()


@pytest.mark.every(2)
@pytest.mark.parametrize("join", ["file", "tcp", "env"])
@pytest.mark.parametrize("size", [1, 3])
def test_leaving_and_joining_five_times(join: str, size: int, tmp_path: Path) -> None:
    with ProcessJob(size, join=join) as job:
        job.call(enter)
        job.results()
        job.call(jobs.again, 5, str(tmp_path))
        job.results()
        end_cleanly(job)
