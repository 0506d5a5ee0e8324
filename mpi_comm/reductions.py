"""Reductions: MPI's operation if its semantics are unicoll's; otherwise MPI moves the data for
unicoll's kernels.

MPI has neither float16 nor bfloat16; its MIN and MAX may lose a NaN, depending on the library; sums
of short integers that overflow are undefined (Open MPI's vector code saturates them); and its order
of reduction is not specified. In these cases, and with ``deterministic``, which needs rank order,
every rank gets its share of all contributions (MPI_Alltoallv), reduces them in rank order with one
rounding at the end, and the shares are gathered.

MIN and MAX of large float arrays use MPI's operation if no rank has a NaN or a -0.0 (MPICH's
all_reduce of 0.0 and -0.0 gives different results on different ranks). Each rank scans its own data
and passes the result in the agreement that precedes every collective, so all ranks use the same
method. Small arrays are not scanned: the kernels are as fast.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import accumulate
from typing import Any

import numpy as np

from mpi_comm import flat_memory
from mpi_comm.group_communicator import GroupCommunicator
from unicoll.arrays.conversion import Buffer
from unicoll.arrays.kernels import Flat, Kernel, kernel_for
from unicoll.arrays.types import DType, Reduction
from unicoll.backend import Call
from unicoll.backend.host import flat_of, split

ALLGATHER_LIMIT = 1 << 16
"""Bytes of all contributions together up to which every rank reduces all elements
(MPI_Allgather)."""
SEGMENT = 1 << 22
"""Bytes of one contribution that are moved and reduced at a time: the temporary memory is twice
that."""
_BLOCK = 1 << 18
PACK_LIMIT = 1 << 24
"""Bytes of a list of arrays up to which it is packed for one MPI call; larger lists are reduced
array by array."""

_SUMS = {"SUM": "SUM", "AVG": "SUM", "PREMUL_SUM": "SUM", "PRODUCT": "PROD"}
_BITS = {"BAND": "BAND", "BOR": "BOR", "BXOR": "BXOR"}
_OF_BOOL = {"SUM": "BOR", "MAX": "BOR", "PRODUCT": "BAND", "MIN": "BAND", **_BITS}
_EXTREMES = {"MIN": "MIN", "MAX": "MAX"}
_OF_INTEGERS = {**_SUMS, **_BITS, **_EXTREMES}
_FLOAT_BITS = {size: (np.dtype(f"i{size}"), np.iinfo(f"i{size}").min) for size in (4, 8)}
"""By bytes of a float: the integer type of its bits, and the integer of -0.0, which is the lowest
of all."""


@lru_cache(maxsize=512)
def _native(dtype: DType, name: str) -> str | None:
    """Name of MPI's operation with the semantics of unicoll's; None if there is none."""
    if dtype.kind == "b":
        return _OF_BOOL.get(name)
    if dtype.kind in "ui":
        return None if dtype.itemsize < 4 and name in _SUMS else _OF_INTEGERS.get(name)
    return None if dtype.half else (_SUMS | _EXTREMES).get(name)


class ReductionMethod:
    """How a reduction is done: by MPI's operation, or by unicoll's kernel.

    Attributes:
        type: MPI's datatype of the elements.
        kernel: unicoll's kernel.
        op: MPI's operation, or None.
        op_suffices: True if MPI's operation is the whole reduction, with no scaling before or
            after.
        kernel_only: for MIN and MAX of floats the method without MPI's operation; None for all
            else.
        in_place: MPI.IN_PLACE.
    """

    __slots__ = ("in_place", "kernel", "kernel_only", "op", "op_suffices", "type")

    def __init__(
        self, group: GroupCommunicator, dtype: DType, reduce: Reduction, in_order: bool
    ) -> None:
        self.type = group.mpi.types[dtype.name]
        self.kernel: Kernel = kernel_for(dtype, reduce)
        # MPI specifies no order, and combines partial results. Rank order, and sums that need all
        # contributions at once, are the kernel's.
        name = None if in_order or self.kernel.at_once else _native(dtype, reduce.name)
        self.op: Any = None if name is None else getattr(group.mpi.MPI, name)
        self.op_suffices = self.op is not None and self.kernel.plain
        self.in_place = group.mpi.MPI.IN_PLACE
        guarded = self.op is not None and dtype.kind == "f" and name in _EXTREMES
        self.kernel_only: ReductionMethod | None = (
            ReductionMethod(group, dtype, reduce, True) if guarded else None
        )


def _method_for(group: GroupCommunicator, call: Call) -> ReductionMethod:
    dtype, reduce = call.inputs[0].dtype, call.reduce
    assert reduce is not None
    # The factor can differ in every call, so its methods are not kept: the cache would grow with
    # every call.
    if reduce.factor is not None:
        return ReductionMethod(group, dtype, reduce, group.in_order)
    key = (dtype.code << 8) | reduce.code
    found: ReductionMethod | None = group.reduction_methods.get(key)
    if found is None:
        found = group.reduction_methods[key] = ReductionMethod(group, dtype, reduce, group.in_order)
    return found


def value_to_agree(group: GroupCommunicator, call: Call) -> int:
    """A number that is negative if this rank's data must not be reduced by MPI's operation; see
    :func:`method_for`."""
    if _method_for(group, call).kernel_only is None or _gathered_by_all(group, call):
        return 0
    return -1 if any(_has_nan_or_negative_zero(b) for b in call.inputs) else 0


def method_for(group: GroupCommunicator, call: Call, none_negative: bool) -> ReductionMethod:
    """How to reduce, equal on all ranks; ``none_negative``: no rank's :func:`value_to_agree` is
    negative."""
    method = _method_for(group, call)
    if method.kernel_only is None or (none_negative and not _gathered_by_all(group, call)):
        return method
    return method.kernel_only


def _gathered_by_all(group: GroupCommunicator, call: Call) -> bool:
    """True if the arrays are so small that all ranks reduce all of them: scanning them would not
    pay."""
    return sum(b.nbytes for b in call.inputs) * group.size <= ALLGATHER_LIMIT


def _has_nan_or_negative_zero(buffer: Buffer) -> bool:
    """True if a float array has a NaN or a -0.0; two passes without temporary memory."""
    flat = flat_of(buffer)
    if not flat.size:
        return False
    bits, negative_zero = _FLOAT_BITS[flat.itemsize]
    if np.minimum.reduce(flat.view(bits)) == negative_zero:
        return True
    # The maximum of an array with a NaN is a NaN.
    highest = np.maximum.reduce(flat)
    return bool(highest != highest)


def _scaled(kernel: Kernel, source: Flat) -> Flat:
    """A contribution as it is summed: multiplied by the factor of PREMUL_SUM."""
    return source if kernel.plain or kernel.average else np.asarray(kernel.widen(source))


def _divide(kernel: Kernel, out: Flat, ranks: int) -> None:
    """Divide a sum by the number of ranks for AVG, block by block."""
    if kernel.average:
        for start in range(0, out.size, _BLOCK):
            chunk = out[start : start + _BLOCK]
            kernel.finish(chunk, chunk, ranks)


def is_native(group: GroupCommunicator, call: Call) -> bool:
    """True if MPI's operation is the whole reduction, so that no element is read on the host."""
    method = _method_for(group, call)
    return method.op_suffices and method.kernel_only is None


