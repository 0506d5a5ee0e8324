"""What watches a group of NCCL: operations that have ended, deadlines, deaths, NCCL's own errors, and its end."""

from __future__ import annotations

import threading
import time
from collections import defaultdict, deque
from functools import partial
from typing import Any

from unicoll import streams
from unicoll.backend import Backend, Call, Context
from unicoll.errors import DistError, GroupAbortedError, OperationTimeoutError, RankLostError
from unicoll.observe import inquest
from unicoll.streams import naps

from . import library
from .api import IN_PROGRESS, SUCCESS, Nccl
from .communicator import Communicator
from .flights import EventCache, Flight
from .memory import SymmetricMemory
from .registration import Registered
from .watchdog import Watchdog

__all__ = ["Supervised"]

_turns: defaultdict[int, threading.RLock] = defaultdict(threading.RLock)
"""By device: whose turn it is to put operations there. NCCL forbids two threads to do so at once, whatever groups."""
_DRAIN_S = 5.0
_END_S = 20.0
_POLITE_S = 1.0


class Supervised(Backend):
    """A group's operations in flight, and its end; :class:`nccl_comm.backend.NCCLBackend` puts them there.

    Attributes:
        context: the group.
        nccl, cuda: the libraries.
        flights: what is on its way, in the order in which it was put there.
        error: what ended the group, or None.
    """

    def __init__(self, context: Context) -> None:
        self.context = context
        self.nccl: Nccl = library.nccl()
        self.cuda = streams.cuda()
        self.events = EventCache(self.cuda)
        self.flights: deque[Flight] = deque()
        self.error: DistError | None = None
        self._lock = threading.RLock()
        self._turn = threading.RLock()  # of the group's device, once that is known
        self._comm: Communicator | None = None
        self._stream = 0  # of asynchronous operations
        self._given: list[tuple[Any, int]] = []  # how to give back what the group holds on the device
        self.kept: deque[tuple[int, tuple[Call, ...]]] = deque()  # events, and the arrays that are held until then
        self._last: Flight | None = None
        self._inside: Call | None = None  # the call that a thread is in NCCL with
        self._seen: tuple[Call | None, float] = None, 0.0  # what the watchdog last saw there, and since when
        self._closed = False
        self._ending_lock = threading.Lock()
        self._ending: threading.Event | None = None  # set when an abort has been done
        self._symmetric: SymmetricMemory | None = None
        self._reaping = False
        self._registered: list[Registered] = []
        self._clocking = threading.Lock()
        self._abandoned: list[tuple[Call, ...]] = []  # what NCCL could not stop: their arrays stay
        self._watchdog: Watchdog | None = None
        if context.job.control is not None:
            context.job.control.watch(context.name, self.abort, self._report)

    def _supervise(self, device: int) -> None:
        """The group has connected: look after it from now on."""
        self._turn = _turns[device]
        self._watchdog = self.context.job.shared("nccl-watchdog", Watchdog)
        self._watchdog.watch(self)

    def _look(self, call: Call | None) -> None:
        """While NCCL is waited for: has the group failed, is everybody there?"""
        self._refuse_ended()
        self.check_departures(call)

    def _refuse_ended(self) -> None:
        if self.error is not None:
            raise self.error.with_traceback(None) from None

    # --- looking after what is on its way -----------------------------------------------------------------------

    def landed(self, flight: Flight) -> bool:
        """Whether a flight has ended, which one in a graph has as soon as that is recorded; any thread."""
        if flight.done:
            return True
        if flight.captured:
            ended = self._closed or not self.cuda.capturing(self._stream)
        else:
            ended = self.cuda.event_done(flight.event)
        if ended:
            if flight.start:
                self._clock(flight)
            flight.finish(self.error)  # what ends after the group has failed was stopped half-way
        return flight.done

    def _clock(self, flight: Flight) -> None:
        """Note how long a flight took; once, since its events are used again afterwards."""
        with self._clocking:
            if not flight.done and flight.took is None:
                flight.took = self.cuda.elapsed(flight.start, flight.event)

    def hurry(self) -> None:
        """Somebody waits for an end."""
        if self._watchdog is not None:
            self._watchdog.hurry()

    def sweep(self, now: float) -> bool:
        """Let go of what has ended, and find out what has gone wrong; whether somebody waits to be told of an end.

        On the watchdog's thread.
        """
        flights = self.flights
        try:
            while flights and self.landed(flights[0]):
                flight = flights.popleft()
                self.events.give(flight.event)
                if flight.start:
                    self.events.give(flight.start)
            while self.kept and self.cuda.event_done(self.kept[0][0]):
                self.events.give(self.kept.popleft()[0])
            if self.error is None and self._comm is not None:
                if self._symmetric is not None and not self._reaping and self._symmetric.ready:
                    self._reaping = True
                    self._comm.enders.start(self._reap)
                self._examine(now)
        except DistError as e:
            self.fail(e)
        return any(flight.callbacks for flight in list(flights))  # others go on posting meanwhile

    def _reap(self) -> None:
        """Give back symmetric memory, while no other thread is in NCCL; else at a later look."""
        assert self._symmetric is not None
        mine = self._lock.acquire(timeout=_POLITE_S)
        try:
            if mine:
                self._symmetric.reap()
        finally:
            self._reaping = False
            if mine:
                self._lock.release()

    def _examine(self, now: float) -> None:
        assert self._comm is not None
        state = self._comm.state()
        first = self.flights[0] if self.flights else None
        self._look_inside(now)
        if state not in (SUCCESS, IN_PROGRESS):
            call = first.words() if first is not None else None
            self._comm.await_news(state, call)
            raise self._comm.error(state, "an operation in progress", call)
        if first is None:
            return
        self.check_departures(first.words())
        late = next((f for f in list(self.flights) if self._late(f, now)), None)
        if late is not None:
            raise inquest.timed_out(self.context, late.words())

    def _late(self, flight: Flight, now: float) -> bool:
        return now >= flight.deadline and not self.landed(flight)  # one that has ended may be behind one that has not

    def _look_inside(self, now: float) -> None:
        """NCCL connects ranks within their first calls, which can take for ever when one of them is gone."""
        call, since = self._inside, self._seen[1]
        if call is None or call is not self._seen[0]:
            self._seen = call, now
            return
        self.check_departures(call)
        if now - since >= call.timeout:
            raise inquest.timed_out(self.context, call)

    def check_departures(self, call: Call | None) -> None:
        """Raise if a member died: NCCL itself may never notice."""
        context, control = self.context, self.context.job.control
        if control is None:
            return
        for member, rank in enumerate(context.ranks):
            if rank in control.departed and rank not in control.left:
                why = control.departed[rank]
                if call is not None:
                    raise inquest.lost(context, call, member, why)
                raise RankLostError(f"group {context.name!r}, while it connected: {why}", group=context.name, rank=rank)

    # --- ends -----------------------------------------------------------------------------------------------------

    def fail(self, error: DistError) -> None:
        """Tell all members that the group has failed, and end it here."""
        control = self.context.job.control
        if control is not None:
            error = control.fail(self.context.name, self.context.ranks, error)
        self.abort(error)

    def abort(self, error: Exception) -> None:
        cause = inquest.aborted(self.context, error)
        with self._ending_lock:
            if self.error is not None:
                return
            self.error = cause
            if self._comm is None or self._closed:
                return
            comm, self._ending = self._comm, threading.Event()
        comm.enders.start(partial(self._abort, cause, self._ending))

    def _abort(self, cause: DistError, ended: threading.Event) -> None:
        """Stop the device's work, and only then let the arrays go."""
        flights = list(self.flights)
        for flight in flights:
            flight.error = cause
        assert self._comm is not None
        mine = self._lock.acquire(timeout=_POLITE_S)
        try:
            stopped = self._comm.revoke()
            if stopped and not mine:  # a thread was in NCCL, which lets it go now
                stopped = mine = self._lock.acquire(timeout=_END_S)
            stopped = stopped or self._comm.abort()
        finally:
            if mine:
                self._lock.release()
        if not stopped:
            self._abandoned.extend(flight.calls for flight in flights)
        for flight in flights:
            flight.finish(cause)
        ended.set()

    def _stop_ending(self) -> None:
        """Wait for the end of an abort that has begun."""
        with self._ending_lock:
            ending = self._ending
        if ending is not None:
            ending.wait(_END_S)

    def close(self) -> None:
        if self._closed:
            return
        context = self.context
        if context.job.control is not None:
            context.job.control.unwatch(context.name)
        comm = self._comm
        drained = comm is None or self._drain(time.monotonic() + _DRAIN_S)
        with self._ending_lock:
            self._closed = True
            failed, ending = self.error, self._ending
            self.error = failed or GroupAbortedError(f"group {context.name!r} has been destroyed", group=context.name)
        if comm is None:
            return
        assert self._watchdog is not None
        self._watchdog.unwatch(self)
        self._seen = None, 0.0  # it holds the call's arrays
        if ending is not None:
            ending.wait(_END_S)
        free = mine = self._lock.acquire(timeout=_POLITE_S)
        try:
            if not mine and comm.revoke():  # a thread was in NCCL, which lets it go now
                mine = self._lock.acquire(timeout=_END_S)
            whole = failed is None and drained and free
            if whole and self._symmetric is not None:
                self._symmetric.leave()
            for memory in self._registered if whole else ():
                memory.deregister()
            over = comm.finish(_DRAIN_S) if whole else comm.abort()
        finally:
            if mine:
                self._lock.release()
        for flight in self.flights:
            flight.finish(self.error)
        self.flights.clear()
        if self._symmetric is not None:
            self._symmetric.end(over)
        if over:  # else the device may still use them
            for memory in self._registered:
                memory.deregister()
            self.events.close()
            for give_back, handle in self._given:
                give_back(handle)

    def await_idle(self, what: str, timeout: float) -> None:
        """Wait until nothing is under way: NCCL may come to a deadlock where a communicator that works is split."""
        if self._drain(time.monotonic() + timeout):
            return
        self._refuse_ended()
        raise OperationTimeoutError(
            f"{what} waited {timeout:g} s for operations of group {self.context.name!r} to end", group=self.context.name
        )

    def _drain(self, deadline: float) -> bool:
        """Wait for what is on its way; whether all of it has ended."""
        for _ in naps():
            if self.error is not None or time.monotonic() >= deadline:
                break
            ended = all(self.landed(flight) for flight in list(self.flights))
            if ended and all(self.cuda.event_done(event) for event, _ in list(self.kept)):
                return True
        return self.error is None and not self.flights

    def _report(self) -> dict[str, Any]:
        flight = next((f for f in list(self.flights) if not f.done), None)
        last = self._last.words() if self._last is not None else None
        return inquest.report(self._inside or (flight.words() if flight is not None else None), last)
