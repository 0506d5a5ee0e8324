"""The collectives over :class:`~gloo_fallback.links.Links`: one small function per algorithm.

Small operations are one :meth:`Links.exchange` (latency: ceil(log2 n) messages). Larger ones agree on their signature
by an empty exchange and then move bulk data: where everybody needs everything, rings for large blocks
(bandwidth-optimal: Patarasuk and Yuan, 2009) and :mod:`~gloo_fallback.circulant` for small ones; a binomial tree or a
pipelined chain below a root; direct messages for personalised data. Which one is chosen depends only on sizes that
the signature covers, so all ranks choose alike.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from unicoll.backend import Call
from unicoll.buffers import Buffer
from unicoll.errors import CollectiveMismatchError
from unicoll.exchanged import alike
from unicoll.kernels import Flat, Kernel, kernel_for
from unicoll.types import DType

from . import circulant
from .links import Folding, Links, bytes_of

SMALL = 1 << 16
"""Bytes that one exchange may leave at every rank; more goes the bulk way."""
SEGMENT = 1 << 18
"""Bytes per message of the pipelined algorithms."""
_CHAIN = 1 << 16
_IN_ORDER = 1 << 20
"""Bytes of all ranks' contributions that a deterministic reduction holds at a time."""


def flat_of(buffer: Buffer) -> Flat:
    """A buffer's memory as a 1-D array."""
    assert buffer.flat is not None
    return buffer.flat


def kernel_of(call: Call) -> Kernel:
    """The reduction of a call that reduces."""
    dtype: DType | None = call.dtype
    assert dtype is not None
    assert call.reduce is not None
    return kernel_for(dtype, call.reduce)


