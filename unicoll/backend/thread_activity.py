"""What the threads of this process are in: blocking calls, waits for posted calls, functions of the user.

A thread adds an entry and removes it afterwards, which costs a tenth of a microsecond; the flight recorder and the
search for blocked calls read those of all threads.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import get_ident
from types import FrameType
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from unicoll.backend.call import Call
    from unicoll.backend.contract import Backend
    from unicoll.backend.flight_recorder import CallKind
    from unicoll.backend.work import Completion


class Activity(NamedTuple):
    """What a thread is in.

    Attributes:
        thread: its number.
        what: a call, or the completion of posted ones that the thread waits for without a limit; None while it is in a
            function of the user that unicoll has called.
        backend: of a call.
        kind: of a call that is recorded; else None.
        begun: when, on the clock of ``time.monotonic``; of a call that is recorded.
        frame: of the user's code; of a call that is recorded.
    """

    thread: int
    what: Call | Completion | None
    backend: Backend | None = None
    kind: CallKind | None = None
    begun: float = 0.0
    frame: FrameType | None = None


entries: list[tuple[Any, ...]] = []
"""The fields of each :class:`Activity`, as plain tuples, which take less time to make. A thread's last one is the
innermost."""


@contextmanager
def entered(what: Call | Completion | None, backend: Backend | None = None) -> Iterator[None]:
    """The calling thread is in a call, a wait, or a function of the user, during the ``with`` block."""
    entry = (get_ident(), what, backend)
    entries.append(entry)
    try:
        yield
    finally:
        entries.remove(entry)


def activities(thread: int | None) -> list[Activity]:
    """What a thread is in, from the innermost to the outermost."""
    return [Activity(*entry) for entry in [*entries][::-1] if entry[0] == thread]
