"""One page on this machine: ``python -m unicoll.doctor``, alone or as the ranks of a job.

Alone it says which libraries, devices, interfaces and limits there are, what ``init_process_group()`` would choose
and why, and what to change. Every question is put in a forked child with a deadline, so that a library that hangs or
crashes is a line on the page, and nothing is started in this process. Under a launcher the ranks join, compare their
pages, and move data between all pairs; rank 0 prints what is equal once, what differs by rank, and the pairs that are
slow or broken.

    probes.py    questions in children, with deadlines
    software.py, host.py    THE TABLES of questions: libraries and the choice; host and environment
    hints.py     what to change                 page.py    text and JSON
    job.py       what a rank does               pairs.py   data between all pairs, and which of them are slow
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

__all__ = ["main"]

_ALONE_S, _RANK_S = 3.5, 30.0


def main(argv: Sequence[str] | None = None) -> int:
    """Examine this machine with these arguments (``sys.argv[1:]`` if None), print the page, return the exit status.

    0: nothing to change, but for notes. 1: a warning, or a slow pair. 2: something does not work, or a broken pair; a
    mistake in the arguments exits with 2, too. Under a launcher rank 0 has the status of all ranks; the others exit
    with 0 unless they cannot join or the job fails.
    """
    parser = argparse.ArgumentParser(
        "python -m unicoll.doctor",
        description="One page on this machine, or on all ranks of a job when a launcher has started it.",
        epilog="exit status: 0 fine, 1 a warning or a slow pair, 2 something does not work",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the page")
    parser.add_argument(
        "--deadline",
        type=float,
        metavar="S",
        help=f"seconds for each question, and for each pair of ranks ({_ALONE_S:g}; {_RANK_S:g} under a launcher)",
    )
    options = parser.parse_args(argv)
    if options.deadline is not None and not 0 < options.deadline < 1e6:
        parser.error(
            f"argument --deadline: {options.deadline:g} is no number of seconds that can be waited for"
        )
    from . import host, page, probes, software
    from .hints import hints

    launched = host.launched_or_none()
    if launched is not None:
        from .job import run

        return run(options.deadline or _RANK_S, options.json)
    sections = probes.ask({**software.PROBES, **host.PROBES}, options.deadline or _ALONE_S)
    report = page.Report(sections, hints(sections))
    print(page.as_json(report) if options.json else page.as_text(report))
    sys.stdout.flush()
    return report.status
