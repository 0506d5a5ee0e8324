"""The blocks of the arrays of a call, and the reduction of sums of hosts."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from unicoll.arrays.conversion import Buffer
from unicoll.arrays.kernels import Flat, Kernel
from unicoll.backend import Call
from unicoll.backend.host import flat_of, split


def bounds_of(count: int, parts: int) -> list[int]:
    """The bounds of ``parts`` nearly equal blocks of ``count`` elements: ``parts + 1`` offsets."""
    return [count * i // parts for i in range(parts + 1)]


def slices_of(counts: Sequence[int]) -> list[slice]:
    """Where blocks of these sizes are in an array that holds one after another."""
    return [
        slice(stop - count, stop) for count, stop in zip(counts, accumulate(counts), strict=True)
    ]


def split_blocks(buffers: Sequence[Buffer], counts: Sequence[int], single: bool) -> list[Flat]:
    """One block per rank: a list of arrays, or with ``single`` the parts of one array with
    ``counts`` elements."""
    if not single:
        return [flat_of(b) for b in buffers]
    return split(flat_of(buffers[0]), counts)


def blocks_of(buffers: Sequence[Buffer], single: bool, ranks: int) -> list[Flat]:
    """One block per rank: a list of arrays, or with ``single`` the equal parts of one array."""
    return split_blocks(buffers, (buffers[0].count // ranks,) * ranks, single)


def exchanged_blocks(call: Call) -> tuple[list[Flat], list[Flat]]:
    """The blocks of an all_to_all that go to each rank, and those that come from each rank."""
    assert call.in_counts is not None
    assert call.out_counts is not None
    sources = split_blocks(call.inputs, call.in_counts, call.op.joined)
    targets = split_blocks(call.outputs, call.out_counts, call.op.joined)
    return sources, targets


class NodeSums:
    """A reduction of node sums, which have the accumulator type and are scaled, but not yet
    divided."""

    plain = True
    at_once = False

    def __init__(self, kernel: Kernel, ranks: int) -> None:
        self.storage = self.acc = kernel.acc
        self.ufunc = kernel.ufunc
        self._kernel = kernel
        # This is the divisor of an average: all ranks count, while the algorithms over sockets pass
        # the number of hosts.
        self._ranks = ranks

    def begin(self, acc: Flat, values: Flat) -> None:
        acc[:] = values

    def widen(self, values: Flat) -> Flat:
        return values

    def reduce_into(self, acc: Flat, values: Flat) -> None:
        self.ufunc(acc, values, out=acc)

    def finish(self, acc: Flat, out: Flat, ranks: int) -> None:
        self._kernel.finish(acc, out, self._ranks)

    def combine(self, blocks: Sequence[Flat], out: Flat, disjoint: bool = False) -> None:
        acc = blocks[0].copy() if len(blocks) == 1 else self.ufunc(blocks[0], blocks[1])
        for chunk in blocks[2:]:
            self.reduce_into(acc, chunk)
        self.finish(acc, out, len(blocks))


ReductionKernel = Kernel | NodeSums
"""What the algorithms over sockets reduce with."""
