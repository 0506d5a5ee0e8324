"""Point-to-point operations of a group, over :mod:`mpi_comm.p2p.matcher`: progress, deadlines and
failures.

MPI moves messages only within its calls, so the thread that waits polls all of the group's
requests. While no thread waits, a thread of the group polls, with pauses.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from queue import SimpleQueue
from threading import get_ident
from typing import Any

from mpi_comm.group_communicator import HEADER_TAG, GroupCommunicator
from mpi_comm.p2p.matcher import EAGER_LIMIT, PACK, RequestMatcher
from mpi_comm.p2p.requests import PendingRequest
from unicoll.backend import Call, operation_errors
from unicoll.calls.callback_thread import CallbackThread
from unicoll.calls.error_marks import leaves_doubt, mark_unchanged
from unicoll.calls.work import HostCompletion
from unicoll.errors import DistBackendError, DistError, OperationTimeoutError
from unicoll.net.control.wait_graph import MessageState
from unicoll.process import logs
from unicoll.process.interrupts import LazyThread
from unicoll.process.timeouts import backoff

log = logs.logger("mpi")

_TICK_S = 0.1
_GRACE_S = 0.5
_SPINS = 100
_EAGER_S = 0.005
_PAUSES_S = (2e-5, 5e-4, 1.2)
"""Pauses between polls of pending messages: the first, the longest, the factor."""


class MPIP2PEngine:
    """One group's point-to-point traffic, over the group's communicator."""

    def __init__(
        self, communicator: GroupCommunicator, died: Callable[[BaseException], object]
    ) -> None:
        self._state = communicator.state
        self._context = context = communicator.context
        self._died = died
        self._communicator = communicator
        self._mpi = communicator.mpi
        self._byte = communicator.mpi.MPI.BYTE
        self._matcher = RequestMatcher(context, communicator)
        # It knows its owner, so that a thread that is interrupted behind the acquisition can
        # release it.
        self._progress_lock = threading.RLock()
        # Identifier of the thread that runs progress, or 0. A thread that finds its own here is
        # nested: a finalizer or a signal's handler that makes a call during a poll.
        self._owner = 0
        self._thread_lock = threading.Lock()
        self._wakeups: SimpleQueue[bool] = SimpleQueue()
        self._thread = LazyThread(f"unicoll-{context.name}-messages")
        self._callbacks = CallbackThread(f"unicoll-{context.name}-callbacks")
        self._closed = False
        self._checked_at = 0.0
        self._departed_at: dict[int, float] = {}

    # --- the operations ---------------------------------------------------------------------------

    def run(self, call: Call) -> None:
        """Send, receive or probe, and return when the array may be used again."""
        # A small message does not go through the matcher, whose lock a thread that polls may hold:
        # MPI takes sends of several threads at once.
        if call.inputs and self._mpi.mpi_thread is None and self._state.error is None:
            buffer = call.inputs[0]
            if buffer.nbytes <= EAGER_LIMIT:
                self._send_small(call, buffer.flat, buffer.dtype.code, buffer.nbytes)
                return
        request = self._accept(call)
        if not request.completion.done():
            self._wait_done(request)
        request.completion.wait(None)

    def post(self, call: Call) -> HostCompletion:
        """Send or receive in the background."""
        request = self._accept(call)
        request.completion.callback_thread = self._callbacks
        if not request.completion.done():
            # Maybe no thread waits for it, and MPI moves messages only while it is called.
            self._wake_thread()
        return request.completion

    def iprobe(self, call: Call) -> bool:
        """True if a message that a probe matches has come; ``call`` is the probe."""
        request = self._accept(call)
        nested = self._owner == get_ident()
        try:
            # If another thread runs progress, it finds the message, and a later call sees that.
            if not request.completion.done() and not nested and self._acquire(0.0):
                self._progress_once()
        finally:
            self._give_back(nested)
        self._matcher.withdraw(request)
        # The payload of a message that has been announced is received in any case, also if the
        # caller makes no other call.
        self._wake_thread()
        if request.completion.done():
            request.completion.wait(None)
            return True
        return False

    def _accept(self, call: Call) -> PendingRequest:
        self._state.check()
        request = PendingRequest(call)
        if self._mpi.mpi_thread is None:
            self._matcher.start(request)
        else:
            self._mpi.mpi_thread.call(self._matcher.start, request)
        # The group may have failed since the first check. If its requests were abandoned before
        # this one was added, nothing else would end it.
        if self._state.error is not None:
            self._matcher.withdraw(request, self._state.error)
        return request

    def _send_small(self, call: Call, flat: Any, code: int, size: int) -> None:
        """Send a message together with its header; usually this is done at once."""
        assert call.tag is not None
        packed = PACK(call.tag, code + self._matcher.mark, size, 0) + flat.tobytes()
        # The message is counted before MPI gets it. In the other order a search for deadlocks
        # could, between the two lines, see equal counts on both sides, and conclude that no message
        # is on its way.
        next(self._matcher.sent[call.peer])
        try:
            mpi_request = self._communicator.comm.Isend([packed, self._byte], call.peer, HEADER_TAG)
            # MPI has usually copied so small a message by now, so that nothing has to be kept or
            # waited for.
            if mpi_request.Test():
                return
            request = PendingRequest(call)
            request.mpi_requests.append(mpi_request)
            self._matcher.add_send(request)
        except BaseException:
            # The exception may have come behind Isend(), before anything refers to the request, and
            # MPI may still read the bytes.
            self._matcher.keep(packed)
            raise
        self._wait_done(request)
        request.completion.wait(None)

    # --- progress ---------------------------------------------------------------------------------

    def _wait_done(self, request: PendingRequest) -> None:
        """Wait until ``request`` is done; run progress for all requests, unless another thread
        does."""
        try:
            self._wait_for(request.completion)
        except BaseException as e:
            # A signal's handler has raised, and the operation has not ended.
            if not request.completion.done():
                # A receive of which nothing has come is as if it had not been made, so the group
                # stays usable. This is asked before withdraw(), which would take it from the queue.
                if leaves_doubt(e) and self._matcher.take_back(request):
                    mark_unchanged(e)
                self._matcher.withdraw(request, e)
            raise

    def _wait_for(self, completion: HostCompletion) -> None:
        # True in a finalizer or a signal's handler that makes a call while this thread runs
        # progress: it is inside of a poll, and does not begin a second one.
        nested = self._owner == get_ident()
        try:
            while not completion.done():
                if not nested and self._acquire(0.0):
                    self._progress_until_done(completion)
                else:
                    # The other thread ends this operation, too. It stops running progress when its
                    # own operation is done, so this thread tries again after each tick.
                    try:
                        completion.wait(_TICK_S)
                    except OperationTimeoutError:
                        # Not done in this tick. A timeout of the operation itself is raised by the
                        # caller of this function.
                        continue
        finally:
            self._give_back(nested)

    def _acquire(self, timeout: float) -> bool:
        """Acquire the progress lock, which the calling thread does not hold."""
        if not self._progress_lock.acquire(timeout=timeout):
            return False
        self._owner = get_ident()
        return True

    def _give_back(self, nested: bool) -> None:
        """Release the progress lock if the calling thread has it, and had it not before
        (``nested``)."""
        # The lock itself is asked, as threading.Condition does: an exception of a handler may have
        # come between the acquisition and the line that sets _owner.
        if not nested and self._progress_lock._is_owned():  # type: ignore[attr-defined]
            # This is before the release: behind it another thread may be the owner already.
            self._owner = 0
            self._progress_lock.release()
            # This thread polled for all operations; another one has to do it now.
            self._wake_thread()

    def _progress_until_done(self, completion: HostCompletion) -> None:
        if not self._communicator.oversubscribed:
            # These polls do not yield the core, so they are only for ranks that have one each.
            for _ in range(_SPINS):
                self._progress_once()
                if completion.done():
                    return
        self._progress_with_pauses(completion.done)

    def _progress_with_pauses(self, done: Any) -> None:
        pauses, eager = backoff(*_PAUSES_S), time.monotonic() + _EAGER_S
        while not done():
            if self._progress_once() or self._matcher.receiving():
                # MPI needs frequent calls while data arrives.
                pauses, eager = backoff(*_PAUSES_S), time.monotonic() + _EAGER_S
            now = time.monotonic()
            if now < eager:
                os.sched_yield()
            else:
                time.sleep(next(pauses))
            if now - self._checked_at >= _TICK_S:
                self._checked_at = now
                self._check_state(now)

    def _wake_thread(self) -> None:
        """Let the group's thread run progress while anything is pending."""
        if self._matcher.pending() and not self._closed:
            with self._thread_lock:
                self._thread.start(self._work)
            self._wakeups.put(True)

    def _work(self) -> None:
        try:
            self._serve()
        except BaseException as e:
            log.exception("the thread %r ended with an exception", threading.current_thread().name)
            # It fails the group: operations that no other thread waits for would never end.
            self._died(e)

    def _serve(self) -> None:
        while self._wakeups.get():
            while self._matcher.pending() and not self._closed:
                if self._acquire(_TICK_S):
                    try:
                        self._progress_with_pauses(
                            lambda: self._closed or not self._matcher.pending()
                        )
                    finally:
                        self._owner = 0
                        self._progress_lock.release()

    def _progress_once(self) -> bool:
        """Poll all requests once; True if any has progressed."""
        if self._mpi.mpi_thread is not None:
            return bool(self._mpi.mpi_thread.call(self._poll))
        return self._poll()

    def _poll(self) -> bool:
        if self._state.error is not None:
            return False
        try:
            return self._matcher.poll()
        except self._mpi.MPI.Exception as e:
            self._failed(e)
            return False

    # --- failures ---------------------------------------------------------------------------------

    def _failed(self, cause: BaseException) -> None:
        """Fail the group: MPI does not say which message failed."""
        # MPI may notice the end of a rank before the control plane's notice arrives.
        peer, name = self._communicator.await_departure_notice(), self._context.name
        error: DistError = DistBackendError(
            f"MPI failed in a message of group {name!r}: {cause}", group=name
        )
        if peer is not None:
            error = self._communicator.lost_error(peer)
            # Each message gets the error of its own call. This comes before abort(), because only
            # the first end of a completion counts.
            for request in self._matcher.pending_requests():
                request.completion.finish(self._lost(request.call, self._context.ranks[peer]))
        # MPI may still have requests that no call reports any more, so the communicator is not
        # freed.
        self._matcher.failed = True
        self._state.announce(error)
        self.abort()

    def _check_state(self, now: float) -> None:
        """Check the group's error, deadlines and departed peers."""
        if self._state.error is not None:
            # The control plane has told the state alone; here the messages learn of it.
            self.abort()
            return
        requests = self._matcher.pending_requests()
        died = operation_errors.first_dead_member(self._context)
        for request in requests:
            if request.completion.done():
                continue
            # A receive from any rank has a source once it is matched.
            peer = request.call.peer if request.call.peer >= 0 else request.call.source
            if peer >= 0:
                if self._departed_for_long(peer, now):
                    self._matcher.withdraw(
                        request, self._lost(request.call, self._context.ranks[peer])
                    )
            elif died is not None:
                # The message could have been the dead member's, so the death of any member ends a
                # receive from any rank.
                self._matcher.withdraw(request, self._lost(request.call, died))
            if now >= request.deadline:
                self._time_out(request)

    def _departed_for_long(self, peer: int, now: float) -> bool:
        """True if a peer has departed for so long that none of its messages is in flight."""
        control, rank = self._context.job.control, self._context.ranks[peer]
        if control is None or rank not in control.departed:
            return False
        return now - self._departed_at.setdefault(peer, now) > _GRACE_S

    def _lost(self, call: Call, rank: int) -> DistError:
        control = self._context.job.control
        assert control is not None
        return operation_errors.rank_lost_error(
            self._context, call, self._context.ranks.index(rank), control.departed[rank]
        )

    def _time_out(self, request: PendingRequest) -> None:
        call, peer, state = request.call, request.call.peer, ""
        if request.matched or request.mpi_requests:
            if request.matched:
                peer = call.source
            moved = "arrived" if request.matched else "been received"
            state = (
                f"the message has not {moved} completely; MPI keeps the array until then, or until"
                " the job ends"
            )
        others = "" if call.inputs or state else self._matcher.others(call)
        error = operation_errors.message_timeout_error(self._context, call, peer, state, others)
        self._matcher.withdraw(request, error)

    # --- for the search of deadlocks (MessageQueues) ----------------------------------------------

    def needs_peer(self, call: Call) -> bool:
        """True for a receive whose message has not come; False for a send, which MPI may end
        without the receiver."""
        return self._matcher.needs_peer(call)

    def others(self, call: Call) -> str:
        """The messages with other tags that have come, for a text about a receive that waits."""
        return self._matcher.others(call)

    def message_state(self, peer: int) -> MessageState:
        """The state of the messages to and from a member."""
        return self._matcher.message_state(peer)

    # --- ends -------------------------------------------------------------------------------------

    @property
    def has_callbacks(self) -> bool:
        """True if callbacks are attached to messages in flight."""
        return self._callbacks.pending

    def abort(self) -> None:
        """Make all pending operations raise the error with which the group has ended."""
        error = self._state.error
        assert error is not None
        for request in self._matcher.abandon_all():
            request.completion.finish(error)

    def drain(self, timeout: float) -> None:
        """Wait up to ``timeout`` seconds for pending sends."""
        deadline, matcher = time.monotonic() + timeout, self._matcher
        while time.monotonic() < deadline and matcher.sending() and self._state.error is None:
            time.sleep(0.001)
        # Sends that were given up may have ended since the last poll, and are still counted as
        # MPI's.
        nested = self._owner == get_ident()
        try:
            if not matcher.idle and not nested and self._acquire(_TICK_S):
                self._progress_once()
        finally:
            self._give_back(nested)

    def close(self) -> bool:
        """Make all pending operations raise, and end the thread; True if MPI has no request of this
        group."""
        self.abort()
        # The thread looks at _closed while it runs progress, and gets the False while it sleeps.
        self._closed = True
        self._wakeups.put(False)
        self._thread.join(2.0)
        # This is after abort(): the callbacks of what that has ended are before the end in the
        # thread's queue.
        self._callbacks.close()
        return self._matcher.idle
