"""Rings, and chains whose ranks forward one segment while they receive the next: algorithms for
large arrays.

Each rank sends and receives as many bytes as are necessary at least, in messages to the next rank
and from the previous one only (Patarasuk and Yuan, 2009).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gloo_fallback.algorithms.operands import ReductionKernel
from gloo_fallback.transport.exchange import Connections, bytes_of
from unicoll.arrays.kernels import Flat

SEGMENT = 1 << 18
"""Bytes per message of the pipelined algorithms."""


def chain_broadcast(connections: Connections, data: memoryview, position: int, root: int) -> None:
    """Pipelined chain: each rank forwards the segments to the next."""
    before, after = (
        (root + position - 1) % connections.size,
        (root + position + 1) % connections.size,
    )
    for start in range(0, len(data), SEGMENT):
        segment = data[start : start + SEGMENT]
        if position:
            connections.receive(before, segment, len(segment))
        if position < connections.size - 1:
            connections.send(after, segment)


def chain_reduce(
    connections: Connections, kernel: ReductionKernel, source: Flat, out: Flat | None, root: int
) -> None:
    """Partial results are sent in a ring from the rank after the root to the root, segment by
    segment."""
    position = (connections.rank - root - 1) % connections.size
    before, after = (
        (connections.rank - 1) % connections.size,
        (connections.rank + 1) % connections.size,
    )
    chunk_size = max(1, SEGMENT // kernel.acc.itemsize)
    scratch = np.empty(min(chunk_size, source.size), kernel.acc)
    for start in range(0, source.size, chunk_size):
        own = source[start : start + chunk_size]
        if position == 0:
            # The contribution is sent in the accumulator type, as the partial sums of later ranks
            # are, so that all ranks of the chain receive in the same way.
            connections.send(after, bytes_of(np.ascontiguousarray(kernel.widen(own), kernel.acc)))
            continue
        partial = scratch[: own.size]
        connections.receive(before, bytes_of(partial), partial.nbytes)
        kernel.reduce_into(partial, own)
        if out is None:
            connections.send(after, bytes_of(partial))
        else:
            kernel.finish(partial, out[start : start + chunk_size], connections.size)


def chain_scan(
    connections: Connections, kernel: ReductionKernel, flat: Flat, exclusive: bool
) -> None:
    """Each rank reduces its data into the previous rank's partial result and forwards it, segment
    by segment.

    Contributions are reduced in rank order.
    """
    rank, last = connections.rank, connections.rank == connections.size - 1
    chunk_size = max(1, SEGMENT // kernel.acc.itemsize)
    scratch = np.empty(min(chunk_size, flat.size), kernel.acc)
    for start in range(0, flat.size, chunk_size):
        own = flat[start : start + chunk_size]
        partial = scratch[: own.size]
        total = partial
        if not rank:
            total[...] = kernel.widen(own)
        else:
            connections.receive(rank - 1, bytes_of(partial), partial.nbytes)
            # In an exscan two arrays are needed: the received one is this rank's result, and the
            # sum with its own contribution goes on.
            total = partial.copy() if exclusive else partial
            if not (exclusive and last):
                kernel.reduce_into(total, own)
            # This comes after the own contribution has been added, because the result overwrites
            # it.
            kernel.finish(partial, own, connections.size)
        if not last:
            connections.send(rank + 1, bytes_of(total))


def pair_reduce_scatter(
    connections: Connections, kernel: ReductionKernel, blocks: Sequence[Flat], out: Flat
) -> None:
    """Two ranks: each sends the other rank's block and reduces the received one with its own."""
    rank = connections.rank
    longest = max(p.size for p in blocks)
    chunk_size = max(1, SEGMENT // kernel.storage.itemsize)
    staging = np.empty(min(chunk_size, longest), kernel.storage)
    # Both ranks go through the longest block, also if their own one is shorter, because they still
    # send the other one.
    for start in range(0, longest, chunk_size):
        outgoing, own = (
            blocks[1 - rank][start : start + chunk_size],
            blocks[rank][start : start + chunk_size],
        )
        received = staging[: own.size]
        connections.duplex(1 - rank, bytes_of(outgoing), 1 - rank, bytes_of(received))
        kernel.combine(
            (own, received) if rank == 0 else (received, own), out[start : start + chunk_size]
        )


def ring_reduce_scatter(
    connections: Connections, kernel: ReductionKernel, blocks: Sequence[Flat], out: Flat
) -> None:
    """The partial result of block i starts at rank i+1 and is sent round the ring to rank i.

    The first hop carries a rank's own data in the element type, later hops carry sums in the
    accumulator type.
    """
    size, rank = connections.size, connections.rank
    left, right = (rank - 1) % size, (rank + 1) % size
    wide = kernel.acc.itemsize
    chunk_size = max(1, SEGMENT // wide)
    longest = max(p.size for p in blocks)
    width = min(chunk_size, longest)
    carry, spare = np.empty(width, kernel.acc), np.empty(width, kernel.acc)
    # The first hop has the size of the element type, so half types are received into an array of
    # their own.
    narrow = None if kernel.storage == kernel.acc else np.empty(width, kernel.storage)
    for start in range(0, longest, chunk_size):
        parts = [p[start : start + chunk_size] for p in blocks]
        for hop in range(1, size):
            outgoing, own = parts[(rank - hop) % size], parts[(rank - hop - 1) % size]
            if hop == 1:
                received = (spare if narrow is None else narrow)[: own.size]
                connections.duplex(right, bytes_of(outgoing), left, bytes_of(received))
                sums = _add_first(kernel, received, own, spare)
            else:
                sums = spare[: own.size]
                connections.duplex(right, bytes_of(carry[: outgoing.size]), left, bytes_of(sums))
                kernel.reduce_into(sums, own)
            carry, spare = spare, carry
        mine = out[start : start + chunk_size]
        kernel.finish(carry[: mine.size], mine, size)


def _add_first(kernel: ReductionKernel, received: Flat, own: Flat, staging: Flat) -> Flat:
    """The sum of two ranks' own data, in ``staging``."""
    sums = staging[: own.size]
    if kernel.storage == kernel.acc and kernel.plain:
        kernel.ufunc(received, own, out=sums)
        return sums
    kernel.begin(sums, received)
    kernel.reduce_into(sums, own)
    return sums


def ring_all_gather(connections: Connections, blocks: Sequence[Flat]) -> None:
    """Block i from rank i to all ranks."""
    size, rank = connections.size, connections.rank
    left, right = (rank - 1) % size, (rank + 1) % size
    views = [bytes_of(p) for p in blocks]
    for hop in range(size - 1):
        connections.duplex(right, views[(rank - hop) % size], left, views[(rank - hop - 1) % size])
