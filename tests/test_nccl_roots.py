"""Large jobs start NCCL through several unique ids, which several ranks make."""

from __future__ import annotations

import nccl_jobs as jobs
import pytest
from simulated_ranks import run

from nccl_comm.meeting import RANKS_PER_ROOT, roots
from unicoll import settings


def _has_root(rank: int, size: int, count: int) -> bool:
    """As NCCL's user guide has it."""
    more, each = size % count, size // count
    limit = more * (each + 1)
    return not rank % (each + 1) if rank < limit else not (rank - limit) % each


def test_the_ranks_that_make_ids_are_those_that_nccl_takes_for_roots() -> None:
    assert roots(7, 3) == [0, 3, 5]
    for size in range(1, 40):
        for count in range(1, size + 1):
            assert roots(size, count) == [r for r in range(size) if _has_root(r, size, count)]


def test_up_to_128_ranks_there_is_one() -> None:
    assert settings.number(RANKS_PER_ROOT, {}) == 128
    assert run(2, jobs.met_through_several) == [(1, [3.0, 3.0])] * 2


@pytest.mark.parametrize(("version", "ids"), [(23007, 3), (22203, 1)])
def test_above_there_are_more_where_nccl_takes_them(version: int, ids: int) -> None:
    found = run(5, jobs.met_through_several, version=version, env={RANKS_PER_ROOT: "2"})
    assert found == [(ids, [15.0, 15.0])] * 5


def test_all_are_told_which_rank_could_not_make_one() -> None:
    for said in run(3, jobs.a_root_fails, 2, env={RANKS_PER_ROOT: "2"}):
        assert said.startswith("DistBackendError: rank 2 ")
        assert "could not start NCCL: ncclGetUniqueId" in said
        assert "ncclSystemError" in said
