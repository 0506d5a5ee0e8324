"""Making the communicators of a group: ncclCommInitRankConfig and -Scalable, ncclCommSplit, -Shrink and -Grow."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from nccl_comm.communicators.bootstrap import exchange_ids
from nccl_comm.communicators.communicator import Communicator
from nccl_comm.library.api import Config, HandleSlot, Nccl
from unicoll.arrays.cuda import Cuda
from unicoll.backend import Call, Context


class CommunicatorFactory:
    """Makes the communicator of one group; the group's device is current.

    Args:
        context: the group.
        nccl, cuda: the libraries.
        config: NCCL's options.
        check: called while waiting; raises the error that has ended the group.
    """

    def __init__(
        self,
        context: Context,
        nccl: Nccl,
        cuda: Cuda,
        config: Config,
        check: Callable[[Call | None], None],
    ) -> None:
        self.config = config
        self._context = context
        self._nccl = nccl
        self._cuda = cuda
        self._check = check

    def init(self, device: int, deadline: float) -> Communicator:
        """A communicator without a parent; all members call this."""
        context, nccl = self._context, self._nccl
        ids = exchange_ids(context, device, nccl, self._cuda, deadline)
        function = "ncclCommInitRankConfig" if len(ids) == 1 else "ncclCommInitRankScalable"
        begin = partial(nccl.comm_init, context.size, ids, context.rank, self.config)
        return self._make(device, begin, function, deadline)

    def split(self, parent: Communicator, deadline: float) -> Communicator:
        """A communicator of some members of the parent, which is idle; the others call ``parent.split(None, ...)``."""
        made = parent.split(self._context, self.config, deadline)
        assert made is not None
        return made

    def shrink(self, parent: Communicator, excluded: Sequence[int], deadline: float) -> Communicator:
        """A communicator of the parent's remaining members."""
        return parent.shrink(self._context, list(excluded), self.config, deadline, self._check)

    def grow(self, parent: Communicator | None, device: int, deadline: float) -> Communicator:
        """A communicator with more ranks than the parent, which is idle; ``parent`` is None on a new rank."""
        context, nccl = self._context, self._nccl
        make_id = partial(nccl.comm_unique_id, parent.handle) if parent is not None else None
        (unique_id,) = exchange_ids(context, device, nccl, self._cuda, deadline, make_id)
        if parent is None:
            begin = partial(nccl.comm_grow, 0, context.size, unique_id, context.rank, self.config)
        else:
            own_id = unique_id if context.rank == 0 else None  # only the rank that made the id passes it
            begin = partial(nccl.comm_grow, parent.handle, context.size, own_id, -1, self.config)
        return self._make(device, begin, "ncclCommGrow", deadline)

    def _make(
        self, device: int, begin: Callable[[], tuple[int, HandleSlot]], function: str, deadline: float
    ) -> Communicator:
        return Communicator(
            self._context, self._nccl, self._cuda, device, begin, function, deadline, self._check
        )
