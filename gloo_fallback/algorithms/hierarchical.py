"""The collectives of ranks on several hosts: shared memory within a host, sockets between hosts.

Each host is a *node* with slots in shared memory; one rank of it, the *leader*, communicates with
the other nodes. It is the first rank of the node; for the data of a large rooted collective it is
the root, which saves a step. Arrays are split into chunks that fit the slots. While leaders
exchange one chunk, the other ranks (*followers*) prepare the next and read the previous one: in the
reductions three chunks are in flight at a time.

No rank returns before all ranks agree on the call: the ranks of a node compare signatures in the
first step, the first ranks of the nodes in an exchange, and the step after it signals the result to
the other ranks. All collectives begin like this, so that ranks whose calls differ do not wait for
each other in different places.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain, pairwise
from typing import Any

import numpy as np

from gloo_fallback.algorithms import compressed, over_sockets, peer_memory
from gloo_fallback.algorithms.hierarchy_context import (
    ChunkedArray,
    HierarchyContext,
    PackedBlocks,
    reduce_node,
)
from gloo_fallback.algorithms.hierarchy_reduction import chunk_elements, reduce_in_chunks
from gloo_fallback.algorithms.operands import (
    NodeSums,
    blocks_of,
    exchanged_blocks,
)
from gloo_fallback.algorithms.over_sockets import SMALL, codec_of
from gloo_fallback.algorithms.rings import SEGMENT, chain_broadcast, chain_reduce, chain_scan
from gloo_fallback.algorithms.shared_memory import BlockExchange
from gloo_fallback.shm.slots import SLOT
from gloo_fallback.transport.connections import SubsetConnections
from gloo_fallback.transport.exchange import Connections, bytes_of
from unicoll.arrays.compression import BLOCK
from unicoll.arrays.kernels import Flat, Kernel
from unicoll.backend import Call
from unicoll.backend.host import even_parts, flat_of, kernel_of, shape_hash


def barrier(hierarchy: HierarchyContext, call: Call) -> None:
    """Return once all ranks have entered the barrier."""
    hierarchy.agree(call)
    hierarchy.slots.sync_step()


# --- broadcast ------------------------------------------------------------------------------------


def broadcast(hierarchy: HierarchyContext, call: Call) -> None:
    """The root's data to all: a chain of leaders, then the slots."""
    flat, slots, root = flat_of(call.inputs[0]), hierarchy.slots, call.root
    leader = hierarchy.leader(root)
    if flat.nbytes <= SMALL:
        is_root = hierarchy.connections.rank == root
        # Only the first ranks of the nodes exchange, so a root that is another rank passes its data
        # to the first one through its slot.
        if leader and is_root:
            slots.next_slot(slots.rank, 0, flat.size, flat.dtype)[:] = flat
        slots.sync_step(call)
        if (first := hierarchy.internode()) is not None:
            if leader:
                flat[:] = slots.last_slot(leader, 0, flat.size, flat.dtype)
            over_sockets.small_broadcast(first, flat, hierarchy.node_of(root))
            slots.next_slot(slots.rank, 0, flat.size, flat.dtype)[:] = flat
        slots.sync_step()
        if first is None and not is_root:
            flat[:] = slots.last_slot(0, 0, flat.size, flat.dtype)
        return
    internode = hierarchy.internode(root)
    arrays = _symmetric_arrays(hierarchy, call, flat)
    hierarchy.agree(call, root)
    chunk_size = SEGMENT // flat.itemsize
    for start in range(0, flat.size, chunk_size):
        chunk = flat[start : start + chunk_size]
        if internode is not None:
            node = hierarchy.node_of(root)
            chain_broadcast(
                internode, bytes_of(chunk), (internode.rank - node) % internode.size, node
            )
            # The followers read the chunk after the next step, while the leader passes on the next
            # chunk, for which it has the other slot.
            if arrays is None:
                slots.next_slot(slots.rank, 0, chunk.size, chunk.dtype)[:] = chunk
        slots.sync_step()
        if internode is None and arrays is not None:
            chunk[:] = arrays[leader][start : start + chunk_size]
        elif internode is None:
            chunk[:] = slots.last_slot(leader, 0, chunk.size, chunk.dtype)
    if arrays is not None:
        # The leader must not return before: its caller may change the array, which the followers
        # read in place.
        slots.sync_step()


