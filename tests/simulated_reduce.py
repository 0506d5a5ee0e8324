"""What a collective of NCCL gives each rank, from the bytes that all ranks give: NumPy, in rank order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from nccl_comm import api
from unicoll.kernels import Quiet, kernel_for
from unicoll.options import CallOptions
from unicoll.types import BY_NAME, ReduceOp

__all__ = ["NAMES", "REDUCING", "Signature", "element", "results"]

NAMES = {code: name for name, code in api.DATA_TYPES.items()}
REDUCING = ("all_reduce", "reduce", "reduce_scatter")
PREMUL_SUM = -1
_OPS = {
    api.SUM: ReduceOp.SUM, api.PROD: ReduceOp.PRODUCT, api.MAX: ReduceOp.MAX, api.MIN: ReduceOp.MIN,
    api.AVG: ReduceOp.AVG,
}  # fmt: skip
_quiet = Quiet()
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
    total = _reduced(signature, given)
    if kind == "reduce":
        return [total if r == root else b"" for r in ranks]
    if kind == "reduce_scatter":
        return [total[r * size : (r + 1) * size] for r in ranks]
    assert kind == "all_reduce", kind
    return [total for _ in ranks]


def _reduced(signature: Signature, given: Sequence[Given]) -> bytes:
    arrays = [np.frombuffer(data, element(signature.dtype)) for data, _ in given]
    total: bytes = _quiet(_fold, signature, arrays, [factor for _, factor in given]).tobytes()
    return total


def _fold(signature: Signature, arrays: list[Any], factors: list[bytes | None]) -> Any:
    dtype = BY_NAME[NAMES[signature.dtype]]
    if dtype.name.startswith("float8"):
        return _fold_float8(dtype.name, signature.op, arrays, factors)
    out = np.empty_like(arrays[0])
    if signature.op != PREMUL_SUM:
        kernel_for(dtype, _OPS[signature.op]).combine(arrays, out, True)
        return out
    acc = None
    for array, factor in zip(arrays, factors, strict=True):
        assert factor is not None
        kernel = kernel_for(dtype, ReduceOp.PREMUL_SUM(_number(dtype.name, factor)))
        if acc is None:
            acc = np.empty(array.size, kernel.acc)
            kernel.begin(acc, array)
        else:
            kernel.fold(acc, array)
    assert acc is not None
    kernel.finish(acc, out, len(arrays))
    return out


def _number(name: str, factor: bytes) -> Any:
    dtype = BY_NAME[name]
    if dtype.native:
        return np.frombuffer(factor, dtype.storage)[0].item()
    import ml_dtypes

    return float(np.frombuffer(factor, getattr(ml_dtypes, name))[0])


def _fold_float8(name: str, op: int, arrays: list[Any], factors: list[bytes | None]) -> Any:
    """In float32, with one rounding at the end."""
    import ml_dtypes

    kind = getattr(ml_dtypes, name)
    wide = [a.view(kind).astype(np.float32) for a in arrays]
    if op == PREMUL_SUM:
        wide = [w * np.float32(_number(name, f or b"")) for w, f in zip(wide, factors, strict=True)]
    ufunc: Any = {api.PROD: np.multiply, api.MAX: np.maximum, api.MIN: np.minimum}.get(op, np.add)
    total = wide[0]
    for other in wide[1:]:
        total = ufunc(total, other)
    if op == api.AVG:
        total = total / np.float32(len(wide))
    return total.astype(kind).view(np.uint8)
