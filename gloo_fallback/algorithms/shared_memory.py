"""The collectives in shared memory (:class:`~gloo_fallback.shm.slots.Slots`), for the ranks of one
host.

Arrays are processed in chunks that fit the slots, so the shared memory does not grow with the
arrays. Reductions proceed in rank order, so the result does not depend on the rank that computes
it. Large arrays are not copied to the slots if they are in symmetric memory
(:mod:`~gloo_fallback.algorithms.peer_memory`).

Small operations are one step, and a reduction of arrays that fit a slot is at most two. What these
need besides the arrays, such as views of the slots, depends only on the kind of call and on which
slot is next, so it is made once and kept (:class:`Plan`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from gloo_fallback.algorithms import peer_memory
from gloo_fallback.algorithms.operands import (
    blocks_of,
    bounds_of,
    exchanged_blocks,
    slices_of,
)
from gloo_fallback.algorithms.over_sockets import check_counts
from gloo_fallback.shm.slots import SLOT, Slots
from unicoll.arrays.kernels import Flat, Kernel
from unicoll.backend import Call
from unicoll.backend.host import flat_of, kernel_of, shape_hash

WHOLE = 1 << 16
"""Arrays are reduced entirely by every rank, in one step, if those of the other ranks together have
up to this size. All blocks together up to this size are moved in one step with a plan."""
_CHUNK = 1 << 18
"""Bytes of a chunk that two ranks reduce: it stays in their caches."""
_MOST_PARTS = 16
"""With more ranks a reduction in parts has no plan: its views would take too much memory."""
# Each size and type of a call is a kind of its own, so a program may have any number of them.
_MAX_PLANS = 512
_COUNTS = np.dtype(np.int64)
_bytes_of = np.ndarray.tobytes


class Plan(NamedTuple):
    """What a small operation needs besides its arrays.

    Attributes:
        write: the views of this rank's slot that get its data; None if the operation is not one
            step.
        read: the views of the ranks' slots that have the data after the step; a :class:`_PartsPlan`
            of two steps; or None if the arrays are processed in chunks.
        kernel: of a reduction.
        value: see :func:`~unicoll.backend.host.size_agreement.shape_hash`.
    """

    write: Any
    read: Any
    kernel: Any = None
    value: int = 0


class _PartsPlan(NamedTuple):
    """The plan of a reduction of which each rank does a part.

    Attributes:
        write: for each other rank its part, and where it is in this rank's slot for the first step.
        own: this rank's part.
        contributions: where it is in the slots of all ranks after the first step.
        result: where its result is in this rank's slot for the second step.
        read: for each other rank its part, and where the result is after the second step.
    """

    write: list[tuple[slice, Flat]]
    own: slice
    contributions: list[Flat]
    result: Flat
    read: list[tuple[slice, Flat]]


_CHUNKED = Plan(None, None)


def _make_plan(slots: Slots, call: Call, make: Callable[[Slots, Call], Any]) -> Any:
    """Make the plan of a call for its next step, and keep it under the call's kind."""
    found = make(slots, call)
    if call.kind is not None:
        if len(slots.plans) >= _MAX_PLANS:
            slots.plans.clear()
        # The views in a plan are those of the next slot. There are two slots, so a kind has two
        # plans, one for even and one for odd steps.
        slots.plans[call.kind, slots.step & 1] = found
    return found


def barrier(slots: Slots, call: Call) -> None:
    """Return once all ranks have entered the barrier."""
    slots.sync_step(call)


def broadcast(slots: Slots, call: Call) -> None:
    """The root's data to all, a slot at a time."""
    flat = flat_of(call.inputs[0])
    if (
        flat.nbytes > WHOLE
        and slots.may_be_direct(flat.nbytes)
        and peer_memory.broadcast(slots, call, flat)
    ):
        return
    chunk_size = SLOT // flat.itemsize
    # An empty array takes a step, too: it compares the calls.
    for start in range(0, max(flat.size, 1), chunk_size):
        chunk = flat[start : start + chunk_size]
        shared = slots.next_slot(call.root, 0, chunk.size, flat.dtype)
        if slots.rank == call.root:
            shared[:] = chunk
        slots.sync_step(None if start else call)
        if slots.rank != call.root:
            chunk[:] = shared


# --- reductions -----------------------------------------------------------------------------------


