"""Gradient buckets, broadcast, averaging and comparison of parameters: on threads, then on real processes."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import unicoll as dist
from unicoll.api.spawn import spawn
from unicoll.arrays.types import ReduceOp
from unicoll.errors import DistArgumentError, DistBackendError, DistError, DistTypeError, RankLostError
from unicoll.parallel import (
    GradientBuckets,
    average_gradients,
    broadcast_parameters,
    check_identical,
    parameters_digest,
)
from unicoll.parallel.packing import plan_buckets

PATIENCE = 60.0


class Meeting:
    """Where the threads of a simulated group put their contributions and wait for each other."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.barrier = threading.Barrier(size)
        self.table: list[Any] = [None] * size


class FakeWork:
    def __init__(self, future: Future[None]) -> None:
        self._future = future

    def wait(self, timeout: float | None = None) -> bool:
        self._future.result(PATIENCE if timeout is None else timeout)
        return True


class FakeGroup:
    """The part of a process group that data-parallel code uses; operations match by call order, as there.

    ``launched`` records what was reduced, ``fail_at`` makes the operation of that number (from 0) fail.
    """

    def __init__(self, meeting: Meeting, rank: int) -> None:
        self._meeting = meeting
        self._rank = rank
        self._progress = ThreadPoolExecutor(1)
        self.launched: list[tuple[int, str]] = []
        self.fail_at: int | None = None

    def close(self) -> None:
        self._progress.shutdown()

    def size(self) -> int:
        return self._meeting.size

    def global_rank(self, group_rank: int) -> int:
        return group_rank + 10

    def group_rank(self, global_rank: int) -> int:
        return global_rank - 10

    def _exchange(self, item: Any) -> list[Any]:
        self._meeting.table[self._rank] = item
        self._meeting.barrier.wait(PATIENCE)
        everyone = list(self._meeting.table)
        self._meeting.barrier.wait(PATIENCE)
        return everyone

    def all_reduce(self, tensor: Any, op: Any, async_op: bool) -> FakeWork:
        assert async_op
        number = len(self.launched)
        self.launched.append((tensor.shape[0], str(tensor.dtype)))
        if self.fail_at == number:
            future: Future[None] = Future()
            error = RankLostError("rank 3 is gone", rank=3, op="all_reduce")
            error.host, error.pid = "a", 7
            future.set_exception(error)
            return FakeWork(future)
        return FakeWork(self._progress.submit(self._reduce, tensor, op))

    def _reduce(self, tensor: Any, op: Any) -> None:
        everyone = self._exchange(np.array(tensor, copy=True))
        total = sum(everyone[1:], everyone[0])
        tensor[...] = total / len(everyone) if op == ReduceOp.AVG else total

    def broadcast(self, tensor: Any, src: int) -> None:
        self.launched.append((tensor.shape[0], str(tensor.dtype)))
        tensor[...] = self._exchange(tensor.copy())[src]

    def all_gather_into_tensor(self, output: Any, input: Any) -> None:
        output[...] = np.concatenate(self._exchange(input.copy()))


def on_ranks(size: int, function: Callable[[int, FakeGroup], Any]) -> list[Any]:
    """``function(rank, group)`` on threads; its results, by rank."""
    meeting = Meeting(size)
    groups = [FakeGroup(meeting, rank) for rank in range(size)]
    with ThreadPoolExecutor(size) as threads:
        futures = [threads.submit(function, rank, group) for rank, group in enumerate(groups)]
        try:
            return [future.result(PATIENCE) for future in futures]
        finally:
            meeting.barrier.abort()
            for group in groups:
                group.close()


def gradients_of(
    rank: int, shapes: list[tuple[int, ...]], dtype: Any = np.float64, step: int = 0
) -> list[Any]:
    rng = np.random.default_rng([rank, step])
    return [np.asarray(rng.standard_normal(shape)).astype(dtype) for shape in shapes]


SHAPES: list[tuple[int, ...]] = [(3, 4), (4,), (), (0, 5), (7, 2), (2,), (5,)]
SMALL = {"bucket_cap_mb": 100 / 2**20, "first_bucket_mb": 50 / 2**20}


def averages(size: int, step: int = 0, dtype: Any = np.float64) -> list[Any]:
    everyone = [gradients_of(rank, SHAPES, dtype, step) for rank in range(size)]
    return [np.mean(column, axis=0) for column in zip(*everyone, strict=True)]


