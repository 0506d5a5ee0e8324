"""Which ranks of a group share memory: the nodes of the group, equal on all ranks, found once at its first collective.

Each rank says on which host it is and what it wants (one exchange over sockets); all draw the same plan from that.
The first rank of each node makes the node's segment, the others map it, and a second exchange tells all who could.
A node where one could not falls apart into single ranks.
"""

from __future__ import annotations

import socket
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from unicoll import settings
from unicoll.backend import Context
from unicoll.errors import BackendUnavailableError, CollectiveMismatchError, DistNetworkError

from .board import Board, SemaphoreBoard, size_of
from .segment import Segment, boot_id, can_share, create, keeps_order, open_published, private
from .team import Team

__all__ = ["Ballot", "Nodes", "Wish", "arrange", "settle", "wish"]

_PRETENDED = 2
"""Ranks of each pretended host under UNICOLL_TRANSPORT=hierarchical."""


class Wish(IntEnum):
    """What ``UNICOLL_TRANSPORT`` says; empty is AUTO."""

    AUTO = 0
    TCP = 1
    SHM = 2
    HIERARCHICAL = 3


def wish(environ: dict[str, str] | None = None) -> Wish:
    """This process's wish.

    Raises:
        DistArgumentError: there is no such transport.
    """
    return Wish[settings.choice("UNICOLL_TRANSPORT", environ).upper()]


@dataclass(frozen=True)
class Ballot:
    """What a rank says of itself.

    Attributes:
        host: its host and boot, in a number.
        wish: what the user asked for.
        able: whether its system has what shared memory needs.
        ordered: whether its processor keeps stores in order.
        deterministic: an option that all must agree on.
    """

    host: int
    wish: Wish = Wish.AUTO
    able: bool = True
    ordered: bool = True
    deterministic: bool = False


@dataclass(frozen=True)
class Nodes:
    """The plan: ranks of the group by node, in order of their first ranks, and why it is so."""

    members: tuple[tuple[int, ...], ...]
    why: str

    @property
    def alone(self) -> bool:
        """Whether no two ranks share memory."""
        return all(len(m) == 1 for m in self.members)

    def of(self, rank: int) -> tuple[int, ...]:
        """The node of a rank."""
        return next(m for m in self.members if rank in m)


def arrange(ballots: Sequence[Ballot], names: Sequence[str]) -> Nodes:
    """The plan that all ranks draw from all ballots; ``names`` are the ranks in words."""
    apart = tuple((r,) for r in range(len(ballots)))
    for ballot, name in zip(ballots, names, strict=True):
        if ballot.wish is Wish.TCP:
            return Nodes(apart, f"UNICOLL_TRANSPORT=tcp on {name}")
        if not ballot.able:
            return Nodes(apart, f"{name} cannot share memory")
    pretend = any(b.wish is Wish.HIERARCHICAL for b in ballots)
    found: dict[tuple[int, int], list[int]] = {}
    for rank, ballot in enumerate(ballots):
        found.setdefault((ballot.host, rank // _PRETENDED if pretend else 0), []).append(rank)
    members = tuple(tuple(m) for m in found.values())
    if pretend:
        return Nodes(members, "UNICOLL_TRANSPORT=hierarchical: every two ranks count as a host")
    hosts = len(members)
    return Nodes(members, "all ranks are on one host" if hosts == 1 else f"the ranks are on {hosts} hosts")


def without(nodes: Nodes, unable: Sequence[int], name: str) -> Nodes:
    """The plan when some ranks could not map their node's memory; ``name`` is the first of them in words."""
    members: list[tuple[int, ...]] = []
    for m in nodes.members:
        members += [(r,) for r in m] if set(m) & set(unable) else [m]
    return Nodes(tuple(sorted(members)), f"{name} could not map the shared memory of its host")


def settle(team: Team, spins: int) -> tuple[Nodes, Board | None]:
    """Find the nodes of a group, and this rank's board where it shares memory.

    Raises:
        BackendUnavailableError: ``UNICOLL_TRANSPORT=shm``, and not all ranks share memory.
        CollectiveMismatchError: the ranks were given different options.
    """
    context = team.context
    names = [context.who(r) for r in range(team.size)]
    ballots = _vote(team)
    if len({b.deterministic for b in ballots}) > 1:
        team.fail(_options_differ(context, ballots))
    nodes = arrange(ballots, names)
    shared = None
    try:
        if not nodes.alone:
            mine = nodes.of(team.rank)
            shared = _segment(team, mine)
            unable = _who_could_not(team, shared is not None or len(mine) == 1)
            if unable:
                nodes = without(nodes, unable, names[unable[0]])
        if len(nodes.members) > 1 and any(b.wish is Wish.SHM for b in ballots):
            reason = f"group {context.name!r}: UNICOLL_TRANSPORT=shm, but {nodes.why}"
            team.fail(BackendUnavailableError(reason, group=context.name))
        if nodes.alone:
            return nodes, None
        kind = Board if all(b.ordered for b in ballots) else SemaphoreBoard
        return nodes, _board(team, nodes.of(team.rank), kind, shared, spins)
    finally:
        if shared is not None:
            shared.close_descriptor()


def _vote(team: Team) -> list[Ballot]:
    """Every rank's ballot, through sockets."""
    try:
        wanted = wish()
    except BackendUnavailableError as e:
        team.fail(e)
    host = zlib.crc32(socket.gethostname().encode()) << 32 | zlib.crc32(boot_id().encode())
    plan = team.plan((5 * 8,) * team.size, np.dtype(np.uint64))
    plan.mine[:] = (host, wanted, can_share() is None, keeps_order(), team.deterministic)
    found = [tuple(map(int, vote)) for vote in team.exchange(plan)]
    try:
        return [
            Ballot(h, Wish(w), bool(able), bool(ordered), bool(fixed)) for h, w, able, ordered, fixed in found
        ]
    except ValueError:
        name = team.context.name
        team.fail(DistNetworkError(f"a member of group {name!r} sent what is no ballot", group=name))


def _segment(team: Team, members: tuple[int, ...]) -> Segment | None:
    """The memory of this rank's node; None where it has none to itself, or it cannot be had."""
    if len(members) == 1:
        return None
    ranks = len(members)
    if team.rank == members[0]:
        return create(
            team.context, str(members[0]), size_of(ranks), lambda made: SemaphoreBoard.prepare(made, ranks)
        )
    return open_published(team.context, str(members[0]), team.tick)


def _board(
    team: Team, members: tuple[int, ...], kind: type[Board], shared: Segment | None, spins: int
) -> Board:
    """This rank's board; a single rank between nodes has one to itself."""
    if len(members) == 1:
        return Board(team, members, private(size_of(1)), spins)
    assert shared is not None
    return kind(team, members, shared, spins)


def _who_could_not(team: Team, could: bool) -> list[int]:
    plan = team.plan((1,) * team.size, np.dtype(np.uint8))
    plan.mine[0] = could
    return [r for r, vote in enumerate(team.exchange(plan)) if not vote[0]]


def _options_differ(context: Context, ballots: Sequence[Ballot]) -> CollectiveMismatchError:
    yes = [context.ranks[r] for r, b in enumerate(ballots) if b.deterministic]
    return CollectiveMismatchError(
        f"the ranks of group {context.name!r} were given different options: deterministic on ranks"
        f" {', '.join(map(str, yes))} only",
        group=context.name,
    )
