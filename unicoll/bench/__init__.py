"""The benchmark: ``unicoll bench OP``, with nccl-tests' flags, table and JSON.

It measures unicoll's backends (``--backend gloo,mpi,nccl``) and other libraries (``--peer
torch-gloo,mpi4py``) in the same processes and checks every result. Each of these is called a
*contender*; their timed batches alternate. The benchmark starts its own ranks (``-n 2``), or runs
in the ranks that mpirun, srun, torchrun or ``unirun`` started. ``docs/benchmarking.md`` explains
the numbers.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark with these arguments (``sys.argv[1:]`` if None) and return its exit status.

    0: measured, and every result is correct. 1: a result is wrong, a bandwidth is below
    NCCL_TESTS_MIN_BW, nothing could be measured, or a file could not be written. Invalid arguments
    raise SystemExit(2), as argparse does, after one line on stderr.
    """
    from unicoll.bench.args import parse
    from unicoll.bootstrap import launchers

    options = parse(argv)
    if (problem := _output_problem(options.json, options.plot)) is not None:
        sys.stderr.write(f"unicoll.bench: error: {problem}\n")
        raise SystemExit(2)
    if launchers.detect() is None:
        from unicoll.bench.launch import launch

        return launch(options)
    from unicoll.bench.session import run

    return run(options)


def _output_problem(json: str | None, plot: str | None) -> str | None:
    """The reason why an output file cannot be written, checked before anything is measured; None if
    all can."""
    if plot is not None:
        from unicoll.bench.plot import plot_problem

        if (reason := plot_problem(plot)) is not None:
            return reason
    for path in filter(None, (json, plot)):
        place = os.path.dirname(path) or "."
        # A device or a pipe is written in place.
        if os.path.exists(path) and not os.path.isfile(path):
            place = path
        if os.path.isdir(path) or not os.access(place, os.W_OK):
            return f"{path} cannot be written"
    return None