def assert_close(found: list[Any], expected: list[Any]) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.shape == theirs.shape
        np.testing.assert_allclose(ours, theirs, rtol=1e-12, atol=1e-14)


# --- layout ------------------------------------------------------------------------------------------------


def test_buckets_fill_in_reverse_and_close_at_their_caps() -> None:
    plan = plan_buckets(["f"] * 6, [10, 10, 10, 10, 10, 10], reversed(range(6)), 10, 25)
    assert plan == [[5], [4, 3], [2, 1], [0]]


def test_a_large_array_has_a_bucket_of_its_own() -> None:
    assert plan_buckets(["f"] * 3, [10, 99, 10], reversed(range(3)), 20, 20) == [[2], [1], [0]]


def test_dtypes_do_not_mix_and_buckets_are_sorted_by_completion() -> None:
    plan = plan_buckets(["f", "d", "f", "d", "f"], [4, 8, 4, 8, 4], reversed(range(5)), 8, 100)
    assert plan == [[3], [4, 2], [1], [0]]


@given(
    st.lists(st.tuples(st.sampled_from("fdh"), st.integers(0, 30)), max_size=20),
    st.integers(1, 40),
    st.integers(1, 40),
)
def test_every_plan_is_a_sorted_partition_within_its_caps(
    arrays: list[tuple[str, int]], first_cap: int, cap: int
) -> None:
    kinds, sizes = [a[0] for a in arrays], [a[1] for a in arrays]
    plan = plan_buckets(kinds, sizes, reversed(range(len(arrays))), first_cap, cap)
    assert sorted(i for members in plan for i in members) == list(range(len(arrays)))
    seen: set[str] = set()
    for members in plan:
        (kind,) = {kinds[i] for i in members}
        assert len(members) == 1 or sum(sizes[i] for i in members) <= (cap if kind in seen else first_cap)
        assert members == sorted(members, reverse=True)
        seen.add(kind)
    completed = [members[-1] for members in plan]
    assert completed == sorted(completed, reverse=True)


def test_layout_by_dtype() -> None:
    parameters = [np.zeros(10, np.float32), np.zeros(10), np.zeros(10, np.float32), np.zeros(10)]
    (layout,) = on_ranks(1, lambda rank, group: GradientBuckets(parameters, group=group).layout)
    assert layout == [[3, 1], [2, 0]]


# --- averaging ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("op", [ReduceOp.AVG, ReduceOp.SUM])
def test_equals_the_plain_average_in_every_step(size: int, op: Any) -> None:
    def train(rank: int, group: FakeGroup) -> list[list[Any]]:
        buckets = GradientBuckets(gradients_of(0, SHAPES), group=group, op=op, **SMALL)
        assert len(buckets.layout) > 2
        steps = []
        for step in range(3):
            gradients = gradients_of(rank, SHAPES, step=step)
            for index in reversed(range(len(SHAPES))):
                buckets.ready(index, gradients[index])
            steps.append([g.copy() for g in buckets.wait()])
        return steps

    for steps in on_ranks(size, train):
        for step, found in enumerate(steps):
            factor = 1 if op == ReduceOp.AVG else size
            assert_close(found, [average * factor for average in averages(size, step)])


def test_launch_order_is_the_same_whatever_order_gradients_get_ready_in() -> None:
    def train(rank: int, group: FakeGroup) -> tuple[Any, Any]:
        parameters = [*gradients_of(0, SHAPES), *gradients_of(0, SHAPES, np.float32)]
        buckets = GradientBuckets(parameters, group=group, **SMALL)
        gradients = [*gradients_of(rank, SHAPES), *gradients_of(rank, SHAPES, np.float32)]
        order = list(range(len(parameters)))
        random.Random(rank).shuffle(order)
        for index in order:
            buckets.ready(index, gradients[index])
        return group.launched, [g.copy() for g in buckets.wait()]

    results = on_ranks(4, train)
    first = results[0][0]
    assert len(first) > 4
    for launched, found in results:
        assert launched == first
        assert_close(found[: len(SHAPES)], averages(4))


