"""Handles of operations in flight: ``Completion`` is a backend's, ``Work`` is what users hold."""

from __future__ import annotations

import logging
import sys
import threading
import time
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Sequence
from threading import get_ident
from typing import TYPE_CHECKING, Any

from unicoll.calls import flight_recorder
from unicoll.calls.error_marks import mark_delivered
from unicoll.calls.thread_activity import NotBlocked, entered, entries
from unicoll.errors import (
    BackendUnavailableError,
    DistArgumentError,
    DistError,
    OperationTimeoutError,
)
from unicoll.process.timeouts import Timeout, to_seconds

if TYPE_CHECKING:
    from unicoll.calls.call import Call
    from unicoll.calls.callback_thread import CallbackThread
    from unicoll.calls.flight_recorder import PendingEntry


class Completion(ABC):
    """The state of a posted batch of calls, as the backend keeps it."""

    @abstractmethod
    def done(self) -> bool:
        """True if the batch has ended, with or without an error; never blocks."""

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
        """The batch's error, or None while it runs or after success."""

    @abstractmethod
    def add_done_callback(self, fn: Callable[[], None]) -> None:
        """Call ``fn`` once when the batch has ended; at once if it has."""

    orders_streams: bool = False
    """True if :meth:`wait` makes the current stream wait and returns, in place of the host."""

    @property
    def recorded(self) -> bool:
        """True if the batch was recorded into a graph, with which it runs any number of times."""
        return False

    def track(self, entries: Sequence[PendingEntry]) -> None:
        """Mark the calls in the flight recorder as ended once the batch has ended."""
        self.add_done_callback(lambda: flight_recorder.end(entries, self.exception()))

    def took(self) -> float:
        """Seconds from the batch's start to its end, for a timed batch that has ended without an
        error."""
        raise BackendUnavailableError("duration: this backend does not time its operations")


class HostCompletion(Completion):
    """A completion that a host thread finishes.

    Attributes:
        calls: the batch.
        before_wait: called with this object by a thread before it waits without a timeout; it may
            execute the batch, or wait itself.
        callback_thread: runs the callbacks if the program's thread may end the batch; else the
            thread that does.
        begun: start time on the clock of ``time.perf_counter`` if the batch is timed, else 0.
    """

    # These are the state of a new completion, which most completions change once.
    _done = False
    _error: BaseException | None = None
    _took = 0.0
    _entries: Sequence[PendingEntry] = ()
    _started = 0.0
    before_wait: Callable[[HostCompletion], None] | None = None
    callback_thread: CallbackThread | None = None
    begun = 0.0

    def __init__(self, calls: tuple[Call, ...]) -> None:
        self.calls = calls
        # The lock is held until the batch is done: a bare lock wakes a waiter faster than an Event.
        self._done_lock = threading.Lock()
        self._done_lock.acquire()
        self._callbacks: list[Callable[[], None]] = []
        if calls[0].timed:
            self.begun = time.perf_counter()

    def begin(self) -> None:
        """Restart the clock: a queued batch starts only now."""
        self._started = time.monotonic()
        flight_recorder.start(self._entries, self._started)
        if self.begun:
            self.begun = time.perf_counter()

    def track(self, entries: Sequence[PendingEntry]) -> None:
        self._entries = (*self._entries, *entries) if self._entries else entries
        if self._started:
            flight_recorder.start(entries, self._started)
        # If the batch ends from here on, finish() sees the entries. If both find them, only the
        # first end of an entry counts.
        if self._done:
            flight_recorder.end(entries, self._error)

    def took(self) -> float:
        return self._took

    def finish(self, error: BaseException | None = None) -> None:
        """Mark the batch ended and wake all waiters; only the first call counts."""
        now = time.perf_counter() if self.begun else 0.0
        # From here to the mark there is no call, in which another thread could run: several may
        # finish the batch at once, and only the first counts.
        if self._done:
            return
        self._took = now - self.begun
        self._error = error
        self._done = True
        try:
            # The function keeps the group alive.
            self.before_wait = None
            flight_recorder.end(self._entries, error)
        finally:
            try:
                self._done_lock.release()
            except RuntimeError:
                # A waiter that was interrupted has released it before (see _acquire).
                pass
            finally:
                # An exception of a signal's handler, raised behind one of the calls above, does not
                # lose the callbacks.
                if self._callbacks:
                    if self.callback_thread is not None:
                        self.callback_thread.ended.put(self)
                    else:
                        self.run_callbacks()

    def run_callbacks(self) -> None:
        """Call the callbacks that no thread has called."""
        with entered(NotBlocked()):
            while self._callbacks:
                try:
                    # Whoever removes a callback from the list calls it, so each is called once.
                    callback = self._callbacks[-1]
                    self._callbacks.remove(callback)
                except (IndexError, ValueError):
                    # Another thread has taken it.
                    continue
                try:
                    callback()
                except BaseException:
                    # A signal's handler has raised it: the other callbacks are called all the same.
                    self.run_callbacks()
                    raise

    def done(self) -> bool:
        return self._done

    def wait(self, timeout: float | None) -> None:
        if timeout is not None:
            self._wait_until(timeout)
        elif not self._done:
            entry = (get_ident(), self)
            try:
                entries.append(entry)
                # The function is read once, because finish() may clear it at any time.
                if (before_wait := self.before_wait) is not None:
                    before_wait(self)
                if not self._done:
                    self._acquire(-1)
            finally:
                entries.remove(entry)
        if self._error is not None:
            raise self._error

    def check_until_done(self, check: Callable[[], None], seconds: float) -> None:
        """Wait until the batch has ended, with or without an error, and call a function every
        ``seconds``."""
        while not self._done and not self._acquire(seconds):
            check()

    def _acquire(self, seconds: float) -> bool:
        """Wait until the batch has ended, for ``seconds`` at most unless negative; True if it
        has."""
        acquired = None
        try:
            acquired = self._done_lock.acquire(timeout=seconds)
            return acquired
        finally:
            # Each waiter releases the lock for the next one. A signal's handler may have raised
            # after the lock was acquired. If it was not, this releases it once too often, so that
            # two waiting threads go on at once.
            if acquired is not False and self._done:
                try:
                    self._done_lock.release()
                except RuntimeError:
                    pass

    def _wait_until(self, timeout: float) -> None:
        if not self._done and not self._acquire(max(0.0, timeout)):
            call = self.calls[0]
            raise OperationTimeoutError(
                f"{call.describe_with_number()} was not done after waiting {timeout:g} s;"
                " the operation is still running",
                op=call.op.name,
                seq=call.seq,
            )

    def exception(self) -> BaseException | None:
        return self._error

    @property
    def has_callbacks(self) -> bool:
        """True if callbacks are attached that have not run."""
        return bool(self._callbacks)

    def add_done_callback(self, fn: Callable[[], None]) -> None:
        if self.callback_thread is not None and not self._done:
            fn = self.callback_thread.attach(fn)
        # The order is opposite to that of finish(), which sets the mark before it looks for
        # callbacks. So one of the two threads sees what the other has done; the one that removes
        # the callback calls it.
        self._callbacks.append(fn)
        if self._done and self._callbacks:
            try:
                self._callbacks.remove(fn)
            except ValueError:
                # The thread in finish() has taken it.
                return
            with entered(NotBlocked()):
                fn()


