"""An exception of a signal's handler in a call of torch.distributed on the plug-in: right data, or an error.

The operations and the rules are those of ``tests/faults/test_interrupts.py``.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from tests.faults.interrupt_jobs import OPERATIONS, TRIALS_S, VICTIM
from tests.support.ranks import ProcessJob, sample_seed
from tests.support.selection import is_short

if importlib.util.find_spec("torch") is None:
    pytest.skip("torch is not installed", allow_module_level=True)

from tests.torch import interrupt_jobs as jobs
from tests.torch import torch_jobs

pytestmark = pytest.mark.torch
_SHARE = 24
"""The short run tries every nth point."""


def joined(transport: str) -> ProcessJob:
    env = {"UNICOLL_TRANSPORT": transport} if transport else {}
    job = ProcessJob(2, join="env", env=env, quiet=False, modules=["torch"])
    job.call(torch_jobs.join, "unicoll-gloo")
    job.results()
    return job


@pytest.mark.parametrize("transport", ["", pytest.param("tcp", marks=pytest.mark.every(n=0))])
@pytest.mark.parametrize("goes_on", [True, pytest.param(False, marks=pytest.mark.every(n=0))])
def test_each_point_of_a_call(goes_on: bool, transport: str) -> None:
    every = _SHARE if is_short() else 1
    points = trials = 0
    wrong: list[str] = []
    with joined(transport) as job:
        for name in OPERATIONS:
            job.call(jobs.trials, name, goes_on, every, sample_seed())
            results: list[Any] = job.results(TRIALS_S)
            points, trials = points + results[0][0], trials + results[0][1]
            wrong += [text for result in results for text in result[2]]
    print(f"{transport or 'auto'}: {points} points, {trials} trials")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("how", ["program", "functional", "coalesced"])
def test_a_wait(how: str) -> None:
    """One of the program can be repeated; one of torch's code fails the group."""
    with joined("") as job:
        job.call(jobs.waits, how)
        job.results()


@pytest.mark.every(n=0)
@pytest.mark.parametrize("transport", ["", pytest.param("tcp", marks=pytest.mark.every(n=0))])
def test_an_alarm_in_a_step_of_data_parallel_training(transport: str) -> None:
    """Gradients are the mean of the ranks', or the step raises; the interrupted rank goes on, or leaves."""
    count = 20 if is_short() else 200
    with joined(transport) as job:
        job.call(jobs.data_parallel_steps, count, sample_seed())
        results = job.results(TRIALS_S)
    print(f"{transport or 'auto'}: {count} steps, {results[VICTIM][0]} interrupted")
    wrong = [text for result in results for text in result[1]]
    assert not wrong, "\n".join(wrong)
    assert results[VICTIM][0] > 0


def test_a_reconfiguration(tmp_path: Path) -> None:
    with ProcessJob(1, quiet=False, modules=["torch"]) as job:
        job.call(jobs.reconfigurations, str(tmp_path), _SHARE if is_short() else 1, sample_seed())
        assert job.results()[0] > 0
