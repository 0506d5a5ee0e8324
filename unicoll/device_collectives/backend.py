"""The backend of one group over a library with NCCL's API: collectives between device arrays,
ordered by streams.

A blocking call goes on the caller's current stream: the host does not wait, and the arrays need not
be kept alive. An asynchronous call goes on the group's own stream, after an event that the caller's
stream records; ``wait()`` makes the caller's stream wait for an event at its end.

The parts of the backend are modules of this package: ``group_resources`` (what the group has once
it has connected), ``in_flight`` (operations and the arrays that they keep alive), ``stream_order``,
``observation`` (for the wait monitor), ``failure_detection`` (deadlines, failure, teardown) and
``memory.group_memory``.
"""

from __future__ import annotations

import threading
import time
from abc import abstractmethod
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any

from unicoll.arrays.types import DType, Reduction
from unicoll.backend import Call, Context, OneSidedCall
from unicoll.backend.compared_backend import last_collectives
from unicoll.calls.ops import OPS
from unicoll.calls.options import CallOptions, Options, as_options
from unicoll.calls.work import Completion
from unicoll.device_collectives.communicators import resizing
from unicoll.device_collectives.communicators.communicator import Communicator
from unicoll.device_collectives.communicators.devices import bound_device
from unicoll.device_collectives.communicators.factory import CommunicatorFactory
from unicoll.device_collectives.communicators.unique_id import Origin, member_facts
from unicoll.device_collectives.failure_detection import FailureDetection
from unicoll.device_collectives.group_resources import SCRATCH_BYTES, GroupResources
from unicoll.device_collectives.in_flight import PendingWork
from unicoll.device_collectives.interface import CollectiveLibrary, Config, describe
from unicoll.device_collectives.memory.one_sided import check_one_sided, no_window
from unicoll.device_collectives.memory.registered_memory import RegisteredMemory, regions_of
from unicoll.device_collectives.memory.symmetric_memory import DeviceArray
from unicoll.device_collectives.observation import DeviceObservation
from unicoll.device_collectives.operations import OPERATIONS, batch, check_algorithm, check_options
from unicoll.device_collectives.stream_completion import StreamCompletion
from unicoll.device_collectives.stream_order import other_streams
from unicoll.devices.device_runtime import (
    LEGACY_STREAM,
    DeviceError,
    DeviceRuntime,
    on_device,
)
from unicoll.errors import DistArgumentError, DistError, DistTypeError
from unicoll.process import logs

_SENDS_AND_RECEIVES = frozenset(("send", "recv"))
_STORE_S = 2.0
"""How long ``explain()`` waits for the store."""
NATIVE_OPERATIONS = frozenset(OPS.keys() & OPERATIONS.keys())
"""The operations that a library with NCCL's API has, for :class:`~unicoll.backend.Caps`."""


