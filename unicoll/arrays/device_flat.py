"""Flat arrays in device memory that can be sliced and copied, for backends whose library accepts
device addresses.

A :class:`DeviceFlat` replaces the flat NumPy view of a host array
(:attr:`unicoll.arrays.buffer.Buffer.flat`). A backend that only slices, copies and passes on flat
arrays works with both. No element is read on the host.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import numpy as np

from unicoll.arrays.buffer import Buffer
from unicoll.errors import DistArgumentError


class DeviceMemory(ABC):
    """Copies and temporary memory on the device of one call (:mod:`unicoll.staging.device_memory`).

    Attributes:
        received: the bytes of a received message that arrived in host memory; else None.
    """

    received: Any = None

    @abstractmethod
    def bound(self) -> AbstractContextManager[None]:
        """Context in which the device is the thread's current one, which libraries that take device
        addresses need."""

    @abstractmethod
    def bind(self) -> None:
        """Make the device the thread's current one."""

    @abstractmethod
    def flat(self, buffer: Buffer) -> DeviceFlat:
        """The memory of an array of the call."""

    @abstractmethod
    def empty(self, count: int, dtype: np.dtype[Any]) -> DeviceFlat:
        """Uninitialised memory for ``count`` elements; it returns to the pool with its last
        reference."""

    @abstractmethod
    def copy(self, pairs: Sequence[tuple[DeviceFlat, DeviceFlat]]) -> None:
        """Copy each source to its target, which has the same size; the copies are complete on
        return.

        Raises:
            OperationTimeoutError: the copies were not complete by the call's deadline.
        """


@dataclass(slots=True, eq=False, repr=False)
class DeviceFlat:
    """A contiguous 1-D array in device memory.

    Attributes:
        memory: the device memory of the call that uses it.
        ptr: address of the first element.
        size: number of elements.
        dtype: their NumPy type; for types that NumPy lacks, an unsigned integer of the same width.
        owner: keeps the memory alive while this object is referenced (by an MPI request, for
            example).
    """

    memory: DeviceMemory
    ptr: int
    size: int
    dtype: np.dtype[Any]
    owner: Any

    @property
    def itemsize(self) -> int:
        """Bytes per element."""
        return self.dtype.itemsize

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return self.size * self.dtype.itemsize

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """The memory as bytes (version 3 of the interface; ``stream`` is None: no synchronisation
        needed)."""
        return {
            "shape": (self.nbytes,),
            "typestr": "|u1",
            "data": (self.ptr, False),
            "strides": None,
            "version": 3,
            "stream": None,
        }

    def __getitem__(self, key: slice) -> DeviceFlat:
        start, stop, step = key.indices(self.size)
        if step != 1:
            raise DistArgumentError("slices of device memory must have step 1")
        size = max(0, stop - start)
        return DeviceFlat(
            self.memory, self.ptr + start * self.itemsize, size, self.dtype, self.owner
        )

    def view(self, dtype: Any) -> DeviceFlat:
        """The same bytes as elements of another dtype."""
        kind = np.dtype(dtype)
        return DeviceFlat(self.memory, self.ptr, self.nbytes // kind.itemsize, kind, self.owner)

    def overlaps(self, other: DeviceFlat) -> bool:
        """True if the two have bytes in common."""
        disjoint = self.ptr + self.nbytes <= other.ptr or other.ptr + other.nbytes <= self.ptr
        return not disjoint and self.nbytes > 0 and other.nbytes > 0

    def __repr__(self) -> str:
        return f"<DeviceFlat {self.dtype}[{self.size}] at {self.ptr:#x}>"
