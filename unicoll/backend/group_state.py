"""The state of a group on this rank, which all parts of its backend share: failure and the
collective in progress."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, NoReturn

from unicoll.backend import operation_errors
from unicoll.backend.error_texts import Report
from unicoll.errors import DistError, GroupAbortedError

if TYPE_CHECKING:
    from unicoll.backend.contract import Context
    from unicoll.calls.call import Call, EndedCall

TICK_S = 0.1
"""How often a thread that waits checks the group and the deadline."""
_NOTICE_S = 0.5
"""How long the notice of a rank's end, or of the group's failure, may take to arrive.

A relay that replaces another one checks ranks that have not connected to it at shorter intervals.
"""


class GroupState:
    """The state of one group on this rank.

    The first failure ends the group: the calls in progress and all later ones raise its error.

    Args:
        context: the group.

    Attributes:
        context: the group.
        error: the error that has ended the group, or None while it can be used.
        closed: True once the group has been destroyed.
        call: the collective in progress, or None.
        last: the collective before that one, or None.
        deadline: of the collective in progress, or of the creation of MPI's communicator, on the
            clock of ``time.monotonic``; 0 until it first waits.
        links: see :func:`unicoll.backend.operation_errors.report`.
    """

    def __init__(self, context: Context) -> None:
        self.context = context
        self.error: DistError | None = None
        self.closed = False
        self.call: Call | None = None
        self.last: EndedCall | None = None
        self.deadline = 0.0
        self.links: Callable[[], str] = lambda: ""
        self._listeners: list[Callable[[DistError], None]] = []
        self._lock = threading.Lock()

    # --- failure ----------------------------------------------------------------------------------

    def add_listener(self, listener: Callable[[DistError], None]) -> None:
        """Call a function with the error when the group fails; at once if it has failed.
        :meth:`close` is no failure.

        It is called on the thread that learns of the failure, maybe within a call of the group. It
        wakes what waits, and must not run functions of the user.
        """
        # With the lock an abort() at the same time either finds the listener in the list, or has
        # set the error before it is read here. So the listener is called once.
        with self._lock:
            self._listeners.append(listener)
            failure = None if self.closed else self.error
        if failure is not None:
            listener(failure)

    def remove_listener(self, listener: Callable[[DistError], None]) -> None:
        """Do not call a function any more."""
        with self._lock, suppress(ValueError):
            self._listeners.remove(listener)

    def check(self) -> None:
        """Raise the error that has ended the group, if there is one."""
        if self.error is not None:
            # All calls raise this one object. The traceback of the last call would grow with each
            # of them, and keep frames and their arrays alive.
            raise self.error.with_traceback(None) from self.error.__cause__

    def abort(self, error: Exception) -> None:
        """Make the calls in progress and all later ones raise ``error`` on this rank; any thread.

        Does nothing if the group has failed or is closed; the listeners may then still be running
        on another thread.
        """
        with self._lock:
            if self.error is not None:
                return
            self.error = failure = operation_errors.group_aborted_error(self.context, error)
            listeners = [*self._listeners]
        # An error in one does not keep the others from being called. The stack calls the last one
        # first, so they are added in reverse order.
        with ExitStack() as stack:
            for listener in reversed(listeners):
                stack.callback(listener, failure)

    def announce(self, error: DistError) -> None:
        """Fail the group on all ranks, with ``error`` or the one of another rank that came
        first."""
        if self.error is None:
            try:
                error = operation_errors.announce(self.context, error)
            finally:
                # The group fails on this rank also if a signal's handler ends the wait for the
                # answer.
                self.abort(error)

    def fail(self, error: DistError) -> NoReturn:
        """:meth:`announce`, and raise the error that all ranks raise."""
        self.announce(error)
        assert self.error is not None
        raise self.error.with_traceback(None) from self.error.__cause__

    def fail_peer(self, peer: int, reason: str) -> NoReturn:
        """Fail the group because a member cannot be reached.

        Raises:
            DistError: the group's error, if it has one or another rank has announced one.
            RankLostError: else: of the member that ended first, if one has ended; else for
                ``reason``.
        """
        assert self.call is not None
        ended = self.find_ended_member(peer, self.deadline or time.monotonic() + self.call.timeout)
        if ended is not None:
            self.fail(self.lost_error(*ended))
        # No member has ended, or the search has stopped because the group has failed.
        self.check()
        self.fail(self.lost_error(peer, reason))

    def find_ended_member(self, peer: int, takeover_until: float) -> tuple[int, str] | None:
        """The member whose end has closed a connection to ``peer``, and how it ended; waits 0.5 s
        for the notice.

        While another process takes the relay over, it waits for that first, at most until
        ``takeover_until`` (the deadline of the call, on the clock of ``time.monotonic``). None if
        no member has ended, and as soon as the group has failed.
        """
        context, control = self.context, self.context.job.control
        deadline = time.monotonic() + _NOTICE_S
        while control is not None and self.error is None:
            # A member that fails the group closes its connections, too. Then its error is the
            # reason, so this is asked first.
            if (failure := control.group_failure(context.name)) is not None:
                self.abort(failure)
            elif (
                rank := control.find_lost_rank(context.ranks[peer], context.ranks, 0.02)
            ) is not None:
                return context.ranks.index(rank), control.departed[rank]
            elif (now := time.monotonic()) < takeover_until and not control.relay_settled():
                # No notice arrives before this process is connected to the new relay.
                deadline = now + _NOTICE_S
            elif now >= deadline:
                break
        return None

    def lost_error(self, peer: int, reason: str) -> DistError:
        """The error of the collective in progress because a member has ended."""
        assert self.call is not None
        return operation_errors.rank_lost_error(self.context, self.call, peer, reason)

    def fail_mismatch(self, peer: int, seq: int, reason: str = "") -> NoReturn:
        """Fail the group because member ``peer`` is in another call, with sequence number
        ``seq``."""
        self.check()
        assert self.call is not None
        self.fail(operation_errors.mismatch_error(self.context, self.call, peer, seq, reason))

    def close(self) -> DistError | None:
        """Make all later calls raise; returns the error that had ended the group before, or
        None."""
        with self._lock:
            self.closed, failure = True, self.error
            if failure is None:
                name = self.context.name
                self.error = GroupAbortedError(f"group {name!r} has been destroyed", group=name)
            return failure

    # --- waits ------------------------------------------------------------------------------------

    def tick(self) -> None:
        """Raise if the group or the collective in progress has failed; called while a wait makes no
        progress.

        Raises:
            OperationTimeoutError: the deadline has passed.
            DistError: the group has failed.
        """
        self.check()
        call, now = self.call, time.monotonic()
        assert call is not None
        if not self.deadline:
            # The wait began a tick ago: this is called when it has made no progress for one.
            self.deadline = now - TICK_S + call.timeout
        if now >= self.deadline:
            self.fail(operation_errors.timeout_error(self.context, call, self.links))

    def check_deadline(self) -> None:
        """Fail the group if the deadline has passed; called after each part of a message.

        A slow connection may never be idle for a tick.
        """
        now = time.monotonic()
        if now < self.deadline:
            return
        if self.deadline:
            self.tick()
        else:
            assert self.call is not None
            self.deadline = now + self.call.timeout

    def report(self) -> Report:
        """The state of this rank in the group, for errors on other ranks (called on the control
        thread)."""
        return operation_errors.report(self.call, self.last, self.links())
