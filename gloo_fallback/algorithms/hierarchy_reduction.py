"""The reduction of arrays in chunks, within hosts and between them at the same time
(:mod:`.hierarchical`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from gloo_fallback.algorithms.hierarchy_context import (
    ChunkedArray,
    HierarchyContext,
    PackedBlocks,
    reduce_node,
)
from gloo_fallback.algorithms.operands import bounds_of
from gloo_fallback.shm.slots import SLOT, Slots
from gloo_fallback.transport.connections import SubsetConnections
from unicoll.arrays.kernels import Flat, Kernel
from unicoll.backend import Call


def chunk_elements(kernel: Kernel) -> int:
    """Elements of a chunk: its contribution and its sum (or result) fit a slot."""
    return (SLOT - 64) // (kernel.acc.itemsize + kernel.dtype.itemsize)


ReduceAcross = Callable[[SubsetConnections, int, Flat, Flat], None]
Collect = Callable[[int, Flat], None]


def reduce_in_chunks(
    hierarchy: HierarchyContext,
    call: Call,
    kernel: Kernel,
    source_chunks: ChunkedArray | PackedBlocks,
    reduce_across: ReduceAcross,
    collect: Collect | None,
    arrays: Sequence[Flat] | None = None,
    lag: int = 0,
) -> None:
    """Pipelined reduction: all ranks contribute, followers sum, leaders reduce across nodes, all
    ranks collect.

    In step s all ranks contribute chunk s, then the followers sum it while the leader reduces chunk
    s-1 across nodes, and all ranks collect chunk s-2. A slot holds a contribution, and at
    ``result_offset`` a follower's part of the sum or the leader's result.

    ``reduce_across(internode, start, sums, result)`` reduces a node's sums with those of the other
    nodes into ``result``; ``collect(start, result)`` copies from it. ``arrays`` are those of the
    node's ranks in symmetric memory, which need not be copied to the slots. With a ``lag``,
    ``reduce_across`` writes the result of the chunk that was passed ``lag`` steps earlier;
    ``result`` is empty in the first ``lag`` steps, and ``sums`` in the last ones.
    """
    # What is in the slots that step s publishes: each rank's contribution to chunk s, each
    # follower's part of the sums of chunk s - 1, and the leader's result for chunk s - 2 - lag. All
    # three were written between the steps s - 1 and s. Followers add while the leader is in the
    # network, so the leader adds nothing unless it is alone. Arrays in place may be both input and
    # output: a rank overwrites chunk s - 2 only after step s, and before that all ranks have added
    # it up.
    slots, root = hierarchy.slots, call.root
    leader, internode = hierarchy.leader(root), hierarchy.internode(root)
    followers = [r for r in range(slots.size) if r != leader]
    dtype, starts = kernel.storage, source_chunks.starts
    sizes = [source_chunks.size(start) for start in starts]
    result_offset = -(-max(sizes, default=0) * dtype.itemsize // 64) * 64
    sums = np.empty(max(sizes, default=0) if internode is not None else 0, kernel.acc)

    def contributions(start: int, size: int, slot: Callable[..., Flat]) -> list[Flat]:
        """The node's contributions to a chunk; without symmetric memory from the slots of the last
        or next step."""
        if arrays is not None:
            return [array[start : start + size] for array in arrays]
        return [slot(r, 0, size, dtype) for r in range(slots.size)]

    # A root that is not the first rank of its node does not take part in the comparison between the
    # nodes. It waits for the result here, before it exchanges data with other leaders.
    if leader:
        hierarchy.agree(call, root)
    for s in range(len(sizes) + 2 + lag):
        if s < len(sizes) and arrays is None:
            source_chunks.pack(starts[s], slots.next_slot(slots.rank, 0, sizes[s], dtype))
        slots.sync_step(None if s or leader else call)
        # This compares the calls of the nodes. The first rank makes the next step only after it,
        # and no rank collects a result before that step.
        if s == 0 and not leader and (first := hierarchy.internode()) is not None:
            first.agree()
        if internode is None and s < len(sizes):
            _sum_own_part(
                slots,
                kernel,
                followers,
                contributions(starts[s], sizes[s], slots.last_slot),
                result_offset,
            )
        if internode is not None and 1 <= s <= len(sizes) + lag:
            at = s - 1 - lag
            size, length = sizes[s - 1] if s <= len(sizes) else 0, sizes[at] if at >= 0 else 0
            if not size:
                pass
            elif followers:
                _gather_sums(slots, followers, sums[:size], result_offset)
            else:
                # This rank is alone on its host. No other rank writes its slots, so the next slot,
                # which was that of the previous step, still has the contribution to the previous
                # chunk.
                reduce_node(
                    kernel, contributions(starts[s - 1], size, slots.next_slot), sums[:size]
                )
            result = slots.next_slot(slots.rank, result_offset, length, dtype)
            reduce_across(internode, starts[at] if at >= 0 else 0, sums[:size], result)
        if collect is not None and s >= 2 + lag:
            at = s - 2 - lag
            collect(starts[at], slots.last_slot(leader, result_offset, sizes[at], dtype))


def _sum_own_part(
    slots: Slots,
    kernel: Kernel,
    followers: Sequence[int],
    parts: Sequence[Flat],
    result_offset: int,
) -> None:
    bounds = bounds_of(parts[0].size, len(followers))
    i = followers.index(slots.rank)
    low, high = bounds[i], bounds[i + 1]
    parts = [part[low:high] for part in parts]
    reduce_node(kernel, parts, slots.next_slot(slots.rank, result_offset, high - low, kernel.acc))


def _gather_sums(slots: Slots, followers: Sequence[int], sums: Flat, result_offset: int) -> None:
    bounds = bounds_of(sums.size, len(followers))
    for i, r in enumerate(followers):
        low, high = bounds[i], bounds[i + 1]
        sums[low:high] = slots.last_slot(r, result_offset, high - low, sums.dtype)
