"""What the threads of this process are in: blocking calls, waits for posted calls, functions of the
user.

A thread adds an entry and removes it afterwards, which costs a tenth of a microsecond; the flight
recorder and the search for blocked calls read those of all threads.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from threading import get_ident
from types import FrameType
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    from unicoll.calls.call import Call
    from unicoll.calls.flight_recorder import CallKind
    from unicoll.calls.work import Completion


class Executor(Protocol):
    """A backend, as the entry of its call has it."""

    @property
    def executing_backend(self) -> object | None:
        """The backend of host arrays that executes its calls one after another; None if the library
        does."""


class NotBlocked:
    """A function of the user that unicoll has called, or a wait with a limit; each one is an object
    of its own."""


class Activity(NamedTuple):
    """What a thread is in.

    Attributes:
        thread: its number.
        what: a call, the completion of posted ones that the thread waits for without a limit, or a
            NotBlocked.
        backend: of a call.
        kind: of a call that is recorded; else None.
        begun: when, on the clock of ``time.monotonic``; of a call that is recorded.
        frame: of the user's code; of a call that is recorded.
    """

    thread: int
    what: Call | Completion | NotBlocked
    backend: Executor | None = None
    kind: CallKind | None = None
    begun: float = 0.0
    frame: FrameType | None = None


entries: list[tuple[Any, ...]] = []
"""The fields of each :class:`Activity`, as plain tuples, which take less time to make. A thread's
last one is the innermost. No two are equal, so that ``remove`` finds the right one."""


@contextmanager
def entered(
    what: Call | Completion | NotBlocked, backend: Executor | None = None
) -> Iterator[None]:
    """The calling thread is in a call, a wait, or a function of the user, during the ``with``
    block."""
    entry = (get_ident(), what, backend)
    # The entry is added within the `try`: a signal's handler may raise as soon as append() has
    # returned.
    try:
        entries.append(entry)
        yield
    finally:
        entries.remove(entry)


def activities(thread: int | None) -> list[Activity]:
    """What a thread is in, from the innermost to the outermost."""
    # The list is copied first, because other threads change it at any time.
    return [Activity(*entry) for entry in [*entries][::-1] if entry[0] == thread]


def _after_fork() -> None:
    """In the child of a fork only the calling thread exists."""
    entries[:] = [entry for entry in entries if entry[0] == get_ident()]


os.register_at_fork(after_in_child=_after_fork)
