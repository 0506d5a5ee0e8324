"""Threads for calls of the library that may never return, started before they are needed."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from queue import SimpleQueue

from unicoll.devices.device_runtime import DeviceRuntime
from unicoll.process.interrupts import LazyThread

END_S = 10.0
"""How long the library may take to stop or end a communicator before the thread that waits for it
is abandoned."""
_SPARE = 2
"""Idle threads that are kept: one ends a group, and waits while another one calls the library."""
_CLOSE_S = 1.0
"""How long :meth:`TeardownThreads.close` waits for threads at work, of which one may never return
from the library."""


class TeardownThreads:
    """The threads on which the communicators of a backend are ended.

    They start with the first communicator: from Python 3.12 on no thread can be started while the
    interpreter ends, which is when groups end that were not destroyed.

    Args:
        backend: name of the backend.
        runtime: of the groups' devices.
    """

    def __init__(self, backend: str, runtime: DeviceRuntime) -> None:
        self._name = f"unicoll-{backend}-end"
        self._runtime = runtime
        self._lock = threading.Lock()
        self._tasks: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._threads: list[LazyThread] = []
        self._idle = 0
        self._closed = False
        try:
            with self._lock:
                self._fill(_SPARE)
        except BaseException:
            # The threads that have started would wait for tasks for ever.
            self.close()
            raise

    def _fill(self, count: int) -> None:
        """Have ``count`` idle threads; those whose start was interrupted are started again."""
        while self._idle < count and not self._closed:
            self._threads.append(LazyThread(self._name))
            self._idle += 1
        for thread in [*self._threads]:
            try:
                thread.start(self._work)
            except RuntimeError:
                # The interpreter is ending: from Python 3.12 on no thread can be started then.
                self._threads.remove(thread)
                self._idle -= 1

    def start(self, task: Callable[[], None]) -> None:
        """Run a task on a thread, or on the caller's if there is none."""
        with self._lock:
            # The task takes one of them, so that the spare ones remain.
            self._fill(_SPARE + 1)
            idle = self._idle > 0
            if idle:
                self._idle -= 1
                self._tasks.put(task)
        # The lock is not held here: the task may take seconds, and may need another thread.
        if not idle:
            task()

    def _work(self) -> None:
        # Otherwise CUDA refuses some calls of this thread while the program captures a graph.
        self._runtime.ignore_captures()
        while (task := self._tasks.get()) is not None:
            task()
            # The task refers to the group, which a thread that waits for the next task would keep
            # alive.
            del task
            with self._lock:
                if self._closed:
                    return
                self._idle += 1

    def close(self) -> None:
        """End the threads, those at work when they are done; idempotent."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, 0
            for _ in range(idle):
                self._tasks.put(None)
        deadline = time.monotonic() + _CLOSE_S
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
