"""Operations that the device has not finished: the events at their end, and the arrays that they
keep alive."""

from __future__ import annotations

import threading
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Sequence
from itertools import count, islice, takewhile

from unicoll.arrays.conversion import Buffer
from unicoll.backend import Call
from unicoll.backend.group_state import GroupState
from unicoll.calls import flight_recorder
from unicoll.calls.flight_recorder import PendingEntry
from unicoll.device_collectives.stream_order import StreamOrder
from unicoll.devices.device_runtime import (
    LEGACY_STREAM,
    PER_THREAD_STREAM,
    SPIN_S,
    DeviceError,
    DeviceRuntime,
    backoff,
)
from unicoll.errors import DistError

_FINISH_LOCK = threading.RLock()
"""Held for a moment while an operation ends or gets a callback. Reentrant: the garbage collector
may run in between and end other operations."""


next_order = count(1).__next__
"""Numbers in the order in which operations, and waits for them, are put on streams."""
_SHOWN = 4
"""Number of operations in flight that a message names."""
_TOGETHER = 64
"""The largest number of operations that are looked at together."""


# HostCopier has a list of its own in place of this pool, which is for one device, has timing
# events, and destroys the events in use as well.
class EventPool:
    """Events of one device for reuse: creating an event costs more than recording it."""

    def __init__(self, runtime: DeviceRuntime, device: int) -> None:
        self._runtime = runtime
        self._device = device
        self._free: list[int] = []
        self._free_timing: list[int] = []
        self._timing: set[int] = set()
        self._all: list[int] = []

    def take(self, timing: bool = False) -> int:
        """An event that no operation uses; with ``timing`` one that records the device's time."""
        try:
            # There is no lock: the watchdog gives events back while other threads take some, and
            # pop and append of a list are atomic. A test for an event before the pop would not be.
            return (self._free_timing if timing else self._free).pop()
        except IndexError:
            event = self._runtime.create_event(self._device, timing)
            self._all.append(event)
            if timing:
                self._timing.add(event)
            return event

    def release(self, event: int) -> None:
        """Make an event available again."""
        (self._free_timing if event in self._timing else self._free).append(event)

    def close(self) -> None:
        """Destroy all events."""
        events, self._all, self._free, self._free_timing = self._all, [], [], []
        self._timing.clear()
        for event in events:
            self._runtime.destroy_event(event)


class EnqueuedCall(Call):
    """The first call of a batch that is on a device, without its arrays."""

    __slots__ = ()


