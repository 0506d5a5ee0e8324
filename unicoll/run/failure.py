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

from unicoll.run.tracebacks import keys, name_ranks

__all__ = ["SEEN_LATE", "Failure", "Record", "describe_exit", "last_words", "read_record", "report", "root_cause"]

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
        traceback: as it is shown: unicoll's own frames are folded.
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
            callstack = message.get("extraInfo", {}).get("py_callstack")
            traceback = ours.get("traceback") or callstack or text
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
    """The banner in torchrun's form; the tracebacks stand above it.

    Args:
        title: the program's name.
        failures: at least one.
        stopped: ranks that were well and had to be stopped.
    """
    root = root_cause(failures)
    others = sorted((f for f in failures if f is not root), key=lambda f: (f.time, f.rank))
    lines = [f"  {line}" for line in _others(others, root)] or ["  <NO_OTHER_FAILURES>"]
    if stopped:
        lines.append(f"  (stopped by the launcher: {name_ranks(stopped)})")
    entry = _entry(root)
    heading = f"{title} FAILED"
    width = min(60, max(map(len, [heading, *lines, *entry])))
    double, single = "=" * width, "-" * width
    parts = [double, heading, single, "Failures:", *lines, single, "Root Cause (first observed failure):"]
    return "\n".join(["", *parts, *entry, double]) + "\n"


def _entry(failure: Failure) -> list[str]:
    signal_name = f" ({_signal_name(-failure.status)})" if failure.status < 0 else ""
    return [
        "[0]:",
        f"  time      : {time.strftime('%Y-%m-%d_%H:%M:%S', time.localtime(failure.time))}",
        f"  host      : {socket.gethostname()}",
        f"  rank      : {failure.rank} (local_rank: {failure.local_rank})",
        f"  exitcode  : {failure.status} (pid: {failure.pid}){signal_name}",
        f"  error_file: {failure.error_file or '<N/A>'}",
        f"  traceback : {_first_line(failure.cause)}{' (above)' if failure.record else ''}",
    ]


def _others(failures: Sequence[Failure], root: Failure) -> list[str]:
    """One line for all that ended in the same way."""
    alike: list[list[Failure]] = []
    for failure in failures:
        group = next((found for found in alike if _are_alike(found[0], failure)), None)
        if group is None:
            alike.append([failure])
        else:
            group.append(failure)
    same = f"the same as rank {root.rank} below"
    return [
        f"{_who(group)}: {same if _are_alike(group[0], root) else _first_line(group[0].cause)}"
        for group in alike
    ]


def _are_alike(one: Failure, other: Failure) -> bool:
    return one.status == other.status and bool(keys(one.cause, one.rank) & keys(other.cause, other.rank))


def _who(failures: Sequence[Failure]) -> str:
    first = failures[0]
    if len(failures) == 1:
        how = f"local_rank: {first.local_rank}, exitcode {first.status}, pid {first.pid}"
    else:
        pids = [f.pid for f in sorted(failures, key=lambda f: f.rank)]
        more = " and more" if len(pids) > 16 else ""
        how = f"exitcode {first.status}, pids {', '.join(map(str, pids[:16]))}{more}"
    return f"{name_ranks([f.rank for f in failures])} ({how})"


def last_words(failure: Failure) -> str:
    """What a rank that recorded no exception wrote to stderr last, as lines; empty if that is nothing."""
    tail = failure.tail.rstrip().splitlines()[-30:]
    if failure.record is not None or not tail:
        return ""
    return "\n".join([f"The last lines that rank {failure.rank} wrote to stderr:", *tail]) + "\n"


def _first_line(text: str) -> str:
    line = text.strip().partition("\n")[0].removesuffix(":")
    return line if len(line) <= _ONE_LINE else line[: _ONE_LINE - 3] + "..."


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return "unknown"