def all_reduce(slots: Slots, call: Call) -> None:
    """The reduction of all ranks' data to all."""
    plan = slots.plans.get((call.kind, slots.step & 1)) or _make_plan(slots, call, _plan_all_reduce)
    source, out = flat_of(call.inputs[0]), flat_of(call.outputs[0])
    if plan.write is not None:
        plan.write[...] = source
        slots.sync_step(call)
        plan.kernel.combine(plan.read, out, True)
        return
    kernel = kernel_of(call)
    if slots.may_be_direct(out.nbytes):
        if peer_memory.all_reduce(slots, call, kernel, source, out):
            return
        # The attempt has moved nothing, but it has made one step. So another slot is next, and the
        # views of the first plan are those of a slot that other ranks may still read.
        plan = _make_plan(slots, call, _plan_all_reduce)
    _reduce_large(slots, call, plan, kernel, source, out)


def _plan_all_reduce(slots: Slots, call: Call) -> Plan:
    source, size = flat_of(call.inputs[0]), slots.size
    if source.nbytes * (size - 1) <= WHOLE:
        return Plan(*slots.rows(source.size, source.dtype), kernel_of(call))
    if size == 2 or size > _MOST_PARTS or source.nbytes > SLOT:
        return _CHUNKED
    dtype, parts = source.dtype, slices_of(np.diff(bounds_of(source.size, size)).tolist())
    # A rank's own part is in no slot: it is read from its array. All other parts are at the place
    # that they have in the array.
    contributions = [slots.next_slot(r, 0, source.size, dtype) for r in range(size)]
    results = [
        slots.later_slot(r, 0, part.stop - part.start, dtype) for r, part in enumerate(parts)
    ]
    rank, own = slots.rank, parts[slots.rank]
    others = [r for r in range(size) if r != rank]
    return Plan(
        None,
        _PartsPlan(
            [(parts[r], contributions[rank][parts[r]]) for r in others],
            own,
            [contribution[own] for contribution in contributions],
            results[rank],
            [(parts[r], results[r]) for r in others],
        ),
    )


def reduce(slots: Slots, call: Call) -> None:
    """The reduction of all ranks' data to the root."""
    plan = slots.plans.get((call.kind, slots.step & 1)) or _make_plan(slots, call, _plan_all_reduce)
    source = flat_of(call.inputs[0])
    out = flat_of(call.outputs[0]) if call.outputs else None
    if plan.write is not None:
        plan.write[...] = source
        slots.sync_step(call)
        if out is not None:
            plan.kernel.combine(plan.read, out, True)
        return
    kernel = kernel_of(call)
    if slots.symmetric is not None:
        if peer_memory.reduce(slots, call, kernel, source, out):
            return
        # The attempt has made one step, as in all_reduce.
        plan = _make_plan(slots, call, _plan_all_reduce)
    _reduce_large(slots, call, plan, kernel, source, out)


def _reduce_large(
    slots: Slots, call: Call, plan: Plan, kernel: Kernel, source: Flat, out: Flat | None
) -> None:
    """The reduction to the ranks that pass ``out``.

    Two ranks reduce everything: that takes one step, and no result is copied. More ranks reduce a
    part each.
    """
    if slots.size == 2:
        _reduce_by_both(slots, call, kernel, source, out)
    elif plan.read is not None:
        _reduce_in_parts(slots, call, plan.read, kernel, source, out)
    else:
        _reduce_in_chunks(slots, call, kernel, source, out)


def _reduce_by_both(
    slots: Slots, call: Call, kernel: Kernel, source: Flat, out: Flat | None
) -> None:
    """Two ranks copy a chunk to their slots, and reduce it from their own array and the other's
    slot."""
    rank, dtype, chunk_size = slots.rank, source.dtype, _CHUNK // source.itemsize
    for start in range(0, source.size, chunk_size):
        chunk = source[start : start + chunk_size]
        slots.next_slot(rank, 0, chunk.size, dtype)[...] = chunk
        slots.sync_step(None if start else call)
        if out is not None:
            # The other rank reads the slot and not the array, so this one may overwrite its array
            # at once if it is the output.
            other = slots.last_slot(1 - rank, 0, chunk.size, dtype)
            both = [other, chunk] if rank else [chunk, other]
            kernel.combine(both, out[start : start + chunk_size])


