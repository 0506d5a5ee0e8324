"""How a group's collectives move data: over sockets, through shared memory, or both by host."""

from __future__ import annotations

import logging
from collections.abc import Callable
from types import ModuleType
from typing import Any

from unicoll.backend import Call

from . import algorithms, hierarchy, shared
from .board import SLOT, Board
from .cluster import Cluster
from .nodes import Nodes, settle
from .team import Team

__all__ = ["Way", "find_way"]

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


def _table(module: ModuleType) -> dict[str, Callable[[Any, Call], None]]:
    return {operation: getattr(module, name) for operation, name in _OPERATIONS.items()}


class Way:
    """One way of moving a group's data: ``table[operation](where, call)`` does a collective.

    Args:
        module: of the algorithms.
        where: what they work on.
        words: the way and the reason for it, for :func:`unicoll.explain`.
        staging: bytes of memory that this rank holds for it, whatever the size of the arrays.
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
        return Way(shared, board, f"over shared memory: {nodes.why}", 2 * SLOT, board)
    if board is not None and not team.deterministic:
        words = f"over shared memory within {_hosts(nodes)}, sockets between them: {nodes.why}"
        where = Cluster(team, board, nodes.members)
        return Way(hierarchy, where, words, 2 * SLOT + 2 * algorithms.SEGMENT, board)
    why = nodes.why
    if board is not None:
        board.close()
        why = "deterministic between hosts"
    way = Way(algorithms, team, f"over sockets: {why}", 2 * algorithms.SEGMENT)
    logging.getLogger("unicoll").info("group %r %s", team.context.name, way.words)
    return way


def _hosts(nodes: Nodes) -> str:
    ranks = [len(members) for members in nodes.members]
    shown = ", ".join(map(str, ranks[:16])) + (", ..." if len(ranks) > 16 else "")
    return f"{len(ranks)} hosts (ranks: {shown})"
