"""Reduce-scatter and all-gather in ceil(log2 n) rounds for any number of ranks, with no more bytes
than a ring.

In each round a rank sends about half of its remaining blocks to the rank ``s`` ahead of it, where
``s`` is n/2, n/4, ... rounded up; the rounds in reverse order are an all-gather. See Jesper Larsson
Träff, "Optimal, Non-pipelined Reduce-scatter and Allreduce Algorithms" (2024), and for the
all-gather Bruck et al. (1997). A ring takes n-1 rounds, which is faster only for large blocks.

Block i is the result of rank i in a reduction, or its contribution to an all-gather. Blocks are
stored in a working array in the order rank, rank+1, ...
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np

from gloo_fallback.algorithms.operands import ReductionKernel
from gloo_fallback.transport.exchange import Connections, bytes_of
from unicoll.arrays.kernels import Flat

BLOCK = 1 << 16
"""Bytes of a block from which a ring is as fast."""
LIMIT = 1 << 22
"""Maximum bytes of all blocks, and thus of the working array."""


def is_efficient(connections: Connections, nbytes: int) -> bool:
    """True if this algorithm is used for blocks of ``nbytes`` in total."""
    return connections.size > 2 and nbytes <= min(LIMIT, connections.size * BLOCK)


def _rounds(size: int) -> list[tuple[int, int]]:
    """(s, blocks before the round) for each round."""
    found = []
    while size > 1:
        found.append(((size + 1) // 2, size))
        size = (size + 1) // 2
    return found


def _rotated(connections: Connections, blocks: Sequence[Flat]) -> tuple[list[Flat], list[int]]:
    """The blocks in the order rank, rank+1, ..., and their offsets in the working array."""
    rotated = [blocks[(connections.rank + i) % connections.size] for i in range(connections.size)]
    return rotated, [0, *accumulate(p.size for p in rotated)]


def reduce_blocks(
    connections: Connections, kernel: ReductionKernel, blocks: Sequence[Flat], out: Flat
) -> None:
    """Block i, reduced over all ranks, to rank i; ``out`` may overlap a block."""
    rotated, starts = _rotated(connections, blocks)
    # All blocks are copied before anything is sent, which is why ``out`` may overlap one of them.
    work = np.empty(starts[-1], kernel.acc)
    for block, start in zip(rotated, starts, strict=False):
        kernel.begin(work[start : start + block.size], block)
    received = np.empty(
        max(starts[before - s] for s, before in _rounds(connections.size)), kernel.acc
    )
    for s, before in _rounds(connections.size):
        outgoing, incoming = work[starts[s] : starts[before]], received[: starts[before - s]]
        to, frm = (
            (connections.rank + s) % connections.size,
            (connections.rank - s) % connections.size,
        )
        connections.duplex(to, bytes_of(outgoing), frm, bytes_of(incoming))
        # The received blocks are for the same ranks as the first ones that this rank still holds.
        kept = work[: incoming.size]
        kernel.ufunc(kept, incoming, out=kept)
    kernel.finish(work[: starts[1]], out, connections.size)


def gather_blocks(connections: Connections, blocks: Sequence[Flat]) -> None:
    """Block i from rank i to all ranks."""
    rotated, starts = _rotated(connections, blocks)
    work = np.empty(starts[-1], blocks[0].dtype)
    work[: starts[1]] = rotated[0]
    for s, after in reversed(_rounds(connections.size)):
        # A round at most doubles the number of blocks, so the two parts do not overlap.
        outgoing, incoming = work[: starts[after - s]], work[starts[s] : starts[after]]
        to, frm = (
            (connections.rank - s) % connections.size,
            (connections.rank + s) % connections.size,
        )
        connections.duplex(to, bytes_of(outgoing), frm, bytes_of(incoming))
    for block, start in zip(rotated[1:], starts[1:], strict=False):
        block[:] = work[start : start + block.size]
