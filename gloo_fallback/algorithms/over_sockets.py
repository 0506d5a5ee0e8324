"""The collectives over :class:`~gloo_fallback.transport.exchange.Connections`.

Small operations are one :meth:`Connections.exchange` (latency: ceil(log2 n) messages). Larger ones
compare signatures in an empty exchange and then move bulk data: operations whose result goes to all
ranks use rings (:mod:`~gloo_fallback.algorithms.rings`) for large blocks and
:mod:`~gloo_fallback.algorithms.circulant` for small ones, rooted operations a binomial tree or a
pipelined chain, and personalised exchanges direct messages. The choice depends only on sizes that
the signature covers, so it is the same on all ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gloo_fallback.algorithms import circulant, compressed
from gloo_fallback.algorithms.operands import (
    ReductionKernel,
    blocks_of,
    bounds_of,
    exchanged_blocks,
)
from gloo_fallback.algorithms.rings import (
    chain_broadcast,
    chain_reduce,
    chain_scan,
    pair_reduce_scatter,
    ring_all_gather,
    ring_reduce_scatter,
)
from gloo_fallback.transport.exchange import Connections, bytes_of
from unicoll.arrays.compression import Codec, codec_for
from unicoll.arrays.kernels import Flat
from unicoll.backend import Call
from unicoll.backend.group_state import GroupState
from unicoll.backend.host import even_parts, flat_of, kernel_of, shape_hash
from unicoll.errors import CollectiveMismatchError

SMALL = 1 << 16
"""Maximum bytes at each rank after one exchange; larger operations use the bulk algorithms."""
# A tree sends the whole array up to log2 n times in a row from one rank, a chain sends it once, in
# segments, but over n - 1 hops. From this many bytes for each hop a broadcast uses the chain.
_CHAIN = 1 << 16
DIRECT_BYTES = 1 << 20
"""Bytes of all ranks' contributions that a direct reduction (deterministic, exact) holds at a
time."""


def codec_of(call: Call, source: Flat) -> Codec | None:
    """The codec of a call's compression; None if it has none, or is too small."""
    return (
        codec_for(call.compression, source.dtype)
        if call.compression and source.nbytes > SMALL
        else None
    )


# --- barrier, broadcast ---------------------------------------------------------------------------


def barrier(connections: Connections, call: Call) -> None:
    """Return once all ranks have entered the barrier."""
    connections.agree()


def broadcast(connections: Connections, call: Call) -> None:
    """The root's data to all."""
    flat = flat_of(call.inputs[0])
    root, rank, size = call.root, connections.rank, connections.size
    if flat.nbytes <= SMALL:
        small_broadcast(connections, flat, root)
        return
    connections.agree()
    position = (rank - root) % size
    if size == 2 or flat.nbytes >= _CHAIN * (size - 1):
        chain_broadcast(connections, bytes_of(flat), position, root)
    else:
        _tree_broadcast(connections, bytes_of(flat), position, root)


def small_broadcast(connections: Connections, flat: Flat, root: int) -> None:
    """The root's data to all in the exchange."""
    plan = connections.plan(
        tuple(flat.nbytes if r == root else 0 for r in range(connections.size)), flat.dtype
    )
    if connections.rank == root:
        plan.mine[:] = flat
        connections.exchange(plan)
    else:
        flat[:] = connections.exchange(plan)[root]


def _tree_broadcast(connections: Connections, data: memoryview, position: int, root: int) -> None:
    """Binomial tree: each rank that has the data sends it to the rank half the remaining range
    away."""
    step = 1
    while step < connections.size:
        step *= 2
    have = position == 0
    while step > 1:
        step //= 2
        if have and position % (2 * step) == 0 and position + step < connections.size:
            connections.send((root + position + step) % connections.size, data)
        elif not have and position % (2 * step) == step:
            connections.receive((root + position - step) % connections.size, data, len(data))
            have = True


# --- reductions -----------------------------------------------------------------------------------


def _small_contributions(connections: Connections, flat: Flat) -> list[Flat]:
    plan = connections.plan((flat.nbytes,) * connections.size, flat.dtype)
    plan.mine[:] = flat
    return connections.exchange(plan)


def all_reduce(connections: Connections, call: Call) -> None:
    """The reduction of all ranks' data to all."""
    source, out = flat_of(call.inputs[0]), flat_of(call.outputs[0])
    kernel = kernel_of(call)
    if source.nbytes * (connections.size - 1) <= SMALL:
        kernel.combine(_small_contributions(connections, source), out, disjoint=True)
        return
    connections.agree()
    codec = codec_of(call, source)
    if codec is not None:
        compressed.all_reduce(connections, kernel, codec, source, out)
        return
    blocks, results = even_parts(source, connections.size), even_parts(out, connections.size)
    # ``out`` may be the source: of it only this rank's block is written before all contributions
    # have been sent.
    reduce_scatter_blocks(connections, kernel, blocks, results[connections.rank])
    all_gather_blocks(connections, results)


