"""The reason why MPI cannot be used, and the backend used instead; runs with and without mpi4py."""

from __future__ import annotations

import subprocess
import sys

import pytest

from mpi_comm.runtime import init_finalize
from tests.support.ranks import ROOT, environment

HIDDEN = "import sys; sys.modules['mpi4py'] = None; import unicoll as dist\n"


def run(source: str, **variables: str) -> str:
    ended = subprocess.run(
        [sys.executable, "-W", "error", "-c", HIDDEN + source],
        env=environment({"PYTHONPATH": str(ROOT)} | variables),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert (ended.returncode, ended.stderr) == (0, ""), ended
    return ended.stdout


def test_without_mpi4py_there_is_a_reason() -> None:
    source = """
print(dist.is_mpi_available())
print(dist.explain())
for spec in ("mpi", "cpu:mpi"):
    try:
        dist.init_process_group(spec)
    except dist.BackendUnavailableError as e:
        print("refused:", e)
"""
    output = run(source)
    assert output.startswith("False\n")
    lines = [line for line in output.splitlines() if "mpi4py is not installed" in line]
    assert len(lines) == 3
    assert [line.startswith("refused: backend 'mpi': ") for line in lines] == [False, True, True]
    assert all("pip install mpi4py" in line for line in lines)


def test_under_mpirun_without_mpi4py_the_cpu_backend_is_used() -> None:
    """A job of one rank, with the variables of MPICH's Hydra."""
    variables = {"PMI_RANK": "0", "PMI_SIZE": "1", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "1"}
    output = run("dist.init_process_group(); print(dist.get_backend()); print(dist.explain())", **variables)
    assert output.startswith("gloo\n")
    assert "an MPI launcher started this process, but backend 'mpi': mpi4py is not installed" in output


@pytest.mark.parametrize(
    ("version", "short"),
    [
        (
            "Open MPI v5.0.11, package: Open MPI user@localhost Distribution, ident: 5.0.11\0",
            "Open MPI 5.0.11",
        ),
        ("MPICH Version:      5.0.2\nMPICH Device:       ch4:ucx ofi\n", "MPICH 5.0.2"),
        ("MPICH Version:      4.3.1\nMPICH Device:       ch4:ofi\n", "MPICH 4.3.1"),
        ("Intel(R) MPI Library 2021.18.1 for Linux* OS\n", "Intel MPI 2021.18.1"),
    ],
)
def test_library_versions(version: str, short: str) -> None:
    assert init_finalize._short_version(version) == short
