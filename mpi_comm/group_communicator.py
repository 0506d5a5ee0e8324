"""A group's communicator: MPI's collectives, waits with deadlines, and failure of the group.

Every collective begins with an agreement of the ranks on their calls
(:mod:`mpi_comm.call_agreement`).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any, NoReturn

from mpi_comm.call_agreement import CallAgreement
from mpi_comm.runtime.communicators import WorldRanks
from unicoll.arrays.kernels import Flat, quiet_runner
from unicoll.backend import Call, operation_errors
from unicoll.backend.group_state import TICK_S, GroupState
from unicoll.calls.options import as_options
from unicoll.errors import DistError, OperationTimeoutError, RankLostError
from unicoll.process import logs
from unicoll.process.timeouts import backoff

log = logs.logger("mpi")

HEADER_TAG, COLLECTIVE_TAG, AGREEMENT_TAG, PAYLOAD_TAGS = 0, 1, 2, 3
"""Tags in a group's communicator: headers of messages, chunks of collectives, agreements, the first
tag of payloads."""

_GRACE_S = 0.5
"""How long messages that a departed rank has sent may take to arrive."""
_NOTICE_S = 0.5
"""How long the notice of a rank's death may take to arrive, once MPI has reported an error."""
_SPINS, _FEW_SPINS = 400, 16
"""How often a rank polls before it yields its core between polls; the latter in the background, and
if cores are oversubscribed."""
_SPIN_S = 0.005
"""How long it polls without a pause."""
_SHORTEST_S, _LONGEST_S = 2e-5, 1e-3

_FASTER_BLOCKING = frozenset(("Reduce_scatter", "Reduce_scatter_block"))
"""Collectives whose nonblocking versions are ten times slower in MPICH. (The choice must be equal
on all ranks.)"""
_FUNCTIONS = (
    "Bcast",
    "Allreduce",
    "Reduce",
    "Allgather",
    "Allgatherv",
    "Gather",
    "Gatherv",
    "Scatter",
    "Scatterv",
    "Reduce_scatter",
    "Reduce_scatter_block",
    "Scan",
    "Exscan",
    "Alltoall",
    "Alltoallv",
    "Send",
    "Recv",
)


