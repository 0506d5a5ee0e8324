"""The handle of a posted operation: ``wait`` orders streams, and only ``synchronize`` blocks the
host."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from unicoll.backend import Call
from unicoll.calls.flight_recorder import PendingEntry
from unicoll.calls.thread_activity import NotBlocked, entered
from unicoll.calls.work import Completion
from unicoll.device_collectives.in_flight import InFlight, PendingWork, next_order
from unicoll.devices.device_runtime import PER_THREAD_STREAM, SPIN_S, backoff
from unicoll.errors import OperationTimeoutError


class StreamCompletion(Completion):
    """A completion that the device finishes.

    Args:
        blocking: True if ``wait`` blocks the host as well, as that of a barrier does, and of arrays
            in host memory.
        orders_streams: False for arrays in host memory.

    Attributes:
        work: the operation.
    """

    def __init__(
        self,
        in_flight: InFlight,
        work: PendingWork,
        blocking: bool = False,
        orders_streams: bool = True,
    ) -> None:
        self.orders_streams = orders_streams
        self._blocking = blocking
        self._in_flight = in_flight
        self.work = work
        self._current_streams, self._packed = _streams_and_packing(work.calls)
        self._calls = work.calls if self._packed else ()

    def done(self) -> bool:
        work = self.work
        return work.done or work.error is not None or self._in_flight.is_done(work)

    def exception(self) -> BaseException | None:
        return self.work.error

    @property
    def recorded(self) -> bool:
        return self.work.captured

    def track(self, entries: Sequence[PendingEntry]) -> None:
        self.work.track(entries)

    def took(self) -> float:
        return self.work.seconds or 0.0

    def wait(self, timeout: float | None) -> None:
        """Make the current stream of each array library wait; with a ``timeout`` block the host as
        well."""
        work = self.work
        # The error comes before any order between streams: the results are not valid, and streams
        # must not wait for an operation that may never end.
        if work.error is not None:
            raise work.error
        same_stream = not self._blocking
        for current_stream in self._current_streams:
            stream = current_stream()
            # After the end nothing has to be ordered, and the event may be another operation's by
            # now.
            if not work.done:
                self._order(stream)
            # The handle of the per-thread default stream means another stream on each thread.
            same_stream = same_stream and stream == work.stream != PER_THREAD_STREAM
        if self._packed:
            self._unpack(same_stream)
        if same_stream and self._in_flight.frees_in_order:
            # Later work on this stream, which may reuse the memory, runs after the operation.
            work.release()
        if timeout is not None or self._blocking:
            self._block(timeout)

    def _order(self, stream: int) -> None:
        """Make a stream wait for the end of the operation."""
        self._in_flight.streams.wait_event(stream, self.work.event)
        # Later waits of a stream order nothing more.
        if all(stream != waiting for waiting, _ in self.work.waits):
            self.work.waits = (*self.work.waits, (stream, next_order()))

    def synchronize(self, timeout: float | None = None) -> None:
        # It is read before wait(), which clears it.
        packed = self._packed
        self.wait(None)
        self._block(timeout)
        if packed:
            # The copies from packed memory run on the current stream, after the operation.
            self._in_flight.synchronize(self._current_streams[0]())

    def _unpack(self, same_stream: bool) -> None:
        """Copy packed results to the strided arrays, on the current stream, which waits for the
        operation."""
        calls, self._calls, self._packed = self._calls, (), False
        try:
            for call in calls:
                call.write_back()
        except BaseException:
            # The next wait unpacks all results again.
            self._calls, self._packed = calls, True
            raise
        finally:
            # The copies may still run when the operation has ended, so its end does not tell when
            # the packed memory is no longer used. On the stream of the call later work is ordered
            # after them.
            if not same_stream:
                for current_stream in self._current_streams:
                    self._in_flight.retain(calls, current_stream())

    def _block(self, timeout: float | None) -> None:
        work = self.work
        if work.captured:
            # It runs when the graph is launched.
            return
        started = time.monotonic()
        # The wait monitor sees what this thread waits for, unless the wait ends by itself.
        with entered(self) if timeout is None else entered(NotBlocked()):
            for _ in backoff(SPIN_S):
                # A failure of the group ends the wait as well: it sets the error of its operations.
                if self.done():
                    break
                if timeout is not None and time.monotonic() - started >= timeout:
                    call = work.describe_call()
                    raise OperationTimeoutError(
                        f"{call.describe_with_number()} was not done after waiting {timeout:g} s;"
                        " the operation is still running",
                        op=call.op.name,
                        seq=call.seq,
                    )
        if work.error is not None:
            raise work.error

    def add_done_callback(self, fn: Callable[[], None]) -> None:
        if self.work.add_callback(fn):
            self._in_flight.sweep_often()
        else:
            fn()


def _streams_and_packing(calls: Sequence[Call]) -> tuple[list[Callable[[], int]], bool]:
    """For each array library in the calls the function that gives its current stream; True if an
    output is packed."""
    found: list[Callable[[], int]] = []
    packed = False
    for call in calls:
        outputs = call.outputs
        for buffer in outputs:
            if buffer.unpack is not None:
                packed = True
            if buffer.current_stream is not None and buffer.current_stream not in found:
                found.append(buffer.current_stream)
        if call.inputs is not outputs:
            for buffer in call.inputs:
                if buffer.current_stream is not None and buffer.current_stream not in found:
                    found.append(buffer.current_stream)
    return found, packed
