"""Handles of operations in flight: ``Completion`` is a backend's, ``Work`` is what users hold."""

from __future__ import annotations

import threading
import time
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from .errors import BackendUnavailableError, DistArgumentError, OperationTimeoutError
from .types import to_seconds

if TYPE_CHECKING:
    from .call import Call
    from .futures import Future

__all__ = ["Completion", "HostCompletion", "Work"]


class Completion(ABC):
    """The state of a posted batch of calls, as the backend keeps it."""

    @abstractmethod
    def done(self) -> bool:
        """Whether the batch has ended, well or badly; never blocks."""

    @abstractmethod
    def wait(self, timeout: float | None) -> None:
        """Order the caller after the batch: block (CPU), or make the current stream wait (CUDA).

        Raises:
            the batch's error, or OperationTimeoutError after ``timeout`` seconds.
        """

    def synchronize(self, timeout: float | None = None) -> None:
        """Block the host until the batch has ended; raises as :meth:`wait` does."""
        self.wait(timeout)

    @abstractmethod
    def exception(self) -> BaseException | None:
        """The batch's error, once it has ended badly."""

    @abstractmethod
    def add_done_callback(self, fn: Callable[[], None]) -> None:
        """Call ``fn`` once when the batch has ended; at once if it has."""

    @property
    def recorded(self) -> bool:
        """Whether the batch was recorded into a graph, with which it runs any number of times."""
        return False

    def took(self) -> float:
        """Seconds from the batch's begin to its end; it was asked for, and the batch has ended well."""
        raise BackendUnavailableError("duration: this backend does not time its operations")


class HostCompletion(Completion):
    """A completion that a host thread finishes.

    Attributes:
        calls: the batch.
        begun: when it began, on the clock of ``time.perf_counter``, if its duration was asked for; else 0.
    """

    __slots__ = ("_callbacks", "_done", "_error", "_gate", "_took", "begun", "calls")

    def __init__(self, calls: tuple[Call, ...]) -> None:
        self.calls = calls
        self._gate = threading.Lock()  # held until done: a bare lock wakes a waiter faster than an Event
        self._gate.acquire()
        self._done = False
        self._error: BaseException | None = None
        self._callbacks: list[Callable[[], None]] = []
        self._took = 0.0
        self.begun = time.perf_counter() if calls[0].timed else 0.0

    def begin(self) -> None:
        """What was queued begins only now."""
        if self.begun:
            self.begun = time.perf_counter()

    def took(self) -> float:
        return self._took

    def finish(self, error: BaseException | None = None) -> None:
        """Mark the batch ended and wake everyone; only the first call counts."""
        if self._done:
            return
        if self.begun:
            self._took = time.perf_counter() - self.begun
        self._error = error
        self._done = True
        self._gate.release()
        while self._callbacks:
            try:
                callback = self._callbacks.pop()
            except IndexError:  # another thread took the last one
                break
            callback()

    def done(self) -> bool:
        return self._done

    def wait(self, timeout: float | None) -> None:
        if not self._done:
            if not self._gate.acquire(timeout=-1 if timeout is None else max(0.0, timeout)):
                call = self.calls[0]
                raise OperationTimeoutError(
                    f"{call.describe()} #{call.seq} was not done after waiting {timeout:g} s; it goes on",
                    op=call.op.name,
                    seq=call.seq,
                )
            self._gate.release()
        if self._error is not None:
            raise self._error

    def exception(self) -> BaseException | None:
        return self._error

    def add_done_callback(self, fn: Callable[[], None]) -> None:
        self._callbacks.append(fn)
        if self._done and self._callbacks:
            try:
                self._callbacks.remove(fn)
            except ValueError:  # finish() has run it
                return
            fn()


_making_a_future = threading.Lock()


