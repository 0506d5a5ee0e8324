"""Device arrays under mpirun: over MPI through the host's memory, and over NCCL, whose ranks meet over MPI."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import staged
import staged_jobs as jobs
from mpi_ranks import MpiJob, why_not
from simulated_ranks import Settings

from unicoll.testing.ranks import ROOT, Pool, end_well, environment, pools
from unicoll.testing.worker import enter

if why_not():
    pytest.skip(why_not(), allow_module_level=True)

from test_staged import (  # noqa: F401
    test_a_device_that_is_late_is_named,
    test_a_graph_cannot_record_it,
    test_an_exchange_and_another_call_are_both_named,
    test_an_exchange_of_any_sizes_goes_in_pieces,
    test_an_exchange_whose_sizes_do_not_fit_raises_the_same_error,
    test_arrays_of_device_and_host_keep_one_order,
    test_calls_that_differ_raise_the_same_error,
    test_it_says_how_device_arrays_go,
    test_messages,
    test_streams_are_ordered_on_both_sides,
)

HERE = Path(__file__).parent


def _start(size: int, backend: str, seed: int) -> MpiJob:
    settings = Settings(policy="random", seed=seed, own_stream=True, backend=backend)
    return MpiJob(size, backend=backend, rehearse=True, prepare=(staged.prepare, settings))


@pytest.fixture(scope="module")
def pool(seed: int) -> Iterator[Callable[[int], Pool]]:
    with pools(partial(_start, backend="cpu:mpi,cuda:mpi", seed=seed)) as made:
        yield made


class TestMPI(staged.Staged):
    backend = "mpi"

    @pytest.fixture(scope="class")
    @classmethod
    def pool(cls, seed: int) -> Iterator[Callable[[int], Pool]]:
        with pools(partial(_start, backend="mpi", seed=seed)) as made:
            yield made


@pytest.mark.parametrize("backend", ["cpu:mpi,cuda:nccl", None])
def test_nccl_meets_over_mpi_with_no_tcp_store(backend: str | None) -> None:
    prepare = (staged.prepare, Settings(backend=backend))
    with MpiJob(2, backend="mpi", rehearse=True, prepare=prepare) as job:
        job.call(enter)
        job.results()
        job.call(jobs.over_nccl)
        for told in job.results():
            assert told["device"] == [3.0] * 3
            assert told["host"] == [3.0] * 3
            assert "store: over MPI" in told["explained"]
            assert "cuda arrays: backend nccl" in told["explained"]
        end_well(job)


def test_the_check_on_a_gpu_has_a_stage_for_it(tmp_path: Path) -> None:
    options = ["--simulate", "--patience", "60", "--stages", "staged", "--output", str(tmp_path / "out.json")]
    done = subprocess.run(
        [sys.executable, "-m", "gpu_check", *options],
        cwd=ROOT, env=environment({"PYTHONPATH": f"{HERE}:{ROOT}"}), stdin=subprocess.DEVNULL, capture_output=True,
        text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    stage = json.loads((tmp_path / "out.json").read_text())["stages"]["staged"]
    assert [check["outcome"] for check in stage["checks"]] == ["passed", "passed"]
    assert stage["figures"]["cases, mpi"]["run"] > 0
    assert "page-locked memory" in stage["figures"]["cases, mpi"]["explained"]
