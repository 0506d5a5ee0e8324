"""unicoll's NCCL backend in torch.distributed, on the simulated device: messages, groups, and tensors of works."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.gpu.check import plugin_jobs
from tests.gpu.check.command import PASSED, main
from tests.simulated_nccl.ranks import SimulatedJob

if importlib.util.find_spec("torch") is None:
    pytest.skip("torch is not installed", allow_module_level=True)

from tests.torch import torch_device_jobs as jobs

pytestmark = pytest.mark.torch
Run = Callable[..., list[Any]]
_LIMIT_S = 20.0


@contextmanager
def ranks(size: int, bound: bool = False, **settings: Any) -> Iterator[Run]:
    """``run(function, ...)`` on ranks that join, and leave without a fault of the simulated device."""
    with SimulatedJob(size, join="env", quiet=False, modules=["torch"], **settings) as job:
        job.call(jobs.join, bound, _LIMIT_S)
        job.results()

        def run(function: Callable[..., Any], *args: Any) -> list[Any]:
            job.call(function, *args)
            return job.results()

        run(jobs.connect)
        yield run
        assert run(jobs.leave) == [[]] * size


@pytest.fixture(scope="module")
def two() -> Iterator[Run]:
    with ranks(2, policy="random", seed=7) as run:
        yield run


@pytest.mark.every(n=0)
def test_messages_of_a_batch_do_not_wait_for_one_another(two: Run) -> None:
    for rank, found in enumerate(two(jobs.batches)):
        assert found == [[2.0 - rank]] * 6 + [[2.0]]


def test_messages_that_torch_coalesces_do_not_wait_for_one_another(two: Run) -> None:
    for rank, found in enumerate(two(jobs.coalesced_messages)):
        assert found == [[2.0 - rank]] * 2


def test_an_invalid_batch_sends_nothing(two: Run) -> None:
    for said, after in two(jobs.refused_messages):
        assert "is bound to" in said
        assert after == [2.0]


def test_tags_have_no_effect_over_nccl(two: Run) -> None:
    """As with torch's NCCL backend."""
    assert two(jobs.tagged_messages) == [[[1.0], [2.0]], [[1.0], [1.0]]]


def test_futures(two: Run) -> None:
    assert two(jobs.futures) == [[2.0]] * 2


def test_operations_do_not_wake_the_watchdog(two: Run) -> None:
    assert two(jobs.asking) == [[False, True]] * 2


def test_awaited_works_release_their_tensors_before_the_device_is_done(two: Run) -> None:
    for found in two(jobs.waited_for):
        assert found == {"let go on the same stream": True, "early": False, "ended": True}


@pytest.mark.parametrize("job", [jobs.waited_for_elsewhere, jobs.never_waited_for], ids=lambda f: f.__name__)
def test_tensors_are_kept_until_the_device_is_done(two: Run, job: Callable[[], Any]) -> None:
    assert two(job) == [True] * 2


@pytest.mark.parametrize("mode", ["global", "thread_local", "relaxed"])
def test_works_in_a_graph_are_released_after_the_capture(two: Run, mode: str) -> None:
    for found in two(jobs.recorded, mode):
        assert found == {"within": False, "after": True, "value": [3.0], "works": found["works"]}
        assert found["works"] <= 16


def test_groups_are_split_from_a_bound_one() -> None:
    with ranks(3, bound=True) as run:
        found = run(jobs.subgroups)
    for rank, facts in enumerate(found):
        cuda = [f"cuda:{rank}"] * 2
        assert facts["new_group"] == ([[0], [4.0], *cuda, 0] if rank != 1 else [[None]])
        assert facts["split_group"] == ([[0], [3.0], *cuda, 0] if rank < 2 else [[None]])
        assert facts["on the CPU"] == []
        if rank < 2:
            assert facts["part of a part"] == [[rank], [rank + 1.0], *cuda, 0]
    assert found[1]["members only"] == [[], [2.0], "cuda:1", "cuda:1", 0]


@pytest.mark.skipif(not hasattr(jobs.dist, "_reconfigure"), reason="since torch 2.14")
def test_members_of_a_bound_group_change(tmp_path: Path) -> None:
    with SimulatedJob(3, join="env", quiet=False, modules=["torch"]) as job:
        job.call(jobs.join_without_members, str(tmp_path / "store"))
        job.results()
        job.call(jobs.members_change)
        assert job.results() == [[[6.0], [3.0], [6.0], [6.0]], [[6.0]] * 3, [[6.0], [3.0], [6.0], [6.0]]]
        job.call(jobs.leave)
        assert job.results() == [[]] * 3


@pytest.mark.parametrize("by_unicoll", [False, True], ids=["torch", "unicoll"])
def test_destroy_raises_the_error_of_the_last_operation(by_unicoll: bool) -> None:
    with SimulatedJob(2, join="env", modules=["torch"]) as job:
        job.call(jobs.join, False, _LIMIT_S)
        job.results()
        job.call(jobs.connect)
        job.results()
        job.call(jobs.last_operation_fails, by_unicoll)
        (said, left), other = job.results()
    assert said == "GroupAbortedError: group 'world': the test ends it"
    assert not left
    assert other == ("nothing", False)


@pytest.mark.every(n=0)
def test_the_gpu_stage_on_the_simulated_device(tmp_path: Path) -> None:
    """All programs of the torch.distributed stage of scripts/gpu_check run; none is skipped."""
    path = tmp_path / "found.json"
    code = main(["--simulate", "--patience", "60", "--stages", "plugin", "--output", str(path), "--no-plot"])
    found = {
        check["name"]: check["outcome"]
        for check in json.loads(path.read_text())["stages"]["plugin"]["checks"]
    }
    names = [program.__name__.replace("_", " ") for program in plugin_jobs.PROGRAMS]
    assert found == dict.fromkeys([*names, "the ranks leave"], "passed")
    assert code == PASSED
