"""From what users pass to what a call is made of: lists of arrays, pairs, split sizes, and the place of the call."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from .buffers import Buffer, as_buffer
from .errors import DistArgumentError, DistTypeError

__all__ = ["buffers_of", "call_site", "check_ranks", "pairs_of", "same_length", "splits_of"]


def buffers_of(what: str, arrays: Sequence[Any]) -> tuple[Buffer, ...]:
    """A list of arrays as buffers; ``what`` is operation and argument, for errors."""
    if not isinstance(arrays, list | tuple):
        raise DistTypeError(
            f"{what}: expected a list of arrays, got {type(arrays).__name__}", op=what.partition(":")[0]
        )
    return tuple([as_buffer(a, what) for a in arrays])


def same_length(name: str, first: Sequence[Any], second: Sequence[Any]) -> None:
    """Refuse lists of different lengths."""
    if len(first) != len(second):
        raise DistArgumentError(f"{name}: {len(first)} given for {len(second)} inputs")


def check_ranks(what: str, ranks: Sequence[int], size: int) -> None:
    """Refuse a list of ranks that is empty, has duplicates, or one that is not in a group of ``size``."""
    if len(ranks) == 0:
        raise DistArgumentError(f"{what}: ranks is empty")
    if len(set(ranks)) != len(ranks):
        raise DistArgumentError(f"{what}: ranks {list(ranks)} has duplicates")
    for rank in ranks:
        if not isinstance(rank, int) or not 0 <= rank < size:
            raise DistArgumentError(f"{what}: {rank!r} is not a rank of a world of {size}")


def pairs_of(
    name: str, outputs: Sequence[Any], inputs: Sequence[Any]
) -> list[tuple[tuple[Buffer, ...], tuple[Buffer, ...]]]:
    """For each output and its input, what goes in and what comes out of one call of a batch."""
    same_length(f"{name}: outputs", outputs, inputs)
    results, sources = buffers_of(f"{name}: outputs", outputs), buffers_of(f"{name}: inputs", inputs)
    return [((i,), (o,)) for o, i in zip(results, sources, strict=True)]


def splits_of(name: str, sizes: Sequence[int] | None) -> tuple[int, ...] | None:
    """Split sizes as a tuple; None, and an empty list as torch has it, mean even parts."""
    if sizes is None or len(sizes) == 0:
        return None
    try:
        return tuple(int(s) for s in sizes)
    except (TypeError, ValueError):
        raise DistTypeError(f"{name}: expected a list of integers, got {sizes!r}") from None


def call_site() -> str:
    """``file:line`` of the first caller outside the library, and outside torch's, which may stand between."""
    frame = sys._getframe(2)
    while frame is not None and frame.f_globals.get("__name__", "").startswith(("unicoll", "torch.")):
        if frame.f_back is None:
            break
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"
