"""Making the communicators of a group: ncclCommInitRankConfig and -Scalable, ncclCommSplit, -Shrink and -Grow."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from nccl_comm.communicators.communicator import Communicator
from nccl_comm.communicators.unique_id import Capability, exchange_ids
from nccl_comm.library.interface import Config, HandleSlot, Nccl
from unicoll.arrays.cuda import Cuda
from unicoll.backend import Call, Context


@dataclass(frozen=True)
class CommunicatorFactory:
    """Makes the communicator of one group; the group's device is current.

    Attributes:
        context: the group.
        nccl, cuda: the libraries.
        config: NCCL's options.
        check: called while waiting; raises the error that has ended the group.
    """

    context: Context
    nccl: Nccl
    cuda: Cuda
    config: Config
    check: Callable[[Call | None], None]

    def init(self, device: int, deadline: float) -> Communicator:
        """A communicator without a parent; all members call this."""
        context = self.context
        ids, capabilities = exchange_ids(context, device, self.nccl, self.cuda, deadline)
        function = "ncclCommInitRankConfig" if len(ids) == 1 else "ncclCommInitRankScalable"
        begin = partial(self.nccl.comm_init, context.size, ids, context.rank, self.config)
        return self._make(device, begin, function, deadline, capabilities)

    def split(self, parent: Communicator, deadline: float) -> Communicator:
        """A communicator of some members of the parent, which is idle; the others call :meth:`leave_out`."""
        context = self.context
        made = self._split(parent, min(context.ranks), context.rank, deadline)
        kept = self._capabilities(parent)
        return self._make(parent.device, lambda slot: made, "ncclCommSplit", deadline, kept)

    def leave_out(self, parent: Communicator, deadline: float) -> None:
        """Take part in a split whose group this rank is not a member of."""
        self._split(parent, None, 0, deadline)

    def _split(
        self, parent: Communicator, color: int | None, key: int, deadline: float
    ) -> tuple[int, HandleSlot]:
        """Take part in a split of the parent; the death of any of its members ends the wait."""
        begin = partial(parent.split, color, key, self.config, deadline)
        made = parent.on_thread(begin, "ncclCommSplit", deadline)
        if made[0]:
            parent.await_death_notice(made[0], None)
            raise parent.error(made[0], "ncclCommSplit", None)
        return made

    def shrink(self, parent: Communicator, excluded: Sequence[int], deadline: float) -> Communicator:
        """A communicator of the parent's remaining members."""
        shrink = partial(parent.shrink, list(excluded), self.config, deadline, self.check)
        kept = self._capabilities(parent)
        return self._make(parent.device, lambda slot: shrink(), "ncclCommShrink", deadline, kept, parent)

    def _capabilities(self, parent: Communicator) -> list[Capability]:
        """Those of the members of this group, which are members of the parent, too."""
        by_rank = dict(zip(parent.context.ranks, parent.capabilities, strict=True))
        return [by_rank[rank] for rank in self.context.ranks]

    def grow(self, parent: Communicator | None, device: int, deadline: float) -> Communicator:
        """A communicator with more ranks than the parent, which is idle; ``parent`` is None on a new rank."""
        context, nccl = self.context, self.nccl
        make_id = partial(nccl.comm_unique_id, parent.handle) if parent is not None else None
        (unique_id,), capabilities = exchange_ids(context, device, nccl, self.cuda, deadline, make_id)
        if parent is None:
            begin = partial(nccl.comm_grow, 0, context.size, unique_id, context.rank, self.config)
        else:
            own_id = unique_id if context.rank == 0 else None  # only the rank that made the id passes it
            begin = partial(nccl.comm_grow, parent.handle, context.size, own_id, -1, self.config)
        return self._make(device, begin, "ncclCommGrow", deadline, capabilities)

    def _make(
        self,
        device: int,
        begin: Callable[[HandleSlot], tuple[int, HandleSlot]],
        function: str,
        deadline: float,
        capabilities: list[Capability],
        parent: Communicator | None = None,
    ) -> Communicator:
        made = Communicator(
            self.context, self.nccl, self.cuda, device, begin, function, deadline, self.check, parent
        )
        made.capabilities = capabilities
        return made
