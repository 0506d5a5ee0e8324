"""Symmetric memory: arrays of one size on all ranks, in memory that the ranks of a host share.

The first rank of each host creates one memfd for an allocation, with a part for each rank of the
host, and the others map it. The mapping of a rank lives as long as its array, or a view of it: the
kernel frees the memory with the last mapping of all ranks. Collectives find an array's region by
its address (:mod:`gloo_fallback.algorithms.peer_memory`).
"""

from __future__ import annotations

import json
import weakref
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from gloo_fallback.shm.process_memory import address_of
from gloo_fallback.shm.segment import SharedSegment, create_offer, open_offer
from unicoll.arrays.buffer import Buffer
from unicoll.arrays.kernels import Flat
from unicoll.arrays.types import BY_NAME, DType
from unicoll.backend import Call, Context
from unicoll.calls.ops import OPS
from unicoll.errors import DistArgumentError, DistBackendError
from unicoll.net.objects.received_json import parse

ROW = replace(OPS["all_gather_into_tensor"], name="symmetric_empty", code=250)
"""The exchanges of an allocation: all_gathers with a name of their own."""
_RECORD = 512
"""Bytes that a rank contributes to an exchange."""
_TEXT = 200
_PAGE = 4096
_OFFSET_BITS = 44
_UINT8 = BY_NAME["uint8"]


class _Allocation(Call):
    """An exchange of an allocation; errors describe the array."""

    __slots__ = ("text",)

    text: str

    def describe(self) -> str:
        return self.text


class _Region:
    """The memory of one allocation on this host.

    Args:
        number: of the allocation in the group, equal on all ranks.
        segment: with the parts of all ranks of this host.
        rank: this rank's part.
        stride: bytes of a part.
    """

    def __init__(self, number: int, segment: SharedSegment, rank: int, stride: int) -> None:
        self.number = number
        self.stride = stride
        self.start = segment.address + SharedSegment.START + rank * stride
        # The reference is weak: the memory must be unmapped with the array of the user, not with
        # the group. ``memory.obj`` is the object whose finalizer unmaps it.
        self._block: weakref.ref[Any] = weakref.ref(segment.memory.obj)

    @property
    def alive(self) -> bool:
        """False once this rank's array and all its views are gone: the memory is no longer
        mapped."""
        return self._block() is not None

    def view(self, rank: int, offset: int, count: int, dtype: np.dtype[Any]) -> Flat | None:
        """Elements of a rank's part from byte ``offset`` on; None if the memory is no longer
        mapped."""
        # The strong reference is taken before the test, so the memory cannot be unmapped between
        # the test and the new view.
        block = self._block()
        if block is None or offset + count * dtype.itemsize > self.stride:
            return None
        return np.frombuffer(block, dtype, count, SharedSegment.START + rank * self.stride + offset)


