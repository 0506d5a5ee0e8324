"""How a collective is cut into pieces that are collectives themselves, the same on all ranks."""

from __future__ import annotations

from dataclasses import dataclass

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


def plan(call: Call, size: int, nbytes: int) -> Plan:
    """The pieces of a collective, of at most ``nbytes`` bytes; all members of a group of ``size`` cut alike."""
    buffers = [*call.inputs, *(b for b in call.outputs if call.outputs is not call.inputs)]
    parts: dict[int, tuple[tuple[int, int], ...]] = {id(b): ((0, b.count),) for b in buffers}
    sizes = call.op.sizes
    if sizes is Sizes.GATHERED_FLAT:
        parts[id(call.outputs[0])] = _split(call.outputs[0].count, size)
    elif sizes is Sizes.SCATTERED_FLAT:
        parts[id(call.inputs[0])] = _split(call.inputs[0].count, size)
    longest = max((count for several in parts.values() for _, count in several), default=0)
    share = nbytes // (1 if sizes is Sizes.SAME else size) // buffers[0].dtype.itemsize
    # In an all_to_all sizes may differ in any way, so that no rank knows how many pieces another one would make.
    step = max(1, longest if sizes is Sizes.EXCHANGED else share)
    return Plan(parts, step, max(1, -(-longest // step)))


def _split(count: int, size: int) -> tuple[tuple[int, int], ...]:
    each = count // size
    return tuple((i * each, each) for i in range(size))
