"""The end of this process as a member of jobs: it leaves them, with the exception that has ended
the program."""

from __future__ import annotations

import atexit
import sys
from contextlib import ExitStack
from functools import lru_cache, partial
from typing import Any

from unicoll.backend.contract import Job
from unicoll.bootstrap import enclosing_jobs
from unicoll.errors import DistError
from unicoll.process import excepthook, fork_safety, logs

log = logs.logger("job")

_exit_cause: BaseException = SystemExit()
_hook_installed = False
_joined: list[Job] = []
"""The jobs that this process is in."""


def add(job: Job) -> None:
    """This process has joined a job, which it leaves at its end at the latest.

    In a forked child it is no member; a subprocess is refused in its place.
    """
    _joined.append(job)
    job.on_leave.append(partial(_remove, job))
    if job.rendezvous.found.launched is not None:
        enclosing_jobs.mark_joined(job.rendezvous.found.launched)
    _register_exit_handler()


def _remove(job: Job) -> None:
    if job in _joined:
        _joined.remove(job)
        if not any(other.rendezvous.found.launched for other in _joined):
            enclosing_jobs.unmark_joined()


@lru_cache(maxsize=1)
def _register_exit_handler() -> None:
    """Once per process, when it has joined a job."""
    install_excepthook()
    atexit.register(_leave_all)
    fork_safety.in_child(_forget_all)


def _leave_all() -> None:
    try:
        # An exception in one does not keep the others open; the newest is first.
        with ExitStack() as leaving:
            for job in [*_joined]:
                leaving.callback(job.leave, _exit_cause)
    except DistError as error:
        log.error(
            "no call has raised this error, so the program ends with an exit code other than 0: %s",
            error,
        )
        if isinstance(_exit_cause, SystemExit):
            sys.stderr = _FailingAtEnd(sys.stderr)


class _FailingAtEnd:
    """Standard error for a program that has come to its end, but has failed.

    An exception in a function that is called at exit does not change the exit code, and
    ``os._exit`` would leave out what other libraries do at exit. But the interpreter ends with exit
    code 120 if it cannot flush the standard streams (documented with ``sys.exit``).
    """

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def flush(self) -> None:
        self._stream.flush()
        # The functions that are called at exit may write, too, so only a flush after them fails.
        if sys.is_finalizing():
            raise OSError("the program has failed")


def _forget_all() -> None:
    while _joined:
        job = _joined.pop()
        job.forked = True
        for call in job.on_leave:
            call()
        while job.groups:
            job.groups.pop().forget()


def set_exit_cause(error: BaseException) -> None:
    """Record the exception that ends this program, for the other ranks: an uncaught one, or
    SystemExit with its code.

    ``sys.excepthook`` is not called for a SystemExit, so the launcher's bootstrap, which runs the
    program, records it.
    """
    global _exit_cause
    _exit_cause = error


def install_excepthook() -> None:
    """Once per process: record the exception that ends the program, and print it without unicoll's
    frames."""
    global _hook_installed
    if not _hook_installed:
        _hook_installed = True
        excepthook.install(set_exit_cause)
