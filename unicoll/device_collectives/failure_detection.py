"""Failures of one group: deadlines, deaths of ranks, the library's asynchronous errors, abort and
teardown.

The watchdog's thread calls :meth:`FailureDetection.sweep` for every group. A failure, which a sweep
finds or another rank announces, stops the communicator.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial

from unicoll.backend import Call, operation_errors
from unicoll.backend.error_texts import Report
from unicoll.backend.group_state import GroupState
from unicoll.calls.error_marks import is_delivered, mark_unchanged
from unicoll.device_collectives.communicators.teardown import END_S
from unicoll.device_collectives.group_resources import GroupResources
from unicoll.device_collectives.in_flight import InFlight, PendingWork
from unicoll.device_collectives.interface import SUCCESS
from unicoll.device_collectives.watchdog_thread import WatchdogThread
from unicoll.devices.device_runtime import DeviceError
from unicoll.errors import (
    DistArgumentError,
    DistError,
    OperationTimeoutError,
    RankLostError,
)
from unicoll.process import logs
from unicoll.process.interrupts import Flag

_WARNING_S = 20.0
"""How long :meth:`FailureDetection.close` waits for operations in flight before it logs a
warning."""
_UNRAISED_S = 1.0
"""How long after a failure it is logged if no call has raised it; a thread that waits for an
operation raises it at once."""
_abandoned: list[tuple[Call, ...]] = []
"""Calls that a library could not stop: the device may use their arrays until the process ends."""


class FailureDetection:
    """Detection of the failures of one group.

    Args:
        state: of the group.
        lock: the group's lock, which a thread holds while it uses the communicator.
        device_state: of the backend, for messages.

    Attributes:
        watchdog: the process's watchdog, once the group has connected.
    """

    def __init__(
        self, state: GroupState, lock: threading.RLock, device_state: Callable[[], Report]
    ) -> None:
        context = state.context
        self.watchdog: WatchdogThread | None = None
        self._context = context
        self._state = state
        self._lock = lock
        self._device_state = device_state
        self._log = logs.logger(context.backend)
        self._resources: GroupResources | None = None
        # The time at which the failure is logged unless a call has raised it.
        self._log_at: float | None = None
        # It is set when a failed group has been stopped, or cannot fail any more.
        self._aborted = Flag()
        state.add_listener(self._start_abort)

    def start(self, resources: GroupResources) -> None:
        """Supervise a group that has connected."""
        context = self._context
        self.watchdog = context.job.shared(
            f"{context.backend}-watchdog",
            partial(WatchdogThread, context.backend, resources.comm.runtime),
        )
        # They are set before the watchdog sweeps the group, because a sweep needs them. A failure
        # from now on stops the communicator; one that came before found none to stop.
        self._resources = resources
        self.watchdog.watch(self)

    def sweep_often(self) -> None:
        """Have the watchdog sweep more often, since a callback is pending."""
        if self.watchdog is not None:
            self.watchdog.sweep_often()

    def check(self, call: Call | None) -> None:
        """Raise if the group has failed or a member died; called repeatedly while a thread waits
        for the library."""
        self._state.check()
        self._check_departures(call)

    def check_now(self) -> None:
        """Raise if the group has failed, or if the library reports an error that the watchdog has
        not seen yet."""
        resources = self._resources
        if resources is not None and self._state.error is None:
            try:
                self._check_library(resources, resources.in_flight.first_pending())
            except DistError as e:
                self._announce(e)
        self._state.check()

    # --- the watchdog's sweep ---------------------------------------------------------------------

    def sweep(self, now: float) -> bool:
        """Remove what has ended, and fail the group if something went wrong; True if callbacks are
        pending.

        On the watchdog's thread.
        """
        resources, watchdog = self._resources, self.watchdog
        assert resources is not None
        assert watchdog is not None
        try:
            # This is done in a failed group, too: the arrays of ended operations are released.
            watchdog.drop(resources.in_flight.reap())
            if self._state.error is None:
                self._check_communicator(resources, now)
        except DistError as e:
            self._announce(e)
        if self._log_at is not None and now >= self._log_at:
            self._log_at = None
            self._log_failure(resources.in_flight.lost)
        return resources.in_flight.has_callbacks

    def _announce(self, error: DistError) -> None:
        """Fail the group on all ranks; an error of the device does not name the rank itself."""
        if self._state.error is not None:
            return
        if isinstance(error, DeviceError):
            what = "using the device of"
            error = operation_errors.member_failed_error(self._context, what, error)
        self._state.announce(error)

    def _log_failure(self, lost: str) -> None:
        """Log the error with which the group has failed if no call has raised it."""
        error = self._state.error
        if error is not None and not is_delivered(error):
            self._log.error(
                "group %r has failed, and the results of %s are undefined: %s",
                self._context.name,
                lost,
                error,
            )

    def sweep_failed(self, cause: BaseException) -> None:
        """Fail the group because a sweep raised: without sweeps no operation ends. On the
        watchdog's thread."""
        if self._state.error is None:
            self._state.abort(operation_errors.thread_failed(self._context, cause))

    def _check_communicator(self, resources: GroupResources, now: float) -> None:
        """Raise if the library reports an error, a member died or a deadline has passed."""
        in_flight = resources.in_flight
        # Only this thread removes operations, so the deque cannot become empty between the two
        # reads.
        first = in_flight.operations[0] if in_flight.operations else None
        self._check_issuing(resources, now)
        self._check_library(resources, first)
        if first is None:
            return
        self._check_departures(first.describe_call())
        overdue = in_flight.overdue(now)
        if overdue is not None:
            raise self._timeout_error(resources, overdue.describe_call())

    def _check_library(self, resources: GroupResources, first: PendingWork | None) -> None:
        """Raise if the library reports an error of the communicator; ``first`` is the first
        operation in flight."""
        comm = resources.comm
        state = comm.state()
        if state in (SUCCESS, comm.library.in_progress):
            return
        call = first.describe_call() if first is not None else None
        # The error of a library names no rank. A death that caused it is reported by the control
        # plane, maybe a moment later.
        comm.await_death_notice(state, call)
        raise comm.error(state, "an operation in progress", call)

    def _timeout_error(self, resources: GroupResources, call: Call) -> OperationTimeoutError:
        return operation_errors.timeout_error(
            self._context,
            call,
            device=self._device_state(),
            diagnosis=resources.comm.library.diagnosis,
        )

    def _check_issuing(self, resources: GroupResources, now: float) -> None:
        """Raise if a thread is in the library for longer than its call's timeout.

        NCCL connects ranks within their first calls, and waits there without limit for a rank that
        is gone.
        """
        issuing = resources.in_flight.issuing
        if issuing is None:
            return
        call, deadline = issuing
        self._check_departures(call)
        if now >= deadline:
            raise self._timeout_error(resources, call)

    def _check_departures(self, call: Call | None) -> None:
        """Raise if a member died: the library itself may never notice."""
        context, control = self._context, self._context.job.control
        rank = operation_errors.first_dead_member(context)
        if rank is None:
            return
        assert control is not None
        reason = control.departed[rank]
        if call is not None:
            raise operation_errors.rank_lost_error(context, call, context.ranks.index(rank), reason)
        raise RankLostError(
            f"group {context.name!r}, while it connected: {reason}", group=context.name, rank=rank
        )

    # --- failure ----------------------------------------------------------------------------------

    @contextmanager
    def failing_group(self, what: str | None = None) -> Iterator[None]:
        """Within the context, in which all members do ``what``, an error fails the group: the
        others would wait.

        An argument that is refused is refused on all members. Without ``what`` other errors are,
        too, and only a timeout, or the end of the device's context, fails the group.
        """
        try:
            yield
        except DistError as e:
            self.handle_error(e, what)
            raise

    def handle_error(self, error: DistError, what: str | None) -> None:
        """What :meth:`failing_group` does with an error."""
        if isinstance(error, DistArgumentError):
            return
        if isinstance(error, OperationTimeoutError | RankLostError):
            self._state.announce(error)
        elif what is None:
            self._mark_if_harmless(error)
        elif self._state.error is None:
            error = operation_errors.member_failed_error(self._context, what, error)
            self._state.announce(error)

    def _mark_if_harmless(self, error: DistError) -> None:
        """Say that an error of the device leaves the group as it was, unless the device's context
        has ended."""
        resources = self._resources
        if not isinstance(error, DeviceError) or error.context_ended or resources is None:
            return
        # The code of a library does not tell whether the context has ended, but any later call of
        # the device does. This one disturbs no capture.
        with suppress(DeviceError):
            resources.comm.runtime.capturing(resources.stream)
            mark_unchanged(error)

    def _start_abort(self, cause: DistError) -> None:
        """Stop the group's operations, on another thread."""
        resources = self._resources
        if resources is None:
            self._aborted.set()
        else:
            # This may be the control thread, or a thread that is in a call and holds the group's
            # lock. Neither may wait for the library, which can take seconds.
            resources.comm.teardown_threads.start(partial(self._abort, resources, cause))

    def _abort(self, resources: GroupResources, cause: DistError) -> None:
        """Stop the device's work, and only then release the arrays."""
        # The operations get their error before the library stops them: the events behind stopped
        # operations complete like others, and the results would be taken for valid. This also ends
        # the waits of the program's threads at once.
        operations = resources.in_flight.fail(cause)
        if resources.in_flight.lost:
            self._log_at = time.monotonic() + _UNRAISED_S
        if not resources.comm.stop(self._lock):
            # The library may still write to the arrays. This list outlives the group, which the
            # program may drop.
            _abandoned.extend(work.calls for work in operations)
            _abandoned.append(resources.in_flight.begun)
        resources.in_flight.begun = ()
        # Only now are the arrays released: no kernel uses them any more, or the list above has
        # them.
        for work in operations:
            work.finish(cause)
            work.run_callbacks()
        self._aborted.set()

    def await_abort(self) -> None:
        """If the group has failed, wait until its operations have been stopped."""
        if self._state.error is not None:
            # The stop takes END_S at most, and then the users' callbacks run.
            self._aborted.wait(2 * END_S)

    # --- teardown ---------------------------------------------------------------------------------

    def await_idle(self, what: str, timeout: float) -> None:
        """Wait until nothing is in flight: NCCL may deadlock if a communicator with work is
        split."""
        assert self._resources is not None
        if self._resources.in_flight.drain(time.monotonic() + timeout):
            return
        self._state.check()
        raise OperationTimeoutError(
            f"{what} waited {timeout:g} s for operations of group {self._context.name!r} to end",
            group=self._context.name,
        )

    def close(self) -> None:
        """Wait for what is in flight, and end the communicator; idempotent.

        Raises:
            DistError: the group failed while this waited, at an operation's deadline for example;
                or it had failed with operations in flight, and no call has raised the error.
        """
        # The order of the teardown:
        # 1. Wait for what is in flight; the watchdog still sweeps, so deadlines hold.
        # 2. Close the state: later calls raise, and a failure from now on has no effect.
        # 3. Stop the sweeps, and wait for the thread that stops a failed group: nothing else uses
        #    the communicator then.
        # 4. End the communicator, then release memory, events and streams. If it has not ended, the
        #    device may still use them, and they stay.
        state, context, resources = self._state, self._context, self._resources
        if state.closed:
            return
        failed_before = state.error
        if resources is not None and failed_before is None:
            try:
                self._drain(resources.in_flight)
            except DeviceError as e:
                self._announce(e)
        failed = state.close()
        if failed is None:
            # No failure can come any more, so no other thread would set the flag.
            self._aborted.set()
        if context.job.control is not None:
            context.job.control.unwatch(context.name, context.backend)
        if resources is None:
            return
        assert self.watchdog is not None
        self.watchdog.unwatch(self)
        self.await_abort()
        ended = self._end(resources, failed is None)
        resources.in_flight.finish_all(state.error)
        resources.memory.close(ended)
        # If it has not ended, the device may still use them.
        if ended:
            resources.release()
        raised = failed_before is not None and (
            is_delivered(failed_before) or not resources.in_flight.lost
        )
        if failed is not None and not raised:
            raise failed.with_traceback(None) from None

    def _drain(self, in_flight: InFlight) -> None:
        """Wait until nothing is in flight or the group has failed; the watchdog fails it at an
        operation's deadline."""
        if in_flight.drain(time.monotonic() + _WARNING_S) or self._state.error is not None:
            return
        departed = (
            self._context.job.control.departed if self._context.job.control is not None else {}
        )
        gone = "".join(f"; {departed[rank]}" for rank in self._context.ranks if rank in departed)
        self._log.warning(
            "destroying group %r waits for %s%s", self._context.name, in_flight.describe(), gone
        )
        # At the deadline of an operation the watchdog fails the group, which ends this wait. The
        # additional time is for that. What remains is memory that copies on the program's streams
        # use, of which the watchdog knows no deadline.
        if not in_flight.drain(in_flight.last_deadline + END_S) and self._state.error is None:
            self._state.announce(
                OperationTimeoutError(
                    f"destroying group {self._context.name!r}: the device was not done with"
                    f" {in_flight.describe()} by their deadlines",
                    group=self._context.name,
                )
            )

    def _end(self, resources: GroupResources, clean: bool) -> bool:
        """End the communicator; False if it has not ended: the device may still use the group's
        memory."""
        context, comm = self._context, resources.comm
        if clean and context.job.exiting and resources.in_flight.recorded:
            # NCCL would wait until the graphs are deleted, and the program keeps them.
            return False
        # A thread may be in the library for a call. NCCL does not allow that its communicator is
        # ended meanwhile.
        locked = self._lock.acquire(timeout=END_S)
        try:
            if not locked:
                self._log.error(
                    "group %r is not ended: a thread is in %s", context.name, comm.library.name
                )
                return False
            if not clean:
                # Without an abort NCCL would wait for the other ranks, of which some may be gone.
                return comm.abort()
            # This comes before the end of the communicator, with which its registrations become
            # invalid.
            resources.memory.deregister()
            if comm.finish():
                return True
            if resources.in_flight.recorded:
                self._log.error(
                    "%s graphs with operations of group %r have to be deleted before it",
                    comm.runtime.name,
                    context.name,
                )
            return False
        finally:
            if locked:
                self._lock.release()
