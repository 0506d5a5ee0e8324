"""The offset of this process's clock to rank 0's, from round trips to the relay in rank 0."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from unicoll.process.interrupts import Changes

Message = dict[str, Any]

_ROUND_TRIPS = 5
_DRIFT = 1e-4
"""Seconds by which two clocks may move apart in a second: more than the kernel's corrections and a
crystal's error."""


def now() -> float:
    """This process's clock, in seconds: that of the flight recorder's times."""
    return time.monotonic()


class Offset(NamedTuple):
    """Rank 0's clock minus this process's clock, in seconds, and by how much that may be wrong at
    most."""

    seconds: float
    error: float


class ClockOffset:
    """The offset, as the best of the round trips so far: it is wrong by half of the round trip's
    time at most."""

    def __init__(self) -> None:
        self._changed = Changes()
        self._replies = 0
        self._seconds = 0.0
        self._error = math.inf
        self._measured = 0.0

    def ping(self) -> Message:
        """The message that begins a round trip."""
        return {"t": "ping", "sent": now()}

    @staticmethod
    def reply(ping: Message) -> Message:
        """Rank 0's reply."""
        return {"t": "pong", "sent": ping["sent"], "clock": now()}

    def receive(self, pong: Message) -> None:
        """Use a reply."""
        received = now()
        sent, clock = float(pong["sent"]), float(pong["clock"])
        error = (received - sent) / 2
        with self._changed.lock:
            # Replies that are worse than the best one count, too: measure() waits for any of them.
            self._replies += 1
            # The clocks may have drifted since the best round trip. A longer one replaces it once
            # the drift may be larger than the difference.
            if 0 <= error <= self._error_at(received):
                self._seconds = clock - (sent + received) / 2
                self._error = error
                self._measured = received
            self._changed.notify_all()

    def measure(self, send: Callable[[Message], None], timeout: float = 0.2) -> Offset | None:
        """:meth:`last` after some round trips, for ``timeout`` seconds at most; not on the thread
        that receives."""
        deadline = time.monotonic() + timeout
        for _ in range(_ROUND_TRIPS):
            with self._changed.lock:
                before = self._replies
            send(self.ping())
            if not self._changed.wait_for(
                lambda before=before: self._replies > before,  # type: ignore[misc]
                deadline - time.monotonic(),
            ):
                break
        return self.last()

    def last(self) -> Offset | None:
        """The offset as measured last; None if no reply has arrived."""
        with self._changed.lock:
            error = self._error_at(now())
            return Offset(self._seconds, error) if math.isfinite(error) else None

    def _error_at(self, time: float) -> float:
        return self._error + _DRIFT * (time - self._measured)
