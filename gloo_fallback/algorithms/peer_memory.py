"""Collectives of large arrays that the ranks of one host read from each other, without copies to
the slots.

Arrays in symmetric memory (:mod:`gloo_fallback.shm.symmetric_segments`) are read and written in
place, others are copied from the memory of their process (:mod:`gloo_fallback.shm.process_memory`).
There is one step of the slots before, in which the ranks compare signatures and exchange the
locations of their arrays, and one after, when the arrays may be changed. Each function returns
False, without effect on the arrays, if not all arrays can be read; this is the same on all ranks.
The first step is then done; the caller may compare the signatures again in its own first step.

Reductions proceed in rank order, as those through slots, so both give the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from gloo_fallback.algorithms.operands import bounds_of
from gloo_fallback.shm.process_memory import PeerArray, address_of, is_readable
from gloo_fallback.shm.slots import SLOT, Slots
from unicoll.arrays.kernels import Flat, Kernel
from unicoll.backend import Call

_BLOCK = 1 << 16
"""Bytes of a block: its result stays in the cache until it has been written everywhere."""
_READ_BLOCK = 1 << 18
"""Bytes of a block that is copied from another process: the call of the system costs little, and
all ranks' blocks stay in the cache."""
_LOCATIONS = np.dtype(np.int64)

_Array = Any
"""An array of this process, or a :class:`PeerArray`."""


def arrays_of_all(
    slots: Slots,
    call: Call | None,
    own: Sequence[Flat],
    counts: Sequence[int],
    dtype: np.dtype[Any],
    *,
    index: int = 0,
    in_place: bool = True,
    may_read: bool = False,
    also: Flat | None = None,
) -> list[_Array] | None:
    """One array of each rank; None on all ranks if the data has to go through the slots.

    Args:
        call: compared between the ranks; None if they have agreed on it.
        own: this rank's arrays; some ranks may have none.
        counts: elements of each rank's array.
        index: the array of each rank that this one needs.
        in_place: False if this rank's array would have to be copied before others may write to it.
        may_read: True if arrays that are not all in symmetric memory may be read from the
            processes' memory; equal on all ranks.
        also: another array that the other ranks will read from this process's memory.
    """
    # Every rank writes a row into its slot, and after one step all ranks read all rows and decide
    # by them. So the decision is the same on all ranks, although each knows only its own arrays. A
    # rank that cannot take part says so in its row, and still makes the step.
    memory, size, rank = slots.symmetric, slots.size, slots.rank
    found = [memory.locate(array) for array in own] if memory is not None else [-1]
    # The row has the number of arrays, or -1 if they are not all symmetric, and then their
    # locations. With ``may_read`` a second row has the same for reading, with addresses. Arrays in
    # symmetric memory can be read as well, so they are not tested.
    row = slots.next_slot(rank, 0, 1 + size, _LOCATIONS)
    symmetric = in_place and -1 not in found
    row[0] = len(own) if symmetric else -1
    row[1 : 1 + len(found)] = found
    if may_read:
        readable = symmetric or all(map(is_readable, own if also is None else (*own, also)))
        more = slots.next_slot(rank, row.nbytes, 1 + size, _LOCATIONS)
        more[: 1 + len(own)] = [len(own) if readable else -1, *map(address_of, own)]
    slots.sync_step(call)
    rows = [slots.last_slot(r, 0, 1 + size, _LOCATIONS).tolist() for r in range(size)]
    numbers = [row[0] for row in rows]
    if memory is None or min(numbers) < 0:
        if not may_read:
            return None
        rows = [slots.last_slot(r, row.nbytes, 1 + size, _LOCATIONS).tolist() for r in range(size)]
        if min(row[0] for row in rows) < 0:
            return None
        assert slots.peers is not None
        there: list[_Array] = slots.peers.arrays([row[1 + index] for row in rows], counts, dtype)
        if own:
            there[rank] = own[index][: counts[rank]]
        return there
    arrays = []
    for r, (row, count) in enumerate(zip(rows, counts, strict=True)):
        arrays.append(memory.view(row[1 + index], r, count, dtype) if row[0] else None)
    # A rank that passes no array of a region may have dropped its own, and with it the mapping.
    # Then it cannot read those of the others, who do not know that. One more step tells all ranks.
    # Where all pass arrays of one region, each has it mapped, and the step is saved.
    regions = {memory.region_of(location) for row in rows for location in row[1 : 1 + row[0]]}
    if len(regions) > 1 or min(numbers) == 0:
        missing = any(a is None and n for a, n in zip(arrays, numbers, strict=True))
        if not slots.sync_step_checked(None, -1 if missing else 0):
            return None
    return arrays


