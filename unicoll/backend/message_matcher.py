"""Matching of messages with receives and probes by source and tag, in order, with queues of unexpected messages."""

from __future__ import annotations

from collections import Counter, deque
from typing import Generic, Protocol, TypeVar

from unicoll.backend.call import Call
from unicoll.backend.ops import PROBE


class Pending(Protocol):
    """A receive or probe in flight."""

    call: Call


class Message(Protocol):
    """A message whose header has arrived.

    Attributes:
        peer: the sender's rank in the group.
        tag: of the send.
        code: of the element type, :attr:`unicoll.arrays.types.DType.code`.
        size: bytes.
    """

    peer: int
    tag: int
    code: int
    size: int


P = TypeVar("P", bound=Pending)
M = TypeVar("M", bound=Message)


class MessageMatcher(Generic[P, M]):
    """The posted receives and probes, and the messages without a receive. Moves no bytes; the caller holds a lock.

    Args:
        size: number of ranks of the group.

    Attributes:
        posted: receives and probes without a message, in order.
    """

    def __init__(self, size: int) -> None:
        self.posted: list[P] = []
        self._unexpected: list[deque[tuple[int, M]]] = [deque() for _ in range(size)]  # with a serial number
        self._serial = 0

    def post_receive(self, pending: P) -> M | None:
        """Take the oldest unexpected message that matches a receive; without one, post the receive."""
        call = pending.call
        found = self._first(call)
        if found is None:
            self.posted.append(pending)
            return None
        message = found[1]
        self._unexpected[message.peer].remove(found)
        call.matched(message.peer, message.tag, message.code, message.size)
        return message

    def post_probe(self, pending: P) -> bool:
        """Give a probe the oldest unexpected message that matches it, and return True; without one, post the probe."""
        found = self._first(pending.call)
        if found is None:
            self.posted.append(pending)
            return False
        message = found[1]
        pending.call.matched(message.peer, message.tag, message.code, message.size)
        return True

    def _first(self, call: Call) -> tuple[int, M] | None:
        sources = self._unexpected if call.peer < 0 else (self._unexpected[call.peer],)
        found: tuple[int, M] | None = None
        for source in sources:
            for one in source:
                if call.tag is None or one[1].tag == call.tag:
                    if found is None or one[0] < found[0]:
                        found = one
                    break
        return found

    def empty(self, peer: int) -> bool:
        """True if nothing is posted, and no message from ``peer`` is queued; -1 is any."""
        if self.posted:
            return False
        return not (any(self._unexpected) if peer < 0 else self._unexpected[peer])

    def find_receive(self, peer: int, tag: int) -> P | None:
        """The first posted receive that matches a message, or None."""
        for pending in self.posted:
            call = pending.call
            if (
                (call.peer == peer or call.peer < 0)
                and (call.tag == tag or call.tag is None)
                and call.op is not PROBE
            ):
                return pending
        return None

    def is_awaited(self, peer: int, tag: int) -> bool:
        """True if a posted receive or probe matches a message."""
        return any(_matches(pending.call, peer, tag) for pending in self.posted)

    def match(self, pending: P, peer: int, tag: int, code: int, size: int) -> None:
        """Remove a posted receive whose message has arrived."""
        self.posted.remove(pending)
        pending.call.matched(peer, tag, code, size)

    def add_unexpected(self, message: M) -> list[P]:
        """Queue a message without a receive; returns the probes that it ends."""
        self._serial += 1
        peer, tag = message.peer, message.tag
        self._unexpected[peer].append((self._serial, message))
        ended = [pending for pending in self.posted if _matches(pending.call, peer, tag)]
        for pending in ended:
            self.match(pending, peer, tag, message.code, message.size)
        return ended

    def discard(self, message: M) -> None:
        """Remove an incomplete message whose connection has ended."""
        queue = self._unexpected[message.peer]
        found = next((one for one in queue if one[1] is message), None)
        if found is not None:
            queue.remove(found)

    def cancel(self, pending: P) -> None:
        """Remove a posted receive or probe, if it is still posted."""
        if pending in self.posted:
            self.posted.remove(pending)

    def cancel_all(self, peer: int | None = None) -> list[P]:
        """Remove and return all that is posted, or what is posted for messages from ``peer`` only."""
        cancelled = [pending for pending in self.posted if peer is None or pending.call.peer == peer]
        for pending in cancelled:
            self.posted.remove(pending)
        return cancelled

    def others(self, call: Call) -> str:
        """The unexpected messages of a receive's source, as the end of an error about its timeout; "" if none."""
        sources = self._unexpected if call.peer < 0 else (self._unexpected[call.peer],)
        tags = Counter(message.tag for source in sources for _, message in source)
        if not tags:
            return ""
        listed = [
            f"{tag} ({count} of them)" if count > 1 else str(tag) for tag, count in sorted(tags.items())
        ]
        more = ", ..." if len(listed) > _SHOWN else ""
        return f"; messages with other tags have come: {', '.join(listed[:_SHOWN])}{more}"


_SHOWN = 8


def _matches(call: Call, peer: int, tag: int) -> bool:
    return call.peer in (peer, -1) and (call.tag is None or call.tag == tag)
