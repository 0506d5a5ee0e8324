"""The workers' failures: records, root cause and report."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from unicoll.net.texts import ranks_text, signal_name
from unicoll.run.tracebacks import keys

# Errors that report the failure of another rank.
_CONSEQUENCES = ("unicoll.errors.RankLostError", "unicoll.errors.GroupAbortedError")
_ONE_LINE = 300

DETECTION_DELAY = 0.1
"""Seconds by which the detection of an end may be late; errors that it causes in other ranks must not look earlier."""


class ExceptionRecord(NamedTuple):
    """An uncaught exception that a worker has recorded.

    Attributes:
        time: seconds since the epoch.
        message: the exception in one line.
        traceback: as printed, with unicoll's own frames folded.
        consequence: True if it only reports the failure of another rank.
        final: True if it certainly ended the program (worker_main.py wrote it), not perhaps only a function.
    """

    time: float
    message: str
    traceback: str
    consequence: bool
    final: bool


@dataclass(frozen=True)
class WorkerFailure:
    """The end of one worker.

    Attributes:
        status: exit code; ``-N`` if signal N killed it (as in subprocess).
        time: seconds since the epoch, of the exception if one was recorded, else of the end.
        tail: the last lines of its stderr.
        error_file: path of the record if it is kept, else None.
    """

    rank: int
    local_rank: int
    pid: int
    status: int
    time: float
    record: ExceptionRecord | None
    tail: str
    error_file: str | None

    @property
    def exit_code(self) -> int:
        """The launcher's exit code for this failure: 128 + N for signal N."""
        return self.status if self.status >= 0 else 128 - self.status

    @property
    def cause(self) -> str:
        """The cause in one line."""
        if self.record is not None:
            return self.record.message
        return describe_exit(self.status, self.pid)


def describe_exit(status: int, pid: int) -> str:
    """A worker's end as text, from its exit status (``-N`` for signal N)."""
    if status >= 0:
        return f"exit code {status}, no exception recorded"
    hint = " (often the kernel's out-of-memory killer)" if -status == signal.SIGKILL else ""
    return f"Signal {-status} ({signal_name(-status)}) received by PID {pid}{hint}"


def read_record(path: str) -> ExceptionRecord | None:
    """Read an error file in torch's format; None if it does not exist or is malformed."""
    try:
        with open(path, encoding="utf-8") as file:
            content = json.load(file)
            modified = os.fstat(file.fileno()).st_mtime
        message = content["message"]
        extra = content.get("unicoll", {})
        if isinstance(message, str):
            text = traceback = message
        else:
            text = message["message"]
            callstack = message.get("extraInfo", {}).get("py_callstack")
            traceback = extra.get("traceback") or callstack or text
        return ExceptionRecord(
            time=extra["time_ns"] / 1e9 if "time_ns" in extra else modified,
            message=str(text),
            traceback=str(traceback),
            consequence=any(name in _CONSEQUENCES for name in extra.get("classes", ())),
            final=bool(extra),
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def root_cause(failures: Sequence[WorkerFailure]) -> WorkerFailure:
    """The earliest failure, preferably one that is not the consequence of another rank's failure."""
    return min(failures, key=lambda f: (f.record is not None and f.record.consequence, f.time, f.rank))


def report(title: str, failures: Sequence[WorkerFailure], stopped: Sequence[int], reader: str = "") -> str:
    """The summary in torchrun's format; the tracebacks are printed above it.

    Args:
        title: the program's name.
        failures: at least one.
        stopped: ranks that had not failed and were stopped.
        reader: the command that shows the ranks' last calls, or "".
    """
    root = root_cause(failures)
    others = sorted((f for f in failures if f is not root), key=lambda f: (f.time, f.rank))
    lines = [f"  {line}" for line in _describe_others(others, root)] or ["  <NO_OTHER_FAILURES>"]
    if stopped:
        lines.append(f"  (stopped by the launcher: {ranks_text(stopped)})")
    entry = _entry(root)
    if reader:
        entry.append(f"  last calls: {reader}")
    heading = f"{title} FAILED"
    width = min(60, max(map(len, [heading, *lines, *entry])))
    double, single = "=" * width, "-" * width
    parts = [double, heading, single, "Failures:", *lines, single, "Root Cause (first observed failure):"]
    return "\n".join(["", *parts, *entry, double]) + "\n"


def _entry(failure: WorkerFailure) -> list[str]:
    by_signal = f" ({signal_name(-failure.status)})" if failure.status < 0 else ""
    return [
        "[0]:",
        f"  time      : {time.strftime('%Y-%m-%d_%H:%M:%S', time.localtime(failure.time))}",
        f"  host      : {socket.gethostname()}",
        f"  rank      : {failure.rank} (local_rank: {failure.local_rank})",
        f"  exitcode  : {failure.status} (pid: {failure.pid}){by_signal}",
        f"  error_file: {failure.error_file or '<N/A>'}",
        f"  traceback : {_first_line(failure.cause)}{' (above)' if failure.record else ''}",
    ]


def _describe_others(failures: Sequence[WorkerFailure], root: WorkerFailure) -> list[str]:
    """One line for each group of failures with the same end."""
    groups: list[list[WorkerFailure]] = []
    for failure in failures:
        group = next((found for found in groups if _same_end(found[0], failure)), None)
        if group is None:
            groups.append([failure])
        else:
            group.append(failure)
    same = f"the same as rank {root.rank} below"
    return [
        f"{_describe_ranks(group)}: {same if _same_end(group[0], root) else _first_line(group[0].cause)}"
        for group in groups
    ]


def _same_end(one: WorkerFailure, other: WorkerFailure) -> bool:
    return one.status == other.status and bool(keys(one.cause, one.rank) & keys(other.cause, other.rank))


def _describe_ranks(failures: Sequence[WorkerFailure]) -> str:
    first = failures[0]
    if len(failures) == 1:
        how = f"local_rank: {first.local_rank}, exitcode {first.status}, pid {first.pid}"
    else:
        pids = [f.pid for f in sorted(failures, key=lambda f: f.rank)]
        more = " and more" if len(pids) > 16 else ""
        how = f"exitcode {first.status}, pids {', '.join(map(str, pids[:16]))}{more}"
    return f"{ranks_text([f.rank for f in failures])} ({how})"


def last_stderr_lines(failure: WorkerFailure) -> str:
    """The last stderr lines of a rank without a recorded exception; empty if there are none."""
    tail = failure.tail.rstrip().splitlines()[-30:]
    if failure.record is not None or not tail:
        return ""
    return "\n".join([f"The last lines that rank {failure.rank} wrote to stderr:", *tail]) + "\n"


def _first_line(text: str) -> str:
    line = text.strip().partition("\n")[0].removesuffix(":")
    return line if len(line) <= _ONE_LINE else line[: _ONE_LINE - 3] + "..."
