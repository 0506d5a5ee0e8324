"""What those who are to come to a group are told: its name, members, backends; through the job's signed store."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from .errors import DistArgumentError, OperationTimeoutError, StoreTimeoutError
from .stores import Store

__all__ = ["Invitation"]


@dataclass(frozen=True)
class Invitation:
    """To a group that grows.

    Attributes:
        name: of the larger group.
        ranks: its members' global ranks, in group order.
        before: how many of them are the smaller group's.
        timeout, desc, backends: of both groups.
    """

    name: str
    ranks: tuple[int, ...]
    before: int
    timeout: float
    desc: str
    backends: str

    @property
    def added(self) -> list[int]:
        """The global ranks that come."""
        return list(self.ranks[self.before :])

    def send(self, store: Store) -> None:
        """Invite those who come; each has a row of invitations, which it reads one after another."""
        for rank in self.added:
            number = store.add(f"grow/{rank}", 1)
            store.set(f"grow/{rank}/{number}", json.dumps(asdict(self)))

    @classmethod
    def receive(cls, store: Store, rank: int, number: int, added: list[int], patience: float) -> Invitation:
        """A rank's next invitation.

        Raises:
            OperationTimeoutError: nobody has sent it in ``patience`` seconds.
            DistArgumentError: it is to a group to which others come than this rank believes.
        """
        key = f"grow/{rank}/{number}"
        try:
            store.wait([key], patience)
        except StoreTimeoutError:
            raise OperationTimeoutError(
                f"grow_group: rank {rank} waited {patience:g} s for a group to grow by ranks {added}",
                op="grow_group",
            ) from None
        told = json.loads(store.get(key))
        made = cls(**{**told, "ranks": tuple(told["ranks"])})
        if made.added != added:
            raise DistArgumentError(
                f"grow_group: this rank adds ranks {added}, but the group of ranks {list(made.ranks[: made.before])}"
                f" adds {made.added}"
            )
        return made
