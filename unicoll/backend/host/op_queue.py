"""The order of a group's operations: a blocking call runs on the caller's thread if no other call
is before it.

Asynchronous calls, and those that wait for others, run on the queue's thread. A thread that waits
for the next one executes it itself if the queue's thread has not begun yet, which saves two
switches of threads. The callbacks of a call run on the thread that has executed it.

A signal's handler may raise an exception on a user's thread after each call of a C function and at
the beginning of each Python function. So no state is set outside of the ``try`` that takes it back.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue
from threading import get_ident

from unicoll.calls.call import Call
from unicoll.calls.work import HostCompletion
from unicoll.errors import DistArgumentError, DistError
from unicoll.process.interrupts import LazyThread
from unicoll.process.timeouts import backoff

Execute = Callable[[Call], None]
"""Executes one call, or raises."""

_POLL_S, _LONGEST_POLL_S = 1e-4, 1e-3
"""Pauses between looks at the queue if a waiting thread has executed the call for which the thread
was woken."""
_POLLED_S = 2e-3
"""How long the thread looks at the queue after the last call that was posted."""
_TICK_S = 0.1
"""How often a thread that waits for its turn checks whether the group has failed, and the
deadline."""
_SLACK_S = 1.0
"""How long a call may take longer than its timeout: it fails on all ranks first."""

log = logging.getLogger("unicoll")


class OpQueue:
    """Numbers calls and executes them one after another, in the order in which they are accepted.

    Each call comes with the function that executes it.

    Args:
        name: of the thread for asynchronous calls, which starts with the first of them.
        on_failure: called on the thread with the exception that ends it; fails the group, and
            returns the error that pending and later calls raise. None: they raise a DistError.
        failure: the error that every later call raises at once; None while the group works.

    Attributes:
        sequence: number of the last call accepted, from 1.
        in_background: True while the queue's thread executes a call; False while a waiting thread
            does.
        lost: the first error that has ended a posted batch, other than a refusal; None if there is
            none.
    """

    def __init__(
        self,
        name: str,
        on_failure: Callable[[BaseException], BaseException] | None = None,
        failure: Callable[[], BaseException | None] = lambda: None,
    ) -> None:
        self.sequence = 0
        self.in_background = False
        self.lost: BaseException | None = None
        self._on_failure = on_failure
        self._failure = failure
        # What calls raise once the thread has died.
        self._dead: BaseException | None = None
        self._lock = threading.Lock()
        # The call that is being executed, or the first of a posted batch.
        self._busy: Call | None = None
        self._queue: deque[tuple[HostCompletion, Execute]] = deque()
        # The posted batch that is being executed.
        self._running: HostCompletion | None = None
        # The thread that executes it, or runs its callbacks.
        self._server = 0
        self._waiters_executing = 0
        self._wake: SimpleQueue[bool] = SimpleQueue()
        # The thread will look at the queue again.
        self._woken = False
        self._posted = 0
        self._thread = LazyThread(name)

    def run(self, execute: Execute, call: Call) -> None:
        """Execute a call after all that were accepted before it; returns when it is done.

        In a callback of the group's own work the call is executed at once, before what is queued
        (see :meth:`_nest`).
        """
        # Most calls are made while no thread executes posted ones or their callbacks. They then
        # need not ask for the thread's identifier, which is a call.
        if self._server and self._server == get_ident():
            self._nest((call,))
            execute(call)
            return
        completion = None
        # A call gets its number and its place with the lock, so both orders agree. It is executed
        # here if no other is being executed or queued. Else it is queued: the thread that ends the
        # present call wakes the queue's thread, for which it looks at the queue after it has
        # cleared _busy.
        try:
            with self._lock:
                if self._dead is not None:
                    raise self._dead
                self.sequence = call.seq = self.sequence + 1
                if self._busy is None and not self._queue:
                    self._busy = call
                else:
                    completion = HostCompletion((call,))
                    self._queue.append((completion, execute))
                    # The call in front may have ended since, and have found an empty queue.
                    if self._busy is None:
                        self._wake_thread()
            if completion is None:
                execute(call)
                return
        finally:
            if self._busy is call:
                # This needs no lock: a thread that queues a call reads _busy afterwards, so one of
                # the two sees the other.
                self._busy = None
                if self._queue:
                    self.resume()
        # The call was queued. This thread waits for it with a limit, whatever becomes of the thread
        # that executes it.
        completion.before_wait = self._await_turn
        completion.wait(None)

    def _await_turn(self, completion: HostCompletion) -> None:
        """Wait for a queued call, at most as :meth:`_limit` says."""
        completion.check_until_done(self._limit(completion), _TICK_S)

    def _wait_here(self, completion: HostCompletion) -> None:
        """Execute a posted batch on the calling thread if it is next, else wait for it."""
        self._execute_here(completion)
        self._await_turn(completion)

    def _limit(self, completion: HostCompletion) -> Callable[[], None]:
        """Called every 0.1 s while a thread waits for a queued call: ends the call if the group has
        failed.

        The group fails, too, once the call, or the one that is being executed, should have ended:
        whatever became of the thread that executes it. Callbacks, which are the user's, may take as
        long as they do.
        """
        call, before, until = completion.calls[0], None, 0.0

        def check() -> None:
            nonlocal before, until
            now, error, running = time.monotonic(), self._failure(), self._running
            # The time begins anew when another call is being executed, and with each look while
            # callbacks run, which may take as long as they do.
            if self._busy is not before or not until or (running is None and self._server):
                before = self._busy
                calls = (
                    running.calls if running is not None else () if before is None else (before,)
                )
                # Each call of the batch may take its own timeout.
                until = now + max(call.timeout, sum(each.timeout for each in calls)) + _SLACK_S
            late = now >= until
            if error is None and late:
                text = f"{(before or call).describe_with_number()} does not end"
                if before is not None and before is not call:
                    text += f", and {call.describe_with_number()} waits for it"
                error = self._fail(TimeoutError(text))
            if error is not None:
                self._drop(completion, error)
                if late and running is completion:
                    self._end(completion, error)

        return check

    def _drop(self, completion: HostCompletion, error: BaseException) -> None:
        """End a call with an error if it is still queued."""
        # Whoever removes the entry from the queue ends the call. A thread that executes it has
        # removed it before.
        with self._lock:
            queued = [entry for entry in self._queue if entry[0] is completion]
            for entry in queued:
                self._queue.remove(entry)
        if queued:
            self._end(completion, error)

    def post(
        self, calls: tuple[Call, ...], execute: Execute, on_thread: bool = False
    ) -> HostCompletion:
        """Execute calls in the background, in order; in a callback of the group's own work as
        :meth:`run` does.

        With ``on_thread`` only the queue's thread executes them.
        """
        completion = HostCompletion(calls)
        if self._server == get_ident():
            self._nest(calls)
            self._end(completion, _attempt(calls, execute))
            return completion
        # The function is set before the batch is queued, because finish() clears it: a completion
        # that has ended must not keep the group alive.
        completion.before_wait = self._await_turn if on_thread else self._wait_here
        with self._lock:
            if self._dead is not None:
                raise self._dead
            for call in calls:
                self.sequence = call.seq = self.sequence + 1
            self._queue.append((completion, execute))
            self._posted += 1
            if self._busy is None:
                self._wake_thread()
        return completion

    def _execute_here(self, completion: HostCompletion) -> None:
        """Execute a posted batch on the calling thread, which waits for it, if it is next and has
        no callbacks.

        If the group fails in it, the batches behind it have ended, too, when the caller gets the
        error.
        """
        mine = False
        try:
            # A batch with callbacks is left to the queue's thread, on which no signal's handler can
            # interrupt them.
            with self._lock:
                if (
                    self._busy is not None
                    or not self._queue
                    or self._queue[0][0] is not completion
                    or completion.has_callbacks
                ):
                    return
                execute = self._queue[0][1]
                # All three are set before the batch leaves the queue: from here on the clauses
                # below end it, if an exception comes before it has been executed.
                self._busy, self._running, mine = completion.calls[0], completion, True
                # This is a count, because the next thread may begin before this one has returned.
                self._waiters_executing += 1
                self._queue.popleft()
            self._execute(completion, execute)
            while (
                self._queue and completion.exception() is not None and self._failure() is not None
            ):
                # The mark _busy is still set, so no other thread executes what is queued.
                with self._lock:
                    if not self._queue:
                        break
                    completion, execute = self._queue[0]
                    self._running = completion
                    self._queue.popleft()
                self._execute(completion, execute)
        except BaseException as e:
            # The exception does not come from a call: it is that of a signal's handler, in the
            # lines between. The batch may be neither queued nor running then, so that only this
            # thread can end it.
            if mine and not completion.done():
                error = self._fail(e)
                self.abandon(error)
                self._end(completion, error)
            if not isinstance(e, Exception):
                raise
        finally:
            if mine:
                self._running = None
                self._server = 0
                self._busy = None
                # The count is lowered last. close(), which waits for that, ends the queue's thread,
                # and that has to be woken before for what is queued.
                try:
                    if self._queue:
                        self.resume()
                finally:
                    with self._lock:
                        self._waiters_executing -= 1

    def _end(self, completion: HostCompletion, error: BaseException | None) -> None:
        """End a batch."""
        if error is not None and self.lost is None and not isinstance(error, DistArgumentError):
            self.lost = error
        completion.finish(error)

    def withdraw(self, call: Call) -> bool:
        """Take back the number of the call that is being executed, of which nothing was sent.

        Returns:
            False if it cannot be taken back: it was posted, or other calls were accepted after it.
        """
        with self._lock:
            # Calls that were accepted later have their numbers already, and a posted call has
            # returned to its caller.
            if self._running is not None or self._queue or call.seq != self.sequence:
                return False
            self.sequence -= 1
        return True

    def abandon(self, error: BaseException) -> None:
        """Finish everything in the background with ``error``, even the call that blocks the thread;
        any thread."""
        with self._lock:
            waiting = [completion for completion, _ in self._queue]
            self._queue.clear()
            if self._running is not None:
                waiting.insert(0, self._running)
        # This runs callbacks, which may make calls that take the lock.
        for completion in waiting:
            self._end(completion, error)

    def close(self, timeout: float) -> bool:
        """End the thread after what was posted; returns True if it has ended within ``timeout``
        seconds.

        A callback of the group's own work does not wait for that.
        """
        if self.in_callback:
            # The thread cannot wait for its own end. It ends when the callback has returned.
            if self._thread.ident == get_ident():
                self._wake.put(False)
            return True
        deadline = time.monotonic() + timeout
        # Threads that execute batches which they wait for leave what is queued behind those to the
        # queue's thread, so that must not end first.
        while self._waiters_executing:
            if time.monotonic() >= deadline:
                return False
            time.sleep(0.001)
        self._wake.put(False)
        return self._thread.join(max(0.0, deadline - time.monotonic()))

    @property
    def in_callback(self) -> bool:
        """True on the thread that runs the callbacks of the group's calls."""
        return self._server == get_ident()

    def idle(self, timeout: float) -> bool:
        """True if no call is being executed or queued, waiting up to ``timeout`` seconds for
        that."""
        deadline = time.monotonic() + timeout
        while (self._busy is not None or self._queue) and time.monotonic() < deadline:
            time.sleep(0.001)
        return self._busy is None and not self._queue

    def _nest(self, calls: tuple[Call, ...]) -> None:
        """Number calls made in a callback, which the thread runs between two operations: next after
        the first of them.

        Their numbers then do not depend on how many calls are queued on this rank, and a callback
        that waits for them does not wait for itself.
        """
        with self._lock:
            queued = [call for completion, _ in self._queue for call in completion.calls]
            number = queued[0].seq if queued else self.sequence + 1
            for call in queued:
                call.seq += len(calls)
            for i, call in enumerate(calls):
                call.seq = number + i
            self.sequence += len(calls)

    def resume(self) -> None:
        """Wake the thread for queued calls, unless a call is being executed; also if that was
        interrupted before."""
        with self._lock:
            if self._queue and self._busy is None:
                self._wake_thread()

    def _wake_thread(self) -> None:
        # The caller holds the lock. The mark is set last: an interrupt before that leads to one
        # wake-up too many, which does no harm.
        self._thread.start(self._work)
        if not self._woken:
            self._wake.put(True)
            self._woken = True

    def _work(self) -> None:
        try:
            self._serve()
        except BaseException as e:
            error = self._fail(e)
            # From here on run() and post() raise, so nothing is queued behind what abandon() ends.
            with self._lock:
                self._dead = error
                self._busy = None
                self._server = 0
            self.abandon(error)

    def _fail(self, cause: BaseException) -> BaseException:
        """Fail the group because of an exception outside the calls; returns what its calls
        raise."""
        name = threading.current_thread().name
        log.error("the thread %r failed to execute an operation", name, exc_info=cause)
        try:
            return self._on_failure(cause) if self._on_failure is not None else _death(name, cause)
        except Exception:
            return _death(name, cause)

    def _serve(self) -> None:
        while self._wake.get():
            if not self._drain():
                self._poll()
            self._woken = False
            # A call that was queued before the line above has woken no thread.
            self._drain()

    def _drain(self) -> bool:
        """Execute what is queued, unless a call is being executed; True if there was something."""
        with self._lock:
            if self._busy is not None or not self._queue:
                return False
            self._busy = self._queue[0][0].calls[0]
        while True:
            with self._lock:
                if not self._queue:
                    self._busy = None
                    return True
                completion, execute = self._queue.popleft()
                self._running, self._busy = completion, completion.calls[0]
            self.in_background = True
            try:
                self._execute(completion, execute)
            finally:
                self.in_background = False
            # The names would keep the arrays alive until the next batch.
            del completion, execute

    def _poll(self) -> None:
        """Look at the queue now and then, until there is something or nothing more is posted.

        The thread was woken for nothing: a waiting thread has executed the call. To be woken for
        each of such calls, and to take the interpreter from the waiting thread, would cost several
        times what a small call does. The pauses grow, because a look takes the interpreter, too,
        where the waiting thread releases it, as in calls of MPI.
        """
        pauses = backoff(_POLL_S, _LONGEST_POLL_S)
        posted, until = self._posted, time.monotonic() + _POLLED_S
        while time.monotonic() < until and self._wake.empty() and not self._drain():
            time.sleep(next(pauses))
            if posted != self._posted:
                posted, until = self._posted, time.monotonic() + _POLLED_S

    def _execute(self, completion: HostCompletion, execute: Execute) -> None:
        """Execute a posted batch that the calling thread has taken, and run its callbacks."""
        self._server = get_ident()
        completion.begin()
        error = _attempt(completion.calls, execute)
        # From here on callbacks run, in _end(): _limit() sets no limit to them, and a group that
        # fails no longer ends this batch.
        self._running = None
        self._end(completion, error)
        self._server = 0


def _attempt(calls: tuple[Call, ...], execute: Execute) -> BaseException | None:
    try:
        for call in calls:
            execute(call)
    # A KeyboardInterrupt is the error of its batch, too. The thread that waits for the batch raises
    # it.
    except BaseException as e:
        return e
    return None


def _death(name: str, cause: BaseException) -> DistError:
    return DistError(f"the thread {name!r} failed: {type(cause).__name__}: {cause}")
