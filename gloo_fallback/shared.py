"""The collectives on a :class:`~gloo_fallback.board.Board`: through shared memory, for ranks of one host.

Each works in pieces that fit the slots, so the memory needed does not grow with the arrays. Reductions fold the
ranks' contributions in rank order, so the result does not depend on who computes it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from unicoll.backend import Call
from unicoll.exchanged import alike
from unicoll.kernels import Flat, Kernel

from .algorithms import bounds_of, check_counts, cut, flat_of, kernel_of, pieces_of
from .board import SLOT, Board


def barrier(board: Board, call: Call) -> None:
    """Nobody leaves before all have come."""
    board.meet(call)


def broadcast(board: Board, call: Call) -> None:
    """The root's data to all, a slot at a time."""
    flat = flat_of(call.inputs[0])
    first: Call | None = call
    step = SLOT // flat.itemsize
    for start in range(0, max(flat.size, 1), step):
        piece = flat[start : start + step]
        shared = board.slot(call.root, 0, piece.size, flat.dtype)
        if board.rank == call.root:
            shared[:] = piece
        board.meet(first)
        if board.rank != call.root:
            piece[:] = shared
        first = None


# --- reductions -----------------------------------------------------------------------------------------------------

WHOLE = 1 << 16
"""Arrays up to this size are reduced as a whole by every rank: one step, no second exchange."""
_REMEMBERED = 512


def all_reduce(board: Board, call: Call) -> None:
    """The reduction of all ranks' data to all."""
    given, reduction = call.inputs[0], call.reduce
    assert reduction is not None
    # the way of small messages: all that depends on the kind of call alone is looked up at once
    key = (board.step & 1, given.dtype, given.count, reduction.key)
    plan = board.plans.get(key) or _plan(board, call, key)
    source, out = flat_of(given), flat_of(call.outputs[0])
    if plan.mine is not None:
        plan.mine[:] = source
        board.meet(call)
        plan.kernel.combine(plan.contributions, out, True)
        return
    _reduce_in_parts(board, call, plan.kernel, source, out)


class _Plan(NamedTuple):
    """What every all_reduce of one kind needs: ``mine`` is None where it goes piece by piece."""

    kernel: Kernel
    mine: Any
    contributions: Any


def _plan(board: Board, call: Call, key: Any) -> _Plan:
    source, kernel = flat_of(call.inputs[0]), kernel_of(call)
    if source.nbytes * (board.size - 1) <= WHOLE:
        found = _Plan(kernel, *board.rows(source.size, source.dtype))
    else:
        found = _Plan(kernel, None, None)
    if len(board.plans) >= _REMEMBERED:
        board.plans.clear()
    board.plans[key] = found
    return found


def reduce(board: Board, call: Call) -> None:
    """The reduction of all ranks' data to the root."""
    source, kernel = flat_of(call.inputs[0]), kernel_of(call)
    out = flat_of(call.outputs[0]) if call.outputs else None
    if source.nbytes * (board.size - 1) <= WHOLE:
        mine, contributions = board.rows(source.size, source.dtype)
        mine[:] = source
        board.meet(call)
        if out is not None:
            kernel.combine(contributions, out, apart=True)
        return
    _reduce_in_parts(board, call, kernel, source, out)


def _reduce_in_parts(board: Board, call: Call, kernel: Kernel, source: Flat, out: Flat | None) -> None:
    """Each rank reduces its part of every piece, straight out of the others' slots, and publishes the result.

    The first half of a slot carries a rank's contribution to one piece, the second half its result of the piece
    before: both travel in one step.
    """
    half = SLOT // 2
    step = half // source.itemsize
    first: Call | None = call
    before: tuple[int, list[int]] | None = None
    rank, size, dtype = board.rank, board.size, source.dtype
    for start in range(0, source.size + step, step):
        piece = source[start : start + step]
        bounds = bounds_of(piece.size, size)
        mine, theirs = bounds[rank], bounds[rank + 1]
        if piece.size:
            given = board.slot(rank, 0, piece.size, dtype)
            given[:mine] = piece[:mine]
            given[theirs:] = piece[theirs:]
        board.meet(first)
        first = None
        if before is not None and out is not None:
            _take_results(board, out, *before, half)
        if not piece.size:
            return
        parts = [board.slot(r, 0, piece.size, dtype, 0)[mine:theirs] for r in range(size)]
        parts[rank] = piece[mine:theirs]
        result = board.slot(rank, half, theirs - mine, dtype)
        if theirs > mine:
            kernel.combine(parts, result, apart=True)
        before = (start, bounds)


def _take_results(board: Board, out: Flat, start: int, bounds: list[int], half: int) -> None:
    for r in range(board.size):
        low, high = bounds[r], bounds[r + 1]
        out[start + low : start + high] = board.slot(r, half, high - low, out.dtype, 0)


def reduce_scatter(board: Board, call: Call) -> None:
    """Each rank gets its own piece of the reduction."""
    out, kernel = flat_of(call.outputs[0]), kernel_of(call)
    pieces = pieces_of(call.inputs, call.op.name == "reduce_scatter_tensor", board.size)
    size, rank, dtype = board.size, board.rank, out.dtype
    lane = _lane(board, dtype)
    step = lane // dtype.itemsize
    first: Call | None = call
    for start in range(0, max(1, *(p.size for p in pieces)), step):
        for r in range(size):
            if r != rank:
                part = pieces[r][start : start + step]
                board.slot(rank, r * lane, part.size, dtype)[:] = part
        board.meet(first)
        first = None
        mine = pieces[rank][start : start + step]
        if mine.size:
            parts = [board.slot(r, rank * lane, mine.size, dtype, 0) for r in range(size)]
            parts[rank] = mine
            kernel.combine(parts, out[start : start + mine.size])


