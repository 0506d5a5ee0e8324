"""Functions that run in a fork of the test process."""

from __future__ import annotations

import os
from collections.abc import Callable


def fork(act: Callable[[], object]) -> int:
    """The pid of a forked child that runs ``act``; it exits with 0, or 1 for False, or 2 for an exception."""
    pid = os.fork()
    if pid == 0:
        try:
            os._exit(1 if act() is False else 0)
        except BaseException:
            os._exit(2)
    return pid


def exit_code(pid: int) -> int:
    """Wait for a child; its exit code, negative for a signal."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def in_fork(act: Callable[[], object]) -> int:
    """The exit code of a :func:`fork`."""
    return exit_code(fork(act))