class GroupCommunicator:
    """The MPI communicator of a group, with the state of the collective in progress.

    Args:
        state: of the group, which has more than one rank.
        members: the job's ranks as processes of MPI_COMM_WORLD.

    Attributes:
        state: as above.
        context: the group.
        oversubscribed: True if a host has more ranks of the group than cores.
        requires_blocking: True if the collective in progress needs MPI's blocking collectives, on
            all ranks.
        in_order: True if reductions are in rank order (``deterministic``).
        agreement: the comparison of the ranks' calls.
        reduction_methods: cache of :mod:`mpi_comm.reductions`.
        small_calls: cache of :mod:`mpi_comm.small_arrays`, by signature.
        ignoring_fp_errors: calls a function without NumPy's floating-point warnings; not nested.
        in_mpi_since: when MPI was entered, where a call cannot be cancelled (``time.monotonic()``);
            0.0 if it was not.
        in_background: True if the collective in progress is asynchronous.
        abandoned_seq: sequence number of a collective that is stuck inside MPI, or 0.
    """

    def __init__(self, state: GroupState, members: WorldRanks) -> None:
        self.state = state
        self.context = context = state.context
        self.rank = context.rank
        self.size = context.size
        self.mpi = members.mpi
        self.oversubscribed = members.oversubscribed(context)
        self._use_blocking = members.uses_blocking(context)
        self.requires_blocking = False
        # A blocking collective polls without yielding its core. Where one thread makes all calls of
        # MPI, or MPI holds a lock meanwhile, it also keeps this process's other groups from calling
        # MPI.
        self._may_block = not (
            self.oversubscribed or members.single_threaded or self.mpi.blocking_excludes_threads
        )
        self.in_order = as_options(context.options).in_order
        self.reduction_methods: dict[Any, Any] = {}
        self.small_calls: dict[int, Any] = {}
        self.ignoring_fp_errors = quiet_runner()
        self.in_mpi_since = 0.0
        self.in_background = False
        self.abandoned_seq = 0
        self._blocks_in_mpi = False
        self.spins = range(0)
        self._last_tick = 0.0
        self._departure_seen = 0.0
        self._closed = False
        # True once chunks of a failed call may be left in the communicator. It is kept then: they
        # could arrive in the next communicator that MPI gives the same context.
        self._keeps = False
        control = context.job.control
        # Registered before the communicator is created, so that another rank's failure ends the
        # waits in the creation. It sets the error only: every wait looks at it in tick(), and
        # messages end in their engine's next check.
        if control is not None:
            control.watch(context.name, context.backend, state.abort, state.report)
        # The creation calls wait(), which needs the state that is set up to there.
        self._set_wait_mode(False)
        self._activity = f"creating group {context.name!r}"
        self._creation_timeout = context.timeout
        self._start_clock()
        try:
            self.comm = members.communicator(context, self.wait)
        except BaseException:
            # There will be no backend whose close() ends the registration.
            if control is not None:
                control.unwatch(context.name, context.backend)
            raise
        self._activity = f"group {context.name!r}"
        self._blocking = {name: getattr(self.comm, name) for name in _FUNCTIONS}
        self._nonblocking = {name: getattr(self.comm, f"I{name.lower()}") for name in _FUNCTIONS}
        self.agreement = CallAgreement(self, AGREEMENT_TAG)

    # --- one operation ----------------------------------------------------------------------------

    def begin(self, call: Call, in_background: bool) -> None:
        """Start an operation. Its deadline is computed at its first wait."""
        state = self.state
        if state.error is not None:
            state.check()
        state.call = call
        state.deadline = 0.0
        if in_background is not self.in_background:
            self._set_wait_mode(in_background)

    def _set_wait_mode(self, in_background: bool) -> None:
        """Set how to wait: asynchronous operations block in MPI, without the GIL, unless cores are
        oversubscribed."""
        self.in_background = in_background
        self._blocks_in_mpi = (
            in_background and not self.oversubscribed and self.mpi.mpi_thread is None
        )
        self.spins = range(_FEW_SPINS if self.oversubscribed or in_background else _SPINS)

    def mismatch(self, peer: int, seq: int, reason: str = "") -> NoReturn:
        """Raise the error of calls that differ: rank 0 writes it, the other ranks wait for it."""
        if self.state.error is None:
            self.await_agreed_error(self.rank == 0)
        self.state.fail_mismatch(peer, seq, reason)

    def await_agreed_error(self, writes: bool) -> None:
        """Unless this rank ``writes`` the error, wait up to 3 s for the rank that does, and raise
        its error."""
        control = self.context.job.control
        if not writes and control is not None:
            agreed_error = control.group_failure(self.context.name, 3.0)
            if agreed_error is not None:
                self.state.fail(agreed_error)

    # --- MPI's collectives ------------------------------------------------------------------------

    def execute(self, name: str, *args: Any) -> None:
        """Call one of the communicator's methods, and return when it is complete.

        It may block inside MPI, where it cannot be cancelled; so all ranks must have agreed before.
        """
        if (
            self._use_blocking
            or self.requires_blocking
            or (self._may_block and name in _FASTER_BLOCKING)
        ):
            # The watchdog reads this on its thread. It is set before MPI is entered, since the call
            # may not return, and taken back also after an error, since a stale time would end a
            # later call.
            self.in_mpi_since = time.monotonic()
            try:
                self._blocking[name](*args)
            finally:
                self.in_mpi_since = 0.0
        elif self._blocks_in_mpi:
            # The start returns at once: only Wait() can stay inside MPI.
            request = self._nonblocking[name](*args)
            self.in_mpi_since = time.monotonic()
            try:
                request.Wait()
            finally:
                self.in_mpi_since = 0.0
        else:
            self.complete(self._nonblocking[name], args)

    def complete(self, start: Callable[..., Any], args: tuple[Any, ...]) -> None:
        """Start a request, on a thread that may call MPI, and return when it is complete."""
        mpi_thread = self.mpi.mpi_thread
        if mpi_thread is None:
            try:
                self.wait(start(*args))
            except BaseException:
                # A signal's handler may raise before wait() has the request. Nothing else refers to
                # the request and its arrays, and MPI may be using them.
                self.mpi.abandoned.append(args)
                raise
        else:
            # If tick() raises, the request stays with the MPI thread, which goes on testing it and
            # keeps its arrays alive.
            self._start_clock()
            mpi_thread.complete(start, args, self.tick)

    def chunks(self, flat: Flat) -> list[Flat]:
        """Chunks of an array, each small enough for MPI's counts: usually the array itself."""
        # Sender and receiver cut an array at the same elements, so that their chunks match in
        # order.
        limit = self.mpi.largest_count
        return (
            [flat]
            if flat.size <= limit
            else [flat[i : i + limit] for i in range(0, flat.size, limit)]
        )

    def exchange(
        self, dest: int, outgoing: Flat, source: int, incoming: Flat, mpi_type: Any
    ) -> None:
        """Send to one rank while receiving from another (or the same)."""
        call, comm = self.mpi.call, self.comm
        requests: list[Any] = []
        try:
            # All requests are started before the first wait: ranks that send to each other would
            # otherwise wait for each other's receives.
            for chunk in self.chunks(incoming):
                requests.append(call(comm.Irecv, [chunk, mpi_type], source, COLLECTIVE_TAG))
            for chunk in self.chunks(outgoing):
                requests.append(call(comm.Isend, [chunk, mpi_type], dest, COLLECTIVE_TAG))
            for request in requests:
                self.wait(request)
        except BaseException:
            # MPI may still write one array and read the other. Chunks that arrive later find no
            # receive of this call, so the communicator is not freed.
            self.mpi.abandoned.append((requests, incoming, outgoing))
            self._keeps = True
            raise

    # --- waiting ----------------------------------------------------------------------------------

    def wait(self, request: Any) -> None:
        """Return when a request is complete.

        Raises:
            DistError: the wait was given up; the request and its arrays are kept alive for MPI.
        """
        test = request.Test
        mpi_thread = self.mpi.mpi_thread
        if mpi_thread is not None:
            test = lambda: mpi_thread.call(request.Test)  # noqa: E731
        try:
            # Most waits end within these polls, so these look neither at the clock nor at the
            # group's error.
            for _ in self.spins if mpi_thread is None else ():
                if test():
                    return
            self._poll_until(test)
        except BaseException:
            # MPI uses the arrays until the request is complete, which no thread tests any more. The
            # list keeps them until the process ends.
            self.mpi.abandoned.append(request)
            raise

    def _poll_until(self, test: Callable[[], bool]) -> None:
        if not self.state.deadline:
            self._start_clock()
        spin_until = time.monotonic() + (_SPIN_S if not self.in_background else _SPIN_S / 10)
        while not test():
            # The peer may be waiting for this core, also behind other programs. Without the yield
            # an all_reduce of 8 bytes beside ten busy processes on two cores took six times as long
            # with Open MPI.
            os.sched_yield()
            self.state.check()
            if time.monotonic() > spin_until:
                break
        else:
            return
        pauses = backoff(_SHORTEST_S, _LONGEST_S, 1.2)
        while not test():
            time.sleep(next(pauses))
            self.tick()

    def _start_clock(self) -> None:
        self._last_tick = time.monotonic()
        call = self.state.call
        timeout = call.timeout if call is not None else self._creation_timeout
        self.state.deadline = self._last_tick + timeout
        self._departure_seen = 0.0

    def tick(self) -> None:
        """While waiting: raise if the group has failed, a rank has departed or the deadline has
        passed."""
        # The error is looked at in each call, since that costs little. The clock and the control
        # plane are asked ten times a second.
        self.state.check()
        now = time.monotonic()
        if now - self._last_tick < TICK_S:
            return
        self._last_tick = now
        self._check_departures(now)
        if now >= self.state.deadline:
            self.state.fail(self._timed_out())

    def departed_member(self) -> int | None:
        """Group rank of a rank that has departed, or None."""
        control = self.context.job.control
        if control is None or not control.departed:
            return None
        return next((i for i, r in enumerate(self.context.ranks) if r in control.departed), None)

    def _check_departures(self, now: float) -> None:
        peer = self.departed_member()
        if peer is None:
            return
        if not self._departure_seen:
            self._departure_seen = now
        elif now - self._departure_seen > _GRACE_S:
            self.state.fail(self.lost_error(peer))

    def await_departure_notice(self) -> int | None:
        """After an MPI error: group rank of a rank whose departure explains it; None if there is
        none within 0.5 s."""
        deadline = time.monotonic() + _NOTICE_S
        while (peer := self.departed_member()) is None and time.monotonic() < deadline:
            time.sleep(0.01)
        return peer

    def lost_error(self, peer: int) -> DistError:
        """The error of a rank that has departed."""
        control = self.context.job.control
        assert control is not None
        reason = control.departed[self.context.ranks[peer]]
        # Read once: the call may end on its thread while the watchdog is here.
        call = self.state.call
        if call is not None:
            return operation_errors.rank_lost_error(self.context, call, peer, reason)
        rank = self.context.ranks[peer]
        return RankLostError(f"{self._activity}: {reason}", group=self.context.name, rank=rank)

    def _timed_out(self) -> DistError:
        call = self.state.call
        if call is not None:
            return operation_errors.timeout_error(self.context, call)
        return OperationTimeoutError(
            f"{self._activity} of ranks {list(self.context.ranks)}: not all ranks have entered it"
            f" after {self._creation_timeout:g} s",
            group=self.context.name,
        )

    def close(self, stuck_in_mpi: bool, failed: bool) -> None:
        """Free the communicator, unless requests are pending in it.

        Args:
            stuck_in_mpi: an operation is stuck inside MPI on another thread.
            failed: the group had failed before.
        """
        if self._closed:
            return
        self._closed = True
        agreement = self.agreement
        # Free() is a call of MPI. It is not made while another thread may be stuck in one, nor if
        # the one thread that may call MPI has failed.
        can_call = not stuck_in_mpi and not self._keeps and self.mpi.callable
        if not can_call or ((failed or agreement.pending) and not agreement.complete_pending()):
            # Members may be in an agreement that others have not started, and MPI may be using its
            # memory. So communicator and memory are kept for the rest of the process.
            self.mpi.abandoned.append((self.comm, *agreement.memory))
            return
        agreement.free()
        try:
            self.mpi.call(self.comm.Free)
        except self.mpi.MPI.Exception as e:
            # MPICH refuses to free a communicator with a message that was not received.
            log.debug("the communicator of group %r is kept: %s", self.context.name, e)
            self.mpi.abandoned.append(self.comm)