def reduce(connections: Connections, call: Call) -> None:
    """The reduction of all ranks' data to the root."""
    source = flat_of(call.inputs[0])
    kernel = kernel_of(call)
    if source.nbytes * (connections.size - 1) <= SMALL:
        blocks = _small_contributions(connections, source)
        if connections.rank == call.root:
            kernel.combine(blocks, flat_of(call.outputs[0]), disjoint=True)
        return
    connections.agree()
    direct = connections.deterministic or kernel.at_once
    reduce_to_root = _direct_reduce if direct else chain_reduce
    reduce_to_root(
        connections, kernel, source, flat_of(call.outputs[0]) if call.outputs else None, call.root
    )


def scan(connections: Connections, call: Call) -> None:
    """Inclusive scan: the reduction of the data of ranks 0 to this one; an exscan excludes this
    rank."""
    flat, kernel = flat_of(call.inputs[0]), kernel_of(call)
    if flat.nbytes * (connections.size - 1) <= SMALL:
        stop = connections.rank + (not call.op.exclusive)
        contributions = _small_contributions(connections, flat)[:stop]
        if contributions:
            kernel.combine(contributions, flat, disjoint=True)
        return
    connections.agree()
    chain_scan(connections, kernel, flat, call.op.exclusive)


def reduce_scatter(connections: Connections, call: Call) -> None:
    """Rank i gets block i of the reduction."""
    out = flat_of(call.outputs[0])
    kernel = kernel_of(call)
    blocks = blocks_of(call.inputs, call.op.joined, connections.size)
    total = sum(p.nbytes for p in blocks)
    if total * (connections.size - 1) > SMALL:
        connections.agree()
        reduce_scatter_blocks(connections, kernel, blocks, out)
        return
    plan = connections.plan((total,) * connections.size, out.dtype)
    np.concatenate(blocks, out=plan.mine)
    start = sum(p.size for p in blocks[: connections.rank])
    kernel.combine(
        [v[start : start + out.size] for v in connections.exchange(plan)], out, disjoint=True
    )


def reduce_scatter_blocks(
    connections: Connections, kernel: ReductionKernel, blocks: Sequence[Flat], out: Flat
) -> None:
    """Block i, reduced over all ranks, to rank i. ``blocks`` are not modified, except one that
    ``out`` overlaps."""
    if connections.deterministic or kernel.at_once:
        _direct_reduce_scatter(connections, kernel, blocks, out)
    elif circulant.is_efficient(connections, sum(p.size for p in blocks) * kernel.acc.itemsize):
        circulant.reduce_blocks(connections, kernel, blocks, out)
    elif connections.size == 2:
        pair_reduce_scatter(connections, kernel, blocks, out)
    else:
        ring_reduce_scatter(connections, kernel, blocks, out)


