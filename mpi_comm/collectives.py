"""The collectives over a :class:`~mpi_comm.team.Team`: MPI's own, each after an agreement of all ranks.

MPI wants the arrays of a list in one piece of memory. Neighbouring arrays are taken as they are; short lists are
copied together; long ones go array by array, so that no copy of everything is made.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from unicoll.backend import Call
from unicoll.errors import CollectiveMismatchError
from unicoll.kernels import Flat, kernel_for

from . import flats
from .reductions import STAGED, flat_of
from .team import COLLECTIVE_TAG, Team

__all__ = ["COLLECTIVES", "SIZED", "UNLIKE", "alone"]

Collective = Callable[[Team, Call], None]


def _type(team: Team, call: Call) -> Any:
    return team.mpi.types[(call.inputs or call.outputs)[0].dtype.name]


def _total(pieces: Sequence[Flat]) -> int:
    return sum(p.nbytes for p in pieces)


def _offsets(counts: Sequence[int]) -> list[int]:
    found = [0]
    for count in counts[:-1]:
        found.append(found[-1] + count)
    return found


def _parted(flat: Flat, counts: Sequence[int], kind: Any) -> list[Any]:
    """An array and its parts, as MPI's calls with a "v" want them."""
    return [flat, (list(counts), _offsets(counts)), kind]


def _split(flat: Flat, counts: Sequence[int]) -> list[Flat]:
    pieces, start = [], 0
    for count in counts:
        pieces.append(flat[start : start + count])
        start += count
    return pieces


# --- barrier, broadcast ------------------------------------------------------------------------------------------


def barrier(team: Team, call: Call) -> None:
    """Nobody leaves before all have come: the agreement is a barrier."""


def broadcast(team: Team, call: Call) -> None:
    """The root's data to all."""
    _broadcast(team, flat_of(call.inputs[0]), _type(team, call), call.root)


def _broadcast(team: Team, flat: Flat, kind: Any, root: int) -> None:
    for piece in team.cut(flat):
        team.do("Bcast", [piece, kind], root)


# --- gathering ----------------------------------------------------------------------------------------------------


def all_gather_into_tensor(team: Team, call: Call) -> None:
    """Every rank's data to all, into one array."""
    source, out, kind = flat_of(call.inputs[0]), flat_of(call.outputs[0]), _type(team, call)
    if source.size > team.mpi.largest_count:
        _gather_one_by_one(team, source, _split(out, [source.size] * team.size), kind)
    elif flats.overlap(source, out):
        _all_gather(team, source, out, [source.size] * team.size, kind)
    else:
        team.do("Allgather", [source, kind], [out, kind])


def _all_gather(team: Team, source: Flat, out: Flat, counts: Sequence[int], kind: Any) -> None:
    given: Any = [source, kind]
    if flats.overlap(source, out):
        mine = _split(out, counts)[team.rank]
        if flats.address(mine) != flats.address(source):
            flats.copy([(mine, flats.clone(source))])
        given = team.mpi.MPI.IN_PLACE
    if len(set(counts)) == 1:
        team.do("Allgather", given, [out, kind])
    else:
        team.do("Allgatherv", given, _parted(out, counts, kind))


def _gathers_into_one_piece(call: Call) -> int:
    """1 where an all_gather's list is long and lies in one piece, -1 where it is long and does not, else 0."""
    pieces = [flat_of(b) for b in call.outputs]
    if _total(pieces) <= STAGED:
        return 0
    return 1 if flats.in_one_piece(pieces) is not None else -1


def all_gather(team: Team, call: Call, even: bool) -> None:
    """Every rank's data to all, into an array for each; sizes may differ."""
    source, kind = flat_of(call.inputs[0]), _type(team, call)
    pieces = [flat_of(b) for b in call.outputs]
    counts = [p.size for p in pieces]
    whole = flats.in_one_piece(pieces)
    if sum(counts) > team.mpi.largest_count:
        _gather_one_by_one(team, source, pieces, kind)
    elif whole is not None and (even or _total(pieces) <= STAGED):
        _all_gather(team, source, whole, counts, kind)
    elif _total(pieces) <= STAGED:
        room = flats.empty(sum(counts), source)
        _all_gather(team, source, room, counts, kind)
        flats.hand_out(room, pieces)
    else:
        _gather_one_by_one(team, source, pieces, kind)


