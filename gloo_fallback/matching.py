"""Which message goes to which receive: by sender and tag, in order, with a shelf for what nobody has asked for yet."""

from __future__ import annotations

from collections import deque

from .letters import Letter, Message

__all__ = ["Sorter"]


class Sorter:
    """The receives that wait for messages, and the messages that wait for receives. Moves no bytes, holds no lock.

    Args:
        size: members of the group.
    """

    def __init__(self, size: int) -> None:
        self.posted: list[Letter] = []
        self._shelves: list[deque[Message]] = [deque() for _ in range(size)]
        self._serial = 0

    def expect(self, letter: Letter) -> Message | None:
        """Take the oldest message that is there for a receive off its shelf, or let the receive wait for one."""
        call = letter.call
        if call.peer >= 0:
            for message in self._shelves[call.peer]:
                if message.tag == call.tag:
                    return self._claim(letter, call.peer, message)
        else:
            firsts = (
                (next((m for m in s if m.tag == call.tag), None), p) for p, s in enumerate(self._shelves)
            )
            waiting = [(message.serial, peer, message) for message, peer in firsts if message is not None]
            if waiting:
                _, peer, message = min(waiting)
                return self._claim(letter, peer, message)
        self.posted.append(letter)
        return None

    def _claim(self, letter: Letter, peer: int, message: Message) -> Message:
        self._shelves[peer].remove(message)
        letter.call.source = peer
        return message

    def first(self, peer: int, tag: int) -> Letter | None:
        """The receive that a message goes to."""
        for letter in self.posted:
            call = letter.call
            if call.tag == tag and (call.peer == peer or call.peer < 0):
                return letter
        return None

    def take(self, letter: Letter, peer: int) -> None:
        """A receive has got its message, and waits no more."""
        self.posted.remove(letter)
        letter.call.source = peer

    def shelve(self, peer: int, message: Message) -> None:
        """Nobody has asked for this message yet."""
        self._serial += 1
        message.serial = self._serial
        self._shelves[peer].append(message)

    def forget(self, peer: int, message: Message) -> None:
        """The rest of a message will never come."""
        if message in self._shelves[peer]:
            self._shelves[peer].remove(message)

    def withdraw(self, letter: Letter) -> None:
        """A receive waits no more."""
        if letter in self.posted:
            self.posted.remove(letter)

    def withdraw_all(self, peer: int | None = None) -> list[Letter]:
        """No receive, or none from ``peer``, waits any more; which did."""
        gone = [letter for letter in self.posted if peer is None or letter.call.peer == peer]
        for letter in gone:
            self.posted.remove(letter)
        return gone
