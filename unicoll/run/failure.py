"""Which worker failed first, and how that is told."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

__all__ = ["SEEN_LATE", "Failure", "Record", "describe_exit", "read_record", "report", "root_cause"]

# A rank that raises one of these says that another one failed.
_CONSEQUENCES = ("unicoll.errors.RankLostError", "unicoll.errors.GroupAbortedError")
_ONE_LINE = 300

SEEN_LATE = 0.1
"""Seconds by which an end may be seen late: what the others raise because of it must not look earlier."""


class Record(NamedTuple):
    """An uncaught exception that a worker wrote down.

    Attributes:
        time: seconds since the epoch.
        message: the exception in one line.
        traceback: as Python prints it.
        consequence: whether it only says that another rank failed.
        final: whether it certainly ended the program (our bootstrap wrote it), not perhaps only a function.
    """

    time: float
    message: str
    traceback: str
    consequence: bool
    final: bool


@dataclass(frozen=True)
class Failure:
    """One worker's end.

    Attributes:
        status: exit code; ``-N`` when signal N killed it (as subprocess has it).
        time: seconds since the epoch, of the exception if one was recorded, else of the end.
        tail: the last lines of its stderr.
        error_file: path of the record where it is kept, else None.
    """

    rank: int
    local_rank: int
    pid: int
    status: int
    time: float
    record: Record | None
    tail: str
    error_file: str | None

    @property
    def exit_code(self) -> int:
        """What the launcher exits with for it: 128 + N for signal N."""
        return self.status if self.status >= 0 else 128 - self.status

    @property
    def cause(self) -> str:
        """In one line."""
        if self.record is not None:
            return self.record.message
        return describe_exit(self.status, self.pid)


def describe_exit(status: int, pid: int) -> str:
    """A worker's end in words, from its exit status (``-N`` for signal N)."""
    if status >= 0:
        return f"exit code {status}, no exception recorded"
    hint = " (often the kernel's out-of-memory killer)" if -status == signal.SIGKILL else ""
    return f"Signal {-status} ({_signal_name(-status)}) received by PID {pid}{hint}"


def read_record(path: str) -> Record | None:
    """Read an error file in torch's format; None if there is none, or it is not one."""
    try:
        with open(path, encoding="utf-8") as file:
            content = json.load(file)
            modified = os.fstat(file.fileno()).st_mtime
        message = content["message"]
        ours = content.get("unicoll", {})
        if isinstance(message, str):
            text = traceback = message
        else:
            text = message["message"]
            traceback = message.get("extraInfo", {}).get("py_callstack") or text
        return Record(
            time=ours["time_ns"] / 1e9 if "time_ns" in ours else modified,
            message=str(text),
            traceback=str(traceback),
            consequence=any(name in _CONSEQUENCES for name in ours.get("classes", ())),
            final=bool(ours),
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def root_cause(failures: Sequence[Failure]) -> Failure:
    """The earliest failure, of those that are not plainly another one's consequence if there are any."""
    return min(failures, key=lambda f: (f.record is not None and f.record.consequence, f.time, f.rank))


def report(title: str, failures: Sequence[Failure], stopped: Sequence[int]) -> str:
    """The banner in torchrun's form, followed by the root cause's traceback.

    Args:
        title: the program's name.
        failures: at least one.
        stopped: ranks that were well and had to be stopped.
    """
    root = root_cause(failures)
    others = sorted((f for f in failures if f is not root), key=lambda f: (f.time, f.rank))
    lines = [f"  {_in_one_line(f)}" for f in others] or ["  <NO_OTHER_FAILURES>"]
    if stopped:
        lines.append(f"  (stopped by the launcher: {_ranks(stopped)})")
    entry = _entry(root)
    heading = f"{title} FAILED"
    width = min(60, max(map(len, [heading, *lines, *entry])))
    double, single = "=" * width, "-" * width
    parts = [double, heading, single, "Failures:", *lines, single, "Root Cause (first observed failure):"]
    return "\n".join(["", *parts, *entry, double, *_last_words(root)]) + "\n"


def _entry(failure: Failure) -> list[str]:
    signal_name = f" ({_signal_name(-failure.status)})" if failure.status < 0 else ""
    return [
        "[0]:",
        f"  time      : {time.strftime('%Y-%m-%d_%H:%M:%S', time.localtime(failure.time))}",
        f"  host      : {socket.gethostname()}",
        f"  rank      : {failure.rank} (local_rank: {failure.local_rank})",
        f"  exitcode  : {failure.status} (pid: {failure.pid}){signal_name}",
        f"  error_file: {failure.error_file or '<N/A>'}",
        f"  traceback : {_first_line(failure.cause)}{' (below)' if failure.record else ''}",
    ]


def _in_one_line(failure: Failure) -> str:
    how = f"exitcode {failure.status}, pid {failure.pid}"
    return f"rank {failure.rank} (local_rank: {failure.local_rank}, {how}): {_first_line(failure.cause)}"


def _last_words(failure: Failure) -> list[str]:
    if failure.record is not None:
        return [failure.record.traceback.rstrip("\n")]
    if tail := failure.tail.rstrip():
        return [f"The last lines that rank {failure.rank} wrote to stderr:", *tail.splitlines()[-30:]]
    return [f"rank {failure.rank}: {failure.cause}"]


def _first_line(text: str) -> str:
    line = text.strip().partition("\n")[0]
    return line if len(line) <= _ONE_LINE else line[: _ONE_LINE - 3] + "..."


def _ranks(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, sorted(ranks)[:16]))
    return f"rank{'s' * (len(ranks) > 1)} {shown}{' and more' if len(ranks) > 16 else ''}"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return "unknown"