class PendingWork:
    """A batch of calls that has been put on a stream.

    Attributes:
        calls: the calls, and with them the arrays; empty once the arrays are no longer needed.
        event: event at the batch's end.
        runs_on: the stream that it is on.
        start: event at its beginning if its duration is measured, else 0.
        seconds: time on the device from beginning to end, once that is measured.
        stream: the arrays' current stream when the batch was posted, after which it is ordered.
        timeout: seconds.
        deadline: on the clock of ``time.monotonic``.
        done: True once the batch has ended, with ``error`` if it failed.
        captured: True if the batch was recorded into a graph, whose events cannot be queried.
        order: when it was put on its stream, by :data:`next_order`.
        waits: the streams that were made to wait for its end, and when.
        first, seq: numbers of its first and last call; 0 if these are messages.
        callbacks: functions to call at the end.
        entries: the calls in the flight recorder.
    """

    __slots__ = (
        "_described",
        "_summary",
        "callbacks",
        "calls",
        "captured",
        "deadline",
        "done",
        "entries",
        "error",
        "event",
        "first",
        "order",
        "runs_on",
        "seconds",
        "seq",
        "site",
        "start",
        "stream",
        "timeout",
        "waits",
    )

    def __init__(
        self,
        calls: tuple[Call, ...],
        event: int,
        runs_on: int,
        stream: int,
        captured: bool,
        start: int = 0,
    ) -> None:
        first = calls[0]
        self.calls = calls
        self.event = event
        self.runs_on = runs_on
        self.start = start
        self.seconds: float | None = None
        self.stream = stream
        self.captured = captured
        self.timeout = first.timeout
        self.deadline = time.monotonic() + first.timeout
        self.done = False
        self.error: BaseException | None = None
        self.callbacks: list[Callable[[], None]] = []
        self.entries: Sequence[PendingEntry] = ()
        self.order = next_order()
        self.waits: tuple[tuple[int, int], ...] = ()
        self.first = first.seq
        self.seq = calls[-1].seq
        self.site = first.site
        self._described: EnqueuedCall | None = None
        buffers = first.inputs or first.outputs
        array = (buffers[0].dtype, buffers[0].shape) if buffers else None
        self._summary = (first.op, array, first.reduce, first.root, first.peer)

    def release(self) -> None:
        """Drop the references to the arrays."""
        self.calls = ()

    def describe_call(self) -> EnqueuedCall:
        """The first call without its arrays, for error messages; always the same object."""
        call = self._described
        if call is None:
            op, array, reduce, root, peer = self._summary
            buffers = (Buffer(None, *array, None, count=0),) if array is not None else ()
            call = EnqueuedCall(op, buffers, buffers, self.timeout, reduce, root, peer)
            call.seq, call.site = self.seq, self.site
            self._described = call
        # The place of a blocking call is in the flight recorder only, once the library has it.
        call.site = call.site or (self.entries[0].site if self.entries else "")
        return call

    def track(self, entries: Sequence[PendingEntry]) -> None:
        """Mark the entries as ended when the watchdog, or a thread that waits, has noticed the
        end."""
        with _FINISH_LOCK:
            # With the lock either finish() finds the entries, or `done` is set here already, and
            # this function ends them.
            self.entries = (*self.entries, *entries)
            # The watchdog does not see the runs of a graph, so nothing would end the entries later.
            done = self.done or self.captured
        for entry in entries:
            entry.release()
        flight_recorder.start(entries, time.monotonic())
        if done:
            flight_recorder.end(entries, self.error)

    def add_callback(self, fn: Callable[[], None]) -> bool:
        """Have ``fn`` called at the end; False if the batch has ended, and ``fn`` is not called."""
        with _FINISH_LOCK:
            if not self.done:
                self.callbacks.append(fn)
            return not self.done

    def finish(self, error: BaseException | None = None) -> None:
        """End the batch and release the arrays; only the first call has an effect."""
        with _FINISH_LOCK:
            if self.done:
                return
            # The error comes before `done`: other threads read both without the lock, and in the
            # opposite order.
            self.error = self.error or error
            self.done = True
        # The lock is not held here: dropping the last reference to an array may free its memory,
        # which can wait for the device.
        self.release()
        flight_recorder.end(self.entries, self.error)

    def run_callbacks(self) -> None:
        """Call the callbacks that no thread has called; the batch has ended."""
        with _FINISH_LOCK:
            # Two threads may be here. The one that takes the list calls the callbacks, without the
            # lock, since they are functions of the user.
            callbacks, self.callbacks = self.callbacks, []
        for callback in callbacks:
            callback()


