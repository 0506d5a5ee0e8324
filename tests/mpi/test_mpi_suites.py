"""Tests of every backend in addition to the conformance suite, on ranks under mpirun: messages, groups, asynchronous
operations, and calls that differ between ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from math import nan

import pytest

from tests.conformance import group_jobs, matching_jobs, p2p_jobs
from tests.mpi.mpi_ranks import MpiJob, library, unavailable_reason
from tests.support.ranks import Pool, pools
from tests.unit import subclass_jobs

if unavailable_reason():
    pytest.skip(unavailable_reason(), allow_module_level=True)

from collections.abc import Sequence
from functools import reduce
from typing import Any

import numpy as np

import unicoll as dist
from tests.conformance.test_async import *  # noqa: F403
from tests.conformance.test_matching import (  # noqa: F401
    test_a_timeout_names_the_tags_that_have_come,
    test_matching,
    test_messages_that_are_longer_than_the_array_are_refused,
    test_parts_by_color_are_ordered_by_key,
    test_waitany_returns_them_in_the_order_of_their_ends,
)
from tests.conformance.test_p2p import *  # noqa: F403
from tests.unit.test_subclasses import test_an_argument_error_is_raised_on_one_rank_only  # noqa: F401

OPS = ("all_reduce", "reduce", "reduce_scatter", "reduce_scatter_tensor")


def contributions(size: int, dtype: str, count: int, odd: float | None, where: Sequence[int]) -> list[Any]:
    """``size * count`` random elements of each rank, some of them 0.0, or ``odd`` on the ranks ``where``."""
    drawn = [np.random.default_rng(r).uniform(-4, 4, size * count).astype(dtype) for r in range(size)]
    for rank, x in enumerate(drawn):
        x[:: 7 + rank] = 0.0
        if odd is not None and rank in where:
            x[::7] = odd
    return drawn


def extremes(op: str, dtype: str, count: int, odd: float | None, where: Sequence[int]) -> list[str]:
    """Compare MIN and MAX bitwise with a reduction in rank order; returns the differences. All NaNs count as equal."""
    rank, size = dist.get_rank(), dist.get_world_size()
    inputs = contributions(size, dtype, count, odd, where)
    wrong = []
    for name, fold in (("MIN", np.minimum), ("MAX", np.maximum)):
        expected, got = reduce(fold, inputs), inputs[rank].copy()
        kind = getattr(dist.ReduceOp, name)
        if op == "all_reduce":
            dist.all_reduce(got, op=kind)
        elif op == "reduce":
            dist.reduce(got, 1, op=kind)
            if rank != 1:
                continue
        else:
            out = np.empty(count, dtype)
            if op == "reduce_scatter":
                dist.reduce_scatter(out, np.split(got, size), op=kind)
            else:
                dist.reduce_scatter_tensor(out, got, op=kind)
            got, expected = out, expected[rank * count : (rank + 1) * count]
        same = (got.view(f"V{got.itemsize}") == expected.view(f"V{got.itemsize}")) | (
            np.isnan(got) & np.isnan(expected)
        )
        if not same.all():
            i = int(np.flatnonzero(~same)[0])
            wrong.append(f"{op} {name}: element {i} is {got[i]!r}, expected {expected[i]!r}")
    return wrong


# --- tests ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pool() -> Iterator[Callable[[int], Pool]]:  # type: ignore[no-redef]
    with pools(partial(MpiJob, backend="mpi", warm_up=True)) as made:
        yield made


@pytest.fixture(scope="module")
def hosts() -> Iterator[Callable[[int], Pool]]:
    """Ranks that use MPI's transport for other hosts."""
    with pools(partial(MpiJob, backend="mpi", env=library().between_hosts, warm_up=True)) as made:
        yield made


@pytest.mark.parametrize(
    ("size", "job", "arguments"),
    [
        (2, p2p_jobs.farm, (2000,)),
        (4, p2p_jobs.farm, (2000,)),
        (2, p2p_jobs.every_type, ()),
        (2, p2p_jobs.tags_out_of_order, (20_000,)),
        (2, p2p_jobs.posted_before_sent, (50_000,)),
        (2, p2p_jobs.both_send_first, (64,)),
        (2, p2p_jobs.unexpected, (1_000_000,)),
        (4, p2p_jobs.from_any_source, (100, True)),
        (4, p2p_jobs.batches, (300_000,)),
        (4, p2p_jobs.while_collectives_run, (60,)),
        (4, group_jobs.splits, ()),
        (2, group_jobs.very_uneven_sizes, (70_010,)),
        (3, group_jobs.very_uneven_sizes, (70_010,)),
        (2, matching_jobs.statuses, (300_000,)),
        (3, matching_jobs.probes, (300_000,)),
        (2, matching_jobs.polled, (10,)),
        (2, matching_jobs.to_self, (4,)),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_as_between_hosts(
    size: int, job: Callable[..., object], arguments: tuple[object, ...], hosts: Callable[[int], Pool]
) -> None:
    hosts(size).run(job, *arguments)


def test_random_messages_as_between_hosts(hosts: Callable[[int], Pool], seed: int) -> None:
    for i in range(20):
        hosts(4).run(p2p_jobs.random_messages, f"{seed} {i}", 100)


def test_a_failure_before_sending_is_raised_on_one_rank_only(pool: Callable[[int], Pool]) -> None:
    pool(2).run(subclass_jobs.failures_inside)


@pytest.mark.parametrize("size", [1, 3])
def test_rank_size_and_backend_of_the_world(size: int, pool: Callable[[int], Pool]) -> None:
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
    """Arrays that are large enough for MPI's own operations, with a special value on no rank, on one and on all."""
    for op in OPS:
        for dtype in ("float32", "float64"):
            for odd, where in (
                (None, ()),
                (nan, (1,)),
                (-0.0, (0,)),
                (nan, range(size)),
                (-0.0, range(size)),
            ):
                output = pool(size).run(extremes, op, dtype, 10_001, odd, where)
                assert output == [[]] * size, (op, dtype, odd, where)
