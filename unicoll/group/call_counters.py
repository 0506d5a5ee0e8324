"""Counters of calls, bytes and seconds by operation and group, and their file in Prometheus's text
format.

:mod:`unicoll.api.metrics` has the functions of the user.
"""

from __future__ import annotations

import threading
from dataclasses import asdict, dataclass
from pathlib import Path
from weakref import WeakSet

from unicoll.backend.contract import Job
from unicoll.errors import DistArgumentError
from unicoll.group.call_hooks import Hook, HookedCall, add_to_job
from unicoll.process import logs
from unicoll.process.files import write_whole

log = logs.logger("metrics")

_INTERVAL_S = 5.0


@dataclass
class Counters:
    """Totals of the calls of one operation on one group.

    Attributes:
        calls: calls that have ended, those with an error included.
        errors: calls that ended with an error.
        bytes: bytes of the inputs, or of the outputs where this rank had no inputs.
        seconds: from start to end of each call. Calls may overlap.
        waiting: seconds for which threads of the program were blocked, in calls and in waits for
            them.
    """

    calls: int = 0
    errors: int = 0
    bytes: int = 0
    seconds: float = 0.0
    waiting: float = 0.0


_HELP = {
    "calls": ("unicoll_calls_total", "Calls that have ended."),
    "errors": ("unicoll_errors_total", "Calls that have ended with an error."),
    "bytes": ("unicoll_bytes_total", "Bytes of the arrays passed in."),
    "seconds": ("unicoll_seconds_total", "Seconds from start to end of the calls."),
    "waiting": (
        "unicoll_waiting_seconds_total",
        "Seconds for which threads were blocked in calls.",
    ),
}


class CallCounters:
    """The counters of the process, and the hook that counts."""

    def __init__(self) -> None:
        # Calls end on the threads of the program, of queues and of NCCL's watchdog.
        self._lock = threading.Lock()
        self._counters: dict[tuple[str, str], Counters] = {}
        # The jobs whose calls are counted: a program may be in several. Weakly, because a hook
        # refers to its job, which would never be freed after its end.
        self._jobs: WeakSet[Job] = WeakSet()

    def enable(self, job: Job) -> None:
        """Count the calls of a job that start from now on; no effect if they are counted
        already."""
        if self._hook_of(job) is None:
            self._jobs.add(job)
            add_to_job(job, Hook(after=self._ended, waited=self._waited))

    def disable(self) -> None:
        """Count no more calls."""
        while self._jobs:
            if (hook := self._hook_of(self._jobs.pop())) is not None:
                hook.remove()

    def _hook_of(self, job: Job) -> Hook | None:
        return next((hook for hook in job.hooks if hook.after == self._ended), None)

    def reset(self) -> None:
        """Set all counters to zero."""
        with self._lock:
            self._counters.clear()

    def snapshot(self) -> dict[tuple[str, str], Counters]:
        """Copies of the counters by operation and name of the group."""
        with self._lock:
            return {key: Counters(**asdict(counters)) for key, counters in self._counters.items()}

    def counts(self, job: Job) -> bool:
        """True if the calls of a job are counted."""
        return self._hook_of(job) is not None

    def count(self, op: str, group: str, nbytes: int, seconds: float, failed: bool) -> None:
        """Count a call that has ended."""
        with self._lock:
            counters = self._counters.setdefault((op, group), Counters())
            counters.calls += 1
            counters.errors += failed
            counters.bytes += nbytes
            counters.seconds += seconds

    def _ended(self, call: HookedCall) -> None:
        self.count(call.op, call.group, call.nbytes, call.seconds, bool(call.error))

    def _waited(self, call: HookedCall, seconds: float) -> None:
        with self._lock:
            self._counters.setdefault((call.op, call.group), Counters()).waiting += seconds


counters_of_process = CallCounters()


def write_file(path: Path, rank: str) -> None:
    """Write the counters to a file in Prometheus's text format, replacing it at once; OSError if
    that fails."""
    lines = []
    totals = sorted(counters_of_process.snapshot().items())
    for field, (name, text) in _HELP.items():
        lines += [f"# HELP {name} {text}", f"# TYPE {name} counter"]
        for (op, group), counters in totals:
            labels = f'op="{_escaped(op)}",group="{_escaped(group)}"' + (
                f',rank="{rank}"' if rank else ""
            )
            lines.append(f"{name}{{{labels}}} {getattr(counters, field)!r}")
    write_whole(str(path), ("\n".join(lines) + "\n").encode(), 0o644)


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


class _File:
    """Rewrites the file of ``UNICOLL_METRICS_FILE`` until the job is closed."""

    def __init__(self, path: Path, rank: int) -> None:
        self._path = path
        self._rank = str(rank)
        self._stop = threading.Event()
        self._failed = False
        self._rewrite()
        self._thread = threading.Thread(target=self._work, name="unicoll-metrics", daemon=True)
        self._thread.start()

    def _work(self) -> None:
        while not self._stop.wait(_INTERVAL_S):
            self._rewrite()

    def _rewrite(self) -> None:
        try:
            write_file(self._path, self._rank)
            self._failed = False
        except OSError as e:
            # The warning is logged once, not every few seconds.
            if not self._failed:
                log.warning("UNICOLL_METRICS_FILE: %s cannot be written: %s", self._path, e)
            self._failed = True

    def close(self) -> None:
        self._stop.set()
        # The thread ends before the last rewrite. Otherwise it could put older numbers in place of
        # the last ones.
        self._thread.join()
        self._rewrite()


def start_file(job: Job, name: str) -> None:
    """Enable the counters and rewrite the file ``name`` until the job is closed.

    Raises:
        DistArgumentError: the directory does not exist.
    """
    path = Path(name.replace("{rank}", str(job.rank)))
    if "{rank}" not in name and job.size > 1:
        path = path.with_name(f"{path.stem}.rank{job.rank}{path.suffix}")
    if not path.parent.is_dir():
        raise DistArgumentError(f"UNICOLL_METRICS_FILE: there is no directory {path.parent}")
    counters_of_process.enable(job)
    job.shared("metrics", lambda: _File(path, job.rank))
