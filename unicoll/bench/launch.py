"""Starting the benchmark's own ranks, where no launcher has: by unicoll's launcher, or by mpirun where MPI is measured.

The children get the same arguments; they find themselves launched and measure. Ctrl-C, failures and the exit status
are the launcher's.
"""

from __future__ import annotations

import os
import shutil
import site
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from . import progress
from .args import Options
from .contenders import TABLE

__all__ = ["launch", "mpirun", "mpirun_command"]


def launch(options: Options) -> int:
    """Start the ranks with the same arguments and return their exit status; under mpirun, become mpirun."""
    ranks = options.ranks or max(2, options.op.least)
    _be_importable()
    if progress.wanted():
        os.environ[progress.VARIABLE] = "1"
    wants_mpi = any(name in TABLE and TABLE[name].mpi for name in options.contenders)
    program = mpirun() if wants_mpi and find_spec("mpi4py") is not None else None
    if program is not None:
        command, variables = mpirun_command(program, ranks, options.argv)
        sys.stdout.flush()
        os.execve(command[0], command, {**os.environ, **variables})
    from ..run import main

    return main(["--nproc-per-node", str(ranks), "--no-prefix", "-m", "unicoll.bench", *options.argv])


def mpirun() -> str | None:
    """mpirun of the MPI that this interpreter's mpi4py belongs to: beside the interpreter, else on PATH."""
    beside = Path(sys.executable).with_name("mpirun")
    return str(beside) if os.access(beside, os.X_OK) else shutil.which("mpirun") or shutil.which("mpiexec")


def mpirun_command(program: str, ranks: int, argv: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """The command that starts the ranks, and the variables that only it gets.

    Open MPI refuses to run for root, and more ranks than cores, unless told; and it binds each rank to a core, where
    peers that use threads would wait for one another. Other MPIs do not look at these variables. Who wants ranks
    bound, or placed, starts mpirun.
    """
    variables = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}  # as our launcher and torchrun do
    variables |= {"PRTE_MCA_hwloc_default_binding_policy": "none"}  # Open MPI 5
    variables |= {"OMPI_MCA_hwloc_base_binding_policy": "none"}  # Open MPI 4
    if os.geteuid() == 0:
        variables |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    if ranks > len(os.sched_getaffinity(0)):
        variables |= {"PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe"}  # Open MPI 5
        variables |= {"OMPI_MCA_rmaps_base_oversubscribe": "1"}  # Open MPI 4
    return [program, "-n", str(ranks), sys.executable, "-m", "unicoll.bench", *argv], variables


def _be_importable() -> None:
    """A checkout that is not installed is found by the ranks as it was found here."""
    root = str(Path(__file__).resolve().parents[2])
    if root in (*site.getsitepackages(), site.getusersitepackages()):
        return
    before = os.environ.get("PYTHONPATH")
    if root not in (before or "").split(os.pathsep):
        os.environ["PYTHONPATH"] = root + (os.pathsep + before if before else "")