def test_a_full_bucket_travels_while_later_gradients_are_computed() -> None:
    def train(rank: int, group: FakeGroup) -> list[int]:
        buckets = GradientBuckets(
            [np.zeros(10)] * 3, group=group, bucket_cap_mb=80 / 2**20, first_bucket_mb=80 / 2**20
        )
        launched = []
        for index in (2, 0, 1):  # 0 is complete before 1, but must not overtake it
            buckets.ready(index, np.ones(10))
            launched.append(len(group.launched))
        buckets.wait()
        return launched

    assert on_ranks(2, train) == [[1, 1, 3]] * 2


def test_gradients_computed_in_place_are_not_copied() -> None:
    def train(rank: int, group: FakeGroup) -> bool:
        buckets = GradientBuckets({"w": np.zeros((3, 2)), "b": np.zeros(2)}, group=group)
        np.multiply(np.ones(2), rank, out=buckets.view("b"))
        buckets.ready("b")
        place = buckets.view("w")
        np.multiply(np.ones((3, 2)), 10 * rank, out=place)
        buckets.ready("w", place)
        w, b = buckets.wait()
        assert_close([w, b], [np.full((3, 2), 5.0), np.full(2, 0.5)])
        return bool(np.shares_memory(w, place))

    assert on_ranks(2, train) == [True, True]


def test_scalar_gradients_may_be_numpy_scalars() -> None:
    def train(rank: int, group: FakeGroup) -> float:
        buckets = GradientBuckets([np.zeros(())], group=group)
        buckets.ready(0, np.float64(rank))
        return float(buckets.wait()[0])

    assert on_ranks(2, train) == [0.5, 0.5]


@pytest.mark.torch
def test_torch_tensors_stay_torch_tensors() -> None:
    torch = pytest.importorskip("torch")

    def train(rank: int, group: FakeGroup) -> None:
        model = [
            torch.nn.Parameter(torch.ones(2, 3)),
            torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16)),
        ]
        buckets = GradientBuckets(model, group=group)
        buckets.ready(1, torch.full((3,), 2.0 * rank, dtype=torch.bfloat16))
        buckets.ready(0, (model[0] * 4 * rank).sum(0).expand(2, 3))
        first, second = buckets.wait()
        assert first.dtype == torch.float32
        assert second.dtype == torch.bfloat16
        assert not first.requires_grad
        assert torch.equal(first, torch.full((2, 3), 4.0))
        assert torch.equal(second, torch.ones(3, dtype=torch.bfloat16))

    class TorchGroup(FakeGroup):
        def _reduce(self, tensor: Any, op: Any) -> None:
            tensor.copy_(sum(self._exchange(tensor.clone())) / self.size())

    meeting = Meeting(2)
    groups = [TorchGroup(meeting, rank) for rank in range(2)]
    with ThreadPoolExecutor(2) as threads:
        list(threads.map(train, range(2), groups, timeout=PATIENCE))
    for group in groups:
        group.close()


# --- accumulation ------------------------------------------------------------------------------------------


def test_no_sync_adds_up_without_communicating() -> None:
    def train(rank: int, group: FakeGroup) -> list[Any]:
        buckets = GradientBuckets(gradients_of(0, SHAPES), group=group, **SMALL)
        for _ in range(2):  # nothing is left over for the second round
            with buckets.no_sync():
                for step in (0, 1):
                    for index, gradient in enumerate(gradients_of(rank, SHAPES, step=step)):
                        buckets.ready(index, gradient)
            before = len(group.launched)
            for index, gradient in enumerate(gradients_of(rank, SHAPES, step=2)):
                buckets.ready(index, gradient)
            found = [g.copy() for g in buckets.wait()]
            assert len(group.launched) == before + len(buckets.layout)
        return found

    expected = [sum(parts) for parts in zip(*(averages(3, step) for step in range(3)), strict=True)]
    for found in on_ranks(3, train):
        assert_close(found, expected)


def test_no_sync_refuses_what_would_be_wrong() -> None:
    def train(rank: int, group: FakeGroup) -> None:
        buckets = GradientBuckets([np.zeros(2), np.zeros(2)], group=group)
        with buckets.no_sync():
            buckets.view(0)[...] = 1
            buckets.ready(0)
            with pytest.raises(DistArgumentError, match=r"#0 from no_sync"):
                buckets.view(0)
            with pytest.raises(DistArgumentError, match="no gradient"):
                buckets.ready(0)
            with pytest.raises(DistArgumentError, match="under no_sync"):
                buckets.wait()
        buckets.ready(1, np.ones(2))
        with pytest.raises(DistArgumentError, match="middle of a step: parameter #1"), buckets.no_sync():
            pass
        buckets.ready(0, np.ones(2))
        assert_close(buckets.wait(), [np.full(2, 2.0), np.ones(2)])

    on_ranks(1, train)


