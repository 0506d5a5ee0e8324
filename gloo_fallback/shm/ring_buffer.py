"""A ring of shared memory for the messages from one rank of a host to another, one for each
direction.

The sender creates the ring with its first message to a peer and offers it over their authenticated
connection. A peer that cannot map it answers with an error number, and all messages use the socket.
Messages use the socket until the peer has mapped the ring, so no send waits for the answer. The
size of the ring is fixed, whatever the message size.

A message in the ring is a header followed by its bytes, padded to the size of a header. A message
of one chunk is written as a whole if there is space, and then does not wrap around the end of the
ring: if it does not fit before the end, a header of kind ``_SKIP`` marks that the next header is at
the start. A larger message is written, and read, in chunks, so that both sides copy at the same
time. While the ring is empty, messages that are written as a whole start again at its beginning, so
that they use few pages, which stay in the processors' caches; not if positions are exchanged in
notices, because the reader would have to send one for the skipped bytes.

Positions count bytes since the ring was created. A side that is about to sleep sets a flag in the
ring, and sleeps on the socket; the other side then sends a notice through the socket. So waiting is
sleeping on a socket, and the end of the connection reports a dead peer, with or without a ring.

Memory order. On x86 the positions are plain words of the shared memory: stores become visible in
order, and no access moves before an older load. A store of a position is followed by a full barrier
before the other side's flag is read, and a store of a flag by one before the position is read
again; so one side sees the store of the other. On other processors positions are exchanged only in
notices, one for each chunk. Sending and receiving them are system calls: the kernel passes the
bytes under locks, which order memory on every processor.

process_vm_readv would need one copy instead of two, but is slower: the kernel pins every page it
reads, which costs more than a second copy within the cache, and only the receiver does the work.
"""

from __future__ import annotations

import errno
import json
import os
import struct
import threading
from collections.abc import Sequence

import numpy as np

from gloo_fallback.shm.segment import SharedSegment, create_offer, has_strong_ordering, open_offer
from unicoll.net.objects.received_json import parse

_HEADER = struct.Struct("<IIqQ8x")
"""Kind, dtype code, tag, bytes of the message."""
_MESSAGE, _SKIP = 0x736D6375, 0x706B7375
"""Kinds of headers: a message follows; the next header is at the start of the ring."""
_ALIGN = _HEADER.size
RING = (1 << 21) + (1 << 12)
"""Size of a ring in bytes: two messages of 1 MiB fit with their headers."""
CHUNK = 1 << 18
"""Maximum bytes of a message that is written as a whole, and bytes of a larger one that are copied
at a time."""
_NOTICE_CHUNK = 1 << 19
"""Instead of :data:`CHUNK`, for rings whose positions are exchanged in notices."""
_CHECK_BYTES = RING // 4
"""Bytes that the reader reads between two checks whether the sender waits for space."""
_RESTART = 1 << 17
"""Past this position a message that is written as a whole starts at the beginning of the ring, if
the ring is empty."""
_COPY_WITH_GIL = 1 << 16
"""Up to this many bytes the copy keeps the GIL: releasing it costs more than the copy."""
_WRITTEN, _SPACE_AWAITED, _READ, _DATA_AWAITED = 0, 1, 16, 17
"""64-bit words: positions, and the flags set by a side that is about to sleep. The words that one
side writes often are two cache lines apart from those of the other, because processors fetch lines
in pairs."""
_WORDS = 32


class _RingSide:
    """The mapped memory of a ring.

    Attributes:
        strong: True if positions are read from the shared memory.
        words: the positions and flags.
        position: of the next byte that this side writes or reads.
    """

    def __init__(self, segment: SharedSegment, strong: bool) -> None:
        start = SharedSegment.START
        self.strong = strong
        self.words = segment.memory[start : start + _WORDS * 8].cast("Q")
        self.position = 0
        self._segment = segment
        self._memory = segment.memory[start + _WORDS * 8 :]
        self._chunk = CHUNK if strong else _NOTICE_CHUNK
        # It protects nothing. Its acquisition is a locked instruction, which is a full barrier on
        # x86.
        self._barrier = threading.Lock()

    def close(self) -> None:
        """Release the memory; a thread that polls at this time sees an empty or an invalid ring."""
        self.words = memoryview(bytearray(_WORDS * 8)).cast("Q")
        self._memory = memoryview(b"")
        self._segment.close()

    def _take_flag(self, word: int) -> bool:
        """Clear the flag of the other side; True if it was set, so that a notice is necessary."""
        # This is a full barrier: the position that this side has just stored is visible before the
        # flag is read. Otherwise the processor could read the flag first. If the other side sets
        # its flag and reads the old position in between, it sleeps, and this side sends no notice.
        with self._barrier:
            if not self.words[word]:
                return False
        # The other side may set the flag again before this store, which then erases it. The notice
        # that follows wakes it in that case, too.
        self.words[word] = 0
        return True


