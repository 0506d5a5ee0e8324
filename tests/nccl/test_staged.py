"""Device arrays over the CPU backend, through the host's memory: order, messages, and what goes wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import pytest

from tests.nccl import staged
from tests.nccl import staged_jobs as jobs
from tests.simulated_nccl.ranks import Settings
from tests.support.ranks import Pool, ProcessJob, pools

BACKEND = "gloo"


@pytest.fixture(scope="module", params=["gloo", "cpu:gloo,cuda:gloo"])
def pool(request: pytest.FixtureRequest, seed: int) -> Iterator[Callable[[int], Pool]]:
    settings = Settings(policy="random", seed=seed, backend=request.param)
    with pools(partial(ProcessJob, prepare=(staged.prepare, settings))) as made:
        yield made


@pytest.mark.every(2)
@pytest.mark.parametrize("size", [2, 3])
def test_arrays_of_device_and_host_keep_one_order(size: int, pool: Callable[[int], Pool]) -> None:
    assert pool(size).run(jobs.mixed_kinds, 10) == [True] * size


@pytest.mark.every(2)
@pytest.mark.parametrize("size", [1, 2])
def test_streams_are_ordered_on_both_sides(size: int, pool: Callable[[int], Pool]) -> None:
    assert pool(size).run(jobs.ordered, 5) == [True] * size


@pytest.mark.parametrize("size", [2, 3])
def test_messages(size: int, pool: Callable[[int], Pool]) -> None:
    for good in pool(size).run(jobs.messages):
        assert good == [True] * 12


def test_messages_that_are_shorter_than_the_array(pool: Callable[[int], Pool]) -> None:
    for found in pool(2).run(jobs.shorter_messages):
        assert [count for count, _ in found] == [2] * 4 + [59_999] * 4


def test_messages_are_not_kept_alive(pool: Callable[[int], Pool]) -> None:
    assert pool(2).run(jobs.messages_are_not_kept) == [[True, True]] * 2


def test_it_says_how_device_arrays_go(pool: Callable[[int], Pool]) -> None:
    for facts in pool(2).run(jobs.facts):
        assert facts["sum"] == [2.0] * 3
        assert "through page-locked memory" in facts["after"]
        assert 0 < facts["staging"] <= 64 << 20


@pytest.mark.every(2)
def test_a_device_that_is_late_is_named(pool: Callable[[int], Pool]) -> None:
    mine, other = pool(2).run(jobs.stuck, 0)
    assert mine[0] is not None
    assert mine[0].type == "OperationTimeoutError"
    assert "the device of this rank has not finished the work before it" in mine[0].message
    assert other[0] is not None
    assert other[0].type in ("OperationTimeoutError", "GroupAbortedError"), other[0]


def test_calls_that_differ_raise_the_same_error(pool: Callable[[int], Pool]) -> None:
    failures = [failure for failure, _ in pool(2).run(jobs.differ)]
    assert {f.type if f else "" for f in failures} == {"CollectiveMismatchError"}
    message = failures[0].message if failures[0] else ""
    assert "float32[50000]" in message
    assert "float32[50001]" in message


@pytest.mark.every(2)
@pytest.mark.parametrize(("size", "much"), [(2, 30_000), (3, 30_000), (2, 3)])
def test_an_exchange_of_any_sizes_goes_in_pieces(size: int, much: int, pool: Callable[[int], Pool]) -> None:
    for told in pool(size).run(jobs.exchanges, much):
        assert told["good"] == [True] * 4
        if much > staged.CHUNK:
            assert told["moved"] > 50 * staged.CHUNK
            assert told["held"] < 25 * staged.CHUNK


@pytest.mark.parametrize("count", [3, 20_000])
def test_an_exchange_whose_sizes_do_not_fit_raises_the_same_error(
    count: int, pool: Callable[[int], Pool]
) -> None:
    for ranks in (None, [0, 2]):
        outcomes = [
            outcome for outcome in pool(3).run(jobs.sizes_misfit, count, ranks) if outcome is not None
        ]
        texts = {failure.message for failure, _ in outcomes if failure is not None}
        assert len(texts) == 1, texts
        assert {failure.type if failure else "" for failure, _ in outcomes} == {"CollectiveMismatchError"}
        text = texts.pop()
        for words in (
            "all_to_all",
            "rank 0",
            f"rank {(ranks or [0, 1])[1]}",
            f"{count + 1} ",
            f"room for {count}",
        ):
            assert words in text


def test_an_exchange_and_another_call_are_both_named(pool: Callable[[int], Pool]) -> None:
    failures = [failure for failure, _ in pool(2).run(jobs.another_call)]
    assert {f.type if f else "" for f in failures} == {"CollectiveMismatchError"}
    assert len({f.message if f else "" for f in failures}) == 1
    message = failures[0].message if failures[0] else ""
    assert "rank 0: all_to_all(float64[10] on cuda:0) #1" in message
    assert "rank 1: all_reduce(int64[1] on cuda:1, MAX) #1" in message
    assert failures[0] is None or failures[0].fields["op"] in ("all_to_all", "all_reduce")


def test_a_graph_cannot_record_it(pool: Callable[[int], Pool]) -> None:
    for failure, _ in pool(2).run(jobs.captured):
        assert failure is not None
        assert failure.type == "DistArgumentError"
        assert "a graph cannot record" in failure.message
