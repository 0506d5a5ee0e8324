"""Copies, packing and views of flat arrays in host or device memory.

MPI takes both kinds: mpi4py reads the address from ``__cuda_array_interface__`` (it does not order
by the stream), and its requests keep their arrays alive.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, cast

import numpy as np

from unicoll.arrays.device_flat import DeviceFlat, DeviceMemory
from unicoll.arrays.kernels import Flat
from unicoll.backend import Call
from unicoll.backend.host import split


def address(flat: Flat) -> int:
    """Address of the first element."""
    if isinstance(flat, DeviceFlat):
        return flat.ptr
    found: int = flat.__array_interface__["data"][0]
    return found


def overlap(one: Flat, other: Flat) -> bool:
    """True if two arrays may share memory."""
    if isinstance(one, DeviceFlat):
        return one.overlaps(cast(DeviceFlat, other))
    return bool(np.may_share_memory(one, other))


def empty(count: int, like: Flat) -> Flat:
    """An uninitialised array of ``count`` elements, with the dtype and device of ``like``."""
    if isinstance(like, DeviceFlat):
        return cast(Flat, like.memory.empty(count, like.dtype))
    return np.empty(count, like.dtype)


def copy(pairs: Iterable[tuple[Flat, Flat]]) -> None:
    """Copy the second array of each pair to the first; they are the same or do not overlap."""
    each = list(pairs)
    if each and isinstance(each[0][0], DeviceFlat):
        each[0][0].memory.copy(cast("list[tuple[DeviceFlat, DeviceFlat]]", each))
        return
    for target, source in each:
        target[:] = source


def concatenated(chunks: Sequence[Flat]) -> Flat:
    """A copy of all arrays in one, in order."""
    packed = empty(sum(p.size for p in chunks), chunks[0])
    copy(zip(split(packed, [chunk.size for chunk in chunks]), chunks, strict=True))
    return packed


def split_into(packed: Flat, chunks: Sequence[Flat]) -> None:
    """Copy consecutive slices of ``packed`` to ``chunks``: the inverse of :func:`concatenated`."""
    copy(zip(chunks, split(packed, [chunk.size for chunk in chunks]), strict=True))


def device_memory(call: Call) -> DeviceMemory | None:
    """The device memory of a call's arrays; None if they are in host memory."""
    # A barrier has no arrays.
    flat = (call.inputs or call.outputs)[0].flat if call.dtype is not None else None
    return flat.memory if isinstance(flat, DeviceFlat) else None


def deliver_bytes(target: Flat, data: Flat) -> None:
    """Copy received host bytes to ``target``; for device memory keep them, and the waiting thread
    copies them."""
    if isinstance(target, DeviceFlat):
        target.memory.received = data
    else:
        target[:] = data


def contiguous_view(chunks: Sequence[Flat]) -> Flat | None:
    """One view of arrays that are consecutive parts of one array; None if they are not.

    Always None in device memory: neighbours may be separate allocations, which MPI does not accept
    as one buffer.
    """
    # The address of an empty array says nothing about its place.
    filled: list[Any] = [p for p in chunks if p.size]
    if len(filled) < 2 or isinstance(filled[0], DeviceFlat):
        return None
    base = filled[0].base
    # Addresses alone do not suffice: separate arrays may lie side by side by chance, and the view
    # keeps only one base alive.
    if base is None or any(p.base is not base for p in filled):
        return None
    at = address(filled[0])
    for chunk in filled:
        if address(chunk) != at:
            return None
        at += chunk.nbytes
    count = sum(p.size for p in filled)
    whole: Flat = np.lib.stride_tricks.as_strided(filled[0], (count,), (filled[0].itemsize,))
    return whole
