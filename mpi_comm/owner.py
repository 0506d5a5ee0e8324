"""The thread that makes all calls of MPI, where the library lets only one at a time."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Any

__all__ = ["Owner"]

_SPINS = 200
_SHORTEST_S, _LONGEST_S = 2e-5, 1e-3
_TICK_S = 0.1


class _Task:
    """Something to be called on the owner's thread, or a request that it follows to its end."""

    __slots__ = ("args", "done", "error", "fn", "follow", "request", "value")

    def __init__(self, fn: Callable[..., Any], args: tuple[Any, ...], follow: bool) -> None:
        self.fn = fn
        self.args = args
        self.follow = follow
        self.request: Any = None
        self.value: Any = None
        self.error: BaseException | None = None
        self.done = threading.Event()


class Owner:
    """Calls functions on a thread of its own, one after another, and drives the requests they start."""

    def __init__(self) -> None:
        self._tasks: SimpleQueue[_Task | None] = SimpleQueue()
        self._followed: list[_Task] = []
        self._thread = threading.Thread(target=self._work, name="unicoll-mpi", daemon=True)
        self._thread.start()

    def call(self, fn: Callable[..., Any], *args: Any) -> Any:
        """``fn(*args)`` on the owner's thread; it must not block."""
        if threading.current_thread() is self._thread:
            return fn(*args)
        task = _Task(fn, args, False)
        self._tasks.put(task)
        task.done.wait()
        if task.error is not None:
            raise task.error
        return task.value

    def complete(self, start: Callable[..., Any], args: tuple[Any, ...], look: Callable[[], None]) -> None:
        """Start a request and wait until it is done; ``look`` is called ten times a second and may raise."""
        task = _Task(start, args, True)
        self._tasks.put(task)
        while not task.done.wait(_TICK_S):
            look()
        if task.error is not None:
            raise task.error

    def close(self) -> None:
        """End the thread."""
        self._tasks.put(None)
        self._thread.join(2.0)

    def _work(self) -> None:
        idle = 0
        while True:
            try:
                task = self._tasks.get(timeout=self._nap(idle))
            except Empty:
                idle = 0 if self._drive() else idle + 1
                continue
            if task is None:
                return
            idle = 0
            self._begin(task)

    def _nap(self, idle: int) -> float | None:
        if not self._followed:
            return None
        return 0.0 if idle < _SPINS else min(_SHORTEST_S * (1 + (idle - _SPINS) / 8), _LONGEST_S)

    def _begin(self, task: _Task) -> None:
        try:
            result = task.fn(*task.args)
        except BaseException as e:
            task.error = e
            task.done.set()
            return
        if task.follow:
            task.request = result
            self._followed.append(task)
        else:
            task.value = result
            task.done.set()

    def _drive(self) -> bool:
        """Test all requests; whether one of them is done."""
        ended = []
        for task in self._followed:
            try:
                if task.request.Test():
                    ended.append(task)
            except BaseException as e:
                task.error = e
                ended.append(task)
        for task in ended:
            self._followed.remove(task)
            task.done.set()
        return bool(ended)
