"""Deterministic reductions and exact sums: the same bits for every size, transport and order of arrival."""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest

import unicoll as dist
from tests.support.on_ranks import on_ranks
from tests.support.ranks import run_ranks
from unicoll.calls.options import as_options

COUNTS = (37, 20_011, 150_011)
DTYPES = ("float16", "float32", "float64", "complex64")
TCP = {"UNICOLL_TRANSPORT": "tcp"}


@cache
def _numbers(rank: int) -> Any:
    rng = np.random.default_rng(rank)
    return rng.standard_normal(max(COUNTS)) * 10.0 ** rng.integers(-3, 4, max(COUNTS))


def contribution(rank: int, count: int, dtype: str) -> Any:
    """Numbers of very different magnitudes: their sum depends on the order. Shorter arrays are prefixes of longer."""
    return _numbers(rank)[:count].astype(dtype)


def digests(
    options: dict[str, Any] | None, late: float = 0.0, order: tuple[int, ...] | None = None
) -> dict[str, str]:
    """Digests of the results of reductions of several sizes; equal on all ranks.

    Rank r contributes what ``order[r]`` contributes without ``order``.
    """
    group = dist.new_group(pg_options=options)
    rank, size = dist.get_rank(), dist.get_world_size()
    number = rank if order is None else order[rank]
    found = {}
    for dtype in DTYPES:
        for op in ("SUM", "AVG", "PRODUCT") if dtype == "float32" and order is None else ("SUM", "AVG"):
            whole = {}
            for count in COUNTS:
                time.sleep(late * (rank == count % size))
                x, y, z = (
                    contribution(number, count, dtype),
                    contribution(number, count, dtype),
                    np.zeros(count, dtype),
                )
                dist.all_reduce(x, op=op, group=group)
                whole[count] = x
                dist.reduce(y, 1, op=op, group=group)
                assert rank != 1 or y.tobytes() == x.tobytes()
                dist.reduce_scatter(z, [contribution(number, count, dtype)] * size, op=op, group=group)
                assert z.tobytes() == x.tobytes()
            for count in COUNTS:  # an element's bits do not depend on the size of its array
                assert whole[count].tobytes() == whole[max(COUNTS)][:count].tobytes()
            found[f"{dtype} {op}"] = hashlib.sha256(whole[max(COUNTS)].tobytes()).hexdigest()
    return found


@pytest.mark.every(n=4)
@pytest.mark.parametrize("size", [2, 3, 5])
def test_every_transport_gives_the_bits_of_the_reduction_in_rank_order(size: int) -> None:
    envs = [TCP, {"UNICOLL_TRANSPORT": "shm"}, {"UNICOLL_TRANSPORT": "hierarchical"}]
    found = [run_ranks(size, digests, {"deterministic": True}, env=env) for env in envs]
    found.append(run_ranks(size, digests, None, env={**TCP, "UNICOLL_DETERMINISTIC": "1"}))
    found.append(run_ranks(size, digests, {"deterministic": True}, 0.02, env=TCP))
    first = found[0][0]
    assert found == [[first] * size] * len(found)
    parts = [contribution(r, max(COUNTS), "float64") for r in range(size)]
    assert first["float64 SUM"] == hashlib.sha256(sum(parts[1:], parts[0]).tobytes()).hexdigest()
    if size > 2:  # else the order would not matter
        assert (sum(parts[1:], parts[0]) != sum(parts[-2::-1], parts[-1])).any()


@pytest.mark.every(n=0)
@pytest.mark.parametrize("size", [2, 3, 5])
def test_exact_sums_have_the_same_bits_in_every_order_and_over_every_transport(size: int) -> None:
    envs = [TCP, {"UNICOLL_TRANSPORT": "shm"}, {"UNICOLL_TRANSPORT": "hierarchical"}]
    order = tuple(range(size))
    found = [
        run_ranks(size, digests, {"sum": "exact"}, 0.0, order[i:] + order[:i], env=env)
        for i, env in enumerate(envs)
    ]
    found.append(run_ranks(size, digests, None, 0.0, order[::-1], env={**TCP, "UNICOLL_EXACT_SUM": "1"}))
    first = found[0][0]
    assert found == [[first] * size] * len(found)
    columns = zip(*(contribution(r, max(COUNTS), "float64").tolist() for r in range(size)), strict=True)
    sums = np.array([math.fsum(column) for column in columns])
    assert first["float64 SUM"] == hashlib.sha256(sums.tobytes()).hexdigest()


