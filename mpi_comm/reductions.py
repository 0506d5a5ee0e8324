"""Reductions: MPI's own where it has them with our meaning, else data moved by MPI and folded by our kernels.

MPI knows nothing of half types; its MIN and MAX lose a NaN or keep it as the library pleases; sums of short integers
that overflow are undefined (Open MPI's vector code saturates them); and its order of folding is its own. There, and
where ``deterministic`` asks for rank order, every rank gets its share of all contributions (MPI_Alltoallv), folds them
in rank order with one rounding at the end, and the shares are put together again.

Large arrays of floats get MPI's MIN and MAX where no rank has a NaN or a -0.0 (MPICH's all_reduce of 0.0 and -0.0 gives
one of them to one rank and the other to another). Each rank looks through its own data, and says what it found in the
agreement that precedes every collective, so all ranks take the same way. Small arrays are not looked through: to fold
them is as quick.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from unicoll.backend import Call
from unicoll.buffers import Buffer
from unicoll.kernels import Flat, Kernel, kernel_for
from unicoll.types import DType, Reduction

from . import flats
from .team import Team

__all__ = ["REDUCTIONS", "agreed_way", "flat_of", "native"]

WHOLE = 1 << 16
"""Bytes of all contributions together up to which every rank folds everything."""
SEGMENT = 1 << 22
"""Bytes of one contribution that are moved and folded at a time: the staging memory is twice that."""
_BLOCK = 1 << 18
STAGED = 1 << 24
"""Bytes of a list of arrays that are copied together for one call of MPI; longer lists are reduced one by one."""

_SUMS = {"SUM": "SUM", "AVG": "SUM", "PREMUL_SUM": "SUM", "PRODUCT": "PROD"}
_BITS = {"BAND": "BAND", "BOR": "BOR", "BXOR": "BXOR"}
_OF_BOOL = {"SUM": "BOR", "MAX": "BOR", "PRODUCT": "BAND", "MIN": "BAND", **_BITS}
_EXTREMES = {"MIN": "MIN", "MAX": "MAX"}
_OF_INTEGERS = {**_SUMS, **_BITS, **_EXTREMES}
_BITS_OF = {size: (np.dtype(f"i{size}"), np.iinfo(f"i{size}").min) for size in (4, 8)}
"""By bytes of a float: the integer of its bits, and that of -0.0, which is the least of all."""


@lru_cache(maxsize=512)
def _native(dtype: DType, name: str) -> str | None:
    """MPI's operation that does what ours means, by its name; None where there is none."""
    if dtype.kind == "b":
        return _OF_BOOL.get(name)
    if dtype.kind in "ui":
        return None if dtype.itemsize < 4 and name in _SUMS else _OF_INTEGERS.get(name)
    return None if dtype.half else (_SUMS | _EXTREMES).get(name)


def flat_of(buffer: Buffer) -> Flat:
    """A buffer's memory as a 1-D array."""
    assert buffer.flat is not None
    return buffer.flat


class _Way:
    """How one call is reduced: with MPI's operation, or with the kernel alone.

    Attributes:
        type: of the elements, for MPI.
        kernel: ours.
        op: MPI's operation, or None.
        plain: whether MPI's operation is all there is to do.
        careful: for MIN and MAX of floats the way without MPI's operation; None for all else.
        in_place: MPI.IN_PLACE.
    """

    __slots__ = ("careful", "in_place", "kernel", "op", "plain", "type")

    def __init__(self, team: Team, dtype: DType, reduce: Reduction, in_order: bool) -> None:
        self.type = team.mpi.types[dtype.name]
        self.kernel: Kernel = kernel_for(dtype, reduce)
        name = None if in_order else _native(dtype, reduce.name)
        self.op: Any = None if name is None else getattr(team.mpi.MPI, name)
        self.plain = self.op is not None and self.kernel.plain
        self.in_place = team.mpi.MPI.IN_PLACE
        guarded = self.op is not None and dtype.kind == "f" and name in _EXTREMES
        self.careful: _Way | None = _Way(team, dtype, reduce, True) if guarded else None


def _way(team: Team, call: Call) -> _Way:
    dtype, reduce = call.inputs[0].dtype, call.reduce
    assert reduce is not None
    key: Any = (dtype.code << 8) | reduce.code
    if reduce.factor is not None:
        key = (key, reduce.factor)
    found: _Way | None = team.ways.get(key)
    if found is None:
        found = team.ways[key] = _Way(team, dtype, reduce, team.in_order)
    return found


def agreed_way(team: Team, call: Call) -> _Way:
    """Return how to reduce, when all ranks are in this call; equal on all of them.

    Raises:
        CollectiveMismatchError: the ranks are in different calls.
    """
    way = _way(team, call)
    if way.careful is None:
        team.agree(call)
    elif sum(b.nbytes for b in call.inputs) * team.size <= WHOLE:
        team.agree(call)
        return way.careful
    elif not team.agree(call, -1 if any(_has_nan_or_negative_zero(b) for b in call.inputs) else 0):
        return way.careful
    return way


