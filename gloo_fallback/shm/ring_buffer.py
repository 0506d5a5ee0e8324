"""A ring of shared memory for the bytes of large messages between two ranks of a host, one for each direction.

The sender creates the ring at its first large message to a peer and offers it over their authenticated connection. A
peer that cannot map it answers with an error number, and all messages use the socket. The first message always uses
the socket, so the sender does not wait for the answer. The size of the ring is fixed, whatever the message size.

The socket is the control channel: it carries the headers, one frame per chunk in the ring, and credit for the bytes
read from it. Waiting is therefore sleeping on a socket, and the end of the connection reports a dead peer, with or
without a ring.

Memory order. A chunk is written to the ring before its frame is sent and read after the frame is received; space is
reused after its credit is received, which the receiver sends after reading. Each of the four is a system call on a
socket. What one process does before a send happens before what another does after the matching receive: the kernel
passes the bytes under locks, which order memory on every processor. No readiness flag lies in the shared memory.

process_vm_readv would need one copy instead of two, but is slower: the kernel pins every page it reads, which costs
more than a second copy within the cache, and only the receiver does the work.
"""

from __future__ import annotations

import errno
import json
from typing import Any

import numpy as np

from gloo_fallback.shm.segment import SharedSegment, create_offer, open_offer

RING = 1 << 21
"""Size of a ring in bytes."""
CHUNK = 1 << 19
"""Maximum bytes of a chunk, announced by one frame; the two sides copy different chunks at the same time."""
CREDIT = RING // 4
"""Bytes read from the ring before credit is sent."""
SHARED_THRESHOLD = 1 << 16
"""Minimum bytes of a message that goes through the ring."""
_MIN_CHUNK = 1 << 18
"""Minimum bytes of a chunk, unless it is the last of a message."""
_COPY_WITH_GIL = 1 << 16
"""Up to this many bytes the copy keeps the GIL: releasing it costs more than the copy."""
_ALIGN = 64


class _RingSide:
    """The mapped memory of a ring and the position of this side in it."""

    def __init__(self, segment: SharedSegment) -> None:
        self._segment = segment
        self._memory = segment.memory[SharedSegment.START :]
        self._size = len(self._memory)
        self._position = 0

    @staticmethod
    def padded(count: int) -> int:
        """Bytes of the ring that a chunk of ``count`` bytes occupies."""
        return (count + _ALIGN - 1) & -_ALIGN

    def _regions(self, view: memoryview) -> list[tuple[memoryview, memoryview]]:
        """The next one or two regions of the ring, each with its part of ``view``; advances the position."""
        at, count = self._position, len(view)
        self._position = (at + self.padded(count)) % self._size
        left = self._size - at
        if count <= left:
            return [(self._memory[at : at + count], view)]
        return [(self._memory[at:], view[:left]), (self._memory[: count - left], view[left:])]

    def close(self) -> None:
        """Release the memory."""
        self._memory = memoryview(b"")
        self._segment.close()


class RingWriter(_RingSide):
    """The sender's side of a ring.

    Attributes:
        offer: the encoded address of the ring, to be sent to the receiver.
        ready: True once the receiver has mapped the ring.
        free: bytes that may be written.

    Raises:
        OSError: no memory or no descriptor is available.
    """

    def __init__(self) -> None:
        segment, where = create_offer(SharedSegment.START + RING)
        super().__init__(segment)
        self.offer = json.dumps(where).encode()
        self.ready = False
        self.free = self._size

    def accepted(self) -> None:
        """The receiver has mapped the ring."""
        self.ready = True
        self._segment.close_descriptor()

    def next_chunk(self, left: int, size: int) -> int:
        """Bytes of the next chunk of a message of ``size`` bytes with ``left`` unsent; 0 if credit is needed first."""
        count = min(left, CHUNK, max(_MIN_CHUNK, size // 4))
        return count if self.padded(count) <= self.free else 0

    def write(self, source: memoryview) -> None:
        """Copy a chunk into the ring."""
        self.free -= self.padded(len(source))
        for region, data in self._regions(source):
            _copy(region, data)


class RingReader(_RingSide):
    """The receiver's side of a ring.

    Attributes:
        uncredited: bytes read since the last credit was sent.

    Raises:
        OSError: this process cannot map the offered ring.
    """

    def __init__(self, offer: bytes) -> None:
        try:
            where: dict[str, Any] = json.loads(offer.decode())  # json.loads would guess the encoding of bytes
        except (ValueError, RecursionError) as error:
            raise OSError(errno.EPROTO, "invalid address of shared memory") from error
        super().__init__(open_offer(where))
        if self._size != RING:
            self.close()
            raise OSError(errno.EPROTO, "not a ring")
        self.uncredited = 0

    def read(self, target: memoryview) -> None:
        """Copy a chunk out of the ring."""
        self.uncredited += self.padded(len(target))
        for region, data in self._regions(target):
            _copy(data, region)


def _copy(to: memoryview, source: memoryview) -> None:
    if len(to) <= _COPY_WITH_GIL:
        to[:] = source
    else:
        np.copyto(np.frombuffer(to, np.uint8), np.frombuffer(source, np.uint8))
