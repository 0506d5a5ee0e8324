"""The watchdog: one thread per backend that sweeps all its groups, and one that drops their
arrays."""

from __future__ import annotations

import threading
import time
from queue import SimpleQueue
from typing import Any, Protocol

from unicoll.devices.device_runtime import DeviceRuntime
from unicoll.process import logs
from unicoll.process.interrupts import Changes, LazyThread

_PERIOD_S = 0.1
_PERIOD_WITH_CALLBACKS_S = 2e-4
_CLOSE_S = 2.0
_UNWATCH_S = 20.0
"""How long a group that closes waits for a sweep of it to end, in which users' callbacks run."""


class _Watched(Protocol):
    def sweep(self, now: float) -> bool:
        """Check the group; True if callbacks are pending."""

    def sweep_failed(self, cause: BaseException) -> None:
        """A sweep raised: fail the group."""


class WatchdogThread:
    """The two threads; they start with the first group and end with :meth:`close`.

    Args:
        backend: name of the groups' backend.
        runtime: of their devices.
    """

    def __init__(self, backend: str, runtime: DeviceRuntime) -> None:
        self._backend = backend
        self._runtime = runtime
        self._watched: list[_Watched] = []
        self._sweep_ended = Changes()
        self._lock = self._sweep_ended.lock
        self._sweeping: _Watched | None = None
        # The lock is held unless there is something to do: sweep_often() releases it, and the
        # watchdog takes it again. It is no Event, because a user's thread calls sweep_often(), and
        # an exception there could leave the Event's lock held, which would stop the watchdog.
        self._wake = threading.Lock()
        self._wake.acquire()
        self._closing = False
        self._thread = LazyThread(f"unicoll-{backend}-watchdog")
        self._dropped: SimpleQueue[list[Any] | None] = SimpleQueue()
        self._dropper = LazyThread(f"unicoll-{backend}-release")

    def watch(self, group: _Watched) -> None:
        """Sweep a group from now on."""
        with self._lock:
            self._watched.append(group)
            # They are started again for each group, because an exception may have interrupted the
            # first start.
            self._thread.start(self._run)
            self._dropper.start(self._drop)

    def unwatch(self, group: _Watched) -> None:
        """Stop sweeping a group; a sweep of it that is running has ended when this returns."""
        with self._lock:
            if group in self._watched:
                self._watched.remove(group)
        # A callback of the user, on the watchdog's thread, may close a group, and must not wait for
        # the sweep that it is in.
        if threading.get_ident() != self._thread.ident:
            self._sweep_ended.wait_for(lambda: self._sweeping is not group, _UNWATCH_S)

    def sweep_often(self) -> None:
        """Sweep at once, since a callback is pending."""
        try:
            self._wake.release()
        except RuntimeError:
            # It is released already.
            pass

    def drop(self, references: list[Any]) -> None:
        """Clear a list of references to arrays on another thread: cudaFree waits for kernels, and
        one may never end."""
        if references:
            self._dropped.put(references)

    def _drop(self) -> None:
        while (references := self._dropped.get()) is not None:
            references.clear()

    def close(self) -> None:
        """End the threads; idempotent."""
        self._closing = True
        self.sweep_often()
        self._dropped.put(None)
        for thread in (self._thread, self._dropper):
            thread.join(_CLOSE_S)

    def _run(self) -> None:
        try:
            self._serve()
        except BaseException as e:
            logs.logger(self._backend).exception("the watchdog ended with an exception")
            # Nothing ends the operations of the groups any more, so the groups fail.
            with self._lock:
                watched = list(self._watched)
            for group in watched:
                group.sweep_failed(e)

    def _serve(self) -> None:
        # Otherwise CUDA refuses some calls of this thread while the program captures a graph.
        self._runtime.ignore_captures()
        while not self._closing:
            if self._sweep_all():
                time.sleep(_PERIOD_WITH_CALLBACKS_S)
            else:
                self._wake.acquire(timeout=_PERIOD_S)

    def _sweep_all(self) -> bool:
        """Sweep each group, of which no reference is kept; True if callbacks are pending."""
        with self._lock:
            watched = list(self._watched)
        now = time.monotonic()
        # This is a list, because any() of a generator would leave out the groups behind the first
        # one with callbacks.
        pending = [self._sweep(group, now) for group in watched]
        return any(pending)

    def _sweep(self, group: _Watched, now: float) -> bool:
        with self._lock:
            # The test and the assignment are under one lock: either unwatch() has removed the group
            # before, or it sees that the group is being swept and waits.
            if group not in self._watched:
                return False
            self._sweeping = group
        try:
            return group.sweep(now)
        except Exception as e:
            # An error in one group does not affect the others.
            logs.logger(self._backend).exception("the watchdog failed to check a group")
            group.sweep_failed(e)
            return False
        finally:
            with self._lock:
                self._sweeping = None
            self._sweep_ended.notify_all()
