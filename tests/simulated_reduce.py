"""What a collective of NCCL gives each rank, from the bytes that all ranks give, with NCCL's arithmetic along its ring.

It is that of NCCL's reduce_kernel.h, all_reduce.h and onerank.cu (src/device) and enqueue.cc (hostToDevRedOp), 2.18 to
2.30:

* float16, bfloat16 and float8 are rounded after every operation; float8 is computed in float16, and what is too large
  for it or infinite becomes its largest number.
* MIN and MAX of floating-point numbers give the number where the other operand is a NaN.
* An average of floating-point numbers is a sum of elements multiplied by 1/n, both rounded to the element type; one of
  integers is divided towards zero at the end.
* The ranks are added up one after another: where the result is to be on rank r, from rank r + 1 round to r. An
  all_reduce is cut into a chunk for each rank.
* A rank alone copies, or multiplies by the factor of a pre-multiplied sum.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from nccl_comm import api
from unicoll.kernels import Quiet
from unicoll.options import CallOptions
from unicoll.types import BY_NAME

__all__ = ["NAMES", "REDUCING", "Numbers", "Signature", "element", "results"]

NAMES = {code: name for name, code in api.DATA_TYPES.items()}
REDUCING = ("all_reduce", "reduce", "reduce_scatter")
PREMUL_SUM = -1
_PACK = 16
"""Bytes of which a chunk is a multiple."""
_LARGEST = {"float8_e4m3fn": 448.0, "float8_e5m2": 57344.0}
_quiet = Quiet()
Flat = Any
Given = tuple[bytes, bytes | None]
"""A rank's elements, and its factor for a pre-multiplied sum."""


@dataclass(frozen=True)
class Signature:
    """A collective, as far as all ranks must agree on it.

    Attributes:
        kind: name of the operation.
        count: as in the call.
        dtype: ncclDataType_t.
        op: ncclRedOp_t; -1 for a pre-multiplied sum, 0 where nothing is reduced.
        root: 0 where there is none.
        options: of this call, or None.
    """

    kind: str
    count: int
    dtype: int
    op: int = 0
    root: int = 0
    options: CallOptions | None = None

    def __str__(self) -> str:
        what = f"{self.kind}({self.count} {NAMES[self.dtype]}"
        told = f", {self.options}" if self.options is not None else ""
        return what + (f", op {self.op}" if self.kind in REDUCING else "") + f", root {self.root}{told})"


def element(dtype: int) -> np.dtype[Any]:
    """The NumPy type of elements: for types that NumPy lacks, of their bits."""
    storage: np.dtype[Any] = BY_NAME[NAMES[dtype]].storage
    return storage


def results(signature: Signature, given: Sequence[Given]) -> list[bytes]:
    """What each rank receives; nothing where it receives nothing."""
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
        total = _quiet(_summed_up, signature, given, root, 0, size)
        return [total if r == root else b"" for r in ranks]
    if kind == "reduce_scatter":
        return [_quiet(_summed_up, signature, given, r, r * size, (r + 1) * size) for r in ranks]
    assert kind == "all_reduce", kind
    parts = [
        _quiet(_summed_up, signature, given, r, start, stop) for r, start, stop in _chunks(size, len(given))
    ]
    whole = b"".join(parts)
    return [whole for _ in ranks]


def _chunks(size: int, ranks: int) -> Iterator[tuple[int, int, int]]:
    """The bytes of an all_reduce that each rank is the last to add to: rank, start and stop."""
    each = -(-size // ranks // _PACK) * _PACK
    for rank in range(ranks):
        start = min(rank * each, size)
        yield rank, start, size if rank == ranks - 1 else min(start + each, size)


def _summed_up(signature: Signature, given: Sequence[Given], last: int, start: int, stop: int) -> bytes:
    """Bytes ``start`` to ``stop`` of the reduction, whose last rank is ``last``."""
    ranks, op = len(given), signature.op
    if ranks == 1 and op != PREMUL_SUM:
        return given[0][0][start:stop]
    numbers = Numbers(NAMES[signature.dtype])
    total = None
    for step in range(1, ranks + 1):
        data, factor = given[(last + step) % ranks]
        term = numbers.take(data[start:stop])
        if op == PREMUL_SUM:
            assert factor is not None
            term = numbers.rounded(term * numbers.take(factor))
        elif op == api.AVG and not numbers.integer:
            term = numbers.rounded(term * numbers.rounded(np.full(1, 1 / ranks, term.dtype)))
        total = term if total is None else numbers.rounded(numbers.function(op)(term, total))
    if op == api.AVG and numbers.integer:
        total = _divided(total, ranks)
    return numbers.give(total)


class Numbers:
    """An element type; elements of the short ones are handled as the float32 numbers that they are."""

    def __init__(self, name: str) -> None:
        dtype = BY_NAME[name]
        self._kind: np.dtype[Any] = dtype.storage
        self._short = dtype.half
        self._largest = _LARGEST.get(name)
        self.integer = dtype.kind in "ui"
        if not dtype.native:
            import ml_dtypes

            self._kind = np.dtype(getattr(ml_dtypes, name))

    def take(self, data: bytes) -> Flat:
        """Elements as numbers to compute with."""
        array = np.frombuffer(data, self._kind)
        return array.astype(np.float32) if self._short else array

    def give(self, numbers: Flat) -> bytes:
        """The bytes of numbers that are elements."""
        data: bytes = numbers.astype(self._kind).tobytes()
        return data

    def rounded(self, numbers: Flat) -> Flat:
        """The nearest elements."""
        if self._largest is not None:
            numbers = np.clip(numbers.astype(np.float16), -self._largest, self._largest)
        return numbers.astype(self._kind).astype(np.float32) if self._short else numbers

    def function(self, op: int) -> Any:
        """What puts two elements together."""
        if self.integer:
            extreme = {api.MAX: np.maximum, api.MIN: np.minimum}
        else:
            extreme = {api.MAX: np.fmax, api.MIN: np.fmin}
        return {api.PROD: np.multiply, **extreme}.get(op, np.add)


def _divided(total: Flat, ranks: int) -> Flat:
    """Integers divided by a number of ranks, towards zero."""
    negative = total < 0
    magnitude = np.where(negative, -total, total).view(f"u{total.itemsize}")
    quotient = (magnitude // ranks).astype(total.dtype)
    return np.where(negative, -quotient, quotient)