def _gather_one_by_one(team: Team, source: Flat, pieces: Sequence[Flat], kind: Any) -> None:
    mine = pieces[team.rank]
    if flats.address(mine) != flats.address(source):
        flats.copy([(mine, source)])
    for i, piece in enumerate(pieces):
        _broadcast(team, piece, kind, i)


def gather(team: Team, call: Call, counts: Sequence[int] | None) -> None:
    """Every rank's data to the root; ``counts`` are all ranks' sizes where they differ."""
    source, kind, root = flat_of(call.inputs[0]), _type(team, call), call.root
    pieces = [flat_of(b) for b in call.outputs]
    total = source.size * team.size if counts is None else sum(counts)
    if total * call.inputs[0].dtype.itemsize > STAGED:
        if not pieces:
            _send(team, source, kind, root)
        for i, piece in enumerate(pieces):
            if i != root:
                _receive(team, piece, kind, i)
            else:
                flats.copy([(piece, source)])
        return
    room = flats.empty(total, source) if pieces else None
    if counts is None:
        team.do("Gather", [source, kind], None if room is None else [room, kind], root)
    else:
        team.do("Gatherv", [source, kind], None if room is None else _parted(room, counts, kind), root)
    if room is not None:
        flats.hand_out(room, pieces)


def _send(team: Team, flat: Flat, kind: Any, to: int) -> None:
    for piece in team.cut(flat):
        team.do("Send", [piece, kind], to, COLLECTIVE_TAG)


def _receive(team: Team, flat: Flat, kind: Any, frm: int) -> None:
    for piece in team.cut(flat):
        team.do("Recv", [piece, kind], frm, COLLECTIVE_TAG)


def scatter(team: Team, call: Call, counts: Sequence[int] | None) -> None:
    """The root's i-th array to rank i; ``counts`` are all ranks' sizes where they differ."""
    out, kind, root = flat_of(call.outputs[0]), _type(team, call), call.root
    pieces = [flat_of(b) for b in call.inputs]
    total = out.size * team.size if counts is None else sum(counts)
    if total * call.outputs[0].dtype.itemsize > STAGED:
        if not pieces:
            _receive(team, out, kind, root)
        for i, piece in enumerate(pieces):
            if i != root:
                _send(team, piece, kind, i)
        if pieces:
            flats.copy([(out, pieces[root])])
        return
    room = flats.joined(pieces) if pieces else None
    if counts is None:
        team.do("Scatter", None if room is None else [room, kind], [out, kind], root)
    else:
        team.do("Scatterv", None if room is None else _parted(room, counts, kind), [out, kind], root)


# --- personalised exchange ---------------------------------------------------------------------------------------


def _even_size(call: Call) -> int:
    """The one size of all parts of an all_to_all; -1 where there are several."""
    assert call.in_counts is not None
    assert call.out_counts is not None
    first = call.in_counts[0]
    even = call.in_counts.count(first) == len(call.in_counts) and call.out_counts == call.in_counts
    return first if even else -1


def all_to_all(team: Team, call: Call, even: bool) -> None:
    """The j-th part of rank i becomes the i-th part of rank j."""
    assert call.in_counts is not None
    assert call.out_counts is not None
    kind = _type(team, call)
    limit = team.mpi.largest_count
    large = (
        call.in_counts[0] > limit
        if even
        else _check_counts(team, call, max(sum(call.in_counts), sum(call.out_counts)))
    )
    single = call.op.name == "all_to_all_single"
    if single:
        source, out = flat_of(call.inputs[0]), flat_of(call.outputs[0])
        if flats.overlap(source, out):
            source = flats.clone(source)
        if not large:
            _exchange(team, source, out, call, even, kind)
            return
        sources, targets = _split(source, call.in_counts), _split(out, call.out_counts)
    else:
        sources, targets = [flat_of(b) for b in call.inputs], [flat_of(b) for b in call.outputs]
        if even and _total(sources) <= STAGED:
            room = flats.empty(sum(call.out_counts), sources[0])
            _exchange(team, flats.joined(sources), room, call, even, kind)
            flats.hand_out(room, targets)
            return
        if any(flats.overlap(s, t) for s in sources for t in targets):
            sources = [flats.clone(s) for s in sources]
    _pair_by_pair(team, sources, targets, kind)