class DeviceBackend(DeviceObservation):
    """The backend of one group; a subclass chooses the library and the device runtime.

    Attributes:
        native: the library.
        detection: deadlines, failure and teardown.
        can_split: True if all members connected when the group was made, so that it can be split.
    """

    def __init__(
        self, context: Context, parent: DeviceBackend | None = None, connect: bool = True
    ) -> None:
        super().__init__(context)
        self.native = self.load_library()
        self.runtime = self.load_runtime()
        self.can_split = False
        # A thread holds it while it uses the communicator: NCCL allows one thread at a time. It is
        # reentrant, because a group may fail on the thread that holds it, and that thread also
        # stops the communicator if no other can be started (TeardownThreads.start).
        self._lock = threading.RLock()
        self._sequence = 0
        self._options = as_options(context.options)
        self.detection = FailureDetection(self.state, self._lock, self.device_state)
        self.watch()
        config = self.configure(self._options)
        self._factory = CommunicatorFactory(
            context, self.native, self.runtime, config, self.detection.check
        )
        if not connect:
            return
        bound = bound_device(context, self.runtime, context.explicit)
        deadline = time.monotonic() + context.timeout
        # A split needs the communicators of all members of the parent. Where a group connects at
        # its first operation, a rank knows of its own communicator only, so such a parent is not
        # split.
        if parent is not None and parent.can_split and parent.resources is not None:
            self._connect_split(parent, parent.resources, deadline)
            self.can_split = True
        elif bound is not None:
            self._connect(bound, deadline)
            self.can_split = True

    # --- what a subclass chooses ------------------------------------------------------------------

    @classmethod
    @abstractmethod
    def load_library(cls) -> CollectiveLibrary:
        """The library of this process; BackendUnavailableError if there is none."""

    @classmethod
    @abstractmethod
    def load_runtime(cls) -> DeviceRuntime:
        """The devices of this process; BackendUnavailableError if there are none."""

    def configure(self, options: Options) -> Config:
        """The options of the group's communicator."""
        return Config(
            blocking=options.blocking is not False,
            cga_cluster_size=options.cga_cluster_size,
            min_ctas=options.min_ctas,
            max_ctas=options.max_ctas,
            net_name=options.net_name,
            split_share=options.split_share,
            traffic_class=options.traffic_class,
            comm_name=self.context.name,
        )

    def describe_transports(self, facts: Sequence[dict[str, Any]]) -> list[str]:
        """The transports to the other members, for ``explain()``.

        Args:
            facts: what the members have published
                (:mod:`~unicoll.device_collectives.communicators.unique_id`), in group order.
        """
        return []

    @classmethod
    def library(cls) -> str:
        return describe(cls.load_library())

    @classmethod
    def create(cls, context: Context) -> DeviceBackend:
        return cls(context)

    # --- connecting -------------------------------------------------------------------------------

    def _connect(self, device: int, deadline: float) -> GroupResources:
        """Make the communicator; all members do so, at their first operation or when the group is
        made."""
        with on_device(self.runtime, device), self.detection.failing_group("connecting"):
            return self._adopt(self._factory.init(device, deadline))

    def _connect_split(
        self, parent: DeviceBackend, resources: GroupResources, deadline: float
    ) -> None:
        with on_device(self.runtime, resources.device):
            # With the parent's lock no thread issues an operation between the wait and the split:
            # NCCL may deadlock if a communicator with work is split. An error fails the parent,
            # whose other members wait in the split.
            with parent._lock, parent.detection.failing_group("splitting"):
                parent.detection.await_idle("splitting", self.context.timeout)
                comm = self._factory.split(resources.comm, deadline)
            if comm is not None:
                self._adopt(comm)
            else:
                self._connect(resources.device, deadline)

    def _adopt(self, comm: Communicator) -> GroupResources:
        high_priority = self._options.high_priority is not False
        blocking = self._factory.config.blocking
        try:
            resources = GroupResources(
                comm, self.state, high_priority, blocking, self.detection.sweep_often
            )
            self.detection.start(resources)
        except BaseException:
            # Nothing else refers to the communicator yet, so nothing else would end it.
            comm.abort()
            raise
        # This comes last: operations are issued only once the watchdog supervises the group.
        self.resources = resources
        logs.logger(self.context.backend).info(
            "group %r: %s, %s", self.context.name, describe(self.native), self._place(comm.device)
        )
        return resources

    def _connect_for(self, call: Call) -> GroupResources:
        """Connect to the other members at the first operation, if no graph is being recorded."""
        first = (call.inputs or call.outputs)[0]
        with on_device(self.runtime, first.device.index):
            # The legacy default stream cannot be captured.
            captured = first.stream > LEGACY_STREAM and self.runtime.capturing(first.stream)
        if captured:
            raise DistArgumentError(
                f"{call.op.name}: the first operation of group {self.context.name!r} connects its"
                " ranks, which a graph cannot record: do one before capturing, or give device_id="
                " to init_process_group",
                op=call.op.name,
            )
        if call.op.collective:
            # The wait monitor observes calls with a number. It gets it again if it is not refused.
            call.seq = self._sequence + 1
        self.connecting = call
        try:
            return self._connect(first.device.index, time.monotonic() + call.timeout)
        finally:
            self.connecting, call.seq = None, 0

    # --- groups made from this one ----------------------------------------------------------------

    def split(self, context: Context | None) -> DeviceBackend | None:
        if context is not None:
            # The communicator of a failed group is stopped and cannot be split. The new group
            # connects without it.
            return type(self)(context, self if self.state.error is None else None)
        if self.can_split and self.state.error is None and self.resources is not None:
            deadline = time.monotonic() + self.context.timeout
            device = on_device(self.runtime, self.resources.device)
            with self._lock, device, self.detection.failing_group("splitting"):
                self.detection.await_idle("splitting", self.context.timeout)
                self._factory.leave_out(self.resources.comm, deadline)
        return None

    def shrink(self, context: Context, excluded: Sequence[int]) -> DeviceBackend:
        # Another thread revokes the communicator of a failed group. NCCL allows no second thread in
        # it, so the shrink begins when that thread has returned.
        self.detection.await_abort()
        made = type(self)(context, connect=False)
        deadline = time.monotonic() + context.timeout
        parent = self.resources.comm if self.resources is not None else None
        # An error fails the new group: this one may have failed already.
        with made.detection.failing_group("shrinking"):
            decision = resizing.decide_shrink(context, parent, deadline)
            if parent is not None and decision == resizing.RESIZE:
                with on_device(self.runtime, parent.device):
                    made._adopt(made._factory.shrink(parent, excluded, deadline))
        if parent is not None and decision == resizing.RECONNECT:
            made._connect(parent.device, deadline)
        made.can_split = decision != resizing.LAZY
        return made

    def grow(self, context: Context) -> DeviceBackend:
        made = type(self)(context, connect=False)
        deadline = time.monotonic() + context.timeout
        # The lock is held until the larger communicator is made: the id is for a communicator
        # without work, so no operation may be issued after the wait.
        with self._lock:
            self.state.check()
            parent = None
            if self.resources is not None:
                parent = self.resources.comm
                self.detection.await_idle("growing", context.timeout)
            decision = resizing.decide_growth(context, parent)
            if parent is not None:
                made._connect_grown(decision, parent.device, deadline, parent)
        return made

    @classmethod
    def join_grown(cls, context: Context) -> DeviceBackend:
        made = cls(context, connect=False)
        deadline = time.monotonic() + context.timeout
        decision = resizing.await_growth(context, made.native, deadline)
        if decision != resizing.LAZY:
            device = resizing.device_of_new_rank(context, made.runtime)
            made._connect_grown(decision, device, deadline, None)
        return made

    def _connect_grown(
        self, decision: str, device: int, deadline: float, parent: Communicator | None
    ) -> None:
        if decision == resizing.RESIZE:
            with on_device(self.runtime, device), self.detection.failing_group("growing"):
                self._adopt(self._factory.grow(parent, device, deadline))
        else:
            self._connect(device, deadline)
        self.can_split = True

    # --- operations -------------------------------------------------------------------------------

    def run(self, call: Call) -> PendingWork | None:
        with self._lock:
            resources = self._prepare(call)
            try:
                if not call.op.moves_data:
                    pending, completion = None, self._post_barrier(resources, call)
                else:
                    completion = None
                    stream = (call.inputs or call.outputs)[0].stream
                    with resources.streams.device_context(stream):
                        pending = self._run_on((call,), resources, stream)
            except DistError as e:
                self._handle_error(e, call, resources)
                raise
        if completion is not None:
            # The lock is not held here: the wait blocks the host, and the thread that stops a
            # failed group takes the lock.
            completion.wait(None)
        call.write_back()
        return pending

    def _run_on(
        self, calls: tuple[Call, ...], resources: GroupResources, stream: int
    ) -> PendingWork | None:
        """Put a call on the caller's stream. Its arrays are kept only if their library could free
        them too early."""
        captured = stream > LEGACY_STREAM and self.runtime.capturing(stream)
        others = other_streams(calls, stream)
        resources.streams.wait_for_producers(others, stream, stream)
        # The order of the next steps: the library gets the arrays; an event behind the operation
        # keeps them; the other streams of the arrays wait for the operation; only then are the
        # references dropped, because from then on their libraries may reuse the memory in the order
        # of these streams.
        if not captured:
            self._number(calls)
        self._issue(calls, resources, stream)
        pending = None
        if captured:
            # The program keeps the arrays of a graph, and an event that a graph records cannot be
            # queried.
            resources.in_flight.recorded = True
            resources.in_flight.begun = ()
        else:
            pending = resources.in_flight.add(calls, stream, stream, False)
        resources.streams.release_consumers(others, stream)
        if pending is not None and self.runtime.frees_in_order:
            pending.release()
        return pending

    def post(self, calls: Sequence[Call], stream: Any = None) -> StreamCompletion:
        calls = tuple(calls)
        first = calls[0]
        with self._lock:
            # All calls are checked before the library gets one: a refused call of a batch leaves
            # nothing on the device.
            for call in calls:
                resources = self._prepare(call)
            try:
                if not first.op.moves_data:
                    return self._post_barrier(resources, first)
                current = (first.inputs or first.outputs)[0].stream
                with resources.streams.device_context(current):
                    return self._post_on(calls, resources, current)
            except DistError as e:
                self._handle_error(e, first, resources)
                raise

    def _post_on(
        self, calls: tuple[Call, ...], resources: GroupResources, current: int
    ) -> StreamCompletion:
        """Put calls on the group's own stream, after the work on the caller's."""
        own, streams, in_flight = resources.stream, resources.streams, resources.in_flight
        captured = current > LEGACY_STREAM and self.runtime.capturing(current)
        streams.wait_for_producers(other_streams(calls, own), own, current)
        # The start is recorded after the wait for the producers, which does not count as time of
        # the operation.
        start = in_flight.record_start(calls[0]) if not captured else 0
        if not captured:
            self._number(calls)
        self._issue(calls, resources, own)
        work = in_flight.add(calls, own, current, captured, start)
        on_host = self.runtime.host_memory
        return StreamCompletion(in_flight, work, on_host, not on_host)

    def post_each(self, calls: Sequence[Call], stream: Any = None) -> list[Completion]:
        """Sends and receives of a batch are one group call, so that their order does not matter."""
        return [self.post(calls, stream)] * len(calls)

    def _post_barrier(self, resources: GroupResources, call: Call) -> StreamCompletion:
        """A barrier on the group's own stream; its ``wait()`` blocks the host, since it has no
        arrays."""
        in_flight = resources.in_flight
        start = in_flight.record_start(call)
        self._number((call,))
        self._issue((call,), resources, resources.stream)
        work = in_flight.add((call,), resources.stream, resources.stream, False, start)
        return StreamCompletion(in_flight, work, blocking=True)

    def _issue(self, calls: tuple[Call, ...], resources: GroupResources, stream: int) -> None:
        """Call the library, and note that for the watchdog."""
        first, in_flight = calls[0], resources.in_flight
        # The options of a batch are those of its first call.
        comm = resources.comm if first.options is None else resources.with_options(first.options)
        # From here on the device may use the arrays. If an exception comes before InFlight.add has
        # made an operation of the calls, this attribute keeps the arrays until the group has been
        # stopped.
        in_flight.begun = calls
        # One tuple, because the watchdog reads call and deadline without a lock. It is set before
        # the device's lock is taken, so that the deadline also ends a wait for that lock.
        in_flight.issuing = first, time.monotonic() + first.timeout
        try:
            with resources.device_lock:
                # The state is checked once more with the device's lock: the group may have failed
                # during the wait for the lock, and its communicator is being stopped then.
                self.state.check()
                code = (
                    OPERATIONS[first.op.name](comm, first, stream)
                    if len(calls) == 1
                    else batch(comm, calls, stream)
                )
                if code:
                    resources.comm.handle_code(code, first, time.monotonic() + first.timeout)
        finally:
            # The tuple refers to the arrays, so it does not outlast the call.
            in_flight.issuing = None

    def _handle_error(self, error: DistError, call: Call, resources: GroupResources) -> None:
        """Fail the group because of an error of the device or the library: the other ranks wait for
        this one.

        The device's lock is not held here, because the announcement waits for an answer.
        """
        what: str | None = f"calling {call.op.name} on"
        buffers = call.inputs or call.outputs
        stream = buffers[0].stream if buffers else 0
        # In a context that has ended the question itself raises.
        with suppress(DeviceError), resources.streams.device_context(stream):
            if stream > LEGACY_STREAM and self.runtime.capturing(stream):
                # The graph is not complete, and nothing of it has run: the group is as it was.
                what = None
        self.detection.handle_error(error, what)

    def _number(self, calls: Iterable[Call]) -> None:
        """Set the numbers of collectives, right before the library gets them.

        Equal numbers mean the same call on all ranks, so messages and one-sided operations have
        none, and neither have calls in graphs, which a rank may record once more.
        """
        for call in calls:
            if call.op.collective:
                self._sequence = call.seq = self._sequence + 1

    def _prepare(self, call: Call) -> GroupResources:
        """Refuse what the library cannot do; connect if necessary."""
        self.state.check()
        self._refuse(call)
        buffers = call.inputs or call.outputs
        resources = self.resources
        if resources is None:
            if not buffers:
                raise self._no_device(call.op.name)
            resources = self._connect_for(call)
            # The group may have failed while there was no communicator to abort.
            self.state.check()
        if buffers and buffers[0].device.index != resources.device:
            raise self._other_device(resources, call.op.name, buffers[0].device.index)
        if resources.least_capability < self.native.full_capability and call.reduce is not None:
            self._refuse_reduction(resources, call, buffers[0].dtype, call.reduce)
        return resources

    def _refuse_reduction(
        self, resources: GroupResources, call: Call, dtype: DType, reduction: Reduction
    ) -> None:
        """Refuse the reductions that the library lacks on devices of the group's least
        capability."""
        least = resources.least_capability
        if self.native.reduction(dtype, reduction, least) is None:
            needed = self.native.full_capability
            ranks, capabilities = self.context.ranks, resources.comm.origin.capabilities
            member = next(i for i, rank in enumerate(ranks) if capabilities[rank] == least)
            raise DistTypeError(
                f"{call.op.name}: {self.native.name} reduces {dtype} on devices of compute"
                f" capability {needed[0]}.{needed[1]} or later; that of {self.context.who(member)}"
                f" has {least[0]}.{least[1]}",
                op=call.op.name,
            )

    def _other_device(
        self, resources: GroupResources, name: str, device: int | None
    ) -> DistArgumentError:
        return DistArgumentError(
            f"{name}: the array is on {self._place(device)}, but group {self.context.name!r} is"
            f" bound to {self._place(resources.device)} on this rank (device_id=, or LOCAL_RANK)",
            op=name,
        )

    def _no_device(self, name: str) -> DistArgumentError:
        return DistArgumentError(
            f"{name}: group {self.context.name!r} has no device yet: give device_id= to"
            " init_process_group, or use an array first",
            op=name,
        )

    def _refuse(self, call: Call) -> None:
        if call.options is not None:
            check_algorithm(call, call.options, self.native.has("all_to_all"))
        if call.op.name not in _SENDS_AND_RECEIVES:
            return
        if call.peer < 0:
            raise DistArgumentError(
                f"recv: {self.native.name} cannot receive from any rank: name it with src=",
                op="recv",
            )
        if call.tag != 0:
            raise DistArgumentError(
                f"{call.op.name}: {self.native.name} has no tags (tag={call.tag}): messages between"
                " two ranks match in order",
                op=call.op.name,
            )

    def refuse_options(self, options: CallOptions) -> None:
        check_options(options, self.native)

    # --- memory -----------------------------------------------------------------------------------

    def symmetric_empty(self, shape: tuple[int, ...], dtype: DType) -> DeviceArray:
        with self._lock:
            self.state.check()
            if self.resources is None:
                raise self._no_device("symmetric_empty")
            deadline = time.monotonic() + self.context.timeout
            with on_device(self.runtime, self.resources.device), self.detection.failing_group():
                return self.resources.memory.allocate(shape, dtype, deadline)

    def register(self, memory: Any, symmetric: bool) -> RegisteredMemory:
        regions = regions_of(memory)
        deadline = time.monotonic() + self.context.timeout
        with self._lock:
            self.state.check()
            resources = self.resources or self._connect(regions[0].device, deadline)
            if regions[0].device != resources.device:
                raise self._other_device(resources, "register", regions[0].device)
            with on_device(self.runtime, resources.device), self.detection.failing_group():
                return resources.memory.register(
                    memory, regions, symmetric, deadline, self._unregister
                )

    def _unregister(self, registered: RegisteredMemory) -> None:
        """Wait for the operations in flight, which may use the memory, and deregister it."""
        resources = self.resources
        assert resources is not None
        # This comes before the lock is taken: the thread that stops a failed group needs the lock
        # to end its work.
        self.detection.await_abort()
        with self._lock:
            if self.state.error is None:
                # A group that has failed has nothing in flight: its operations were stopped.
                self.detection.await_idle(f"closing {registered!r}", self.context.timeout)
            with on_device(self.runtime, resources.device):
                resources.memory.remove(registered)

    def one_sided(self, call: OneSidedCall) -> None:
        check_one_sided(call, self.native)
        buffer = call.inputs[0]
        with self._lock:
            self.state.check()
            if self.resources is None:
                raise no_window(call, self.context.name)
            resources = self.resources
            if buffer.device.index != resources.device:
                raise self._other_device(resources, call.op.name, buffer.device.index)
            resources.memory.prepare_one_sided(call)
            try:
                with resources.streams.device_context(buffer.stream):
                    self._run_on((call,), resources, buffer.stream)
            except DistError as e:
                self._handle_error(e, call, resources)
                raise

    # --- failure and teardown ---------------------------------------------------------------------

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self.keep_posted()
            # Sent before this rank leaves, because it cannot be asked later.
            self.comparison.close(last_collectives((self,)).get(self, ()), self._sequence)
        self.detection.close()

    # --- description ------------------------------------------------------------------------------

    @property
    def failure(self) -> DistError | None:
        return self.state.error

    def raise_failure(self) -> None:
        self.detection.check_now()

    @property
    def sequence(self) -> int:
        return self._sequence

    @property
    def staging(self) -> int:
        return SCRATCH_BYTES if self.resources is not None else 0

    def describe(self) -> str:
        library = describe(self.native)
        if self.resources is None:
            return f"{library}, connects at its first operation"
        device = self.resources.device
        place = f"{library} on {self._place(device)} ({self.runtime.facts(device).name})"
        return "; ".join(filter(None, (place, *self._transports(self.resources.comm.origin))))

    def _transports(self, origin: Origin) -> list[str]:
        try:
            by_rank = member_facts(origin, _STORE_S)
            return self.describe_transports([by_rank[rank] for rank in self.context.ranks])
        except Exception as e:
            # The function explain() must not fail; the store may be gone.
            return [f"expected transports: not known ({e})"]

    def _place(self, device: int | None) -> str:
        return f"{self.runtime.device_type}:{device}"
