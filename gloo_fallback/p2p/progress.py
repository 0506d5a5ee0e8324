"""Progress of a group's messages: run by a waiting thread, otherwise by a thread that sleeps in
``epoll``."""

from __future__ import annotations

import os
import select
import threading
import time
from collections.abc import Sequence
from queue import SimpleQueue
from threading import get_ident
from typing import TYPE_CHECKING

from gloo_fallback.p2p.frames import PendingMessage, Waker
from gloo_fallback.shm.ring_buffer import RingReader, poll_any
from unicoll.calls.error_marks import leaves_doubt
from unicoll.errors import OperationTimeoutError
from unicoll.process import logs
from unicoll.process.interrupts import LazyThread

if TYPE_CHECKING:
    from gloo_fallback.p2p.connection import PeerConnection
    from gloo_fallback.p2p.engine import P2PEngine

log = logs.logger("gloo")

_TICK_S = 0.1
_SLACK_S = 1.0
"""How long after its deadline the thread that runs progress may end an operation; then a waiting
thread does."""
_EVENTS = 64
_POLLS = 4
"""Number of polls of a ring that take as long as one poll of a socket."""
_YIELDS = 200
_OVERSUBSCRIBED_YIELDS = 100
"""Number of times the processor is yielded between polls of a ring before sleeping."""
_FAIR_INTERVAL = 64
"""A thread that waits for one connection polls all of them once in this many rounds."""


