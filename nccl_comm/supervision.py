"""Supervision of one group: deadlines, deaths of ranks, NCCL's asynchronous errors, abort and teardown.

The watchdog's thread calls :meth:`Supervision.sweep` for every group. Whatever has failed there, or at another rank,
ends in :meth:`Supervision.abort`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from nccl_comm.connection import Connection
from nccl_comm.in_flight import InFlight
from nccl_comm.library.api import IN_PROGRESS, SUCCESS
from nccl_comm.state import GroupState
from nccl_comm.watchdog_thread import Watchdog
from unicoll.backend import Call, Context, failure_diagnosis
from unicoll.errors import DistError, GroupAbortedError, OperationTimeoutError, RankLostError

_DRAIN_S = 5.0
"""How long :meth:`Supervision.close` waits for operations in flight."""
_STOP_S = 20.0
"""How long teardown waits for a thread in NCCL after the communicator has been revoked, and for an abort."""
_LOCK_S = 1.0
"""How long teardown waits for the group's lock before it stops a thread in NCCL."""


class Supervision:
    """Supervision of one group.

    Args:
        context: the group.
        state: of the group.
        lock: the group's lock, which a thread holds while it uses the communicator.

    Attributes:
        watchdog: the process's watchdog, once the group has connected.
    """

    def __init__(self, context: Context, state: GroupState, lock: threading.RLock) -> None:
        self.watchdog: Watchdog | None = None
        self._context = context
        self._state = state
        self._lock = lock
        self._connection: Connection | None = None
        self._last_issuing = (
            0,
            0.0,
        )  # InFlight.issued when the last sweep saw a thread in NCCL, and since when
        self._abort_lock = threading.Lock()
        self._aborted: threading.Event | None = None  # set when an abort has been done
        self._abandoned: list[
            tuple[Call, ...]
        ] = []  # calls that NCCL could not stop: their arrays stay alive
        if context.job.control is not None:
            context.job.control.watch(context.name, context.backend, self.abort, self._report)

    def start(self, connection: Connection) -> None:
        """Supervise a group that has connected."""
        self._connection = connection
        self.watchdog = self._context.job.shared("nccl-watchdog", Watchdog)
        self.watchdog.watch(self)

    def sweep_often(self) -> None:
        """Have the watchdog sweep more often, since a callback is pending."""
        if self.watchdog is not None:
            self.watchdog.sweep_often()

    def check(self, call: Call | None) -> None:
        """Raise if the group has failed or a member died; called repeatedly while a thread waits for NCCL."""
        self._state.check()
        self._check_departures(call)

    # --- the watchdog's sweep -----------------------------------------------------------------------------------

    def sweep(self, now: float) -> bool:
        """Remove what has ended, and fail the group if something went wrong; True if callbacks are pending.

        On the watchdog's thread.
        """
        connection = self._connection
        assert connection is not None
        try:
            connection.in_flight.reap()
            if self._state.error is None:
                self._check_communicator(connection, now)
        except DistError as e:
            self._fail(e)
        return connection.in_flight.has_callbacks

    def sweep_failed(self, cause: BaseException) -> None:
        """Fail the group because a sweep raised: without sweeps no operation ends. On the watchdog's thread."""
        if self._state.error is None:
            self.abort(failure_diagnosis.thread_failed(self._context, cause))

    def _check_communicator(self, connection: Connection, now: float) -> None:
        """Raise if NCCL reports an error, a member died or a deadline has passed."""
        comm, in_flight = connection.comm, connection.in_flight
        state = comm.state()
        first = in_flight.operations[0] if in_flight.operations else None
        self._check_issuing(in_flight, now)
        if state not in (SUCCESS, IN_PROGRESS):
            call = first.describe_call() if first is not None else None
            comm.await_death_notice(state, call)
            raise comm.error(state, "an operation in progress", call)
        if first is None:
            return
        self._check_departures(first.describe_call())
        overdue = in_flight.overdue(now)
        if overdue is not None:
            raise failure_diagnosis.timed_out(self._context, overdue.describe_call())

    def _check_issuing(self, in_flight: InFlight, now: float) -> None:
        """Raise if a thread is in NCCL for longer than its call's timeout.

        NCCL connects ranks within their first calls, and waits there without limit for a rank that is gone.
        """
        call, number = in_flight.issuing, in_flight.issued
        last, since = self._last_issuing
        if call is None or number != last:
            self._last_issuing = number if call is not None else 0, now
            return
        self._check_departures(call)
        if now - since >= call.timeout:
            raise failure_diagnosis.timed_out(self._context, call)

    def _check_departures(self, call: Call | None) -> None:
        """Raise if a member died: NCCL itself may never notice."""
        context, control = self._context, self._context.job.control
        if control is None:
            return
        for member, rank in enumerate(context.ranks):
            if rank in control.departed and rank not in control.left:
                reason = control.departed[rank]
                if call is not None:
                    raise failure_diagnosis.lost(context, call, member, reason)
                raise RankLostError(
                    f"group {context.name!r}, while it connected: {reason}", group=context.name, rank=rank
                )

    def _report(self) -> dict[str, Any]:
        """The operation that this rank is in, and the last one posted, for the error of another rank."""
        if self._connection is None:
            return failure_diagnosis.report(None, None)
        in_flight = self._connection.in_flight
        pending, last = in_flight.first_pending(), in_flight.last
        return failure_diagnosis.report(
            in_flight.issuing or (pending.describe_call() if pending is not None else None),
            last.describe_call().ended if last is not None else None,
        )

    # --- failure ------------------------------------------------------------------------------------------------

    def _fail(self, error: DistError) -> None:
        """Report the group's failure to all members, and abort it on this rank."""
        control = self._context.job.control
        if control is not None:
            error = control.announce_failure(self._context.name, self._context.ranks, error)
        self.abort(error)

    @contextmanager
    def timeouts_end_the_group(self) -> Iterator[None]:
        """Within the context a timeout fails the group: its members no longer agree on what they have registered."""
        try:
            yield
        except OperationTimeoutError as e:
            self._fail(e)
            raise

    def abort(self, error: Exception) -> None:
        """Make every pending and later call raise ``error``; any thread, idempotent."""
        cause = failure_diagnosis.aborted(self._context, error)
        with self._abort_lock:
            if self._state.error is not None:
                return
            self._state.error = cause
            connection = self._connection
            if connection is None or self._state.closed:
                return
            self._aborted = threading.Event()
        connection.comm.teardown_threads.start(partial(self._abort, connection, cause, self._aborted))

    def _abort(self, connection: Connection, cause: DistError, done: threading.Event) -> None:
        """Stop the device's work, and only then release the arrays."""
        operations = list(connection.in_flight.operations)
        for work in operations:
            work.error = cause
        locked = self._lock.acquire(timeout=_LOCK_S)
        try:
            stopped = connection.comm.revoke()
            if stopped and not locked:  # a thread was in NCCL, and returns now
                stopped = locked = self._lock.acquire(timeout=_STOP_S)
            stopped = stopped or connection.comm.abort()
        finally:
            if locked:
                self._lock.release()
        if not stopped:
            self._abandoned.extend(work.calls for work in operations)
        for work in operations:
            work.finish(cause)
        done.set()

    def await_abort(self) -> None:
        """Wait for the end of an abort that has begun."""
        with self._abort_lock:
            aborted = self._aborted
        if aborted is not None:
            aborted.wait(_STOP_S)

    # --- teardown -----------------------------------------------------------------------------------------------

    def await_idle(self, what: str, timeout: float) -> None:
        """Wait until nothing is in flight: NCCL may deadlock if a communicator with work is split."""
        assert self._connection is not None
        if self._connection.in_flight.drain(time.monotonic() + timeout):
            return
        self._state.check()
        raise OperationTimeoutError(
            f"{what} waited {timeout:g} s for operations of group {self._context.name!r} to end",
            group=self._context.name,
        )

    def close(self) -> None:
        """Wait for what is in flight, and end the communicator; idempotent."""
        state, context, connection = self._state, self._context, self._connection
        if state.closed:
            return
        if context.job.control is not None:
            context.job.control.unwatch(context.name, context.backend)
        drained = connection is None or connection.in_flight.drain(time.monotonic() + _DRAIN_S)
        with self._abort_lock:
            state.closed = True
            failed, aborted = state.error, self._aborted
            state.error = failed or GroupAbortedError(
                f"group {context.name!r} has been destroyed", group=context.name
            )
        if connection is None:
            return
        assert self.watchdog is not None
        self.watchdog.unwatch(self)
        if aborted is not None:
            aborted.wait(_STOP_S)
        idle = locked = self._lock.acquire(timeout=_LOCK_S)
        comm = connection.comm
        try:
            if not locked and comm.revoke():  # a thread was in NCCL, and returns now
                locked = self._lock.acquire(timeout=_STOP_S)
            clean = failed is None and drained and idle
            if clean:
                connection.memory.deregister()
            ended = comm.finish(_DRAIN_S) if clean else comm.abort()
        finally:
            if locked:
                self._lock.release()
        connection.in_flight.finish_all(state.error)
        connection.memory.close(ended)
        if ended:  # else the device may still use them
            connection.release()