# --- the operations -------------------------------------------------------------------------------


def _all_reduce(group: GroupCommunicator, call: Call, method: ReductionMethod) -> None:
    """all_reduce: the reduction of all ranks' arrays, on all ranks."""
    source, out = call.inputs[0].flat, call.outputs[0].flat
    if method.op_suffices and source is out and call.inputs[0].count <= group.mpi.largest_count:
        group.execute("Allreduce", method.in_place, [out, method.type], method.op)
    else:
        group.ignoring_fp_errors(
            _reduce_flat, group, method, flat_of(call.inputs[0]), flat_of(call.outputs[0]), None
        )


def _reduce(group: GroupCommunicator, call: Call, method: ReductionMethod) -> None:
    """reduce: the reduction of all ranks' arrays, on the root."""
    out = flat_of(call.outputs[0]) if call.outputs else None
    group.ignoring_fp_errors(_reduce_flat, group, method, flat_of(call.inputs[0]), out, call.root)


def _reduce_flat(
    group: GroupCommunicator,
    method: ReductionMethod,
    source: Flat,
    out: Flat | None,
    root: int | None,
) -> None:
    """Reduce to all ranks, or to the root; ``out`` is None on a rank that gets no result."""
    if method.op is None:
        _fold(group, method, source, out, root)
        return
    _reduce_to(group, method, _scaled(method.kernel, source), out, root)
    if out is not None:
        _divide(method.kernel, out, group.size)


