"""Any tag, shorter messages, probes, messages to oneself and to nobody, waitany, parts by colour, grids."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from math import prod
from typing import Any

import pytest

import unicoll as dist
from tests.conformance import matching_jobs as jobs
from tests.support.ranks import Pool, ProcessJob, pools
from unicoll.errors import DistArgumentError

Pools = Callable[[int], Pool]


@pytest.fixture(scope="module", params=["auto", "tcp"])
def pool(request: pytest.FixtureRequest) -> Iterator[Pools]:
    """Ranks that share memory, and ranks that use sockets only."""
    with pools(lambda size: ProcessJob(size, env={"UNICOLL_TRANSPORT": request.param})) as made:
        yield made


@pytest.mark.every(n=3)
@pytest.mark.parametrize(
    ("size", "job", "arguments"), jobs.ROWS, ids=lambda value: getattr(value, "__name__", None)
)
def test_matching(size: int, job: Callable[..., Any], arguments: tuple[Any, ...], pool: Pools) -> None:
    pool(size).run(job, *arguments)


@pytest.mark.parametrize("count", [5, 300_000])
def test_messages_that_are_longer_than_the_array_are_refused(count: int, pool: Pools) -> None:
    for failure in pool(2).run(jobs.too_long, count)[1]:
        assert failure is not None
        assert failure.type == "MessageMismatchError", failure.traceback


def test_waitany_returns_them_in_the_order_of_their_ends(pool: Pools) -> None:
    assert pool(4).run(jobs.first_of_several)[0] == [1, 2, 3]


def test_parts_by_color_are_ordered_by_key(pool: Pools) -> None:
    assert pool(4).run(jobs.by_color) == [[2, 0], None, [2, 0], [3]]


def test_a_timeout_names_the_tags_that_have_come(pool: Pools) -> None:
    failure = pool(2).run(jobs.with_other_tags)[1]
    assert failure is not None
    assert failure.type == "OperationTimeoutError"
    assert "messages with other tags have come: 3, 5 (2 of them)" in failure.message


@pytest.mark.parametrize("size", [*range(1, 65), 72, 96, 100, 210, 1024, 1000])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_dims_create_is_as_square_as_can_be(size: int, count: int) -> None:
    made = dist.dims_create(size, count)
    divisors = [d for d in range(1, size + 1) if size % d == 0]
    largest = min(max(dims) for dims in product(divisors, repeat=count) if prod(dims) == size)
    assert prod(made) == size
    assert list(made) == sorted(made, reverse=True)
    assert made[0] == largest


def test_dims_create_keeps_what_is_given() -> None:
    assert dist.dims_create(24, (0, 2, 0)) == (4, 2, 3)
    assert dist.dims_create(6, (2, 3)) == (2, 3)
    for size, dims in ((6, (4, 0)), (6, (2, 2)), (0, (0,)), (4, (-2, 0))):
        with pytest.raises(DistArgumentError, match="do not fill"):
            dist.dims_create(size, dims)