CANCELLING = (2.0**60, 1.0, -(2.0**60))
"""Their exact sum is 1; with every addition rounded it is 0."""


@on_ranks(3)
def test_the_option_of_a_group_and_of_a_call_for_exact_sums() -> None:
    rank, world = dist.get_rank(), dist.group.WORLD
    exact: Any = dist.new_group(pg_options=dist.Options(sum="exact"))

    def result(group: Any, op: Any = "SUM", dtype: str = "float64") -> Any:
        x = np.array([CANCELLING[rank]] * 5, dtype)
        dist.all_reduce(x, op=op, group=group)
        return x[0]

    for group in (exact, world.using(exact=True), dist.new_group(pg_options={"sum": "exact"})):
        assert result(group) == result(group, dtype="float32") == result(group, dtype="complex128") == 1
        assert result(group, "AVG") == 1 / 3
        works = [dist.all_reduce(np.array([CANCELLING[rank]]), group=group, async_op=True) for _ in range(3)]
        assert all(work.wait() for work in works)
        arrays = [np.array([CANCELLING[rank]]), np.array([CANCELLING[rank]] * 3)]
        dist.all_reduce_coalesced(arrays, group=group)
        assert [x.tolist() for x in arrays] == [[1], [1, 1, 1]]
    for group in (world, exact.using(exact=False), dist.new_group(pg_options={"sum": "plain"})):
        assert result(group) == 0
    assert result(world, dist.ReduceOp.EXACT_SUM) == 1
    # what is exact already, or has no exact variant
    for group in (exact, world.using(exact=True)):
        x = np.array([rank], np.int32)
        dist.all_reduce(x, group=group)
        assert x[0] == 3
        assert result(group, "MAX") == 2.0**60
    x = np.ones(4)
    dist.scan(x, group=exact)
    assert x[0] == rank + 1


def _scanned(group: Any) -> None:
    dist.scan(np.ones(3), group=group)


def _multiplied(group: Any) -> None:
    dist.all_reduce(np.ones(3), op="PRODUCT", group=group)


@pytest.mark.parametrize("call", [_scanned, _multiplied])
@on_ranks(2)
def test_calls_without_an_exact_variant_refuse_the_option(call: Callable[[Any], None]) -> None:
    words = "exact=True needs an all_reduce, reduce or reduce_scatter by SUM or AVG"
    with pytest.raises(dist.DistArgumentError, match=words):
        call(dist.group.WORLD.using(exact=True))
    dist.barrier()


@on_ranks(2)
def test_impossible_options_for_exact_sums_raise() -> None:
    for given, words in (
        ({"sum": "precise"}, "sum='precise' is none of exact, plain"),
        ({"sum": "exact", "compression": "int8"}, "the sums of this group are exact"),
    ):
        with pytest.raises(dist.DistArgumentError, match=words):
            dist.new_group(pg_options=given)
    with pytest.raises(dist.DistTypeError, match="sum must be a str"):
        dist.new_group(pg_options={"sum": True})
    with pytest.raises(dist.DistTypeError, match="exact must be a bool"):
        dist.group.WORLD.using(exact="yes")


@on_ranks(3, env={})
def test_different_sums_raise_mismatch() -> None:
    words = r"all_reduce\(float64\[3\], EXACT_SUM\)"
    with pytest.raises(dist.CollectiveMismatchError, match=words):
        dist.all_reduce(np.ones(3), group=dist.group.WORLD.using(exact=dist.get_rank() == 1))


@on_ranks(2)
def test_explain_reports_deterministic() -> None:
    group: Any = dist.new_group(pg_options=dist.Options(deterministic=True))
    dist.barrier(group)
    assert ", deterministic " in group.describe()


@on_ranks(3, env={})
def test_different_options_raise_mismatch() -> None:
    with pytest.raises(dist.CollectiveMismatchError, match="deterministic on ranks 1 only"):
        group = dist.new_group(pg_options={"deterministic": dist.get_rank() == 1})
        dist.all_reduce(np.ones(3), group=group)


@on_ranks(2)
def test_unknown_options_raise() -> None:
    words = "unknown 'determinstic'; known are .*, deterministic,"
    with pytest.raises(dist.DistArgumentError, match=words):
        dist.new_group(pg_options={"determinstic": True})
    with pytest.raises(dist.DistTypeError, match="must be a bool"):
        as_options({"deterministic": "yes"})


def test_option_objects_of_other_libraries_are_ignored() -> None:
    for given in (object(), None, np.float32(1)):
        assert as_options(given).deterministic is None
