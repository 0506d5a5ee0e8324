"""Making the communicators of a group: ncclCommInitRankConfig and -Scalable, ncclCommSplit, -Shrink and -Grow."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count

from nccl_comm.communicators.communicator import Communicator
from nccl_comm.communicators.unique_id import Origin, exchange_ids
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
        attempts: numbers the exchanges of ids: arguments may be refused, on all members, before another one.
    """

    context: Context
    nccl: Nccl
    cuda: Cuda
    config: Config
    check: Callable[[Call | None], None]
    attempts: Iterator[int] = field(default_factory=count)

    def init(self, device: int, deadline: float) -> Communicator:
        """A communicator without a parent; all members call this."""
        context = self.context
        ids, origin = exchange_ids(context, next(self.attempts), device, self.nccl, self.cuda, deadline)
        function = "ncclCommInitRankConfig" if len(ids) == 1 else "ncclCommInitRankScalable"
        begin = partial(self.nccl.comm_init, context.size, ids, context.rank, self.config)
        return self._make(device, begin, function, deadline, origin)

    def split(self, parent: Communicator, deadline: float) -> Communicator:
        """A communicator of some members of the parent, which is idle; the others call :meth:`leave_out`."""
        context = self.context
        made = self._split(parent, min(context.ranks), context.rank, deadline)
        return self._make(parent.device, lambda slot: made, "ncclCommSplit", deadline, parent.origin)

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
        return self._make(
            parent.device, lambda slot: shrink(), "ncclCommShrink", deadline, parent.origin, parent
        )

    def grow(self, parent: Communicator | None, device: int, deadline: float) -> Communicator:
        """A communicator with more ranks than the parent, which is idle; ``parent`` is None on a new rank."""
        context, nccl = self.context, self.nccl
        make_id = partial(nccl.comm_unique_id, parent.handle) if parent is not None else None
        attempt = next(self.attempts)
        (unique_id,), origin = exchange_ids(context, attempt, device, nccl, self.cuda, deadline, make_id)
        if parent is None:
            begin = partial(nccl.comm_grow, 0, context.size, unique_id, context.rank, self.config)
        else:
            own_id = unique_id if context.rank == 0 else None  # only the rank that made the id passes it
            begin = partial(nccl.comm_grow, parent.handle, context.size, own_id, -1, self.config)
        return self._make(device, begin, "ncclCommGrow", deadline, origin)

    def _make(
        self,
        device: int,
        begin: Callable[[HandleSlot], tuple[int, HandleSlot]],
        function: str,
        deadline: float,
        origin: Origin,
        parent: Communicator | None = None,
    ) -> Communicator:
        return Communicator(
            self.context, origin, self.nccl, self.cuda, device, begin, function, deadline, self.check, parent
        )
