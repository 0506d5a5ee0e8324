"""Making the communicators of a group: from unique ids, by a split, smaller or larger ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count

from unicoll.backend import Call, Context
from unicoll.device_collectives.communicators.communicator import Communicator
from unicoll.device_collectives.communicators.unique_id import Origin, exchange_ids
from unicoll.device_collectives.interface import CollectiveLibrary, Config, HandleSlot
from unicoll.devices.device_runtime import DeviceRuntime


@dataclass(frozen=True)
class CommunicatorFactory:
    """Makes the communicator of one group; the group's device is current.

    Attributes:
        context: the group.
        library, runtime: of the backend.
        config: the communicator's options.
        check: called while waiting; raises the error that has ended the group.
        attempts: numbers the exchanges of ids: arguments may be refused, on all members, before
            another one.
    """

    context: Context
    library: CollectiveLibrary
    runtime: DeviceRuntime
    config: Config
    check: Callable[[Call | None], None]
    attempts: Iterator[int] = field(default_factory=count)

    def init(self, device: int, deadline: float) -> Communicator:
        """A communicator without a parent; all members call this."""
        context = self.context
        ids, origin = exchange_ids(
            context, next(self.attempts), device, self.library, self.runtime, deadline
        )
        method = "comm_init" if len(ids) == 1 else "comm_init_scalable"
        begin = partial(self.library.comm_init, context.size, ids, context.rank, self.config)
        return self._make(device, begin, method, deadline, origin)

    def split(self, parent: Communicator, deadline: float) -> Communicator | None:
        """A communicator of some members of the parent, which is idle; the others call
        :meth:`leave_out`.

        None if the library would order the ranks otherwise.
        """
        context = self.context
        positions = [parent.context.ranks.index(rank) for rank in context.ranks]
        if not self.library.splits_by_key and positions != sorted(positions):
            # The other members of the parent are in a split, which waits for this rank.
            self.leave_out(parent, deadline)
            return None
        # The split is waited for here, with the parent's check: ranks outside of the new group take
        # part in it, and their death must end the wait. The new communicator's own check knows the
        # members of the new group only. Its color is equal on these members, and differs between
        # the groups of one split.
        made = self._split(parent, min(context.ranks), context.rank, deadline)
        return self._make(parent.device, lambda slot: made, "comm_split", deadline, parent.origin)

    def leave_out(self, parent: Communicator, deadline: float) -> None:
        """Take part in a split whose group this rank is not a member of."""
        self._split(parent, None, 0, deadline)

    def _split(
        self, parent: Communicator, color: int | None, key: int, deadline: float
    ) -> tuple[int, HandleSlot]:
        """Take part in a split of the parent; the death of any of its members ends the wait."""
        begin = partial(parent.split, color, key, self.config, deadline)
        what = self.library.symbol("comm_split")
        made = parent.on_thread(begin, what, deadline)
        if made[0]:
            parent.await_death_notice(made[0], None)
            raise parent.error(made[0], what, None)
        return made

    def shrink(
        self, parent: Communicator, excluded: Sequence[int], deadline: float
    ) -> Communicator:
        """A communicator of the parent's remaining members."""
        shrink = partial(parent.shrink, list(excluded), self.config, deadline, self.check)
        return self._make(
            parent.device, lambda slot: shrink(), "comm_shrink", deadline, parent.origin, parent
        )

    def grow(self, parent: Communicator | None, device: int, deadline: float) -> Communicator:
        """A communicator with more ranks than the parent, which is idle; ``parent`` is None on a
        new rank."""
        context, library = self.context, self.library
        # Rank 0 makes the id. It is a member of the parent, because the members keep their ranks.
        make_id = partial(library.comm_unique_id, parent.handle) if parent is not None else None
        attempt = next(self.attempts)
        (unique_id,), origin = exchange_ids(
            context, attempt, device, library, self.runtime, deadline, make_id
        )
        if parent is None:
            begin = partial(
                library.comm_grow, 0, context.size, unique_id, context.rank, self.config
            )
        else:
            # NCCL gets the id from the rank that has made it. The other members of the parent pass
            # none.
            own_id = unique_id if context.rank == 0 else None
            begin = partial(library.comm_grow, parent.handle, context.size, own_id, -1, self.config)
        return self._make(device, begin, "comm_grow", deadline, origin)

    def _make(
        self,
        device: int,
        begin: Callable[[HandleSlot], tuple[int, HandleSlot]],
        method: str,
        deadline: float,
        origin: Origin,
        parent: Communicator | None = None,
    ) -> Communicator:
        what = self.library.symbol(method)
        return Communicator(
            self.context,
            origin,
            self.library,
            self.runtime,
            device,
            begin,
            what,
            deadline,
            self.check,
            parent,
        )
