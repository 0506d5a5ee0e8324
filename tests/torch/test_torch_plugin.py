"""unicoll's backends in torch.distributed: every operation, every start, errors and shutdown."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.programs import python
from tests.support.ranks import ProcessJob

if importlib.util.find_spec("torch") is None:
    pytest.skip("torch is not installed", allow_module_level=True)

from tests.torch import torch_jobs as jobs

pytestmark = pytest.mark.torch
Run = Callable[..., list[Any]]


def ended(job: ProcessJob) -> None:
    """All ranks leave without leaked resources."""
    job.call(jobs.leave)
    assert job.results() == [[]] * job.size


@pytest.fixture(scope="module", params=[2, 3])
def run(request: pytest.FixtureRequest) -> Iterator[Run]:
    """``run(function, ...)``: the results of a call on ranks that all tests of the module share."""
    with ProcessJob(request.param, join="env", quiet=False, modules=["torch"]) as job:
        job.call(jobs.join, "unicoll-gloo")
        assert job.results() == [(rank, job.size, "unicoll-gloo") for rank in range(job.size)]

        def call(function: Callable[..., Any], *args: Any) -> list[Any]:
            job.call(function, *args)
            return job.results()

        yield call
        ended(job)


@pytest.mark.every(2)
@pytest.mark.parametrize("async_op", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("collective", jobs.COLLECTIVES, ids=lambda f: f.__name__)
def test_collectives(run: Run, collective: Callable[[bool], None], async_op: bool) -> None:
    run(collective, async_op)


@pytest.mark.parametrize(
    "job", [jobs.messages, jobs.objects, jobs.groups, jobs.futures, jobs.flight_recorder, jobs.recovery]
)
def test_other_operations(run: Run, job: Callable[[], None]) -> None:
    run(job)


def test_properties_of_a_group(run: Run) -> None:
    for facts in run(jobs.facts):
        assert facts["backend"] == facts["name"] == "unicoll-gloo"
        assert facts["devices"] == ["cpu"]
        assert "torch's tcp://127.0.0.1" in facts["explained"]
        assert "shared memory" in facts["explained"]
        assert facts["available"]


def test_functions_of_unicoll_serve_the_job(run: Run, tmp_path: Path) -> None:
    run(jobs.unicoll_functions, str(tmp_path))


@pytest.mark.parametrize("by_unicoll", [False, True], ids=["torch", "unicoll"])
def test_one_call_destroys_the_groups_of_both(by_unicoll: bool, tmp_path: Path) -> None:
    metrics = tmp_path / "metrics_{rank}.prom"
    with ProcessJob(2, join="env", modules=["torch"], env={"UNICOLL_METRICS_FILE": str(metrics)}) as job:
        job.call(jobs.join, "unicoll")
        job.results()
        job.call(jobs.both_ways_end, by_unicoll)
        job.results()
        ended(job)
    assert len(list(tmp_path.glob("metrics_?.prom"))) == 2


def test_a_part_that_torch_has_not_registered_ends_with_the_job() -> None:
    with ProcessJob(2, join="env", modules=["torch"]) as job:
        job.call(jobs.joined_without_metrics, "unicoll-gloo")
        assert all("there is no directory /nowhere" in error for error in job.results())
        job.call(jobs.join, "unicoll-gloo")
        job.results()
        job.call(jobs.a_part_that_torch_has_not_registered)
        job.results()
        ended(job)


def test_invalid_arguments_raise(run: Run) -> None:
    for said in run(jobs.refusals):
        assert "complex" in said[0]
        assert "DistTypeError: all_reduce: ReduceOp.BOR is not defined for float32" in said[1]
        assert "meta" in said[2]
        assert "DistArgumentError: all_gather_into_tensor: output" in said[3]
        assert "sparse_csr" in said[4]
        assert said[5].startswith("DistArgumentError: explain")
        assert said[6].startswith("DistArgumentError: send: tag 9223372036854775808")
        assert said[7].startswith("DistArgumentError: recv: tag -9223372036854775809")
        assert "the shapes of the sparse tensors differ:\n  rank 0: [4]\n  rank 1: [5]" in said[8]


def test_a_process_in_place_of_a_lost_one_needs_a_group_that_reconfigures() -> None:
    program = "import torch.distributed as dist, unicoll.torch_plugin; dist.init_process_group('unicoll')"
    ended = python("-c", program, RANK="0", WORLD_SIZE="2", UNICOLL_REPLACEMENT="1")
    assert ended.returncode == 1
    assert (
        "DistArgumentError: init_process_group: this process replaces a rank that has ended" in ended.stderr
    )
