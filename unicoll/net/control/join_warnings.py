"""Warnings of a process that waits for others while it joins a job."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from unicoll.process import environment, logs

log = logs.logger("job")

FIRST_S = 10.0
"""Seconds until the first warning."""


def title(name: str) -> str:
    """What joins, in errors and warnings: the function, and the job's name if it has one."""
    return f"join of {name!r}" if name else "init_process_group"


@contextmanager
def warn_while_waiting(
    name: str,
    describe: Callable[[], str],
    say: Callable[[str], object] | None = None,
    also_after: float | None = None,
) -> Iterator[None]:
    """Log a warning when the block has lasted 10 s, and each time that it has lasted twice as long.

    The first one comes after a third of ``UNICOLL_STALL_WARNING`` if that is later; 0 turns the
    warnings off.

    Args:
        name: of the job, or "".
        describe: called on another thread; what this process waits for, or "" if another process
            says it.
        say: called there with "has waited ..."; None logs a warning that begins with the
            :func:`title`.
        also_after: seconds of another warning before.
    """
    stall_s = environment.number("UNICOLL_STALL_WARNING")
    if not stall_s:
        yield
        return
    first = max(FIRST_S, stall_s / 3)
    # The lock is released at the end of the block. It stands in for an Event, which does not
    # survive each exception of a signal handler (unicoll.process.interrupts).
    ended = threading.Lock()
    ended.acquire()
    begun = time.monotonic()

    def warn() -> None:
        after = also_after or first
        # The times count from the beginning, whatever describe() takes. A negative timeout would be
        # an error, or no limit.
        while not ended.acquire(timeout=max(0.0, begun + after - time.monotonic())):
            if waits_for := describe():
                text = f"has waited {after:.0f} s for {waits_for}"
                if say is not None:
                    say(text)
                else:
                    log.warning("%s %s", title(name), text)
            after = max(2 * after, first)

    thread = threading.Thread(target=warn, name="unicoll-join-warnings", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.release()
        thread.join()
