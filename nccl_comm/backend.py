"""The NCCL backend of one group: arrays on a device, ordered by streams.

Blocking calls go on the caller's current stream: there is nothing to wait for, and nothing to keep alive. Asynchronous
ones go on the group's own stream, between an event that stands for what the caller has queued and one that
``wait()`` lets the caller's stream wait for. Neither blocks the host.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from unicoll import streams
from unicoll.backend import Call, Caps, Context
from unicoll.errors import DistArgumentError
from unicoll.ops import OPS
from unicoll.options import CallOptions, as_options
from unicoll.streams import LEGACY_STREAM, PER_THREAD_STREAM, SPIN_S, naps, on_device
from unicoll.types import DType, Reduction
from unicoll.work import Completion

from . import library, transports
from .api import Config
from .communicator import Communicator
from .devices import bound_device
from .exposed import Exposing
from .flights import Flight, StreamCompletion
from .growing import GROW, LATER, device_to_bring, grown, how_to_come, how_to_grow
from .meeting import facts_of, meet
from .memory import DeviceArray, SymmetricMemory
from .operations import OPERATIONS, Ranks, barrier, batch
from .tuning import Tuned, refuse_algorithm, refuse_options
from .types import way

__all__ = ["NCCLBackend"]

_SCRATCH = 512
"""Bytes of device memory for barriers."""
_NOTHING = nullcontext()
_MESSAGES = frozenset(("send", "recv"))
_ASKING_S = 2.0
"""How long ``explain()`` waits for the store."""
_TUNED = 64
"""Options of calls that a group remembers."""


def _reduces(dtype: DType, reduction: Reduction) -> bool:
    return way(dtype, reduction, library.nccl().version) is not None


class NCCLBackend(Exposing):
    """Collectives between GPUs."""

    name = "nccl"
    caps = Caps(frozenset(("cuda",)), frozenset(OPS), _reduces)

    def __init__(
        self, context: Context, split_from: NCCLBackend | None = None, connect: bool = True
    ) -> None:
        super().__init__(context)
        self.splits = False  # whether all members connected when the group was made, so that it can be split
        self._options = as_options(context.options)
        self._device = -1
        self._met = context  # the group whose members told each other where they are: this one, or one it comes from
        self._tuned: dict[CallOptions, Tuned] = {}
        self._scratch = self._before = 0
        self._sequence = 0
        if not connect:
            return
        bound = bound_device(context, self.cuda, context.asked)
        deadline = time.monotonic() + context.timeout
        if split_from is not None and split_from.splits:
            self._connect(split_from._device, deadline, split_from)
            self.splits = True
        elif bound is not None:
            self._connect(bound, deadline)
            self.splits = True

    @classmethod
    def availability(cls) -> str | None:
        found = library.find()
        return found if isinstance(found, str) else streams.reason_against()

    @classmethod
    def library(cls) -> str:
        return library.describe(library.nccl())

    @classmethod
    def create(cls, context: Context) -> NCCLBackend:
        return cls(context)

    def split(self, context: Context | None) -> NCCLBackend | None:
        if context is not None:
            return NCCLBackend(context, self if self.error is None else None)
        if self.splits and self.error is None and self._comm is not None:
            deadline = time.monotonic() + self.context.timeout
            with self._lock, on_device(self.cuda, self._device):
                self.await_idle("splitting", self.context.timeout)
                self._comm.split(None, self._config(), deadline)
        return None

    def shrink(self, context: Context, excluded: Sequence[int]) -> NCCLBackend:
        self._stop_ending()
        made = NCCLBackend(context, connect=False)
        with on_device(self.cuda, self._device) if self._device >= 0 else nullcontext():
            made._shrink_from(self, list(excluded))
        return made

    def _shrink_from(self, parent: NCCLBackend, excluded: list[int]) -> None:
        """Connect as those that are left of a group."""
        deadline = time.monotonic() + self.context.timeout
        above = parent._comm
        if above is None:
            return  # it connects at its first operation
        if above.handle and self.nccl.has("ncclCommShrink"):
            self._adopt(above.shrink(self.context, excluded, self._config(), deadline, self._look))
            self._met = parent._met
        else:
            self._connect(above.device, deadline)
        self.splits = True

    def grow(self, context: Context) -> NCCLBackend:
        made = NCCLBackend(context, connect=False)
        deadline = time.monotonic() + context.timeout
        with self._lock:
            self._refuse_ended()
            self.await_idle("growing", context.timeout)
            way = how_to_grow(context, self._comm)
            if self._comm is not None:
                made._connect_larger(way, self._device, deadline, self._comm)
        return made

    @classmethod
    def join_grown(cls, context: Context) -> NCCLBackend:
        made = cls(context, connect=False)
        deadline = time.monotonic() + context.timeout
        way = how_to_come(context, deadline)
        if way != LATER:
            made._connect_larger(way, device_to_bring(context, made.cuda), deadline, None)
        return made

    def _connect_larger(self, way: str, device: int, deadline: float, above: Communicator | None) -> None:
        """Connect with ranks that are new to the group that this one is made of."""
        if way == GROW:
            context, config = self.context, self._config()
            with on_device(self.cuda, device):
                self._adopt(grown(context, self.nccl, self.cuda, device, config, deadline, self._look, above))
        else:
            self._connect(device, deadline)
        self.splits = True

    def symmetric_empty(self, shape: tuple[int, ...], dtype: DType) -> DeviceArray:
        with self._lock:
            self._refuse_ended()
            if self._comm is None:
                raise DistArgumentError(
                    f"symmetric_empty: group {self.context.name!r} does not know its device yet: give device_id= to"
                    " init_process_group, or use an array first"
                )
            if self._symmetric is None:
                self._symmetric = SymmetricMemory(self._comm, self.flights)
            with on_device(self.cuda, self._device):
                return self._symmetric.allocate(shape, dtype, self.context.timeout)

    # --- connecting -----------------------------------------------------------------------------------------------

    def _config(self) -> Config:
        o = self._options
        return Config(
            blocking=o.blocking is not False, cga_cluster_size=o.cga_cluster_size, min_ctas=o.min_ctas,
            max_ctas=o.max_ctas, net_name=o.net_name, split_share=o.split_share, traffic_class=o.traffic_class,
            comm_name=self.context.name if self.nccl.version >= 22700 else None,
        )  # fmt: skip

    def _connect(self, device: int, deadline: float, parent: NCCLBackend | None = None) -> Communicator:
        """Make the communicator; all members do, at their first operation or when the group is made."""
        context, cuda = self.context, self.cuda
        with on_device(cuda, device):
            if parent is not None and parent._comm is not None:
                with parent._lock:
                    parent.await_idle("splitting", context.timeout)
                    made = parent._comm.split(context, self._config(), deadline)
                assert made is not None
                self._met = parent._met
            else:
                ids = meet(context, device, self.nccl, cuda, deadline)
                what = "ncclCommInitRankConfig" if len(ids) == 1 else "ncclCommInitRankScalable"
                made = Communicator(
                    context, self.nccl, cuda, device,
                    lambda: self.nccl.comm_init(context.size, ids, context.rank, self._config()),
                    what, deadline, self._look,
                )  # fmt: skip
            self._adopt(made)
        return made

    def _adopt(self, made: Communicator) -> None:
        cuda, device = self.cuda, made.device
        self._stream = cuda.create_stream(device, high_priority=self._options.high_priority is not False)
        self._given.append((cuda.destroy_stream, self._stream))
        self._scratch = cuda.allocate(device, _SCRATCH)
        self._given.append((cuda.free, self._scratch))
        self._before = cuda.create_event(device)
        self._given.append((cuda.destroy_event, self._before))
        self._device, self._comm = device, made
        self._supervise(device)

    # --- operations ---------------------------------------------------------------------------------------------

    def run(self, call: Call) -> None:
        with self._lock:
            comm = self._ready(call)
            if call.op.name == "barrier":
                completion = self._barrier(comm, call)
            else:
                completion = None
                stream = (call.inputs or call.outputs)[0].stream
                with self._context_of(stream):
                    self._put((call,), comm, stream)
        if completion is not None:
            completion.wait(None)
        call.write_back()

    def _put(self, calls: tuple[Call, ...], comm: Communicator, stream: int) -> None:
        """Put a call on the caller's stream, where nothing has to be held: the memory is used on its own stream."""
        captured = stream > LEGACY_STREAM and self.cuda.capturing(stream)
        self._await_producers(calls, stream)
        self._issue(calls, comm, stream)
        if not captured:
            self._depart(calls, stream, stream, False).release()
        self._await_elsewhere(calls, stream)

    def post(self, calls: Sequence[Call], stream: Any = None) -> Completion:
        calls = tuple(calls)
        first = calls[0]
        with self._lock:
            for call in calls:
                comm = self._ready(call)
            if first.op.name == "barrier":
                return self._barrier(comm, first)
            current = (first.inputs or first.outputs)[0].stream
            with self._context_of(current):
                captured = current > LEGACY_STREAM and self.cuda.capturing(current)
                self._await_producers(calls, self._stream)
                start = self._begin(first) if not captured else 0
                self._issue(calls, comm, self._stream)
                return StreamCompletion(self, self._depart(calls, self._stream, current, captured, start))

    def _issue(self, calls: tuple[Call, ...], comm: Communicator, stream: int) -> None:
        """Call NCCL; the watchdog sees that somebody is in there."""
        first = calls[0]
        told = comm if first.options is None else self._told(comm, first.options)  # one for all: they come together
        self._number(calls)
        self._inside = first
        try:
            with self._turn:
                self._refuse_ended()
                code = OPERATIONS[first.op.name](told, first, stream) if len(calls) == 1 else batch(told, calls, stream)
                if code:
                    comm.settle(code, first, time.monotonic() + first.timeout)
        finally:
            self._inside = None

    def _told(self, comm: Communicator, options: CallOptions) -> Tuned:
        """The communicator, told a call's options."""
        found = self._tuned.get(options)
        if found is None:
            if len(self._tuned) >= _TUNED:
                self._tuned.clear()
            found = self._tuned[options] = Tuned(comm, options)
        return found

    def refuse_options(self, options: CallOptions) -> None:
        refuse_options(options, self.nccl)

    def post_each(self, calls: Sequence[Call], stream: Any = None) -> list[Completion]:
        """Sends and receives of a batch are one group call, so that their order does not matter."""
        return [self.post(calls, stream)] * len(calls)

    def _ready(self, call: Call) -> Communicator:
        """Refuse what cannot be done; the communicator."""
        self._refuse_ended()
        self._refuse(call)
        buffers = call.inputs or call.outputs
        comm = self._comm
        if comm is None:
            if not buffers:
                raise DistArgumentError(
                    f"{call.op.name}: group {self.context.name!r} does not know its device yet: give device_id= to"
                    " init_process_group, or use an array first",
                    op=call.op.name,
                )
            comm = self._connect_for(call)
            self._refuse_ended()  # the group has failed meanwhile, when there was nothing to abort yet
        if buffers and buffers[0].device.index != self._device:
            raise DistArgumentError(
                f"{call.op.name}: the array is on {buffers[0].device}, but group {self.context.name!r} is bound to"
                f" cuda:{self._device} on this rank (device_id=, or LOCAL_RANK)",
                op=call.op.name,
            )
        return comm

    def _number(self, calls: Iterable[Call]) -> None:
        """Give calls their numbers, right before NCCL has them."""
        for call in calls:
            self._sequence = call.seq = self._sequence + 1

    def _refuse(self, call: Call) -> None:
        if call.options is not None:
            refuse_algorithm(call, call.options, self.nccl.has("ncclAlltoAll"))
        if call.op.name not in _MESSAGES:
            return
        if call.peer < 0:
            raise DistArgumentError("recv: NCCL cannot receive from any rank: name it with src=", op="recv")
        if call.tag != 0:
            raise DistArgumentError(
                f"{call.op.name}: NCCL has no tags (tag={call.tag}): messages between two ranks match in order",
                op=call.op.name,
            )

    def _connect_for(self, call: Call) -> Communicator:
        first = (call.inputs or call.outputs)[0]
        with on_device(self.cuda, first.device.index):
            captured = first.stream > LEGACY_STREAM and self.cuda.capturing(first.stream)
        if captured:
            raise DistArgumentError(
                f"{call.op.name}: the first operation of group {self.context.name!r} connects its ranks, which a graph"
                " cannot record: do one before capturing, or give device_id= to init_process_group",
                op=call.op.name,
            )
        return self._connect(first.device.index, time.monotonic() + call.timeout)

    def _barrier(self, comm: Communicator, call: Call) -> Completion:
        """A barrier on the group's own stream; unlike with arrays, its ``wait()`` blocks the host."""
        told: Ranks = comm if call.options is None else self._told(comm, call.options)
        self._number((call,))
        start = self._begin(call)
        self._inside = call
        try:
            with self._turn:
                self._refuse_ended()
                code = barrier(told, self._scratch, self._stream)
                if code:
                    comm.settle(code, call, time.monotonic() + call.timeout)
        finally:
            self._inside = None
        flight = self._depart((call,), self._stream, self._stream, False, start)
        return StreamCompletion(self, flight, blocking=True)

    def _begin(self, call: Call) -> int:
        """An event for the begin of what is put on the group's stream next, if its duration is asked for; else 0."""
        if not call.timed:
            return 0
        start = self.events.take(self._device, timing=True)
        self.cuda.record(start, self._stream)
        return start

    def _depart(
        self, calls: tuple[Call, ...], stream: int, current: int, captured: bool, start: int = 0
    ) -> Flight:
        """Mark the end of what was just put on ``stream``, and keep the arrays until it has come."""
        event = self.events.take(self._device, timing=start != 0)
        self.cuda.record(event, stream)
        self._last = flight = Flight(calls, event, current, captured, start)
        if not captured:  # a graph's arrays are its maker's to keep, and its events may not be asked
            self.flights.append(flight)
        return flight

    def keep(self, calls: tuple[Call, ...], stream: int) -> None:
        """Hold the arrays until all that is on a stream now has been done; a graph's are its maker's to keep."""
        with self._context_of(stream):
            if stream > LEGACY_STREAM and self.cuda.capturing(stream):
                return
            event = self.events.take(self._device)
            self.cuda.record(event, stream)
        self.kept.append((event, calls))

    # --- order between streams ----------------------------------------------------------------------------------

    def _await_producers(self, calls: Iterable[Call], stream: int) -> None:
        """Let ``stream`` wait for whatever writes the arrays on other streams."""
        for other in _streams(calls):
            if other != stream:
                with self._context_of(other):
                    self.cuda.record(self._before, other)
                self.cuda.wait_event(stream, self._before)

    def _await_elsewhere(self, calls: Iterable[Call], stream: int) -> None:
        """Let the streams of arrays that are not ordered by ``stream`` wait for it."""
        others = [other for other in _streams(calls) if other != stream]
        if others:
            self.cuda.record(self._before, stream)
            for other in others:
                self.order(other, self._before)

    def order(self, stream: int, event: int) -> None:
        """Let a stream wait for an event."""
        with self._context_of(stream):
            self.cuda.wait_event(stream, event)

    def _context_of(self, stream: int) -> AbstractContextManager[None]:
        """The default streams are those of the current device: it has to be ours."""
        if stream > PER_THREAD_STREAM or self.cuda.current_device() == self._device:
            return _NOTHING
        return on_device(self.cuda, self._device)

    def settle(self, stream: int) -> None:
        """Block the host until all that is on a stream has been done, or the group has failed."""
        for _ in naps(SPIN_S):
            if self._stream_done(stream):
                break
            self._refuse_ended()

    def _stream_done(self, stream: int) -> bool:
        with self._context_of(stream):
            return self.cuda.stream_done(stream)

    # --- what it is -----------------------------------------------------------------------------------------------

    @property
    def sequence(self) -> int:
        return self._sequence

    @property
    def staging(self) -> int:
        return _SCRATCH if self._comm is not None else 0

    @property
    def communicator(self) -> Communicator | None:
        """The communicator, once there is one."""
        return self._comm

    def describe(self) -> str:
        words = library.describe(self.nccl)
        if self._comm is None:
            return f"{words}, connects at its first operation"
        words += f" on cuda:{self._device} ({self.cuda.facts(self._device).name})"
        return "; ".join(filter(None, (words, *self._transports())))

    def _transports(self) -> list[str]:
        """The ways that NCCL has probably chosen, and those that it says itself."""
        met = self._met
        try:
            told = dict(zip(met.ranks, facts_of(met, _ASKING_S), strict=True))
            facts = [told[rank] for rank in self.context.ranks]
            variables = transports.settings()
            found = transports.expected(self.context.rank, facts, self.cuda, self._options.net_name, variables)
            return [found, transports.logged(variables)]
        except Exception as e:  # who explains must not fail; the store may be gone
            return [f"expected transports: not known ({e})"]


def _streams(calls: Iterable[Call]) -> list[int]:
    """The streams that the calls' arrays are ordered by, each once."""
    found: list[int] = []
    for call in calls:
        for buffer in call.inputs:
            if buffer.stream not in found:
                found.append(buffer.stream)
        if call.outputs is not call.inputs:
            for buffer in call.outputs:
                if buffer.stream not in found:
                    found.append(buffer.stream)
    return found
