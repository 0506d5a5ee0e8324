"""The record for ranks that are added to a group: name, members, backends; through the job's signed store."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from unicoll.errors import DistArgumentError, OperationTimeoutError, StoreTimeoutError
from unicoll.net.stores import Store


@dataclass(frozen=True)
class GrowthRecord:
    """The larger group, as the ranks that join it need to know it.

    Attributes:
        name: of the larger group.
        ranks: its members' global ranks, in group order.
        before: number of them that are members of the smaller group.
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
        """The global ranks that join."""
        return list(self.ranks[self.before :])

    def send(self, store: Store) -> None:
        """Write the record for each joining rank; a rank reads its records in order.

        Both counters are in the store, not in the processes: they begin anew if another store replaces this one.
        """
        for rank in self.added:
            number = store.add(f"grow/{rank}", 1)
            store.set(f"grow/{rank}/{number}", json.dumps(asdict(self)))

    @classmethod
    def receive(cls, store: Store, rank: int, added: list[int], timeout: float) -> GrowthRecord:
        """The next record of a rank, which no other call returns.

        Raises:
            OperationTimeoutError: no record arrived in ``timeout`` seconds.
            DistArgumentError: the record adds other ranks than this rank passed.
        """
        received = f"grow/{rank}/received"
        key = f"grow/{rank}/{store.add(received, 0) + 1}"
        try:
            store.wait([key], timeout)
        except StoreTimeoutError:
            raise OperationTimeoutError(
                f"grow_group: timed out on rank {rank} after {timeout:g} s: no group was grown by"
                f" ranks {added}",
                op="grow_group",
            ) from None
        fields = json.loads(store.get(key))
        store.add(received, 1)
        made = cls(**{**fields, "ranks": tuple(fields["ranks"])})
        if made.added != added:
            raise DistArgumentError(
                f"grow_group: this rank adds ranks {added}, but the group of ranks {list(made.ranks[: made.before])}"
                f" adds {made.added}"
            )
        return made
