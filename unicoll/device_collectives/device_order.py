"""The order in which a device runs the operations in flight, over all groups: what each of them is
behind.

A library's operation waits on the device for the other ranks. If the ranks have put operations of
two groups on their streams in opposite orders, each waits for the other one, whatever the hosts do.
"""

from __future__ import annotations

from collections.abc import Mapping

from unicoll.device_collectives.in_flight import PendingWork
from unicoll.devices.device_runtime import LEGACY_STREAM, PER_THREAD_STREAM


def first_before(work: PendingWork, in_flight: Mapping[PendingWork, object]) -> PendingWork | None:
    """The operation that ``work`` runs after, and that itself runs after none; None if ``work`` is
    such an operation.

    Args:
        in_flight: the operations of all groups that have not ended, in the order in which they were
            put on their streams, and the group of each.
    """
    earlier = [other for other in in_flight if other.order < work.order]
    last = work
    for other in reversed(earlier):
        # A communicator's operations run in the order of the calls, on whatever streams they are.
        if in_flight[last] is in_flight[other] or _runs_after(last, other):
            last = other
    return last if last is not work else None


def _runs_after(work: PendingWork, other: PendingWork) -> bool:
    """True if the streams order ``work`` directly after ``other``, which was put on its stream
    before."""
    streams = {_stream(work.runs_on), _stream(work.stream)}
    # The handle of the per-thread default stream means another stream on each thread.
    streams.discard(PER_THREAD_STREAM)
    return _stream(other.runs_on) in streams or any(
        _stream(stream) in streams and order < work.order for stream, order in other.waits
    )


def _stream(handle: int) -> int:
    """0 and 1 are both the legacy default stream."""
    return handle or LEGACY_STREAM
