"""The results of NCCL's collectives, with NCCL's arithmetic along its ring.

The arithmetic is that of NCCL's reduce_kernel.h, all_reduce.h and onerank.cu (src/device) and enqueue.cc
(hostToDevRedOp), 2.18 to 2.30:

* float16, bfloat16 and float8 are rounded after every operation; float8 is computed in float16, and numbers that are
  too large for float8 or infinite become its largest number.
* MIN and MAX of floating-point numbers return the number if the other operand is a NaN.
* An average of floating-point numbers is a sum of elements multiplied by 1/n, both rounded to the element type; one of
  integers is divided towards zero at the end.
* The ranks' elements are added in order: for a result on rank r, from rank r + 1 around the ring to r. An all_reduce is
  divided into a chunk for each rank.
* With one rank the elements are copied, or multiplied by the factor of a pre-multiplied sum.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from unicoll.arrays.types import BY_NAME
from unicoll.calls.options import CallOptions
from unicoll.device_collectives import interface

__all__ = ["NAMES", "REDUCING", "Numbers", "Signature", "element", "results"]

NAMES = {code: name for name, code in interface.DATA_TYPES.items()}
REDUCING = ("all_reduce", "reduce", "reduce_scatter")
PREMUL_SUM = -1
_PACK = 16
"""Bytes; the size of a chunk is a multiple."""
_LARGEST = {"float8_e4m3fn": 448.0, "float8_e5m2": 57344.0}
Flat = Any
Contribution = tuple[bytes, bytes | None]
"""A rank's elements, and its factor for a pre-multiplied sum."""


@dataclass(frozen=True)
class Signature:
    """The part of a collective's arguments that must be equal on all ranks.

    Attributes:
        kind: name of the operation.
        count: as in the call.
        dtype: ncclDataType_t.
        op: ncclRedOp_t; -1 for a pre-multiplied sum, 0 without a reduction.
        root: 0 without a root.
        options: of the call, or None.
    """

    kind: str
    count: int
    dtype: int
    op: int = 0
    root: int = 0
    options: CallOptions | None = None

    def __str__(self) -> str:
        what = f"{self.kind}({self.count} {NAMES[self.dtype]}"
        options = f", {self.options}" if self.options is not None else ""
        return what + (f", op {self.op}" if self.kind in REDUCING else "") + f", root {self.root}{options})"


def element(dtype: int) -> np.dtype[Any]:
    """The NumPy type of elements, or for types that NumPy lacks an unsigned integer type of their size."""
    storage: np.dtype[Any] = BY_NAME[NAMES[dtype]].storage
    return storage


def results(signature: Signature, given: Sequence[Contribution]) -> list[bytes]:
    """The bytes that each rank receives."""
    ranks, size = range(len(given)), signature.count * element(signature.dtype).itemsize
    sent = [g[0] for g in given]
    kind, root = signature.kind, signature.root
    if kind == "broadcast":
        return [sent[root] for _ in ranks]
    if kind == "all_gather":
        whole = b"".join(sent)
        return [whole for _ in ranks]
    if kind == "all_to_all":
        return [b"".join(s[r * size : (r + 1) * size] for s in sent) for r in ranks]
    if kind == "reduce":
        total = _reduced(signature, given, root, 0, size)
        return [total if r == root else b"" for r in ranks]
    if kind == "reduce_scatter":
        return [_reduced(signature, given, r, r * size, (r + 1) * size) for r in ranks]
    assert kind == "all_reduce", kind
    parts = [_reduced(signature, given, r, start, stop) for r, start, stop in _chunks(size, len(given))]
    whole = b"".join(parts)
    return [whole for _ in ranks]


def _chunks(size: int, ranks: int) -> Iterator[tuple[int, int, int]]:
    """The chunks of an all_reduce: the rank that adds its elements last, start and stop in bytes."""
    share = -(-size // ranks // _PACK) * _PACK
    for rank in range(ranks):
        start = min(rank * share, size)
        yield rank, start, size if rank == ranks - 1 else min(start + share, size)


def _reduced(signature: Signature, given: Sequence[Contribution], last: int, start: int, stop: int) -> bytes:
    """Bytes ``start`` to ``stop`` of the reduction, whose last rank is ``last``."""
    ranks, op = len(given), signature.op
    if ranks == 1 and op != PREMUL_SUM:
        return given[0][0][start:stop]
    numbers = Numbers(NAMES[signature.dtype])
    total = None
    with np.errstate(all="ignore"):  # overflow and NaN are results
        for step in range(1, ranks + 1):
            data, factor = given[(last + step) % ranks]
            term = numbers.from_bytes(data[start:stop])
            if op == PREMUL_SUM:
                assert factor is not None
                term = numbers.rounded(term * numbers.from_bytes(factor))
            elif op == interface.AVG and not numbers.integer:
                term = numbers.rounded(term * numbers.rounded(np.full(1, 1 / ranks, term.dtype)))
            total = term if total is None else numbers.rounded(numbers.function(op)(term, total))
        if op == interface.AVG and numbers.integer:
            total = _divided(total, ranks)
    return numbers.to_bytes(total)


class Numbers:
    """Arithmetic of an element type; 8 and 16-bit floats are converted to float32 without loss."""

    def __init__(self, name: str) -> None:
        dtype = BY_NAME[name]
        self._kind: np.dtype[Any] = dtype.storage
        self._short = dtype.half
        self._largest = _LARGEST.get(name)
        self.integer = dtype.kind in "ui"
        if not dtype.native:
            import ml_dtypes

            self._kind = np.dtype(getattr(ml_dtypes, name))

    def from_bytes(self, data: bytes) -> Flat:
        """Convert elements to numbers."""
        array = np.frombuffer(data, self._kind)
        return array.astype(np.float32) if self._short else array

    def to_bytes(self, numbers: Flat) -> bytes:
        """Convert numbers, which are elements, to bytes."""
        data: bytes = numbers.astype(self._kind).tobytes()
        return data

    def rounded(self, numbers: Flat) -> Flat:
        """Round to the nearest elements."""
        if self._largest is not None:
            numbers = np.clip(numbers.astype(np.float16), -self._largest, self._largest)
        return numbers.astype(self._kind).astype(np.float32) if self._short else numbers

    def function(self, op: int) -> Any:
        """The NumPy function that reduces two arrays of elements."""
        if self.integer:
            extreme = {interface.MAX: np.maximum, interface.MIN: np.minimum}
        else:
            extreme = {interface.MAX: np.fmax, interface.MIN: np.fmin}
        return {interface.PROD: np.multiply, **extreme}.get(op, np.add)


def _divided(total: Flat, ranks: int) -> Flat:
    """Divide integers by the number of ranks, towards zero."""
    negative = total < 0
    magnitude = np.where(negative, -total, total).view(f"u{total.itemsize}")
    quotient = (magnitude // ranks).astype(total.dtype)
    return np.where(negative, -quotient, quotient)
