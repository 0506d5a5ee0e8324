"""What the collectives do with flat memory besides handing it to MPI, of the host and of a device alike.

MPI takes both as they are: mpi4py reads ``__cuda_array_interface__`` for the address, orders nothing by it, and its
requests keep what they were given alive.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, cast

import numpy as np

from unicoll.backend import Call
from unicoll.device_memory import DeviceFlat, DeviceMemory
from unicoll.kernels import Flat

__all__ = [
    "address", "clone", "copy", "device_memory", "empty", "hand_out", "in_one_piece", "joined", "land", "overlap",
]  # fmt: skip


def address(flat: Flat) -> int:
    """Where an array begins."""
    if isinstance(flat, DeviceFlat):
        return flat.ptr
    found: int = flat.__array_interface__["data"][0]
    return found


def overlap(one: Flat, other: Flat) -> bool:
    """Whether two arrays may have memory in common."""
    if isinstance(one, DeviceFlat):
        return one.overlaps(cast(DeviceFlat, other))
    return bool(np.may_share_memory(one, other))


def empty(count: int, like: Flat) -> Flat:
    """Room for elements, where ``like`` is and of its type."""
    if isinstance(like, DeviceFlat):
        return cast(Flat, like.memory.empty(count, like.dtype))
    return np.empty(count, like.dtype)


def copy(pairs: Iterable[tuple[Flat, Flat]]) -> None:
    """Copy to the first of each pair from the second; they do not overlap, unless they are the same."""
    each = list(pairs)
    if each and isinstance(each[0][0], DeviceFlat):
        each[0][0].memory.copy(cast("list[tuple[DeviceFlat, DeviceFlat]]", each))
        return
    for target, source in each:
        target[:] = source


def clone(flat: Flat) -> Flat:
    """A copy of its own."""
    made = empty(flat.size, flat)
    copy([(made, flat)])
    return made


def joined(pieces: Sequence[Flat]) -> Flat:
    """A copy of all arrays, one behind the other."""
    room = empty(sum(p.size for p in pieces), pieces[0])
    copy(zip(_parts(room, pieces), pieces, strict=True))
    return room


def hand_out(room: Flat, pieces: Sequence[Flat]) -> None:
    """The contrary of :func:`joined`."""
    copy(zip(pieces, _parts(room, pieces), strict=True))


def _parts(room: Flat, pieces: Sequence[Flat]) -> list[Flat]:
    found, start = [], 0
    for piece in pieces:
        found.append(room[start : start + piece.size])
        start += piece.size
    return found


def device_memory(call: Call) -> DeviceMemory | None:
    """The device of a call's arrays, if it has come with their addresses."""
    flat = (call.inputs or call.outputs)[0].flat if call.dtype is not None else None
    return flat.memory if isinstance(flat, DeviceFlat) else None


def land(target: Flat, data: Flat) -> None:
    """Give bytes of the host to whom they are for; for a device they are put by, and whoever waits copies them."""
    if isinstance(target, DeviceFlat):
        target.memory.came = data
    else:
        target[:] = data


def in_one_piece(pieces: Sequence[Flat]) -> Flat | None:
    """The memory of arrays that lie one behind the other in one array; None where they do not.

    Neighbours in a device's memory may be allocations of their own, which MPI must not be given as one.
    """
    filled: list[Any] = [p for p in pieces if p.size]
    if len(filled) < 2 or isinstance(filled[0], DeviceFlat):
        return None
    base = filled[0].base
    if base is None or any(p.base is not base for p in filled):
        return None
    at = address(filled[0])
    for piece in filled:
        if address(piece) != at:
            return None
        at += piece.nbytes
    count = sum(p.size for p in filled)
    whole: Flat = np.lib.stride_tricks.as_strided(filled[0], (count,), (filled[0].itemsize,))
    return whole