def _lane(board: Board, dtype: np.dtype[Any]) -> int:
    """Bytes of a slot for each rank, where a slot carries something different for each."""
    return SLOT // board.size // dtype.itemsize * dtype.itemsize


# --- moving ---------------------------------------------------------------------------------------------------------


def all_gather(board: Board, call: Call) -> None:
    """Every rank's data to all; sizes may differ."""
    source = flat_of(call.inputs[0])
    targets = pieces_of(call.outputs, call.op.name == "all_gather_into_tensor", board.size)
    _spread(board, call, source, targets, max(t.size for t in targets))


def gather(board: Board, call: Call, counts: Sequence[int] | None = None) -> bool:
    """Every rank's data to the root; False, and not done, where sizes differ and ``counts`` is not given."""
    source, targets = flat_of(call.inputs[0]), [flat_of(b) for b in call.outputs]
    if counts is not None:
        return _spread(board, None, source, targets, max(counts))
    return _spread(board, call, source, targets, source.size, alike(call))


def _spread(
    board: Board,
    call: Call | None,
    source: Flat,
    targets: Sequence[Flat],
    longest: int,
    number: int | None = None,
) -> bool:
    """Publish ``source`` a slot at a time; fill ``targets`` (if any) with what all ranks publish.

    With a ``number`` only where all ranks have the same; returns whether they have.
    """
    dtype, rank = source.dtype, board.rank
    step = SLOT // dtype.itemsize
    first = call
    for start in range(0, max(longest, 1), step):
        piece = source[start : start + step]
        board.slot(rank, 0, piece.size, dtype)[:] = piece
        if number is None or first is None:
            board.meet(first)
        elif not board.meet_alike(first, number):
            return False
        first = None
        for r, target in enumerate(targets):
            part = target[start : start + step]
            part[:] = piece if r == rank else board.slot(r, 0, part.size, dtype, 0)
    return True


def scatter(board: Board, call: Call, counts: Sequence[int] | None = None) -> bool:
    """The root's i-th array to rank i; False, and not done, where sizes differ and ``counts`` is not given."""
    out = flat_of(call.outputs[0])
    dtype, rank, root = out.dtype, board.rank, call.root
    sources = [flat_of(b) for b in call.inputs]
    lane = _lane(board, dtype)
    step = lane // dtype.itemsize
    longest = out.size if counts is None else max(counts)
    for start in range(0, max(longest, 1), step):
        for r, source in enumerate(sources):
            part = source[start : start + step]
            board.slot(rank, r * lane, part.size, dtype)[:] = part
        if start or counts is not None:
            board.meet()
        elif not board.meet_alike(call, alike(call)):
            return False
        mine = out[start : start + step]
        mine[:] = board.slot(root, rank * lane, mine.size, dtype, 0)
    return True


def all_to_all(board: Board, call: Call) -> None:
    """The j-th part of rank i becomes the i-th part of rank j."""
    assert call.in_counts is not None
    assert call.out_counts is not None
    single = call.op.name == "all_to_all_single"
    sources = cut(call.inputs, call.in_counts, single)
    targets = cut(call.outputs, call.out_counts, single)
    size, rank = board.size, board.rank
    parts = _Parts(board, sources, targets, head=-(-16 * size // 64) * 64)
    board.slot(rank, 0, 2 * size, _COUNTS)[:] = (*call.in_counts, *call.out_counts)
    parts.give(0)
    board.meet(call)
    longest = _agree_on_counts(board)
    targets[rank][:] = sources[rank]
    parts.take(0)
    parts.exchange(parts.step, longest)


_COUNTS = np.dtype(np.int64)


def _agree_on_counts(board: Board) -> int:
    """All ranks compare all ranks' sizes, found before each one's parts; returns the largest."""
    size = board.size
    raw = b"".join([board.slot(r, 0, 2 * size, _COUNTS, 0).tobytes() for r in range(size)])
    good, longest = board.counts
    if raw != good:
        table = np.frombuffer(raw, _COUNTS).reshape(size, 2 * size)
        check_counts(board.team, table)
        longest = int(table.max())
        board.counts = raw, longest
    return longest


def exchange_parts(board: Board, sources: Sequence[Flat], targets: Sequence[Flat], longest: int) -> None:
    """What each has for each other; ``longest`` is the largest of all ranks' parts."""
    _Parts(board, sources, targets).exchange(0, longest)


class _Parts:
    """Something different for each rank: a lane of a slot for each, behind ``head`` bytes."""

    def __init__(self, board: Board, sources: Sequence[Flat], targets: Sequence[Flat], head: int = 0) -> None:
        self._board, self._sources, self._targets, self._head = board, sources, targets, head
        self._dtype = sources[0].dtype
        self.step = (SLOT - head) // board.size // self._dtype.itemsize
        self._lane = self.step * self._dtype.itemsize

    def give(self, start: int) -> None:
        """``step`` elements from ``start`` on of what is for others, into my slot for the next step."""
        board = self._board
        for r, source in enumerate(self._sources):
            if r != board.rank and source.size > start:
                part = source[start : start + self.step]
                board.slot(board.rank, self._head + r * self._lane, part.size, self._dtype)[:] = part

    def take(self, start: int) -> None:
        """What the others gave me in the last step."""
        board = self._board
        for r, target in enumerate(self._targets):
            if r != board.rank and target.size > start:
                part = target[start : start + self.step]
                part[:] = board.slot(r, self._head + board.rank * self._lane, part.size, self._dtype, 0)

    def exchange(self, start: int, longest: int) -> None:
        """Everything from ``start`` on."""
        for at in range(start, longest, self.step):
            self.give(at)
            self._board.meet()
            self.take(at)
