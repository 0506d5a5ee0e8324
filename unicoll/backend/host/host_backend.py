"""Base of the backends for arrays in host memory: order, numbers, asynchronous calls, fallbacks,
failure, shutdown."""

from __future__ import annotations

import math
import time
from abc import abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NoReturn, Protocol

import numpy as np

from unicoll.arrays.buffer import Buffer
from unicoll.arrays.types import DType
from unicoll.backend import operation_errors
from unicoll.backend.contract import Context
from unicoll.backend.group_state import TICK_S, GroupState
from unicoll.backend.host import fallbacks
from unicoll.backend.host.blocking_p2p import BlockingP2P, MessagesToSelf
from unicoll.backend.host.coalescing import merge_all_reduces
from unicoll.backend.host.op_queue import Execute, OpQueue
from unicoll.backend.observed_backend import MessageQueues, ObservedBackend
from unicoll.calls.call import Call
from unicoll.calls.error_marks import is_delivered
from unicoll.calls.ops import Op
from unicoll.calls.thread_activity import entered
from unicoll.calls.work import Completion, HostCompletion
from unicoll.errors import (
    DistArgumentError,
    DistError,
    GroupAbortedError,
    OperationTimeoutError,
)

_DRAIN_S = 5.0
"""How long closing a group waits for operations in flight."""
_GRACE_S = 0.5
"""How long a message of a rank that is lost may still take to arrive."""
_ABORTED_S = 1.0
"""How long it then waits for those that it has aborted."""


class MessageEngine(Protocol):
    """The sends, receives and probes of a group."""

    @property
    def has_callbacks(self) -> bool:
        """False if no callbacks are attached to messages in flight."""

    def run(self, call: Call) -> None:
        """Send or receive; return when the array may be used again."""

    def post(self, call: Call) -> Completion:
        """Send or receive in the background."""

    def iprobe(self, call: Call) -> bool:
        """True if a message that a probe matches has come; never blocks. Only of backends with
        ``probe``."""

    def abort(self) -> None:
        """Make every pending call raise the error with which the group has ended; any thread."""

    def drain(self, timeout: float) -> None:
        """Wait up to ``timeout`` seconds for pending sends."""

    def close(self) -> bool:
        """:meth:`abort`, and release everything; True if nothing was in flight."""


