"""What the algorithms take from a call: its arrays in one dimension, their blocks, and the kernel of its reduction."""

from __future__ import annotations

from collections.abc import Sequence

from unicoll.arrays.conversion import Buffer
from unicoll.arrays.kernels import Flat, Kernel, kernel_for
from unicoll.arrays.types import DType
from unicoll.backend import Call

__all__ = ["blocks_of", "bounds_of", "flat_of", "kernel_of", "split_blocks"]


def flat_of(buffer: Buffer) -> Flat:
    """The memory of a buffer as a 1-D array."""
    assert buffer.flat is not None
    return buffer.flat


def kernel_of(call: Call) -> Kernel:
    """The reduction kernel of a call."""
    dtype: DType | None = call.dtype
    assert dtype is not None
    assert call.reduce is not None
    return kernel_for(dtype, call.reduce)


def bounds_of(count: int, parts: int) -> list[int]:
    """The bounds of ``parts`` nearly equal blocks of ``count`` elements: ``parts + 1`` offsets."""
    return [count * i // parts for i in range(parts + 1)]


def blocks_of(buffers: Sequence[Buffer], single: bool, ranks: int) -> list[Flat]:
    """One block per rank: a list of arrays, or with ``single`` the equal parts of one array."""
    if not single:
        return [flat_of(b) for b in buffers]
    flat = flat_of(buffers[0])
    count = flat.size // ranks
    return [flat[i * count : (i + 1) * count] for i in range(ranks)]


def split_blocks(buffers: Sequence[Buffer], counts: Sequence[int], single: bool) -> list[Flat]:
    """One block per rank: a list of arrays, or with ``single`` the parts of one array with ``counts`` elements."""
    if not single:
        return [flat_of(b) for b in buffers]
    flat = flat_of(buffers[0])
    blocks, start = [], 0
    for count in counts:
        blocks.append(flat[start : start + count])
        start += count
    return blocks
