"""What crosses between hosts: the nodes of a group, sums of their ranks' contributions, and arrays cut into pieces."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

import numpy as np

from unicoll.backend import Call
from unicoll.kernels import Flat, Kernel

from .board import Board
from .team import Bridge, Team

__all__ = ["Cluster", "Parcels", "Sums", "Whole", "sum_up"]


class Cluster:
    """A group's nodes, as one rank sees them.

    Attributes:
        team, board: this rank's connections and its node's shared memory.
        nodes: the group's ranks, node by node.
        mine: index of this rank's node.
    """

    def __init__(self, team: Team, board: Board, nodes: Sequence[tuple[int, ...]]) -> None:
        self.team = team
        self.board = board
        self.nodes = tuple(nodes)
        self.size = team.size
        self.mine = next(i for i, members in enumerate(self.nodes) if team.rank in members)
        self._bridges: dict[int, Bridge | None] = {}

    @property
    def members(self) -> tuple[int, ...]:
        """Ranks (in the group) of this node."""
        return self.nodes[self.mine]

    def node_of(self, rank: int) -> int:
        """Index of a rank's node."""
        return next(i for i, members in enumerate(self.nodes) if rank in members)

    def leader(self, root: int = -1) -> int:
        """This node's leader, as a rank of the board; ``root`` leads its own node."""
        return self.members.index(root) if root in self.members else 0

    def bridge(self, root: int = -1) -> Bridge | None:
        """The leaders' connections, numbered as the nodes are; None for ranks that are not leaders."""
        root = root if root >= 0 and root not in {m[0] for m in self.nodes} else -1  # the first leads anyway
        if root not in self._bridges:
            leaders = tuple(root if root in members else members[0] for members in self.nodes)
            rank = self.team.rank
            self._bridges[root] = Bridge(self.team, leaders) if rank in leaders else None
        return self._bridges[root]

    def agree(self, call: Call, root: int = -1) -> None:
        """All ranks are in this call once the board's next step is done."""
        self.board.meet(call)
        if (bridge := self.bridge(root)) is not None:
            bridge.agree()

    def meet_alike(self, call: Call, number: int, root: int) -> bool:
        """The board's next step; after one more all know from :meth:`alike` whether all ranks have this number.

        A leader knows at once: whether they have is what it returns there.
        """
        same = self.board.meet_alike(call, number)
        if (bridge := self.bridge(root)) is None:
            return False
        none = (0,) * bridge.size
        same = bridge.exchange_alike(number if same else -1, 0, lambda _: none, np.dtype(np.uint8)) is not None
        self.board.note(same)
        return same

    def alike(self, root: int) -> bool:
        """What this node's leader has found in :meth:`meet_alike`."""
        return bool(self.board.noted(self.leader(root)))


class Sums:
    """A reduction whose contributions are nodes' sums: in the accumulator's type, scaled, not yet divided."""

    plain = True

    def __init__(self, kernel: Kernel, ranks: int) -> None:
        self.storage = self.acc = kernel.acc
        self.ufunc = kernel.ufunc
        self._kernel = kernel
        self._ranks = ranks

    def begin(self, acc: Flat, values: Flat) -> None:
        acc[:] = values

    def widen(self, values: Flat) -> Flat:
        return values

    def fold(self, acc: Flat, values: Flat) -> None:
        self.ufunc(acc, values, out=acc)

    def finish(self, acc: Flat, out: Flat, ranks: int) -> None:
        self._kernel.finish(acc, out, self._ranks)

    def combine(self, pieces: Sequence[Flat], out: Flat, apart: bool = False) -> None:
        acc = pieces[0].copy() if len(pieces) == 1 else self.ufunc(pieces[0], pieces[1])
        for piece in pieces[2:]:
            self.fold(acc, piece)
        self.finish(acc, out, len(pieces))


def sum_up(kernel: Kernel, parts: Sequence[Flat], acc: Flat) -> None:
    """A node's contributions, folded in rank order into an accumulator."""
    if kernel.storage == kernel.acc and kernel.plain and len(parts) > 1:
        kernel.ufunc(parts[0], parts[1], out=acc)
        parts = parts[2:]
    else:
        kernel.begin(acc, parts[0])
        parts = parts[1:]
    for part in parts:
        kernel.fold(acc, part)


class Whole:
    """An array cut into pieces of ``step`` elements."""

    def __init__(self, source: Flat, step: int) -> None:
        self.source = source
        self.starts = range(0, source.size, step)
        self.step = step

    def size(self, start: int) -> int:
        return min(self.step, self.source.size - start)

    def fill(self, start: int, into: Flat) -> None:
        into[:] = self.source[start : start + into.size]


class Parcels:
    """One array for each rank, cut into pieces of ``step`` elements each; a piece holds all ranks', node by node."""

    def __init__(self, arrays: Sequence[Flat], cluster: Cluster, step: int) -> None:
        self.arrays = [arrays[r] for members in cluster.nodes for r in members]
        self._sizes = np.array([array.size for array in self.arrays])
        self._shortest = int(self._sizes.min())
        self.starts = range(0, int(self._sizes.max()), step)
        self._step = step
        self._firsts = [0, *accumulate(map(len, cluster.nodes))]  # where each node's parcels are among all
        first, last = self._firsts[cluster.mine : cluster.mine + 2]
        self._here = slice(first, last + 1)
        self._place = cluster.board.rank
        self._known: dict[int, list[int]] = {}

    def _bounds(self, start: int) -> list[int]:
        """Where each parcel begins in a piece, and where the last ends; worked out once for all full pieces."""
        key = -1 if start + self._step <= self._shortest else start
        bounds = self._known.get(key)
        if bounds is None:
            if len(self._known) >= 8:  # of the others, a few are in use at a time
                self._known.clear()
            lengths = np.clip(self._sizes - start, 0, self._step)
            bounds = self._known[key] = [0, *np.cumsum(lengths).tolist()]
        return bounds

    def size(self, start: int) -> int:
        return self._bounds(start)[-1]

    def fill(self, start: int, into: Flat) -> None:
        for array, (low, high) in zip(self.arrays, pairwise(self._bounds(start)), strict=True):
            into[low:high] = array[start : start + high - low]

    def node_bounds(self, start: int) -> list[int]:
        """Where each node's parcels begin in a piece, and where the last ends."""
        bounds = self._bounds(start)
        return [bounds[i] for i in self._firsts]

    def empty(self, start: int, piece: Flat) -> None:
        """The reverse of :meth:`fill`."""
        for array, (low, high) in zip(self.arrays, pairwise(self._bounds(start)), strict=True):
            array[start : start + high - low] = piece[low:high]

    def sizes_here(self, start: int) -> list[int]:
        """Lengths of the parcels of this node's ranks."""
        return [high - low for low, high in pairwise(self._bounds(start)[self._here])]

    def mine(self, start: int) -> tuple[int, int]:
        """Where this rank's parcel lies within its node's."""
        bounds = self._bounds(start)[self._here]
        return bounds[self._place] - bounds[0], bounds[self._place + 1] - bounds[0]
