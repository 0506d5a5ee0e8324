"""Collectives of large arrays in symmetric memory (:mod:`gloo_fallback.shm.symmetric`), for the ranks of one host.

The ranks read each other's arrays in place, so no data passes through the slots: one step of the slots before, in which
the ranks compare signatures and tell where their arrays are, and one after, when the arrays may be changed again. Each
function returns False, without effect on the arrays, if not all arrays are in symmetric memory; this is the same on all
ranks. The first step is then done; the caller may compare the signatures again in its own first step.

Reductions proceed in rank order, as those through slots, so both give the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np

from gloo_fallback.algorithms.operands import bounds_of, flat_of
from gloo_fallback.shm.slots import Slots
from unicoll.arrays.kernels import Flat, Kernel
from unicoll.backend import Call

__all__ = [
    "all_gather",
    "all_reduce",
    "all_to_all",
    "arrays_of_all",
    "broadcast",
    "reduce",
    "reduce_scatter",
    "scan",
    "scatter",
]

_BLOCK = 1 << 16
"""Bytes of a block: its result stays in the cache until it has been written everywhere."""
_LOCATIONS = np.dtype(np.int64)


def arrays_of_all(
    slots: Slots,
    call: Call | None,
    own: Sequence[Flat],
    counts: Sequence[int],
    dtype: np.dtype[Any],
    *,
    index: int = 0,
    starts: Sequence[int] | None = None,
    suitable: bool = True,
) -> list[Flat] | None:
    """One array of each rank, in place; None on all ranks if the data has to go through the slots.

    Args:
        call: compared between the ranks; None if they have agreed on it.
        own: this rank's arrays; some ranks may have none.
        counts: elements of each rank's array.
        dtype: their element type.
        index: the array of each rank that this one needs.
        starts: element of each rank's array to begin at.
        suitable: False if this rank's array has to be copied first.
    """
    memory, size = slots.symmetric, slots.size
    assert memory is not None
    found = [memory.locate(array) for array in own]
    table = slots.slot(slots.rank, 0, 1 + size, _LOCATIONS)
    table[0] = -1 if -1 in found or not suitable else len(found)
    table[1 : 1 + len(found)] = found
    slots.sync_step(call)
    tables = [slots.slot(r, 0, 1 + size, _LOCATIONS, 0).tolist() for r in range(size)]
    numbers = [table[0] for table in tables]
    if min(numbers) < 0:
        return None
    arrays = []
    for rank, (table, count) in enumerate(zip(tables, counts, strict=True)):
        start = 0 if starts is None else starts[rank] * dtype.itemsize
        arrays.append(memory.view(table[1 + index] + start, rank, count, dtype) if table[0] else None)
    # a rank that passes no array of a region may have dropped its own, and with it the mapping
    regions = {memory.region_of(location) for table in tables for location in table[1 : 1 + table[0]]}
    if len(regions) > 1 or min(numbers) == 0:
        missing = any(a is None and n for a, n in zip(arrays, numbers, strict=True))
        if not slots.sync_step_checked(None, -1 if missing else 0):
            return None
    return arrays  # type: ignore[return-value]


def _address(array: Flat) -> int:
    address: int = array.__array_interface__["data"][0]
    return address


def _copy(target: Flat, source: Flat) -> None:
    if _address(target) != _address(source):
        target[:] = source


def broadcast(slots: Slots, call: Call, flat: Flat) -> bool:
    """Each rank copies the root's array."""
    arrays = arrays_of_all(slots, call, [flat], [flat.size] * slots.size, flat.dtype)
    if arrays is None:
        return False
    if slots.rank != call.root:
        flat[:] = arrays[call.root]
    slots.sync_step()
    return True


def all_reduce(slots: Slots, call: Call, kernel: Kernel, source: Flat, out: Flat) -> bool:
    """Each rank reduces its part of all arrays, and writes it to all, block by block."""
    suitable = _address(source) == _address(out)
    arrays = arrays_of_all(slots, call, [out], [out.size] * slots.size, out.dtype, suitable=suitable)
    if arrays is None:
        return False
    rank, size = slots.rank, slots.size
    low, high = bounds_of(out.size, size)[rank : rank + 2]
    others = [array for r, array in enumerate(arrays) if r != rank]
    step = _BLOCK // out.itemsize
    for start in range(low, high, step):
        stop = min(start + step, high)
        result = out[start:stop]
        kernel.combine([array[start:stop] for array in arrays], result)
        for array in others:
            array[start:stop] = result
    slots.sync_step()
    return True


