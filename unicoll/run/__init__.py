"""The launcher: ``unirun [flags] script [arguments]``, with torchrun's flags.

It starts ``--nproc-per-node`` worker processes and waits for them. Guarantees:

- **Environment.** Each worker gets RANK, WORLD_SIZE, LOCAL_RANK and the rest of torchrun's
  variables, so that ``init_process_group()`` needs no arguments. On one node the launcher makes a
  secret for the job, serves its store on the loopback interface, and reserves a free MASTER_PORT,
  so concurrent launches do not conflict.
- **Several nodes.** Start the same command on each, with ``--nnodes``, ``--rdzv-endpoint`` and one
  secret in UNICOLL_SECRET or UNICOLL_SECRET_FILE. The launchers agree on node ranks and end
  attempts together. A launcher that is lost is named by the others, which wait for a replacement if
  a restart is left.
- **Output.** Whole lines, prefixed ``[<role><local_rank>]:``; stdout and stderr stay separate. A
  single worker writes to the console directly. Local rank 0 inherits stdin, the others have an
  empty one.
- **Failure.** After the first failure the others have ``--grace`` seconds to fail by themselves;
  then they get SIGTERM and, after ``--shutdown-timeout``, SIGKILL. Each distinct traceback is
  printed once on stderr, with its ranks, one second after the first rank has it or at the end of
  the job; the summary, with the first failure, is last. The exit code is that of the first failing
  rank, 128 + N for signal N.
- **Restarts.** With ``--max-restarts`` the workers of all nodes are started again after a failure,
  with TORCHELASTIC_RESTART_COUNT and a new store, once no process of the attempt before is left.
  The end of the job names the first failure of the first attempt; the exit code is that of the
  last.
- **Counters.** With UNICOLL_METRICS_FILE, without ``{rank}`` in the name, the launcher writes the
  counters of all its ranks to that file; with several nodes ``.nodeN`` is inserted before the
  suffix.
- **No orphans.** No process that a worker has started outlives the job, even if the launcher is
  killed by SIGKILL; see ``unicoll.run.process_cleanup`` for how a job's processes are identified,
  and how one may leave the job.
- **MPI.** With ``--mpi`` the launcher is replaced by the mpirun beside this Python, or on PATH:
  output, failures and signals are mpirun's.
- **Signals.** SIGTERM, SIGINT, SIGHUP and SIGQUIT are forwarded to the workers' process groups and
  end the job with 128 + N, without a restart; a second Ctrl-C kills at once. SIGUSR1 and SIGUSR2
  are sent to the workers that handle them, and end nobody; after SIGUSR1 ranks write the flight
  recorder's dump. A signal that is ignored when the launcher starts (nohup) stays ignored.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

__all__ = ["main"]


def main(argv: Sequence[str] | None = None, *, as_torchs_launch: bool = False) -> int:
    """Run the launcher with these arguments (``sys.argv[1:]`` if None) and return its exit code.

    ``as_torchs_launch``: it is ``python -m unicoll.launch``.

    An error in the arguments raises SystemExit(2), like argparse, after one line on stderr.
    """
    from unicoll.errors import DistError
    from unicoll.run.agent import Agent
    from unicoll.run.args import parse

    options = parse(argv, as_torchs_launch)
    try:
        if options.mpi:
            from unicoll.run import mpirun

            mpirun.run(options)
        return Agent(options).run()
    except (OSError, DistError) as error:
        text = (
            error.strerror
            if isinstance(error, OSError) and error.strerror and not error.filename
            else error
        )
        sys.stderr.write(f"unicoll.run: error: {text}\n")
        return 1