class SymmetricMemory:
    """The symmetric memory of one group on one rank.

    Attributes:
        allocations: how many there have been, equal on all ranks.
    """

    def __init__(self) -> None:
        self.allocations = 0
        # The regions are sorted by address. The tuple is replaced as a whole and never changed,
        # since other threads may look for an array at the same time without a lock.
        self._regions: tuple[_Region, ...] = ()

    def allocate(
        self,
        context: Context,
        execute: Callable[[Call], None],
        members: Callable[[], tuple[int, ...]],
        shape: tuple[int, ...],
        dtype: DType,
    ) -> Flat:
        """An array of zeros in shared memory; all ranks of the group call this.

        Args:
            execute: executes an all_gather_into_tensor.
            members: after the first exchange, the ranks of the group that share memory with this
                one.

        Raises, the same on all ranks:
            DistArgumentError: the ranks pass different sizes.
            DistBackendError: there is no memory, or no descriptor.
        """
        # There are three exchanges, which all ranks make whatever fails on one of them: of the
        # sizes, of the addresses of the segments, and of the reasons for failures. No rank raises
        # an error of its own before the last one, or the others would wait for it. The first
        # exchange may be the first collective of the group, which selects the transport, so
        # ``members`` is called after it.
        text = f"symmetric_empty({dtype.name}{list(shape)})"
        nbytes = dtype.itemsize
        for size in shape:
            nbytes *= size

        def exchange(record: Any) -> list[Any]:
            return _exchange(context, execute, text, record)

        sizes = exchange([nbytes, text[:_TEXT]])
        if len({size for size, _ in sizes}) > 1:
            raise DistArgumentError(
                f"symmetric_empty: the ranks of group {context.name!r} allocate different sizes: "
                + ", ".join(
                    f"rank {r}: {each[1]}" for r, each in zip(context.ranks, sizes, strict=True)
                ),
                op="symmetric_empty",
                group=context.name,
            )
        # The allocation is counted after the sizes have agreed, which all ranks find alike, so the
        # numbers stay equal on all ranks also after one that has failed.
        self.allocations += 1
        near = members()
        stride = -(-max(nbytes, 1) // _PAGE) * _PAGE
        segment, reason, offer = None, "", None
        try:
            if context.rank == near[0] and len(near) > 1:
                segment, offer = create_offer(SharedSegment.START + len(near) * stride)
        except (OSError, OverflowError) as e:
            # The error is not raised here, but in the last exchange, on all ranks.
            reason = f"{stride * len(near)} bytes of shared memory: {e}"
        try:
            offers = exchange(offer)
            try:
                if segment is None and (offer := offers[near[0]]) is not None:
                    segment = open_offer(offer)
            except OSError as e:
                reason = f"the shared memory of its host: {e}"
            for rank, why in zip(context.ranks, exchange(reason[:_TEXT]), strict=True):
                if why:
                    raise DistBackendError(
                        f"{text}: rank {rank} cannot map {why}",
                        op="symmetric_empty",
                        group=context.name,
                        rank=rank,
                    )
        except BaseException:
            if segment is not None:
                segment.close()
            raise
        if segment is None:
            return np.zeros(shape, dtype.storage)
        region = _Region(self.allocations, segment, near.index(context.rank), stride)
        # Regions whose arrays are gone are dropped here, so their number does not grow with the
        # allocations.
        regions = [*(each for each in self._regions if each.alive), region]
        self._regions = tuple(sorted(regions, key=_start))
        count = nbytes // dtype.itemsize
        offset = SharedSegment.START + near.index(context.rank) * stride
        # From here on only the array keeps the mapping. No descriptor is needed any more: in the
        # last exchange all ranks have reported that they have mapped the segment.
        array = np.frombuffer(segment.memory, dtype.storage, count, offset).reshape(shape)
        segment.close()
        return array

    def locate(self, flat: Flat) -> int:
        """The location of an array of this rank: a number for :meth:`view` on any rank; -1 if it is
        not symmetric."""
        address = address_of(flat)
        regions = self._regions
        for place in range(bisect_right(regions, address, key=_start) - 1, -1, -1):
            region = regions[place]
            # A region that is not alive is passed over, because its addresses may be in use again.
            # Regions that are alive do not overlap, so the first of them below the address decides.
            if region.alive:
                offset = address - region.start
                inside = offset + flat.nbytes <= region.stride
                return region.number << _OFFSET_BITS | offset if inside else -1
        return -1

    @staticmethod
    def region_of(location: int) -> int:
        """The number of the allocation that a location belongs to."""
        return location >> _OFFSET_BITS

    def view(self, location: int, rank: int, count: int, dtype: np.dtype[Any]) -> Flat | None:
        """``count`` elements of a rank of this host (by its place among them) at a location; None
        if not mapped."""
        number, offset = location >> _OFFSET_BITS, location & ((1 << _OFFSET_BITS) - 1)
        region = next((each for each in self._regions if each.number == number), None)
        return region.view(rank, offset, count, dtype) if region is not None else None


def _start(region: _Region) -> int:
    return region.start


def _exchange(
    context: Context, execute: Callable[[Call], None], text: str, record: Any
) -> list[Any]:
    """The records of all ranks; a record is a short JSON value."""
    mine = np.frombuffer(json.dumps(record).encode().ljust(_RECORD), np.uint8)
    every = np.empty((context.size, _RECORD), np.uint8)
    inputs = (Buffer(mine, _UINT8, mine.shape, mine),)
    outputs = (Buffer(every, _UINT8, every.shape, every.reshape(-1)),)
    call = _Allocation(ROW, inputs, outputs, context.timeout)
    call.text = text
    call.signature = hash((ROW.code, _RECORD))
    execute(call)
    return [parse(bytes(row)) for row in every]
