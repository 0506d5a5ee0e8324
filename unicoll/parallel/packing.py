"""Several arrays packed into one for communication: names, buckets, and the copies."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from unicoll.arrays.families import kind_of, of_known_library
from unicoll.errors import (
    BackendUnavailableError,
    DistArgumentError,
    DistTypeError,
)

Arrays = Sequence[Any] | Mapping[str, Any]
"""Arrays in the same order on every rank; the keys of a mapping are used as names in messages."""


_SMALL_BUCKET = 1 << 16
"""Bytes up to which symmetric memory is of no use."""


def named(arrays: Arrays) -> tuple[list[str], list[Any]]:
    """Names and arrays, in order, with :func:`of_known_library`; those of a sequence are called
    ``#0``, ``#1``...

    Raises:
        DistTypeError, DistArgumentError: as that function, with the name.
    """
    if isinstance(arrays, Mapping):
        names, given = list(arrays), list(arrays.values())
    else:
        names, given = [f"#{i}" for i in range(len(arrays))], list(arrays)
    found = []
    for name, array in zip(names, given, strict=True):
        try:
            found.append(of_known_library(array))
        except DistArgumentError as e:
            raise type(e)(f"{name}: {e}") from None
    return names, found


def listed(names: Sequence[str]) -> str:
    """``parameters a, b and 3 more``, for messages; the first eight."""
    most = 8
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ("parameter " if len(names) == 1 else "parameters ") + ", ".join(names[:most]) + more


def bucket_like(group: Any, array: Any, count: int) -> Any:
    """:meth:`Family.empty_like` in symmetric memory of the group where that is of use; all members
    call it.

    On a CPU the ranks then average without copies.
    """
    kind = kind_of(array)
    nbytes = count * kind.element_type.itemsize
    if not kind.on_host or nbytes <= _SMALL_BUCKET:
        return kind.family.empty_like(array, count)
    try:
        memory = group.symmetric_empty(nbytes, "uint8", device="cpu")
    except BackendUnavailableError:
        # All members get this error or none does, so their buckets are of one kind.
        return kind.family.empty_like(array, count)
    return kind.family.of_bytes(memory, kind.dtype)


def plan_buckets(
    kinds: Sequence[Hashable], sizes: Sequence[int], order: Iterable[int], first_cap: int, cap: int
) -> list[list[int]]:
    """Group arrays into buckets.

    Args:
        kinds: per array, its kind; the arrays of a bucket have the same kind.
        sizes: bytes per array.
        order: the arrays' indices, in the order in which they fill the buckets.
        first_cap: maximum bytes of the first bucket of a kind.
        cap: maximum bytes of each further bucket. A larger array has its own bucket.

    Returns:
        The buckets, each a list of indices, in the order in which they are complete if arrays
        arrive in ``order``.
    """
    filling: dict[Hashable, tuple[list[int], int]] = {}
    limits: dict[Hashable, int] = {}
    full: list[list[int]] = []
    position: dict[int, int] = {}
    for index in order:
        position[index] = len(position)
        kind = kinds[index]
        members, used = filling.get(kind, ([], 0))
        if members and used + sizes[index] > limits.setdefault(kind, first_cap):
            full.append(members)
            limits[kind] = cap
            members, used = [], 0
        members.append(index)
        filling[kind] = (members, used + sizes[index])
    full += [members for members, _ in filling.values()]
    return sorted(full, key=lambda members: position[members[-1]])


def parts(flat: Any, shapes: Iterable[Sequence[int]]) -> list[Any]:
    """Consecutive parts of a flat array, as views with these shapes."""
    found, start = [], 0
    for shape in shapes:
        end = start + math.prod(shape)
        found.append(flat[start:end].reshape(shape))
        start = end
    return found


class Packer:
    """Arrays of one kind and a flat array for their communication; a single contiguous array is
    used without a copy."""

    def __init__(self, arrays: Sequence[Any]) -> None:
        family, _, _ = kind = kind_of(arrays[0])
        arrays = [family.without_history(array) for array in arrays]
        first = arrays[0]
        # The pairs are arrays, and their parts of the flat array.
        self._copied: list[tuple[Any, Any]] = []
        if len(arrays) == 1 and family.is_contiguous(first):
            self.flat = first.reshape(-1)
        else:
            shapes = [array.shape for array in arrays]
            self.flat = family.empty_like(first, sum(map(math.prod, shapes)))
            dtype = kind.element_type
            self._copied = [
                (family.copyable(array, dtype), family.copyable(part, dtype))
                for array, part in zip(arrays, parts(self.flat, shapes), strict=True)
            ]

    def pack(self) -> None:
        for array, part in self._copied:
            part[...] = array

    def unpack(self) -> None:
        for array, part in self._copied:
            array[...] = part


def check_writable(name: str, array: Any) -> None:
    """Raise DistArgumentError for a read-only array, DistTypeError if it is not an array of a
    supported dtype."""
    try:
        kind = kind_of(array)
        _ = kind.element_type
    except DistTypeError as e:
        raise DistTypeError(f"{name}: {e}") from None
    if isinstance(array, np.generic):
        raise DistTypeError(
            f"{name} is a NumPy scalar, not an array; results cannot be written to it"
        )
    if kind.family.is_read_only(array):
        raise DistArgumentError(f"{name} is read-only; results cannot be written to it")
