"""What every backend is tested for beside the conformance suite, on ranks that mpirun starts: messages, groups,
operations in the background, and calls that differ between ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from math import nan

import extreme_jobs
import group_jobs
import pytest
import subclass_jobs
from mpi_ranks import MpiJob, why_not

from unicoll.testing.ranks import Pool, pools

if why_not():
    pytest.skip(why_not(), allow_module_level=True)

from test_async import *  # noqa: F403
from test_groups import (  # noqa: F401
    test_a_group_of_some,
    test_a_group_that_only_its_members_make,
    test_a_second_init_is_refused,
    test_fifty_groups,
    test_overlapping_groups_work_at_the_same_time,
    test_splits,
    test_subgroups,
)
from test_mismatch import (  # noqa: F401
    test_a_list_that_does_not_fit_the_others_arrays,
    test_every_rank_has_another_root,
    test_ranks_that_call_differently_raise_the_same_error,
    test_split_sizes_that_do_not_fit_each_other,
    test_two_calls_in_another_order,
)
from test_p2p import *  # noqa: F403
from test_refusals import (  # noqa: F401
    test_a_refused_call_that_the_others_do_not_make_is_a_mismatch,
    test_all_ranks_raise_and_the_group_goes_on,
    test_refusals_take_their_place_in_the_order,
)
from test_subclasses import test_an_error_in_the_arguments_is_one_ranks_alone  # noqa: F401


@pytest.fixture(scope="module")
def pool() -> Iterator[Callable[[int], Pool]]:  # type: ignore[no-redef]
    with pools(partial(MpiJob, backend="mpi", rehearse=True)) as made:
        yield made


def test_a_failure_before_anything_was_sent_is_one_ranks_alone(pool: Callable[[int], Pool]) -> None:
    pool(2).run(subclass_jobs.failures_inside)


@pytest.mark.parametrize("size", [1, 3])
def test_the_world_knows_itself(size: int, pool: Callable[[int], Pool]) -> None:
    for rank, facts in enumerate(pool(size).run(group_jobs.facts)):
        assert facts["rank"] == (rank,) * 3
        assert facts["size"] == (size,) * 3
        assert facts["ranks"] == (list(range(size)),) * 3
        assert facts["backend"] == ("mpi",) * 3
        assert facts["initialized"]
        assert facts["count"] == 1
        assert f"rank {rank} of {size}" in facts["explained"]
        assert "mpi" in facts["explained"]


@pytest.mark.parametrize("size", [2, 3])
def test_min_and_max_keep_nan_and_the_sign_of_zero(size: int, pool: Callable[[int], Pool]) -> None:
    """Arrays that are large enough for MPI's own operations, with each oddity on no rank, on one and on all."""
    for op in extreme_jobs.OPS:
        for dtype in ("float32", "float64"):
            for odd, where in ((None, ()), (nan, (1,)), (-0.0, (0,)), (nan, range(size)), (-0.0, range(size))):
                said = pool(size).run(extreme_jobs.extremes, op, dtype, 10_001, odd, where)
                assert said == [[]] * size, (op, dtype, odd, where)
