"""How a group's collectives move data: over sockets, through shared memory, or both by host."""

from __future__ import annotations

import logging
from collections.abc import Callable
from types import ModuleType
from typing import Any

from . import algorithms, circulant, hierarchy, shared
from .board import SLOT, Board, size_of
from .cluster import Cluster
from .links import HEADER_SIZE
from .nodes import Nodes, settle
from .team import Team

__all__ = ["Way", "between_hosts", "find_way", "over_sockets"]

_OPERATIONS = {
    "barrier": "barrier",
    "broadcast": "broadcast",
    "all_reduce": "all_reduce",
    "reduce": "reduce",
    "all_gather": "all_gather",
    "all_gather_into_tensor": "all_gather",
    "gather": "gather",
    "scatter": "scatter",
    "reduce_scatter": "reduce_scatter",
    "reduce_scatter_tensor": "reduce_scatter",
    "all_to_all": "all_to_all",
    "all_to_all_single": "all_to_all",
}
"""Operation name to the function that does it, in each of the modules of algorithms."""


def _table(module: ModuleType) -> dict[str, Callable[..., bool | None]]:
    return {operation: getattr(module, name) for operation, name in _OPERATIONS.items()}


class Way:
    """One way of moving a group's data: ``table[operation](where, call)`` does a collective.

    Where the sizes of a gather or scatter differ it is not done, and False on all ranks, unless ``counts`` is given.

    Args:
        module: of the algorithms.
        where: what they work on.
        words: the way and the reason for it, for :func:`unicoll.explain`.
        staging: bytes of memory beside the arrays that this rank takes at most, whatever the size of the arrays.
            An all_to_all's table of sizes is not in it: two of 16 n^2 bytes for n ranks, over sockets or by host.
            Nor is what Python keeps of its own, such as plans of exchanges, nor the rooms that a thread's
            conversions of half types work in.
        board: the shared memory, if there is any.
    """

    def __init__(
        self, module: ModuleType, where: Any, words: str, staging: int, board: Board | None = None
    ) -> None:
        self.words = words
        self.staging = staging
        self.board = board
        self.where = where
        self.table = _table(module)

    def close(self) -> None:
        """Give the shared memory back; idempotent."""
        if self.board is not None:
            self.board.close()


def find_way(team: Team, spins: int) -> Way:
    """Settle with the other ranks how the group's data moves; its first collective does this."""
    nodes, board = settle(team, spins)
    if board is not None and len(nodes.members) == 1:
        staging = -(-size_of(board.size) // board.size)
        return Way(shared, board, f"over shared memory: {nodes.why}", staging, board)
    if board is not None and not team.deterministic:
        words = f"over shared memory within {_hosts(nodes)}, sockets between them: {nodes.why}"
        where = Cluster(team, board, nodes.members)
        staging = -(-size_of(board.size) // board.size) + between_hosts()
        return Way(hierarchy, where, words, staging, board)
    why = nodes.why
    if board is not None:
        board.close()
        why = "deterministic between hosts"
    way = Way(algorithms, team, f"over sockets: {why}", over_sockets(team.size, team.deterministic))
    logging.getLogger("unicoll").info("group %r %s", team.context.name, way.words)
    return way


def over_sockets(size: int, deterministic: bool) -> int:
    """Bytes that a rank of so many takes at most for a collective over sockets.

    An exchange's scratch memory stays; beside it there is what one algorithm works in. That is for a ring two
    segments of sums, and with half types what comes first; round the circulant graph the working array and what
    arrives, which is half as much where blocks are equal, and up to as much where they are not; of a deterministic
    reduction all ranks' contributions to a part, and the part.
    """
    ring = algorithms.SEGMENT * 5 // 2
    direct = algorithms._IN_ORDER + algorithms._IN_ORDER // size
    rounds = min(circulant.LIMIT, size * circulant.BLOCK) if size > 2 else 0
    work = max(direct, rounds) if deterministic else max(ring, 2 * rounds)
    return _scratch(algorithms.SMALL * size // (size - 1)) + work


def between_hosts() -> int:
    """Bytes that a leader takes at most to cross to other hosts, beside its slots.

    Its node's sums, which are up to two thirds of a slot (half types: a piece and its sums fill one), and twice as
    much to work in, more than two segments of a ring; an exchange's scratch memory. Every rank can be a leader. A
    small reduce to a root that is not the first of its host has scratch memory of its own, for each such root.
    """
    return 3 * (SLOT * 2 // 3) + _scratch(algorithms.SMALL)


def _scratch(contributions: int) -> int:
    """Scratch memory of exchanges: it doubles where it does not do."""
    return 2 * (HEADER_SIZE + contributions)


def _hosts(nodes: Nodes) -> str:
    ranks = [len(members) for members in nodes.members]
    shown = ", ".join(map(str, ranks[:16])) + (", ..." if len(ranks) > 16 else "")
    return f"{len(ranks)} hosts (ranks: {shown})"
