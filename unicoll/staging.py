"""Arrays on a GPU over a backend that moves the host's memory: through page-locked memory, in pieces.

What the backend can do by address, it gets so (:mod:`unicoll.direct`). The rest is staged:

A collective is cut into pieces, which go one after another through the backend, in the place that the call has in the
group's order. Before, a piece is copied to the host, behind whatever the producer had put on its stream; afterwards
its results are copied to the device. While one piece is with the backend, the next one and the one before are being
copied, on streams of our own.

A call is done when the device has its results: the host needs to wait for them anyway, so the caller's stream has
nothing left to wait for. Packed results of strided arrays are unpacked on the stream of whoever waits.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from .backend import Backend, Caps, Context
from .buffers import Buffer
from .call import Call, ProxyCall
from .device_messages import HARMLESS, Messages
from .direct import Direct
from .dock import Dock, Lanes
from .errors import BackendUnavailableError, DistArgumentError, DistError, GroupAbortedError
from .exchanged import check_sizes, largest_part
from .ops import Sizes
from .pieces import Plan, plan
from .pinned import Pinned
from .streams import cuda, on_device
from .work import Completion

__all__ = ["PIECE", "Staged"]

PIECE = 4 << 20
"""Bytes of a call that are moved at a time; what is larger goes in several pieces."""
_DEPTH = 3
"""Pieces under way: one with the backend, one on its way to it, one on its way back."""
_MESSAGES = frozenset(("send", "recv"))

Execute = Callable[[Call], None]


@dataclass
class _Slot:
    """What one piece has on the host."""

    came: int  # event: the inputs are on the host
    went: int  # event: the results are on the device
    memory: list[Pinned] = field(default_factory=list)
    buffers: dict[int, Buffer] = field(default_factory=dict)
    handed: bool = False  # whether the backend has it


class Staged(Backend):
    """Device arrays over a backend of host arrays, whose calls all go through a :class:`~unicoll.lane.Lane`.

    Args:
        host: which it neither closes nor aborts but for faults of the device.
        rank: in the group.
        ranks: the members' global ranks.
        group: its name.
    """

    def __init__(self, host: Backend, rank: int, ranks: Sequence[int], group: str) -> None:
        self.name = host.name  # type: ignore[misc]
        self.caps = Caps(frozenset(("cuda",)), host.caps.native, host.caps.reduces)  # type: ignore[misc]
        self.compares = host.compares  # type: ignore[misc]
        self._host = host
        self._rank = rank
        self._ranks = ranks
        self._size = len(ranks)
        self._group = group
        self._dock = Dock(cuda(), group)
        self._direct = Direct(host, self._dock, group)
        self._messages = Messages(host, self._dock, self._direct, group)

    @classmethod
    def create(cls, context: Context) -> Backend:
        raise BackendUnavailableError("staging is made around another backend")

    @property
    def sequence(self) -> int:
        return self._host.sequence

    @property
    def staging(self) -> int:
        return self._host.staging + self._dock.pins.held + self._direct.held

    def describe(self) -> str:
        staged = f"through page-locked memory, in pieces of {PIECE >> 20} MiB, and {self.name}"
        if self._host.direct:
            return f"cuda arrays by address to {self.name}, and what it does not reduce itself {staged}"
        return f"cuda arrays {staged}"

    def run(self, call: Call) -> None:
        if call.op.name in _MESSAGES:
            self._messages.run(call)
        else:
            call.carry = self._carrier(call)
            self._host.run(call)
        call.write_back()

    def post(self, calls: Sequence[Call], stream: object = None) -> Completion:
        calls = tuple(calls)
        if calls[0].op.name in _MESSAGES:
            return _Unpacking(self._messages.post(calls[0]), calls, self._dock)
        for call in calls:
            call.carry = self._carrier(call)
        return _Unpacking(self._host.post(calls), calls, self._dock)

    def abort(self, error: Exception) -> None:
        self._host.abort(error)

    def close(self) -> None:
        """Give everything back; the backend has been closed."""
        self._messages.close()
        self._direct.close()
        self._dock.close()

    # --- collectives -------------------------------------------------------------------------------------------------

    def _carrier(self, call: Call) -> Callable[[Execute], None] | None:
        if not call.inputs and not call.outputs:
            return None
        if self._host.takes_device(call):
            return self._direct.carrier(call)
        return partial(self._carry, call, self._dock.begin(call))

    def _cut(self, call: Call, execute: Execute) -> Plan:
        """The pieces of a collective; the members agree on them where no rank knows all sizes, or one alone."""
        if self._size == 1 or not (call.op.sizes is Sizes.EXCHANGED or call.op.told_by_root):
            return plan(call, self._size, PIECE)
        cut = plan(call, self._size, PIECE, largest_part(call, execute))
        if cut.pieces > 1:
            try:
                check_sizes(call, self._rank, self._ranks, self._group, execute)
            except DistArgumentError:  # the root's; the group goes on
                raise
            except DistError as e:
                self._host.abort(e)
                raise
        return cut

    def _carry(self, call: Call, device: int, execute: Execute) -> None:
        """Do a collective, piece by piece, at its place in the group's order."""
        call.carry = None
        deadline = time.monotonic() + call.timeout
        cut = self._cut(call, execute)
        slots: list[_Slot] = []
        with on_device(self._dock.cuda, device):
            lanes = self._dock.lanes(device)
            error: BaseException | None = None
            try:
                for _ in range(min(_DEPTH, cut.pieces)):
                    slots.append(_Slot(self._dock.event(device), self._dock.event(device)))
                self._fetch(call, cut, 0, slots[0], lanes)
                for k in range(cut.pieces):
                    slot = slots[k % len(slots)]
                    if k + 1 < cut.pieces:
                        after = slots[(k + 1) % len(slots)]
                        self._dock.wait(after.went, call, deadline)
                        self._fetch(call, cut, k + 1, after, lanes)
                    self._dock.wait(slot.came, call, deadline)
                    slot.handed = True
                    execute(self._piece(call, cut, k, slot, deadline))
                    slot.handed = False
                    self._store(call, cut, k, slot, lanes)
                for slot in slots:
                    self._dock.wait(slot.went, call, deadline)
            except BaseException as e:
                error = e
                if not any(slot.handed for slot in slots):  # the others wait for us with the next piece
                    self._host.abort(
                        e if isinstance(e, DistError) else GroupAbortedError(f"{e}", group=self._group)
                    )
                raise
            finally:
                self._release(slots, call, device, error)

    def _fetch(self, call: Call, cut: Plan, k: int, slot: _Slot, lanes: Lanes) -> None:
        """Make room for a piece, and let its inputs come."""
        unread = call.op.name == "broadcast" and self._rank != call.root
        for buffer in dict.fromkeys((*call.inputs, *call.outputs)):
            ranges = cut.ranges(buffer, k)
            room = self._room(slot, buffer, sum(count for _, count in ranges), cut.pieces == 1)
            if buffer in call.inputs and not unread:
                self._copy(buffer, ranges, room, lanes.down, False)
        self._dock.cuda.record(slot.came, lanes.down)

    def _room(self, slot: _Slot, buffer: Buffer, count: int, whole: bool) -> Buffer:
        """A piece of a buffer on the host; it has the buffer's shape if it is the whole of it."""
        kept = slot.buffers.get(id(buffer))
        if kept is None or kept.owner.size < count * buffer.dtype.itemsize:
            pinned = self._dock.pins.take(count * buffer.dtype.itemsize)
            slot.memory.append(pinned)
        else:
            pinned = kept.owner
        flat = pinned.bytes[: count * buffer.dtype.itemsize].view(buffer.dtype.storage)
        shape = buffer.shape if whole else flat.shape
        slot.buffers[id(buffer)] = room = Buffer(pinned, buffer.dtype, shape, flat)
        return room

    def _copy(
        self, buffer: Buffer, ranges: Sequence[tuple[int, int]], room: Buffer, stream: int, back: bool
    ) -> None:
        """Copy between a piece of a buffer and its room on the host."""
        itemsize, at = buffer.dtype.itemsize, room.owner.ptr
        for first, count in ranges:
            there = buffer.ptr + first * itemsize
            to, source = (there, at) if back else (at, there)
            if count:
                self._dock.cuda.copy(to, source, count * itemsize, stream)
            at += count * itemsize

    def _piece(self, call: Call, cut: Plan, k: int, slot: _Slot, deadline: float) -> Call:
        """A piece as a call on host arrays."""
        inputs = tuple(slot.buffers[id(b)] for b in call.inputs)
        outputs = inputs if call.outputs is call.inputs else tuple(slot.buffers[id(b)] for b in call.outputs)
        timeout = call.timeout if k == 0 else max(0.001, deadline - time.monotonic())
        piece = ProxyCall(call, call.op, inputs, outputs, timeout, call.reduce, call.root)
        if call.in_counts is not None:
            piece.in_counts, piece.out_counts = cut.counts(call.inputs, k), cut.counts(call.outputs, k)
            piece.even = call.even
        piece.signature = call.signature if cut.pieces == 1 else hash((call.signature, k))
        return piece

    def _store(self, call: Call, cut: Plan, k: int, slot: _Slot, lanes: Lanes) -> None:
        """Let the results of a piece go."""
        for buffer in call.outputs:
            self._copy(buffer, cut.ranges(buffer, k), slot.buffers[id(buffer)], lanes.up, True)
        self._dock.cuda.record(slot.went, lanes.up)

    def _release(self, slots: Sequence[_Slot], call: Call, device: int, error: BaseException | None) -> None:
        """Give back what a call has used, at once if it went well, else when nothing uses it any more."""
        for slot in slots:
            events = (slot.came, slot.went)
            if error is None:
                self._dock.give(slot.memory, device, events)
            else:
                keeps = slot.handed and self._host.keeps(call) and not isinstance(error, HARMLESS)
                buffers = (*call.inputs, *call.outputs)
                self._dock.lose(() if keeps else slot.memory, buffers, device, events)


class _Unpacking(Completion):
    """A completion whose waiter unpacks the results of strided arrays, on its own stream."""

    __slots__ = ("_calls", "_dock", "_done", "_lock", "_packed")

    def __init__(self, done: Completion, calls: tuple[Call, ...], dock: Dock) -> None:
        self._done = done
        self._calls = calls
        self._dock = dock
        self._packed = any(b.unpack is not None for call in calls for b in call.outputs)
        self._lock = threading.Lock()

    def done(self) -> bool:
        return self._done.done()

    def wait(self, timeout: float | None) -> None:
        self._done.wait(timeout)
        if self._packed:
            with self._lock:
                packed, self._packed = self._packed, False
            if packed:
                for call in self._calls:
                    call.write_back()
                    for buffer in call.outputs:
                        if buffer.unpack is not None:  # the copy may outlast the call
                            self._dock.keep(buffer)

    def exception(self) -> BaseException | None:
        return self._done.exception()

    def took(self) -> float:
        return self._done.took()

    def add_done_callback(self, fn: Callable[[], None]) -> None:
        self._done.add_done_callback(fn)
