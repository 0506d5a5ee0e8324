"""Order between the streams of a device: an event recorded on one stream, and a wait for it on
another."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext

from unicoll.backend import Call
from unicoll.devices.device_runtime import PER_THREAD_STREAM, DeviceRuntime, on_device

_NO_CONTEXT = nullcontext()


class StreamOrder:
    """The streams of a group's device. The host never blocks here."""

    def __init__(self, runtime: DeviceRuntime, device: int) -> None:
        self._runtime = runtime
        self._device = device
        # One event is enough: a wait is for the recording that was the last when the wait was made,
        # so the event may be recorded again at once. Callers hold the group's lock, which keeps
        # other threads from recording it between a recording and its wait.
        self._event = runtime.create_event(device)

    def device_context(self, stream: int) -> AbstractContextManager[None]:
        """Make the group's device current if ``stream`` is a default stream, which belongs to the
        current device."""
        if stream > PER_THREAD_STREAM or self._runtime.current_device() == self._device:
            return _NO_CONTEXT
        return on_device(self._runtime, self._device)

    def wait_event(self, stream: int, event: int) -> None:
        """Make a stream wait for an event."""
        with self.device_context(stream):
            self._runtime.wait_event(stream, event)

    def done(self, stream: int) -> bool:
        """True if the device has done all work on a stream."""
        with self.device_context(stream):
            return self._runtime.stream_done(stream)

    def wait_for_producers(self, others: Iterable[int], stream: int, current: int) -> None:
        """Make ``stream`` wait for the other streams on which the arrays are written.

        The caller is in the context of ``current``, see :meth:`device_context`.
        """
        for other in others:
            if other == current:
                self._runtime.record(self._event, other)
            else:
                with self.device_context(other):
                    self._runtime.record(self._event, other)
            self._runtime.wait_event(stream, self._event)

    def release_consumers(self, others: Sequence[int], stream: int) -> None:
        """Make the other streams of the arrays wait for ``stream``."""
        if others:
            self._runtime.record(self._event, stream)
            for other in others:
                self.wait_event(other, self._event)

    def close(self) -> None:
        """Destroy the event."""
        self._runtime.destroy_event(self._event)


def other_streams(calls: Iterable[Call], stream: int) -> list[int]:
    """The streams of the calls' arrays except ``stream``, without repetition."""
    found: list[int] = []
    for call in calls:
        for buffer in call.inputs:
            if buffer.stream != stream and buffer.stream not in found:
                found.append(buffer.stream)
        if call.outputs is not call.inputs:
            for buffer in call.outputs:
                if buffer.stream != stream and buffer.stream not in found:
                    found.append(buffer.stream)
    return found
