"""Collectives of small arrays: the agreement before every collective carries the data, so it is the
only call of MPI.

Every rank gets the arrays of all ranks, and reduces them in rank order by unicoll's kernels. A call
is executed this way if its signature and the value that the ranks compare permit it: the signature
covers sizes (where it does not, the value does), and whether arrays are passed by address.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from mpi_comm.collectives import even_size
from mpi_comm.group_communicator import GroupCommunicator
from unicoll.arrays.kernels import Flat, kernel_for
from unicoll.arrays.types import DType
from unicoll.backend import Call
from unicoll.backend.host import flat_of, shape_hash, split
from unicoll.calls.ops import Op

Finish = Callable[[Call], None]
"""Writes a call's results from the contributions of all ranks."""
_MAX_CALLS = 512
_NO_DATA = np.empty(0)


@dataclass(slots=True)
class SmallCall:
    """What calls of one signature have in common.

    Attributes:
        op, dtype, count: operation; element type and size of the first input, None and 0 in a
            barrier.
        own: where this rank's contribution is put before the agreement.
        finish: is called after the agreement.
        value: what the ranks compare besides the signature.
    """

    op: Op
    dtype: DType | None
    count: int
    own: Flat
    finish: Finish
    value: int = 0


@dataclass(slots=True)
class _SmallCollective:
    """A collective of small arrays.

    Attributes:
        elements: of each rank's contribution; equal on all ranks that agree.
        results: the function that writes the results, from where all ranks' contributions are.
        value: a number that must be equal on all ranks, and not negative; None if the signature
            covers all sizes.
    """

    elements: Callable[[GroupCommunicator, Call], int]
    results: Callable[[GroupCommunicator, Call, list[Flat]], Finish]
    value: Callable[[Call], int] | None = None


def contribution(group: GroupCommunicator, call: Call) -> int:
    """Bytes of each rank's contribution to a collective, equal on all ranks that agree on signature
    and value."""
    if call.dtype is None:
        return 0
    return _SMALL[call.op.name].elements(group, call) * call.dtype.itemsize


def prepare_small_call(group: GroupCommunicator, call: Call) -> SmallCall | None:
    """How to do a call within its agreement; None if it has no room there, or its arrays are in
    device memory.

    It is kept for later calls of the signature, in :attr:`GroupCommunicator.small_calls`, if the
    call has one array and the signature covers all sizes.
    """
    small = _SMALL.get(call.op.name)
    if small is None:
        return (
            _keep(group, call, SmallCall(call.op, None, 0, _NO_DATA, _nothing))
            if call.dtype is None
            else None
        )
    first = (call.inputs or call.outputs)[0]
    flat, elements = first.flat, small.elements(group, call)
    if elements * first.dtype.itemsize > group.agreement.room or not isinstance(flat, np.ndarray):
        return None
    value = 0 if small.value is None else small.value(call)
    if value < 0:
        # The parts of this rank are uneven. It agrees with this negative number, by which ranks
        # that have made a SmallCall learn that the arrays of the agreement are of no use.
        return None
    own, arrays = group.agreement.contributions(flat.dtype, elements)
    # The function that writes the results gets each call as its argument: a SmallCall that is kept
    # refers to no array of the user.
    made = SmallCall(
        call.op, first.dtype, first.count, own, small.results(group, call, arrays), value
    )
    if small.value is None and len(call.inputs) == 1 and elements == first.count:
        return _keep(group, call, made)
    return made


def _keep(group: GroupCommunicator, call: Call, made: SmallCall) -> SmallCall:
    if len(group.small_calls) >= _MAX_CALLS:
        group.small_calls.clear()
    group.small_calls[call.signature] = made
    return made


def pack_inputs(call: Call, target: Flat) -> None:
    """Copy a call's inputs to consecutive parts of an array, which may be longer."""
    for part, buffer in zip(
        split(target, [b.count for b in call.inputs]), call.inputs, strict=True
    ):
        part[:] = buffer.flat


# --- elements of a contribution -------------------------------------------------------------------


def _own(group: GroupCommunicator, call: Call) -> int:
    return call.inputs[0].count


