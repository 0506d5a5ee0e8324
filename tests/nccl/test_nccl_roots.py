"""Large jobs start NCCL through several unique ids, which several ranks make."""

from __future__ import annotations

import pytest

from nccl_comm.communicators.unique_id import RANKS_PER_ROOT, roots
from tests.nccl import nccl_jobs as jobs
from tests.simulated_nccl.ranks import run
from unicoll.net import environment


def _has_root(rank: int, size: int, count: int) -> bool:
    """The rule of NCCL's user guide."""
    more, each = size % count, size // count
    limit = more * (each + 1)
    return not rank % (each + 1) if rank < limit else not (rank - limit) % each


def test_the_ranks_that_make_ids_are_nccls_roots() -> None:
    assert roots(7, 3) == [0, 3, 5]
    for size in range(1, 40):
        for count in range(1, size + 1):
            assert roots(size, count) == [r for r in range(size) if _has_root(r, size, count)]


def test_up_to_128_ranks_use_one_id() -> None:
    assert environment.number(RANKS_PER_ROOT, {}) == 128
    assert run(2, jobs.connected_by_several_ids) == [(1, [3.0, 3.0])] * 2


@pytest.mark.parametrize(("version", "ids"), [(23007, 3), (22203, 1)])
def test_more_ranks_use_several_ids_if_nccl_has_them(version: int, ids: int) -> None:
    found = run(5, jobs.connected_by_several_ids, version=version, env={RANKS_PER_ROOT: "2"})
    assert found == [(ids, [15.0, 15.0])] * 5


def test_all_ranks_learn_which_rank_could_not_make_an_id() -> None:
    for said in run(3, jobs.a_root_fails, 2, env={RANKS_PER_ROOT: "2"}):
        assert said.startswith("DistBackendError: rank 2 ")
        assert "could not start NCCL: ncclGetUniqueId" in said
        assert "ncclSystemError" in said
