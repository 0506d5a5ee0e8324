"""Cuts a collective into chunks that are collectives themselves, the same on all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from unicoll.arrays.conversion import Buffer
from unicoll.calls.call import Call
from unicoll.calls.ops import Sizes


@dataclass(frozen=True)
class ChunkPlan:
    """The chunks of a call: chunk k has the elements ``[k * step, (k + 1) * step)`` of every part.

    Attributes:
        parts: by id of a buffer, its parts as (first element, number of elements).
        step: elements of a part in one chunk, the same on all ranks.
        count: number of chunks.
    """

    parts: dict[int, tuple[tuple[int, int], ...]]
    step: int
    count: int

    def ranges(self, buffer: Buffer, chunk: int) -> list[tuple[int, int]]:
        """The elements of a buffer in a chunk, as (first element, number of elements) for each
        part."""
        start, stop = chunk * self.step, (chunk + 1) * self.step
        return [
            (first + min(start, count), min(stop, count) - min(start, count))
            for first, count in self.parts[id(buffer)]
        ]

    def counts(self, buffers: Sequence[Buffer], chunk: int) -> tuple[int, ...]:
        """Number of elements of each part in a chunk."""
        return tuple(count for buffer in buffers for _, count in self.ranges(buffer, chunk))


def plan(call: Call, size: int, nbytes: int, longest: int = -1) -> ChunkPlan:
    """The chunks of a collective, of at most ``nbytes`` bytes; equal on all members of a group of
    ``size``.

    If this rank does not know all sizes, ``longest`` is the number of elements of the largest part
    that any two members exchange. After the end of its own parts this rank takes part in the
    others' chunks with zero elements.
    """
    buffers = [*call.inputs, *(b for b in call.outputs if call.outputs is not call.inputs)]
    parts: dict[int, tuple[tuple[int, int], ...]] = {id(b): ((0, b.count),) for b in buffers}
    sizes = call.op.sizes
    if sizes is Sizes.GATHERED_FLAT:
        parts[id(call.outputs[0])] = _split(call.outputs[0].count, size)
    elif sizes is Sizes.SCATTERED_FLAT:
        parts[id(call.inputs[0])] = _split(call.inputs[0].count, size)
    elif sizes is Sizes.EXCHANGED and len(call.inputs) != size:
        assert call.in_counts is not None
        assert call.out_counts is not None
        parts[id(call.inputs[0])] = _laid_out(call.in_counts)
        parts[id(call.outputs[0])] = _laid_out(call.out_counts)
    if longest < 0:
        longest = max((count for several in parts.values() for _, count in several), default=0)
    # The step follows from numbers that are equal on all members, so all cut at the same elements.
    share = nbytes // (1 if sizes is Sizes.SAME else size) // buffers[0].dtype.itemsize
    step = max(1, share)
    # A call without elements is one empty chunk, so that the ranks compare it like others.
    return ChunkPlan(parts, step, max(1, -(-longest // step)))


def _laid_out(counts: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Adjacent parts of these sizes."""
    return tuple(zip(accumulate(counts, initial=0), counts, strict=False))


def _split(count: int, size: int) -> tuple[tuple[int, int], ...]:
    each = count // size
    return tuple((i * each, each) for i in range(size))