def _has_nan_or_negative_zero(buffer: Buffer) -> bool:
    """Of floats; in two passes that allocate nothing."""
    flat = flat_of(buffer)
    if not flat.size:
        return False
    bits, negative_zero = _BITS_OF[flat.itemsize]
    if np.minimum.reduce(flat.view(bits)) == negative_zero:
        return True
    highest = np.maximum.reduce(flat)
    return bool(highest != highest)


def _scaled(kernel: Kernel, source: Flat) -> Flat:
    """A contribution as it enters the sum: PREMUL_SUM multiplies it first."""
    return source if kernel.plain or kernel.average else np.asarray(kernel.widen(source))


def _divide(kernel: Kernel, out: Flat, ranks: int) -> None:
    """Make an average of a sum, block by block."""
    if kernel.average:
        for start in range(0, out.size, _BLOCK):
            piece = out[start : start + _BLOCK]
            kernel.finish(piece, piece, ranks)


def native(team: Team, call: Call) -> bool:
    """Whether MPI's operation does all of a reduction, so that no element is looked at here."""
    way = _way(team, call)
    return way.plain and way.careful is None


# --- the operations ---------------------------------------------------------------------------------------------


def _all_reduce(team: Team, call: Call, way: _Way) -> None:
    """The reduction of all ranks' data to all."""
    source, out = call.inputs[0].flat, call.outputs[0].flat
    if way.plain and source is out and call.inputs[0].count <= team.mpi.largest_count:
        team.do("Allreduce", way.in_place, [out, way.type], way.op)
    else:
        team.quietly(_reduce_to_all, team, way, flat_of(call.inputs[0]), flat_of(call.outputs[0]))


def _reduce_to_all(team: Team, way: _Way, source: Flat, out: Flat) -> None:
    if way.op is None:
        _fold_to_all(team, way, source, out)
        return
    scaled = _scaled(way.kernel, source)
    if scaled is not out:
        flats.copy([(out, scaled)])
    for piece in team.cut(out):
        team.do("Allreduce", way.in_place, [piece, way.type], way.op)
    _divide(way.kernel, out, team.size)


def _reduce(team: Team, call: Call, way: _Way) -> None:
    """The reduction of all ranks' data to the root."""
    team.quietly(_reduce_to_root, team, call, way)


def _reduce_to_root(team: Team, call: Call, way: _Way) -> None:
    source, root = flat_of(call.inputs[0]), call.root
    out = flat_of(call.outputs[0]) if call.outputs else None
    if way.op is None:
        _fold_to_root(team, way, source, out, root)
        return
    _reduce_to(team, way, _scaled(way.kernel, source), out, root)
    if out is not None:
        _divide(way.kernel, out, team.size)


def _reduce_to(team: Team, way: _Way, given: Flat, out: Flat | None, root: int) -> None:
    """With MPI's operation to ``out``, which only the root has."""
    if out is None:
        for piece in team.cut(given):
            team.do("Reduce", [piece, way.type], None, way.op, root)
        return
    if given is not out:
        flats.copy([(out, given)])
    for piece in team.cut(out):
        team.do("Reduce", way.in_place, [piece, way.type], way.op, root)


def _reduce_scatter(team: Team, call: Call, way: _Way) -> None:
    """Each rank gets its own piece of the reduction."""
    out = flat_of(call.outputs[0])
    flat = flat_of(call.inputs[0])
    single = call.op.name == "reduce_scatter_tensor"
    if single and way.plain and out.size <= team.mpi.largest_count and not flats.overlap(flat, out):
        team.do("Reduce_scatter_block", [flat, way.type], [out, way.type], way.op)
        return
    if single:
        pieces = [flat[i * out.size : (i + 1) * out.size] for i in range(team.size)]
    else:
        pieces = [flat_of(b) for b in call.inputs]
    team.quietly(_reduce_apart, team, way, pieces, flat if single else None, out)


def _reduce_apart(team: Team, way: _Way, pieces: Sequence[Flat], flat: Flat | None, out: Flat) -> None:
    """MPI wants its output apart from its input, and a piece that it overlays would be lost before it is sent."""
    if any(i != team.rank and flats.overlap(p, out) for i, p in enumerate(pieces)):
        room = flats.empty(out.size, out)
        _reduce_pieces(team, way, pieces, flat, room)
        flats.copy([(out, room)])
    else:
        _reduce_pieces(team, way, pieces, flat, out)