def bounds_of(count: int, parts: int) -> list[int]:
    """Where each of the nearly equal parts begins, and the last one ends."""
    return [count * i // parts for i in range(parts + 1)]


# --- barrier, broadcast ------------------------------------------------------------------------------------------


def barrier(team: Links, call: Call) -> None:
    """Nobody leaves before all have come."""
    team.agree()


def broadcast(team: Links, call: Call) -> None:
    """The root's data to all."""
    flat = flat_of(call.inputs[0])
    root, rank, size = call.root, team.rank, team.size
    if flat.nbytes <= SMALL:
        plan = team.plan(tuple(flat.nbytes if r == root else 0 for r in range(size)), flat.dtype)
        if rank == root:
            plan.mine[:] = flat
            team.exchange(plan)
        else:
            flat[:] = team.exchange(plan)[root]
        return
    team.agree()
    place = (rank - root) % size
    if size == 2 or flat.nbytes >= _CHAIN * (size - 1):
        chain_down(team, bytes_of(flat), place, root)
    else:
        _tree_down(team, bytes_of(flat), place, root)


def chain_down(team: Links, data: memoryview, place: int, root: int) -> None:
    """Each rank passes the segments on to the next."""
    before, after = (root + place - 1) % team.size, (root + place + 1) % team.size
    for start in range(0, len(data), SEGMENT):
        segment = data[start : start + SEGMENT]
        if place:
            team.receive(before, segment, len(segment))
        if place < team.size - 1:
            team.send(after, segment)


def _tree_down(team: Links, data: memoryview, place: int, root: int) -> None:
    """Binomial tree: who has the data gives it to the rank half the remaining range away."""
    step = 1
    while step < team.size:
        step *= 2
    have = place == 0
    while step > 1:
        step //= 2
        if have and place % (2 * step) == 0 and place + step < team.size:
            team.send((root + place + step) % team.size, data)
        elif not have and place % (2 * step) == step:
            team.receive((root + place - step) % team.size, data, len(data))
            have = True


# --- reductions -------------------------------------------------------------------------------------------------


def _small_contributions(team: Links, flat: Flat) -> list[Flat]:
    plan = team.plan((flat.nbytes,) * team.size, flat.dtype)
    plan.mine[:] = flat
    return team.exchange(plan)


def all_reduce(team: Links, call: Call) -> None:
    """The reduction of all ranks' data to all."""
    source, out = flat_of(call.inputs[0]), flat_of(call.outputs[0])
    kernel = kernel_of(call)
    if source.nbytes * (team.size - 1) <= SMALL:
        kernel.combine(_small_contributions(team, source), out, apart=True)
        return
    team.agree()
    bounds = bounds_of(source.size, team.size)
    pieces = [source[bounds[i] : bounds[i + 1]] for i in range(team.size)]
    results = [out[bounds[i] : bounds[i + 1]] for i in range(team.size)]
    scatter_reduced(team, kernel, pieces, results[team.rank])
    gather_all(team, results)


def reduce(team: Links, call: Call) -> None:
    """The reduction of all ranks' data to the root."""
    source = flat_of(call.inputs[0])
    kernel = kernel_of(call)
    if source.nbytes * (team.size - 1) <= SMALL:
        pieces = _small_contributions(team, source)
        if team.rank == call.root:
            kernel.combine(pieces, flat_of(call.outputs[0]), apart=True)
        return
    team.agree()
    reduce_down = _reduce_in_order if team.deterministic else chain_reduce
    reduce_down(team, kernel, source, flat_of(call.outputs[0]) if call.outputs else None, call.root)


def chain_reduce(team: Links, kernel: Folding, source: Flat, out: Flat | None, root: int) -> None:
    """Partial results run from the rank after the root round to the root, segment by segment."""
    place = (team.rank - root - 1) % team.size
    before, after = (team.rank - 1) % team.size, (team.rank + 1) % team.size
    step = max(1, SEGMENT // kernel.acc.itemsize)
    scratch = np.empty(min(step, source.size), kernel.acc)
    for start in range(0, source.size, step):
        own = source[start : start + step]
        if place == 0:
            team.send(after, bytes_of(np.ascontiguousarray(kernel.widen(own), kernel.acc)))
            continue
        partial = scratch[: own.size]
        team.receive(before, bytes_of(partial), partial.nbytes)
        kernel.fold(partial, own)
        if out is None:
            team.send(after, bytes_of(partial))
        else:
            kernel.finish(partial, out[start : start + step], team.size)


def reduce_scatter(team: Links, call: Call) -> None:
    """Each rank gets its own piece of the reduction."""
    out = flat_of(call.outputs[0])
    kernel = kernel_of(call)
    pieces = pieces_of(call.inputs, call.op.name == "reduce_scatter_tensor", team.size)
    total = sum(p.nbytes for p in pieces)
    if total * (team.size - 1) > SMALL:
        team.agree()
        scatter_reduced(team, kernel, pieces, out)
        return
    plan = team.plan((total,) * team.size, out.dtype)
    np.concatenate(pieces, out=plan.mine)
    start = sum(p.size for p in pieces[: team.rank])
    kernel.combine([v[start : start + out.size] for v in team.exchange(plan)], out, apart=True)


def scatter_reduced(team: Links, kernel: Folding, pieces: Sequence[Flat], out: Flat) -> None:
    """Piece i, reduced over all ranks, to rank i. ``pieces`` stay as they are, but for one that ``out`` overlays."""
    if team.deterministic:
        _direct_reduce(team, kernel, pieces, out)
    elif circulant.pays(team, sum(p.size for p in pieces) * kernel.acc.itemsize):
        circulant.reduce_blocks(team, kernel, pieces, out)
    elif team.size == 2:
        _swap_reduce(team, kernel, pieces, out)
    else:
        _ring_reduce(team, kernel, pieces, out)


def _direct_reduce(team: Links, kernel: Folding, pieces: Sequence[Flat], out: Flat) -> None:
    """Every rank gets all contributions to its piece and folds them in rank order, as small reductions are.

    The same bytes as round a ring, in n-1 messages of their own.
    """
    size, rank = team.size, team.rank
    longest = max(p.size for p in pieces)
    step = max(1, min(longest, _IN_ORDER // size // out.itemsize))
    arrived = np.empty((size, step), out.dtype)
    for start in range(0, longest, step):
        mine = pieces[rank][start : start + step]
        for distance in range(1, size):
            to, frm = (rank + distance) % size, (rank - distance) % size
            giving = pieces[to][start : start + step]
            team.duplex(to, bytes_of(giving), frm, bytes_of(arrived[frm, : mine.size]))
        parts = [mine if r == rank else arrived[r, : mine.size] for r in range(size)]
        kernel.combine(parts, out[start : start + step])


def _reduce_in_order(team: Links, kernel: Folding, source: Flat, out: Flat | None, root: int) -> None:
    """As :func:`_direct_reduce`; the root then collects the pieces."""
    size, rank = team.size, team.rank
    step = size * max(
        1, _IN_ORDER // size // source.itemsize
    )  # then the pieces are what _direct_reduce holds
    for start in range(0, source.size, step):
        segment = source[start : start + step]
        bounds = bounds_of(segment.size, size)
        result = np.empty(bounds[rank + 1] - bounds[rank], source.dtype)
        _direct_reduce(team, kernel, [segment[bounds[r] : bounds[r + 1]] for r in range(size)], result)
        if out is None:
            team.send(root, bytes_of(result))
            continue
        for r in range(size):
            target = out[start + bounds[r] : start + bounds[r + 1]]
            if r == rank:
                target[:] = result
            else:
                team.receive(r, bytes_of(target), target.nbytes)


def _swap_reduce(team: Links, kernel: Folding, pieces: Sequence[Flat], out: Flat) -> None:
    """Two ranks: each gives the other its piece and folds what comes into its own."""
    rank = team.rank
    longest = max(p.size for p in pieces)
    step = max(1, SEGMENT // kernel.storage.itemsize)
    room = np.empty(min(step, longest), kernel.storage)
    for start in range(0, longest, step):
        giving, own = pieces[1 - rank][start : start + step], pieces[rank][start : start + step]
        arrived = room[: own.size]
        team.duplex(1 - rank, bytes_of(giving), 1 - rank, bytes_of(arrived))
        kernel.combine((own, arrived) if rank == 0 else (arrived, own), out[start : start + step])


def _ring_reduce(team: Links, kernel: Folding, pieces: Sequence[Flat], out: Flat) -> None:
    """A partial result of piece i starts at rank i+1 and goes round the ring to rank i.

    The first hop carries a rank's own data in the element type; later hops carry sums, in the accumulator's type.
    """
    size, rank = team.size, team.rank
    left, right = (rank - 1) % size, (rank + 1) % size
    wide = kernel.acc.itemsize
    step = max(1, SEGMENT // wide)
    longest = max(p.size for p in pieces)
    width = min(step, longest)
    carry, spare = np.empty(width, kernel.acc), np.empty(width, kernel.acc)
    narrow = None if kernel.storage == kernel.acc else np.empty(width, kernel.storage)
    for start in range(0, longest, step):
        parts = [p[start : start + step] for p in pieces]
        for hop in range(1, size):
            giving, taking = parts[(rank - hop) % size], parts[(rank - hop - 1) % size]
            if hop == 1:
                arrived = (spare if narrow is None else narrow)[: taking.size]
                team.duplex(right, bytes_of(giving), left, bytes_of(arrived))
                sums = _add_first(kernel, arrived, taking, spare)
            else:
                sums = spare[: taking.size]
                team.duplex(right, bytes_of(carry[: giving.size]), left, bytes_of(sums))
                kernel.fold(sums, taking)
            carry, spare = spare, carry
        mine = out[start : start + step]
        kernel.finish(carry[: mine.size], mine, size)


def _add_first(kernel: Folding, arrived: Flat, own: Flat, room: Flat) -> Flat:
    """The sum of two ranks' own data, in ``room``."""
    sums = room[: own.size]
    if kernel.storage == kernel.acc and kernel.plain:
        kernel.ufunc(arrived, own, out=sums)
        return sums
    kernel.begin(sums, arrived)
    kernel.fold(sums, own)
    return sums


# --- gathering ----------------------------------------------------------------------------------------------------


def gather_all(team: Links, pieces: Sequence[Flat]) -> None:
    """Rank i has piece i; afterwards all have all."""
    if circulant.pays(team, sum(p.nbytes for p in pieces)):
        circulant.gather_blocks(team, pieces)
    else:
        _ring_gather(team, pieces)


def _ring_gather(team: Links, pieces: Sequence[Flat]) -> None:
    """Rank i has piece i; afterwards all have all."""
    size, rank = team.size, team.rank
    left, right = (rank - 1) % size, (rank + 1) % size
    views = [bytes_of(p) for p in pieces]
    for hop in range(size - 1):
        team.duplex(right, views[(rank - hop) % size], left, views[(rank - hop - 1) % size])


def all_gather(team: Links, call: Call) -> None:
    """Every rank's data to all; sizes may differ."""
    source = flat_of(call.inputs[0])
    pieces = pieces_of(call.outputs, call.op.name == "all_gather_into_tensor", team.size)
    lengths = tuple(p.nbytes for p in pieces)
    if sum(lengths) <= SMALL:
        plan = team.plan(lengths, source.dtype)
        plan.mine[:] = source
        for piece, block in zip(pieces, team.exchange(plan), strict=True):
            piece[:] = block
        return
    team.agree()
    pieces[team.rank][:] = source
    gather_all(team, pieces)


def gather(team: Links, call: Call, counts: Sequence[int] | None = None) -> bool:
    """Every rank's data to the root; False, and not done, where sizes differ and ``counts`` is not given."""
    source, size = flat_of(call.inputs[0]), team.size
    if counts is None:
        small = source.nbytes * size <= SMALL
        block = source.nbytes if small else 0
        blocks = team.exchange_alike(alike(call), block, lambda b: (b,) * size, source.dtype, (source,))
        if blocks is None:
            return False
        if small:
            for buffer, piece in zip(call.outputs, blocks, strict=False):
                flat_of(buffer)[:] = piece
            return True
    if team.rank != call.root:
        team.send(call.root, bytes_of(source))
        return True
    for i, buffer in enumerate(call.outputs):
        if i == team.rank:
            flat_of(buffer)[:] = source
        else:
            team.receive(i, bytes_of(flat_of(buffer)), buffer.nbytes)
    return True


def scatter(team: Links, call: Call, counts: Sequence[int] | None = None) -> bool:
    """The root's i-th array to rank i; False, and not done, where sizes differ and ``counts`` is not given."""
    out = flat_of(call.outputs[0])
    size, rank, root = team.size, team.rank, call.root
    if counts is None:
        small = out.nbytes * size <= SMALL

        def lengths(b: int) -> tuple[int, ...]:
            return tuple(b * size if r == root else 0 for r in range(size))

        arrays = [flat_of(b) for b in call.inputs]
        blocks = team.exchange_alike(alike(call), out.nbytes if small else 0, lengths, out.dtype, arrays)
        if blocks is None:
            return False
        if small:
            out[:] = blocks[root][rank * out.size : (rank + 1) * out.size]
            return True
    if rank != root:
        team.receive(root, bytes_of(out), out.nbytes)
        return True
    for i, buffer in enumerate(call.inputs):
        if i == rank:
            out[:] = flat_of(buffer)
        else:
            team.send(i, bytes_of(flat_of(buffer)))
    return True


# --- personalised exchange ---------------------------------------------------------------------------------------


def all_to_all(team: Links, call: Call) -> None:
    """The j-th part of rank i becomes the i-th part of rank j."""
    size, rank = team.size, team.rank
    assert call.in_counts is not None
    assert call.out_counts is not None
    single = call.op.name == "all_to_all_single"
    sources = cut(call.inputs, call.in_counts, single)
    targets = cut(call.outputs, call.out_counts, single)
    agree_on_counts(team, call.in_counts, call.out_counts)
    targets[rank][:] = sources[rank]
    for distance in range(1, size):
        to, frm = (rank + distance) % size, (rank - distance) % size
        team.duplex(to, bytes_of(sources[to]), frm, bytes_of(targets[frm]))


def pieces_of(buffers: Sequence[Buffer], single: bool, ranks: int) -> list[Flat]:
    """A list of arrays, or with ``single`` the equal parts of one array."""
    if not single:
        return [flat_of(b) for b in buffers]
    flat = flat_of(buffers[0])
    count = flat.size // ranks
    return [flat[i * count : (i + 1) * count] for i in range(ranks)]


def cut(buffers: Sequence[Buffer], counts: Sequence[int], single: bool) -> list[Flat]:
    """A list of arrays, or with ``single`` the parts of one array that ``counts`` gives."""
    if not single:
        return [flat_of(b) for b in buffers]
    flat = flat_of(buffers[0])
    pieces, start = [], 0
    for count in counts:
        pieces.append(flat[start : start + count])
        start += count
    return pieces


def agree_on_counts(team: Links, in_counts: Sequence[int], out_counts: Sequence[int]) -> Flat:
    """Every rank sees every rank's sizes, so that all find the same fault or none; returns the table of both."""
    size = team.size
    plan = team.plan((16 * size,) * size, np.dtype(np.int64))
    plan.mine[:size] = in_counts
    plan.mine[size:] = out_counts
    table: Flat = np.stack(team.exchange(plan))
    check_counts(team, table)
    return table


def check_counts(team: Links, table: Flat) -> None:
    """Row i of the table is what rank i gives to each, then what it awaits from each."""
    size = team.size
    given, awaited = table[:, :size], table[:, size:].T
    if (given != awaited).any():
        i, j = np.argwhere(given != awaited)[0]
        ranks, call = team.context.ranks, team.call
        assert call is not None
        team.fail(
            CollectiveMismatchError(
                f"{call.op.name} #{call.seq} on group {team.context.name!r}: rank {ranks[i]} sends {given[i, j]}"
                f" elements to rank {ranks[j]}, which has room for {awaited[i, j]}",
                group=team.context.name,
                op=call.op.name,
                seq=call.seq,
            )
        )


def alone(call: Call) -> None:
    """Any collective in a group of one: outputs are copies of inputs, reduced over one rank."""
    if call.reduce is not None:
        kernel_of(call).combine([flat_of(call.inputs[0])], flat_of(call.outputs[0]))
        return
    for source, target in zip(call.inputs, call.outputs, strict=False):
        if source is not target:
            flat_of(target)[:] = flat_of(source)
