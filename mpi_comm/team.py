"""A group's communicator: agreeing before every collective, waiting with a deadline, and failing together.

Every collective begins with :meth:`Team.agree`: an MPI_Allgather of 24 bytes, kept ready as a persistent request, in
which the ranks compare number, signature and (for all_to_all) sizes of their calls. A rank comes out of it when all
have come. So a call that differs anywhere raises on all ranks before data moves, a rank that is missing is waited for
where the waiting can be given up, and only then is data entrusted to MPI's own collective, which cannot.
"""

from __future__ import annotations

import os
import struct
import time
from collections.abc import Callable
from typing import Any, NoReturn

from unicoll.backend import Call, Context
from unicoll.errors import DistError, OperationTimeoutError, RankLostError
from unicoll.kernels import Flat, Quiet
from unicoll.observe import inquest
from unicoll.options import as_options

from .members import Members

__all__ = ["COLLECTIVE_TAG", "HEADER_TAG", "PAYLOAD_TAGS", "Team"]

HEADER_TAG, COLLECTIVE_TAG, PAYLOAD_TAGS = 0, 1, 2
"""Tags in a group's communicator: headers of messages, pieces of collectives, and the first of those of payloads."""

_HEADER = struct.Struct("<qqq")
_PACK = _HEADER.pack_into
_FEW = 64
"""Ranks up to which each sees all headers; more compare maxima."""
_TICK_S = 0.1
_WARN_S = 15.0
_GRACE_S = 0.5
"""How long what a rank sent before it left may take to arrive."""
_NEWS_S = 0.5
"""How long the news of a death may take, once MPI has noticed it."""
_SPINS, _FEW_SPINS = 400, 16
_EAGER_S = 0.005
"""How long a rank waits without a nap; it gives its core away, if somebody asks for it, where cores are few."""
_SHORTEST_S, _LONGEST_S = 2e-5, 1e-3

_SLOW_UNLESS_BLOCKING = frozenset(("Reduce_scatter", "Reduce_scatter_block"))
"""MPICH's nonblocking ones take ten times as long. (What is chosen here must be equal on all ranks.)"""
_DIRECT = (
    "Bcast", "Allreduce", "Reduce", "Allgather", "Allgatherv", "Gather", "Gatherv", "Scatter", "Scatterv",
    "Reduce_scatter", "Reduce_scatter_block", "Alltoall", "Alltoallv", "Send", "Recv",
)  # fmt: skip


