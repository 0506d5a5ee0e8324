"""The workers' failures: root cause and report."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Sequence

from unicoll.process.files import write_whole
from unicoll.process.formatting import printable, ranks_text, shortened, signal_name
from unicoll.run.nodes import Cause
from unicoll.run.tracebacks import CONSEQUENCES, DETECTION_DELAY, describe_exit, keys
from unicoll.run.workers import Worker

_LAST_LINES = tuple(f"{name}: " for name in CONSEQUENCES)
_STACK = "(most recent call first):"
_ONE_LINE = 300


def _status(worker: Worker) -> int:
    assert worker.status is not None
    return worker.status


def _last_line(worker: Worker) -> str:
    return worker.tail.rstrip().rpartition("\n")[2]


def _is_consequence(worker: Worker) -> bool:
    """True if it only reports the failure of another rank.

    Without a record, its last line on stderr decides. A process that a signal has killed failed
    itself.
    """
    if worker.failure is not None:
        return worker.failure.consequence
    return _status(worker) > 0 and _last_line(worker).startswith(_LAST_LINES)


def _time(worker: Worker) -> float:
    """When it failed, on the clock of ``time.monotonic``."""
    recorded = worker.failure.time if worker.failure is not None else None
    return worker.ended - DETECTION_DELAY if recorded is None else recorded


def _wall_time(at: float) -> float:
    """The time of a clock of ``time.monotonic`` in seconds since the epoch, as the clock on the
    wall is now."""
    return time.time() - (time.monotonic() - at)


def _cause(worker: Worker) -> str:
    """The cause in one line."""
    if worker.failure is not None:
        return worker.failure.message
    if _is_consequence(worker):
        return _last_line(worker)
    return describe_exit(_status(worker), worker.pid)


def summary(worker: Worker) -> str:
    """A failed worker and why it has failed, in one line."""
    return printable(f"rank {worker.rank}: {first_line(_cause(worker))}")


def root_cause(failures: Sequence[Worker]) -> Worker:
    """The earliest failure, preferably one that is not the consequence of another rank's failure.

    If its error names another rank that has failed by itself, it is that one.
    """
    first = min(failures, key=lambda f: (_is_consequence(f), _time(f), f.rank))
    named = first.failure.named if first.failure is not None else ()
    return next((f for f in failures if f.rank in named and not _is_consequence(f)), first)


class Failure:
    """Why an attempt has failed on this node: its first failure.

    The root cause is the first failure or, if its error names another rank, that rank: it has not
    called what the others wait in, has ended early, or is the only one whose call differs. If most
    ranks have ended without an error, these have not ended early.

    Attributes:
        root: the failed worker that is the root cause, or whose error names it.
        cause: the root cause; its exit code is 128 + N for signal N.

    Args:
        workers, failures: of the attempt.
        keeps_files: True if the error files stay.
        node: the node rank of a job on several nodes.
    """

    def __init__(
        self,
        workers: Sequence[Worker],
        failures: Sequence[Worker],
        keeps_files: bool,
        node: int | None = None,
    ) -> None:
        self.root = root = root_cause(failures)
        status = _status(root)
        self._failures = failures
        self._stopped = [worker.rank for worker in workers if worker.stopped]
        self._culprit = _named(workers, failures, root)
        if self._culprit is None:
            entry = _entry(root, keeps_files, node)
        else:
            entry = _named_entry(self._culprit, root, keeps_files, node)
        self.cause = Cause(
            summary(root),
            status if status >= 0 else 128 - status,
            entry,
            _is_consequence(root),
            _time(root),
        )

    def lines(self, cause: Cause) -> list[str]:
        """The failures of this node besides ``cause``, and which workers were stopped."""
        own = cause.entry == self.cause.entry
        others = [f for f in self._failures if f is not self.root or self._culprit or not own]
        others.sort(key=lambda f: (_time(f), f.rank))
        lines = _describe_others(others, self.root if own else None)
        if self._stopped:
            lines.append(f"(stopped by the launcher: {ranks_text(self._stopped)})")
        return lines

    def write(self, path: str) -> None:
        """Write the root cause to a file in the format of torch's error files; OSError if it cannot
        be written."""
        record = self.root.failure
        message = {
            "message": _cause(self.root),
            "extraInfo": {
                "py_callstack": record.traceback if record is not None else "",
                "timestamp": str(int(_wall_time(_time(self.root)))),
            },
            "errorCode": self.root.status,
        }
        write_whole(path, json.dumps({"message": message}).encode(), 0o644)


def report(
    title: str, lines: Sequence[str], cause: Cause, reader: str, first: Cause | None = None
) -> str:
    """The summary in torchrun's format; the tracebacks are printed above it.

    Args:
        lines: what else has failed on this node.
        reader: the command that shows the ranks' last calls.
        first: why the first attempt has failed, if the workers were restarted.
    """
    has_failures = any(not line.startswith("(") for line in lines)
    lines = [f"  {line}" for line in (*(() if has_failures else ("<NO_OTHER_FAILURES>",)), *lines)]
    entry = [*cause.entry, *([f"  last calls: {reader}"] if reader else ())]
    before = first.entry if first is not None else []
    heading = f"{title} FAILED"
    width = min(60, max(map(len, [heading, *lines, *entry, *before])))
    double, single = "=" * width, "-" * width
    parts = [
        double,
        heading,
        single,
        "Failures:",
        *lines,
        single,
        "Root Cause (first observed failure):",
        *entry,
    ]
    if before:
        parts += [single, "First failure before the restarts:", *before]
    return "\n".join(["", *parts, double]) + "\n"


def _entry(worker: Worker, keeps_files: bool, node: int | None) -> list[str]:
    status, record = _status(worker), worker.failure
    by_signal = f" ({signal_name(-status)})" if status < 0 else ""
    return [
        *_place(worker, _time(worker), node),
        f"  exitcode  : {status} (pid: {worker.pid}){by_signal}",
        f"  error_file: {worker.files.error_file if record and keeps_files else '<N/A>'}",
        f"  traceback : {first_line(_cause(worker))}{' (above)' if record else ''}",
    ]


def _named(workers: Sequence[Worker], failures: Sequence[Worker], root: Worker) -> Worker | None:
    """The worker that the error of ``root`` blames, if it has not failed itself; see
    :class:`Failure`."""
    named = root.failure.named if root.failure is not None else ()
    found = next(
        (worker for worker in workers if worker.rank in named and worker not in failures), None
    )
    if found is None or found.stopped or found.status is None:
        return found
    # If more ranks have ended without an error than with one, this one has not ended early.
    return found if sum(worker.status == 0 for worker in workers) <= len(failures) else None


def _named_entry(worker: Worker, root: Worker, keeps_files: bool, node: int | None) -> list[str]:
    """The entry of a worker that has not failed, but is named in the error of the first failure."""
    ended = worker.status is not None and not worker.stopped
    end = (
        f"{worker.status} (pid: {worker.pid})"
        if ended
        else f"none before the launcher stopped it (pid: {worker.pid})"
    )
    at = worker.ended if ended else _time(root)
    return [
        *_place(worker, at, node),
        f"  exitcode  : {end}",
        (
            "  error_file:"
            f" {f'{root.files.error_file} (of rank {root.rank})' if keeps_files else '<N/A>'}"
        ),
        f"  traceback : none; rank {root.rank} names it: {first_line(_cause(root))} (above)",
    ]


def _place(worker: Worker, at: float, node: int | None) -> list[str]:
    return [
        "[0]:",
        *([f"  node      : {node}"] if node is not None else ()),
        f"  time      : {time.strftime('%Y-%m-%d_%H:%M:%S', time.localtime(_wall_time(at)))}",
        f"  host      : {socket.gethostname()}",
        f"  rank      : {worker.rank} (local_rank: {worker.local_rank})",
    ]


def _describe_others(failures: Sequence[Worker], root: Worker | None) -> list[str]:
    """One line for each group of failures with the same end; ``root`` is the root cause, if it is
    in the report."""
    groups: list[list[Worker]] = []
    for failure in failures:
        group = next((found for found in groups if _same_end(found[0], failure)), None)
        if group is None:
            groups.append([failure])
        else:
            group.append(failure)
    lines = []
    for group in groups:
        text = first_line(_cause(group[0]))
        if root is not None and root not in failures and _same_end(group[0], root):
            text = f"the same as rank {root.rank} below"
        lines.append(f"{_describe_ranks(group)}: {text}")
    return lines


def _same_end(one: Worker, other: Worker) -> bool:
    same = keys(_cause(one), one.rank) & keys(_cause(other), other.rank)
    return one.status == other.status and bool(same)


def _describe_ranks(failures: Sequence[Worker]) -> str:
    first = failures[0]
    if len(failures) == 1:
        how = f"local_rank: {first.local_rank}, exitcode {first.status}, pid {first.pid}"
    else:
        pids = [f.pid for f in sorted(failures, key=lambda f: f.rank)]
        more = " and more" if len(pids) > 16 else ""
        how = f"exitcode {first.status}, pids {', '.join(map(str, pids[:16]))}{more}"
    return f"{ranks_text([f.rank for f in failures])} ({how})"


def last_stderr_lines(worker: Worker) -> str:
    """The last stderr lines of a rank without a recorded exception; empty if there are none.

    Stacks that faulthandler has printed to the console are not repeated.
    """
    tail = worker.tail.rstrip().splitlines()
    stacks_are_shown = worker.shows_stderr and any(line.endswith(_STACK) for line in tail)
    if worker.failure is not None or not tail or stacks_are_shown:
        return ""
    return (
        "\n".join([f"The last lines that rank {worker.rank} wrote to stderr:", *tail[-30:]]) + "\n"
    )


def first_line(text: str) -> str:
    """The first line of a text, of at most 300 characters."""
    return shortened(text.strip().partition("\n")[0].removesuffix(":"), _ONE_LINE)
