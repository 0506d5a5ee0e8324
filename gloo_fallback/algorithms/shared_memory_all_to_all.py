"""all_to_all in shared memory (:class:`~gloo_fallback.shm.slots.Slots`), for the ranks of one host.

A slot holds the sizes that its rank sends and expects, then one block for each rank, in chunks that fit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from gloo_fallback.algorithms import peer_memory
from gloo_fallback.algorithms.operands import exchanged_blocks, flat_of, slices_of
from gloo_fallback.algorithms.over_sockets import check_counts
from gloo_fallback.algorithms.shared_memory_plans import WHOLE, make_plan
from gloo_fallback.shm.slots import SLOT, Slots
from unicoll.arrays.kernels import Flat
from unicoll.backend import Call


def all_to_all(slots: Slots, call: Call) -> None:
    """Block j of rank i becomes block i of rank j."""
    plan = slots.plans.get((call.kind, slots.step & 1)) or make_plan(slots, call, _plan_exchange)
    rank, single = slots.rank, call.op.joined
    plan.head[...] = plan.counts
    if plan.chunk_size:
        inputs = call.inputs
        if single:
            source, out = flat_of(inputs[0]), flat_of(call.outputs[0])
            for where, view in plan.write:
                view[...] = source[where]
        else:
            for r, view in plan.write:
                view[...] = inputs[r].flat
        slots.sync_step(call)
        largest = _agree_on_counts(slots, plan)
        outputs: Any = call.outputs
        if single:
            out[plan.own_target] = source[plan.own_source]
            for where, view in plan.read:
                out[where] = view
        else:
            outputs[rank].flat[...] = inputs[rank].flat
            for r, view in plan.read:
                outputs[r].flat[...] = view
        if largest > plan.chunk_size and not _exchanged_directly(
            slots, *exchanged_blocks(call), plan.chunk_size, largest
        ):
            for _ in range(plan.chunk_size, largest, plan.chunk_size):  # blocks of other ranks
                slots.sync_step()
        return
    sources, targets = exchanged_blocks(call)
    parts = BlockExchange(slots, sources, targets, head=_head(slots))
    parts.write(0)
    slots.sync_step(call)
    largest = _agree_on_counts(slots, plan)
    targets[rank][:] = sources[rank]
    parts.read(0)
    if largest > parts.chunk_size and not _exchanged_directly(
        slots, sources, targets, parts.chunk_size, largest
    ):
        parts.exchange(parts.chunk_size, largest)


def _exchanged_directly(
    slots: Slots, sources: Sequence[Flat], targets: Sequence[Flat], start: int, largest: int
) -> bool:
    """Exchange all blocks from element ``start`` on without slots; False, on all ranks, if that is impossible."""
    nbytes = largest * slots.size * sources[0].itemsize
    return slots.may_be_direct(nbytes) and peer_memory.all_to_all(slots, sources, targets, start, nbytes)


_COUNTS = np.dtype(np.int64)
_bytes_of = np.ndarray.tobytes


def _head(slots: Slots) -> int:
    """Bytes before the blocks of an all_to_all: the sizes, in whole cache lines."""
    return -(-16 * slots.size // 64) * 64


class _ExchangePlan(NamedTuple):
    """The plan of an all_to_all.

    Attributes:
        counts: elements that this rank sends to each rank, then those that it expects.
        head: where they are written in this rank's slot.
        heads: where those of the other ranks are after the step.
        seen: the sizes of the other ranks at the last call, which have been compared, and the largest of all ranks.
        chunk_size: elements per block and step; 0 if the blocks of this rank need several steps, or are large.
        write, read: for each other rank its number, or its part of the one array, and the view of a slot.
        own_source, own_target: this rank's part of the one array.
    """

    counts: Any
    head: Any
    heads: list[Any]
    seen: list[Any]
    chunk_size: int = 0
    write: list[Any] = []
    read: list[Any] = []
    own_source: slice = slice(0)
    own_target: slice = slice(0)


def _plan_exchange(slots: Slots, call: Call) -> _ExchangePlan:
    """The blocks are where :class:`BlockExchange` has them: other ranks may have larger ones."""
    assert call.in_counts is not None
    assert call.out_counts is not None
    size, rank, single = slots.size, slots.rank, call.op.joined
    counts = np.array((*call.in_counts, *call.out_counts), _COUNTS)
    heads = [slots.next_slot(r, 0, 2 * size, _COUNTS) for r in range(size) if r != rank]
    own = slots.next_slot(rank, 0, 2 * size, _COUNTS)
    head, dtype = _head(slots), flat_of(call.inputs[0]).dtype
    chunk_size = (SLOT - head) // size // dtype.itemsize
    stride = chunk_size * dtype.itemsize
    large = max(sum(call.in_counts), sum(call.out_counts)) * dtype.itemsize > WHOLE
    if large or counts.max() > chunk_size:
        return _ExchangePlan(counts, own, heads, [None, 0])
    sources, targets = slices_of(call.in_counts), slices_of(call.out_counts)
    write, read = [], []
    for r, (sent, expected) in enumerate(zip(call.in_counts, call.out_counts, strict=True)):
        if r != rank and sent:
            view = slots.next_slot(rank, head + r * stride, sent, dtype)
            write.append((sources[r] if single else r, view))
        if r != rank and expected:
            view = slots.next_slot(r, head + rank * stride, expected, dtype)
            read.append((targets[r] if single else r, view))
    return _ExchangePlan(counts, own, heads, [None, 0], chunk_size, write, read, sources[rank], targets[rank])


def _agree_on_counts(slots: Slots, plan: _ExchangePlan) -> int:
    """Compare the sizes of all ranks, which precede the blocks in the slots; returns the largest."""
    found = [*map(_bytes_of, plan.heads)]
    if found != plan.seen[0]:
        rows = [np.frombuffer(row, _COUNTS) for row in found]
        table = np.stack([*rows[: slots.rank], plan.counts, *rows[slots.rank :]])
        check_counts(slots.state, table)
        plan.seen[:] = found, int(table.max())
    largest: int = plan.seen[1]
    return largest


class BlockExchange:
    """A block per rank: a slot holds ``head`` bytes, then ``chunk_size`` elements (``stride`` bytes) for each rank."""

    def __init__(self, slots: Slots, sources: Sequence[Flat], targets: Sequence[Flat], head: int = 0) -> None:
        self._slots, self._sources, self._targets, self._head = slots, sources, targets, head
        self._dtype = sources[0].dtype
        self.chunk_size = (SLOT - head) // slots.size // self._dtype.itemsize
        self.stride = self.chunk_size * self._dtype.itemsize

    def write(self, start: int) -> None:
        """Write ``chunk_size`` elements from ``start`` on of each block into this rank's slot for the next step."""
        slots = self._slots
        for r, source in enumerate(self._sources):
            if r != slots.rank and source.size > start:
                part = source[start : start + self.chunk_size]
                slots.next_slot(slots.rank, self._head + r * self.stride, part.size, self._dtype)[:] = part

    def read(self, start: int) -> None:
        """Read the elements from ``start`` on that the other ranks wrote for this rank before the last step."""
        slots = self._slots
        for r, target in enumerate(self._targets):
            if r != slots.rank and target.size > start:
                part = target[start : start + self.chunk_size]
                part[:] = slots.last_slot(r, self._head + slots.rank * self.stride, part.size, self._dtype)

    def exchange(self, start: int, largest: int) -> None:
        """Exchange all elements from ``start`` on; ``largest`` is the size of the largest block of all ranks."""
        for at in range(start, largest, self.chunk_size):
            self.write(at)
            self._slots.sync_step()
            self.read(at)
