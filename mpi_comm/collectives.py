"""MPI's collectives over a :class:`~mpi_comm.group_communicator.GroupCommunicator`, each after an
agreement.

MPI needs the arrays of a list in one contiguous buffer. Adjacent arrays are used as they are; small
lists are packed; large lists are sent array by array, so that no copy of the whole list is made.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mpi_comm import flat_memory
from mpi_comm.group_communicator import COLLECTIVE_TAG, GroupCommunicator
from mpi_comm.reductions import PACK_LIMIT, v_argument
from unicoll.arrays.kernels import Flat
from unicoll.backend import Call
from unicoll.backend.host import flat_of, split
from unicoll.errors import CollectiveMismatchError

Collective = Callable[[GroupCommunicator, Call], None]


def _type(group: GroupCommunicator, call: Call) -> Any:
    return group.mpi.types[(call.inputs or call.outputs)[0].dtype.name]


def _nbytes(chunks: Sequence[Flat]) -> int:
    return sum(c.nbytes for c in chunks)


# --- barrier, broadcast ---------------------------------------------------------------------------


def barrier(group: GroupCommunicator, call: Call) -> None:
    """The agreement before the collective is a barrier: nothing is left to do."""


def broadcast(group: GroupCommunicator, call: Call) -> None:
    """The root's array to all ranks."""
    _broadcast(group, flat_of(call.inputs[0]), _type(group, call), call.root)


def _broadcast(group: GroupCommunicator, flat: Flat, mpi_type: Any, root: int) -> None:
    for chunk in group.chunks(flat):
        group.execute("Bcast", [chunk, mpi_type], root)


# --- gathering ------------------------------------------------------------------------------------


def all_gather_into_tensor(group: GroupCommunicator, call: Call) -> None:
    """Every rank's array to all ranks, into one array."""
    source, out, mpi_type = flat_of(call.inputs[0]), flat_of(call.outputs[0]), _type(group, call)
    # MPI_Allgather counts the elements of one contribution, so this, not the output, is what the
    # limit applies to.
    if source.size > group.mpi.largest_count:
        _gather_one_by_one(group, source, split(out, [source.size] * group.size), mpi_type)
    elif flat_memory.overlap(source, out):
        _all_gather(group, source, out, [source.size] * group.size, mpi_type)
    else:
        group.execute("Allgather", [source, mpi_type], [out, mpi_type])


_MOST_PARTS = 64
"""The largest contribution, in multiples of the smallest one, for a library that moves parts of
that size.

With Intel MPI 2021.18 and two ranks on one host 234 parts take 5 ms, 700 parts 0.4 s.
"""


def _all_gather(
    group: GroupCommunicator, source: Flat, out: Flat, counts: Sequence[int], mpi_type: Any
) -> None:
    sent: Any = [source, mpi_type]
    # An overlap means that the input is this rank's own place in the output: an input that overlaps
    # it elsewhere was copied by the dispatcher. MPI permits that only as IN_PLACE.
    if flat_memory.overlap(source, out):
        sent = group.mpi.MPI.IN_PLACE
    if len(set(counts)) == 1:
        group.execute("Allgather", sent, [out, mpi_type])
    else:
        group.execute("Allgatherv", sent, v_argument(out, counts, mpi_type))


def _all_gather_layout(call: Call) -> int:
    """0 if an all_gather's list is small; 1 if it is large and contiguous, -1 if it is large and
    not contiguous."""
    chunks = [flat_of(b) for b in call.outputs]
    if _nbytes(chunks) <= PACK_LIMIT:
        return 0
    return 1 if flat_memory.contiguous_view(chunks) is not None else -1


def all_gather(group: GroupCommunicator, call: Call, even: bool) -> None:
    """Every rank's array to all ranks, into one array per rank; sizes may differ."""
    source, mpi_type = flat_of(call.inputs[0]), _type(group, call)
    chunks = [flat_of(b) for b in call.outputs]
    counts = [c.size for c in chunks]
    whole = flat_memory.contiguous_view(chunks)
    # The displacements of MPI_Allgatherv count from the beginning of the output, so the sum of the
    # sizes is limited. The signature covers the sizes, so all ranks choose alike.
    if sum(counts) > group.mpi.largest_count or (
        group.mpi.gathers_in_small_parts and max(counts) > _MOST_PARTS * max(1, min(counts))
    ):
        _gather_one_by_one(group, source, chunks, mpi_type)
    elif whole is not None and (even or _nbytes(chunks) <= PACK_LIMIT):
        # A small list may be packed on one rank and contiguous on another, since MPI's call is the
        # same. For a large list this way is taken only if the lists of all ranks are contiguous: a
        # rank that has to copy would receive array by array, which are other calls.
        _all_gather(group, source, whole, counts, mpi_type)
    elif _nbytes(chunks) <= PACK_LIMIT:
        packed = flat_memory.empty(sum(counts), source)
        _all_gather(group, source, packed, counts, mpi_type)
        flat_memory.split_into(packed, chunks)
    else:
        _gather_one_by_one(group, source, chunks, mpi_type)


