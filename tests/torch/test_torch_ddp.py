"""torch's DistributedDataParallel over unicoll groups: results equal those of one process on the full batch."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.support.programs import python

pytest.importorskip("torch")

from tests.support.ranks import ROOT, Pool, ProcessJob, pools
from tests.support.worker import enter, leave
from tests.torch import ddp_programs as programs

pytestmark = pytest.mark.torch


@pytest.fixture(scope="module")
def of() -> Iterator[Callable[[int], Pool]]:
    with pools(partial(ProcessJob, modules=["torch"])) as made:
        yield made


@pytest.fixture
def two(of: Callable[[int], Pool]) -> Pool:
    return of(2)


@pytest.mark.parametrize(
    "settings",
    [{}, {"gradient_as_bucket_view": True}, {"static_graph": True}],
    ids=lambda settings: "+".join(settings) or "plain",
)
def test_training_and_no_sync_equal_one_process(two: Pool, settings: dict[str, Any]) -> None:
    mine, others = two.run(programs.train, settings)
    assert mine == others > 1  # buckets


@pytest.mark.parametrize("as_views", [False, True])
def test_parameters_unused_on_some_or_all_ranks(two: Pool, as_views: bool) -> None:
    settings = {"find_unused_parameters": True, "gradient_as_bucket_view": as_views}
    assert two.run(programs.unused, settings) == [["module.spare.weight", "module.spare.bias"]] * 2


@pytest.mark.parametrize("which", ["allreduce_hook", "fp16_compress_hook", "own"])
def test_comm_hooks(two: Pool, which: str) -> None:
    two.run(programs.hooked, which)


@pytest.mark.parametrize("counts", [[3, 1], [1, 3, 0]], ids=str)
@pytest.mark.parametrize("by_initial", [True, False])
def test_join_with_uneven_inputs(of: Callable[[int], Pool], counts: list[int], by_initial: bool) -> None:
    of(len(counts)).run(programs.uneven, counts, by_initial)


def test_gradients_are_averaged_over_the_process_group(two: Pool) -> None:
    assert two.run(programs.in_groups) == [[0.0, 0.5, 0.5], [1.0, 0.5, 0.5]]


def test_torchs_default_group_is_created_and_destroyed() -> None:
    with ProcessJob(2, modules=["torch"]) as job:
        job.call(enter)
        job.results()
        job.call(programs.default_group_states)
        assert job.results() == [[False, True, False, True, False]] * 2
        job.call(leave)
        assert job.results() == [[], []]


@pytest.mark.parametrize("backend", ["unicoll", "gloo"])
def test_with_an_existing_default_group_of_torch(two: Pool, backend: str, tmp_path: Path) -> None:
    assert two.run(programs.with_torchs_default_group, backend, str(tmp_path / "meeting")) == [[0.5] * 3] * 2


def test_torchs_default_group_without_one_of_unicoll(tmp_path: Path) -> None:
    with ProcessJob(2, modules=["torch"]) as job:
        job.call(programs.torch_alone, str(tmp_path / "meeting"))
        for found, said in job.results():
            assert found == [0.5]
            assert said.startswith("NotInitializedError: torch_group: there is no default process group")


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("destroyed", "DistArgumentError: torch_group: <ProcessGroup 'group-"),
        ("not in it", "DistArgumentError: torch_group: this process is not in the given group"),
        ("no group", "DistTypeError: group: expected a process group, got 'nothing'"),
    ],
)
def test_invalid_groups_raise(two: Pool, kind: str, message: str) -> None:
    for text in two.run(programs.misused, kind):
        assert text.startswith(message)


def test_torchs_own_class_says_what_to_use(tmp_path: Path) -> None:
    """Torch's class refuses a unicoll group; without a group torch's error, if it is not caught, says what to do."""
    for argument, says in (
        ("", r"\(unicoll has one: use unicoll.parallel.DistributedDataParallel"),
        (
            "unicoll.group.WORLD",
            "DistTypeError: <ProcessGroup 'world': .*unicoll.parallel.Distributed.* takes it",
        ),
        ("torch_group(unicoll.group.WORLD)", ""),
    ):
        (tmp_path / "train.py").write_text(
            "import torch, unicoll\n"
            "from unicoll.torch_plugin import torch_group\n"
            "unicoll.init_process_group()\n"
            f"torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1, 1), process_group={argument or None})\n"
        )
        done = python(tmp_path / "train.py", RANK="0", WORLD_SIZE="1", PYTHONPATH=str(ROOT))
        assert (done.returncode != 0) == bool(says), done
        assert re.search(says, done.stderr.rstrip().rpartition("\n")[2]), done


def test_arguments_equal_torchs() -> None:
    from torch.nn.parallel import DistributedDataParallel as Torchs

    from unicoll.parallel import DistributedDataParallel as Ours

    assert inspect.signature(Ours) == inspect.signature(Torchs)


def test_state_dict_and_copies(two: Pool) -> None:
    names = [f"module.layers.{i}.{what}" for i in programs.LAYERS for what in ("weight", "bias")]
    assert two.run(programs.copies) == [names] * 2


def test_with_torchs_data_loader(two: Pool) -> None:
    mine, theirs = two.run(programs.load_and_train)
    assert sorted(mine + theirs) == list(range(20))


def test_a_dead_rank_is_named_in_the_backward_pass() -> None:
    with ProcessJob(2, modules=["torch"]) as job:
        job.call(enter)
        job.results()
        job.call(programs.rank_1_exits)
        outcome, _ = job.collect()
    assert outcome.failure is not None
    assert outcome.failure.type == "RankLostError"
    assert outcome.failure.message.startswith("all_reduce(")
    assert ": rank 1 (host " in outcome.failure.message