# --- gradients left out ------------------------------------------------------------------------------------

NAMED = {"first": np.zeros(3), "second": np.zeros(3), "third": np.zeros(3)}


def test_a_gradient_left_out_is_an_error_on_every_rank_and_the_next_step_works() -> None:
    def train(rank: int, group: FakeGroup) -> str:
        buckets = GradientBuckets(NAMED, group=group, bucket_cap_mb=1e-6, first_bucket_mb=1e-6)
        for name in NAMED:
            if (rank, name) != (1, "second"):
                buckets.ready(name, np.ones(3))
        with pytest.raises(DistError) as caught:
            buckets.wait()
        for name in NAMED:
            buckets.ready(name, np.full(3, float(rank)))
        assert_close(buckets.wait(), [np.full(3, 0.5)] * 3)
        return str(caught.value)

    told = on_ranks(2, train)
    assert told[0].startswith("another rank got no gradient for parameter second ")
    assert told[1].startswith("this rank got no gradient for parameter second ")


def test_find_unused_counts_what_is_left_out_as_zeros() -> None:
    def train(rank: int, group: FakeGroup) -> None:
        buckets = GradientBuckets(NAMED, group=group, find_unused=True)
        for _ in range(2):
            if rank == 0:
                buckets.ready("first", np.ones(3))
            buckets.ready("third", np.zeros(3))  # a gradient of zeros is a gradient
            first, second, third = buckets.wait()
            assert second is None
            assert_close([first, third], [np.full(3, 0.5), np.zeros(3)])

    on_ranks(2, train)


def test_find_unused_keeps_what_was_accumulated() -> None:
    def train(rank: int, group: FakeGroup) -> None:
        buckets = GradientBuckets(NAMED, group=group, find_unused=True)
        with buckets.no_sync():
            buckets.ready("second", np.full(3, 4.0))
        first, second, third = buckets.wait()
        assert first is None
        assert third is None
        assert_close([second], [np.full(3, 4.0)])

    on_ranks(2, train)


# --- misuse and failure ------------------------------------------------------------------------------------


def test_bad_gradients_are_refused_and_the_step_goes_on() -> None:
    def train(rank: int, group: FakeGroup) -> None:
        buckets = GradientBuckets(NAMED, group=group)
        with pytest.raises(DistArgumentError, match=r"second has shape \[2\], not \[3\]"):
            buckets.ready("second", np.ones(2))
        with pytest.raises(DistTypeError, match="second is numpy float32, not numpy float64"):
            buckets.ready(1, np.ones(3, np.float32))
        with pytest.raises(DistTypeError, match="got list"):
            buckets.ready("second", [1.0, 1.0, 1.0])
        with pytest.raises(DistArgumentError, match="no gradient for parameter second"):
            buckets.ready("second")
        for unknown in ("fourth", 3, -1):
            with pytest.raises(DistArgumentError, match="there is no parameter"):
                buckets.ready(unknown, np.ones(3))
        buckets.ready("second", np.ones(3))
        for again in (lambda: buckets.ready("second", np.ones(3)), lambda: buckets.view("second")):
            with pytest.raises(DistArgumentError, match="second was already given"):
                again()
        buckets.ready("first", np.ones(3))
        buckets.ready("third", np.ones(3))
        assert_close(buckets.wait(), [np.ones(3)] * 3)

    on_ranks(1, train)


def test_bad_settings_are_refused() -> None:
    with pytest.raises(DistArgumentError, match="MAX"):
        GradientBuckets(NAMED, op=ReduceOp.MAX)
    with pytest.raises(DistArgumentError, match="positive"):
        GradientBuckets(NAMED, bucket_cap_mb=0)
    with pytest.raises(DistTypeError, match="count is numpy int64"):
        GradientBuckets({"count": np.zeros(3, np.int64)})
    with pytest.raises(DistTypeError, match="cannot be communicated"):
        GradientBuckets([np.zeros(3, ">f8")])