def _gather_one_by_one(
    group: GroupCommunicator, source: Flat, chunks: Sequence[Flat], mpi_type: Any
) -> None:
    own = chunks[group.rank]
    if flat_memory.address(own) != flat_memory.address(source):
        flat_memory.copy([(own, source)])
    for i, chunk in enumerate(chunks):
        _broadcast(group, chunk, mpi_type, i)


def gather(group: GroupCommunicator, call: Call, counts: Sequence[int] | None) -> None:
    """Every rank's array to the root; ``counts`` are all ranks' sizes, or None if they are
    equal."""
    source, mpi_type, root = flat_of(call.inputs[0]), _type(group, call), call.root
    chunks = [flat_of(b) for b in call.outputs]
    total = source.size * group.size if counts is None else sum(counts)
    if total * call.inputs[0].dtype.itemsize > PACK_LIMIT:
        # A large list is received array by array, without packed memory for all. The total is known
        # to all ranks, so all choose alike.
        if not chunks:
            _send(group, source, mpi_type, root)
        for i, chunk in enumerate(chunks):
            if i != root:
                _receive(group, chunk, mpi_type, i)
            else:
                flat_memory.copy([(chunk, source)])
        return
    packed = flat_memory.empty(total, source) if chunks else None
    function, target = _rooted("Gather", packed, counts, mpi_type)
    group.execute(function, [source, mpi_type], target, root)
    if packed is not None:
        flat_memory.split_into(packed, chunks)


def _rooted(
    name: str, packed: Flat | None, counts: Sequence[int] | None, mpi_type: Any
) -> tuple[str, Any]:
    """MPI's function, and its argument for the array that only the root has."""
    if counts is None:
        return name, None if packed is None else [packed, mpi_type]
    return f"{name}v", None if packed is None else v_argument(packed, counts, mpi_type)


def _send(group: GroupCommunicator, flat: Flat, mpi_type: Any, dest: int) -> None:
    for chunk in group.chunks(flat):
        group.execute("Send", [chunk, mpi_type], dest, COLLECTIVE_TAG)


def _receive(group: GroupCommunicator, flat: Flat, mpi_type: Any, source: int) -> None:
    for chunk in group.chunks(flat):
        group.execute("Recv", [chunk, mpi_type], source, COLLECTIVE_TAG)


def scatter(group: GroupCommunicator, call: Call, counts: Sequence[int] | None) -> None:
    """The root's i-th array to rank i; ``counts`` are all ranks' sizes, or None if they are
    equal."""
    out, mpi_type, root = flat_of(call.outputs[0]), _type(group, call), call.root
    chunks = [flat_of(b) for b in call.inputs]
    total = out.size * group.size if counts is None else sum(counts)
    if total * call.outputs[0].dtype.itemsize > PACK_LIMIT:
        if not chunks:
            _receive(group, out, mpi_type, root)
        for i, chunk in enumerate(chunks):
            if i != root:
                _send(group, chunk, mpi_type, i)
        if chunks:
            flat_memory.copy([(out, chunks[root])])
        return
    packed = flat_memory.concatenated(chunks) if chunks else None
    function, source = _rooted("Scatter", packed, counts, mpi_type)
    group.execute(function, source, [out, mpi_type], root)


# --- personalised exchange ------------------------------------------------------------------------


def even_size(call: Call) -> int:
    """The common size of all parts of an all_to_all; -1 if sizes differ."""
    assert call.in_counts is not None
    assert call.out_counts is not None
    first = call.in_counts[0]
    even = call.in_counts.count(first) == len(call.in_counts) and call.out_counts == call.in_counts
    return first if even else -1