def reduce(slots: Slots, call: Call, kernel: Kernel, source: Flat, out: Flat | None) -> bool:
    """Each rank reduces its part of all arrays, into the root's."""
    suitable = out is None or _address(source) == _address(out)
    counts = [source.size] * slots.size
    arrays = arrays_of_all(slots, call, [source], counts, source.dtype, suitable=suitable)
    if arrays is None:
        return False
    low, high = bounds_of(source.size, slots.size)[slots.rank : slots.rank + 2]
    if high > low:
        kernel.combine([array[low:high] for array in arrays], arrays[call.root][low:high])
    slots.sync_step()
    return True


def reduce_scatter(slots: Slots, call: Call, kernel: Kernel, out: Flat) -> bool:
    """Each rank reduces its block of all arrays."""
    rank, size = slots.rank, slots.size
    single = call.op.joined
    arrays = arrays_of_all(
        slots,
        call,
        [flat_of(b) for b in call.inputs],
        [out.size] * size,
        out.dtype,
        index=0 if single else rank,
        starts=[rank * out.size if single else 0] * size,
    )
    if arrays is None:
        return False
    if out.size:
        kernel.combine(arrays, out)
    slots.sync_step()
    return True


def scan(slots: Slots, call: Call, kernel: Kernel, flat: Flat) -> bool:
    """Each rank computes its part of all ranks' results, block by block."""
    arrays = arrays_of_all(slots, call, [flat], [flat.size] * slots.size, flat.dtype)
    if arrays is None:
        return False
    low, high = bounds_of(flat.size, slots.size)[slots.rank : slots.rank + 2]
    step = _BLOCK // kernel.acc.itemsize
    total = slots.slot(slots.rank, 0, step, kernel.acc)  # this rank's slots are free until the next step
    result = slots.slot(slots.rank, _BLOCK, step, kernel.storage)
    for start in range(low, high, step):
        stop = min(start + step, high)
        acc, out = total[: stop - start], result[: stop - start]
        kernel.begin(acc, arrays[0][start:stop])
        for r in range(1 if call.op.exclusive else 0, slots.size):
            part = arrays[r][start:stop]
            if call.op.exclusive:
                kernel.finish(acc, out, r)
                kernel.fold(acc, part)
                part[:] = out
            else:
                if r:
                    kernel.fold(acc, part)
                kernel.finish(acc, part, r + 1)
    slots.sync_step()
    return True


def all_gather(slots: Slots, call: Call | None, source: Flat, targets: Sequence[Flat]) -> bool:
    """Each rank copies the arrays of all ranks to its ``targets``, which are empty on a rank that gets nothing."""
    rank, size = slots.rank, slots.size
    counts = [target.size for target in targets] or [0] * size
    arrays = arrays_of_all(slots, call, [source], counts, source.dtype)
    if arrays is None:
        return False
    if targets:
        _copy(targets[rank], source)
        for r in _others(slots):
            targets[r][:] = arrays[r]
    slots.sync_step()
    return True


def scatter(slots: Slots, sources: Sequence[Flat], out: Flat, root: int, start: int) -> bool:
    """Each rank copies its array of the root's list, from element ``start`` on."""
    rank, size = slots.rank, slots.size
    counts = [out.size - start if r == root else 0 for r in range(size)]
    own = [source[start:] for source in sources]
    arrays = arrays_of_all(slots, None, own, counts, out.dtype, index=rank)
    if arrays is None:
        return False
    _copy(out[start:], arrays[root])
    slots.sync_step()
    return True


def all_to_all(
    slots: Slots,
    call: Call,
    inputs: Sequence[Flat],
    targets: Sequence[Flat],
    table: Sequence[Sequence[int]],
    start: int,
) -> bool:
    """Each rank copies its block of all arrays, from element ``start`` of the block on.

    Args:
        inputs: the call's: one array, or one for each rank.
        targets: a block for each rank.
        table: for each rank, the elements that it sends to each rank.
        start: elements of each block that have been exchanged.
    """
    rank, single = slots.rank, call.op.joined
    first = [list(accumulate(row, initial=0))[rank] if single else 0 for row in table]
    arrays = arrays_of_all(
        slots,
        None,
        inputs,
        [max(target.size - start, 0) for target in targets],
        targets[rank].dtype,
        index=0 if single else rank,
        starts=[at + start for at in first],
    )
    if arrays is None:
        return False
    for r in _others(slots):
        if targets[r].size > start:
            targets[r][start:] = arrays[r]
    slots.sync_step()
    return True


def _others(slots: Slots) -> list[int]:
    """The other ranks, beginning with the next, so that not all ranks read the same array at the same time."""
    return [(slots.rank + i) % slots.size for i in range(1, slots.size)]