class ProgressEngine:
    """Lets exactly one thread run progress while anything is pending.

    Args:
        engine: moves the messages, and knows whether any are pending.
        spins: polls of the connections before sleeping on them; 0 if ranks outnumber cores.

    Attributes:
        poll: the epoll object at which connections are registered.
        owner: identifier of the thread that runs progress, or 0.
    """

    def __init__(self, engine: P2PEngine, spins: int) -> None:
        self.poll = select.epoll()
        self._spins = spins
        self._yields = _YIELDS if spins else _OVERSUBSCRIBED_YIELDS
        self._engine = engine
        self._waker = Waker()
        self.poll.register(self._waker.descriptor, select.EPOLLIN)
        # The lock knows its owner, so that a thread that is interrupted behind the acquisition can
        # release it (give_back).
        self._progress_lock = threading.RLock()
        self.owner = 0
        self._lock = threading.Lock()
        self._wakeups: SimpleQueue[bool] = SimpleQueue()
        self._thread = LazyThread("unicoll-messages")
        # While this is True, the progress thread looks for pending work once more before it sleeps;
        # it changes with the lock.
        self._thread_active = False
        # This many callers wait to take progress over from the progress thread.
        self._waiters = 0
        self._closed = False
        self._checked_at = 0.0
        self._rounds = 0

    def until_done(self, pending: PendingMessage) -> None:
        """Run progress until ``pending`` is done, or wait for it while another thread runs
        progress."""
        completion = pending.completion
        # A finalizer or a signal's handler makes a call in the middle of another one of this
        # thread, which runs progress already. The outer call releases the lock.
        held = self.owner != 0 and self.owner == get_ident()
        try:
            while not completion.done():
                if held:
                    self._progress_once(pending)
                elif self._acquire_progress():
                    self._progress_until_done(pending)
                else:
                    try:
                        # Another caller runs progress. It stops with its own operation, so this
                        # thread tries again in each tick.
                        completion.wait(_TICK_S)
                    except OperationTimeoutError:
                        # The operation has not ended in this tick, or has timed out: its error is
                        # raised by the caller's wait.
                        now = time.monotonic()
                        # The thread that runs progress should have ended the operation by now. It
                        # may have been interrupted, and never go on.
                        if now >= pending.deadline + _SLACK_S:
                            self._engine.check_deadlines(now)
        except BaseException as e:
            self.give_back(held)
            # The exception has come in the middle of a change, and the lock is released. The group
            # fails, because no thread can use that connection any more.
            if self._engine.unsure and leaves_doubt(e):
                self._engine.fail(e)
            raise
        finally:
            # This thread stops running progress, and no other thread may be waiting for what is
            # left.
            if self._engine.pending():
                self.wake_thread()

    def _progress_until_done(self, pending: PendingMessage) -> None:
        try:
            while not pending.completion.done():
                self._progress_once(pending)
        finally:
            # This comes before the release, behind which another thread stores its own number here.
            self.owner = 0
            self._progress_lock.release()

    def try_acquire(self) -> bool:
        """Acquire the progress lock, which the calling thread does not hold, unless another thread
        does."""
        if not self._progress_lock.acquire(False):
            return False
        self.owner = get_ident()
        return True

    def give_back(self, held: bool) -> None:
        """Release the progress lock if the calling thread has it, and had it not before
        (``held``)."""
        # RLock._is_owned() is private, but threading.Condition calls it, too.
        if not held and self._progress_lock._is_owned():  # type: ignore[attr-defined]
            self.release()

    def release(self) -> None:
        """Release the progress lock; the progress thread continues if anything is pending."""
        self.owner = 0
        self._progress_lock.release()
        if self._engine.pending():
            self.wake_thread()

    def _acquire_progress(self) -> bool:
        """Acquire the progress lock, unless another caller holds it; the progress thread gives it
        up."""
        if self._progress_lock.acquire(False):
            self.owner = get_ident()
            return True
        if self.owner == 0 or self.owner != self._thread.ident:
            return False
        # The progress thread reads this number when it wakes, and stops if it is not 0; so it is
        # raised before the thread is woken.
        self._waiters += 1
        try:
            self._waker.wake()
            if not self._progress_lock.acquire(timeout=_TICK_S):
                return False
            self.owner = get_ident()
            return True
        finally:
            self._waiters -= 1

    def wake_thread(self) -> None:
        """Let the progress thread run while anything is pending."""
        with self._lock:
            if self._thread_active or self._closed:
                return
            # The mark is set last. If an interrupt comes before that, the next call wakes the
            # thread again, and one wake-up too many does no harm.
            self._thread.start(self._work)
            self._wakeups.put(True)
            self._thread_active = True

    def _work(self) -> None:
        try:
            self._serve()
        except BaseException as e:
            log.exception("the thread %r ended with an exception", threading.current_thread().name)
            self._engine.died(e)

    def _serve(self) -> None:
        while self._wakeups.get():
            while True:
                connects = self._engine.has_queued_connects
                self._engine.connect_pending()
                if connects:
                    # A caller that runs progress may sleep on other connections, while its send has
                    # left on the new one.
                    self._waker.wake()
                # The lock makes this thread and wake_thread() take turns: either this look finds a
                # new operation, or wake_thread() finds the thread inactive and wakes it.
                with self._lock:
                    # A caller that runs progress makes no connections, so this thread stays while
                    # sends wait for one.
                    given_up = self._waiters and not self._engine.has_queued_connects
                    if self._closed or given_up or not self._engine.pending():
                        self._thread_active = False
                        break
                # While a caller runs progress, this thread looks in each tick for sends that need a
                # connection.
                if not self._progress_lock.acquire(timeout=_TICK_S):
                    continue
                self.owner = get_ident()
                try:
                    # Another thread may have completed everything meanwhile.
                    if self._engine.pending():
                        self._progress_once()
                finally:
                    self.owner = 0
                    self._progress_lock.release()

    def _progress_once(self, pending: PendingMessage | None = None) -> None:
        """Run one round of progress, waiting a tick at most; ``pending`` is the operation that the
        caller waits for."""
        self._rounds = rounds = self._rounds + 1
        done = False
        # _spin() looks at one connection only. While that is busy, the others would never be read.
        if rounds % _FAIR_INTERVAL == 0:
            self.receive_available()
            done = pending is not None and pending.completion.done()
        # If what has just come has ended the operation, the wait would last a whole tick.
        if not done and (pending is None or not self._spin(pending)):
            self._wait(pending)
        now = time.monotonic()
        if now - self._checked_at >= _TICK_S:
            self._checked_at = now
            self._engine.check_deadlines(now)
        self._engine.report_completed()

    def receive_available(self) -> None:
        """Receive what has come, without waiting."""
        self._receive_shared(False)
        self._serve_events(0)
        self._engine.report_completed()

    def _wait(self, pending: PendingMessage | None) -> None:
        """Wait for data; for a receive from any source after polling all connections a few
        times."""
        if pending is not None and pending.call.peer < 0:
            for _ in range(self._spins):
                if self._receive_shared(False) or self._serve_events(0):
                    return
        # The rings are asked for notices before this thread sleeps. A message written before that
        # is seen here, and a later one is announced on the socket, so none is missed.
        self._serve_events(0 if self._receive_shared(True) else _TICK_S)

    # --- polling ----------------------------------------------------------------------------------

    def poll_ring(self, reader: RingReader) -> bool:
        """Poll for data in a ring for a short time; True once there is some."""
        # Each notice would cost the sender a system call while this side polls anyway.
        reader.await_data(False)
        return reader.poll(_POLLS * self._spins, self._yields)

    def poll_rings(
        self, rings: Sequence[tuple[PeerConnection, RingReader]]
    ) -> PeerConnection | None:
        """Poll the rings of connections for a short time; the first connection with data, or
        None."""
        if len(rings) == 1:
            connection, reader = rings[0]
            return connection if self.poll_ring(reader) else None
        for _, reader in rings:
            reader.await_data(False)
        found = poll_any(
            [reader for _, reader in rings], _POLLS * self._spins // len(rings), self._yields
        )
        return None if found < 0 else rings[found][0]

    def _spin(self, pending: PendingMessage) -> bool:
        """Poll the connection of an operation for a short time; True if something may have
        moved."""
        engine, peer = self._engine, pending.call.peer
        connection = engine.connection_to(peer) if peer >= 0 else None
        if connection is None:
            return False
        receiver = connection.receiver
        reader = receiver.reader
        if reader is not None and receiver.shared and reader.strong:
            return self._poll_rings(connection, reader)
        lock, receive, buffer = engine.lock, receiver.receive, engine.buffer
        for _ in range(self._spins):
            with lock:
                if connection.closed or engine.unsure:
                    return True
                engine.unsure = True
                try:
                    receive(buffer)
                except BlockingIOError as error:
                    # A BlockingIOError without a number is that of a signal's handler.
                    if error.errno is None:
                        raise
                    engine.unsure = False
                    continue
                except (OSError, EOFError) as error:
                    engine.connection_ended(connection, error)
                engine.unsure = False
            return True
        return False

    def _poll_rings(self, connection: PeerConnection, reader: RingReader) -> bool:
        """Poll for data from a peer, and for space for a queued send to it; then receive and
        send."""
        sender = connection.sender
        if not sender.outbox:
            if not self.poll_ring(reader):
                return False
        else:
            reader.await_data(False)
            for _ in range(self._yields):
                # The queue of sends is read, which other threads change. Between the looks the lock
                # is free for them.
                with self._engine.lock:
                    if (
                        connection.receiver.has_shared_data
                        or sender.ring_has_space
                        or connection.closed
                    ):
                        break
                os.sched_yield()
            else:
                return False
        with self._engine.lock:
            self._receive_from_ring(connection)
            if sender.outbox and not connection.closed:
                self._engine.change(sender.flush)
        return True

    def _receive_from_ring(self, connection: PeerConnection) -> None:
        if not (connection.closed or self._engine.unsure):
            self._engine.unsure = True
            try:
                connection.receiver.receive_shared()
            except OSError as error:
                self._engine.connection_ended(connection, error)
            self._engine.unsure = False

    def _receive_shared(self, awaited: bool) -> bool:
        """Receive what is in the rings; False if they are empty.

        Args:
            awaited: ask for notices: the caller is about to sleep.
        """
        found = False
        with self._engine.lock:
            # The connections are copied, because one that fails is removed within the loop.
            for connection in [*self._engine.open.values()]:
                receiver = connection.receiver
                reader = receiver.reader
                if reader is None or not receiver.shared:
                    continue
                if reader.await_data() if awaited else receiver.has_shared_data:
                    found = True
                    self._receive_from_ring(connection)
        return found

    # --- events -----------------------------------------------------------------------------------

    def _serve_events(self, timeout: float) -> bool:
        """Handle the events that come within ``timeout`` seconds; False if there are none."""
        events = self.poll.poll(timeout, _EVENTS)
        for descriptor, event in events:
            if descriptor == self._waker.descriptor:
                self._waker.clear()
            else:
                self._engine.serve(descriptor, event)
        return bool(events)

    @property
    def active(self) -> bool:
        """True if a thread runs progress, or is about to."""
        return self._thread_active or self.owner != 0

    def wake(self) -> None:
        """Wake the thread that runs progress."""
        self._waker.wake()

    def close(self) -> None:
        """End the thread and release all resources, once nothing is pending; idempotent."""
        # The thread sleeps in epoll or waits for a wake-up; both end.
        self._closed = True
        self._waker.wake()
        self._wakeups.put(False)
        self._thread.join(2.0)
        # A finalizer or a signal's handler closes the group while its thread runs progress (see
        # until_done).
        held_here = self.owner == get_ident()
        # If another thread still runs progress, the descriptors stay open: it would poll those of
        # other files, to which the system gives the numbers of closed ones.
        if held_here or self._progress_lock.acquire(timeout=2.0):
            self._waker.close()
            self.poll.close()
            if not held_here:
                self._progress_lock.release()
