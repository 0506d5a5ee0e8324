"""Jobs that torch's groups belong to: joined with the first group, left with the last."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from unicoll.group import ProcessGroup
from unicoll.joining import Membership, enter, join, when_leaving
from unicoll.registry import Choice
from unicoll.types import default_pg_timeout

from .stores import TorchPlace, ToTorch, innermost

__all__ = ["Members", "leave", "members_of"]

_PATIENCE_S = 300.0


class Members:
    """A job, and torch's groups in it.

    Args:
        membership: the job, joined.
    """

    def __init__(self, membership: Membership) -> None:
        self.membership = membership
        self.everybody = tuple(range(membership.job.size))
        self.store: Any = None  # kept: C++ would not keep the Python part of one of ours

    def make(
        self,
        name: str,
        ranks: Sequence[int],
        choices: Sequence[Choice],
        timeout: timedelta | None,
        desc: str,
        options: Any,
        device: Any = None,
        parent: ProcessGroup | None = None,
    ) -> ProcessGroup:
        """A group of some ranks of the job; all its members make it, in the same order as others of its name.

        With a ``parent`` its other members call ``parent.leave_out`` at the same place in their programs.
        """
        here = self.membership
        here.named[name] = number = here.named.get(name, 0) + 1
        ours = ProcessGroup(
            here.job,
            name if number == 1 else f"{name}#{number}",
            tuple(ranks),
            choices,
            (timeout or default_pg_timeout).total_seconds(),
            desc,
            options,
            device,
            parent,
        )
        here.groups.append(ours)
        return ours

    def end(self, ours: ProcessGroup) -> None:
        """A group is over."""
        ours.close()
        groups = self.membership.groups
        if ours in groups:
            groups.remove(ours)
        if not groups:
            self.store = None
            _joined.pop(id(self), None)
            self.membership.close()


_joined: dict[int, Members] = {}


def members_of(
    backend: str | None, store: Any, rank: int, world_size: int, timeout: timedelta | None
) -> Members:
    """Join a job; ``store`` is torch's, where the ranks meet, None leaves it to the launcher.

    Raises:
        DistError: as :func:`unicoll.joining.join`.
    """
    limit = (timeout or default_pg_timeout).total_seconds()
    patience = min(limit, _PATIENCE_S)
    met = innermost(store)
    if isinstance(met, ToTorch) and met.take():
        membership = enter(met.meeting, backend, limit, patience)
    else:
        place = TorchPlace(store) if store is not None else None
        membership = join(backend, None, rank, world_size, place, limit, patience)
    made = Members(membership)
    made.store = met
    _joined[id(made)] = made
    when_leaving(leave, _joined.clear)
    return made


def leave(error: BaseException | None = None) -> None:
    """Leave all jobs, as an interpreter that ends does; ``error`` is what ended it."""
    while _joined:
        _joined.popitem()[1].membership.close(error)
