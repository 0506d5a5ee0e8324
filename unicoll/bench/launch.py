"""Starts the benchmark's ranks if no launcher has: by unicoll's launcher, or by mpirun if MPI is measured.

The ranks get the same arguments, detect the launcher and measure. The launcher handles Ctrl-C, failures and the exit
status.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib.util import find_spec

from unicoll.bench.args import BenchOptions
from unicoll.bench.contenders import TABLE
from unicoll.run.workers import checkout_path, mpirun, mpirun_path


def launch(options: BenchOptions) -> int:
    """Start the ranks with the same arguments and return their exit status; mpirun replaces this process (exec)."""
    ranks = options.ranks or max(2, options.op.min_ranks)
    wants_mpi = any(name in TABLE and TABLE[name].mpi for name in options.contenders)
    program = mpirun() if wants_mpi and find_spec("mpi4py") is not None else None
    if program is not None:
        command, variables = mpirun_command(program, ranks, options.argv)
        sys.stdout.flush()
        os.execve(command[0], command, {**os.environ, **variables})
    from unicoll.run import main

    return main(["--nproc-per-node", str(ranks), "--no-prefix", "-m", "unicoll.bench", *options.argv])


def mpirun_command(program: str, ranks: int, argv: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """The command that starts the ranks, and its additional environment variables."""
    variables = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}  # as unirun and torchrun do
    variables |= mpirun_variables(ranks) | checkout_path(os.environ) | mpirun_path(program)
    return [program, "-n", str(ranks), sys.executable, "-m", "unicoll.bench", *argv], variables


def mpirun_variables(ranks: int) -> dict[str, str]:
    """Variables with which Open MPI's mpirun starts this many ranks here; other MPIs ignore them.

    By default Open MPI refuses to run as root and to start more ranks than cores, and it binds each rank to one core,
    on which the threads of a contender block each other. Users who need binding or placement start mpirun themselves.
    """
    variables = {"PRTE_MCA_hwloc_default_binding_policy": "none"}  # Open MPI 5
    variables |= {"OMPI_MCA_hwloc_base_binding_policy": "none"}  # Open MPI 4
    if os.geteuid() == 0:
        variables |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    if ranks > len(os.sched_getaffinity(0)):
        variables |= {"PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe"}  # Open MPI 5
        variables |= {"OMPI_MCA_rmaps_base_oversubscribe": "1"}  # Open MPI 4
    return variables