class RingWriter(_RingSide):
    """The sender's side of a ring.

    Attributes:
        offer: the encoded address of the ring, to be sent to the receiver.
        ready: True once the receiver has mapped the ring.
        read: the receiver's position, if positions are exchanged in notices (not ``strong``).

    Raises:
        OSError: no memory or no descriptor is available.
    """

    def __init__(self) -> None:
        segment, where = create_offer(SharedSegment.START + _WORDS * 8 + RING)
        super().__init__(segment, has_strong_ordering())
        self.offer = json.dumps(where | {"strong": self.strong}).encode()
        self.ready = False
        self.read = 0

    def accepted(self) -> None:
        """The receiver has mapped the ring."""
        self.ready = True
        self._segment.close_descriptor()

    @property
    def free(self) -> int:
        """Bytes that may be written."""
        return RING - self.position + (self.words[_READ] if self.strong else self.read)

    def put(self, code: int, tag: int, data: bytes | memoryview) -> bool:
        """Write a whole message of at most :data:`CHUNK` bytes; False if there is no space for
        it."""
        at, need, free = self.position % RING, _ALIGN + _padded(len(data)), self.free
        left = RING - at
        # The second case starts again at the beginning of an empty ring. Then all of the ring is
        # free, and the skipped bytes and the message fit if the message needs no more than lies
        # before the position, which is why the position has to be at least ``need``.
        if left < need or (self.strong and free == RING and at >= max(need, _RESTART)):
            if left + need > free:
                return False
            # Positions are multiples of the size of a header, so there is always room for one
            # before the end. The position after the skipped bytes is not published here, but with
            # the message: the reader never finds a skip without a message behind it.
            _HEADER.pack_into(self._memory, at, _SKIP, 0, 0, 0)
            self.position += left
            at = 0
        elif need > free:
            return False
        _HEADER.pack_into(self._memory, at, _MESSAGE, code, tag, len(data))
        _copy(self._memory[at + _ALIGN : at + _ALIGN + len(data)], data)
        self.position += need
        # The position is stored last: on x86 a reader that sees it also sees the bytes before it.
        self.words[_WRITTEN] = self.position
        return True

    def begin(self, code: int, tag: int, size: int) -> bool:
        """Write the header of a message whose bytes follow; False if there is no space for it."""
        if self.free < _ALIGN:
            return False
        _HEADER.pack_into(self._memory, self.position % RING, _MESSAGE, code, tag, size)
        self.position += _ALIGN
        # The header is published before any byte of the message, so that the reader can prepare the
        # destination and read while the rest is written.
        self.words[_WRITTEN] = self.position
        return True

    def write(self, rest: memoryview) -> int:
        """Write the next chunk of a message; returns its bytes, 0 if there is no space.

        Args:
            rest: what is left of the message.
        """
        at = self.position % RING
        count = min(len(rest), self._chunk, RING - at)
        # Only the last chunk of a message can need padding. The size of a chunk and what is left
        # before the end of the ring are multiples of the padding unit, and the reader cuts by the
        # same rule.
        padded = _padded(count)
        if padded > self.free:
            return 0
        _copy(self._memory[at : at + count], rest[:count])
        self.position += padded
        self.words[_WRITTEN] = self.position
        return count

    def has_space(self, left: int, begun: bool) -> bool:
        """True if the next part of a message can be written.

        Args:
            left: bytes of the message that are not written yet.
            begun: True if its header is written.
        """
        # These are the conditions of put, begin and write. If this were true and they refused, a
        # thread that waits for space would not sleep. If it were false and they accepted, that
        # thread would sleep although there is space.
        end = RING - self.position % RING
        if begun:
            return _padded(min(left, self._chunk, end)) <= self.free
        if left > CHUNK:
            return self.free >= _ALIGN
        need = _ALIGN + _padded(left)
        return (need if need <= end else end + need) <= self.free

    def await_space(self) -> None:
        """Ask for a notice once there is space; the caller then tries again before it sleeps."""
        self.words[_SPACE_AWAITED] = 1
        # This is a full barrier: the flag is visible before the caller reads the position of the
        # reader again.
        with self._barrier:
            pass

    def must_notify(self) -> bool:
        """True if the receiver has to be told that something was written."""
        return not self.strong or self._take_flag(_DATA_AWAITED)


