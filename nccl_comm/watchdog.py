"""One thread of a process looks after all its NCCL groups: ends, deadlines, deaths, and NCCL's own errors."""

from __future__ import annotations

import logging
import threading
import time
from typing import Protocol

from unicoll import streams

__all__ = ["Watchdog"]

_PERIOD_S = 0.1
_HURRIED_S = 2e-4
_SWEEP_S = 20.0
"""How long a group that closes waits for a look at it to end: callbacks run in there, which are the user's."""


class _Watched(Protocol):
    def sweep(self, now: float) -> bool:
        """Look; whether somebody waits to be told of an end."""


class Watchdog:
    """The thread; it starts with the first group and ends with :meth:`close`."""

    def __init__(self) -> None:
        self._watched: list[_Watched] = []
        self._lock = threading.Lock()
        self._swept = threading.Condition(self._lock)
        self._sweeping: _Watched | None = None
        self._wake = threading.Event()
        self._closing = False
        self._thread: threading.Thread | None = None

    def watch(self, group: _Watched) -> None:
        """Look after a group from now on."""
        with self._lock:
            self._watched.append(group)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="unicoll-nccl-watchdog", daemon=True)
                self._thread.start()

    def unwatch(self, group: _Watched) -> None:
        """The group is closing; returns when nothing looks at it any more, so that it can give things back."""
        with self._swept:
            if group in self._watched:
                self._watched.remove(group)
            if threading.current_thread() is not self._thread:
                self._swept.wait_for(lambda: self._sweeping is not group, _SWEEP_S)

    def hurry(self) -> None:
        """Somebody waits to be told of an end."""
        self._wake.set()

    def close(self) -> None:
        """End the thread; idempotent."""
        self._closing = True
        self._wake.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(2.0)

    def _run(self) -> None:
        streams.cuda().ignore_captures()
        while not self._closing:
            self._wake.clear()
            with self._lock:
                watched = list(self._watched)
            now = time.monotonic()
            hurried = False
            for group in watched:
                hurried |= self._sweep(group, now)
            if hurried:
                time.sleep(_HURRIED_S)
            else:
                self._wake.wait(_PERIOD_S)

    def _sweep(self, group: _Watched, now: float) -> bool:
        with self._lock:
            if group not in self._watched:
                return False
            self._sweeping = group
        try:
            return group.sweep(now)
        except Exception:  # one group's trouble is not the others'
            logging.getLogger("unicoll").exception("the NCCL watchdog failed to look after a group")
            return False
        finally:
            with self._swept:
                self._sweeping = None
                self._swept.notify_all()
