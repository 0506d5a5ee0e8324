"""The bytes of large messages from one rank to another of its host: a ring of shared memory, one for each direction.

The sender makes the ring at its first large message to a peer and offers it over the connection that the two have
already authenticated. A peer that cannot map it says so, and everything goes over the socket, as the first message
does anyway, so that nobody waits for the answer. The ring stays as large as it is, however large the messages.

The socket remains the channel that controls: it carries the headers, a doorbell for each part that lies in the ring,
and credit for what has been taken out. So waiting is sleeping on a socket, and a peer that dies is noticed by the end
of its connection, with or without a ring.

Memory order. A part is written to the ring before its doorbell is sent, and read after the doorbell was received;
room is written again after the credit for it was received, which was sent after the room had been read. Each of the
four is a system call on a socket, and what one process did before a send has happened before what another does after
the matching receive: the kernel hands the doorbell's bytes on under locks, which order memory on every processor.
Nothing in the shared memory itself is looked at to find out whether something else there is ready.

One copy would do where a process may read another's memory (process_vm_readv). It is no gain: the kernel pins every
page it reads, which costs more than a second copy that stays in the processor's cache, and the receiver alone works.
"""

from __future__ import annotations

import errno
import json
from typing import Any

import numpy as np

from .segment import Segment, offered, taken

__all__ = ["CREDIT", "PART", "RING", "SHARED_FROM", "Inlet", "Outlet"]

RING = 1 << 21
"""Bytes of a ring."""
PART = 1 << 19
"""Bytes at most that lie in the ring before their doorbell; both sides copy at the same time."""
CREDIT = RING // 4
"""Bytes taken out of the ring before the sender is told."""
SHARED_FROM = 1 << 16
"""Messages of so many bytes and more go through the ring."""
_LEAST = 1 << 18
"""Smaller parts are not worth their doorbells."""
_QUICK = 1 << 16
"""Up to here the copy is faster than letting other threads have the interpreter meanwhile."""
_ALIGN = 64


class _Ring:
    """One side's view: the memory, and the place in it where this side goes on."""

    def __init__(self, segment: Segment) -> None:
        self._segment = segment
        self._memory = segment.memory[Segment.START :]
        self._size = len(self._memory)
        self._at = 0

    @staticmethod
    def room(count: int) -> int:
        """Bytes of the ring that a part of ``count`` bytes takes."""
        return (count + _ALIGN - 1) & -_ALIGN

    def _pieces(self, view: memoryview) -> list[tuple[memoryview, memoryview]]:
        """The next bytes of the ring beside ``view``, in one piece or two; goes on after them."""
        at, count = self._at, len(view)
        self._at = (at + self.room(count)) % self._size
        left = self._size - at
        if count <= left:
            return [(self._memory[at : at + count], view)]
        return [(self._memory[at:], view[:left]), (self._memory[: count - left], view[left:])]

    def close(self) -> None:
        """Let go of the memory."""
        self._memory = memoryview(b"")
        self._segment.close()


class Outlet(_Ring):
    """The sender's side.

    Attributes:
        offer: what the receiver must be told, as bytes.
        ready: whether the receiver has mapped it.
        free: bytes that may be written.

    Raises:
        OSError: there is no memory or no descriptor for it.
    """

    def __init__(self) -> None:
        segment, where = offered(Segment.START + RING)
        super().__init__(segment)
        self.offer = json.dumps(where).encode()
        self.ready = False
        self.free = self._size

    def accepted(self) -> None:
        """The receiver has mapped it."""
        self.ready = True
        self._segment.close_descriptor()

    def part(self, left: int, size: int) -> int:
        """How much of a message of ``size`` bytes to put in now, of which so many are left; 0: wait for credit."""
        count = min(left, PART, max(_LEAST, size // 4))
        return count if self.room(count) <= self.free else 0

    def put(self, source: memoryview) -> None:
        """Copy a part in."""
        self.free -= self.room(len(source))
        for here, there in self._pieces(source):
            _copy(here, there)


class Inlet(_Ring):
    """The receiver's side; ``owed`` is what has been taken out since the sender was last told.

    Raises:
        OSError: what was offered cannot be mapped here.
    """

    def __init__(self, offer: bytes) -> None:
        try:
            where: dict[str, Any] = json.loads(offer.decode())  # of bytes json would guess the encoding
        except (ValueError, RecursionError) as error:
            raise OSError(errno.EPROTO, "not an address of shared memory") from error
        super().__init__(taken(where))
        if self._size != RING:
            self.close()
            raise OSError(errno.EPROTO, "not a ring")
        self.owed = 0

    def take(self, target: memoryview) -> None:
        """Copy a part out."""
        self.owed += self.room(len(target))
        for here, there in self._pieces(target):
            _copy(there, here)


def _copy(to: memoryview, source: memoryview) -> None:
    if len(to) <= _QUICK:
        to[:] = source
    else:
        np.copyto(np.frombuffer(to, np.uint8), np.frombuffer(source, np.uint8))