def _exchange(team: Team, source: Flat, out: Flat, call: Call, even: bool, kind: Any) -> None:
    if even:
        team.do("Alltoall", [source, kind], [out, kind])
    else:
        assert call.in_counts is not None
        assert call.out_counts is not None
        team.do("Alltoallv", _parted(source, call.in_counts, kind), _parted(out, call.out_counts, kind))


def _pair_by_pair(team: Team, sources: Sequence[Flat], targets: Sequence[Flat], kind: Any) -> None:
    size, rank = team.size, team.rank
    flats.copy([(targets[rank], sources[rank])])
    for distance in range(1, size):
        to, frm = (rank + distance) % size, (rank - distance) % size
        team.swap(to, sources[to], frm, targets[frm], kind)


def _check_counts(team: Team, call: Call, total: int) -> bool:
    """Every rank learns what it will be sent; all learn of the first misfit, which its receiver puts into words.

    Returns whether some rank has more elements, in ``total``, than MPI can count.
    """
    mpi, size = team.mpi.MPI, team.size
    given, awaited = np.array(call.in_counts, np.int64), np.array(call.out_counts, np.int64)
    coming, misfit = np.empty(size, np.int64), np.array([0, total], np.int64)
    team.do("Alltoall", [given, mpi.INT64_T], [coming, mpi.INT64_T])
    wrong = np.flatnonzero(coming != awaited)
    if wrong.size:
        misfit[0] = 1 + team.rank * size + wrong[0]
    team.do("Allreduce", mpi.IN_PLACE, [misfit, mpi.INT64_T], mpi.MAX)
    if not misfit[0]:
        return bool(misfit[1] > team.mpi.largest_count)
    receiver, sender = divmod(int(misfit[0]) - 1, size)
    team.await_verdict(team.rank == receiver)
    ranks, context = team.context.ranks, team.context
    sizes = f" {coming[sender]} elements" if team.rank == receiver else " another number of elements"
    room = f"has room for {awaited[sender]}" if team.rank == receiver else "does not await them"
    team.fail(
        CollectiveMismatchError(
            f"{call.op.name} #{call.seq} on group {context.name!r}: rank {ranks[sender]} sends{sizes}"
            f" to rank {ranks[receiver]}, which {room}",
            group=context.name,
            op=call.op.name,
            seq=call.seq,
        )
    )


def alone(call: Call) -> None:
    """Any collective in a group of one: outputs are copies of inputs, reduced over one rank."""
    if call.reduce is not None:
        kernel = kernel_for(call.inputs[0].dtype, call.reduce)
        kernel.combine([flat_of(call.inputs[0])], flat_of(call.outputs[0]))
        return
    for source, target in zip(call.inputs, call.outputs, strict=False):
        if source is not target:
            flat_of(target)[:] = flat_of(source)


COLLECTIVES: dict[str, Collective] = {
    "barrier": barrier,
    "broadcast": broadcast,
    "all_gather_into_tensor": all_gather_into_tensor,
}
UNLIKE: dict[str, tuple[Callable[[Call], int], Callable[[Team, Call, bool], None]]] = {
    "all_gather": (_gathers_into_one_piece, all_gather),
    "all_to_all": (_even_size, all_to_all),
    "all_to_all_single": (_even_size, all_to_all),
}
"""Those whose way depends on something that may differ between ranks: a number, and the collective, which is told
whether it is the same everywhere and not negative."""
SIZED: dict[str, Callable[[Team, Call, Sequence[int] | None], None]] = {"gather": gather, "scatter": scatter}
"""Those whose sizes the root alone knows: they are told all ranks' where these differ."""