def _reduce_in_parts(
    slots: Slots, call: Call, plan: _PartsPlan, kernel: Kernel, source: Flat, out: Flat | None
) -> None:
    """An array that fits a slot: each rank reduces its part of all arrays in one step, and
    publishes it in another."""
    for part, view in plan.write:
        view[...] = source[part]
    slots.sync_step(call)
    contributions = [*plan.contributions]
    contributions[slots.rank] = source[plan.own]
    # The result is in the slot of the step before, which nobody reads any more: all ranks have
    # signalled the first step of this call.
    kernel.combine(contributions, plan.result, disjoint=True)
    slots.sync_step()
    # The other ranks have read only the slot, so ``out`` may be the source.
    if out is not None:
        out[plan.own] = plan.result
        for part, view in plan.read:
            out[part] = view


def _reduce_in_chunks(
    slots: Slots, call: Call, kernel: Kernel, source: Flat, out: Flat | None
) -> None:
    """Each rank reduces its block of every chunk, directly from the slots of all ranks, and
    publishes the result.

    The first half of a slot holds a rank's contribution to one chunk, the second half its result
    for the previous chunk: one step publishes both.
    """
    half = SLOT // 2
    chunk_size = half // source.itemsize
    previous: tuple[int, list[int]] | None = None
    rank, size, dtype = slots.rank, slots.size, source.dtype
    for start in range(0, source.size + chunk_size, chunk_size):
        chunk = source[start : start + chunk_size]
        bounds = bounds_of(chunk.size, size)
        low, high = bounds[rank], bounds[rank + 1]
        if chunk.size:
            contribution = slots.next_slot(rank, 0, chunk.size, dtype)
            contribution[:low] = chunk[:low]
            contribution[high:] = chunk[high:]
        slots.sync_step(None if start else call)
        # One step is made behind the last chunk, which publishes the results for it.
        if previous is not None and out is not None:
            _copy_results(slots, out, *previous, half)
        if not chunk.size:
            return
        parts = [slots.last_slot(r, 0, chunk.size, dtype)[low:high] for r in range(size)]
        # This rank's own block has not been copied to the slot, because no other rank needs it.
        parts[rank] = chunk[low:high]
        result = slots.next_slot(rank, half, high - low, dtype)
        if high > low:
            kernel.combine(parts, result, disjoint=True)
        previous = (start, bounds)


def _copy_results(slots: Slots, out: Flat, start: int, bounds: list[int], half: int) -> None:
    for r in range(slots.size):
        low, high = bounds[r], bounds[r + 1]
        out[start + low : start + high] = slots.last_slot(r, half, high - low, out.dtype)


def reduce_scatter(slots: Slots, call: Call) -> None:
    """Rank i gets block i of the reduction."""
    plan = slots.plans.get((call.kind, slots.step & 1)) or _make_plan(
        slots, call, _plan_reduce_scatter
    )
    if plan.write is None:
        _reduce_scatter_in_chunks(slots, call)
        return
    inputs = call.inputs
    for r, view in plan.write:
        view[...] = inputs[r].flat
    slots.sync_step(call)
    plan.kernel.combine(plan.read, flat_of(call.outputs[0]), True)


