"""Matching of messages with receives and probes by source and tag, in order, with queues of
unexpected messages."""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from typing import Any, Generic, Protocol, TypeVar

from unicoll.calls.call import INTERNAL_TAGS, Call
from unicoll.calls.ops import PROBE


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
V = TypeVar("V")

_Key = tuple[int, "int | None"]
"""Source, -1 for any, and tag, None for any."""


class MessageMatcher(Generic[P, M]):
    """The posted receives and probes, and the messages without a receive. Moves no bytes; the
    caller holds a lock.

    Both are kept in order, and again in queues by source and tag, so that the time for a match does
    not depend on how many there are: what is matched is the first of its queue. (The first of a
    dict is found slowly after many deletions, that of an OrderedDict is not.)

    Args:
        size: number of ranks of the group.

    Attributes:
        posted: receives and probes without a message, in order, with serial numbers.
    """

    def __init__(self, size: int) -> None:
        self.posted: dict[P, int] = {}
        self._receives: dict[_Key, deque[P]] = {}
        self._wildcards: dict[_Key, deque[P]] = {}
        self._probes: list[P] = []
        self._unexpected: list[OrderedDict[int, M]] = [OrderedDict() for _ in range(size)]
        self._by_tag: dict[_Key, deque[int]] = {}
        self._serial = 0

    def post_receive(self, pending: P) -> M | None:
        """Take the oldest unexpected message that matches a receive; without one, post the
        receive."""
        call = pending.call
        found = self._first(call)
        if found is None:
            self._post(pending)
            return None
        serial, message = found
        self._remove(serial, message)
        call.matched(message.peer, message.tag, message.code, message.size)
        return message

    def post_probe(self, pending: P) -> bool:
        """Give a probe the oldest unexpected message that matches it, and return True; without one,
        post the probe."""
        found = self._first(pending.call)
        if found is None:
            self._post(pending)
            return False
        message = found[1]
        pending.call.matched(message.peer, message.tag, message.code, message.size)
        return True

    def _post(self, pending: P) -> None:
        # What is in a queue is also in `posted`, wherever an exception interrupts this:
        # find_receive() relies on that. So `posted` is first here and last in cancel().
        self._serial += 1
        self.posted[pending] = self._serial
        call = pending.call
        if call.op is PROBE:
            self._probes.append(pending)
        else:
            _append(self._table(call), (call.peer, call.tag), pending)

    def _table(self, call: Call) -> dict[_Key, deque[P]]:
        return self._wildcards if call.tag is None or call.peer < 0 else self._receives

    def _first(self, call: Call) -> tuple[int, M] | None:
        """The oldest unexpected message that matches a receive or probe, with its serial number."""
        if call.peer >= 0:
            return self._first_from(call.peer, call.tag)
        found = [self._first_from(peer, call.tag) for peer in range(len(self._unexpected))]
        return min((one for one in found if one is not None), key=_serial_of, default=None)

    def _first_from(self, peer: int, tag: int | None) -> tuple[int, M] | None:
        messages = self._unexpected[peer]
        if not messages:
            return None
        if tag is None:
            return next((one for one in messages.items() if one[1].tag not in INTERNAL_TAGS), None)
        serials = self._by_tag.get((peer, tag))
        return (serials[0], messages[serials[0]]) if serials else None

    def _remove(self, serial: int, message: M) -> None:
        # The number leaves the queue first, because _first_from() looks up the message of each
        # number that it finds there. add_unexpected() has the opposite order.
        _discard(self._by_tag, (message.peer, message.tag), serial)
        del self._unexpected[message.peer][serial]

    def empty(self, peer: int) -> bool:
        """True if nothing is posted, and no message from ``peer`` is queued; -1 is any."""
        if self.posted:
            return False
        return not (any(self._unexpected) if peer < 0 else self._unexpected[peer])

    def find_receive(self, peer: int, tag: int) -> P | None:
        """The first posted receive that matches a message, or None."""
        queue = self._receives.get((peer, tag))
        found = queue[0] if queue else None
        if self._wildcards:
            keys: tuple[_Key, ...] = (-1, tag), (peer, None), (-1, None)
            for key in keys if tag not in INTERNAL_TAGS else keys[:1]:
                queue = self._wildcards.get(key)
                if queue and (found is None or self.posted[queue[0]] < self.posted[found]):
                    found = queue[0]
        return found

    def is_awaited(self, peer: int, tag: int) -> bool:
        """True if a posted receive or probe matches a message."""
        return self.find_receive(peer, tag) is not None or any(
            _matches(pending.call, peer, tag) for pending in self._probes
        )

    def match(self, pending: P, peer: int, tag: int, code: int, size: int) -> None:
        """Remove a posted receive or probe whose message has arrived."""
        self.cancel(pending)
        pending.call.matched(peer, tag, code, size)

    def add_unexpected(self, message: M) -> list[P]:
        """Queue a message without a receive; returns the probes that it ends."""
        self._serial += 1
        peer, tag = message.peer, message.tag
        self._unexpected[peer][self._serial] = message
        _append(self._by_tag, (peer, tag), self._serial)
        ended = [pending for pending in self._probes if _matches(pending.call, peer, tag)]
        for pending in ended:
            self.match(pending, peer, tag, message.code, message.size)
        return ended

    def discard(self, message: M) -> None:
        """Remove an incomplete message whose connection has ended."""
        for serial, one in self._unexpected[message.peer].items():
            if one is message:
                self._remove(serial, message)
                break

    def cancel(self, pending: P) -> None:
        """Remove a posted receive or probe, if it is still posted."""
        if pending not in self.posted:
            return
        # With this order, and that in _post(), what an exception of a signal's handler interrupts
        # is still in `posted`, and can be cancelled.
        call = pending.call
        if call.op is not PROBE:
            _discard(self._table(call), (call.peer, call.tag), pending)
        elif pending in self._probes:
            self._probes.remove(pending)
        self.posted.pop(pending, None)

    def cancel_all(self, peer: int | None = None) -> list[P]:
        """Remove and return all that is posted, or what is posted for messages from ``peer``
        only."""
        cancelled = [
            pending for pending in self.posted if peer is None or pending.call.peer == peer
        ]
        for pending in cancelled:
            self.cancel(pending)
        return cancelled

    def others(self, call: Call) -> str:
        """The unexpected messages of a receive's source, as the end of an error about its timeout;
        "" if none."""
        sources = self._unexpected if call.peer < 0 else (self._unexpected[call.peer],)
        tags = Counter(
            message.tag
            for source in sources
            for message in source.values()
            if message.tag not in INTERNAL_TAGS
        )
        if not tags:
            return ""
        listed = [
            f"{tag} ({count} of them)" if count > 1 else str(tag)
            for tag, count in sorted(tags.items())
        ]
        more = ", ..." if len(listed) > _SHOWN else ""
        tags_text = ", ".join(listed[:_SHOWN]) + more
        return f"; messages with other tags have come: {tags_text} (tag=None receives with any tag)"


_SHOWN = 8


def _matches(call: Call, peer: int, tag: int) -> bool:
    return call.peer in (peer, -1) and (
        call.tag == tag or (call.tag is None and tag not in INTERNAL_TAGS)
    )


def _serial_of(found: tuple[int, Any]) -> int:
    return found[0]


def _append(queues: dict[_Key, deque[V]], key: _Key, value: V) -> None:
    queue = queues.get(key)
    if queue is None:
        # The queue is made with its value: an empty one would stay in the table if an exception of
        # a signal's handler came before append().
        queues[key] = deque((value,))
    else:
        queue.append(value)


def _discard(queues: dict[_Key, deque[V]], key: _Key, value: V) -> None:
    """Remove a value, fast if it is the first; nothing if an exception has interrupted
    :func:`_append`."""
    queue = queues.get(key)
    if queue is not None and value in queue:
        if len(queue) == 1:
            del queues[key]
        else:
            queue.remove(value)