def all_to_all(group: GroupCommunicator, call: Call, even: bool) -> None:
    """The j-th part of rank i becomes the i-th part of rank j."""
    assert call.in_counts is not None
    assert call.out_counts is not None
    mpi_type = _type(group, call)
    limit = group.mpi.largest_count
    # This is equal on all ranks: even splits have one size, and uneven ones are exchanged.
    large = (
        call.in_counts[0] > limit
        if even
        else _check_counts(group, call, max(sum(call.in_counts), sum(call.out_counts)))
    )
    single = call.op.joined
    if single:
        source, out = flat_of(call.inputs[0]), flat_of(call.outputs[0])
        if not large:
            _exchange(group, source, out, call, even, mpi_type)
            return
        sources, targets = split(source, call.in_counts), split(out, call.out_counts)
    else:
        sources, targets = [flat_of(b) for b in call.inputs], [flat_of(b) for b in call.outputs]
        # Uneven lists have another total on each rank, so the ranks could not choose alike whether
        # to pack.
        if even and _nbytes(sources) <= PACK_LIMIT:
            packed = flat_memory.empty(sum(call.out_counts), sources[0])
            _exchange(group, flat_memory.concatenated(sources), packed, call, even, mpi_type)
            flat_memory.split_into(packed, targets)
            return
    _pairwise_exchange(group, sources, targets, mpi_type)


def _exchange(
    group: GroupCommunicator, source: Flat, out: Flat, call: Call, even: bool, mpi_type: Any
) -> None:
    if even:
        group.execute("Alltoall", [source, mpi_type], [out, mpi_type])
    else:
        assert call.in_counts is not None
        assert call.out_counts is not None
        group.execute(
            "Alltoallv",
            v_argument(source, call.in_counts, mpi_type),
            v_argument(out, call.out_counts, mpi_type),
        )


def _pairwise_exchange(
    group: GroupCommunicator, sources: Sequence[Flat], targets: Sequence[Flat], mpi_type: Any
) -> None:
    size, rank = group.size, group.rank
    flat_memory.copy([(targets[rank], sources[rank])])
    for distance in range(1, size):
        dest, source = (rank + distance) % size, (rank - distance) % size
        group.exchange(dest, sources[dest], source, targets[source], mpi_type)


def _check_counts(group: GroupCommunicator, call: Call, total: int) -> bool:
    """Exchange the split sizes; raise on all ranks if what one rank sends differs from what the
    other expects.

    Returns True if the ``total`` of some rank exceeds MPI's counts.

    Raises:
        CollectiveMismatchError: sizes differ; the receiver of the first mismatch writes the error.
    """
    mpi, size = group.mpi.MPI, group.size
    sent, expected = np.array(call.in_counts, np.int64), np.array(call.out_counts, np.int64)
    # One reduction tells all ranks both things: a pair of ranks whose sizes differ, if there is
    # one, and whether the arrays of some rank exceed MPI's counts.
    incoming, mismatch = np.empty(size, np.int64), np.array([0, total], np.int64)
    group.execute("Alltoall", [sent, mpi.INT64_T], [incoming, mpi.INT64_T])
    wrong = np.flatnonzero(incoming != expected)
    if wrong.size:
        mismatch[0] = 1 + group.rank * size + wrong[0]
    group.execute("Allreduce", mpi.IN_PLACE, [mismatch, mpi.INT64_T], mpi.MAX)
    if not mismatch[0]:
        return bool(mismatch[1] > group.mpi.largest_count)
    receiver, sender = divmod(int(mismatch[0]) - 1, size)
    # The receiver alone knows both sizes. The others wait for its error, and write one without
    # sizes only if it does not come.
    group.await_agreed_error(group.rank == receiver)
    ranks, context = group.context.ranks, group.context
    sizes = (
        f" {incoming[sender]} elements" if group.rank == receiver else " another number of elements"
    )
    room = (
        f"has room for {expected[sender]}" if group.rank == receiver else "expects another number"
    )
    group.state.fail(
        CollectiveMismatchError(
            f"{call.op.name} #{call.seq} on group {context.name!r}: rank {ranks[sender]}"
            f" sends{sizes} to rank {ranks[receiver]}, which {room}",
            group=context.name,
            op=call.op.name,
            seq=call.seq,
        )
    )


COLLECTIVES: dict[str, Collective] = {
    "barrier": barrier,
    "broadcast": broadcast,
    "all_gather_into_tensor": all_gather_into_tensor,
}
LAYOUT_DEPENDENT: dict[
    str, tuple[Callable[[Call], int], Callable[[GroupCommunicator, Call, bool], None]]
] = {
    "all_gather": (_all_gather_layout, all_gather),
    "all_to_all": (even_size, all_to_all),
    "all_to_all_single": (even_size, all_to_all),
}
"""Collectives whose algorithm depends on a value that may differ between ranks: a function of the
value, and the collective, whose last argument is True if the value is equal on all ranks and not
negative."""
ROOT_SIZED: dict[str, Callable[[GroupCommunicator, Call, Sequence[int] | None], None]] = {
    "gather": gather,
    "scatter": scatter,
}
"""Collectives whose list only the root has: their last argument is all ranks' sizes, or None if
they are equal."""