def test_a_failed_bucket_surfaces_in_wait_with_its_parameters_and_the_rest_is_settled() -> None:
    def train(rank: int, group: FakeGroup) -> None:
        buckets = GradientBuckets(NAMED, group=group, bucket_cap_mb=1e-6, first_bucket_mb=1e-6)
        group.fail_at = 1
        for name in reversed(NAMED):
            buckets.ready(name, np.ones(3))
        with pytest.raises(RankLostError) as caught:
            buckets.wait()
        assert str(caught.value) == ("rank 3 is gone (averaging gradient bucket 2 of 3: parameter second)")
        assert (caught.value.rank, caught.value.host, caught.value.pid) == (3, "a", 7)
        assert isinstance(caught.value.__cause__, RankLostError)
        for name in NAMED:
            buckets.ready(name, np.ones(3))
        assert_close(buckets.wait(), [np.ones(3)] * 3)

    on_ranks(2, train)


def test_a_bucket_that_cannot_be_launched_names_its_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **settings: Any) -> None:
        raise OSError("no descriptors left")

    def train(rank: int, group: FakeGroup) -> None:
        buckets = GradientBuckets(NAMED, group=group)
        monkeypatch.setattr(group, "all_reduce", refuse)
        with pytest.raises(DistBackendError, match=r"OSError: no descriptors left .*third, second, first"):
            buckets.wait()

    on_ranks(1, train)


# --- whole sets of arrays ----------------------------------------------------------------------------------


def mixed(rank: int) -> dict[str, Any]:
    rng = np.random.default_rng(rank)
    wide = rng.standard_normal((4, 6))
    return {
        "a": rng.standard_normal((3, 2)),
        "b": rng.standard_normal(5).astype(np.float32),
        "strided": wide[:, ::2],
        "transposed": rng.standard_normal((3, 4)).T,
        "scalar": np.array(float(rank)),
        "empty": np.zeros((0, 3)),
    }


def test_broadcast_overwrites_all_kinds_of_arrays_in_one_message_per_dtype() -> None:
    def share(rank: int, group: FakeGroup) -> tuple[str, int]:
        arrays = mixed(rank)
        broadcast_parameters(arrays, src=11, group=group)
        return parameters_digest(arrays), len(group.launched)

    assert on_ranks(3, share) == [(parameters_digest(mixed(1)), 2)] * 3


def test_a_lone_contiguous_array_is_sent_from_where_it_lies() -> None:
    def share(rank: int, group: FakeGroup) -> Any:
        array = np.full((2, 3), float(rank))
        broadcast_parameters([array], src=10, group=group)
        return array.sum()

    assert on_ranks(2, share) == [0, 0]


def test_average_gradients_in_place() -> None:
    def share(rank: int, group: FakeGroup) -> list[Any]:
        arrays = mixed(rank)
        average_gradients(arrays, group=group)
        return list(arrays.values())

    columns = zip(*(mixed(rank).values() for rank in range(3)), strict=True)
    expected = [np.mean([c.astype(np.float64) for c in column], axis=0) for column in columns]
    for found in on_ranks(3, share):
        for ours, theirs in zip(found, expected, strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-6)


def test_arrays_that_cannot_be_written_are_refused_before_anything_is_sent() -> None:
    fixed = np.ones(3)
    fixed.flags.writeable = False

    def share(rank: int, group: FakeGroup) -> int:
        for wrong, kind in (
            (fixed, DistArgumentError),
            (np.float64(1), DistTypeError),
            (None, DistTypeError),
        ):
            with pytest.raises(kind):
                broadcast_parameters([np.ones(3), wrong], src=10, group=group)
            with pytest.raises(kind):
                average_gradients([np.ones(3), wrong], group=group)
        return len(group.launched)

    assert on_ranks(1, share) == [0]


# --- comparison --------------------------------------------------------------------------------------------


def one_ulp_up(arrays: dict[str, Any]) -> dict[str, Any]:
    arrays["b"][0] = np.nextafter(arrays["b"][0], np.float32(9))
    return arrays


def changes() -> Iterator[tuple[str, dict[str, Any]]]:
    yield "a bit", one_ulp_up(mixed(0))
    yield "a name", {name.upper(): array for name, array in mixed(0).items()}
    yield "a shape", mixed(0) | {"a": mixed(0)["a"].reshape(2, 3)}
    yield "a dtype", mixed(0) | {"empty": np.zeros((0, 3), np.float32)}
    yield "one less", dict(list(mixed(0).items())[1:])


