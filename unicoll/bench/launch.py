"""Starts the benchmark's ranks if no launcher has: by unicoll's launcher, or by mpirun if MPI is
measured.

The ranks get the same arguments, detect the launcher and measure. The launcher handles Ctrl-C,
failures and the exit status.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec

from unicoll.__main__ import PROGRAM
from unicoll.bench.args import BenchOptions
from unicoll.bench.contenders import TABLE
from unicoll.run.mpirun import mpirun, replace_process


def launch(options: BenchOptions) -> int:
    """Start the ranks with the same arguments and return their exit status; mpirun replaces this
    process (exec)."""
    ranks = options.ranks or max(2, options.op.min_ranks)
    wants_mpi = any(name in TABLE and TABLE[name].mpi for name in options.contenders)
    program = mpirun() if wants_mpi and find_spec("mpi4py") is not None else None
    if program is not None:
        replace_process(program, ranks, [sys.executable, PROGRAM, "bench", *options.argv])
    from unicoll.run import main

    return main(["--nproc-per-node", str(ranks), "--no-prefix", PROGRAM, "bench", *options.argv])