_future_lock = threading.Lock()


def _call_logged(fn: Callable[[], None]) -> None:
    """Call what the user gave; its exception must not end the thread that ends operations."""
    try:
        fn()
    except Exception:
        logging.getLogger("unicoll").exception("a callback of a Work failed")


class Work:
    """Handle of an asynchronous operation, with the methods of torch.distributed's ``Work``.

    The arrays of the operation are kept alive by it. They must not be written (inputs) or read
    (outputs) before :meth:`wait` has returned.
    """

    __slots__ = ("_calls", "_completion", "_future", "_waited")

    def __init__(self, completion: Completion, calls: tuple[Call, ...]) -> None:
        self._completion = completion
        self._calls = calls
        self._future: Any = None
        self._waited = False

    @property
    def completion(self) -> Completion:
        """The backend's handle of the operation, which does not keep the arrays alive once it has
        been waited for."""
        return self._completion

    @property
    def orders_streams(self) -> bool:
        """True if :meth:`wait` makes the current CUDA stream wait, and does not block the host."""
        return self._completion.orders_streams

    def wait(self, timeout: Timeout = None) -> bool:
        """Order the caller after the operation; returns True.

        CPU arrays: blocks until the operation is done. CUDA arrays: makes the current stream wait
        and returns. An operation on CPU arrays that has not begun may be executed by the calling
        thread, if ``timeout`` is None. An exception that a signal's handler raises, for example
        KeyboardInterrupt, then ends it, as in a blocking call.

        Args:
            timeout: how long to block at most (timedelta or seconds); None waits for the
                operation's own deadline.

        Raises:
            OperationTimeoutError: not done in time; the operation itself is still running.
            DistError: the operation's error.
        """
        self._waited = True
        try:
            if timeout is None:
                self._completion.wait(None)
            else:
                with entered(NotBlocked()):
                    self._completion.wait(to_seconds(timeout) or None)
        except BaseException as e:
            mark_delivered(e)
            raise
        return True

    def synchronize(self, timeout: Timeout = None) -> None:
        """Block the host until the operation is done on the device too; raises as :meth:`wait`."""
        self._waited = True
        try:
            self._completion.synchronize(to_seconds(timeout) or None)
        except BaseException as e:
            mark_delivered(e)
            raise

    def is_completed(self) -> bool:
        """True if the operation has ended, with or without an error; never blocks."""
        return self._completion.done()

    def is_success(self) -> bool:
        """True if the operation has ended without an error."""
        return self._completion.done() and self.exception() is None

    def exception(self) -> BaseException | None:
        """The operation's error, or None while it runs and after success."""
        error = self._completion.exception()
        mark_delivered(error)
        return error

    def source_rank(self) -> int:
        """For a receive: the sender's rank in the group."""
        return self._calls[0].source

    _source_rank = source_rank

    def duration(self) -> float:
        """Seconds that the operation took, once it is done (blocks the host until then).

        For CUDA arrays over NCCL it is device time, from when the stream reaches the operation to
        its end; the wait for the other ranks is part of it. Otherwise it is host time from the
        start of the operation, which for messages is when they are posted. The operations of a
        batch have one duration.

        Raises:
            DistArgumentError: the operation was not timed (``timing=True`` in ``pg_options`` or
                :meth:`ProcessGroup.using`, or ``UNICOLL_TIMING=1``), or the operation was recorded
                into a graph.
            DistError: the operation's error.
        """
        call = self._calls[0]
        if not call.timed:
            raise DistArgumentError(
                f"duration: {call.describe()} was not timed: make the call through"
                " group.using(timing=True), or give timing=True in pg_options, or set"
                " UNICOLL_TIMING=1",
                op=call.op.name,
            )
        if self._completion.recorded:
            raise DistArgumentError(
                f"duration: {call.describe()} was recorded into a graph", op=call.op.name
            )
        self.synchronize()
        return self._completion.took()

    def result(self) -> list[Any]:
        """The output arrays, once the operation is done (waits for it)."""
        self.wait()
        return self._outputs()

    def _outputs(self) -> list[Any]:
        return [b.owner for call in self._calls for b in call.outputs or call.inputs]

    def get_future(self) -> Any:
        """A future of the output arrays; the same one at every call.

        For torch tensors it is a ``torch.futures.Future``, as DDP's communication hooks and
        ``torch.futures.collect_all`` need. It raises RuntimeError with the text of the operation's
        error, which :meth:`exception` has. That of CUDA tensors over NCCL is complete at once, and
        its ``wait`` makes the current stream wait (torch.distributed's rule). For other arrays, and
        for a barrier, it is a ``concurrent.futures.Future``, which has ``then``, ``value`` and
        ``wait`` of torch's futures, too. Both are complete when the operation has ended.
        """
        if self._future is None:
            # concurrent.futures is slow to import.
            from unicoll.calls.futures import work_future

            future = work_future(self, self._outputs())
            # Another thread may have made one as well: all callers get the first.
            with _future_lock:
                self._future = self._future or future
        return self._future

    def get_future_result(self) -> Any:
        """A future, as :meth:`get_future`, of how the operation ended, with the numbers of torch's
        ``WorkResult``.

        They are 0 for success, 1 for OperationTimeoutError, 2 for another error of the library, 100
        for any other one. The future is complete when the operation has ended, on the device, too.
        """
        from unicoll.calls.futures import work_future

        return work_future(self, self._outputs(), self._result_number)

    def _result_number(self) -> int:
        kinds = ((type(None), 0), (OperationTimeoutError, 1), (DistError, 2), (BaseException, 100))
        error = self.exception()
        return next(number for kind, number in kinds if isinstance(error, kind))

    def block_current_stream(self) -> None:
        """:meth:`wait`: for CUDA arrays the current stream waits, for CPU arrays the host does."""
        self.wait()

    def add_done_callback(self, fn: Callable[[], None]) -> None:
        """Call ``fn()`` once when the operation has ended, on a thread of the library; at once if
        it has ended.

        Operations of the same group that ``fn`` starts come before those that are queued behind
        this one. An exception of ``fn`` is logged.
        """
        self._waited = True
        self._completion.add_done_callback(lambda: _call_logged(fn))

    def __await__(self) -> Generator[Any, None, list[Any]]:
        """``await work`` in asyncio: the output arrays; the event loop is not blocked."""
        import asyncio

        from unicoll.calls.futures import python_future

        return asyncio.wrap_future(python_future(self, self._outputs())).__await__()

    def __repr__(self) -> str:
        failed = self._completion.exception() is not None
        state = "failed" if failed else "done" if self.is_completed() else "running"
        return f"<Work {', '.join(c.describe() for c in self._calls)}: {state}>"

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        # done() may take a lock, which a daemon thread that no longer runs may hold.
        if is_finalizing():
            return
        try:
            dropped = (
                not self._waited
                and self._completion.exception() is None
                and not self._completion.done()
            )
        except AttributeError:
            # An exception of a signal's handler has ended the creation of this object.
            return
        if dropped:
            warnings.warn(
                f"a Work was dropped without wait(): {self._calls[0].describe()}",
                ResourceWarning,
                stacklevel=2,
            )
