"""Device arrays over the CPU backend, through the host's memory: order, messages, and what goes wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import pytest
import staged
import staged_jobs as jobs
from ranks import Job, Pool, pools
from simulated_ranks import Settings

BACKEND = "gloo"


@pytest.fixture(scope="module", params=["gloo", "cpu:gloo,cuda:gloo"])
def pool(request: pytest.FixtureRequest, seed: int) -> Iterator[Callable[[int], Pool]]:
    settings = Settings(policy="random", seed=seed, backend=request.param)
    with pools(partial(Job, prepare=(staged.prepare, settings))) as made:
        yield made


@pytest.mark.parametrize("size", [2, 3])
def test_arrays_of_device_and_host_keep_one_order(size: int, pool: Callable[[int], Pool]) -> None:
    assert pool(size).run(jobs.mixed_kinds, 10) == [True] * size


@pytest.mark.parametrize("size", [1, 2])
def test_streams_are_ordered_on_both_sides(size: int, pool: Callable[[int], Pool]) -> None:
    assert pool(size).run(jobs.ordered, 5) == [True] * size


@pytest.mark.parametrize("size", [2, 3])
def test_messages(size: int, pool: Callable[[int], Pool]) -> None:
    for good in pool(size).run(jobs.messages):
        assert good == [True] * 12


def test_it_says_how_device_arrays_go(pool: Callable[[int], Pool]) -> None:
    for facts in pool(2).run(jobs.facts):
        assert facts["sum"] == [2.0] * 3
        assert "through page-locked memory" in facts["after"]
        assert 0 < facts["staging"] <= 64 << 20


def test_a_device_that_is_late_is_named(pool: Callable[[int], Pool]) -> None:
    mine, other = pool(2).run(jobs.stuck, 0)
    assert mine[0] is not None
    assert mine[0].type == "OperationTimeoutError"
    assert "the device of this rank has not come to it" in mine[0].message
    assert other[0] is not None
    assert other[0].type in ("OperationTimeoutError", "GroupAbortedError"), other[0]


def test_calls_that_differ_raise_the_same_error(pool: Callable[[int], Pool]) -> None:
    failures = [failure for failure, _ in pool(2).run(jobs.differ)]
    assert {f.type if f else "" for f in failures} == {"CollectiveMismatchError"}
    message = failures[0].message if failures[0] else ""
    assert "float32[50000]" in message
    assert "float32[50001]" in message


def test_a_graph_cannot_record_it(pool: Callable[[int], Pool]) -> None:
    for failure, _ in pool(2).run(jobs.captured):
        assert failure is not None
        assert failure.type == "DistArgumentError"
        assert "a graph cannot record" in failure.message
