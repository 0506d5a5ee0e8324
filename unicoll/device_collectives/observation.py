"""What the wait monitor observes of a group on a device (:mod:`unicoll.diagnosis.wait_monitor`):
the operations that its device has in flight, and what they run after."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice
from types import FrameType
from typing import NamedTuple

from unicoll.backend.compared_backend import ComparedBackend
from unicoll.backend.contract import Context
from unicoll.backend.error_texts import Report, at
from unicoll.backend.observed_backend import ObservedBackend, Operation
from unicoll.calls.call import Call, without_arrays
from unicoll.calls.work import Completion
from unicoll.device_collectives.device_order import first_before
from unicoll.device_collectives.group_resources import GroupResources
from unicoll.device_collectives.in_flight import EnqueuedCall, PendingWork
from unicoll.device_collectives.stream_completion import StreamCompletion
from unicoll.devices.device_runtime import DeviceRuntime
from unicoll.process.thread_frames import outwards

_MOST_FRAMES = 30
"""Frames of a stack that are searched for a call of the library."""


class _Pending(NamedTuple):
    """The first collective of a group that its device has not ended.

    Attributes:
        number: its number; 0 if there is none.
        group, call: the operation of another group that it runs after, and that group's backend;
            None if there is none.
    """

    number: int = 0
    group: ObservedBackend | None = None
    call: Call | None = None


class DeviceObservation(ComparedBackend):
    """A group on a device, as far as the wait monitor observes it.

    Attributes:
        runtime: of the group's device.
        resources: what the group has on its device, or None until it has connected.
        connecting: the call with which a thread connects the group, or None.
    """

    runtime: DeviceRuntime

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self.resources: GroupResources | None = None
        self.connecting: Call | None = None

    @property
    def executing_backend(self) -> DeviceObservation:
        return self

    @property
    def last_number(self) -> int:
        connecting = self.connecting
        return connecting.seq if connecting is not None else self.sequence

    def update(self) -> None:
        in_flight = self.resources.in_flight if self.resources is not None else None
        pending = in_flight.first_pending() if in_flight is not None else None
        in_library = self._in_library()
        # The call in the library comes last: it waits on the device for those before it.
        if pending is not None:
            self.state.call = pending.describe_call()
        elif in_library is not None:
            self.state.call = self._without_arrays(in_library)
        else:
            self.state.call = None
            last = in_flight.last if in_flight is not None else None
            self.state.last = last.describe_call().ended if last is not None else None

    def _without_arrays(self, call: Call) -> Call:
        """The call with which a thread is in the library, without its arrays; always the same
        object for a call, by which the wait monitor knows how long it has waited."""
        known = self.state.call
        if known is None or (known.seq, known.op, known.site) != (call.seq, call.op, call.site):
            known = without_arrays(call)
        return known

    def _in_library(self) -> Call | None:
        """The call with which a thread is in the library now: NCCL connects ranks in their first
        calls, and a full launch queue blocks as well."""
        issuing = self.resources.in_flight.issuing if self.resources is not None else None
        return issuing[0] if issuing is not None else self.connecting

    def awaited_in(self, frame: FrameType) -> Call | None:
        # A posted call is not in thread_activity, since that would cost each call time.
        for each in islice(outwards(frame), _MOST_FRAMES):
            in_call = each.f_code.co_name in ("_issue", "_connect_for")
            owner: object = each.f_locals.get("self") if in_call else None
            if owner is self:
                return self._in_library()
        return None

    def waited_for(self, completion: Completion) -> tuple[ObservedBackend, Call] | None:
        if not isinstance(completion, StreamCompletion) or completion.done():
            return None
        by_work = self._in_flight()
        if by_work.get(completion.work) is not self:
            return None
        first = first_before(completion.work, by_work) or completion.work
        return by_work[first], first.describe_call()

    def operation(self, call: Call) -> Operation | None:
        """A call that is on the device waits for the other ranks' devices, and one that is in the
        library for the other ranks to call it: two orders."""
        found = super().operation(call)
        if found is None or isinstance(call, EnqueuedCall):
            return found
        return found._replace(order=self._host_order)

    @property
    def _host_order(self) -> str:
        return f"{self.name} host"

    def posted(self) -> Mapping[str, int]:
        """In the order of the devices those collectives count as posted that this rank's device
        runs without an end of another group's before: other ranks do not get further either."""
        # A group is closed once the device has all operations.
        pending = _Pending() if self.closed else self._first_pending()
        on_device = pending.number - 1 if pending.call is not None else self.last_number
        return {self.name: on_device, self._host_order: self.last_number}

    def device_state(self) -> Report:
        number, group, call = self._first_pending()
        behind = ""
        if group is not None and call is not None:
            name = group.context.name
            behind = f"{call.describe_with_number()} of group {name!r}{at(call.site)}"
        in_library = self._in_library()
        return {
            "pending": number,
            "behind": behind,
            "in_library": in_library.seq if in_library is not None else 0,
        }

    def _first_pending(self) -> _Pending:
        by_work = self._in_flight()
        for work, backend in by_work.items():
            if backend is self and work.first:
                first = first_before(work, by_work)
                if first is None or by_work[first] is self:
                    return _Pending(work.first)
                return _Pending(work.first, by_work[first], first.describe_call())
        return _Pending()

    def _in_flight(self) -> dict[PendingWork, DeviceObservation]:
        """The operations in flight on this device with their groups, of all groups of the job, in
        the order in which they were put on its streams."""
        if self.resources is None:
            return {}
        device, found = self.resources.device, []
        # While another thread records a graph, CUDA refuses queries on this one otherwise.
        mode = self.runtime.ignore_captures()
        try:
            for group in [*self.context.job.groups]:
                for backend in group.backends:
                    if isinstance(backend, DeviceObservation) and backend.runtime is self.runtime:
                        resources = backend.resources
                        if resources is not None and resources.device == device:
                            found += [(work, backend) for work in resources.in_flight.running()]
        finally:
            self.runtime.ignore_captures(mode)
        return dict(sorted(found, key=lambda pair: pair[0].order))

    @property
    def has_unseen_wakers(self) -> bool:
        return self.resources is not None and self.resources.in_flight.has_callbacks
