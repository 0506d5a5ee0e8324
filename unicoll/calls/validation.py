"""Validation of calls against the table of operations, and their signatures.

:func:`check` refuses a bad call before data moves; :func:`sign` gives a number that is equal on all
ranks whose calls agree.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from unicoll.arrays.buffer import has_shared_elements
from unicoll.arrays.conversion import Buffer
from unicoll.arrays.types import COMPRESSIONS
from unicoll.calls.call import Call
from unicoll.calls.ops import Arity, Op, Sizes
from unicoll.calls.reduce_ops import check_reduction
from unicoll.errors import DistArgumentError, DistTypeError


def check(call: Call, rank: int, size: int) -> None:
    """Refuse a call that breaks its row's rules; ``rank`` and ``size`` are those of the group.

    Raises:
        DistArgumentError, DistTypeError: naming the operation and the argument.
    """
    op, inputs, outputs = call.op, call.inputs, call.outputs
    if op.rooted and not 0 <= call.root < size:
        raise DistArgumentError(
            f"{op.name}: root {call.root} is not a rank of a group of {size}", op=op.name
        )
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
            raise DistArgumentError(
                f"{op.name}: {which} ({buffer}) {_write_refusal(buffer)}", op=op.name
            )
    if call.reduce is not None:
        check_reduction(op, first.dtype, call.reduce)
    _check_sizes(call, rank, size)


def _write_refusal(buffer: Buffer) -> str:
    """The reason that results cannot be written to a buffer."""
    if getattr(buffer.owner, "requires_grad", False):
        return (
            "requires grad and was computed from other tensors: a write that autograd does not"
            " record would make their gradients wrong; give its .detach(), or call this under"
            " torch.no_grad()"
        )
    kind = type(buffer.owner)
    # It is a tensor of torch, and none of those is read-only.
    if hasattr(kind, "stride"):
        return "has several elements in the same memory; give its .clone()"
    shape, strides = getattr(buffer.owner, "shape", ()), getattr(buffer.owner, "strides", None)
    if strides and has_shared_elements(shape, strides, buffer.dtype.itemsize):
        return "has several elements in the same memory; give a copy"
    return "is read-only; give a copy that can be written, as np.array(x) makes"


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
        hint = (
            f": {op.name}_list is None or empty"
            if arity is Arity.PER_RANK_AT_ROOT and not buffers
            else ""
        )
        raise DistArgumentError(
            f"{op.name}: {len(buffers)} {side} arrays given, {expected} expected{where} (group of"
            f" {size}){hint}",
            op=op.name,
        )


def _check_sizes(call: Call, rank: int, size: int) -> None:
    op, inputs, outputs, sizes = call.op, call.inputs, call.outputs, call.op.sizes
    if sizes is Sizes.SAME:
        if outputs and outputs is not inputs and outputs[0].count != inputs[0].count:
            _size_error(op, f"output {outputs[0]} and input {inputs[0]} differ in size")
    elif sizes is Sizes.GATHERED:
        if outputs:
            _check_parts(op, "output", outputs, inputs[0], rank)
    elif sizes is Sizes.SCATTERED:
        if inputs:
            _check_parts(op, "input", inputs, outputs[0], rank)
    elif sizes is Sizes.GATHERED_FLAT:
        if outputs[0].count != size * inputs[0].count:
            _size_error(
                op, f"output {outputs[0]} must hold {size} times the elements of input {inputs[0]}"
            )
    elif sizes is Sizes.SCATTERED_FLAT:
        if inputs[0].count != size * outputs[0].count:
            _size_error(
                op, f"input {inputs[0]} must hold {size} times the elements of output {outputs[0]}"
            )
    elif sizes is Sizes.EXCHANGED:
        _check_exchange(call, rank, size)


def _check_parts(op: Op, side: str, parts: Sequence[Buffer], mine: Buffer, rank: int) -> None:
    """Refuse a list whose entry for this rank, or any entry of an even operation, differs in size
    from ``mine``."""
    for i, part in enumerate(parts):
        if (i == rank or not op.uneven) and part.count != mine.count:
            _size_error(
                op,
                f"{side} {i} is {part}, this rank's own array is {mine}: they must be of one size",
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
            f"this rank sends itself {call.in_counts[rank]} elements but has room for"
            f" {call.out_counts[rank]}",
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
                op,
                f"{side} {buffer}: dimension 0 cannot be divided by {size} ranks; give"
                f" {side}_split_sizes",
            )
        return (rows // size * row,) * size
    if len(splits) != size or any(s < 0 for s in splits) or sum(splits) != rows:
        _size_error(
            op,
            f"{side}_split_sizes {list(splits)} must be {size} sizes that sum to dimension 0 of"
            f" {side} {buffer}",
        )
    return tuple(s * row for s in splits)


def _size_error(op: Op, message: str) -> None:
    raise DistArgumentError(f"{op.name}: {message}", op=op.name)


# --- signatures -----------------------------------------------------------------------------------


def sign(call: Call) -> int:
    """The signature of a call: a number that is equal on ranks whose calls agree.

    It covers operation, dtype, shape (per-rank sizes where they may be uneven), reduction,
    compression and root. Sizes that may differ between ranks (the split sizes of an all_to_all, the
    sizes in a gather or scatter) are compared pair by pair by the backend. Hashes of tuples of
    numbers do not depend on PYTHONHASHSEED. Numbers in them are not negative: hash(-1) == hash(-2).
    """
    op = call.op
    buffer = call.inputs[0] if call.inputs else call.outputs[0] if call.outputs else None
    if buffer is None:
        return hash((op.code,))
    shape: tuple[Any, ...] = buffer.shape
    if op.root_has_sizes:
        shape = ()
    elif op.uneven:
        shape = _uneven_shape(call)
    elif op.scattered:
        shape = call.outputs[0].shape
    reduce = call.reduce
    if reduce is None:
        return hash((op.code, buffer.dtype.code, shape, call.root))
    if call.compression:
        compression = COMPRESSIONS[call.compression]
        return hash((op.code, buffer.dtype.code, shape, call.root, reduce.code, compression))
    return hash((op.code, buffer.dtype.code, shape, call.root, reduce.key))


def _uneven_shape(call: Call) -> tuple[Any, ...]:
    sizes = call.op.sizes
    if sizes is Sizes.EXCHANGED:
        return ()
    parts = call.outputs if sizes is Sizes.GATHERED else call.inputs
    shapes = {b.shape for b in parts}
    return shapes.pop() if len(shapes) == 1 else tuple(b.count for b in parts)
