"""The ranks of a process group and their numbers in the job."""

from __future__ import annotations

from unicoll.backend.contract import Job
from unicoll.errors import DistArgumentError
from unicoll.group.arguments import as_integer


class GroupMembers:
    """The name and the ranks of one group.

    Attributes:
        job: shared by all groups of the job.
        name: of the group, unique in the job.
        desc: the user's description.
        ranks: global ranks in group order.
        rank: this process's rank in the group.
        size: number of ranks.
        children: number of groups split, shrunk or grown from this one so far; numbers their names.
    """

    __slots__ = ("children", "desc", "job", "name", "rank", "ranks", "size")

    def __init__(self, job: Job, name: str, ranks: tuple[int, ...], desc: str = "") -> None:
        self.job = job
        self.name = name
        self.desc = desc or "undefined"
        self.ranks = ranks
        self.rank = ranks.index(job.rank)
        self.size = len(ranks)
        self.children = 0

    def global_rank(self, group_rank: int) -> int:
        """The global rank of a member; DistArgumentError if there is none of that rank."""
        group_rank = as_integer("global_rank: group_rank", group_rank)
        if not 0 <= group_rank < self.size:
            raise DistArgumentError(f"group rank {group_rank} is not in group {self.name!r} of {self.size}")
        return self.ranks[group_rank]

    def group_rank(self, global_rank: int) -> int:
        """The rank in the group of a global rank; DistArgumentError if it is not a member."""
        global_rank = as_integer("group_rank: global_rank", global_rank)
        try:
            return self.ranks.index(global_rank)
        except ValueError:
            raise DistArgumentError(
                f"rank {global_rank} is not in group {self.name!r} {list(self.ranks)}"
            ) from None
