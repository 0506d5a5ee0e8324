"""What is being measured, on one line of the terminal that is written anew."""

from __future__ import annotations

import sys
import time

from unicoll import settings

__all__ = ["VARIABLE", "Progress", "wanted"]

VARIABLE = "UNICOLL_BENCH_PROGRESS"
"""Set by whoever starts the ranks from a terminal: their own standard error may be a pipe to it."""
_PERIOD_S = 0.1


def wanted() -> bool:
    """Whether a person looks at the standard error."""
    return sys.stderr.isatty() or bool(settings.flag(VARIABLE))


class Progress:
    """The line; ``shown=False`` writes nothing."""

    def __init__(self, shown: bool) -> None:
        self._shown = shown
        self._last = 0.0
        self._dirty = False
        self.what = ""

    def tell(self, text: str) -> None:
        """Show what is going on; called often, written ten times a second at most."""
        now = time.monotonic()
        if not self._shown or now - self._last < _PERIOD_S:
            return
        self._last = now
        self._dirty = True
        sys.stderr.write(f"\r\x1b[K{self.what}: {text}")
        sys.stderr.flush()

    def clear(self) -> None:
        """Leave the line empty, for others to write on."""
        if self._dirty:
            self._dirty = False
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()
