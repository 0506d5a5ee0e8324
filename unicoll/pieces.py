"""How a collective is cut into pieces that are collectives themselves, the same on all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from .buffers import Buffer
from .call import Call
from .ops import Sizes

__all__ = ["Plan", "plan"]


@dataclass(frozen=True)
class Plan:
    """How a call is cut: piece k is elements ``[k * step, (k + 1) * step)`` of every part.

    Attributes:
        parts: of each buffer, as (first element, number of elements).
        step: elements of a part in one piece, the same on all ranks.
        pieces: how many there are.
    """

    parts: dict[int, tuple[tuple[int, int], ...]]
    step: int
    pieces: int

    def ranges(self, buffer: Buffer, piece: int) -> list[tuple[int, int]]:
        """What a piece has of a buffer, as (first element, number of elements)."""
        start, stop = piece * self.step, (piece + 1) * self.step
        return [
            (first + min(start, count), min(stop, count) - min(start, count))
            for first, count in self.parts[id(buffer)]
        ]

    def counts(self, buffers: Sequence[Buffer], piece: int) -> tuple[int, ...]:
        """Elements of each part that a piece has."""
        return tuple(count for buffer in buffers for _, count in self.ranges(buffer, piece))


def plan(call: Call, size: int, nbytes: int, longest: int = -1) -> Plan:
    """The pieces of a collective, of at most ``nbytes`` bytes; all members of a group of ``size`` cut alike.

    Where this rank does not know all sizes, ``longest`` is how many elements the largest part has that any two members
    exchange. Where this rank's parts have come to their end it takes part in the others' pieces with nothing.
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
    share = nbytes // (1 if sizes is Sizes.SAME else size) // buffers[0].dtype.itemsize
    step = max(1, share)
    return Plan(parts, step, max(1, -(-longest // step)))


def _laid_out(counts: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Parts of these sizes, one behind the other."""
    return tuple(zip(accumulate(counts, initial=0), counts, strict=False))


def _split(count: int, size: int) -> tuple[tuple[int, int], ...]:
    each = count // size
    return tuple((i * each, each) for i in range(size))
