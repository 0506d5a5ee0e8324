"""Operations that the device has not finished yet: what they keep alive, and how the host learns of their end."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from unicoll.backend import Call
from unicoll.buffers import Buffer
from unicoll.errors import OperationTimeoutError
from unicoll.streams import PER_THREAD_STREAM, SPIN_S, Cuda, naps
from unicoll.work import Completion

__all__ = ["EventCache", "Flight", "StreamCompletion"]


_ENDING = threading.RLock()
"""Held for a moment while a flight ends or is given a callback; garbage that is collected meanwhile may end others."""


class EventCache:
    """Events that are used again: making one costs more than recording it."""

    def __init__(self, cuda: Cuda) -> None:
        self._cuda = cuda
        self._free: list[int] = []
        self._clocks: list[int] = []
        self._timed: set[int] = set()
        self._made: list[int] = []

    def take(self, device: int, timing: bool = False) -> int:
        """An event that stands for nothing any more."""
        try:
            return (self._clocks if timing else self._free).pop()
        except IndexError:
            event = self._cuda.create_event(device, timing)
            self._made.append(event)
            if timing:
                self._timed.add(event)
            return event

    def give(self, event: int) -> None:
        """The event may be used for something else."""
        (self._clocks if event in self._timed else self._free).append(event)

    def close(self) -> None:
        """Destroy all events."""
        made, self._made, self._free, self._clocks = self._made, [], [], []
        self._timed.clear()
        for event in made:
            self._cuda.destroy_event(event)


class Flight:
    """A batch of calls on its way.

    Attributes:
        calls: the calls, and with them the arrays; empty once the arrays are no longer needed.
        event: stands for the batch's end on the device.
        start: stands for its begin, if its duration was asked for; else 0.
        took: seconds from begin to end, once that is known.
        stream: that the batch is ordered after: the arrays' current one when it was posted.
        deadline: on the clock of ``time.monotonic``.
        done: whether it has ended; ``error`` says whether badly.
        captured: whether it was recorded into a graph, where events may not be asked.
    """

    __slots__ = (
        "_brief", "callbacks", "calls", "captured", "deadline", "done", "error", "event", "seq", "site", "start",
        "stream", "timeout", "took",
    )  # fmt: skip

    def __init__(self, calls: tuple[Call, ...], event: int, stream: int, captured: bool, start: int = 0) -> None:
        first = calls[0]
        self.calls = calls
        self.event = event
        self.start = start
        self.took: float | None = None
        self.stream = stream
        self.captured = captured
        self.timeout = first.timeout
        self.deadline = time.monotonic() + first.timeout
        self.done = False
        self.error: BaseException | None = None
        self.callbacks: list[Callable[[], None]] = []
        self.seq = calls[-1].seq
        self.site = first.site
        buffers = first.inputs or first.outputs
        of = (buffers[0].dtype, buffers[0].shape) if buffers else None
        self._brief = (first.op, of, first.reduce, first.root, first.peer)

    def release(self) -> None:
        """Keep the arrays alive no longer."""
        self.calls = ()

    def words(self) -> Call:
        """The first call without its arrays, for errors."""
        op, of, reduce, root, peer = self._brief
        buffers = (Buffer(None, *of, None, count=0),) if of is not None else ()
        call = Call(op, buffers, buffers, self.timeout, reduce, root, peer)
        call.seq, call.site = self.seq, self.site
        return call

    def finish(self, error: BaseException | None = None) -> None:
        """It has ended: the arrays go, and whoever asked is told."""
        with _ENDING:
            if self.done:
                return
            self.error = self.error or error
            self.done = True
            callbacks, self.callbacks = self.callbacks, []
        self.release()
        for callback in callbacks:
            callback()


class Tower(Protocol):
    """Who looks after the flights of a group."""

    def hurry(self) -> None:
        """Somebody waits for an end: look more often."""

    def order(self, stream: int, event: int) -> None:
        """Let a stream wait for an event."""

    def settle(self, stream: int) -> None:
        """Block the host until all that is on a stream has been done."""

    def landed(self, flight: Flight) -> bool:
        """Whether a flight has ended on the device, or its recording has; ends it if so."""

    def keep(self, calls: tuple[Call, ...], stream: int) -> None:
        """Hold the arrays until all that is on a stream now has been done."""


class StreamCompletion(Completion):
    """A completion that the device finishes: ``wait`` orders streams, and only ``synchronize`` blocks the host."""

    __slots__ = ("_blocking", "_calls", "_flight", "_heres", "_packed", "_tower")

    def __init__(self, tower: Tower, flight: Flight, blocking: bool = False) -> None:
        self._blocking = blocking
        self._tower = tower
        self._flight = flight
        self._heres = _currents(flight.calls)
        self._packed = any(b.unpack is not None for call in flight.calls for b in call.outputs)
        self._calls = flight.calls if self._packed else ()

    def done(self) -> bool:
        flight = self._flight
        return flight.done or flight.error is not None or self._tower.landed(flight)

    def exception(self) -> BaseException | None:
        return self._flight.error

    @property
    def recorded(self) -> bool:
        return self._flight.captured

    def took(self) -> float:
        return self._flight.took or 0.0

    def wait(self, timeout: float | None) -> None:
        """Let the current stream of each array library wait; with a ``timeout`` block the host as well."""
        flight = self._flight
        if flight.error is not None:
            raise flight.error
        same = not self._blocking
        for here in self._heres:
            stream = here()
            if not flight.done:
                self._order(stream)
            # the default stream of another thread is another stream
            same = same and stream == flight.stream != PER_THREAD_STREAM
        if self._packed:
            calls = self._calls
            self._unpack()
            if not same:  # the copies may outlast the batch
                for here in self._heres:
                    self._tower.keep(calls, here())
        if same:
            flight.release()  # whatever reuses the memory on this stream comes after the batch
        if timeout is not None or self._blocking:
            self._block(timeout)

    def _order(self, stream: int) -> None:
        """Let a stream wait for the end."""
        self._tower.order(stream, self._flight.event)

    def synchronize(self, timeout: float | None = None) -> None:
        packed = self._packed
        self.wait(None)
        self._block(timeout)
        if packed:
            self._tower.settle(self._heres[0]())

    def _unpack(self) -> None:
        """Copy packed results to where they belong, on the current stream, which waits for them."""
        calls, self._calls, self._packed = self._calls, (), False
        for call in calls:
            call.write_back()

    def _block(self, timeout: float | None) -> None:
        flight = self._flight
        if flight.captured:
            return  # it runs whenever the graph does
        started = time.monotonic()
        for _ in naps(SPIN_S):
            if self.done():
                break
            if timeout is not None and time.monotonic() - started >= timeout:
                call = flight.words()
                raise OperationTimeoutError(
                    f"{call.describe()} #{call.seq} was not done after waiting {timeout:g} s; it goes on",
                    op=call.op.name,
                    seq=call.seq,
                )
        if flight.error is not None:
            raise flight.error

    def add_done_callback(self, fn: Callable[[], None]) -> None:
        flight = self._flight
        with _ENDING:
            done = flight.done
            if not done:
                flight.callbacks.append(fn)
        if done:
            fn()
        else:
            self._tower.hurry()


def _currents(calls: Sequence[Call]) -> tuple[Any, ...]:
    """What tells the current stream of each array library in the calls."""
    found: list[Any] = []
    for call in calls:
        for buffer in (*call.inputs, *call.outputs) if call.inputs is not call.outputs else call.inputs:
            if buffer.here is not None and buffer.here not in found:
                found.append(buffer.here)
    return tuple(found)
