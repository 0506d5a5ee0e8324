"""What torch builds on torch.distributed, on unicoll's backends: data parallel, sharded, pipelined, compiled."""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from ranks import Job

if importlib.util.find_spec("torch") is None:
    pytest.skip("torch is not installed", allow_module_level=True)

import torch_jobs
import torch_training_jobs as jobs

pytestmark = pytest.mark.torch
Run = Callable[..., list[Any]]


@pytest.fixture(scope="module")
def run() -> Iterator[Run]:
    """``run(function)``: the results of a call on two ranks that stay joined."""
    with Job(2, join="env", quiet=False) as job:
        job.call(torch_jobs.join, "unicoll")
        assert job.results() == [(0, 2, "unicoll"), (1, 2, "unicoll")]

        def call(function: Callable[..., Any]) -> list[Any]:
            job.call(function)
            return job.results(120.0)

        yield call
        job.call(torch_jobs.leave)
        assert job.results() == [[], []]


@pytest.mark.parametrize("job", jobs.JOBS, ids=lambda f: f.__name__)
def test_it_works_as_on_one_process(run: Run, job: Callable[[], None]) -> None:
    run(job)


def test_ddp_names_unused_parameters(run: Run) -> None:
    for said in run(jobs.ddp_says_which_parameters_are_unused):
        assert "Parameter indices which did not receive grad" in said


@pytest.mark.skipif(shutil.which("c++") is None and shutil.which("g++") is None, reason="no C++ compiler")
def test_compiled_collectives(run: Run) -> None:
    run(jobs.compiled)


def test_profiles_show_the_operations(run: Run) -> None:
    for seen in run(jobs.profiled):
        assert seen["unicoll:all_reduce"] == 2
        assert seen["unicoll:broadcast"] == 1
        assert ("unicoll:send" in seen) != ("unicoll:recv" in seen)
