"""torch.distributed on the MPI backend, under this environment's mpirun: start, examples, PyTorch's tests."""

from __future__ import annotations

import importlib.util
import random
import subprocess
import sys
from pathlib import Path

import pytest

from tests.mpi.mpi_library import command, library, unavailable_reason, variables_for
from tests.support.ranks import ROOT
from tests.torch.torch_suite_sample import RECORDED, run_sample

pytestmark = pytest.mark.torch
if unavailable_reason():
    pytest.skip(unavailable_reason(), allow_module_level=True)
for needed in ("torch", "expecttest"):
    if importlib.util.find_spec(needed) is None:
        pytest.skip(f"{needed} is not installed", allow_module_level=True)


turn = library().turn
"""Each library runs a part of the tables, see sampling.py; together they run all."""


def run_program(folder: Path, options: tuple[str, ...], *program: str) -> str:
    """Output of two ranks under an mpirun that sets none of torch's variables."""
    variables = variables_for(str(folder), {"PYTHONPATH": str(ROOT)})
    assert not {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} & set(variables)
    call = command(2, options, [sys.executable, *program])
    done = subprocess.run(call, env=variables, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.every(n=3)
@pytest.mark.sampled("", "backend", 3)
@pytest.mark.parametrize("backend", ["unicoll", "unicoll-mpi", "unicoll-gloo", "mpi", "cpu:mpi"])
def test_mpirun_needs_no_variables(backend: str, tmp_path: Path) -> None:
    words = (
        ["explain", "leave"] if backend == "mpi" else ["explain", "torchs", "leave"]
    )  # torch has no store there
    output = run_program(
        tmp_path, library().recover, str(ROOT / "tests" / "torch" / "torch_program.py"), backend, *words
    )
    lines = sorted(output.splitlines())
    assert [line for line in lines if "left" in line] == ["rank 0 of 2: left []", "rank 1 of 2: left []"]
    used = (
        "unicoll (gloo)" if backend in ("unicoll", "unicoll-gloo") else "mpi"
    )  # by device: ranks are on one host
    assert any(line.startswith(f"cpu arrays: backend {used}") for line in lines)


@pytest.mark.every(n=0)
@pytest.mark.sampled("", "example", 1)
@pytest.mark.parametrize("example", ["torch_ddp.py", "torch_fsdp2.py"])
def test_examples(example: str, tmp_path: Path) -> None:
    last = {"torch_ddp.py": "epoch 3: ", "torch_fsdp2.py": "saved in 2 parts"}[example]
    assert last in run_program(tmp_path, (), str(ROOT / "examples" / example))


def test_the_start_of_torchs_tutorial(tmp_path: Path) -> None:
    """It passes rank 0 of 0 and an address; torch's MPI backend ignores them, too."""
    program = tmp_path / "run.py"
    program.write_text(TUTORIAL)
    output = run_program(tmp_path, (), str(program))
    assert sorted(output.splitlines()) == ["Rank 0 of 2 has data 2.0", "Rank 1 of 2 has data 2.0"]


TUTORIAL = """
import os
import torch
import torch.distributed as dist
import unicoll.torch_plugin

unicoll.torch_plugin.enable_mpi()


def run(rank, size):
    group = dist.new_group([0, 1])
    tensor = torch.ones(1)
    dist.all_reduce(tensor, op=dist.ReduceOp.SUM, group=group)
    print(f"Rank {dist.get_rank()} of {dist.get_world_size()} has data {tensor[0]}", flush=True)


def init_process(rank, size, fn, backend="gloo"):
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    os.environ["MASTER_PORT"] = "29500"
    dist.init_process_group(backend, rank=rank, world_size=size)
    fn(rank, size)


if __name__ == "__main__":
    init_process(0, 0, run, backend="mpi")
"""


def test_a_sample_of_torchs_tests(seed: int) -> None:
    """Two ranks with one MPI library, three with the other; tests that do not pass with Gloo are always included."""
    size = 2 + (seed + turn) % 2
    of_gloo = RECORDED["results"][f"gloo/{size}"]["passed"]
    ours_alone = set(RECORDED["results"][f"unicoll-mpi/{size}"]["passed"]) - set(of_gloo)
    assert "test_all_to_all" in ours_alone
    run_sample("unicoll-mpi", size, random.Random(seed + size), 6, sorted(ours_alone))
