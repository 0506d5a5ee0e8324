"""Arrays of one call that share memory.

A backend may write an output before it has read all inputs, or while it reads them, so what a call gave would depend on
the backend, the transport and the size. Inputs that an output overlaps are therefore copied first, but for the forms in
place, in which a rank's own part of the data stays where it is: :func:`_is_in_place`. Outputs that overlap each other
have no right result, and are refused.

Memory is compared by addresses. Arrays that are packed (:mod:`unicoll.arrays.conversion`) share none.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from unicoll.arrays.conversion import Buffer, copy_of
from unicoll.backend.call import Call
from unicoll.backend.ops import Sizes
from unicoll.errors import DistArgumentError


def separate_one(call: Call, rank: int) -> None:
    """:func:`separate` for one call; fast for one input and one output that are arrays, not views of others."""
    inputs, outputs = call.inputs, call.outputs
    if len(inputs) == 1 == len(outputs):
        one, other = inputs[0].flat, outputs[0].flat
        if one is not None and other is not None:
            bare = one.base is None is other.base and one.flags.owndata and other.flags.owndata
            if (bare and one is not other) or not np.may_share_memory(one, other):
                return
    separate((call,), rank)


def separate(calls: Sequence[Call], rank: int) -> None:
    """Copy the inputs of calls that start together where their outputs overlap them.

    Args:
        rank: this rank in the group.

    Raises:
        DistArgumentError: outputs overlap each other; or inputs, of a device library that cannot copy them.
    """
    if _own_their_memory([buffer for call in calls for buffer in _arrays(call)]):
        return
    first = calls[0]
    outputs = [buffer for call in calls for buffer in call.outputs]
    spans = sorted((*_span(buffer), i) for i, buffer in enumerate(outputs) if buffer.count)
    for (_, end, i), (start, _, j) in pairwise(spans):
        if start < end:
            name, batch = first.op.name, f", of {len(calls)} calls in one batch" if len(calls) > 1 else ""
            raise DistArgumentError(
                f"{name}: outputs {min(i, j)} and {max(i, j)} overlap each other{batch}", op=name
            )
    for call in calls:
        if call.inputs is call.outputs:
            continue
        kept = [
            not _overlaps(buffer, spans) or _is_in_place(call, i, rank)
            for i, buffer in enumerate(call.inputs)
        ]
        if not all(kept):
            name = call.op.name
            call.inputs = tuple(
                buffer if keep else copy_of(buffer, name)
                for buffer, keep in zip(call.inputs, kept, strict=True)
            )


def _arrays(call: Call) -> tuple[Buffer, ...]:
    return call.inputs if call.inputs is call.outputs else (*call.inputs, *call.outputs)


def _own_their_memory(buffers: Sequence[Buffer]) -> bool:
    """True if all are of different NumPy arrays that own their memory, which is known without addresses."""
    owners = set()
    for buffer in buffers:
        flat = buffer.flat
        if flat is None:
            return False
        owner = flat if flat.base is None else flat.base
        if type(owner) is not np.ndarray or not owner.flags.owndata:
            return False
        owners.add(id(owner))
    return len(owners) == len(buffers)


def _span(buffer: Buffer) -> tuple[int, int]:
    """The address of its first byte, and that after its last."""
    start = buffer.address
    return start, start + buffer.nbytes


def _overlaps(buffer: Buffer, spans: Sequence[tuple[int, int, int]]) -> bool:
    """True if an array overlaps one of others, which are sorted and do not overlap each other."""
    start, stop = _span(buffer)
    place = bisect_left(spans, (stop,))
    return start < stop and place > 0 and spans[place - 1][1] > start


def _is_in_place(call: Call, place: int, rank: int) -> bool:
    """True if an input needs no copy: it is, or has, this rank's own part of the data, where the result has it."""
    source, outputs, sizes = call.inputs[place], call.outputs, call.op.sizes
    if sizes is Sizes.SAME:
        return source.address == outputs[0].address
    if sizes is Sizes.GATHERED:
        return source.address == outputs[rank].address
    if sizes is Sizes.GATHERED_FLAT:
        return source.address == outputs[0].address + rank * source.nbytes
    if sizes is Sizes.SCATTERED:
        return place == rank and source.address == outputs[0].address
    if sizes is Sizes.SCATTERED_FLAT:
        return source.address + rank * outputs[0].nbytes == outputs[0].address
    return False
