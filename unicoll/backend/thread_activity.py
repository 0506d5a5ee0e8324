"""What each thread of this process is in: a blocking call, a wait for posted calls, or a function of the user.

A thread writes its own entry, which costs a tenth of a microsecond; the flight recorder and the search for blocked
calls read those of all threads.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import get_ident
from types import FrameType
from typing import TYPE_CHECKING, NamedTuple, cast

if TYPE_CHECKING:
    from unicoll.backend.call import Call
    from unicoll.backend.contract import Backend
    from unicoll.backend.flight_recorder import CallKind
    from unicoll.backend.work import Completion


class Activity(NamedTuple):
    """What a thread is in.

    Attributes:
        what: a call, or the completion of posted ones that the thread waits for without a limit; None while it is in a
            function of the user that unicoll has called.
        outer: what it was in before.
        backend: of a call.
        kind: of a call that is recorded; else None.
        begun: when, on the clock of ``time.monotonic``; of a call that is recorded.
        frame: the user's code, or a caller between it and unicoll; of a call.
    """

    what: Call | Completion | None
    outer: Activity | None
    backend: Backend | None = None
    kind: CallKind | None = None
    begun: float = 0.0
    frame: FrameType | None = None


Entry = tuple[object, ...]
"""The fields of an :class:`Activity`: a plain tuple takes less time to make."""

entries: dict[int, Entry] = {}
"""By thread. The thread itself adds its entry, and afterwards removes it or puts back the outer one."""


@contextmanager
def entered(what: Call | Completion | None, backend: Backend | None = None) -> Iterator[None]:
    """The calling thread is in a call, a wait, or a function of the user, during the ``with`` block."""
    thread = get_ident()
    outer = entries.get(thread)
    entries[thread] = (what, outer, backend)
    try:
        yield
    finally:
        leave(thread, outer)


def leave(thread: int, outer: Entry | None) -> None:
    """The calling thread is in what it was in before."""
    if outer is None:
        entries.pop(thread, None)
    else:
        entries[thread] = outer


def activities(thread: int | None) -> Iterator[Activity]:
    """What a thread is in, from the innermost to the outermost."""
    entry = entries.get(cast(int, thread))
    while entry is not None:
        activity = Activity(*cast(tuple[None, None], entry))
        yield activity
        entry = activity.outer
