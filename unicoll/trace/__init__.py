"""The analyser of flight recorder dumps: ``unicoll trace DIRECTORY``.

It reads the ``rank_R.json`` of all ranks, which ``unicoll.dump_flight_recorder()``, SIGUSR1 or a
failure has written, and prints in one sentence what happened, with the last calls. It writes the
calls of all ranks on one clock as a trace for https://ui.perfetto.dev.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from typing import Any

from unicoll.process.formatting import command, print_text, printable
from unicoll.trace import perfetto
from unicoll.trace.dumps import Dump, Trace, read
from unicoll.trace.findings import Diagnosis, diagnose
from unicoll.trace.table import tables

__all__ = ["main"]

_EXIT_CODES = """exit codes:
  0  all calls have completed
  1  calls have not completed, differ between ranks, or a rank left no dump
  2  there is no readable dump, or an argument is wrong
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code."""
    options = _parse(arguments)
    try:
        trace = read(options.directory)
    except (OSError, ValueError) as error:
        _report(error)
        return 2
    diagnoses = diagnose(trace)
    for text in trace.skipped:
        _report(text)
    path = _write_trace(trace, options.perfetto) if options.perfetto else ""
    if options.json:
        print_text(json.dumps(_as_json(trace, diagnoses, path)))
    else:
        print_text(_as_text(trace, diagnoses, path, options.all))
    return 0 if diagnoses[0].is_good else 1


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog=command("trace"),
        description="Say what happened in a job, from the flight recorder dumps of its ranks.",
        epilog=_EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("directory", help="directory with the files rank_R.json")
    parser.add_argument(
        "--all", action="store_true", help="print all calls, not only the last ones"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(
        "--perfetto",
        metavar="FILE",
        help="write the calls of all ranks as a trace for https://ui.perfetto.dev",
    )
    return parser.parse_args(arguments)


def _write_trace(trace: Trace, path: str) -> str:
    """Write the trace for Perfetto; returns its path, or "" if it cannot be written."""
    try:
        perfetto.write(trace, path)
    except OSError as error:
        _report(f"{path}: {error.strerror}")
        return ""
    return path


def _report(problem: object) -> None:
    print(printable(f"{command('trace')}: {problem}"), file=sys.stderr)


def _as_text(trace: Trace, diagnoses: Sequence[Diagnosis], path: str, everything: bool) -> str:
    parts = [diagnoses[0].sentence]
    parts += [f"also: {diagnosis.sentence}" for diagnosis in diagnoses[1:]]
    if table := tables(trace, diagnoses[0], everything):
        parts += ["", table, "", _notes(trace)]
    if path:
        parts.append(f"trace of all ranks for https://ui.perfetto.dev: {path}")
    return "\n".join(parts)


def _notes(trace: Trace) -> str:
    error = trace.clock_error
    clocks = (
        f"the ranks' clocks agree within {error:.2g} s"
        if error is not None
        else "clocks were not compared"
    )
    return (
        "begun: seconds before the last dump; took: seconds until the end, or the rank's dump;"
        f" {clocks}"
    )


def _as_json(trace: Trace, diagnoses: Sequence[Diagnosis], path: str) -> dict[str, Any]:
    return {
        "diagnoses": [diagnosis._asdict() for diagnosis in diagnoses],
        "missing": list(trace.missing),
        "skipped": list(trace.skipped),
        "clock_error": trace.clock_error,
        "perfetto": path,
        "ranks": {rank: _dump_facts(dump) for rank, dump in trace.dumps.items()},
    }


def _dump_facts(dump: Dump) -> dict[str, Any]:
    calls = [
        {
            name: getattr(call, name)
            for name in ("group", "seq", "state", "created", "site", "error")
        }
        | {"call": call.text, "started": call.started or None, "ended": call.ended or None}
        for call in dump.calls
    ]
    facts = {name: getattr(dump, name) for name in ("path", "host", "pid", "reason", "written")}
    return facts | {"at": dump.place, "calls": calls}