def _symmetric_arrays(hierarchy: HierarchyContext, call: Call, flat: Flat) -> list[Flat] | None:
    """The arrays of all ranks of the node in place; None if they are not all in symmetric
    memory."""
    slots = hierarchy.slots
    if slots.symmetric is None:
        return None
    return peer_memory.arrays_of_all(slots, call, [flat], [flat.size] * slots.size, flat.dtype)


# --- reductions -----------------------------------------------------------------------------------


def _over_sockets(
    hierarchy: HierarchyContext, call: Call, reduction: Callable[[Connections, Call], None]
) -> None:
    """An exact reduction, which needs the data of all ranks, not sums of hosts: over sockets, also
    within hosts."""
    # The ranks of all nodes compare their calls first, as in every collective here. A rank in
    # another call would otherwise wait in the slots, and this one in the sockets.
    hierarchy.agree(call)
    hierarchy.slots.sync_step()
    reduction(hierarchy.connections, call)


def all_reduce(hierarchy: HierarchyContext, call: Call) -> None:
    """The reduction of all ranks' data to all."""
    source, out, kernel = flat_of(call.inputs[0]), flat_of(call.outputs[0]), kernel_of(call)
    slots = hierarchy.slots
    if kernel.at_once:
        _over_sockets(hierarchy, call, over_sockets.all_reduce)
        return
    if _is_small(hierarchy, kernel, source):
        sums = _exchange_sums(hierarchy, call, kernel, source)
        if sums is not None:
            NodeSums(kernel, hierarchy.size).combine(
                sums, slots.next_slot(slots.rank, 0, out.size, out.dtype)
            )
        slots.sync_step()
        out[:] = slots.last_slot(hierarchy.leader(), 0, out.size, out.dtype)
        return

    def reduce_across(internode: SubsetConnections, start: int, sums: Flat, result: Flat) -> None:
        blocks, results = even_parts(sums, internode.size), even_parts(result, internode.size)
        over_sockets.reduce_scatter_blocks(
            internode, NodeSums(kernel, hierarchy.size), blocks, results[internode.rank]
        )
        over_sockets.all_gather_blocks(internode, results)

    def collect(start: int, result: Flat) -> None:
        out[start : start + result.size] = result

    codec = codec_of(call, source)
    chunk_size = chunk_elements(kernel)
    arrays = _symmetric_arrays(hierarchy, call, source)
    if codec is None:
        reduce_in_chunks(
            hierarchy,
            call,
            kernel,
            ChunkedArray(source, chunk_size),
            reduce_across,
            collect,
            arrays,
        )
        return
    # A chunk is a whole number of the codec's blocks, so that each chunk begins where a block does.
    chunks = ChunkedArray(source, chunk_size - chunk_size % BLOCK)
    internode = hierarchy.internode()
    if internode is not None:
        sizes = [chunks.size(start) for start in chunks.starts]
        stream = compressed.ChunkedAllReduce(
            internode, NodeSums(kernel, hierarchy.size), codec, sizes, kernel.acc
        )

    def stream_across(internode: SubsetConnections, start: int, sums: Flat, result: Flat) -> None:
        # Only leaders call this, and only they have a stream.
        stream.step(sums, result)

    reduce_in_chunks(
        hierarchy, call, kernel, chunks, stream_across, collect, arrays, compressed.LAG
    )


