"""The reductions that exist for each element type, and the conversion of users' values to
:class:`Reduction`."""

from __future__ import annotations

from typing import Any

from unicoll.arrays.types import DTYPES, EXACT, DType, ReduceOp, Reduction
from unicoll.calls.ops import Op
from unicoll.errors import DistTypeError


def _reduces(dtype: DType, op: Reduction) -> bool:
    if dtype.kind == "x":
        return False
    if op.name in ("BAND", "BOR", "BXOR"):
        return dtype.kind in "bui"
    if op.name in ("MIN", "MAX"):
        return dtype.kind != "c"
    if op.name in ("AVG", "PREMUL_SUM"):
        return dtype.kind != "b"
    if op in EXACT.values():
        return dtype.kind in "fc" and dtype.itemsize > 1
    return True


_ALL_OPS = (
    ReduceOp.SUM,
    ReduceOp.AVG,
    ReduceOp.PRODUCT,
    ReduceOp.MIN,
    ReduceOp.MAX,
    ReduceOp.BAND,
    ReduceOp.BOR,
    ReduceOp.BXOR,
    ReduceOp.PREMUL_SUM(1),
    ReduceOp.EXACT_SUM,
    ReduceOp.EXACT_AVG,
)
_ALLOWED = frozenset((d.code << 8) | op.code for d in DTYPES for op in _ALL_OPS if _reduces(d, op))


def supported_reductions() -> dict[str, tuple[str, ...]]:
    """The dtype x operation table: for each element type the names of the reductions it takes."""
    return {d.name: tuple(op.name for op in _ALL_OPS if _reduces(d, op)) for d in DTYPES}


def only_on_host(dtype: DType, op: Reduction) -> bool:
    """True for a reduction that no library of a device computes as unicoll does: exact sums,
    averages of integers."""
    return op in EXACT.values() or (op == ReduceOp.AVG and dtype.kind in "ui")


def as_reduce_op(op: Any) -> Reduction:
    """Our operation for ``op``: ours, ``ReduceOp`` members of torch.distributed, or a name.

    Raises:
        DistTypeError: it is none of these.
    """
    if isinstance(op, Reduction):
        return op
    if callable(op) and op is ReduceOp.PREMUL_SUM:
        raise DistTypeError("op: PREMUL_SUM needs its factor: ReduceOp.PREMUL_SUM(0.5)")
    name = op if isinstance(op, str) else getattr(op, "name", None)
    found = getattr(ReduceOp, str(name).upper(), None)
    if not isinstance(found, Reduction):
        names = ", ".join(one.name for one in _ALL_OPS)
        raise DistTypeError(f"op: expected a ReduceOp or the name of one ({names}), got {op!r}")
    return found


def is_defined(op: Op, dtype: DType, reduce: Reduction) -> bool:
    """True if an operation and an element type have a reduction."""
    return reduce.name not in op.refuses and (dtype.code << 8) | reduce.code in _ALLOWED


def check_reduction(op: Op, dtype: DType, reduce: Reduction) -> None:
    """Refuse a reduction that the operation or the element type does not have."""
    if reduce.name in op.refuses:
        raise DistTypeError(
            f"{op.name}: ReduceOp.{reduce.name} is not defined for it ({dtype.name})", op=op.name
        )
    if (dtype.code << 8) | reduce.code not in _ALLOWED:
        taken = supported_reductions().get(dtype.name)
        instead = f"it takes {', '.join(taken)}" if taken else "it is moved, and not reduced"
        raise DistTypeError(
            f"{op.name}: ReduceOp.{reduce.name} is not defined for {dtype.name} ({instead})",
            op=op.name,
        )
    factor = reduce.factor
    if factor is not None and dtype.kind in "ui" and factor != int(factor.real):
        raise DistTypeError(
            f"{op.name}: PREMUL_SUM of {dtype.name} needs an integer factor, got {factor}",
            op=op.name,
        )
    if factor is not None and dtype.kind == "f" and isinstance(factor, complex):
        raise DistTypeError(
            f"{op.name}: PREMUL_SUM of {dtype.name} needs a real factor, got {factor}", op=op.name
        )