def _direct_reduce_scatter(
    connections: Connections, kernel: ReductionKernel, blocks: Sequence[Flat], out: Flat
) -> None:
    """Each rank receives all contributions to its block and reduces them in rank order, as in small
    reductions.

    Sends as many bytes as a ring, in n-1 messages to different ranks.
    """
    size, rank = connections.size, connections.rank
    longest = max(p.size for p in blocks)
    chunk_size = max(1, min(longest, DIRECT_BYTES // size // out.itemsize))
    received = np.empty((size, chunk_size), out.dtype)
    for start in range(0, longest, chunk_size):
        mine = blocks[rank][start : start + chunk_size]
        for distance in range(1, size):
            to, frm = (rank + distance) % size, (rank - distance) % size
            outgoing = blocks[to][start : start + chunk_size]
            connections.duplex(to, bytes_of(outgoing), frm, bytes_of(received[frm, : mine.size]))
        parts = [mine if r == rank else received[r, : mine.size] for r in range(size)]
        kernel.combine(parts, out[start : start + chunk_size])


def _direct_reduce(
    connections: Connections, kernel: ReductionKernel, source: Flat, out: Flat | None, root: int
) -> None:
    """As :func:`_direct_reduce_scatter`; the root then collects the blocks."""
    size, rank = connections.size, connections.rank
    # Each block fits the working memory of _direct_reduce_scatter.
    chunk_size = size * max(1, DIRECT_BYTES // size // source.itemsize)
    for start in range(0, source.size, chunk_size):
        segment = source[start : start + chunk_size]
        bounds = bounds_of(segment.size, size)
        result = np.empty(bounds[rank + 1] - bounds[rank], source.dtype)
        _direct_reduce_scatter(
            connections, kernel, [segment[bounds[r] : bounds[r + 1]] for r in range(size)], result
        )
        # All contributions to this segment have been sent now, so ``out`` may be the source.
        if out is None:
            connections.send(root, bytes_of(result))
            continue
        for r in range(size):
            target = out[start + bounds[r] : start + bounds[r + 1]]
            if r == rank:
                target[:] = result
            else:
                connections.receive(r, bytes_of(target), target.nbytes)


# --- gathering ------------------------------------------------------------------------------------


def all_gather_blocks(connections: Connections, blocks: Sequence[Flat]) -> None:
    """Block i from rank i to all ranks."""
    if circulant.is_efficient(connections, sum(p.nbytes for p in blocks)):
        circulant.gather_blocks(connections, blocks)
    else:
        ring_all_gather(connections, blocks)


def all_gather(connections: Connections, call: Call) -> None:
    """Every rank's data to all; sizes may differ."""
    source = flat_of(call.inputs[0])
    blocks = blocks_of(call.outputs, call.op.joined, connections.size)
    lengths = tuple(p.nbytes for p in blocks)
    if sum(lengths) <= SMALL:
        plan = connections.plan(lengths, source.dtype)
        plan.mine[:] = source
        for target, block in zip(blocks, connections.exchange(plan), strict=True):
            target[:] = block
        return
    connections.agree()
    blocks[connections.rank][:] = source
    all_gather_blocks(connections, blocks)


def gather(connections: Connections, call: Call, counts: Sequence[int] | None = None) -> bool:
    """Every rank's data to the root; False, without effect, if sizes differ and ``counts`` is
    None."""
    source, size = flat_of(call.inputs[0]), connections.size
    # Without ``counts`` a rank knows only its own size. The comparison also says whether all sizes
    # are equal; if they are not, the caller exchanges them and calls this again.
    if counts is None:
        small = source.nbytes * size <= SMALL
        block = source.nbytes if small else 0
        blocks = connections.exchange_checked(
            shape_hash(call), block, lambda b: (b,) * size, source.dtype, (source,)
        )
        if blocks is None:
            return False
        if small:
            for buffer, contribution in zip(call.outputs, blocks, strict=False):
                flat_of(buffer)[:] = contribution
            return True
    if connections.rank != call.root:
        connections.send(call.root, bytes_of(source))
        return True
    # The root receives from one rank after the other. What the others send meanwhile waits in the
    # buffers of the sockets, so the root needs no memory for it.
    for i, buffer in enumerate(call.outputs):
        if i == connections.rank:
            flat_of(buffer)[:] = source
        else:
            connections.receive(i, bytes_of(flat_of(buffer)), buffer.nbytes)
    return True


def scatter(connections: Connections, call: Call, counts: Sequence[int] | None = None) -> bool:
    """The root's i-th array to rank i; False, without effect, if sizes differ and ``counts`` is
    None."""
    out = flat_of(call.outputs[0])
    size, rank, root = connections.size, connections.rank, call.root
    if counts is None:
        small = out.nbytes * size <= SMALL

        def lengths(b: int) -> tuple[int, ...]:
            return tuple(b * size if r == root else 0 for r in range(size))

        arrays = [flat_of(b) for b in call.inputs]
        blocks = connections.exchange_checked(
            shape_hash(call), out.nbytes if small else 0, lengths, out.dtype, arrays
        )
        if blocks is None:
            return False
        if small:
            out[:] = blocks[root][rank * out.size : (rank + 1) * out.size]
            return True
    if rank != root:
        connections.receive(root, bytes_of(out), out.nbytes)
        return True
    for i, buffer in enumerate(call.inputs):
        if i == rank:
            out[:] = flat_of(buffer)
        else:
            connections.send(i, bytes_of(flat_of(buffer)))
    return True


# --- personalised exchange ------------------------------------------------------------------------


def all_to_all(connections: Connections, call: Call) -> None:
    """Block j of rank i becomes block i of rank j."""
    size, rank = connections.size, connections.rank
    sources, targets = exchanged_blocks(call)
    # This exchange takes the place of agree(): it compares the calls as well.
    agree_on_counts(connections, call)
    targets[rank][:] = sources[rank]
    for distance in range(1, size):
        to, frm = (rank + distance) % size, (rank - distance) % size
        connections.duplex(to, bytes_of(sources[to]), frm, bytes_of(targets[frm]))


def agree_on_counts(connections: Connections, call: Call) -> Flat:
    """Exchange the sizes of all ranks, so that all ranks detect the same error; returns the table
    of both counts."""
    size = connections.size
    plan = connections.plan((16 * size,) * size, np.dtype(np.int64))
    plan.mine[:size] = call.in_counts
    plan.mine[size:] = call.out_counts
    table: Flat = np.stack(connections.exchange(plan))
    check_counts(connections.state, table)
    return table


def check_counts(state: GroupState, table: Flat) -> None:
    """Raise if counts differ; row i of ``table``: what rank i sends to each rank, then what it
    expects from each."""
    size = len(table)
    sent, expected = table[:, :size], table[:, size:].T
    if (sent != expected).any():
        # All ranks have the same table and choose the first pair, so they raise the same error.
        i, j = np.argwhere(sent != expected)[0]
        context, call = state.context, state.call
        assert call is not None
        state.fail(
            CollectiveMismatchError(
                f"{call.op.name} #{call.seq} on group {context.name!r}: rank {context.ranks[i]}"
                f" sends {sent[i, j]} elements to rank {context.ranks[j]}, which has room for"
                f" {expected[i, j]}",
                group=context.name,
                op=call.op.name,
                seq=call.seq,
            )
        )