def _reduce_to(
    group: GroupCommunicator,
    method: ReductionMethod,
    source: Flat,
    out: Flat | None,
    root: int | None,
) -> None:
    """:func:`_reduce_flat` by MPI's operation, without scaling."""
    function, rest = ("Allreduce", ()) if root is None else ("Reduce", (root,))
    if out is None:
        for chunk in group.chunks(source):
            group.execute(function, [chunk, method.type], None, method.op, *rest)
        return
    # MPI permits that input and output are the same memory only as IN_PLACE. So the contribution is
    # put into the output first, whatever the input was.
    if source is not out:
        flat_memory.copy([(out, source)])
    for chunk in group.chunks(out):
        group.execute(function, method.in_place, [chunk, method.type], method.op, *rest)


def _reduce_scatter(group: GroupCommunicator, call: Call, method: ReductionMethod) -> None:
    """reduce_scatter: chunk i of the reduction, on rank i."""
    out = flat_of(call.outputs[0])
    flat = flat_of(call.inputs[0])
    single = call.op.joined
    if (
        single
        and method.op_suffices
        and out.size <= group.mpi.largest_count
        and not flat_memory.overlap(flat, out)
    ):
        group.execute("Reduce_scatter_block", [flat, method.type], [out, method.type], method.op)
        return
    if single:
        chunks = split(flat, [out.size] * group.size)
    else:
        chunks = [flat_of(b) for b in call.inputs]
    group.ignoring_fp_errors(_reduce_chunks, group, method, chunks, flat if single else None, out)


def _reduce_chunks(
    group: GroupCommunicator,
    method: ReductionMethod,
    chunks: Sequence[Flat],
    flat: Flat | None,
    out: Flat,
) -> None:
    if method.op is None:
        _fold_chunks(group, method, chunks, out)
        return
    kernel = method.kernel
    # MPI permits no overlap. The own chunk may be the output, and then the result goes to memory of
    # its own first.
    overlaps = flat_memory.overlap(chunks[group.rank], out)
    limit = group.mpi.largest_count
    # Sizes and operation are covered by the signature, so all ranks choose alike.
    if max(c.size for c in chunks) <= limit and (
        flat is not None or sum(c.nbytes for c in chunks) <= PACK_LIMIT
    ):
        whole = _scaled(kernel, flat_memory.concatenated(chunks) if flat is None else flat)
        result = flat_memory.empty(out.size, out) if overlaps and whole is flat else out
        counts = [c.size for c in chunks]
        if len(set(counts)) == 1:
            group.execute(
                "Reduce_scatter_block", [whole, method.type], [result, method.type], method.op
            )
        else:
            group.execute(
                "Reduce_scatter", [whole, method.type], [result, method.type], counts, method.op
            )
        if result is not out:
            flat_memory.copy([(out, result)])
    else:
        _reduce_one_by_one(group, method, chunks, out)
    _divide(kernel, out, group.size)


def _reduce_one_by_one(
    group: GroupCommunicator, method: ReductionMethod, chunks: Sequence[Flat], out: Flat
) -> None:
    """Reduce chunk i to rank i, one after another: without a packed copy of all chunks."""
    for i, chunk in enumerate(chunks):
        _reduce_to(
            group, method, _scaled(method.kernel, chunk), out if i == group.rank else None, i
        )


def _scan(group: GroupCommunicator, call: Call, method: ReductionMethod) -> None:
    """scan: the reduction over the ranks up to this one; exscan: over the ranks before this one."""
    flat, exclusive = flat_of(call.outputs[0]), call.op.exclusive
    if method.op is None:
        group.ignoring_fp_errors(_fold_prefix, group, method, flat, exclusive)
        return
    # In place, MPI_Exscan leaves the array of rank 0 as it is.
    for chunk in group.chunks(flat):
        group.execute(
            "Exscan" if exclusive else "Scan", method.in_place, [chunk, method.type], method.op
        )


