"""Exceptions in the middle of a call, of a signal's handler or by another thread's
``PyThreadState_SetAsyncExc``.

CPython raises them when a Python function begins, after each call of a C function, when a loop goes
back, and in a system call that waits. ``with`` of a C lock releases the lock whatever happens: no
exception is raised between its acquisition and the body, nor between the body and its release.
``threading.Condition`` and ``threading.Event`` do not: an exception at the beginning of their
``__exit__``, which is a Python function, leaves their lock held. :class:`Changes` has no such
function.
"""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

_RECHECK_S = 1.0
"""Longest pause between two looks at what is waited for: an exception may have ended
:meth:`Changes.notify_all`."""
_RAISE_SYSTEM_ERRORS = ("unicoll", "gloo_fallback", "socket", "ssl")
"""Packages whose functions make the system calls."""


class InterruptedStreamError(ConnectionAbortedError):
    """An exception has interrupted a transfer on this connection, of which an unknown part was
    done."""

    def __init__(self, what: str) -> None:
        super().__init__(
            errno.ECONNABORTED,
            f"a signal's handler or another exception interrupted an earlier {what} on this"
            " connection, which is out of step since then",
        )


def raised_by_handler(error: BaseException) -> bool:
    """True if no system call has raised ``error``: for an OSError, since that of a handler may be
    one (TimeoutError).

    Those of system calls have a number, but for a socket's timeout. What another thread has set has
    no arguments.
    """
    if isinstance(error, OSError) and error.errno is not None:
        return False
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    module = "" if trace is None else str(trace.tb_frame.f_globals.get("__name__"))
    return not error.args or module.partition(".")[0] not in _RAISE_SYSTEM_ERRORS


class LazyThread:
    """A daemon thread that starts when it is first needed, also after an exception has interrupted
    its start.

    Such a thread may still start, without :class:`threading.Thread` knowing, beside its
    replacement. So the first that runs calls the function, and the others end.

    Args:
        name: of the thread.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        # The threads that have begun; list.append() is atomic, so exactly one of them is the first.
        self._begun: list[threading.Thread] = []

    @property
    def ident(self) -> int | None:
        """The identifier of the thread, None before it runs."""
        return self._begun[0].ident if self._begun else None

    def start(self, target: Callable[[], object]) -> None:
        """Start the thread, which calls ``target``, unless it runs or has run."""
        if self._begun:
            return
        try:
            threading.Thread(target=self._run, args=(target,), name=self._name, daemon=True).start()
        except RuntimeError as error:
            # Thread.start() waits on a Condition; an exception while that acquires its lock again
            # is replaced by one that the lock is not held.
            if error.__context__ is None:
                raise
            raise error.__context__ from None

    def join(self, timeout: float) -> bool:
        """Wait up to ``timeout`` seconds until the thread has ended; True if it has, has never run
        or is the caller."""
        if not self._begun or self._begun[0] is threading.current_thread():
            return True
        self._begun[0].join(timeout)
        return not self._begun[0].is_alive()

    def _run(self, target: Callable[[], object]) -> None:
        self._begun.append(threading.current_thread())
        if self._begun[0] is threading.current_thread():
            target()


class Changes:
    """Lets threads wait until what :attr:`lock` protects has changed, as ``threading.Condition``
    does.

    Attributes:
        lock: to be held while changing it; not while waiting.
    """

    def __init__(self) -> None:
        # A handler of a signal may use the object on a thread that holds the lock, and would wait
        # for itself with a Lock.
        self.lock = threading.RLock()
        # Each thread that waits has a lock of its own, which it holds. A release wakes it.
        self._waiters: dict[threading.Lock, None] = {}

    def notify_all(self) -> None:
        """Wake the threads that wait; with the lock, or after it was released."""
        # Threads enter and remove their locks meanwhile, so this is a copy.
        for waiter in [*self._waiters]:
            try:
                waiter.release()
            except RuntimeError:
                # The thread was woken already, and is about to look again.
                pass

    def wait_for(self, ready: Callable[[], T], timeout: float) -> T:
        """Wait up to ``timeout`` seconds until ``ready()``, called with the lock, is true; returns
        its last result."""
        deadline = time.monotonic() + timeout
        waiter = threading.Lock()
        waiter.acquire()
        try:
            while True:
                with self.lock:
                    found = ready()
                    # The lock is held: a change that ready() has not seen finds this thread here,
                    # and wakes it.
                    self._waiters[waiter] = None
                left = deadline - time.monotonic()
                if found or left <= 0:
                    return found
                waiter.acquire(timeout=min(left, _RECHECK_S))
        finally:
            self._waiters.pop(waiter, None)


class Flag:
    """What ``threading.Event`` is, without its lock, which an exception may leave held."""

    def __init__(self) -> None:
        self._changes = Changes()
        self._is_set = False

    def is_set(self) -> bool:
        """True once it was set."""
        return self._is_set

    def set(self) -> None:
        """Wake the threads that wait."""
        with self._changes.lock:
            self._is_set = True
        self._changes.notify_all()

    def wait(self, timeout: float) -> bool:
        """Wait up to ``timeout`` seconds; True if it is set."""
        return self._is_set or self._changes.wait_for(self.is_set, timeout)
