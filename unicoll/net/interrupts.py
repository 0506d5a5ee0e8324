"""Exceptions in the middle of a call, of a signal's handler or by another thread's ``PyThreadState_SetAsyncExc``.

CPython raises them when a Python function begins, after each call of a C function, when a loop goes back, and in a
system call that waits. ``with`` of a C lock releases the lock whatever happens: no exception is raised between its
acquisition and the body, nor between the body and its release. ``threading.Condition`` and ``threading.Event`` do not:
an exception at the beginning of their ``__exit__``, which is a Python function, leaves their lock held.
:class:`Changes` has no such function.
"""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

_RECHECK_S = 1.0
"""Longest pause between two looks at what is waited for: an exception may have ended :meth:`Changes.notify_all`."""
_RAISE_SYSTEM_ERRORS = ("unicoll", "gloo_fallback", "socket", "ssl")
"""Packages whose functions make the system calls."""


class InterruptedStreamError(ConnectionAbortedError):
    """An exception has interrupted a transfer on this connection, of which an unknown part was done."""

    def __init__(self, what: str) -> None:
        super().__init__(
            errno.ECONNABORTED,
            f"a signal's handler or another exception interrupted an earlier {what} on this connection, which is out of"
            " step since then",
        )


def raised_by_handler(error: BaseException) -> bool:
    """True if no system call has raised ``error``: for an OSError, since that of a handler may be one (TimeoutError).

    Those of system calls have a number, but for a socket's timeout. What another thread has set has no arguments.
    """
    if isinstance(error, OSError) and error.errno is not None:
        return False
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    module = "" if trace is None else str(trace.tb_frame.f_globals.get("__name__"))
    return not error.args or module.partition(".")[0] not in _RAISE_SYSTEM_ERRORS


class Changes:
    """Lets threads wait until what :attr:`lock` protects has changed, as ``threading.Condition`` does.

    Attributes:
        lock: to be held while changing it; not while waiting.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self._waiters: dict[threading.Lock, None] = {}

    def notify_all(self) -> None:
        """Wake the threads that wait; with the lock, or after it was released."""
        for waiter in [*self._waiters]:
            try:
                waiter.release()
            except RuntimeError:  # it is awake
                pass

    def wait_for(self, ready: Callable[[], T], timeout: float) -> T:
        """Wait up to ``timeout`` seconds until ``ready()``, called with the lock, is true; returns its last result."""
        deadline = time.monotonic() + timeout
        waiter = threading.Lock()
        waiter.acquire()
        try:
            while True:
                with self.lock:
                    found = ready()
                    self._waiters[waiter] = None  # with the lock: the next change wakes this thread
                left = deadline - time.monotonic()
                if found or left <= 0:
                    return found
                waiter.acquire(timeout=min(left, _RECHECK_S))
        finally:
            self._waiters.pop(waiter, None)