def _reduce_pieces(team: Team, way: _Way, pieces: Sequence[Flat], flat: Flat | None, out: Flat) -> None:
    if way.op is None:
        _fold_pieces(team, way, pieces, out)
        return
    kernel = way.kernel
    inside = flats.overlap(pieces[team.rank], out)
    limit = team.mpi.largest_count
    if max(p.size for p in pieces) <= limit and (flat is not None or sum(p.nbytes for p in pieces) <= STAGED):
        whole = _scaled(kernel, flats.joined(pieces) if flat is None else flat)
        result = flats.empty(out.size, out) if inside and whole is flat else out
        counts = [p.size for p in pieces]
        if len(set(counts)) == 1:
            team.do("Reduce_scatter_block", [whole, way.type], [result, way.type], way.op)
        else:
            team.do("Reduce_scatter", [whole, way.type], [result, way.type], counts, way.op)
        if result is not out:
            flats.copy([(out, result)])
    else:
        _reduce_one_by_one(team, way, pieces, out)
    _divide(kernel, out, team.size)


def _reduce_one_by_one(team: Team, way: _Way, pieces: Sequence[Flat], out: Flat) -> None:
    """Piece i to rank i, for each i: no copy of them all."""
    for i, piece in enumerate(pieces):
        _reduce_to(team, way, _scaled(way.kernel, piece), out if i == team.rank else None, i)


REDUCTIONS: dict[str, Callable[[Team, Call, _Way], None]] = {
    "all_reduce": _all_reduce,
    "reduce": _reduce,
    "reduce_scatter": _reduce_scatter,
    "reduce_scatter_tensor": _reduce_scatter,
}
"""After :func:`agreed_way`, which says how."""


# --- with our own kernels ---------------------------------------------------------------------------------------


def _shares(count: int, ranks: int) -> list[int]:
    """How many of ``count`` elements each rank folds."""
    return [count * (i + 1) // ranks - count * i // ranks for i in range(ranks)]


def _offsets(counts: Sequence[int]) -> list[int]:
    found = [0]
    for count in counts[:-1]:
        found.append(found[-1] + count)
    return found


def _step(source: Flat, ranks: int) -> int:
    """Elements of a segment: every rank's share of it is at least one."""
    return max(ranks, SEGMENT // source.itemsize)


def _fold_share(team: Team, way: _Way, segment: Flat, counts: Sequence[int]) -> Flat:
    """This rank's share of the reduction of all ranks' ``segment``, whose parts are ``counts`` long."""
    mine, size = counts[team.rank], team.size
    room = np.empty(mine * size, segment.dtype)
    team.do(
        "Alltoallv",
        [segment, (counts, _offsets(counts)), way.type],
        [room, ([mine] * size, [i * mine for i in range(size)]), way.type],
    )
    share = np.empty(mine, segment.dtype)
    way.kernel.combine([room[i * mine : (i + 1) * mine] for i in range(size)], share, apart=True)
    return share


def _fold_to_all(team: Team, way: _Way, source: Flat, out: Flat) -> None:
    size = team.size
    if source.nbytes * size <= WHOLE:
        room = np.empty(source.size * size, source.dtype)
        team.do("Allgather", [source, way.type], [room, way.type])
        way.kernel.combine([room[i * out.size : (i + 1) * out.size] for i in range(size)], out, apart=True)
        return
    step = _step(source, size)
    for start in range(0, source.size, step):
        segment = source[start : start + step]
        counts = _shares(segment.size, size)
        share = _fold_share(team, way, segment, counts)
        target = out[start : start + step]
        team.do("Allgatherv", [share, way.type], [target, (counts, _offsets(counts)), way.type])


def _fold_to_root(team: Team, way: _Way, source: Flat, out: Flat | None, root: int) -> None:
    size = team.size
    if source.nbytes * size <= WHOLE:
        if out is None:
            team.do("Gather", [source, way.type], None, root)
            return
        room = np.empty(source.size * size, source.dtype)
        team.do("Gather", [source, way.type], [room, way.type], root)
        way.kernel.combine([room[i * out.size : (i + 1) * out.size] for i in range(size)], out, apart=True)
        return
    step = _step(source, size)
    for start in range(0, source.size, step):
        segment = source[start : start + step]
        counts = _shares(segment.size, size)
        share = _fold_share(team, way, segment, counts)
        target = None
        if out is not None:
            target = [out[start : start + step], (counts, _offsets(counts)), way.type]
        team.do("Gatherv", [share, way.type], target, root)


def _fold_pieces(team: Team, way: _Way, pieces: Sequence[Flat], out: Flat) -> None:
    """Piece i, folded over all ranks, to rank i, segment by segment."""
    longest = max(p.size for p in pieces)
    step = max(1, _step(out, team.size) // team.size)
    for start in range(0, longest, step):
        parts = [p[start : start + step] for p in pieces]
        share = _fold_share(team, way, np.concatenate(parts), [p.size for p in parts])
        out[start : start + step] = share
