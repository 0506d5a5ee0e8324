"""A diagnostic report of this machine: ``unicoll doctor``, in one process or in the ranks of a job.

In one process it lists libraries, devices, interfaces and limits, the backends that
``init_process_group()`` would choose with the reasons, and hints. Every probe runs in a forked
child process with a deadline, so that a library that hangs or crashes becomes a line of the report.
Under a launcher the ranks join, compare their reports and exchange data between all pairs; rank 0
prints common results once, differences by rank, and the slow or broken pairs.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from unicoll.process.formatting import command

__all__ = ["main"]

_PROCESS_S, _RANK_S = 3.5, 30.0


def main(argv: Sequence[str] | None = None) -> int:
    """Run the probes, print the report and return the exit status; arguments default to
    ``sys.argv[1:]``.

    0: no hints, or notes only. 1: a warning, or a slow pair. 2: an error, or a broken pair; invalid
    arguments also exit with 2. Under a launcher rank 0 exits with the worst status of all ranks;
    the others exit with 0 unless they cannot join or the job fails.
    """
    parser = argparse.ArgumentParser(
        command("doctor"),
        description="Report on this machine, or on all ranks of a job if started by a launcher.",
        epilog=(
            "exit status: 0 ok or notes, 1 a warning or a slow pair, 2 an error or a broken pair"
        ),
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    parser.add_argument(
        "--deadline",
        type=float,
        metavar="S",
        help=(
            f"timeout in seconds per probe and per pair of ranks ({_PROCESS_S:g}; {_RANK_S:g} under"
            " a launcher)"
        ),
    )
    options = parser.parse_args(argv)
    if options.deadline is not None and not 0 < options.deadline < 1e6:
        parser.error(f"argument --deadline: {options.deadline:g} is not a valid number of seconds")
    from unicoll.doctor import host, output, probes, software
    from unicoll.doctor.hints import hints, status
    from unicoll.process.formatting import print_text

    launched = host.launched_or_none()
    if launched is not None:
        from unicoll.doctor.job import run

        return run(options.deadline or _RANK_S, options.json)
    sections = probes.run_probes({**software.PROBES, **host.PROBES}, options.deadline or _PROCESS_S)
    found = hints(sections)
    print_text((output.as_json if options.json else output.as_text)(sections, found))
    return status(found)