def reduce(hierarchy: HierarchyContext, call: Call) -> None:
    """The reduction of all ranks' data to the root."""
    source, kernel, root = flat_of(call.inputs[0]), kernel_of(call), call.root
    out = flat_of(call.outputs[0]) if call.outputs else None
    node = hierarchy.node_of(root)
    if kernel.at_once:
        _over_sockets(hierarchy, call, over_sockets.reduce)
        return
    if _is_small(hierarchy, kernel, source):
        slots = hierarchy.slots
        sums = _exchange_sums(hierarchy, call, kernel, source)
        if sums is not None and root in hierarchy.members:
            result = (
                slots.next_slot(slots.rank, 0, source.size, source.dtype) if out is None else out
            )
            NodeSums(kernel, hierarchy.size).combine(sums, result)
        slots.sync_step()
        if sums is None and out is not None:
            out[:] = slots.last_slot(0, 0, out.size, out.dtype)
        return

    def reduce_across(internode: SubsetConnections, start: int, sums: Flat, result: Flat) -> None:
        target = None if out is None else out[start : start + sums.size]
        chain_reduce(internode, NodeSums(kernel, hierarchy.size), sums, target, node)

    chunks = ChunkedArray(source, chunk_elements(kernel))
    arrays = _symmetric_arrays(hierarchy, call, source)
    reduce_in_chunks(hierarchy, call, kernel, chunks, reduce_across, None, arrays)


def scan(hierarchy: HierarchyContext, call: Call) -> None:
    """Inclusive or exclusive scan: a chain of all ranks over sockets, also within hosts."""
    hierarchy.agree(call)
    hierarchy.slots.sync_step()
    chain_scan(hierarchy.connections, kernel_of(call), flat_of(call.inputs[0]), call.op.exclusive)


