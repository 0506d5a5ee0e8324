"""Matching of messages and receives by source and tag, in order, with queues of unexpected messages."""

from __future__ import annotations

from collections import deque

from gloo_fallback.p2p.frames import IncomingMessage, PendingMessage


class MessageMatcher:
    """The posted receives, and the messages without a receive. Moves no bytes; the caller holds the lock.

    Args:
        size: number of ranks of the group.

    Attributes:
        posted: receives without a message, in order.
    """

    def __init__(self, size: int) -> None:
        self.posted: list[PendingMessage] = []
        self._unexpected: list[deque[IncomingMessage]] = [deque() for _ in range(size)]
        self._serial = 0

    def post_receive(self, pending: PendingMessage) -> IncomingMessage | None:
        """Return the oldest unexpected message that matches a receive; without one, post the receive."""
        call = pending.call
        if call.peer >= 0:
            for message in self._unexpected[call.peer]:
                if message.tag == call.tag:
                    return self._take_unexpected(pending, call.peer, message)
        else:
            firsts = (
                (next((m for m in s if m.tag == call.tag), None), p) for p, s in enumerate(self._unexpected)
            )
            waiting = [(message.serial, peer, message) for message, peer in firsts if message is not None]
            if waiting:
                _, peer, message = min(waiting)
                return self._take_unexpected(pending, peer, message)
        self.posted.append(pending)
        return None

    def _take_unexpected(
        self, pending: PendingMessage, peer: int, message: IncomingMessage
    ) -> IncomingMessage:
        self._unexpected[peer].remove(message)
        pending.call.source = peer
        return message

    def empty(self, peer: int) -> bool:
        """True if no receive is posted, and no message from ``peer`` is queued."""
        return not (self.posted or self._unexpected[peer])

    def find_receive(self, peer: int, tag: int) -> PendingMessage | None:
        """The first posted receive that matches a message, or None."""
        for pending in self.posted:
            call = pending.call
            if call.tag == tag and (call.peer == peer or call.peer < 0):
                return pending
        return None

    def match(self, pending: PendingMessage, peer: int) -> None:
        """Remove a posted receive whose message has arrived from ``peer``."""
        self.posted.remove(pending)
        pending.call.source = peer

    def add_unexpected(self, peer: int, message: IncomingMessage) -> None:
        """Queue a message without a receive."""
        self._serial += 1
        message.serial = self._serial
        self._unexpected[peer].append(message)

    def discard(self, peer: int, message: IncomingMessage) -> None:
        """Remove an incomplete message whose connection has ended."""
        if message in self._unexpected[peer]:
            self._unexpected[peer].remove(message)

    def cancel(self, pending: PendingMessage) -> None:
        """Remove a posted receive, if it is still posted."""
        if pending in self.posted:
            self.posted.remove(pending)

    def cancel_all(self, peer: int | None = None) -> list[PendingMessage]:
        """Remove and return all posted receives, or those from ``peer`` only."""
        cancelled = [pending for pending in self.posted if peer is None or pending.call.peer == peer]
        for pending in cancelled:
            self.posted.remove(pending)
        return cancelled
