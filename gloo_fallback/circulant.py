"""Reducing and gathering in ceil(log2 n) rounds for any number of ranks, with no more bytes than a ring.

In each round a rank sends about half of the blocks that it still has to the rank ``s`` ahead of it, where ``s`` runs
through n/2, n/4, ... rounded up; going backwards through the rounds gathers. See Jesper Larsson Träff, "Optimal,
Non-pipelined Reduce-scatter and Allreduce Algorithms" (2024), and for the gathering half Bruck et al. (1997). A ring
takes n-1 rounds, which only pays where the blocks are large.

Block i is what rank i gets of a reduction, or has to give. Blocks lie in a working array in the order rank, rank+1, ...
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np

from unicoll.kernels import Flat

from .links import Folding, Links, bytes_of

__all__ = ["BLOCK", "gather_blocks", "pays", "reduce_blocks"]

BLOCK = 1 << 16
"""Bytes of a block from which a ring is as good."""
LIMIT = 1 << 22
"""Bytes that are worked on at a time, at most: the working array is as large."""


def pays(team: Links, nbytes: int) -> bool:
    """Whether this is the way for so many bytes in all."""
    return team.size > 2 and nbytes <= min(LIMIT, team.size * BLOCK)


def _rounds(size: int) -> list[tuple[int, int]]:
    """(s, blocks before the round) for each round."""
    found = []
    while size > 1:
        found.append(((size + 1) // 2, size))
        size = (size + 1) // 2
    return found


def _turned(team: Links, pieces: Sequence[Flat]) -> tuple[list[Flat], list[int]]:
    """The pieces from this rank's on, and where each begins in the working array."""
    order = [pieces[(team.rank + i) % team.size] for i in range(team.size)]
    return order, [0, *accumulate(p.size for p in order)]


def reduce_blocks(team: Links, kernel: Folding, pieces: Sequence[Flat], out: Flat) -> None:
    """Piece i, reduced over all ranks, to rank i; ``out`` may overlay a piece."""
    order, starts = _turned(team, pieces)
    work = np.empty(starts[-1], kernel.acc)
    for piece, start in zip(order, starts, strict=False):
        kernel.begin(work[start : start + piece.size], piece)
    arrived = np.empty(max(starts[before - s] for s, before in _rounds(team.size)), kernel.acc)
    for s, before in _rounds(team.size):
        giving, taking = work[starts[s] : starts[before]], arrived[: starts[before - s]]
        to, frm = (team.rank + s) % team.size, (team.rank - s) % team.size
        team.duplex(to, bytes_of(giving), frm, bytes_of(taking))
        kept = work[: taking.size]
        kernel.ufunc(kept, taking, out=kept)
    kernel.finish(work[: starts[1]], out, team.size)


def gather_blocks(team: Links, pieces: Sequence[Flat]) -> None:
    """Rank i has piece i; afterwards all have all."""
    order, starts = _turned(team, pieces)
    work = np.empty(starts[-1], pieces[0].dtype)
    work[: starts[1]] = order[0]
    for s, after in reversed(_rounds(team.size)):
        giving, taking = work[: starts[after - s]], work[starts[s] : starts[after]]
        to, frm = (team.rank - s) % team.size, (team.rank + s) % team.size
        team.duplex(to, bytes_of(giving), frm, bytes_of(taking))
    for piece, start in zip(order[1:], starts[1:], strict=False):
        piece[:] = work[start : start + piece.size]