class Team:
    """The members of a group, as one of them sees them.

    Args:
        context: the group, of more than one member.
        members: the job's ranks as MPI's processes.
    """

    def __init__(self, context: Context, members: Members) -> None:
        self.context = context
        self.rank = context.rank
        self.size = context.size
        self.mpi = members.mpi
        self.error: DistError | None = None
        self.call: Call | None = None
        self.last: Call | None = None
        self.crowded = members.crowded(context)
        self._direct = members.blocks(context)
        self.must_block = False  # whether the call that has begun is one for blocking collectives alone, on all ranks
        self._may_block = not (self.crowded or members.owned)
        self.in_order = as_options(context.options).in_order
        self.ways: dict[Any, Any] = {}  # how each kind of reduction is done
        self.quietly = Quiet()  # where our kernels are at work
        self.inside = 0.0  # since when a call is inside MPI, where it cannot be given up
        self.in_background = False
        self.given_up = 0  # number of a call that is stuck inside MPI
        self._yields = self._waits_inside = False
        self._spins = range(0)
        self._pending = False
        self._deadline = 0.0
        self._started = 0.0
        self._looked = 0.0
        self._missed = 0.0
        self._warned = False
        self._closed = False
        control = context.job.control
        if control is not None:
            control.watch(context.name, self.abort, self.report)
        self._take_manners(False)
        self._doing = f"making group {context.name!r}"
        self._limit = context.timeout
        self._begin_waiting()
        try:
            self.comm = members.communicator(context, self.finish)
        except BaseException:
            if control is not None:
                control.unwatch(context.name)
            raise
        self._blocking = {name: getattr(self.comm, name) for name in _DIRECT}
        self._posting = {name: getattr(self.comm, f"I{name.lower()}") for name in _DIRECT}
        self._prepare_agreement()

    # --- one operation ------------------------------------------------------------------------------------------

    def begin(self, call: Call, in_background: bool) -> None:
        """An operation starts; its deadline runs from here (and is looked at when something has to be waited for)."""
        if self.error is not None:
            raise self.error.with_traceback(None)
        self.call = call
        if self._deadline:
            self._deadline = 0.0
        if in_background is not self.in_background:
            self._take_manners(in_background)

    def _take_manners(self, in_background: bool) -> None:
        """How to wait: in the background without the interpreter's lock, where cores are not short."""
        self.in_background = in_background
        self._waits_inside = in_background and not self.crowded and self.mpi.owner is None
        self._yields = self.crowded or in_background
        self._spins = range(_SPINS if not self._yields else _FEW_SPINS)

    def _prepare_agreement(self) -> None:
        mpi, comm = self.mpi.MPI, self.comm
        self._few = self.size <= _FEW
        if self._few:
            self._mine = bytearray(_HEADER.size)
            self._heard = bytearray(_HEADER.size * self.size)
            arguments: tuple[Any, ...] = ([self._mine, mpi.BYTE], [self._heard, mpi.BYTE])
            ready, start = getattr(comm, "Allgather_init", None), comm.Iallgather
        else:
            self._mine = bytearray(2 * _HEADER.size)
            self._heard = bytearray(2 * _HEADER.size)
            arguments = ([self._mine, mpi.INT64_T], [self._heard, mpi.INT64_T], mpi.MAX)
            ready, start = getattr(comm, "Allreduce_init", None), comm.Iallreduce
        self._kept: Any = None
        try:
            if ready is not None:
                self._kept = self.mpi.call(ready, *arguments)
        except NotImplementedError:  # MPI libraries before MPI 4
            pass
        self._start = self._start_kept if self._kept is not None else lambda: start(*arguments)
        self._quick = self._few and self._kept is not None and self.mpi.owner is None
        if self._quick:
            self._kept_start, self._kept_test = self._kept.Start, self._kept.Test

    def _start_kept(self) -> Any:
        self._kept.Start()
        return self._kept

    def begun(self, call: Call) -> bool:
        """Whether the agreement on a call has begun: then others may have heard of it."""
        seq: int = _HEADER.unpack_from(self._mine)[0]
        return seq == call.seq

    def agree(self, call: Call, sizes: int = 0) -> bool:
        """Return when all ranks are in this call; whether ``sizes`` is the same on all of them, and not negative.

        Raises:
            CollectiveMismatchError: the ranks are in different calls.
        """
        expected = self._mine
        _PACK(expected, 0, call.seq, call.signature, sizes)
        self._pending = True
        if self._quick:
            self._kept_start()
            test = self._kept_test
            for _ in self._spins:
                if test():
                    break
            else:
                self.finish(self._kept)
            expected = expected * self.size
        else:
            if self._few:
                expected = expected * self.size
            else:
                _PACK(expected, _HEADER.size, ~call.seq, ~call.signature, ~sizes)
            self._complete(self._start, ())
        self._pending = False
        if self._heard == expected:
            return sizes >= 0
        return self._compare(call)

    def _compare(self, call: Call) -> bool:
        """The headers differ: if only in their sizes, return False."""
        if not self._few:
            highest, lowest = (_HEADER.unpack_from(self._heard, at) for at in (0, _HEADER.size))
            if (highest[0], highest[1]) == (~lowest[0], ~lowest[1]):
                return False
            self.mismatch(call, -1, 0)
        for peer in range(self.size):
            seq, signature, _ = _HEADER.unpack_from(self._heard, peer * _HEADER.size)
            if (seq, signature) != (call.seq, call.signature):
                self.mismatch(call, peer, seq)
        return False

    def mismatch(self, call: Call, peer: int, seq: int, why: str = "") -> NoReturn:
        """All ranks know; the first one writes the error, the others wait for it."""
        if self.error is None:
            self.await_verdict(self.rank == 0)
        self.fail(self.error or inquest.mismatch(self.context, call, peer, seq, why))

    def await_verdict(self, mine_to_write: bool) -> None:
        """Unless the error is this rank's to write, wait a while for the one who has to, and raise that one's."""
        control = self.context.job.control
        if not mine_to_write and control is not None:
            verdict = control.verdict(self.context.name, 3.0)
            if verdict is not None:
                self.fail(verdict)

    # --- MPI's collectives ----------------------------------------------------------------------------------------

    def do(self, name: str, *args: Any) -> None:
        """Call one of the communicator's methods, and return when it is done.

        Inside MPI, where that is the quicker way, the call cannot be given up; so all ranks must have agreed.
        """
        if self._direct or self.must_block or (self._may_block and name in _SLOW_UNLESS_BLOCKING):
            self.inside = time.monotonic()
            try:
                self._blocking[name](*args)
            finally:
                self.inside = 0.0
        elif self._waits_inside:
            request = self._posting[name](*args)
            self.inside = time.monotonic()
            try:
                request.Wait()
            finally:
                self.inside = 0.0
        else:
            self._complete(self._posting[name], args)

    def _complete(self, start: Callable[..., Any], args: tuple[Any, ...]) -> None:
        """Start a request and return when it is done, on a thread that may."""
        owner = self.mpi.owner
        if owner is None:
            self.finish(start(*args))
        else:
            self._begin_waiting()
            owner.complete(start, args, self.tick)

    def cut(self, flat: Flat) -> list[Flat]:
        """An array in pieces that one call of MPI takes each: itself, unless MPI's counts are too short for it."""
        limit = self.mpi.largest_count
        return [flat] if flat.size <= limit else [flat[i : i + limit] for i in range(0, flat.size, limit)]

    def swap(self, to: int, outgoing: Flat, frm: int, incoming: Flat, kind: Any) -> None:
        """Send to one member while receiving from another (or the same)."""
        call, comm = self.mpi.call, self.comm
        requests = [call(comm.Irecv, [piece, kind], frm, COLLECTIVE_TAG) for piece in self.cut(incoming)]
        requests += [call(comm.Isend, [piece, kind], to, COLLECTIVE_TAG) for piece in self.cut(outgoing)]
        try:
            for request in requests:
                self.finish(request)
        except BaseException:
            self.mpi.left_behind.append(requests)
            raise

    # --- waiting --------------------------------------------------------------------------------------------------

    def finish(self, request: Any) -> None:
        """Return when a request is done.

        Raises:
            DistError: it has been given up; MPI keeps it, and the arrays are kept for MPI.
        """
        test = request.Test
        owner = self.mpi.owner
        if owner is not None:
            test = lambda: owner.call(request.Test)  # noqa: E731
        try:
            for _ in self._spins if owner is None else ():
                if test():
                    return
            self._wait(test)
        except BaseException:
            self.mpi.left_behind.append(request)
            raise

    def _wait(self, test: Callable[[], bool]) -> None:
        if not self._deadline:
            self._begin_waiting()
        eager = time.monotonic() + (_EAGER_S if not self.in_background else _EAGER_S / 10)
        while not test():
            if self._yields:
                os.sched_yield()
            if self.error is not None:
                raise self.error.with_traceback(None)
            if time.monotonic() > eager:
                break
        else:
            return
        nap = _SHORTEST_S
        while not test():
            time.sleep(nap)
            nap = min(1.2 * nap, _LONGEST_S)
            self.tick()

    def _begin_waiting(self) -> None:
        self._started = self._looked = time.monotonic()
        self._deadline = self._started + (self.call.timeout if self.call is not None else self._limit)
        self._missed = 0.0
        self._warned = False

    def tick(self) -> None:
        """While waiting: is the group well, are all alive, and is there time left?"""
        if self.error is not None:
            raise self.error.with_traceback(None)
        now = time.monotonic()
        if now - self._looked < _TICK_S:
            return
        self._looked = now
        self._look_for_departures(now)
        if now >= self._deadline:
            self.fail(self._timed_out())
        if now - self._started > _WARN_S and not self._warned:
            self._warned = True
            if self.call is not None:
                inquest.while_waiting(self.context, self.call, _WARN_S)

    def gone(self) -> int | None:
        """A member, by its rank in the group, that is not there any more."""
        control = self.context.job.control
        if control is None or not control.departed:
            return None
        return next((i for i, r in enumerate(self.context.ranks) if r in control.departed), None)

    def _look_for_departures(self, now: float) -> None:
        peer = self.gone()
        if peer is None:
            return
        if not self._missed:
            self._missed = now
        elif now - self._missed > _GRACE_S:
            self.fail(self.lost(peer))

    def await_the_news(self) -> int | None:
        """After an error of MPI: the member whose death is behind it, by its rank in the group; None if none is."""
        deadline = time.monotonic() + _NEWS_S
        while (peer := self.gone()) is None and time.monotonic() < deadline:
            time.sleep(0.01)
        return peer

    def lost(self, peer: int) -> DistError:
        """The error of a member that is gone."""
        control = self.context.job.control
        assert control is not None
        why = control.departed[self.context.ranks[peer]]
        if self.call is not None:
            return inquest.lost(self.context, self.call, peer, why)
        rank = self.context.ranks[peer]
        return RankLostError(f"{self._doing}: {why}", group=self.context.name, rank=rank)

    def _timed_out(self) -> DistError:
        if self.call is not None:
            return inquest.timed_out(self.context, self.call)
        return OperationTimeoutError(
            f"{self._doing} of ranks {list(self.context.ranks)}: not all had come after {self._limit:g} s",
            group=self.context.name,
        )

    # --- failing --------------------------------------------------------------------------------------------------

    def abort(self, error: DistError) -> None:
        """Make the operation in progress, and all later ones, raise ``error``; any thread."""
        if self.error is None:
            self.error = error

    def fail(self, error: DistError) -> NoReturn:
        """This rank found that the operation cannot succeed: agree on the error with the others, and raise it."""
        if self.error is None:
            control = self.context.job.control
            if control is not None:
                error = control.fail(self.context.name, self.context.ranks, error)
            self.abort(error)
        assert self.error is not None
        raise self.error.with_traceback(None) from None

    def report(self) -> dict[str, Any]:
        """What this rank is doing in the group, for other ranks' errors (called on the control thread)."""
        return inquest.report(self.call, self.last)

    def close(self, lost_in_mpi: bool) -> None:
        """Give the communicator back, unless something is left in it.

        Args:
            lost_in_mpi: an operation is stuck inside MPI on another thread.
        """
        if self._closed:
            return
        self._closed = True
        if lost_in_mpi or not self._settle():
            self.mpi.left_behind.append((self.comm, self._kept, self._mine, self._heard))
            return
        if self._kept is not None:
            self.mpi.call(self._kept.Free)
        self.mpi.call(self.comm.Free)

    def _settle(self) -> bool:
        """After a failure some ranks have begun an agreement that others have not: complete it, if they all close.

        Ranks differ by one agreement at most, because nobody begins one before the last was complete.
        """
        if self.error is None:
            return True
        deadline = time.monotonic() + _GRACE_S
        request = self._kept if self._pending and self._kept is not None else None
        if self._pending and request is None:
            return False
        if request is None:
            request = self.mpi.call(self._start)
        while time.monotonic() < deadline:
            if self.mpi.call(request.Test):
                return True
            time.sleep(_LONGEST_S)
        return False
