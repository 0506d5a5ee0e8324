"""Arrays of one call that share memory.

A backend may write an output before it has read all inputs, or while it reads them, so what a call
gave would depend on the backend, the transport and the size. Inputs that an output overlaps are
therefore copied first, but for the forms in place, in which a rank's own part of the data stays
where it is: :func:`_is_in_place`. Outputs that overlap each other have no right result, and are
refused.

Memory is compared by addresses. Inputs that are packed (:mod:`unicoll.arrays.conversion`) share
none with outputs.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import islice, pairwise
from math import gcd
from typing import Any, NamedTuple

import numpy as np

from unicoll.arrays.buffer import Buffer, WriteBack
from unicoll.arrays.families import copy_of
from unicoll.calls.call import Call
from unicoll.calls.ops import Sizes
from unicoll.errors import DistArgumentError

_MOST_WORK = 100_000
"""Of np.shares_memory, whose problem is NP-complete in the number of dimensions."""


def separate_one(call: Call, rank: int) -> None:
    """:func:`separate` for one call; fast for one input and one output that are arrays, not views
    of others."""
    inputs, outputs = call.inputs, call.outputs
    if len(inputs) == 1 == len(outputs):
        one, other = inputs[0].flat, outputs[0].flat
        if one is not None and other is not None:
            # Different arrays that own their memory share none. Otherwise NumPy compares the
            # bounds, which is enough to say no. A call without an overlap ends here, within a third
            # of a microsecond; separate() decides about the others.
            bare = one.base is None is other.base and one.flags.owndata and other.flags.owndata
            if (bare and one is not other) or not np.may_share_memory(one, other):
                return
    separate((call,), rank)


def separate(calls: Sequence[Call], rank: int) -> None:
    """Copy the inputs of calls that start together where their outputs overlap them.

    Args:
        rank: this rank in the group.

    Raises:
        DistArgumentError: outputs overlap each other; or inputs, of a device library that cannot
            copy them.
    """
    outputs = [buffer for call in calls for buffer in call.outputs]
    # This comes first: packed copies own their memory, so the next check would find nothing,
    # although all of them are copied back to the user's arrays.
    if len(outputs) > 1 and any(buffer.unpack is not None for buffer in outputs):
        _check_packed(calls, outputs)
    if _own_their_memory([buffer for call in calls for buffer in _arrays(call)]):
        return
    # Of sorted spans neighbours overlap if any two do. An empty array has an address, but no
    # memory.
    spans = sorted((*_span(buffer), i) for i, buffer in enumerate(outputs) if buffer.count)
    for (_, end, i), (start, _, j) in pairwise(spans):
        if start < end:
            raise _overlapping(calls, i, j)
    for call in calls:
        if call.inputs is call.outputs:
            continue
        kept = [
            not _overlaps(buffer, spans) or _is_in_place(call, i, rank)
            for i, buffer in enumerate(call.inputs)
        ]
        if not all(kept):
            name = call.op.name
            # The copies are made now, before any call of the batch starts, and take the place of
            # the inputs. The user's arrays are not changed.
            call.inputs = tuple(
                buffer if keep else copy_of(buffer, name)
                for buffer, keep in zip(call.inputs, kept, strict=True)
            )


def _overlapping(calls: Sequence[Call], i: int, j: int) -> DistArgumentError:
    name, batch = (
        calls[0].op.name,
        f", of {len(calls)} calls in one batch" if len(calls) > 1 else "",
    )
    return DistArgumentError(
        f"{name}: outputs {min(i, j)} and {max(i, j)} overlap each other{batch}", op=name
    )


class _Place(NamedTuple):
    """The elements of an array in memory.

    Attributes:
        low, high: addresses of its first byte, and after its last.
        number: among the outputs.
        address: of its first element.
        step: the distances of all its elements from the first are multiples of it.
        shape, strides, itemsize: the array's, in bytes.
    """

    low: int
    high: int
    number: int
    address: int
    step: int
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None
    itemsize: int

    @property
    def __array_interface__(self) -> dict[str, Any]:
        """For NumPy, which does not read the memory."""
        return {
            "version": 3,
            "shape": self.shape,
            "typestr": f"|V{self.itemsize}",
            "data": (self.address, True),
            "strides": self.strides,
        }


def _place(buffer: Buffer, number: int) -> _Place:
    itemsize, unpack, shape = buffer.dtype.itemsize, buffer.unpack, buffer.shape
    if not isinstance(unpack, WriteBack):
        # This is the array's own memory, or a packed copy. An array whose strides are not known is
        # compared with none: its packed copy overlaps no other array.
        start = buffer.address
        return _Place(start, start + buffer.nbytes, number, start, itemsize, shape, None, itemsize)
    address, strides = unpack.address, unpack.strides
    low, high, step = address, address + itemsize, 0
    for stride, count in zip(strides, shape, strict=True):
        if count > 1:
            step = gcd(step, stride)
            if stride < 0:
                low += stride * (count - 1)
            else:
                high += stride * (count - 1)
    return _Place(low, high, number, address, step, shape, strides, itemsize)


def _check_packed(calls: Sequence[Call], outputs: Sequence[Buffer]) -> None:
    """Raise if outputs overlap of which some are packed: their packed copies do not, but all are
    written back."""
    places = sorted(_place(buffer, i) for i, buffer in enumerate(outputs) if buffer.count)
    # The columns of a matrix overlap by their bounds, each with each other one. This finds in one
    # pass that they have different bytes, where the loop would compare all pairs.
    if _are_interleaved(places):
        return
    for at, place in enumerate(places, 1):
        for other in islice(places, at, None):
            # The places are sorted by their first byte, so all later ones begin behind this one,
            # too.
            if other.low >= place.high:
                break
            i, j = place.number, other.number
            if outputs[i].device == outputs[j].device and _share(place, other):
                raise _overlapping(calls, i, j)


def _are_interleaved(places: Sequence[_Place]) -> bool:
    """True if arrays have different bytes of each step, as the columns of a matrix have."""
    step = gcd(*(place.step for place in places))
    if not step:
        return False
    used = sorted((place.address % step, place.itemsize) for place in places)
    starts = [start for start, _ in used]
    following = (*starts[1:], starts[0] + step)
    return all(start + size <= end for (start, size), end in zip(used, following, strict=True))


def _share(place: _Place, other: _Place) -> bool:
    try:
        return np.shares_memory(np.asarray(place), np.asarray(other), _MOST_WORK)  # type: ignore[arg-type]
    except RuntimeError:
        # NumPy has reached the limit of work. Arrays that a program makes by slicing take little.
        return False


def _arrays(call: Call) -> tuple[Buffer, ...]:
    return call.inputs if call.inputs is call.outputs else (*call.inputs, *call.outputs)


def _own_their_memory(buffers: Sequence[Buffer]) -> bool:
    """True if all are of different NumPy arrays that own their memory, which is known without
    addresses."""
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
    # The spans do not overlap, so only the last one that begins before ``stop`` can reach into this
    # array.
    place = bisect_left(spans, (stop,))
    return start < stop and place > 0 and spans[place - 1][1] > start


def _is_in_place(call: Call, place: int, rank: int) -> bool:
    """True if an input needs no copy: it is, or has, this rank's own part of the data, where the
    result has it."""
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