def _largest(group: GroupCommunicator, call: Call) -> int:
    return max(b.count for b in call.outputs)


def _listed(group: GroupCommunicator, call: Call) -> int:
    return sum(b.count for b in call.inputs)


def _scattered(group: GroupCommunicator, call: Call) -> int:
    return call.outputs[0].count * group.size


# --- results --------------------------------------------------------------------------------------


def _nothing(call: Call) -> None:
    pass


def _broadcast(group: GroupCommunicator, call: Call, arrays: list[Flat]) -> Finish:
    if group.rank == call.root:
        return _nothing
    array = arrays[call.root]

    def finish(call: Call) -> None:
        flat_of(call.outputs[0])[:] = array

    return finish


def _all_reduce(group: GroupCommunicator, call: Call, arrays: Sequence[Flat]) -> Finish:
    assert call.reduce is not None
    kernel, quietly = kernel_for(call.inputs[0].dtype, call.reduce), group.ignoring_fp_errors
    if not kernel.plain or len(arrays) != 2:
        return lambda call: quietly(kernel.combine, arrays, call.outputs[0].flat, True)
    combine, first, second = kernel.ufunc, *arrays
    return lambda call: quietly(combine, first, second, out=call.outputs[0].flat)


def _reduce(group: GroupCommunicator, call: Call, arrays: list[Flat]) -> Finish:
    return _all_reduce(group, call, arrays) if call.outputs else _nothing


def _scan(group: GroupCommunicator, call: Call, arrays: list[Flat]) -> Finish:
    before = arrays[: group.rank + (not call.op.exclusive)]
    # The exscan of rank 0 leaves its array as it is.
    return _all_reduce(group, call, before) if before else _nothing


def _reduce_scatter(group: GroupCommunicator, call: Call, arrays: list[Flat]) -> Finish:
    count = call.outputs[0].count
    before = [b.count for b in call.inputs[: group.rank]]
    start = count * group.rank if call.op.joined else sum(before)
    return _all_reduce(group, call, [x[start : start + count] for x in arrays])


def _gather(group: GroupCommunicator, call: Call, arrays: list[Flat]) -> Finish:
    def finish(call: Call) -> None:
        # Only the root of a gather has outputs.
        for buffer, array in zip(call.outputs, arrays, strict=False):
            flat_of(buffer)[:] = array[: buffer.count]

    return finish


def _gather_joined(group: GroupCommunicator, call: Call, arrays: list[Flat]) -> Finish:
    def finish(call: Call) -> None:
        np.concatenate(arrays, out=call.outputs[0].flat)

    return finish


def _scatter(group: GroupCommunicator, call: Call, arrays: list[Flat]) -> Finish:
    own = _own_part(group, arrays[call.root])

    def finish(call: Call) -> None:
        flat_of(call.outputs[0])[:] = own

    return finish


def _all_to_all(group: GroupCommunicator, call: Call, arrays: list[Flat]) -> Finish:
    gather = _gather_joined if call.op.joined else _gather
    return gather(group, call, [_own_part(group, x) for x in arrays])


def _own_part(group: GroupCommunicator, array: Flat) -> Flat:
    count = array.size // group.size
    return array[group.rank * count : (group.rank + 1) * count]


_SMALL: dict[str, _SmallCollective] = {
    "broadcast": _SmallCollective(_own, _broadcast),
    "all_reduce": _SmallCollective(_own, _all_reduce),
    "reduce": _SmallCollective(_own, _reduce),
    "scan": _SmallCollective(_own, _scan),
    "exscan": _SmallCollective(_own, _scan),
    "reduce_scatter": _SmallCollective(_listed, _reduce_scatter),
    "reduce_scatter_tensor": _SmallCollective(_own, _reduce_scatter),
    "all_gather": _SmallCollective(_largest, _gather),
    "all_gather_into_tensor": _SmallCollective(_own, _gather_joined),
    "gather": _SmallCollective(_own, _gather, shape_hash),
    "scatter": _SmallCollective(_scattered, _scatter, shape_hash),
    "all_to_all": _SmallCollective(_listed, _all_to_all, even_size),
    "all_to_all_single": _SmallCollective(_own, _all_to_all, even_size),
}
"""By operation."""