class Work:
    """Handle of an asynchronous operation, with the methods of torch.distributed's ``Work``.

    The arrays of the operation are kept alive by it. They must not be written (inputs) or read (outputs) before
    :meth:`wait` has returned.
    """

    __slots__ = ("_calls", "_completion", "_future", "_waited")

    def __init__(self, completion: Completion, calls: tuple[Call, ...]) -> None:
        self._completion = completion
        self._calls = calls
        self._future: Future[list[Any]] | None = None
        self._waited = False

    @property
    def completion(self) -> Completion:
        """The backend's handle of the operation, which does not keep the arrays alive once it has been waited for."""
        return self._completion

    def wait(self, timeout: timedelta | float | None = None) -> bool:
        """Order the caller after the operation; returns True.

        CPU arrays: blocks until the operation is done. CUDA arrays: makes the current stream wait and returns.

        Args:
            timeout: how long to block at most (timedelta or seconds); None waits for the operation's own deadline.

        Raises:
            OperationTimeoutError: not done in time; the operation itself goes on.
            DistError: whatever went wrong with the operation.
        """
        self._waited = True
        self._completion.wait(to_seconds(timeout) or None)
        return True

    def synchronize(self, timeout: timedelta | float | None = None) -> None:
        """Block the host until the operation is done on the device too; raises as :meth:`wait`."""
        self._waited = True
        self._completion.synchronize(to_seconds(timeout) or None)

    def is_completed(self) -> bool:
        """Whether the operation has ended, well or badly; never blocks."""
        return self._completion.done()

    def is_success(self) -> bool:
        """Whether the operation has ended well."""
        return self._completion.done() and self._completion.exception() is None

    def exception(self) -> BaseException | None:
        """The operation's error, or None while it runs or when it has ended well."""
        return self._completion.exception()

    def source_rank(self) -> int:
        """For a receive: rank in the group that the message came from."""
        return self._calls[0].source

    _source_rank = source_rank

    def duration(self) -> float:
        """Seconds that the operation took, once it is done (blocks the host until then).

        Of CUDA arrays over NCCL the device's time: from when the stream reaches it, which it may spend waiting for the
        other ranks, to its end. Else the host's: from when it begins, which for messages is when they are posted. The
        operations of a batch have one duration.

        Raises:
            DistArgumentError: it was not asked for before (``timing=True`` in ``pg_options`` or
                :meth:`ProcessGroup.using`, or ``UNICOLL_TIMING=1``), or the operation was recorded into a graph.
            DistError: whatever went wrong with the operation.
        """
        call = self._calls[0]
        if not call.timed:
            raise DistArgumentError(
                f"duration: {call.describe()} was not timed: make the call through group.using(timing=True), or give"
                " timing=True in pg_options, or set UNICOLL_TIMING=1",
                op=call.op.name,
            )
        if self._completion.recorded:
            raise DistArgumentError(f"duration: {call.describe()} was recorded into a graph", op=call.op.name)
        self.synchronize()
        return self._completion.took()

    def result(self) -> list[Any]:
        """The output arrays, once the operation is done (waits for it)."""
        self.wait()
        return self._outputs()

    def _outputs(self) -> list[Any]:
        return [b.owner for call in self._calls for b in (call.outputs or call.inputs)]

    def get_future(self) -> Future[list[Any]]:
        """A ``concurrent.futures.Future`` of the output arrays; the same one at every call.

        It has ``then``, ``value`` and ``wait`` as torch's futures do.
        """
        if self._future is None:
            from .futures import Future  # here, since few ask for it and its parent imports much

            self._waited = True
            with _making_a_future:
                if self._future is None:
                    future: Future[list[Any]] = Future()
                    future.set_running_or_notify_cancel()
                    self._completion.add_done_callback(lambda: self._resolve(future))
                    self._future = future
        return self._future

    def add_done_callback(self, fn: Callable[[], None]) -> None:
        """Call ``fn()`` once when the operation has ended, well or badly, on the thread that ends it, or now if it has.

        Operations of the same group that ``fn`` starts come before those that are queued behind this one.
        """
        self._waited = True
        self._completion.add_done_callback(fn)

    def _resolve(self, future: Future[list[Any]]) -> None:
        error = self._completion.exception()
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(self._outputs())

    def __await__(self) -> Generator[Any, None, list[Any]]:
        """``await work`` in asyncio: the output arrays; the event loop runs on meanwhile."""
        import asyncio

        return asyncio.wrap_future(self.get_future()).__await__()

    def __repr__(self) -> str:
        state = "done" if self.is_success() else "failed" if self.is_completed() else "running"
        return f"<Work {', '.join(c.describe() for c in self._calls)}: {state}>"

    def __del__(self) -> None:
        if not self._waited and self._completion.exception() is None and not self._completion.done():
            warnings.warn(
                f"a Work was dropped without wait(): {self._calls[0].describe()}",
                ResourceWarning,
                stacklevel=2,
            )
