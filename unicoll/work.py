"""Handles of operations in flight: ``Completion`` is a backend's, ``Work`` is what users hold."""

from __future__ import annotations

import threading
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from .errors import OperationTimeoutError
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


class HostCompletion(Completion):
    """A completion that a host thread finishes."""

    __slots__ = ("_callbacks", "_done", "_error", "_gate", "calls")

    def __init__(self, calls: tuple[Call, ...]) -> None:
        self.calls = calls
        self._gate = threading.Lock()  # held until done: a bare lock wakes a waiter faster than an Event
        self._gate.acquire()
        self._done = False
        self._error: BaseException | None = None
        self._callbacks: list[Callable[[], None]] = []

    def finish(self, error: BaseException | None = None) -> None:
        """Mark the batch ended and wake everyone; only the first call counts."""
        if self._done:
            return
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