def _fetch(slots: Slots, target: Flat, rank: int, array: _Array) -> None:
    """Copy a rank's array to one of this rank, unless it is the same one."""
    if not isinstance(array, PeerArray):
        if address_of(target) != address_of(array):
            target[:] = array
        return
    # The rank that owns the array may have died, or have raised an error and freed the array: this
    # call then fails with the name of that rank.
    try:
        array.copy_to(target)
    except OSError as error:
        slots.unreadable(rank, error)


def _must_read(slots: Slots, arrays: Sequence[_Array]) -> bool:
    """True if the arrays of the other ranks are in the memory of their processes."""
    # The array of any other rank answers this, since either all of them are symmetric or all are
    # read.
    return isinstance(arrays[slots.rank - 1], PeerArray)


def _reduce_read(
    slots: Slots, kernel: Kernel, arrays: Sequence[_Array], start: int, out: Flat
) -> None:
    """Reduce the elements of all ranks' arrays from ``start`` on into ``out``, reading those of
    other processes."""
    block = min(_READ_BLOCK, SLOT // slots.size // 64 * 64)
    chunk_size = block // out.itemsize
    for at in range(0, out.size, chunk_size):
        result = out[at : at + chunk_size]
        parts = [array[start + at : start + at + result.size] for array in arrays]
        # This rank's slot serves as working memory: no other rank reads it before the next step,
        # and after that step nothing of it is read.
        for r in _others(slots):
            read = slots.next_slot(slots.rank, r * block, result.size, out.dtype)
            _fetch(slots, read, r, parts[r])
            parts[r] = read
        kernel.combine(parts, result)


def broadcast(slots: Slots, call: Call, flat: Flat) -> bool:
    """Each rank copies the root's array."""
    arrays = arrays_of_all(
        slots,
        call,
        [flat],
        [flat.size] * slots.size,
        flat.dtype,
        may_read=slots.may_read(flat.nbytes),
    )
    if arrays is None:
        return False
    if slots.rank != call.root:
        _fetch(slots, flat, call.root, arrays[call.root])
    # The root must not return before all have copied: its caller may change or free the array.
    slots.sync_step()
    return True


def all_reduce(slots: Slots, call: Call, kernel: Kernel, source: Flat, out: Flat) -> bool:
    """Each rank reduces its part of all arrays, block by block.

    It writes the result to all arrays in symmetric memory; otherwise the ranks read each other's
    results in the end.
    """
    in_place = address_of(source) == address_of(out)
    rank, size, dtype = slots.rank, slots.size, out.dtype
    counts = [out.size] * size
    arrays = arrays_of_all(
        slots,
        call,
        [source],
        counts,
        dtype,
        in_place=in_place,
        may_read=slots.may_read(out.nbytes),
        also=out,
    )
    if arrays is None:
        return False
    bounds = bounds_of(out.size, size)
    low, high = bounds[rank : rank + 2]
    # Each rank writes only its own part of ``out``. No other rank reads that part of the source, so
    # ``out`` may be the source in the first half. The results are read after a step, when all are
    # there.
    if _must_read(slots, arrays):
        _reduce_read(slots, kernel, arrays, low, out[low:high])
        # The other ranks need the address of the output, which the rows of the first step do not
        # have.
        slots.publish_value(address_of(out))
        slots.sync_step()
        assert slots.peers is not None
        outs = slots.peers.arrays([slots.published_value(r) for r in range(size)], counts, dtype)
        for r in _others(slots):
            part = slice(bounds[r], bounds[r + 1])
            _fetch(slots, out[part], r, outs[r][part])
    else:
        others = [array for r, array in enumerate(arrays) if r != rank]
        # A result is computed in blocks, so that it is still in the cache when it is written to the
        # arrays of the others. No other rank accesses this part of any array.
        chunk_size = _BLOCK // out.itemsize
        for start in range(low, high, chunk_size):
            stop = min(start + chunk_size, high)
            result = out[start:stop]
            kernel.combine([array[start:stop] for array in arrays], result)
            for array in others:
                array[start:stop] = result
    slots.sync_step()
    return True


def reduce(slots: Slots, call: Call, kernel: Kernel, source: Flat, out: Flat | None) -> bool:
    """Each rank reduces its part of all arrays, into the root's."""
    # The other ranks write to the array that the root passes as its input, so it has to be the
    # output, too.
    in_place = out is None or address_of(source) == address_of(out)
    counts = [source.size] * slots.size
    arrays = arrays_of_all(slots, call, [source], counts, source.dtype, in_place=in_place)
    if arrays is None:
        return False
    low, high = bounds_of(source.size, slots.size)[slots.rank : slots.rank + 2]
    if high > low:
        kernel.combine([array[low:high] for array in arrays], arrays[call.root][low:high])
    slots.sync_step()
    return True


def reduce_scatter(
    slots: Slots, call: Call, kernel: Kernel, blocks: Sequence[Flat], out: Flat, nbytes: int
) -> bool:
    """Each rank reduces its block of all ranks' ``blocks``."""
    counts = [out.size] * slots.size
    arrays = arrays_of_all(
        slots, call, blocks, counts, out.dtype, index=slots.rank, may_read=slots.may_read(nbytes)
    )
    if arrays is None:
        return False
    if _must_read(slots, arrays):
        _reduce_read(slots, kernel, arrays, 0, out)
    elif out.size:
        kernel.combine(arrays, out)
    slots.sync_step()
    return True


def scan(slots: Slots, call: Call, kernel: Kernel, flat: Flat) -> bool:
    """Each rank computes its part of all ranks' results, block by block."""
    arrays = arrays_of_all(slots, call, [flat], [flat.size] * slots.size, flat.dtype)
    if arrays is None:
        return False
    low, high = bounds_of(flat.size, slots.size)[slots.rank : slots.rank + 2]
    chunk_size = _BLOCK // kernel.acc.itemsize
    # This rank's slot serves as working memory until the next step: a sum in the accumulator type,
    # and behind it a result.
    total = slots.next_slot(slots.rank, 0, chunk_size, kernel.acc)
    result = slots.next_slot(slots.rank, _BLOCK, chunk_size, kernel.storage)
    for start in range(low, high, chunk_size):
        stop = min(start + chunk_size, high)
        acc, out = total[: stop - start], result[: stop - start]
        kernel.begin(acc, arrays[0][start:stop])
        for r in range(1 if call.op.exclusive else 0, slots.size):
            part = arrays[r][start:stop]
            if call.op.exclusive:
                # The array of rank r has its contribution until its result is written there, so the
                # result waits in ``out`` until the contribution has been added.
                kernel.finish(acc, out, r)
                kernel.reduce_into(acc, part)
                part[:] = out
            else:
                if r:
                    kernel.reduce_into(acc, part)
                kernel.finish(acc, part, r + 1)
    slots.sync_step()
    return True


def all_gather(
    slots: Slots, call: Call | None, source: Flat, targets: Sequence[Flat], nbytes: int
) -> bool:
    """Each rank copies the arrays of all ranks to its ``targets``, which are empty on a rank that
    gets nothing.

    ``nbytes`` is the size of all arrays together.
    """
    rank, size = slots.rank, slots.size
    counts = [target.size for target in targets] or [0] * size
    arrays = arrays_of_all(
        slots, call, [source], counts, source.dtype, may_read=slots.may_read(nbytes)
    )
    if arrays is None:
        return False
    if targets:
        _fetch(slots, targets[rank], rank, source)
        for r in _others(slots):
            _fetch(slots, targets[r], r, arrays[r])
    slots.sync_step()
    return True


def scatter(slots: Slots, sources: Sequence[Flat], out: Flat, root: int, start: int) -> bool:
    """Each rank copies its array of the root's list, from element ``start`` on."""
    rank, size = slots.rank, slots.size
    counts = [out.size - start if r == root else 0 for r in range(size)]
    own = [source[start:] for source in sources]
    may_read = slots.may_read(counts[root] * out.itemsize * size, scatter=True)
    arrays = arrays_of_all(slots, None, own, counts, out.dtype, index=rank, may_read=may_read)
    if arrays is None:
        return False
    _fetch(slots, out[start:], root, arrays[root])
    slots.sync_step()
    return True


def all_to_all(
    slots: Slots, sources: Sequence[Flat], targets: Sequence[Flat], start: int, nbytes: int
) -> bool:
    """Each rank copies its block of every other rank, from element ``start`` of the block on.

    Args:
        sources, targets: a block for each rank, and from each rank.
        start: elements of each block that have been exchanged.
        nbytes: of the blocks of a rank, if all were as large as the largest.
    """
    rank, targets = slots.rank, [target[start:] for target in targets]
    counts = [target.size for target in targets]
    own = [source[start:] for source in sources]
    arrays = arrays_of_all(
        slots, None, own, counts, targets[rank].dtype, index=rank, may_read=slots.may_read(nbytes)
    )
    if arrays is None:
        return False
    for r in _others(slots):
        if counts[r]:
            _fetch(slots, targets[r], r, arrays[r])
    slots.sync_step()
    return True


def _others(slots: Slots) -> list[int]:
    """The other ranks, beginning with the next, so that not all ranks read the same array at the
    same time."""
    return [(slots.rank + i) % slots.size for i in range(1, slots.size)]
