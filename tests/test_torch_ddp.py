"""DistributedDataParallel for torch modules, on real processes: equal to one process on the whole batch."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("torch")

import ddp_programs as programs

from unicoll.testing.ranks import Job, Pool, pools
from unicoll.testing.worker import enter

pytestmark = pytest.mark.torch


@pytest.fixture(scope="module")
def two() -> Iterator[Pool]:
    with pools() as pool:
        yield pool(2)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"gradient_as_bucket_view": True},
        {"find_unused_parameters": True},
        {"static_graph": True},
        {"static_graph": True, "gradient_as_bucket_view": True, "find_unused_parameters": True},
    ],
    ids=lambda settings: "+".join(settings) or "plain",
)
def test_a_perceptron_learns_as_one_process_on_the_whole_batch(two: Pool, settings: dict[str, Any]) -> None:
    operations = two.run(programs.train_perceptron, settings)
    tells_usage = "find_unused_parameters" in settings and "static_graph" not in settings
    assert operations == [6 + tells_usage] * 2


@pytest.mark.parametrize("as_views", [False, True])
def test_a_transformer_with_heads_that_differ_by_rank(two: Pool, as_views: bool) -> None:
    settings = {"find_unused_parameters": True, "gradient_as_bucket_view": as_views}
    unused = two.run(programs.train_transformer, settings, "own")
    assert unused == [["spare.bias", "spare.weight"]] * 2


@pytest.mark.parametrize("settings", [{"static_graph": True}, {"find_unused_parameters": True}])
def test_a_transformer_with_parameters_that_nobody_uses(two: Pool, settings: dict[str, Any]) -> None:
    unused = two.run(programs.train_transformer, settings, "first")
    assert unused == [["heads.1.bias", "heads.1.weight", "spare.bias", "spare.weight"]] * 2


def test_a_head_that_nobody_uses_any_more_has_no_gradient_any_more(two: Pool) -> None:
    unused = two.run(programs.train_transformer, {"find_unused_parameters": True}, "in turn")
    assert unused == [["heads.1.bias", "heads.1.weight", "spare.bias", "spare.weight"]] * 2


@pytest.mark.parametrize("as_views", [False, True])
@pytest.mark.parametrize("find_unused", [False, True])
def test_no_sync_adds_up(two: Pool, as_views: bool, find_unused: bool) -> None:
    two.run(programs.accumulate, {"gradient_as_bucket_view": as_views, "find_unused_parameters": find_unused})


def test_two_passes_before_a_backward(two: Pool) -> None:
    two.run(programs.many_passes)
    two.run(programs.two_heads)


@pytest.mark.parametrize("which", ["allreduce", "fp16", "bf16", "work", "future", "torch", "tensor"])
def test_comm_hooks(two: Pool, which: str) -> None:
    assert two.run(programs.hooked, which) == [[(i, i == 5) for i in range(6)]] * 2


def test_gradients_as_views_of_the_bucket(two: Pool) -> None:
    two.run(programs.views)


def test_a_static_graph_with_reentrant_checkpoints(two: Pool) -> None:
    two.run(programs.reentrant)


@pytest.mark.parametrize("broadcast", [True, False])
def test_buffers_of_rank_0_before_each_forward(two: Pool, broadcast: bool) -> None:
    (first, first_seen), (second, second_seen) = two.run(programs.normalise, broadcast)
    assert first != second
    assert first_seen == first
    assert second_seen == (first if broadcast else second)


@pytest.mark.parametrize(
    ("settings", "second"),
    [
        ({}, (0.0, 0.0)),
        ({"broadcast_buffers": False}, (0.0, 1.0)),
        ({"forward_sync_buffers": False}, (0.0, 0.0)),
        ({"init_sync": False}, (1.0, 1.0)),
    ],
)
def test_what_is_spread_at_construction(two: Pool, settings: dict[str, Any], second: Any) -> None:
    assert two.run(programs.beginnings, settings) == [(0.0, 0.0), second]


def test_arguments_are_torchs_in_their_order() -> None:
    from torch.nn.parallel import DistributedDataParallel as Torchs

    from unicoll.parallel import DistributedDataParallel as Ours

    theirs = inspect.signature(Torchs).parameters
    ours = inspect.signature(Ours).parameters
    in_place = [name for name, p in ours.items() if p.kind is p.POSITIONAL_OR_KEYWORD]
    there = [name for name in theirs if name in in_place]
    assert there == [name for name in in_place if name in theirs]
    assert set(in_place) - set(there) <= {"init_sync"}  # torch 2.6 does not have it
    for name in there:
        if name != "broadcast_buffers":  # None since 2.13, True before
            assert ours[name].default == theirs[name].default, name


def test_one_bucket_per_dtype_and_fixed_parameters_are_spread_only(two: Pool) -> None:
    expected = [("torch.bfloat16", 15), ("torch.float32", 44)]
    assert two.run(programs.kinds) == [expected] * 2


def test_channels_last(two: Pool) -> None:
    two.run(programs.channels_last)


def test_buckets_are_launched_while_the_backward_pass_runs(two: Pool) -> None:
    for events in two.run(programs.order_of_events):
        names = [e for e in events if e != "launch"]
        launches = [i for i, e in enumerate(events) if e == "launch"]
        assert len(names) == len(launches) == 6
        assert launches[0] < events.index(names[-1])
        for number, place in enumerate(launches):  # each right after its own gradient
            assert len([e for e in events[:place] if e != "launch"]) <= number + 2


def test_state_dict_and_copies(two: Pool) -> None:
    names = itertools.product((0, 2, 4), ("weight", "bias"))
    assert two.run(programs.copies) == [[f"module.layers.{i}.{what}" for i, what in names]] * 2


def test_the_given_group_averages(two: Pool) -> None:
    assert two.run(programs.in_groups) == [[0.0, 0.5], [1.0, 0.5]]


def test_with_torchs_data_loader(two: Pool) -> None:
    mine, theirs = two.run(programs.load_and_train)
    assert sorted(mine + theirs) == list(range(20))


UNUSED = "heads.1.weight, heads.1.bias, spare.weight, spare.bias"
SPREAD = "DistError: DistributedDataParallel needs the same module on all ranks: rank 1 has "


def test_parameters_without_a_gradient_are_named(two: Pool) -> None:
    for rank, text in enumerate(two.run(programs.message, "unused")):
        assert text.startswith("DistError: Expected to have finished reduction in the prior iteration")
        assert "find_unused_parameters=True" in text
        assert f"Parameters which did not receive grad for rank {rank}: {UNUSED}." in text
        assert text.endswith(f"Parameter indices which did not receive grad for rank {rank}: 27 28 29 30")


@pytest.mark.parametrize(
    ("misuse", "told"),
    [
        ("changing", "DistError: parameter heads.1.bias (index 28) was marked ready twice in one step: with static_"),
        ("unseen", "DistError: parameter layers.0.weight (index 0) was marked ready twice in one step: it got a grad"),
        ("shape", SPREAD + "1.weight (index 2) of shape [3, 2], float32, strides [2, 1], rank 0 has 1.weight (index 2) "
         "of shape [2, 2], float32, strides [2, 1]"),
        ("number", SPREAD + "1 parameters and buffers, rank 0 has 2; not on both: bias"),
        ("dtype", SPREAD + "weight (index 0) of shape [2, 3], float64"),
        ("two hooks", "DistArgumentError: a communication hook is registered already"),
        ("bad result", "DistTypeError: the communication hook gave a tensor of 7, not a tensor of 8 elements "
         "(averaging gradient bucket 1 of 1: parameters bias, weight)"),
        ("hook raises", "DistBackendError: OSError: no room (averaging gradient bucket 1 of 1"),
        ("sparse", "DistTypeError: 0 has sparse gradients"),
        ("no shape", "DistTypeError: parameter weight has no shape yet"),
        ("nothing to learn", "DistArgumentError: DistributedDataParallel is not needed"),
        ("no module", "DistTypeError: module: expected a torch.nn.Module, got list"),
        ("devices", "DistArgumentError: device_ids and output_device are for modules on one GPU"),
        ("output", "DistArgumentError: output_device (0) needs device_ids"),
        ("cap", "DistArgumentError: bucket_cap_mb (0) must be positive"),
    ],
)  # fmt: skip
def test_misuse_is_refused_on_every_rank(two: Pool, misuse: str, told: str) -> None:
    for text in two.run(programs.message, misuse):
        assert text.startswith(told)


def test_a_rank_that_dies_ends_the_backward_pass_of_the_others() -> None:
    with Job(2) as job:
        job.call(enter)
        job.results()
        job.call(programs.left_alone)
        outcome, _ = job.collect()
    assert outcome.failure is not None
    assert outcome.failure.type == "RankLostError"
    assert outcome.failure.fields["rank"] == 1
    assert "(averaging gradient bucket 1 of 6: parameter layers.4.bias)" in outcome.failure.message