class InFlight:
    """The operations that a group has put on its device and that have not ended.

    Args:
        sweep_often: makes the watchdog sweep more often, since a callback is pending.

    Attributes:
        operations: in the order of posting; the watchdog alone removes those that have ended.
        issuing: the call with which a thread is in the library, and its deadline, or None.
        begun: the calls that a thread is putting on a stream. An exception may end that before they
            are an operation: their arrays are kept here then, since the device may use them.
        last: the last collective posted, or None.
        recorded: True if graphs have operations of the group.
        lost: the operations that the group's failure has stopped, for messages; "" if none.
    """

    def __init__(
        self,
        runtime: DeviceRuntime,
        device: int,
        stream: int,
        state: GroupState,
        streams: StreamOrder,
        sweep_often: Callable[[], None],
    ) -> None:
        self.operations: deque[PendingWork] = deque()
        self.issuing: tuple[Call, float] | None = None
        self.begun: tuple[Call, ...] = ()
        self.last: PendingWork | None = None
        self.recorded = False
        self.lost = ""
        self.streams = streams
        self.sweep_often = sweep_often
        self._runtime = runtime
        self._stream = stream
        self._state = state
        self._events = EventPool(runtime, device)
        self._retained: deque[tuple[int, float, tuple[Call, ...]]] = deque()
        self._measure_lock = threading.Lock()
        # Held while events are queried by threads that do not know whether the group is being
        # destroyed, and its events with it.
        self._query_lock = threading.Lock()
        self._closed = False

    @property
    def frees_in_order(self) -> bool:
        """As of the device's runtime."""
        return self._runtime.frees_in_order

    # --- posting ----------------------------------------------------------------------------------

    def record_start(self, call: Call) -> int:
        """An event before what is put on the group's stream next, if the call's duration is
        measured; else 0."""
        if not call.timed:
            return 0
        start = self._events.take(timing=True)
        self._runtime.record(start, self._stream)
        return start

    def add(
        self, calls: tuple[Call, ...], stream: int, current: int, captured: bool, start: int = 0
    ) -> PendingWork:
        """Record an event behind what was just put on ``stream``, and keep the arrays until it is
        done."""
        event = self._events.take(timing=start != 0)
        self._runtime.record(event, stream)
        work = PendingWork(calls, event, stream, current, captured, start)
        if work.first:
            self.last = work
        if captured:
            self.recorded = True
        else:
            # An operation in a graph is not listed: the user keeps its arrays, and its events
            # cannot be queried.
            self.operations.append(work)
        # This comes last: until the operation is listed, only this attribute keeps the arrays if an
        # exception comes.
        self.begun = ()
        return work

    def retain(self, calls: tuple[Call, ...], stream: int) -> None:
        """Keep the arrays until all work now on ``stream`` is done; not under capture: the user
        keeps a graph's."""
        with self.streams.device_context(stream):
            if stream > LEGACY_STREAM and self._runtime.capturing(stream):
                return
            event = self._events.take()
            self._runtime.record(event, stream)
        self._retained.append((event, time.monotonic() + calls[0].timeout, calls))

    # --- ends -------------------------------------------------------------------------------------

    def is_done(self, work: PendingWork) -> bool:
        """True if an operation has ended; one in a graph has ended once the graph is recorded. Any
        thread."""
        # This comes before the query of the event: the watchdog reuses the event of an operation
        # that has ended. If that happens between this test and the query, the query is about
        # another operation; so the result is `work.done` again, and not that of the query.
        if work.done:
            return True
        if work.captured:
            ended = self._state.closed or not self._runtime.capturing(self._stream)
        else:
            ended = self._runtime.event_done(work.event)
        if ended:
            self._end(work)
            # The callbacks of other operations run on the watchdog's thread (reap), where no
            # exception of a signal's handler can end them. The watchdog does not see an operation
            # that was recorded into a graph.
            if work.captured:
                work.run_callbacks()
        return work.done

    def _end(self, work: PendingWork) -> None:
        """Mark an operation as ended."""
        if work.start:
            self._measure(work)
        # An operation that ends after the group has failed is incomplete, though its event has
        # completed.
        work.finish(self._state.error)

    def _measure(self, work: PendingWork) -> None:
        """Set the duration, once: the events are reused afterwards."""
        with self._measure_lock:
            # The watchdog gives the events back only after its own call of this function, which
            # waits for the lock. So the events are this operation's here.
            if not work.done and work.seconds is None:
                work.seconds = self._runtime.elapsed(work.start, work.event)

    def reap(self) -> list[tuple[Call, ...]]:
        """Remove the operations that have ended; on the watchdog's thread.

        The calls are returned, with the arrays that nothing else may keep alive: the caller drops
        them.
        """
        operations, retained = self.operations, self._retained
        dropped: list[tuple[Call, ...]] = []
        while operations and self._has_ended(operations[0]):
            some = self._on_one_stream()
            ended = bisect_left(some, True, lo=1, key=lambda work: not self._has_ended(work))
            for work in some[:ended]:
                # The calls are taken before the operation ends, which empties `calls`. The caller
                # has another thread drop the arrays: the memory of the last reference may be freed,
                # which can wait for the device.
                dropped.append(work.calls)
                self._end(work)
                work.run_callbacks()
                # This thread alone removes operations; other threads append at the other end
                # meanwhile.
                operations.popleft()
                self._events.release(work.event)
                if work.start:
                    self._events.release(work.start)
        while retained and self._runtime.event_done(retained[0][0]):
            event, _, calls = retained.popleft()
            self._events.release(event)
            dropped.append(calls)
        return dropped

    def _on_one_stream(self) -> list[PendingWork]:
        """The first operations, which end in their order because they are on one stream.

        So few of their events are queried: at each query the interpreter's lock changes hands, and
        the thread that posts operations waits for it.
        """
        first = self.operations[0]
        # The handle of the per-thread default stream means another stream on each thread.
        if first.runs_on == PER_THREAD_STREAM:
            return [first]
        stream = first.runs_on
        # The deque is copied by one function of C, because other threads append meanwhile.
        return list(
            takewhile(lambda work: work.runs_on == stream, list(islice(self.operations, _TOGETHER)))
        )

    def _has_ended(self, work: PendingWork) -> bool:
        return work.done or self._runtime.event_done(work.event)

    @property
    def has_callbacks(self) -> bool:
        """True if callbacks are pending."""
        # The deque is copied, because other threads append meanwhile.
        return any(work.callbacks for work in list(self.operations))

    def overdue(self, now: float) -> PendingWork | None:
        """An operation whose deadline has passed."""
        return next((work for work in list(self.operations) if self._is_overdue(work, now)), None)

    def _is_overdue(self, work: PendingWork, now: float) -> bool:
        # An operation that has ended may be behind one that has not, on another stream; it is not
        # late.
        return now >= work.deadline and not self._has_ended(work)

    def running(self) -> list[PendingWork]:
        """The operations that have not ended now, of which none is marked as ended: arrays are
        dropped then, which the calling thread (the wait monitor's, the control thread) may not wait
        for."""
        with self._query_lock:
            operations = [] if self._closed else list(self.operations)
            try:
                found = [w for w in operations if not (w.done or self._runtime.event_done(w.event))]
            except DeviceError:
                # The device's context has ended, and with it all operations.
                return []
        # The watchdog may have reused the event of an operation that has ended meanwhile.
        return [work for work in found if not work.done]

    def first_pending(self) -> PendingWork | None:
        """The first operation that has not been marked as ended."""
        return next((work for work in list(self.operations) if not work.done), None)

    def drain(self, deadline: float) -> bool:
        """Block the host until all operations have ended, the group fails or the deadline passes;
        True if all have."""
        for _ in backoff():
            # The group's failure ends the wait at once: a stopped operation needs no wait, and one
            # that cannot be stopped never ends.
            if self._state.error is not None:
                break
            ended = self.issuing is None and all(
                self.is_done(work) for work in list(self.operations)
            )
            if ended and all(
                self._runtime.event_done(event) for event, _, _ in list(self._retained)
            ):
                return True
            if time.monotonic() >= deadline:
                break
        return False

    @property
    def last_deadline(self) -> float:
        """The deadline of the operation, or of the retained arrays, that has the latest one."""
        issuing = self.issuing
        deadlines = [work.deadline for work in list(self.operations)]
        deadlines += [deadline for _, deadline, _ in list(self._retained)]
        return max([*deadlines, issuing[1] if issuing is not None else 0.0])

    def fail(self, cause: BaseException) -> list[PendingWork]:
        """The group has failed, and nothing has been stopped yet: return the operations, which get
        the error.

        Only those that the device has not done are lost. An error of the device, too, leaves that
        unknown.
        """
        operations = list(self.operations)
        try:
            # This is asked before the library stops them, because the events of stopped operations
            # complete as well.
            lost = not all(map(self._has_ended, operations))
        except DistError:
            lost = True
        self.lost = self.describe() if lost else "operations in graphs" if self.recorded else ""
        for work in operations:
            work.error = cause
        return operations

    def describe(self) -> str:
        """The operations in flight, for messages."""
        calls: list[Call] = [w.describe_call() for w in list(self.operations) if not w.done]
        if (issuing := self.issuing) is not None:
            calls.append(issuing[0])
        shown = [call.describe_with_number() for call in calls[:_SHOWN]]
        more = [f"{len(calls) - _SHOWN} more operations"] if len(calls) > _SHOWN else []
        return ", ".join(shown + more) or "kernels that use arrays of ended operations"

    def synchronize(self, stream: int) -> None:
        """Block the host until all work on a stream is done, or raise the group's error."""
        for _ in backoff(SPIN_S):
            if self.streams.done(stream):
                break
            self._state.check()

    def finish_all(self, error: BaseException | None) -> None:
        """End all operations and remove them."""
        for work in self.operations:
            work.finish(error)
            work.run_callbacks()
        self.operations.clear()

    def close(self) -> None:
        """Destroy the events."""
        with self._query_lock:
            self._closed = True
        self._events.close()
