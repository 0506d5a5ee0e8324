"""Conversion and checks of users' arguments: lists of arrays, pairs, ranks, split sizes."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from typing import Any

from unicoll.arrays.conversion import Buffer, as_buffers
from unicoll.errors import DistArgumentError, DistTypeError

DEFAULT_NAME = "world"
"""Name of the default group of a job without a name."""


def as_integer(what: str, value: Any) -> int:
    """An integer of any type as an int; ``what`` is operation and argument, for the DistTypeError
    for others."""
    try:
        return operator.index(value)
    except TypeError:
        op = what.partition(":")[0]
        raise DistTypeError(f"{what} must be an integer, got {value!r}", op=op) from None


def buffers_of(what: str, arrays: Sequence[Any]) -> tuple[Buffer, ...]:
    """A list of arrays as buffers; ``what`` is operation and argument, for errors."""
    # The types are a tuple, because a union of them would be made anew in every call.
    if not isinstance(arrays, (list, tuple)):
        raise DistTypeError(
            f"{what}: expected a list of arrays, got {type(arrays).__name__}",
            op=what.partition(":")[0],
        )
    return as_buffers(arrays, what)


def same_length(name: str, first: Sequence[Any], second: Sequence[Any]) -> None:
    """Refuse lists of different lengths."""
    if len(first) != len(second):
        raise DistArgumentError(f"{name}: {len(first)} given for {len(second)} inputs")


def check_ranks(what: str, ranks: Iterable[int], size: int) -> list[int]:
    """A list of ranks; refused if it is empty, has duplicates, or one that is not in a group of
    ``size``."""
    if not isinstance(ranks, Iterable):
        raise DistTypeError(f"{what}: ranks: expected a list of ranks, got {ranks!r}")
    found = [as_integer(f"{what}: a rank", rank) for rank in ranks]
    if not found:
        raise DistArgumentError(f"{what}: ranks is empty")
    if len(set(found)) != len(found):
        raise DistArgumentError(f"{what}: ranks {found} has duplicates")
    for rank in found:
        if not 0 <= rank < size:
            raise DistArgumentError(f"{what}: {rank} is not a rank of a world of {size}")
    return found


def pairs_of(
    name: str, outputs: Sequence[Any], inputs: Sequence[Any]
) -> list[tuple[tuple[Buffer, ...], tuple[Buffer, ...]]]:
    """The inputs and outputs of each call of a batch, from lists of outputs and inputs of equal
    length."""
    same_length(f"{name}: outputs", outputs, inputs)
    results, sources = (
        buffers_of(f"{name}: outputs", outputs),
        buffers_of(f"{name}: inputs", inputs),
    )
    return [((i,), (o,)) for o, i in zip(results, sources, strict=True)]


def splits_of(name: str, sizes: Sequence[int] | None) -> tuple[int, ...] | None:
    """Split sizes as a tuple; None, and an empty list as torch has it, mean even parts."""
    if sizes is None or len(sizes) == 0:
        return None
    try:
        return tuple(operator.index(s) for s in sizes)
    except TypeError:
        raise DistTypeError(f"{name}: expected a list of integers, got {sizes!r}") from None