class RingReader(_RingSide):
    """The receiver's side of a ring.

    Attributes:
        written: the sender's position, if positions are exchanged in notices (not ``strong``).

    Raises:
        OSError: this process cannot map the offered ring.
    """

    def __init__(self, offer: bytes) -> None:
        try:
            where = parse(offer, {"strong": bool})
            strong = where["strong"]
        except ValueError as error:
            raise OSError(errno.EPROTO, "invalid address of shared memory") from error
        # One side would read positions from the memory while the other announces them in notices.
        if strong is not has_strong_ordering():
            raise OSError(errno.EOPNOTSUPP, "UNICOLL_MEMORY_ORDER differs")
        segment = open_offer(where)
        # The token of the offer shows that this is a segment of this library, but not which kind.
        # Positions are used modulo the size of a ring, which a segment of another size does not
        # have.
        if len(segment.memory) != SharedSegment.START + _WORDS * 8 + RING:
            segment.close()
            raise OSError(errno.EPROTO, "not a ring")
        super().__init__(segment, strong)
        self.written = 0
        # This is the position at the last check whether the sender waits for space.
        self._checked = 0

    @property
    def available(self) -> int:
        """Bytes that can be read.

        Raises:
            OSError: the sender's position is invalid.
        """
        count = (self.words[_WRITTEN] if self.strong else self.written) - self.position
        # The sender can write these words at any time, so they are checked at each use. What
        # follows relies on the range.
        if not 0 <= count <= RING:
            raise OSError(errno.EPROTO, "invalid position in a ring")
        return count

    def header(self) -> tuple[int, int, int] | None:
        """Dtype code, tag and size of the next message, of which something is available; None if
        nothing is.

        Raises:
            OSError: there is no header.
        """
        # A skip is followed by a message at the start of the ring. Two skips in a row are an error
        # of the sender, and are not followed.
        for _ in range(2):
            if not self.available:
                return None
            at = self.position % RING
            if at % _ALIGN:
                break
            kind, code, tag, size = _HEADER.unpack_from(self._memory, at)
            if kind == _MESSAGE:
                return code, tag, size
            if kind != _SKIP:
                break
            self.position += RING - at
        raise OSError(errno.EPROTO, "invalid header in a ring")

    def body(self, size: int) -> memoryview | None:
        """The bytes after the next header, if the message has one chunk and all of it is
        available."""
        # The sender never lets a message of one chunk wrap around the end, so that it can be given
        # out as one view. A header that says otherwise is not followed.
        start = self.position % RING + _ALIGN
        if size > CHUNK or _ALIGN + size > self.available or start + size > RING:
            return None
        return self._memory[start : start + size]

    def skip(self, size: int = 0) -> None:
        """Advance past the next header and the ``size`` bytes after it."""
        self.position += _ALIGN + _padded(size)
        # The position is published only now: from here on the sender may overwrite the bytes that
        # :meth:`body` has given out.
        self.words[_READ] = self.position

    def read(self, rest: memoryview) -> int:
        """Read the next chunk of a message; returns its bytes, 0 if none are available.

        Args:
            rest: the destination of what is left of the message.
        """
        at = self.position % RING
        count = min(len(rest), self.available, self._chunk, RING - at)
        _copy(rest[:count], self._memory[at : at + count])
        self.position += _padded(count)
        # It is stored after the copy: the sender may overwrite the bytes from here on.
        self.words[_READ] = self.position
        return count

    def await_data(self, awaited: bool = True) -> bool:
        """Ask for a notice of data, or for none while this side polls; True if something was
        written already."""
        self.words[_DATA_AWAITED] = awaited
        # This is a full barrier: the flag is visible before the position is read. So either this
        # side sees the new position, or the sender sees the flag.
        with self._barrier:
            return self.position != (self.words[_WRITTEN] if self.strong else self.written)

    def poll(self, rounds: int, yields: int) -> bool:
        """Poll for data, then yield the processor between polls; True once data has come. Needs no
        lock."""
        # These are local, because another thread may close the ring, which replaces the memory of
        # this object. The old mapping lives as long as this view of it.
        words, position = self.words, self.position
        for _ in range(rounds):
            if words[_WRITTEN] != position:
                return True
        yield_processor = os.sched_yield
        for _ in range(yields):
            if words[_WRITTEN] != position:
                return True
            yield_processor()
        return False

    def must_notify(self) -> bool:
        """True if the sender has to be told that there is space.

        A sender without space waits while less than a chunk is free, so a check every
        ``_CHECK_BYTES`` finds it.
        """
        if self.position - self._checked < _CHECK_BYTES:
            return False
        self._checked = self.position
        return not self.strong or self._take_flag(_SPACE_AWAITED)


def poll_any(readers: Sequence[RingReader], rounds: int, yields: int) -> int:
    """:meth:`RingReader.poll` of several rings; the index of the first with data, -1 if there is
    none."""
    rings = [(reader.words, reader.position) for reader in readers]
    for k in range(rounds + yields):
        for i, (words, position) in enumerate(rings):
            if words[_WRITTEN] != position:
                return i
        if k >= rounds:
            os.sched_yield()
    return -1


def _padded(count: int) -> int:
    """Bytes of the ring that ``count`` bytes of a message occupy."""
    return (count + _ALIGN - 1) & -_ALIGN


def _copy(to: memoryview, source: bytes | memoryview) -> None:
    if len(to) <= _COPY_WITH_GIL:
        to[:] = source
    else:
        np.copyto(np.frombuffer(to, np.uint8), np.frombuffer(source, np.uint8))