def reduce_scatter(hierarchy: HierarchyContext, call: Call) -> None:
    """Rank i gets block i of the reduction."""
    out, kernel = flat_of(call.outputs[0]), kernel_of(call)
    if kernel.at_once:
        _over_sockets(hierarchy, call, over_sockets.reduce_scatter)
        return
    blocks = blocks_of(call.inputs, call.op.joined, hierarchy.size)
    packed = PackedBlocks(blocks, hierarchy, max(1, chunk_elements(kernel) // hierarchy.size))

    def reduce_across(internode: SubsetConnections, start: int, sums: Flat, result: Flat) -> None:
        bounds = packed.node_bounds(start)
        node_blocks = [sums[a:b] for a, b in pairwise(bounds)]
        mine = result[: node_blocks[hierarchy.node_index].size]
        over_sockets.reduce_scatter_blocks(
            internode, NodeSums(kernel, hierarchy.size), node_blocks, mine
        )

    def collect(start: int, result: Flat) -> None:
        low, high = packed.own_bounds(start)
        out[start : start + high - low] = result[low:high]

    reduce_in_chunks(hierarchy, call, kernel, packed, reduce_across, collect)


def _is_small(hierarchy: HierarchyContext, kernel: Kernel, source: Flat) -> bool:
    return source.size * kernel.acc.itemsize * len(hierarchy.nodes) <= SMALL


def _exchange_sums(
    hierarchy: HierarchyContext, call: Call, kernel: Kernel, source: Flat
) -> list[Flat] | None:
    """Every node's sum to the first ranks of all nodes; None on the other ranks."""
    mine, contributions = hierarchy.slots.rows(source.size, source.dtype)
    mine[:] = source
    hierarchy.slots.sync_step(call)
    internode = hierarchy.internode()
    if internode is None:
        return None
    plan = internode.plan((source.size * kernel.acc.itemsize,) * internode.size, kernel.acc)
    reduce_node(kernel, contributions, plan.mine)
    return internode.exchange(plan)


# --- data movement --------------------------------------------------------------------------------


def all_gather(hierarchy: HierarchyContext, call: Call) -> None:
    """Every rank's data to all; sizes may differ. Leaders exchange their nodes' chunks in a
    ring."""
    source, slots, internode = flat_of(call.inputs[0]), hierarchy.slots, hierarchy.internode()
    targets = blocks_of(call.outputs, call.op.joined, hierarchy.size)
    dtype = source.dtype
    chunk_size = max(1, (SLOT - 64) // dtype.itemsize // (hierarchy.size + 1))
    packed = PackedBlocks(targets, hierarchy, chunk_size)
    result_offset = -(-chunk_size * dtype.itemsize // 64) * 64
    # Empty arrays take a step, too: the calls are compared in it.
    starts = packed.starts or range(1)
    arrays = None
    # In a list the sizes may differ, and _symmetric_arrays takes the arrays of all ranks to be of
    # one size.
    if call.op.joined and source.nbytes * hierarchy.size > SMALL:
        arrays = _symmetric_arrays(hierarchy, call, source)
    # In step s all ranks contribute chunk s, the leader exchanges it, and all ranks copy what the
    # leader has received of chunk s - 1.
    for s in range(len(starts) + 1):
        if s < len(starts) and arrays is None:
            chunk = source[starts[s] : starts[s] + chunk_size]
            slots.next_slot(slots.rank, 0, chunk.size, dtype)[:] = chunk
        slots.sync_step(None if s else call)
        if internode is not None and s < len(starts):
            if s == 0:
                internode.agree()
            _all_gather_across(
                hierarchy, internode, packed, starts[s], result_offset, dtype, arrays
            )
        if s > 0:
            start = starts[s - 1]
            whole = slots.last_slot(hierarchy.leader(), result_offset, packed.size(start), dtype)
            packed.unpack(start, whole)


def _all_gather_across(
    hierarchy: HierarchyContext,
    internode: SubsetConnections,
    packed: PackedBlocks,
    start: int,
    result_offset: int,
    dtype: np.dtype[Any],
    arrays: Sequence[Flat] | None,
) -> None:
    slots = hierarchy.slots
    whole = slots.next_slot(slots.rank, result_offset, packed.size(start), dtype)
    blocks = [whole[a:b] for a, b in pairwise(packed.node_bounds(start))]
    mine, low = blocks[hierarchy.node_index], 0
    for r, size in enumerate(packed.local_sizes(start)):
        if arrays is None:
            mine[low : low + size] = slots.last_slot(r, 0, size, dtype)
        else:
            mine[low : low + size] = arrays[r][start : start + size]
        low += size
    over_sockets.all_gather_blocks(internode, blocks)


def gather(hierarchy: HierarchyContext, call: Call, counts: Sequence[int] | None = None) -> bool:
    """Every rank's data to the root: each leader sends the slots of its node.

    Returns False, without effect, if sizes differ and ``counts`` is None.
    """
    source, slots, root = flat_of(call.inputs[0]), hierarchy.slots, call.root
    targets = [flat_of(b) for b in call.outputs]
    internode, root_node = hierarchy.internode(root), hierarchy.node_of(root)
    chunk_size = SLOT // source.itemsize
    sizes = counts or (source.size,) * hierarchy.size
    # The sizes are compared in the first step. On the first rank of a node the result is there at
    # once, on the others after one more step. On a node of which the root is not the first rank,
    # the root moves the data and needs the result before, so this node compares in two steps of its
    # own. The numbers of steps may differ between nodes, because the slots belong to a node.
    same, checked = True, counts is not None
    if not checked and hierarchy.leader(root):
        if not _agree_with_root(hierarchy, call):
            return False
        checked = True
    # None stands for one more step behind the last chunk. The ranks that are not the first of their
    # node learn in it whether the sizes agree.
    for i, start in enumerate(chain(range(0, max(1, *sizes), chunk_size), (None,))):
        if start is not None:
            chunk = source[start : start + chunk_size]
            slots.next_slot(slots.rank, 0, chunk.size, chunk.dtype)[:] = chunk
        if not checked and i == 0:
            same = hierarchy.sync_step_checked(call, shape_hash(call))
        else:
            slots.sync_step()
        if not checked and i == 1 and not hierarchy.sizes_agree():
            return False
        # If the sizes differ, ``same`` is False on all leaders: nothing moves, and the call has no
        # effect.
        if start is not None and internode is not None and same:
            parts = [min(max(n - start, 0), chunk_size) for n in sizes]
            local = [
                slots.last_slot(r, 0, parts[rank], source.dtype)
                for r, rank in enumerate(hierarchy.members)
            ]
            _move_chunk(hierarchy, internode, targets, start, parts, local, root_node, gathers=True)
    return True


def _agree_with_root(hierarchy: HierarchyContext, call: Call) -> bool:
    """The agreement of a gather or scatter on a node whose root is not its first rank; True if all
    sizes are equal."""
    hierarchy.sync_step_checked(call, shape_hash(call))
    hierarchy.slots.sync_step()
    return hierarchy.sizes_agree()


def _move_chunk(
    hierarchy: HierarchyContext,
    internode: SubsetConnections,
    arrays: Sequence[Flat],
    start: int,
    parts: Sequence[int],
    local: Sequence[Flat],
    root_node: int,
    *,
    gathers: bool,
) -> None:
    """Move a chunk of ``parts[rank]`` elements of every rank between the root's ``arrays`` and the
    slots of its node.

    Args:
        local: where the chunks of this node's ranks are.
        gathers: True from the slots to the root, False from the root to the slots.
    """

    def move(node: int, chunk: Flat) -> None:
        if gathers is (internode.rank == root_node):
            internode.receive(node, bytes_of(chunk), chunk.nbytes)
        else:
            internode.send(node, bytes_of(chunk))

    if internode.rank != root_node:
        for chunk in local:
            move(root_node, chunk)
        return
    for node, members in enumerate(hierarchy.nodes):
        for r, rank in enumerate(members):
            chunk = arrays[rank][start : start + parts[rank]]
            if node != root_node:
                move(node, chunk)
            elif gathers:
                chunk[:] = local[r]
            else:
                local[r][:] = chunk


def scatter(hierarchy: HierarchyContext, call: Call, counts: Sequence[int] | None = None) -> bool:
    """The root's i-th array to rank i: each leader receives into its slot, which the followers
    read.

    Returns False, without effect, if sizes differ and ``counts`` is None.
    """
    out, slots, root = flat_of(call.outputs[0]), hierarchy.slots, call.root
    sources = [flat_of(b) for b in call.inputs]
    internode, root_node, leader = (
        hierarchy.internode(root),
        hierarchy.node_of(root),
        hierarchy.leader(root),
    )
    # A leader's slot has a part for each rank of its node. All nodes have to cut the arrays alike,
    # so the largest node decides.
    stride = SLOT // max(len(members) for members in hierarchy.nodes) // out.itemsize * out.itemsize
    chunk_size = stride // out.itemsize
    sizes = counts or (out.size,) * hierarchy.size
    checked = counts is not None
    if not checked and leader:
        if not _agree_with_root(hierarchy, call):
            return False
        checked = True
    same = checked or hierarchy.sync_step_checked(call, shape_hash(call))
    for start in range(0, max(1, *sizes), chunk_size):
        if internode is not None and same:
            parts = [min(max(n - start, 0), chunk_size) for n in sizes]
            local = [
                slots.next_slot(slots.rank, r * stride, parts[rank], out.dtype)
                for r, rank in enumerate(hierarchy.members)
            ]
            _move_chunk(
                hierarchy, internode, sources, start, parts, local, root_node, gathers=False
            )
        slots.sync_step()
        if not checked and start == 0 and not hierarchy.sizes_agree():
            return False
        mine = out[start : start + chunk_size]
        mine[:] = slots.last_slot(leader, slots.rank * stride, mine.size, out.dtype)
    return True


def all_to_all(hierarchy: HierarchyContext, call: Call) -> None:
    """Block j of rank i becomes block i of rank j: through the slots within a node, otherwise by
    messages."""
    connections, size, rank = hierarchy.connections, hierarchy.size, hierarchy.connections.rank
    sources, targets = exchanged_blocks(call)
    # Detects a rank in another call, which would not take part in the exchange of counts below.
    hierarchy.agree(call)
    table = over_sockets.agree_on_counts(connections, call)
    local = hierarchy.members
    targets[rank][:] = sources[rank]
    longest = int(table[np.ix_(local, local)].max())
    BlockExchange(
        hierarchy.slots, [sources[r] for r in local], [targets[r] for r in local]
    ).exchange(0, longest)
    # All ranks go through the distances in the same order, so each message finds its receiver at
    # the same distance. A rank may only send or only receive there, if one of the two others is on
    # its own host.
    for distance in range(1, size):
        to, frm = (rank + distance) % size, (rank - distance) % size
        outgoing, incoming = bytes_of(sources[to]), bytes_of(targets[frm])
        if to in local and frm in local:
            continue
        if to in local:
            connections.receive(frm, incoming, len(incoming))
        elif frm in local:
            connections.send(to, outgoing)
        else:
            connections.duplex(to, outgoing, frm, incoming)