REDUCTIONS: dict[str, Callable[[GroupCommunicator, Call, ReductionMethod], None]] = {
    "all_reduce": _all_reduce,
    "reduce": _reduce,
    "reduce_scatter": _reduce_scatter,
    "reduce_scatter_tensor": _reduce_scatter,
    "scan": _scan,
    "exscan": _scan,
}
"""Reductions by operation; the method is the result of :func:`method_for`."""


# --- reduction by kernels -------------------------------------------------------------------------


def _shares(count: int, ranks: int) -> list[int]:
    """How many of ``count`` elements each rank reduces."""
    return [count * (i + 1) // ranks - count * i // ranks for i in range(ranks)]


def v_argument(flat: Flat, counts: Sequence[int], mpi_type: Any) -> list[Any]:
    """An array and its parts, as the argument of MPI's "v" functions."""
    return [flat, (list(counts), [0, *accumulate(counts[:-1])]), mpi_type]


def _step(source: Flat, ranks: int) -> int:
    """Elements of a segment: at least one per rank."""
    return max(ranks, SEGMENT // source.itemsize)


def _fold_share(
    group: GroupCommunicator, method: ReductionMethod, segment: Flat, counts: Sequence[int]
) -> Flat:
    """Reduce this rank's share of all ranks' ``segment``; ``counts`` are the elements of each
    rank's share."""
    own, size = counts[group.rank], group.size
    gathered = np.empty(own * size, segment.dtype)
    group.execute(
        "Alltoallv",
        v_argument(segment, counts, method.type),
        v_argument(gathered, [own] * size, method.type),
    )
    share = np.empty(own, segment.dtype)
    method.kernel.combine(split(gathered, [own] * size), share, disjoint=True)
    return share


def _fold(
    group: GroupCommunicator,
    method: ReductionMethod,
    source: Flat,
    out: Flat | None,
    root: int | None,
) -> None:
    """:func:`_reduce_flat` by the kernel."""
    size = group.size
    function, rest = ("Allgather", ()) if root is None else ("Gather", (root,))
    if source.nbytes * size <= ALLGATHER_LIMIT:
        gathered = None if out is None else np.empty(source.size * size, source.dtype)
        target: Any = None if out is None else [gathered, method.type]
        group.execute(function, [source, method.type], target, *rest)
        if out is not None and gathered is not None:
            method.kernel.combine(split(gathered, [out.size] * size), out, disjoint=True)
        return
    step = _step(source, size)
    for start in range(0, source.size, step):
        segment = source[start : start + step]
        counts = _shares(segment.size, size)
        share = _fold_share(group, method, segment, counts)
        target = None if out is None else v_argument(out[start : start + step], counts, method.type)
        group.execute(f"{function}v", [share, method.type], target, *rest)


def _fold_chunks(
    group: GroupCommunicator, method: ReductionMethod, chunks: Sequence[Flat], out: Flat
) -> None:
    """Reduce chunk i of all ranks to rank i, segment by segment."""
    # The shorter chunks take part with empty parts until the longest one is done: every rank has to
    # make every exchange.
    longest = max(c.size for c in chunks)
    step = max(1, _step(out, group.size) // group.size)
    for start in range(0, longest, step):
        parts = [c[start : start + step] for c in chunks]
        share = _fold_share(group, method, np.concatenate(parts), [c.size for c in parts])
        # The output may be the own chunk of the input. These elements of it have been sent already.
        out[start : start + step] = share


def _fold_prefix(
    group: GroupCommunicator, method: ReductionMethod, flat: Flat, exclusive: bool
) -> None:
    """Gather all ranks' arrays on every rank, and reduce those up to (or before) its own, segment
    by segment."""
    size = group.size
    step = max(1, SEGMENT // size // flat.itemsize)
    for start in range(0, flat.size, step):
        segment = flat[start : start + step]
        gathered = np.empty(segment.size * size, segment.dtype)
        group.execute("Allgather", [segment, method.type], [gathered, method.type])
        before = np.split(gathered, size)[: group.rank + (not exclusive)]
        # The exscan of rank 0 leaves its array as it is.
        if before:
            method.kernel.combine(before, segment, disjoint=True)