@pytest.mark.parametrize(("what", "changed"), list(changes()))
def test_the_digest_tells_apart(what: str, changed: dict[str, Any]) -> None:
    assert parameters_digest(mixed(0)) == parameters_digest(mixed(0))
    assert parameters_digest(changed) != parameters_digest(mixed(0)), what


def test_the_digest_counts_values_not_memory() -> None:
    assert parameters_digest([np.arange(6.0).reshape(2, 3)]) == parameters_digest(
        [np.arange(6.0).reshape(2, 3).T.copy().T]
    )


@pytest.mark.torch
def test_the_digest_of_tensors_is_that_of_equal_arrays() -> None:
    torch = pytest.importorskip("torch")
    tensors = {name: torch.from_numpy(array.copy()) for name, array in mixed(0).items()}
    assert parameters_digest(tensors) == parameters_digest(mixed(0))
    assert len(parameters_digest([torch.ones(3, dtype=torch.bfloat16), torch.ones(())])) == 64


def test_identical_ranks_agree_on_the_digest() -> None:
    found = on_ranks(3, lambda rank, group: check_identical(mixed(0), group))
    assert found == [parameters_digest(mixed(0))] * 3
    assert len(set(on_ranks(2, lambda rank, group: check_identical([], group)))) == 1


def test_the_rank_that_differs_is_named_with_what_differs() -> None:
    def compare(rank: int, group: FakeGroup) -> DistError:
        with pytest.raises(DistError) as caught:
            check_identical(one_ulp_up(mixed(0)) if rank in (1, 3) else mixed(0), group)
        return caught.value

    for error in on_ranks(5, compare):
        assert "ranks 11, 13 of 5 differ from the others; they differ in parameter b" in str(error)
        assert error.rank == 11


def test_different_numbers_of_arrays_are_told() -> None:
    def compare(rank: int, group: FakeGroup) -> str:
        with pytest.raises(DistError) as caught:
            check_identical(list(mixed(0).values())[: 3 if rank else 2], group)
        return str(caught.value)

    for text in on_ranks(3, compare):
        assert "rank 10 of 3 differ from the others; they have different numbers of arrays (2, 3, 3" in text


# --- real processes ----------------------------------------------------------------------------------------


def work_on_real_processes(rank: int) -> None:
    dist.init_process_group()
    parameters = mixed(rank)
    with pytest.raises(
        DistError, match="ranks 1, 2 of 3 differ from the others; they differ in parameters a, b, strided"
    ):
        check_identical(parameters)
    broadcast_parameters(parameters, src=2)
    assert check_identical(parameters) == parameters_digest(mixed(2))

    average_gradients(gradients := gradients_of(rank, SHAPES))
    assert_close(gradients, averages(3))

    buckets = GradientBuckets(gradients, **SMALL)
    for leave_out in (False, True, False):
        order = list(range(len(SHAPES)))
        random.Random(rank).shuffle(order)
        for index in order:
            if not (leave_out and (rank, index) == (1, 4)):
                buckets.ready(index, gradients_of(rank, SHAPES)[index])
        if leave_out:
            with pytest.raises(DistError, match="no gradient for parameter #4 "):
                buckets.wait()
        else:
            assert_close(buckets.wait(), averages(3))

    pair = dist.new_group([0, 2])
    if rank == 1:
        with pytest.raises(DistArgumentError, match="not in the given group"):
            GradientBuckets(gradients, group=pair)
    else:
        of_pair = [np.full(3, float(rank))]
        broadcast_parameters(of_pair, src=2, group=pair)
        assert of_pair[0].tolist() == [2, 2, 2]
    dist.destroy_process_group()


def test_on_real_processes() -> None:
    spawn(work_on_real_processes, nprocs=3)


def lose_a_rank(rank: int) -> None:
    dist.init_process_group()
    buckets = GradientBuckets(NAMED, bucket_cap_mb=1e-6, first_bucket_mb=1e-6)
    for name in NAMED:
        buckets.ready(name, np.ones(3))
    buckets.wait()
    if rank == 2:
        os._exit(0)
    for name in NAMED:
        buckets.ready(name, np.ones(3))
    with pytest.raises(RankLostError, match=r"averaging gradient bucket 1 of 3: parameter third\)") as caught:
        buckets.wait()
    assert caught.value.rank == 2


def test_a_lost_rank_surfaces_with_the_bucket() -> None:
    spawn(lose_a_rank, nprocs=3)
