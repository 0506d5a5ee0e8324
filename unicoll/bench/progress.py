"""The progress line on the terminal, which is overwritten in place."""

from __future__ import annotations

import sys
import time

from unicoll.net import environment

VARIABLE = "UNICOLL_BENCH_PROGRESS"
"""Set by a launcher with a terminal: the standard error of its ranks may be a pipe to that terminal."""
_PERIOD_S = 0.1


def is_wanted() -> bool:
    """True if the standard error is a terminal, directly or through the launcher."""
    return sys.stderr.isatty() or bool(environment.flag(VARIABLE))


class Progress:
    """The progress line; with ``enabled=False`` it writes nothing."""

    def __init__(self, enabled: bool) -> None:
        self._enabled = enabled
        self._last = 0.0
        self._dirty = False
        self.label = ""

    def show(self, text: str) -> None:
        """Display a text; it is written at most ten times per second."""
        now = time.monotonic()
        if not self._enabled or now - self._last < _PERIOD_S:
            return
        self._last = now
        self._dirty = True
        sys.stderr.write(f"\r\x1b[K{self.label}: {text}")
        sys.stderr.flush()

    def clear(self) -> None:
        if self._dirty:
            self._dirty = False
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()
