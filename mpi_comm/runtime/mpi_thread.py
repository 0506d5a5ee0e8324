"""The thread that makes all MPI calls, if the thread level is below MPI_THREAD_MULTIPLE."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any

from unicoll.errors import DistError
from unicoll.process import logs

log = logs.logger("mpi")

_SPINS = 200
_SHORTEST_S, _LONGEST_S = 2e-5, 1e-3
_TICK_S = 0.1


class _Task:
    """A function to call on the MPI thread; with ``is_request`` it starts an MPI request, tested
    until it is done."""

    __slots__ = ("args", "done", "error", "fn", "is_request", "request", "value")

    def __init__(self, fn: Callable[..., Any], args: tuple[Any, ...], is_request: bool) -> None:
        self.fn = fn
        self.args = args
        self.is_request = is_request
        self.request: Any = None
        self.value: Any = None
        self.error: BaseException | None = None
        # Held until done. Unlike an event, a lock adds no frames of other modules to the stack of a
        # waiting thread, which the search for blocked calls would take for a running one.
        self.done = threading.Lock()
        self.done.acquire()


class MPIThread:
    """Calls functions on one thread, in order, and tests the MPI requests that they start.

    Args:
        on_failure: called with the cause on the thread when it fails, before its tasks end.
    """

    def __init__(self, on_failure: Callable[[BaseException], None]) -> None:
        self._on_failure = on_failure
        self._tasks: SimpleQueue[_Task | None] = SimpleQueue()
        self._requests: list[_Task] = []
        self._failure: str | None = None
        self._thread = threading.Thread(target=self._run, name="unicoll-mpi", daemon=True)
        self._thread.start()

    def call(self, fn: Callable[..., Any], *args: Any) -> Any:
        """``fn(*args)`` on the MPI thread; ``fn`` must not block."""
        # A task that calls this function again would wait for itself.
        if threading.current_thread() is self._thread:
            return fn(*args)
        task = _Task(fn, args, False)
        self._submit(task)
        task.done.acquire()
        if task.error is not None:
            raise task.error
        return task.value

    def complete(
        self, start: Callable[..., Any], args: tuple[Any, ...], tick: Callable[[], None]
    ) -> None:
        """Wait until the request of ``start(*args)`` is done; ``tick`` is called ten times a second
        and may raise."""
        task = _Task(start, args, True)
        self._submit(task)
        # If tick() raises, the task stays in _requests: the thread goes on testing the request, and
        # keeps the arrays alive that MPI may use.
        while not task.done.acquire(timeout=_TICK_S):
            tick()
        if task.error is not None:
            if self.failed:
                # The thread has failed the group, whose error all ranks raise: tick() raises it.
                tick()
            raise task.error

    @property
    def failed(self) -> bool:
        """True if the thread has failed: MPI cannot be called any more."""
        return self._failure is not None

    def close(self) -> None:
        """End the thread."""
        self._tasks.put(None)
        self._thread.join(2.0)

    def _submit(self, task: _Task) -> None:
        # The task is in the queue before _failure is read, and _failure is set before the queue is
        # emptied. So one of the two threads ends the task.
        self._tasks.put(task)
        if self._failure is not None:
            self._fail_all(self._failure)

    def _run(self) -> None:
        try:
            self._serve()
        except BaseException as e:
            log.exception("the thread that calls MPI failed")
            # The groups fail first: a thread whose task ends with an error looks for the error of
            # its group. The tasks end also if that raises.
            try:
                self._on_failure(e)
            finally:
                self._failure = f"the thread that calls MPI failed: {type(e).__name__}: {e}"
                self._fail_all(self._failure)

    def _fail_all(self, reason: str) -> None:
        """The thread has failed: end all its tasks with an error."""
        # Several threads may be here at once, and may have the same tasks.
        tasks, self._requests = self._requests, []
        with suppress(Empty):
            while True:
                task = self._tasks.get_nowait()
                if task is not None:
                    tasks.append(task)
        for task in tasks:
            task.error = DistError(reason)
            # Another thread has ended it, so that the lock is not held.
            with suppress(RuntimeError):
                task.done.release()

    def _serve(self) -> None:
        idle = 0
        while True:
            try:
                task = self._tasks.get(timeout=self._poll_timeout(idle))
            except Empty:
                idle = 0 if self._test_requests() else idle + 1
                continue
            if task is None:
                return
            idle = 0
            self._start_task(task)
            # The name would keep the arrays of the last task alive while the thread waits for the
            # next one.
            del task

    def _poll_timeout(self, idle: int) -> float | None:
        if not self._requests:
            return None
        return 0.0 if idle < _SPINS else min(_SHORTEST_S * (1 + (idle - _SPINS) / 8), _LONGEST_S)

    def _start_task(self, task: _Task) -> None:
        try:
            result = task.fn(*task.args)
        except BaseException as e:
            # The error belongs to the thread that waits. This thread goes on: all groups need it.
            task.error = e
            task.done.release()
            return
        if task.is_request:
            task.request = result
            self._requests.append(task)
        else:
            task.value = result
            task.done.release()

    def _test_requests(self) -> bool:
        """Test all requests; returns True if any is done."""
        ended = []
        for task in self._requests:
            try:
                if task.request.Test():
                    ended.append(task)
            except BaseException as e:
                task.error = e
                ended.append(task)
        for task in ended:
            self._requests.remove(task)
            task.done.release()
        return bool(ended)
