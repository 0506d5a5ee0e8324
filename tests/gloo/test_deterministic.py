"""Deterministic reductions: the same bits for every size, transport and order of arrival."""

from __future__ import annotations

import hashlib
import time
from functools import cache
from typing import Any

import numpy as np
import pytest

import unicoll as dist
from tests.support.on_ranks import on_ranks
from tests.support.ranks import run_ranks
from unicoll.backend.options import as_options

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


def digests(deterministic: bool | None, late: float = 0.0) -> dict[str, str]:
    """Digests of the results of reductions of several sizes; equal on all ranks."""
    options = None if deterministic is None else {"deterministic": deterministic}
    group = dist.new_group(pg_options=options)
    rank, size = dist.get_rank(), dist.get_world_size()
    found = {}
    for dtype in DTYPES:
        for op in ("SUM", "AVG", "PRODUCT") if dtype == "float32" else ("SUM",):
            whole = {}
            for count in COUNTS:
                time.sleep(late * (rank == count % size))
                x, y, z = (
                    contribution(rank, count, dtype),
                    contribution(rank, count, dtype),
                    np.zeros(count, dtype),
                )
                dist.all_reduce(x, op=op, group=group)
                whole[count] = x
                dist.reduce(y, 1, op=op, group=group)
                assert rank != 1 or y.tobytes() == x.tobytes()
                dist.reduce_scatter(z, [contribution(rank, count, dtype)] * size, op=op, group=group)
                assert z.tobytes() == x.tobytes()
            for count in COUNTS:  # an element's bits do not depend on the size of its array
                assert whole[count].tobytes() == whole[max(COUNTS)][:count].tobytes()
            found[f"{dtype} {op}"] = hashlib.sha256(whole[max(COUNTS)].tobytes()).hexdigest()
    return found


@pytest.mark.every(2)
@pytest.mark.parametrize("size", [2, 3, 5])
def test_every_transport_gives_the_bits_of_the_reduction_in_rank_order(size: int) -> None:
    envs = [TCP, {"UNICOLL_TRANSPORT": "shm"}, {"UNICOLL_TRANSPORT": "hierarchical"}]
    found = [run_ranks(size, digests, True, env=env) for env in envs]
    found.append(run_ranks(size, digests, None, env={**TCP, "UNICOLL_DETERMINISTIC": "1"}))
    found.append(run_ranks(size, digests, True, 0.02, env=TCP))
    first = found[0][0]
    assert found == [[first] * size] * len(found)
    parts = [contribution(r, max(COUNTS), "float64") for r in range(size)]
    assert first["float64 SUM"] == hashlib.sha256(sum(parts[1:], parts[0]).tobytes()).hexdigest()
    if size > 2:  # else the order would not matter
        assert (sum(parts[1:], parts[0]) != sum(parts[-2::-1], parts[-1])).any()


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
