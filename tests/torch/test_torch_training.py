"""What torch builds on torch.distributed, on unicoll's backends: data parallel, sharded, pipelined, compiled."""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.support.ranks import ProcessJob

if importlib.util.find_spec("torch") is None:
    pytest.skip("torch is not installed", allow_module_level=True)

import torch

from tests.torch import torch_jobs
from tests.torch import torch_training_jobs as jobs

pytestmark = pytest.mark.torch
Run = Callable[..., list[Any]]


@pytest.fixture(scope="module")
def run() -> Iterator[Run]:
    """``run(function)``: the results of a call on two ranks that stay joined."""
    with ProcessJob(2, join="env", quiet=False, modules=["torch"]) as job:
        job.call(torch_jobs.join, "unicoll")
        assert job.results() == [(0, 2, "unicoll"), (1, 2, "unicoll")]

        def call(function: Callable[..., Any]) -> list[Any]:
            job.call(function)
            return job.results(120.0)

        yield call
        job.call(torch_jobs.leave)
        assert job.results() == [[], []]


# torch 2.6's FSDP2 fails without a GPU, on any backend: its streams of the CPU have no events
has_fsdp2 = pytest.mark.skipif(torch.__version__ < "2.7", reason="this torch has FSDP2 on GPUs alone")


@pytest.mark.every(n=2)
@pytest.mark.parametrize(
    "job",
    [pytest.param(f, marks=has_fsdp2) if "fsdp2" in f.__name__ else f for f in jobs.JOBS],
    ids=lambda f: f.__name__,
)
def test_it_works_as_on_one_process(run: Run, job: Callable[[], None]) -> None:
    run(job)


@has_fsdp2
@pytest.mark.every(n=0)
def test_meshes_of_two_dimensions() -> None:
    with ProcessJob(4, join="env", quiet=False, modules=["torch"]) as job:
        for function in (torch_jobs.join, jobs.two_dimensions, torch_jobs.leave):
            job.call(function, *(["unicoll"] if function is torch_jobs.join else []))
            results = job.results(120.0)
    assert results == [[]] * 4


def test_ddp_names_unused_parameters(run: Run) -> None:
    for said in run(jobs.ddp_names_unused_parameters):
        assert "Parameter indices which did not receive grad" in said


@pytest.mark.skipif(shutil.which("c++") is None and shutil.which("g++") is None, reason="no C++ compiler")
@pytest.mark.every(n=0)
def test_compiled_collectives(run: Run) -> None:
    run(jobs.compiled)


def test_profiles_show_the_operations(run: Run) -> None:
    for seen in run(jobs.profiled):
        assert seen["unicoll:all_reduce"] == 2
        assert seen["unicoll:broadcast"] == 1
        assert ("unicoll:send" in seen) != ("unicoll:recv" in seen)
