"""The end of workers under torchrun, which sends SIGTERM to all of them at once when the first one
has ended.

The error that names that rank comes a moment later, and would be lost. So a process whose SIGTERM
nothing else handles ends by it only after a moment: the call that fails meanwhile raises its error,
which ends the program. A framework may handle SIGTERM itself, and torch's DataLoader raises an
error of its own when torchrun has ended its workers; so the notice is logged, too.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from unicoll.backend.contract import Job
from unicoll.calls.call_site import line_of_main_thread
from unicoll.process import logs, signal_thread

log = logs.logger("job")

_NOTICE_S = 0.5
"""How long the notice that a rank has ended may take to arrive."""
_RAISED_S = 1.0
"""How long the program may take to end with the error."""
_TICK_S = 0.02

_jobs: list[Job] = []
"""Those that torchrun has started and this process is in."""


def raise_before_sigterm(job: Job) -> None:
    """On SIGTERM, have a call that waits for a rank of the job that has ended raise its error
    first. The notice of the first rank that has failed or died is logged as soon as it arrives."""
    if job.control is not None:
        job.control.loss_listeners.append(_log_loss)
    _jobs.append(job)
    job.cleanup.callback(_release, job)
    before_sigterm(_await_error)


def _log_loss(reason: str) -> None:
    place = ""
    # This is the control thread, which must not end with an error of a place: the names of a module
    # may be anything, and the program's objects may raise.
    with suppress(Exception):
        place = line_of_main_thread()
    log.warning("%s%s", reason, place and f"; this rank is at {place}")


def _release(job: Job) -> None:
    _jobs.remove(job)
    # The thread comes first, because release() has no effect while it is used.
    signal_thread.leave_thread()
    if not _jobs:
        signal_thread.release(signal.SIGTERM)


def _await_error() -> None:
    deadline = time.monotonic() + _NOTICE_S
    while time.monotonic() < deadline:
        # The program goes on beside this thread and may leave a job, so the loop is over a copy.
        controls = [job.control for job in [*_jobs] if job.control is not None]
        # Ranks that have left in order are no reason for the SIGTERM. The call of the program that
        # waits gets the same notice, and has _RAISED_S seconds to raise its error and end the
        # program.
        if any(control.departed.keys() - control.left for control in controls):
            time.sleep(_RAISED_S)
            return
        time.sleep(_TICK_S)


def before_sigterm(wait: Callable[[], object]) -> None:
    """On SIGTERM call ``wait`` on a thread and then end the process by it, if nothing else handles
    the signal."""

    def end() -> None:
        # A process that is told to end does so also if the wait fails.
        try:
            wait()
        finally:
            signal_thread.end_by(signal.SIGTERM)

    def start() -> None:
        # This may run in the main thread within any other call, so it must not wait. The program
        # goes on meanwhile, and may end: a daemon thread does not delay that.
        threading.Thread(target=end, name="unicoll-end", daemon=True).start()

    # The order matters: use_thread() has no effect while no signal is handled.
    signal_thread.handle(signal.SIGTERM, start)
    signal_thread.use_thread()