def _plan_reduce_scatter(slots: Slots, call: Call) -> Plan:
    """The blocks follow one another in a slot; an array that holds all of them is written as
    one."""
    blocks = blocks_of(call.inputs, call.op.joined, slots.size)
    if sum(b.nbytes for b in blocks) > WHOLE:
        return _CHUNKED
    dtype, start, write = blocks[0].dtype, 0, []
    for r, block in enumerate(blocks):
        if r == slots.rank:
            read = [slots.next_slot(other, start, block.size, dtype) for other in range(slots.size)]
        write.append((r, slots.next_slot(slots.rank, start, block.size, dtype)))
        start += block.nbytes
    if call.op.joined:
        write = [(0, slots.next_slot(slots.rank, 0, start // dtype.itemsize, dtype))]
    return Plan(write, read, kernel_of(call))


def _reduce_scatter_in_chunks(slots: Slots, call: Call) -> None:
    out, kernel = flat_of(call.outputs[0]), kernel_of(call)
    blocks = blocks_of(call.inputs, call.op.joined, slots.size)
    rank, dtype = slots.rank, out.dtype
    # The size of one block decides: reading small blocks is slower than the slots.
    nbytes = sum(block.nbytes for block in blocks) // slots.size
    if slots.may_be_direct(nbytes) and peer_memory.reduce_scatter(
        slots, call, kernel, blocks, out, nbytes
    ):
        return
    exchange = BlockExchange(slots, blocks, ())
    for start in range(0, max(1, *(block.size for block in blocks)), exchange.chunk_size):
        exchange.write(start)
        slots.sync_step(None if start else call)
        mine = blocks[rank][start : start + exchange.chunk_size]
        if mine.size:
            at = rank * exchange.stride
            parts = [slots.last_slot(r, at, mine.size, dtype) for r in range(slots.size)]
            parts[rank] = mine
            kernel.combine(parts, out[start : start + mine.size])


def scan(slots: Slots, call: Call) -> None:
    """Inclusive scan: the reduction of the data of ranks 0 to this one; an exscan excludes this
    rank.

    Each rank reduces the slots of the ranks before it, a slot at a time.
    """
    flat, kernel = flat_of(call.inputs[0]), kernel_of(call)
    if (
        slots.symmetric is not None
        and flat.nbytes > WHOLE
        and peer_memory.scan(slots, call, kernel, flat)
    ):
        return
    chunk_size = SLOT // flat.itemsize
    for start in range(0, max(flat.size, 1), chunk_size):
        chunk = flat[start : start + chunk_size]
        slots.next_slot(slots.rank, 0, chunk.size, flat.dtype)[:] = chunk
        slots.sync_step(None if start else call)
        contributions = [slots.last_slot(r, 0, chunk.size, flat.dtype) for r in range(slots.rank)]
        if not call.op.exclusive:
            contributions.append(chunk)
        if contributions and chunk.size:
            kernel.combine(contributions, chunk)


# --- data movement --------------------------------------------------------------------------------


def all_gather(slots: Slots, call: Call) -> None:
    """Every rank's data to all; sizes may differ."""
    plan = slots.plans.get((call.kind, slots.step & 1)) or _make_plan(slots, call, _plan_all_gather)
    source = flat_of(call.inputs[0])
    if plan.write is None:
        targets = blocks_of(call.outputs, call.op.joined, slots.size)
        # The number is equal on all ranks, since all have to decide alike. That holds also where
        # the sizes differ: every rank knows all of them.
        nbytes = sum(target.nbytes for target in targets)
        if not (
            slots.may_be_direct(nbytes)
            and peer_memory.all_gather(slots, call, source, targets, nbytes)
        ):
            _all_gather_chunks(slots, call, source, targets, max(t.size for t in targets))
        return
    plan.write[...] = source
    slots.sync_step(call)
    if call.op.joined:
        out = flat_of(call.outputs[0])
        for where, view in plan.read:
            out[where] = view
    else:
        _set_flats(call.outputs, plan.read)


def _plan_all_gather(slots: Slots, call: Call) -> Plan:
    source, targets = flat_of(call.inputs[0]), blocks_of(call.outputs, call.op.joined, slots.size)
    if sum(t.nbytes for t in targets) > WHOLE:
        return _CHUNKED
    views = [slots.next_slot(r, 0, target.size, source.dtype) for r, target in enumerate(targets)]
    where = slices_of([t.size for t in targets]) if call.op.joined else range(slots.size)
    return Plan(views[slots.rank], [*zip(where, views, strict=True)])


def _set_flats(outputs: Sequence[Any], views: Sequence[tuple[int, Flat]]) -> None:
    """Set outputs, given by number, to the contents of views."""
    for r, view in views:
        outputs[r].flat[...] = view


def gather(slots: Slots, call: Call, counts: Sequence[int] | None = None) -> bool:
    """Every rank's data to the root; False, without effect, if sizes differ and ``counts`` is
    None."""
    source = flat_of(call.inputs[0])
    if counts is not None:
        targets = [flat_of(b) for b in call.outputs]
        return _all_gather_chunks(slots, None, source, targets, max(counts))
    plan = slots.plans.get((call.kind, slots.step & 1)) or _make_plan(slots, call, _plan_gather)
    if plan.write is None:
        targets = [flat_of(b) for b in call.outputs]
        return _all_gather_chunks(slots, call, source, targets, source.size, plan.value)
    plan.write[...] = source
    if not slots.sync_step_checked(call, plan.value):
        return False
    _set_flats(call.outputs, plan.read)
    return True


def _plan_gather(slots: Slots, call: Call) -> Plan:
    source, value = flat_of(call.inputs[0]), shape_hash(call)
    if source.nbytes * slots.size > WHOLE:
        return Plan(None, None, None, value)
    views = [slots.next_slot(r, 0, source.size, source.dtype) for r in range(slots.size)]
    # Only the root has outputs; the other ranks read nothing.
    read = [*enumerate(views)] if call.outputs else []
    return Plan(views[slots.rank], read, None, value)


def _all_gather_chunks(
    slots: Slots,
    call: Call | None,
    source: Flat,
    targets: Sequence[Flat],
    largest: int,
    value: int | None = None,
) -> bool:
    """Publish ``source`` a slot at a time; fill ``targets`` (if any) with the data of all ranks.

    Returns False, without effect, if ``value`` is not None and not equal on all ranks.
    """
    dtype, rank = source.dtype, slots.rank
    chunk_size = SLOT // dtype.itemsize
    # The first chunk always goes through the slots if sizes are compared: only after that step do
    # all ranks know that they are equal, and that they choose the same way for the rest.
    for start in range(0, max(largest, 1), chunk_size):
        chunk = source[start : start + chunk_size]
        slots.next_slot(rank, 0, chunk.size, dtype)[:] = chunk
        if start or value is None:
            slots.sync_step(None if start else call)
        elif not slots.sync_step_checked(call, value):
            return False
        for r, target in enumerate(targets):
            part = target[start : start + chunk_size]
            part[:] = chunk if r == rank else slots.last_slot(r, 0, part.size, dtype)
        nbytes = largest * dtype.itemsize * slots.size
        if (
            (value is not None and start == 0 and largest > chunk_size)
            and slots.may_be_direct(nbytes)
            and peer_memory.all_gather(
                slots,
                None,
                source[chunk_size:],
                [target[chunk_size:] for target in targets],
                nbytes,
            )
        ):
            break
    return True


def scatter(slots: Slots, call: Call, counts: Sequence[int] | None = None) -> bool:
    """The root's i-th array to rank i; False, without effect, if sizes differ and ``counts`` is
    None."""
    out = flat_of(call.outputs[0])
    value = 0
    if counts is None:
        plan = slots.plans.get((call.kind, slots.step & 1)) or _make_plan(
            slots, call, _plan_scatter
        )
        value = plan.value
        if plan.write is not None:
            for r, view in plan.write:
                view[...] = call.inputs[r].flat
            if not slots.sync_step_checked(call, value):
                return False
            out[...] = plan.read
            return True
    dtype, rank, root = out.dtype, slots.rank, call.root
    sources = [flat_of(b) for b in call.inputs]
    chunk_size = SLOT // slots.size // dtype.itemsize
    stride = chunk_size * dtype.itemsize
    largest = out.size if counts is None else max(counts)
    for start in range(0, max(largest, 1), chunk_size):
        for r, source in enumerate(sources):
            part = source[start : start + chunk_size]
            slots.next_slot(rank, r * stride, part.size, dtype)[:] = part
        # With ``counts`` the calls were compared before, when their sizes turned out to differ.
        if start or counts is not None:
            slots.sync_step()
        elif not slots.sync_step_checked(call, value):
            return False
        mine = out[start : start + chunk_size]
        mine[:] = slots.last_slot(root, rank * stride, mine.size, dtype)
        if (
            (counts is None and start == 0 and largest > chunk_size)
            and slots.may_be_direct(
                (largest - chunk_size) * dtype.itemsize * slots.size, scatter=True
            )
            and peer_memory.scatter(slots, sources, out, root, chunk_size)
        ):
            break
    return True


def _plan_scatter(slots: Slots, call: Call) -> Plan:
    """If the root's arrays differ in size, it writes none: no rank completes the step."""
    out, value = flat_of(call.outputs[0]), shape_hash(call)
    if out.nbytes * slots.size > WHOLE:
        return Plan(None, None, None, value)
    write = []
    if value >= 0:
        write = [
            (r, slots.next_slot(slots.rank, r * out.nbytes, out.size, out.dtype))
            for r in range(len(call.inputs))
        ]
    return Plan(
        write, slots.next_slot(call.root, slots.rank * out.nbytes, out.size, out.dtype), None, value
    )


# --- all_to_all -----------------------------------------------------------------------------------


def all_to_all(slots: Slots, call: Call) -> None:
    """Block j of rank i becomes block i of rank j."""
    plan = slots.plans.get((call.kind, slots.step & 1)) or _make_plan(slots, call, _plan_exchange)
    rank, single = slots.rank, call.op.joined
    # The sizes are written in each call, because other calls use the slot meanwhile.
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
            # The blocks of this rank are done, but others have larger ones. They need these steps,
            # and a step needs all ranks.
            for _ in range(plan.chunk_size, largest, plan.chunk_size):
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
    """Exchange all blocks from element ``start`` on without slots; False, on all ranks, if that is
    impossible."""
    nbytes = largest * slots.size * sources[0].itemsize
    return slots.may_be_direct(nbytes) and peer_memory.all_to_all(
        slots, sources, targets, start, nbytes
    )


def _head(slots: Slots) -> int:
    """Bytes before the blocks of an all_to_all: the sizes, in whole cache lines."""
    return -(-16 * slots.size // 64) * 64


class _ExchangePlan(NamedTuple):
    """The plan of an all_to_all.

    Attributes:
        counts: elements that this rank sends to each rank, then those that it expects.
        head: where they are written in this rank's slot.
        heads: where those of the other ranks are after the step.
        seen: the sizes of the other ranks at the last call, which have been compared, and the
            largest of all ranks.
        chunk_size: elements per block and step; 0 if the blocks of this rank need several steps, or
            are large.
        write, read: for each other rank its number, or its part of the one array, and the view of a
            slot.
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
    return _ExchangePlan(
        counts, own, heads, [None, 0], chunk_size, write, read, sources[rank], targets[rank]
    )


def _agree_on_counts(slots: Slots, plan: _ExchangePlan) -> int:
    """Compare the sizes of all ranks, which precede the blocks in the slots; returns the
    largest."""
    found = [*map(_bytes_of, plan.heads)]
    # The sizes of the last call with this plan agreed, so equal bytes need no second comparison.
    if found != plan.seen[0]:
        rows = [np.frombuffer(row, _COUNTS) for row in found]
        table = np.stack([*rows[: slots.rank], plan.counts, *rows[slots.rank :]])
        check_counts(slots.state, table)
        plan.seen[:] = found, int(table.max())
    largest: int = plan.seen[1]
    return largest


class BlockExchange:
    """A block per rank: a slot holds ``head`` bytes, then ``chunk_size`` elements (``stride``
    bytes) for each rank."""

    def __init__(
        self, slots: Slots, sources: Sequence[Flat], targets: Sequence[Flat], head: int = 0
    ) -> None:
        self._slots, self._sources, self._targets, self._head = slots, sources, targets, head
        self._dtype = sources[0].dtype
        # It depends on the size of a slot only, and not on the blocks: every rank has to find the
        # part for it without knowing the sizes of the others.
        self.chunk_size = (SLOT - head) // slots.size // self._dtype.itemsize
        self.stride = self.chunk_size * self._dtype.itemsize

    def write(self, start: int) -> None:
        """Write ``chunk_size`` elements from ``start`` on of each block into this rank's slot for
        the next step."""
        slots = self._slots
        for r, source in enumerate(self._sources):
            if r != slots.rank and source.size > start:
                part = source[start : start + self.chunk_size]
                slots.next_slot(slots.rank, self._head + r * self.stride, part.size, self._dtype)[
                    :
                ] = part

    def read(self, start: int) -> None:
        """Read the elements from ``start`` on that the other ranks wrote for this rank before the
        last step."""
        slots = self._slots
        for r, target in enumerate(self._targets):
            if r != slots.rank and target.size > start:
                part = target[start : start + self.chunk_size]
                part[:] = slots.last_slot(
                    r, self._head + slots.rank * self.stride, part.size, self._dtype
                )

    def exchange(self, start: int, largest: int) -> None:
        """Exchange all elements from ``start`` on; ``largest`` is the size of the largest block of
        all ranks."""
        for at in range(start, largest, self.chunk_size):
            self.write(at)
            self._slots.sync_step()
            self.read(at)