class HostBackend(ObservedBackend):
    """A backend of arrays in host memory. Subclasses define :meth:`execute`, and usually ``abort``
    and ``close``.

    Calls of operations in ``caps.native`` go to :meth:`execute`, those of other collectives to a
    fallback. Collectives are executed one at a time in the order of the calls; sends and receives
    go to the message engine.

    Args:
        p2p: sends and receives; None calls :meth:`execute` for them, see :class:`BlockingP2P`.
        state: of the group; None makes one.

    Attributes:
        queue: order and numbers of the collectives.
    """

    compares = True
    stages = True

    def __init__(
        self, context: Context, p2p: MessageEngine | None = None, state: GroupState | None = None
    ) -> None:
        super().__init__(context, state)
        state = self.state
        self.queue = OpQueue(f"unicoll-{context.name}", self.thread_failed, lambda: state.error)
        # A waiting call first saw at these times that a rank is lost.
        self._departed: dict[int, float] = {}
        self._p2p: MessageEngine
        if p2p is not None:
            self._p2p = p2p
        elif context.size > 1:
            self._p2p = BlockingP2P(context.name, self.execute)
        else:
            self._p2p = MessagesToSelf(context.name, self)
        self._collectives: dict[str, Execute] = {
            name: self.execute if name in self.caps.native else self._fall_back
            for name in fallbacks.available(self.caps)
            if name not in ("send", "recv", "probe")
        }

    @classmethod
    def create(cls, context: Context) -> HostBackend:
        made = cls(context)
        made.watch()
        return made

    @abstractmethod
    def execute(self, call: Call) -> None:
        """Do one native operation, and return when its arrays may be used again; ends with
        ``call.write_back()``.

        Collectives come one at a time. Sends and receives come at any time, on several threads,
        unless the backend has a :class:`MessageEngine` of its own.
        """

    @property
    def failure(self) -> DistError | None:
        return self.state.error

    @property
    def sequence(self) -> int:
        return self.queue.sequence

    @property
    def executing_backend(self) -> HostBackend:
        return self

    # --- calls ------------------------------------------------------------------------------------

    def run(self, call: Call) -> None:
        execute = self._collectives.get(call.op.name)
        if execute is not None:
            self.queue.run(execute, call)
        else:
            self._p2p.run(call)

    def runner(self, op: Op) -> Callable[[Call], None]:
        # A subclass that overrides run() gets all its calls through that.
        if type(self).run is not HostBackend.run:
            return self.run
        execute = self._collectives.get(op.name)
        return self._p2p.run if execute is None else partial(self.queue.run, execute)

    def iprobe(self, call: Call) -> bool:
        """True if a message that a probe matches has come; never blocks.

        Raises:
            DistError: the group has ended, or the rank whose message it would be has died.
        """
        # A message that has come can be received even if its sender has died since, so this is
        # asked first.
        if self._p2p.iprobe(call):
            return True
        self.check(call, math.inf)
        return False

    def post(self, calls: Sequence[Call], stream: Any = None) -> Completion:
        execute = self._collectives.get(calls[0].op.name)
        if execute is not None:
            return self.queue.post(merge_all_reduces(calls), execute, self.needs_thread(calls[0]))
        parts = [self._p2p.post(call) for call in calls]
        return parts[0] if len(parts) == 1 else CombinedCompletion(tuple(calls), parts)

    def run_with(self, call: Call, execute: Execute) -> None:
        """Number a collective and execute it by another function, in its place among the calls of
        the group."""
        self.queue.run(execute, call)

    def post_with(self, calls: tuple[Call, ...], execute: Execute) -> Completion:
        """:meth:`run_with` in the background, for a batch."""
        return self.queue.post(calls, execute, self.needs_thread(calls[0]))

    def needs_thread(self, call: Call) -> bool:
        """True for a collective in the background that only the queue's thread may execute, not one
        that waits."""
        return False

    def perform(self, call: Call) -> None:
        """Execute a collective within the one that the queue executes now, by the backend or by a
        fallback."""
        self._collectives[call.op.name](call)

    def symmetric_empty(self, shape: tuple[int, ...], dtype: DType) -> Any:
        if self.context.size == 1:
            return np.zeros(shape, dtype.storage)
        return self.allocate(self._run_exchange, shape, dtype)

    def _run_exchange(self, call: Call) -> None:
        with entered(call, self):
            self.run(call)

    def peer_view(self, buffer: Buffer, rank: int) -> Any:
        if self.context.size > 1:
            return super().peer_view(buffer, rank)
        if buffer.flat is None or buffer.unpack is not None:
            raise DistArgumentError(f"peer_view: {buffer} is not contiguous", op="peer_view")
        return buffer.flat.reshape(buffer.shape)

    def allocate(self, execute: Execute, shape: tuple[int, ...], dtype: DType) -> Any:
        """:meth:`symmetric_empty`; ``execute`` executes each of its exchanges in its place among
        the group's calls.

        A backend that uses this one (:meth:`set_delegate`) passes a function that calls
        :meth:`perform`.
        """
        return super().symmetric_empty(shape, dtype)

    def _fall_back(self, call: Call) -> None:
        """Do a collective by its fallback."""
        state = self.state
        state.check()
        # This may be within another call, which is in progress again afterwards (perform).
        previous, state.call = state.call, call
        try:
            fallbacks.perform(fallbacks.group_ops(self, call), call)
            call.write_back()
        except DistArgumentError:
            # The root has refused its list. All ranks raise this, and the group stays usable.
            raise
        except OperationTimeoutError:
            self.fail(state.error or operation_errors.timeout_error(self.context, call))
        except DistError as e:
            # The error of a message of the fallback is to name the user's call.
            e.op, e.seq = call.op.name, call.seq
            self.fail(e)
        except BaseException as e:
            self.give_up(call, e)
            raise
        finally:
            state.last, state.call = call.ended, previous

    # --- failure ----------------------------------------------------------------------------------

    def fail(self, error: DistError) -> NoReturn:
        """End the group with an error: announce it to all members, and raise the one that all of
        them raise."""
        if self.state.error is None:
            # An abort() of a subclass wakes what waits. This class's is not called: it would end
            # messages here, and a callback of one could wait for the call that fails. The control
            # thread ends them.
            abort = self.state.abort if type(self).abort is HostBackend.abort else self.abort
            try:
                error = operation_errors.announce(self.context, error)
            finally:
                # The group fails on this rank also if a signal's handler ends the wait for the
                # answer.
                abort(error)
        self.state.fail(error)

    def give_up(self, call: Call, cause: BaseException) -> None:
        """End the group on all members because of an exception that this rank raises in a call."""
        try:
            self.fail(operation_errors.call_failed_error(self.context, call, cause))
        except DistError:
            # This error is for the other ranks; this one raises the cause.
            pass

    def withdraw_or_give_up(self, call: Call, cause: BaseException, begun: bool) -> bool:
        """After an exception in a call: take the number of a refused one back if nothing of it was
        sent.

        An exception that is not the library's fails the group, also if nothing was sent: a program
        that goes on after it makes one call less than the other ranks.

        Args:
            begun: True if something of the call may have been sent.

        Returns:
            True if the number was taken back: as if the call had not been made.
        """
        if isinstance(cause, DistError):
            return not begun and self.queue.withdraw(call)
        self.give_up(call, cause)
        return False

    def check(self, call: Call, deadline: float) -> None:
        """Raise if a send or receive that waits cannot succeed any more; called now and then while
        waiting.

        Raises:
            OperationTimeoutError: the deadline has passed.
            RankLostError: the peer has left the job or died; for a receive from any member, a
                member died.
            DistError: the group has ended.
        """
        self.state.check()
        context, control, now = self.context, self.context.job.control, time.monotonic()
        rank = (
            context.ranks[call.peer]
            if call.peer >= 0
            else operation_errors.first_dead_member(context)
        )
        reason = control.departed.get(rank) if control is not None and rank is not None else None
        if (
            rank is not None
            and reason is not None
            and now - self._departed.setdefault(rank, now) >= _GRACE_S
        ):
            raise operation_errors.rank_lost_error(context, call, context.ranks.index(rank), reason)
        if now >= deadline:
            raise operation_errors.message_timeout_error(context, call, call.peer)

    def thread_failed(self, cause: BaseException) -> DistError:
        """Fail the group because the calling thread, which executes or watches its operations, ends
        with ``cause``."""
        error = operation_errors.thread_failed(self.context, cause)
        self.abort(error)
        self.queue.abandon(error)
        return error

    def in_background(self) -> list[HostCompletion]:
        queue = self.queue
        running = queue._running
        return [
            *([running] if running is not None else []),
            *[completion for completion, _ in queue._queue],
        ]

    @property
    def has_unseen_wakers(self) -> bool:
        return self._p2p.has_callbacks

    @property
    def message_queues(self) -> MessageQueues | None:
        return self._p2p if isinstance(self._p2p, MessageQueues) else None

    def abort(self, error: Exception) -> None:
        super().abort(error)
        self._p2p.abort()
        # An interrupt may have ended a thread before it woke the queue's thread for what is queued.
        self.queue.resume()

    # --- shutdown ---------------------------------------------------------------------------------

    @property
    def stuck(self) -> bool:
        """True if a call in flight is known not to end, so that closing need not wait for it."""
        return False

    def close(self) -> None:
        if self.closed:
            return
        # The numbers are in the job before the mark is set: the wait monitor looks there for those
        # of a backend that is closed.
        self.keep_posted()
        self.closed = True
        context, stuck, failed_before = self.context, self.stuck, self.state.error
        destroyed = GroupAbortedError(
            f"group {context.name!r} has been destroyed", group=context.name
        )
        ended = False
        try:
            ended = self.queue.close(_DRAIN_S if not stuck else 0.0)
            if not ended:
                self.abort(destroyed)
                ended = self.queue.close(_ABORTED_S if not stuck else 0.0)
            self._unwatch()
            self._p2p.drain(_DRAIN_S)
            if not self.queue.in_callback and not self.queue.idle(TICK_S):
                # Another thread is in a blocking call, for which queue.close() has not waited.
                self.state.abort(destroyed)
        finally:
            # An exception of a signal's handler may end one of the waits above. Everything is
            # released all the same.
            self._unwatch()
            # This sets the error with which the engine ends its messages in the next line.
            failure = self.state.close()
            clean = self._p2p.close()
            self.release(ended and clean, failure)
            # A subclass may have an abort() that wakes what still waits.
            self.abort(destroyed)
        lost = self.queue.lost
        # Posted batches have ended with an error that no call has raised. The program learns of it
        # now, or never.
        if failed_before and lost and not (is_delivered(failed_before) or is_delivered(lost)):
            raise failed_before.with_traceback(None) from failed_before.__cause__

    def _unwatch(self) -> None:
        if self.context.job.control is not None:
            self.context.job.control.unwatch(self.context.name, self.context.backend)

    def release(self, clean: bool, failure: DistError | None) -> None:
        """Release what the collectives use. The queue's thread has ended and the engine is closed.

        Args:
            clean: False if some operations may still be in flight.
            failure: the error that had ended the group before it was closed, or None.
        """

    def _idle(self) -> bool:
        """True if no collective is being executed, after waiting a moment for that."""
        return self.queue.idle(_ABORTED_S if not self.stuck else 0.0)


class CombinedCompletion(HostCompletion):
    """Several completions as one; its error is the first of theirs."""

    def __init__(self, calls: tuple[Call, ...], parts: Sequence[Completion]) -> None:
        super().__init__(calls)
        self._left = len(parts)
        for part in parts:
            part.add_done_callback(lambda part=part: self._one(part))  # type: ignore[misc]

    def _one(self, part: Completion) -> None:
        self._left -= 1
        if part.exception() is not None or self._left == 0:
            self.finish(part.exception())
