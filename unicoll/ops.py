"""The table: one row per operation. Validation, signatures, consistency checks, docs and tests read it.

A row says how many arrays go in and come out, on which ranks, how their sizes are related, whether there is a root
and whether elements are reduced. :func:`check` refuses a bad call from the row alone, before a byte moves;
:func:`sign` condenses what all ranks must agree on into one number.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

from .buffers import Buffer
from .errors import DistArgumentError, DistTypeError
from .types import DTYPES, DType, ReduceOp, Reduction

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .backend import Call

__all__ = ["OPS", "Arity", "Op", "Sizes", "check", "check_reduction", "sign", "supported_reductions"]


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


_ROWS = (
    Op("barrier", 1, Arity.NONE, Arity.NONE, Sizes.NONE, mpi="MPI_Barrier"),
    Op("broadcast", 2, Arity.ONE, Arity.ONE_OFF_ROOT, Sizes.SAME, rooted=True, mpi="MPI_Bcast"),
    Op("all_reduce", 3, Arity.ONE, Arity.ONE, Sizes.SAME, reduces=True, mpi="MPI_Allreduce"),
    Op("reduce", 4, Arity.ONE, Arity.ONE_AT_ROOT, Sizes.SAME, reduces=True, rooted=True, mpi="MPI_Reduce"),
    Op("all_gather", 5, Arity.ONE, Arity.PER_RANK, Sizes.GATHERED, uneven=True, mpi="MPI_Allgatherv"),
    Op("all_gather_into_tensor", 6, Arity.ONE, Arity.ONE, Sizes.GATHERED_FLAT, mpi="MPI_Allgather"),
    Op("gather", 7, Arity.ONE, Arity.PER_RANK_AT_ROOT, Sizes.GATHERED, rooted=True, mpi="MPI_Gather"),
    Op("scatter", 8, Arity.PER_RANK_AT_ROOT, Arity.ONE, Sizes.SCATTERED, rooted=True, mpi="MPI_Scatter"),
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


# --- validation ----------------------------------------------------------------------------------------------------


def check(call: Call, rank: int, size: int) -> None:
    """Refuse a call that breaks its row's rules; ``rank`` and ``size`` are those of the group.

    Raises:
        DistArgumentError, DistTypeError: naming the operation and the argument.
    """
    op, inputs, outputs = call.op, call.inputs, call.outputs
    if op.rooted and not 0 <= call.root < size:
        raise DistArgumentError(f"{op.name}: root {call.root} is not a rank of a group of {size}", op=op.name)
    at_root = rank == call.root
    _check_arity(op, "input", op.inputs, inputs, at_root, size)
    _check_arity(op, "output", op.outputs, outputs, at_root, size)
    buffers = inputs if outputs is inputs else (*inputs, *outputs)
    if not buffers:
        return
    first = buffers[0]
    for buffer in buffers[1:]:
        if buffer.dtype is not first.dtype:
            raise DistTypeError(
                f"{op.name}: arrays of {first.dtype} and {buffer.dtype} in one call", op=op.name
            )
        if buffer.device != first.device:
            raise DistArgumentError(
                f"{op.name}: arrays on {first.device} and {buffer.device} in one call", op=op.name
            )
    for i, buffer in enumerate(outputs):
        if not buffer.writable:
            which = f"output {i}" if len(outputs) > 1 else "the output"
            raise DistArgumentError(f"{op.name}: {which} ({buffer}) is read-only", op=op.name)
    if call.reduce is not None:
        check_reduction(op, first.dtype, call.reduce)
    _check_sizes(call, rank, size)


def _check_arity(
    op: Op, side: str, arity: Arity, buffers: Sequence[Buffer], at_root: bool, size: int
) -> None:
    if arity is Arity.ONE:
        expected = 1
    elif arity is Arity.PER_RANK:
        expected = size
    elif arity is Arity.ONE_AT_ROOT:
        expected = 1 if at_root else 0
    elif arity is Arity.ONE_OFF_ROOT:
        expected = 0 if at_root else 1
    elif arity is Arity.PER_RANK_AT_ROOT:
        expected = size if at_root else 0
    else:
        expected = 0
    if len(buffers) != expected:
        where = (
            ""
            if "root" not in arity.value
            else " on the root"
            if at_root
            else " on ranks that are not the root"
        )
        raise DistArgumentError(
            f"{op.name}: {len(buffers)} {side} arrays given, {expected} expected{where} (group of {size})",
            op=op.name,
        )


def _check_sizes(call: Call, rank: int, size: int) -> None:
    op, inputs, outputs, sizes = call.op, call.inputs, call.outputs, call.op.sizes
    if sizes is Sizes.SAME:
        if outputs and outputs is not inputs and outputs[0].count != inputs[0].count:
            _size_error(op, f"output {outputs[0]} and input {inputs[0]} differ in size")
    elif sizes is Sizes.GATHERED:
        if outputs:
            _check_pieces(op, "output", outputs, inputs[0], rank)
    elif sizes is Sizes.SCATTERED:
        if inputs:
            _check_pieces(op, "input", inputs, outputs[0], rank)
    elif sizes is Sizes.GATHERED_FLAT:
        if outputs[0].count != size * inputs[0].count:
            _size_error(op, f"output {outputs[0]} must hold {size} times the elements of input {inputs[0]}")
    elif sizes is Sizes.SCATTERED_FLAT:
        if inputs[0].count != size * outputs[0].count:
            _size_error(op, f"input {inputs[0]} must hold {size} times the elements of output {outputs[0]}")
    elif sizes is Sizes.EXCHANGED:
        _check_exchange(call, rank, size)


def _check_pieces(op: Op, side: str, pieces: Sequence[Buffer], mine: Buffer, rank: int) -> None:
    """The pieces' sizes fit this rank's own array, and each other where the operation wants them even."""
    for i, piece in enumerate(pieces):
        if (i == rank or not op.uneven) and piece.count != mine.count:
            _size_error(
                op, f"{side} {i} is {piece}, this rank's own array is {mine}: they must be of one size"
            )


def _check_exchange(call: Call, rank: int, size: int) -> None:
    op, inputs, outputs = call.op, call.inputs, call.outputs
    if op.inputs is Arity.PER_RANK:
        call.in_counts = tuple(b.count for b in inputs)
        call.out_counts = tuple(b.count for b in outputs)
    else:
        call.in_counts = _split_counts(op, "input", inputs[0], call.in_counts, size)
        call.out_counts = _split_counts(op, "output", outputs[0], call.out_counts, size)
    if call.in_counts[rank] != call.out_counts[rank]:
        _size_error(
            op,
            f"this rank sends itself {call.in_counts[rank]} elements but has room for {call.out_counts[rank]}",
        )


def _split_counts(
    op: Op, side: str, buffer: Buffer, splits: tuple[int, ...] | None, size: int
) -> tuple[int, ...]:
    """Elements per rank from sizes along dimension 0, as torch's ``*_split_sizes`` give them."""
    rows = buffer.shape[0] if buffer.shape else 1
    row = buffer.count // rows if rows else 0
    if splits is None:
        if rows % size:
            _size_error(
                op, f"{side} {buffer}: dimension 0 cannot be divided by {size} ranks; give {side}_split_sizes"
            )
        return (rows // size * row,) * size
    if len(splits) != size or any(s < 0 for s in splits) or sum(splits) != rows:
        _size_error(
            op,
            f"{side}_split_sizes {list(splits)} must be {size} sizes that sum to dimension 0 of {side} {buffer}",
        )
    return tuple(s * row for s in splits)


def _size_error(op: Op, message: str) -> None:
    raise DistArgumentError(f"{op.name}: {message}", op=op.name)


# --- signatures ----------------------------------------------------------------------------------------------------


def sign(call: Call) -> int:
    """What all ranks must agree on in this call, as a number that is equal on ranks that do.

    It covers operation, dtype, shape (per-rank sizes where they may be uneven), reduction and root. What may
    rightly differ between ranks (the split sizes of an all_to_all) is compared pair by pair by the backend.
    Hashes of tuples of numbers do not depend on PYTHONHASHSEED.
    """
    op = call.op
    buffer = call.inputs[0] if call.inputs else call.outputs[0] if call.outputs else None
    if buffer is None:
        return hash((op.code,))
    shape: tuple[Any, ...] = buffer.shape
    if op.uneven:
        shape = _uneven_shape(call)
    elif op.sizes in (Sizes.SCATTERED, Sizes.SCATTERED_FLAT):
        shape = call.outputs[0].shape
    reduce = call.reduce
    if reduce is None:
        return hash((op.code, buffer.dtype.code, shape, call.root))
    if reduce.factor is None:
        return hash((op.code, buffer.dtype.code, shape, call.root, reduce.code))
    return hash((op.code, buffer.dtype.code, shape, call.root, reduce.code, reduce.factor))


def _uneven_shape(call: Call) -> tuple[Any, ...]:
    sizes = call.op.sizes
    if sizes is Sizes.EXCHANGED:
        return ()
    pieces = call.outputs if sizes is Sizes.GATHERED else call.inputs
    shapes = {b.shape for b in pieces}
    return shapes.pop() if len(shapes) == 1 else tuple(b.count for b in pieces)
