"""Ranks as arguments of the public functions: global ranks and ranks in a group, of roots and
peers."""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any, NoReturn

from unicoll.errors import DistArgumentError, DistTypeError

if TYPE_CHECKING:
    from unicoll.group.process_group import ProcessGroup


def rank_in_group(
    pg: ProcessGroup, op: str, name: str, rank: int | None, group_rank: int | None
) -> int:
    """The rank in ``pg`` that a pair of arguments such as ``src`` and ``group_src`` means.

    Raises:
        DistArgumentError: both or neither are given, or the rank is not in the group.
        DistTypeError: it is not an integer.
    """
    if rank is None and group_rank is None:
        refuse(pg, op, f"give {name} (a global rank) or group_{name} (a rank in the group)")
    if rank is not None and group_rank is not None:
        refuse(pg, op, f"give {name} or group_{name}, not both ({rank} and {group_rank})")
    label = name if group_rank is None else f"group_{name}"
    argument: Any = rank if group_rank is None else group_rank
    try:
        given = operator.index(argument)
    except TypeError:
        refuse(pg, op, f"{label} must be an integer, got {argument!r}", DistTypeError)
    ranks = pg.ranks
    if group_rank is None and given in ranks:
        return ranks.index(given)
    if group_rank is not None and 0 <= given < len(ranks):
        return given
    few = len(ranks) <= 16
    members = f"global ranks {', '.join(map(str, ranks))}" if few else f"{len(ranks)} ranks"
    refuse(pg, op, f"{label}={given} is not in group {pg.group_name!r} ({members})")


def refuse(
    pg: ProcessGroup, op: str, why: str, kind: type[DistArgumentError] = DistArgumentError
) -> NoReturn:
    """Raise an error that names operation and group."""
    raise kind(f"{op}: {why}", group=pg.group_name, op=op)


def root_or_zero(rank: int | None, group_rank: int | None) -> tuple[int | None, int | None]:
    """torch.distributed's default root: global rank 0."""
    return (0, None) if rank is None and group_rank is None else (rank, group_rank)
