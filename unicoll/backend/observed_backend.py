"""Base of the backends whose calls the wait monitor observes
(:mod:`unicoll.diagnosis.wait_monitor`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import FrameType
from typing import NamedTuple, Protocol, runtime_checkable

from unicoll.backend import operation_errors
from unicoll.backend.contract import Backend, Context
from unicoll.backend.error_texts import Report
from unicoll.backend.group_state import GroupState
from unicoll.calls.call import Call
from unicoll.calls.work import Completion, HostCompletion
from unicoll.errors import DistError
from unicoll.net.control.wait_graph import MessageState, backend_group_of

_MOST_ENDED = 4096
"""Orders of operations of destroyed groups whose last numbers are kept."""


@runtime_checkable
class MessageQueues(Protocol):
    """An engine of sends and receives that shows which messages are in flight."""

    def needs_peer(self, call: Call) -> bool:
        """True for a receive of which nothing has come, and for a queued send that needs the
        receiver to read."""

    def message_state(self, peer: int) -> MessageState:
        """The state of the messages to and from a member."""

    def others(self, call: Call) -> str:
        """The messages with other tags that have come, as the end of a text about a receive that
        waits; "" if none."""


class Operation(NamedTuple):
    """An operation that ends once every one of some members has posted it.

    Attributes:
        order: name of the order that these members post such operations in, unique in the group.
        number: in that order, from 1.
        ranks: the members' global ranks.
    """

    order: str
    number: int
    ranks: tuple[int, ...]


class ObservedBackend(Backend):
    """A backend that shows the wait monitor which calls are in progress, and that fails with its
    group.

    Args:
        state: of the group; None makes one.

    Attributes:
        context: the group.
        state: its failure and the collective in progress.
        closed: True once the group is being destroyed.
    """

    called_from_torch = False
    """True if the program makes the calls by functions of torch."""

    def __init__(self, context: Context, state: GroupState | None = None) -> None:
        self.context = context
        self.state = state or GroupState(context)
        self.state.links = self.links
        self.closed = False

    @property
    def error(self) -> DistError | None:
        """The error that has ended the group, or None."""
        return self.state.error

    def watch(self) -> None:
        """Abort this backend when another rank announces that the group failed, and answer the
        others' questions."""
        context, control = self.context, self.context.job.control
        if context.size > 1 and control is not None:
            control.watch(context.name, context.backend, self.abort, self._report)

    def _report(self) -> Report:
        self.update()
        return self.state.report() | self.device_state()

    def device_state(self) -> Report:
        """Of a library that runs on a device: ``pending``, the number of the first collective that
        has not ended there, or 0; ``behind``, the operation of another group that it runs after, or
        ""; ``in_library``, the number of the one that the library has not enqueued yet, or 0. Empty
        for a backend of the host."""
        return {}

    def abort(self, error: Exception) -> None:
        self.state.abort(error)

    # --- what is in progress ----------------------------------------------------------------------

    def update(self) -> None:
        """Bring :attr:`state` up to date, if the calls do not do that themselves; any thread."""

    def awaited_in(self, frame: FrameType) -> Call | None:
        """The call that a thread waits for in its innermost frame; None if it is in none of this
        backend, or if :mod:`unicoll.calls.thread_activity` has it."""
        return None

    def waited_for(self, completion: Completion) -> tuple[ObservedBackend, Call] | None:
        """The call that has to end first for a posted batch to end, and its backend; None if the
        batch is not one of this backend, or :meth:`in_background` or the message queues have it."""
        return None

    def operation(self, call: Call) -> Operation | None:
        """The operation that a call is part of; None for messages, if those have no numbers."""
        if not call.op.collective:
            return None
        return Operation(self.name, call.seq, self.context.ranks)

    def posted(self) -> Mapping[str, int]:
        """For each order of operations the number of the last one posted; without those of which
        none was."""
        return {self.name: self.sequence}

    def keep_posted(self) -> None:
        """Keep the numbers of :meth:`posted` in the job: members that destroy the group later may
        be in these calls."""
        ended, group = self.context.job.ended, self.context.name
        ended |= {backend_group_of(order, group): number for order, number in self.posted().items()}
        for order in [*ended][:-_MOST_ENDED]:
            del ended[order]

    def lost_member(self, call: Call) -> int | None:
        """The global rank of a member that has ended, so that a collective which is in progress may
        never end."""
        return operation_errors.first_dead_member(self.context)

    def in_background(self) -> Sequence[HostCompletion]:
        """The posted batches that have not ended."""
        return ()

    @property
    def has_unseen_wakers(self) -> bool:
        """True if something that this backend does not show may make a blocked process go on: a
        callback of a message, or a message that a receive from any rank may get."""
        return False

    @property
    def message_queues(self) -> MessageQueues | None:
        """The engine of its messages, if that shows which are in flight."""
        return None

    def links(self) -> str:
        """This rank's connections that are not acknowledged, and addresses that do not answer; ""
        if none."""
        return ""
