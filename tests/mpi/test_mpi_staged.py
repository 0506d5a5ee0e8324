"""Device arrays under mpirun: staged over MPI, and over NCCL with a rendezvous over MPI."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from tests.mpi.mpi_ranks import MpiJob, unavailable_reason
from tests.nccl import staged
from tests.nccl import staged_jobs as jobs
from tests.nccl.test_staged import test_messages_that_are_shorter_than_the_array  # noqa: F401
from tests.simulated_nccl.ranks import Settings
from tests.support.ranks import ROOT, Pool, end_cleanly, environment, pools
from tests.support.worker import enter

if unavailable_reason():
    pytest.skip(unavailable_reason(), allow_module_level=True)


def _start(size: int, backend: str, seed: int) -> MpiJob:
    settings = Settings(policy="random", seed=seed, own_stream=True, backend=backend)
    return MpiJob(size, backend=backend, warm_up=True, prepare=(staged.prepare, settings))


@pytest.fixture(scope="module")
def pool(seed: int) -> Iterator[Callable[[int], Pool]]:
    with pools(partial(_start, backend="cpu:mpi,cuda:mpi", seed=seed)) as made:
        yield made


@pytest.mark.every(n=3)
class TestMPI(staged.Staged):
    backend = "mpi"

    @pytest.fixture(scope="class")
    @classmethod
    def pool(cls, seed: int) -> Iterator[Callable[[int], Pool]]:
        with pools(partial(_start, backend="mpi", seed=seed)) as made:
            yield made


@pytest.mark.parametrize("backend", ["cpu:mpi,cuda:nccl", None])
def test_nccl_uses_the_store_over_mpi(backend: str | None) -> None:
    prepare = (staged.prepare, Settings(backend=backend))
    with MpiJob(2, backend="mpi", warm_up=True, prepare=prepare) as job:
        job.call(enter)
        job.results()
        job.call(jobs.over_nccl)
        for output in job.results():
            assert output["device"] == [3.0] * 3
            assert output["host"] == [3.0] * 3
            assert "store: over MPI" in output["explained"]
            assert "cuda arrays: backend nccl" in output["explained"]
        end_cleanly(job)


def test_the_gpu_check_has_a_stage_for_staged_arrays(tmp_path: Path) -> None:
    options = ["--simulate", "--patience", "60", "--stages", "staged", "--output", str(tmp_path / "out.json")]
    done = subprocess.run(
        [sys.executable, "-m", "tests.gpu.check", *options],
        cwd=ROOT,
        env=environment({"PYTHONPATH": str(ROOT)}),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    stage = json.loads((tmp_path / "out.json").read_text())["stages"]["staged"]
    assert [check["outcome"] for check in stage["checks"]] == ["passed", "passed"]
    assert stage["figures"]["cases, mpi"]["run"] > 0
    assert "page-locked memory" in stage["figures"]["cases, mpi"]["explained"]
