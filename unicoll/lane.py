"""The order of a group's operations: blocking ones run on the caller's thread when nothing is before them.

The thread for the others runs the callbacks of what it has done, too.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue

from .call import Call
from .work import HostCompletion

__all__ = ["Lane"]


class Lane:
    """Runs calls one after another, in the order in which they are accepted, and numbers them.

    Args:
        name: of the thread for asynchronous calls, which starts with the first of them.
        execute: does one call, or raises.
    """

    def __init__(self, name: str, execute: Callable[[Call], None]) -> None:
        self.sequence = 0
        self.in_background = False  # whether the call being executed is on the thread
        self._name = name
        self._execute = execute
        self._lock = threading.Lock()
        self._busy = False  # somebody is executing, or the thread has been told to
        self._queue: deque[HostCompletion] = deque()
        self._running: HostCompletion | None = None  # what the thread executes
        self._go: SimpleQueue[bool] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def run(self, call: Call) -> None:
        """Do a call after all that were accepted before it; returns when it is done.

        In a callback of the group's own work the call is done at once, before what is queued (see :meth:`_nest`).
        """
        if self._thread is not None and threading.current_thread() is self._thread:
            self._nest((call,))
            self._do(call)
            return
        with self._lock:
            self.sequence = call.seq = self.sequence + 1
            if self._busy:
                completion = HostCompletion((call,))
                self._queue.append(completion)
            else:
                self._busy = True
                completion = None
        if completion is not None:
            completion.wait(None)
            return
        try:
            if call.carry is None:
                self._execute(call)
            else:
                call.carry(self._execute)
        finally:
            # without the lock: whoever queues looks at _busy afterwards, so one of us two sees the other
            self._busy = False
            if self._queue:
                self._resume()

    def post(self, calls: tuple[Call, ...]) -> HostCompletion:
        """Do the calls in the background, in order; in a callback of the group's own work as :meth:`run` does."""
        completion = HostCompletion(calls)
        if threading.current_thread() is self._thread:
            self._nest(calls)
            completion.finish(self._attempt(calls))
            return completion
        with self._lock:
            for call in calls:
                self.sequence = call.seq = self.sequence + 1
            self._queue.append(completion)
            if not self._busy:
                self._busy = True
                self._start()
        return completion

    def withdraw(self, call: Call) -> bool:
        """Take back the number of a call that is being executed, of which nothing was sent: as if it had not been made.

        Returns:
            False where that cannot be: it is in the background, or others have been accepted after it.
        """
        with self._lock:
            if self.in_background or self._queue or call.seq != self.sequence:
                return False
            self.sequence -= 1
        return True

    def abandon(self, error: BaseException) -> None:
        """End whatever is in the background with ``error``, though the thread is stuck in it; any thread."""
        with self._lock:
            waiting = [*self._queue]
            self._queue.clear()
            if self._running is not None:
                waiting.insert(0, self._running)
        for completion in waiting:
            completion.finish(error)

    def close(self, timeout: float) -> bool:
        """End the thread after what was posted; returns whether it has ended in ``timeout`` seconds."""
        thread = self._thread
        if thread is None or thread is threading.current_thread():
            return True
        self._go.put(False)
        thread.join(timeout)
        return not thread.is_alive()

    def idle(self, timeout: float) -> bool:
        """Whether nothing is being executed, waiting ``timeout`` seconds for it."""
        deadline = time.monotonic() + timeout
        while self._busy and time.monotonic() < deadline:
            time.sleep(0.001)
        return not self._busy

    def _nest(self, calls: tuple[Call, ...]) -> None:
        """Number calls of a callback, which the thread runs between two operations: right after the first of them.

        So their place does not depend on how much happens to be queued on this rank, and whoever waits for them in the
        callback does not wait for itself.
        """
        with self._lock:
            queued = [call for completion in self._queue for call in completion.calls]
            number = queued[0].seq if queued else self.sequence + 1
            for call in queued:
                call.seq += len(calls)
            for i, call in enumerate(calls):
                call.seq = number + i
            self.sequence += len(calls)

    def _do(self, call: Call) -> None:
        if call.carry is None:
            self._execute(call)
        else:
            call.carry(self._execute)

    def _attempt(self, calls: tuple[Call, ...]) -> BaseException | None:
        try:
            for call in calls:
                self._do(call)
        except BaseException as e:
            return e
        return None

    def _resume(self) -> None:
        """Let the thread do what is queued, unless somebody is at it."""
        with self._lock:
            if self._queue and not self._busy:
                self._busy = True
                self._start()

    def _start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name=self._name, daemon=True)
            self._thread.start()
        self._go.put(True)

    def _work(self) -> None:
        while self._go.get():
            while True:
                with self._lock:
                    if not self._queue:
                        self._busy = False
                        break
                    completion = self._running = self._queue.popleft()
                completion.begin()
                self.in_background = True
                error = self._attempt(completion.calls)
                self.in_background = False
                self._running = None
                completion.finish(error)
                del completion  # the arrays are the user's again
