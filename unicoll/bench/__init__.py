"""The benchmark: ``python -m unicoll.bench OP``, with nccl-tests' flags, table and JSON.

It measures unicoll's backends (``--backend gloo,mpi,nccl``) and what they are compared with (``--peer
torch-gloo,mpi4py,torch-nccl``) in the same processes, turn by turn, and checks every result. It starts its own ranks
(``-n 2``), or measures as the ranks that mpirun, srun, torchrun or ``python -m unicoll.run`` have started.
``docs/benchmarking.md`` says what the numbers mean.

    args.py, sizes.py   the command line                launch.py      starting the ranks
    operations.py   THE TABLE of operations             contenders.py  THE TABLE of backends and peers
    contract.py     what a contender is                 distributed.py, mpi.py, nccl.py   the contenders
    arrays.py       array families                      cuda.py        the rank's device
    values.py       data, expected results, tolerance
    measure.py      turns, time, statistics, checks     overlap.py     an operation beside computation
    session.py      what a rank does                    progress.py    the line on the terminal
    table.py        nccl-tests' and OSU's tables        report.py, plot.py   JSON, machine, drawing
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark with these arguments (``sys.argv[1:]`` if None) and return its exit status.

    0: measured, and every result right. 1: a result was wrong, a bandwidth below NCCL_TESTS_MIN_BW, or nothing could
    be measured. A mistake in the arguments raises SystemExit(2), as argparse does, after one line on stderr.
    """
    from .. import launchers
    from .args import parse

    options = parse(argv)
    if (problem := _unwritable(options.json, options.plot)) is not None:
        sys.stderr.write(f"unicoll.bench: error: {problem}\n")
        raise SystemExit(2)
    if launchers.detect() is None:
        from .launch import launch

        return launch(options)
    from .session import run

    return run(options)


def _unwritable(json: str | None, plot: str | None) -> str | None:
    """Why a file that is written at the end could not be; found out before anything is measured."""
    if plot is not None:
        from .plot import reason_against

        if (reason := reason_against(plot)) is not None:
            return reason
    for path in filter(None, (json, plot)):
        folder = os.path.dirname(path) or "."
        if os.path.isdir(path) or not os.path.isdir(folder) or not os.access(folder, os.W_OK):
            return f"{path} cannot be written"
    return None
