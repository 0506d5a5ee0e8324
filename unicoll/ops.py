"""The table: one row per operation. Validation, signatures, consistency checks, docs and tests read it.

A row says how many arrays go in and come out, on which ranks, how their sizes are related, whether there is a root
and whether elements are reduced. :mod:`unicoll.checks` works from the rows.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from .errors import DistTypeError
from .types import DTYPES, DType, ReduceOp, Reduction

__all__ = ["OPS", "Arity", "Op", "Sizes", "as_reduce_op", "check_reduction", "supported_reductions"]


class Arity(Enum):
    """How many arrays, and where."""

    NONE = "none"
    ONE = "one"
    ONE_AT_ROOT = "one, at the root"
    ONE_OFF_ROOT = "one, on ranks that are not the root"
    PER_RANK = "one per rank"
    PER_RANK_AT_ROOT = "one per rank, at the root"


class Sizes(Enum):
    """How the element counts of inputs and outputs are related."""

    NONE = "no data"
    SAME = "outputs are as large as inputs"
    GATHERED = "output i is as large as rank i's input"
    GATHERED_FLAT = "the output is world size times the input"
    SCATTERED = "the output is as large as input i on rank i"
    SCATTERED_FLAT = "the input is world size times the output"
    EXCHANGED = "output i on rank j is as large as input j on rank i"


@dataclass(frozen=True, slots=True, eq=False)
class Op:
    """One row.

    Attributes:
        name: public name.
        code: number in signatures; never reused.
        inputs, outputs: how many arrays on which ranks.
        sizes: relation of their element counts.
        reduces: whether a ReduceOp applies.
        rooted: whether one rank is special (src or dst).
        uneven: whether per-rank arrays may differ in size.
        mpi: the MPI standard's counterpart.
        scattered: whether the shape that ranks agree on is the output's.
        told_by_root: whether the root alone knows all sizes, and each other rank its own.
    """

    name: str
    code: int
    inputs: Arity
    outputs: Arity
    sizes: Sizes
    reduces: bool = False
    rooted: bool = False
    uneven: bool = False
    mpi: str = ""
    scattered: bool = field(init=False)
    told_by_root: bool = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "scattered", self.sizes in (Sizes.SCATTERED, Sizes.SCATTERED_FLAT))
        object.__setattr__(self, "told_by_root", self.rooted and self.uneven)


_ROWS = (
    Op("barrier", 1, Arity.NONE, Arity.NONE, Sizes.NONE, mpi="MPI_Barrier"),
    Op("broadcast", 2, Arity.ONE, Arity.ONE_OFF_ROOT, Sizes.SAME, rooted=True, mpi="MPI_Bcast"),
    Op("all_reduce", 3, Arity.ONE, Arity.ONE, Sizes.SAME, reduces=True, mpi="MPI_Allreduce"),
    Op("reduce", 4, Arity.ONE, Arity.ONE_AT_ROOT, Sizes.SAME, reduces=True, rooted=True, mpi="MPI_Reduce"),
    Op("all_gather", 5, Arity.ONE, Arity.PER_RANK, Sizes.GATHERED, uneven=True, mpi="MPI_Allgatherv"),
    Op("all_gather_into_tensor", 6, Arity.ONE, Arity.ONE, Sizes.GATHERED_FLAT, mpi="MPI_Allgather"),
    Op(
        "gather", 7, Arity.ONE, Arity.PER_RANK_AT_ROOT, Sizes.GATHERED, rooted=True, uneven=True,
        mpi="MPI_Gatherv",
    ),
    Op(
        "scatter", 8, Arity.PER_RANK_AT_ROOT, Arity.ONE, Sizes.SCATTERED, rooted=True, uneven=True,
        mpi="MPI_Scatterv",
    ),
    Op(
        "reduce_scatter", 9, Arity.PER_RANK, Arity.ONE, Sizes.SCATTERED, reduces=True, uneven=True,
        mpi="MPI_Reduce_scatter",
    ),
    Op(
        "reduce_scatter_tensor", 10, Arity.ONE, Arity.ONE, Sizes.SCATTERED_FLAT, reduces=True,
        mpi="MPI_Reduce_scatter_block",
    ),
    Op("all_to_all", 11, Arity.PER_RANK, Arity.PER_RANK, Sizes.EXCHANGED, uneven=True, mpi="MPI_Alltoallw"),
    Op("all_to_all_single", 12, Arity.ONE, Arity.ONE, Sizes.EXCHANGED, uneven=True, mpi="MPI_Alltoallv"),
    Op("send", 20, Arity.ONE, Arity.NONE, Sizes.NONE, mpi="MPI_Send"),
    Op("recv", 21, Arity.NONE, Arity.ONE, Sizes.NONE, mpi="MPI_Recv"),
)  # fmt: skip
OPS: dict[str, Op] = {row.name: row for row in _ROWS}


# --- which reductions exist for which element types -----------------------------------------------------------------


def _reduces(dtype: DType, op: Reduction) -> bool:
    if op.name in ("BAND", "BOR", "BXOR"):
        return dtype.kind in "bui"
    if op.name in ("MIN", "MAX"):
        return dtype.kind != "c"
    if op.name in ("AVG", "PREMUL_SUM"):
        return dtype.kind != "b"
    return True


_ALL_OPS = (
    ReduceOp.SUM, ReduceOp.AVG, ReduceOp.PRODUCT, ReduceOp.MIN, ReduceOp.MAX,
    ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR, ReduceOp.PREMUL_SUM(1),
)  # fmt: skip
_ALLOWED = frozenset((d.code << 8) | op.code for d in DTYPES for op in _ALL_OPS if _reduces(d, op))


def supported_reductions() -> dict[str, tuple[str, ...]]:
    """The dtype x operation table: for each element type the names of the reductions it takes."""
    return {d.name: tuple(op.name for op in _ALL_OPS if _reduces(d, op)) for d in DTYPES}


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
        raise DistTypeError(f"op: expected a ReduceOp, got {op!r}")
    return found


def check_reduction(op: Op, dtype: DType, reduce: Reduction) -> None:
    """Refuse a reduction that the element type does not have."""
    if (dtype.code << 8) | reduce.code not in _ALLOWED:
        raise DistTypeError(
            f"{op.name}: ReduceOp.{reduce.name} is not defined for {dtype.name}"
            f" (it takes {', '.join(supported_reductions()[dtype.name])})",
            op=op.name,
        )
    factor = reduce.factor
    if factor is not None and dtype.kind in "ui" and factor != int(factor.real):
        raise DistTypeError(
            f"{op.name}: PREMUL_SUM of {dtype.name} needs an integer factor, got {factor}", op=op.name
        )
    if factor is not None and dtype.kind == "f" and isinstance(factor, complex):
        raise DistTypeError(
            f"{op.name}: PREMUL_SUM of {dtype.name} needs a real factor, got {factor}", op=op.name
        )
