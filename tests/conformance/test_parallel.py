"""Gradient buckets, broadcast, averaging and comparison of parameters."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import unicoll as dist
from tests.support.on_ranks import on_ranks
from tests.support.other_arrays import KINDS
from unicoll.api.spawn import spawn
from unicoll.arrays.types import ReduceOp
from unicoll.errors import (
    DistArgumentError,
    DistBackendError,
    DistError,
    DistTypeError,
    OperationTimeoutError,
    RankLostError,
)
from unicoll.parallel import (
    GradientBuckets,
    average_gradients,
    broadcast_parameters,
    check_identical,
    parameters_digest,
)
from unicoll.parallel.packing import plan_buckets

needs_torch = pytest.mark.skipif(find_spec("torch") is None, reason="needs torch")


def reversed_world() -> Any:
    """A new group of all ranks in which rank i is global rank size - 1 - i."""
    return dist.new_group(range(dist.get_world_size())[::-1], sort_ranks=False)


def recorded_group() -> tuple[Any, list[tuple[int, str]]]:
    """A new group of all ranks; the length and dtype of each array that it reduces or broadcasts."""
    group: Any = dist.new_group()
    launched: list[tuple[int, str]] = []

    def record(tensor: Any, *args: Any, **settings: Any) -> Any:
        launched.append((tensor.shape[0], str(tensor.dtype)))
        return mock.DEFAULT

    for name in ("all_reduce", "broadcast"):
        setattr(group, name, mock.Mock(wraps=getattr(group, name), side_effect=record))
    return group, launched


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


@on_ranks(1)
def test_layout_by_dtype() -> None:
    parameters = [np.zeros(10, np.float32), np.zeros(10), np.zeros(10, np.float32), np.zeros(10)]
    assert GradientBuckets(parameters).layout == [[3, 1], [2, 0]]


# --- averaging ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("op", [ReduceOp.AVG, ReduceOp.SUM])
@on_ranks()
def test_equals_the_plain_average_in_every_step(size: int, op: Any) -> None:
    buckets = GradientBuckets(gradients_of(0, SHAPES), op=op, **SMALL)
    assert len(buckets.layout) > 2
    for step in range(3):
        gradients = gradients_of(dist.get_rank(), SHAPES, step=step)
        for index in reversed(range(len(SHAPES))):
            buckets.ready(index, gradients[index])
        factor = 1 if op == ReduceOp.AVG else size
        assert_close(buckets.wait(), [average * factor for average in averages(size, step)])


@on_ranks(4)
def test_launch_order_is_the_same_whatever_order_gradients_get_ready_in() -> None:
    (group, launched), rank = recorded_group(), dist.get_rank()
    gradients = [*gradients_of(rank, SHAPES), *gradients_of(rank, SHAPES, np.float32)]
    buckets = GradientBuckets(gradients, group=group, **SMALL)
    order = list(range(len(gradients)))
    random.Random(rank).shuffle(order)
    for left_out in (None, 4, None):
        for index in order:
            if (rank, index) != (1, left_out):
                buckets.ready(index, gradients[index])
        if left_out is None:
            assert_close(buckets.wait()[: len(SHAPES)], averages(4))
        else:
            with pytest.raises(DistError, match="no gradient for parameter #4 "):
                buckets.wait()
        assert len(launched) > 4
        everyones: list[Any] = [None] * 4
        dist.all_gather_object(everyones, launched)
        assert everyones == [launched] * 4
        launched.clear()


@on_ranks(2)
def test_a_full_bucket_travels_while_later_gradients_are_computed() -> None:
    group, launched = recorded_group()
    buckets = GradientBuckets(
        [np.zeros(10)] * 3, group=group, bucket_cap_mb=80 / 2**20, first_bucket_mb=80 / 2**20
    )
    for index, expected in ((2, 1), (0, 1), (1, 3)):  # 0 is complete before 1, but must not overtake it
        buckets.ready(index, np.ones(10))
        assert len(launched) == expected
    buckets.wait()


@on_ranks(2)
def test_gradients_computed_in_place_are_not_copied() -> None:
    buckets = GradientBuckets({"w": np.zeros((3, 2)), "b": np.zeros(2)})
    np.multiply(np.ones(2), dist.get_rank(), out=buckets.view("b"))
    buckets.ready("b")
    place = buckets.view("w")
    np.multiply(np.ones((3, 2)), 10 * dist.get_rank(), out=place)
    buckets.ready("w", place)
    w, b = buckets.wait()
    assert_close([w, b], [np.full((3, 2), 5.0), np.full(2, 0.5)])
    assert np.shares_memory(w, place)


@pytest.mark.parametrize("kind", KINDS)
@on_ranks(2)
def test_what_all_reduce_takes_is_a_parameter_and_a_gradient(kind: str) -> None:
    rank, made = dist.get_rank(), KINDS[kind]
    values = np.full((2, 3), float(rank))
    buckets = GradientBuckets([made(values), np.zeros(2)])
    buckets.ready(0, made(values))
    buckets.ready(1, made(np.full(2, rank + 1.0)))
    assert_close(buckets.wait(), [np.full((2, 3), 0.5), np.full(2, 1.5)])
    average_gradients([made(values)])
    assert values.tolist() == [[0.5] * 3] * 2
    assert parameters_digest({"a": made(values)}) == parameters_digest({"a": values})
    values[...] = rank + 7
    broadcast_parameters([made(values)], src=1)
    assert values.tolist() == [[8.0] * 3] * 2
    check_identical([made(values)])
    fixed = np.ones(3)
    fixed.flags.writeable = False
    with pytest.raises(DistArgumentError, match="#0 is read-only"):
        average_gradients([made(fixed)])
    strided = np.full((3, 2), float(rank)).T
    if kind == "registered":
        with pytest.raises(DistArgumentError, match=r"^w: .* not contiguous; make a contiguous one first"):
            average_gradients({"w": made(strided)})
    else:
        average_gradients({"w": made(strided)})
        assert strided.tolist() == [[0.5] * 3] * 2


@on_ranks(2)
def test_scalar_gradients_may_be_numpy_scalars() -> None:
    buckets = GradientBuckets([np.zeros(())])
    buckets.ready(0, np.float64(dist.get_rank()))
    assert float(buckets.wait()[0]) == 0.5


@pytest.mark.torch
@needs_torch
@on_ranks(2)
def test_torch_tensors_stay_torch_tensors() -> None:
    import torch

    rank = dist.get_rank()
    model = [
        torch.nn.Parameter(torch.ones(2, 3)),
        torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16)),
    ]
    buckets = GradientBuckets(model)
    buckets.ready(1, torch.full((3,), 2.0 * rank, dtype=torch.bfloat16))
    buckets.ready(0, (model[0] * 4 * rank).sum(0).expand(2, 3))
    first, second = buckets.wait()
    assert first.dtype == torch.float32
    assert second.dtype == torch.bfloat16
    assert not first.requires_grad
    assert torch.equal(first, torch.full((2, 3), 4.0))
    assert torch.equal(second, torch.ones(3, dtype=torch.bfloat16))


# --- accumulation ------------------------------------------------------------------------------------------


@on_ranks(3)
def test_no_sync_adds_up_without_communicating() -> None:
    (group, launched), rank = recorded_group(), dist.get_rank()
    buckets = GradientBuckets(gradients_of(0, SHAPES), group=group, **SMALL)
    for _ in range(2):  # nothing is left over for the second round
        with buckets.no_sync():
            for step in (0, 1):
                for index, gradient in enumerate(gradients_of(rank, SHAPES, step=step)):
                    buckets.ready(index, gradient)
        before = len(launched)
        for index, gradient in enumerate(gradients_of(rank, SHAPES, step=2)):
            buckets.ready(index, gradient)
        found = buckets.wait()
        assert len(launched) == before + len(buckets.layout)
    assert_close(found, [sum(parts) for parts in zip(*(averages(3, step) for step in range(3)), strict=True)])


@on_ranks(1)
def test_no_sync_refuses_what_would_be_wrong() -> None:
    buckets = GradientBuckets([np.zeros(2), np.zeros(2)])
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


# --- gradients left out ------------------------------------------------------------------------------------

NAMED = {"first": np.zeros(3), "second": np.zeros(3), "third": np.zeros(3)}
ONE_EACH = {"bucket_cap_mb": 1e-6, "first_bucket_mb": 1e-6}


@on_ranks(2)
def test_a_gradient_left_out_is_an_error_on_every_rank_and_the_next_step_works() -> None:
    rank = dist.get_rank()
    buckets = GradientBuckets(NAMED, **ONE_EACH)
    for name in NAMED:
        if (rank, name) != (1, "second"):
            buckets.ready(name, np.ones(3))
    with pytest.raises(DistError) as caught:
        buckets.wait()
    who = ("another rank", "this rank")[rank]
    assert str(caught.value).startswith(f"{who} got no gradient for parameter second ")
    for name in NAMED:
        buckets.ready(name, np.full(3, float(rank)))
    assert_close(buckets.wait(), [np.full(3, 0.5)] * 3)


@on_ranks(2)
def test_find_unused_counts_what_is_left_out_as_zeros() -> None:
    buckets = GradientBuckets(NAMED, find_unused=True)
    for _ in range(2):
        if dist.get_rank() == 0:
            buckets.ready("first", np.ones(3))
        buckets.ready("third", np.zeros(3))  # a gradient of zeros is a gradient
        first, second, third = buckets.wait()
        assert second is None
        assert_close([first, third], [np.full(3, 0.5), np.zeros(3)])


@on_ranks(2)
def test_find_unused_keeps_what_was_accumulated() -> None:
    buckets = GradientBuckets(NAMED, find_unused=True)
    with buckets.no_sync():
        buckets.ready("second", np.full(3, 4.0))
    first, second, third = buckets.wait()
    assert first is None
    assert third is None
    assert_close([second], [np.full(3, 4.0)])


# --- misuse and failure ------------------------------------------------------------------------------------


@on_ranks(1)
def test_bad_gradients_are_refused_and_the_step_goes_on() -> None:
    buckets = GradientBuckets(NAMED)
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


def test_bad_settings_are_refused() -> None:
    with pytest.raises(DistArgumentError, match="MAX"):
        GradientBuckets(NAMED, op=ReduceOp.MAX)
    with pytest.raises(DistArgumentError, match="positive"):
        GradientBuckets(NAMED, bucket_cap_mb=0)
    with pytest.raises(DistTypeError, match="count is numpy int64"):
        GradientBuckets({"count": np.zeros(3, np.int64)})
    with pytest.raises(DistTypeError, match="cannot be communicated"):
        GradientBuckets([np.zeros(3, ">f8")])


@on_ranks(2)
def test_a_failed_bucket_surfaces_in_wait_with_its_parameters_and_the_rest_is_settled() -> None:
    group: Any = dist.new_group()
    error = RankLostError("rank 3 is gone", rank=3, op="all_reduce")
    error.host, error.pid = "a", 7
    lost = mock.Mock(**{"wait.side_effect": error})
    calls = iter(["done", "lost", *["done"] * 4])
    group.all_reduce = mock.Mock(
        wraps=group.all_reduce, side_effect=lambda *_, **__: lost if next(calls) == "lost" else mock.DEFAULT
    )
    buckets = GradientBuckets(NAMED, group=group, **ONE_EACH)
    for name in reversed(NAMED):
        buckets.ready(name, np.ones(3))
    with pytest.raises(RankLostError) as caught:
        buckets.wait()
    assert str(caught.value) == "rank 3 is gone (averaging gradient bucket 2 of 3: parameter second)"
    assert (caught.value.rank, caught.value.host, caught.value.pid) == (3, "a", 7)
    assert isinstance(caught.value.__cause__, RankLostError)
    for name in NAMED:
        buckets.ready(name, np.ones(3))
    assert_close(buckets.wait(), [np.ones(3)] * 3)


@on_ranks(2)
def test_a_wait_that_times_out_can_be_repeated() -> None:
    rank = dist.get_rank()
    buckets = GradientBuckets([np.zeros(3)], group=dist.new_group())
    if rank == 0:
        buckets.ready(0, np.full(3, 1.0))
        with pytest.raises(OperationTimeoutError, match="bucket"):
            buckets.wait(timeout=0.05)
        with pytest.raises(DistArgumentError, match="already given"):
            buckets.ready(0, np.full(3, 7.0))
        dist.barrier()
    else:
        dist.barrier()
        buckets.ready(0, np.full(3, 2.0))
    assert buckets.wait()[0].tolist() == [1.5] * 3
    buckets.ready(0, np.full(3, 4.0))
    assert buckets.wait()[0].tolist() == [4.0] * 3


@on_ranks(1)
def test_a_bucket_that_cannot_be_launched_names_its_parameters() -> None:
    group: Any = dist.new_group()
    buckets = GradientBuckets(NAMED, group=group)
    group.all_reduce = mock.Mock(side_effect=OSError("no descriptors left"))
    with pytest.raises(DistBackendError, match=r"OSError: no descriptors left .*third, second, first"):
        buckets.wait()


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


@on_ranks(3)
def test_broadcast_overwrites_all_kinds_of_arrays_in_one_message_per_dtype() -> None:
    group, launched = recorded_group()
    arrays = mixed(dist.get_rank())
    broadcast_parameters(arrays, src=1, group=group)
    assert parameters_digest(arrays) == parameters_digest(mixed(1))
    assert len(launched) == 2


@pytest.mark.torch
@needs_torch
@on_ranks(2)
def test_broadcast_of_types_that_torch_does_not_copy() -> None:
    import torch

    rank = dist.get_rank()
    bits = [torch.arange(4, dtype=torch.uint8) + rank, torch.full((2, 3), rank, dtype=torch.uint8).T]
    for dtype in (torch.uint4, torch.float8_e8m0fnu):
        given = [each.clone() for each in bits]
        broadcast_parameters([each.view(dtype) for each in given], src=1)
        assert given[0].tolist() == [1, 2, 3, 4]
        assert given[1].tolist() == [[1] * 2] * 3
        check_identical([each.view(dtype) for each in given])
        with pytest.raises(
            DistTypeError, match=r"AVG is not defined for .* \(it is moved, and not reduced\)"
        ):
            average_gradients([each.view(dtype) for each in given])
    other = torch.uint4 if rank else torch.float8_e8m0fnu
    with pytest.raises(dist.CollectiveMismatchError, match="uint4"):
        broadcast_parameters([each.view(other) for each in bits])


@on_ranks(2)
def test_a_lone_contiguous_array_is_sent_from_where_it_lies() -> None:
    array = np.full((2, 3), float(dist.get_rank()))
    broadcast_parameters([array], src=1, group=reversed_world())
    assert array.tolist() == [[1.0] * 3] * 2


@on_ranks(3)
def test_average_gradients_in_place() -> None:
    arrays = mixed(dist.get_rank())
    average_gradients(arrays)
    columns = zip(*(mixed(rank).values() for rank in range(3)), strict=True)
    for ours, column in zip(arrays.values(), columns, strict=True):
        theirs = np.mean([c.astype(np.float64) for c in column], axis=0)
        np.testing.assert_allclose(ours, theirs, rtol=1e-12 if ours.dtype == np.float64 else 1e-6)


@on_ranks(1)
def test_arrays_that_cannot_be_written_are_refused_before_anything_is_sent() -> None:
    group, launched = recorded_group()
    fixed = np.ones(3)
    fixed.flags.writeable = False
    for wrong, kind in (
        (fixed, DistArgumentError),
        (np.float64(1), DistTypeError),
        (None, DistTypeError),
    ):
        with pytest.raises(kind):
            broadcast_parameters([np.ones(3), wrong], group=group)
        with pytest.raises(kind):
            average_gradients([np.ones(3), wrong], group=group)
    assert launched == []


@on_ranks(3)
def test_a_group_of_some_ranks() -> None:
    pair, rank = dist.new_group([0, 2]), dist.get_rank()
    of_pair = [np.full(3, float(rank))]
    if rank == 1:
        with pytest.raises(DistArgumentError, match="not in the given group"):
            GradientBuckets(of_pair, group=pair)
    else:
        broadcast_parameters(of_pair, src=2, group=pair)
        assert of_pair[0].tolist() == [2, 2, 2]


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
@needs_torch
@on_ranks(2)  # which have imported torch
def test_the_digest_of_tensors_is_that_of_equal_arrays() -> None:
    import torch

    tensors = {name: torch.from_numpy(array.copy()) for name, array in mixed(0).items()}
    assert parameters_digest(tensors) == parameters_digest(mixed(0))
    assert len(parameters_digest([torch.ones(3, dtype=torch.bfloat16), torch.ones(())])) == 64


@on_ranks(3)
def test_identical_ranks_agree_on_the_digest() -> None:
    assert check_identical(mixed(0)) == parameters_digest(mixed(0))
    digests: list[Any] = [None] * 3
    dist.all_gather_object(digests, check_identical([]))
    assert len(set(digests)) == 1


@on_ranks(5)
def test_the_ranks_that_differ_are_named_with_what_differs() -> None:
    rank, group = dist.get_rank(), dist.new_group([4, 2, 3, 0, 1], sort_ranks=False)
    with pytest.raises(DistError) as caught:
        check_identical(one_ulp_up(mixed(0)) if rank in (0, 2) else mixed(0), group)
    assert "ranks 2, 0 of 5 differ from the others; they differ in parameter b" in str(caught.value)
    assert caught.value.rank == 2
    with pytest.raises(
        DistError,
        match=r"ranks 1, 2, 3, 4 of 5 differ from the others; they differ in parameters a, b, strided",
    ):
        check_identical(mixed(rank))


@on_ranks(3)
def test_different_numbers_of_arrays_are_told() -> None:
    group = reversed_world()
    with pytest.raises(DistError) as caught:
        check_identical(list(mixed(0).values())[: 3 if group.rank() else 2], group)
    assert "rank 2 of 3 differ from the others; they have different numbers of arrays (2, 3, 3" in str(
        caught.value
    )


# --- a lost rank -------------------------------------------------------------------------------------------


def lose_a_rank(rank: int) -> None:
    dist.init_process_group()
    buckets = GradientBuckets(NAMED, **ONE_EACH)
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


@pytest.mark.every(n=0)
def test_a_lost_rank_surfaces_with_the_bucket() -> None:
    spawn(lose_a_rank, nprocs=3)


@pytest.mark.torch
@needs_torch
def test_a_type_that_numpy_lacks_is_a_parameter_by_dlpack() -> None:
    import torch

    ml_dtypes = pytest.importorskip("ml_dtypes")
    values = np.arange(4.0).astype(ml_dtypes.bfloat16)
    exported = KINDS["DLPack"](torch.arange(4.0).bfloat16())
    assert parameters_digest([exported]) == parameters_digest([values])
