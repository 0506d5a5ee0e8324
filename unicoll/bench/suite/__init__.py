"""``python -m unicoll.bench suite``: a fixed set of ratios, compared with those of a committed run."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from unicoll.bench.progress import Progress, is_wanted
from unicoll.bench.suite.rows import JOBS, ROWS, RatioRow
from unicoll.bootstrap import launchers
from unicoll.run.flags import OneLineParser

__all__ = ["main"]

WORSE, BETTER = 1, 3
"""Exit statuses: a ratio is worse, or a job failed; ratios have moved, but none is worse."""
_SECONDS = 110.0
_REPETITIONS = 3


def main(argv: Sequence[str]) -> int:
    """Run the suite with these arguments, without the word ``suite``; returns the exit status.

    0: no ratio has moved by more than the noise, or there is no earlier run. 1: a ratio is worse, a job failed or
    nothing could be measured. 3: no ratio is worse, and some are better. Invalid arguments raise SystemExit(2) after
    one line on stderr.
    """
    parser = _parser()
    flags = parser.parse_args(argv)
    rows = [row for row in ROWS if flags.only in row.name]
    if not rows:
        parser.error(f"--only {flags.only}: there is no such ratio")
    if flags.repetitions < 1 or not 0 < flags.factor < 1e6:
        parser.error("--repetitions must be at least 1, and --factor positive")
    if flags.job is not None:
        from unicoll.bench.suite.ranks import run
        from unicoll.bench.suite.runs import timings_of

        job = next(job for job in JOBS if job.name == flags.job)
        return run(timings_of(rows, job), flags.factor * job.factor, flags.out)
    if (launched := launchers.detect()) is not None:
        parser.error(f"the suite starts its own ranks, and {launched.name} has started these")
    try:
        return _page(flags.page) if flags.page is not None else _measure(flags, rows)
    except (OSError, ValueError) as e:
        parser.error(str(e))
    except KeyboardInterrupt:
        return 130


def _page(path: str) -> int:
    from unicoll.bench.suite.page import page
    from unicoll.bench.suite.runs import COMMITTED

    Path(path).write_text(page(COMMITTED), encoding="utf-8")
    return 0


def _measure(flags: argparse.Namespace, rows: Sequence[RatioRow]) -> int:
    from unicoll.bench.report import load_warning, write
    from unicoll.bench.suite.compare import compared, report_lines
    from unicoll.bench.suite.runs import COMMITTED, load_run, newest, ratios_of, take

    baseline = Path(flags.against) if flags.against is not None else newest(COMMITTED)
    earlier: dict[str, Any] = {"ratios": {}} if baseline is None else load_run(baseline)
    if flags.save is not None and not Path(flags.save).absolute().parent.is_dir():
        raise ValueError(f"{flags.save} cannot be written")
    progress = Progress(is_wanted())
    progress.label = "suite"
    arguments = ["suite", "--only", flags.only, "--factor", str(flags.factor)]
    try:
        result = take(rows, flags.repetitions, flags.seconds, arguments, progress.show)
    finally:
        progress.clear()
    data = result.as_json()
    if flags.save is not None:
        write(data, flags.save)
    machine = data["machine"]
    print(f"# {_of(data)}; {result.repetitions} repetitions in {result.seconds:.0f} s")
    if baseline is not None:
        print(f"# compared with {baseline.name}: {_of(earlier)}")
        if any(machine.get(key) != earlier["machine"].get(key) for key in ("cpu", "cores_usable")):
            print("# that was another machine")
    if warning := load_warning(result.load[0], machine.get("cores_usable", 1)):
        print(f"# warning: {warning}")
    changes = compared(rows, result.ratios, ratios_of(earlier))
    print("\n".join(report_lines(changes)))
    for name, why in result.skipped.items():
        print(f"# not measured: {name}: {why}")
    for name, output in result.failures.items():
        print(f"unicoll.bench: the job {name} failed\n{output}", file=sys.stderr)
    verdicts = {change.verdict for change in changes}
    if "worse" in verdicts or result.failures or not changes:
        return WORSE
    return BETTER if "better" in verdicts else 0


def _of(data: dict[str, Any]) -> str:
    machine, load = data["machine"], data["load_average"]
    place = f"{machine.get('cpu')}, {machine.get('cores_usable')} cores"
    loaded = f", load average {load[0]:.1f}" if load else ""
    return f"unicoll {machine.get('unicoll')} at {data['commit']}, {data['date']}, {place}{loaded}"


def _parser() -> OneLineParser:
    parser = OneLineParser(
        prog="unicoll.bench suite",
        usage="python -m unicoll.bench suite [flags]",
        description="Measure a fixed set of ratios in two minutes, and compare them with those of a committed run.",
        epilog="Exit status: 0 nothing moved, 1 a ratio is worse or a job failed, 3 ratios are better, none is worse.",
        allow_abbrev=False,
    )
    flag = parser.add_argument
    flag("--save", metavar="FILE", help="write the ratios of this run as JSON")
    flag("--against", metavar="FILE", help="compare with this run (default: the newest in benchmarks/suite)")
    flag("--only", default="", metavar="TEXT", help="only the ratios whose names contain TEXT")
    flag("--repetitions", type=int, default=_REPETITIONS, metavar="N", help="minimum number (default 3)")
    flag("--seconds", type=float, default=_SECONDS, metavar="S", help="repeat while it fits (default 110)")
    calls = "F times the usual number of calls (default 1)"
    flag("--factor", type=float, default=1.0, metavar="F", help=calls)
    flag("--page", metavar="FILE", help="measure nothing: write the page of the committed runs")
    flag("--job", choices=[job.name for job in JOBS], help=argparse.SUPPRESS)
    flag("--out", help=argparse.SUPPRESS)
    return parser
