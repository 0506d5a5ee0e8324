"""The sends of one message connection: queued, and written to the socket or the ring of shared
memory.

Nothing blocks. Sending stops when the socket or the ring is full, and :meth:`MessageSender.flush`
continues it. The caller holds the engine's lock.
"""

from __future__ import annotations

import os
import select
import socket
from collections import deque
from collections.abc import Callable

import numpy as np

from gloo_fallback.p2p.frames import (
    INLINE_LIMIT,
    NOTICE,
    OFFER,
    SWITCH,
    PendingMessage,
    frame,
    message_header,
)
from gloo_fallback.shm.ring_buffer import CHUNK, RingReader, RingWriter
from unicoll.arrays.kernels import Flat
from unicoll.backend import Call
from unicoll.net.wire.channel import Channel, Connection, within_a_host
from unicoll.process.interrupts import raised_by_handler

_DONTWAIT = socket.MSG_DONTWAIT
_SYSCALL_BYTES = 1 << 20
"""Maximum bytes per system call."""
_VIEW_BYTES = 1 << 12
"""From this size on a copy of an array takes longer than a view of it."""


class MessageSender:
    """Sends messages and control frames to one peer.

    Args:
        sock: the connection.
        poll: the epoll object at which it is registered.
        share: True if messages may use shared memory.
        finish: called with each queued send whose data has left.
        log: called with the reason if the peer is on this host, and messages cannot use shared
            memory.

    Attributes:
        outbox: the queued sends; part of the first may have left.
        blocked: True if the socket's send buffer is full.
        peer_closed: True once the peer has closed its end; its data can still be read.
        writer: the ring, or None. Messages use it once ``shared`` is True.
        control_frames: queued frames other than messages; the next :meth:`flush` sends them.
        remainder: the unsent bytes of a frame of which a part has left.
        reader: the ring of the other direction, or None; its position is part of each notice.
    """

    def __init__(
        self,
        sock: Connection,
        poll: select.epoll,
        share: bool,
        finish: Callable[[PendingMessage], None],
        log: Callable[[str], None],
    ) -> None:
        self.outbox: deque[PendingMessage] = deque()
        self.blocked = False
        self.peer_closed = False
        self.writer: RingWriter | None = None
        self.reader: RingReader | None = None
        self.shared = False
        self._sock = sock
        self._descriptor = sock.fileno()
        self._poll = poll
        self._finish = finish
        self._log = log
        self._may_offer = share
        self.control_frames = bytearray()
        self.remainder = memoryview(b"")

    # --- state ------------------------------------------------------------------------------------

    @property
    def queued(self) -> bool:
        """True if a message or a control frame is queued."""
        return bool(self.outbox or self.frames_queued)

    @property
    def frames_queued(self) -> bool:
        """True if a control frame, or the rest of a frame, is queued for the socket."""
        return bool(self.remainder or self.control_frames)

    @property
    def awaits_answer(self) -> bool:
        """True if the peer has not yet answered the offer of a ring."""
        return self.writer is not None and not self.writer.ready

    @property
    def ring_has_space(self) -> bool | None:
        """True if the ring has space for the next part of the first queued message; None if that
        uses the socket."""
        first = self.outbox[0] if self.outbox else None
        writer = None if first is None else self._ring_of(len(first.view))
        if first is None or writer is None:
            return None
        return writer.has_space(len(first.view) - first.offset, first.begun)

    def _ring_of(self, size: int) -> RingWriter | None:
        """The ring, if a message of this size uses it now.

        If positions are exchanged in notices, a small message takes less time in the notice's
        place.
        """
        writer = self.writer
        if not self.shared or writer is None:
            return None
        return writer if writer.strong or size >= INLINE_LIMIT else None

    # --- messages ---------------------------------------------------------------------------------

    def try_send(self, call: Call) -> bool:
        """Send a message of one chunk, if none is queued before it and the socket or the ring takes
        all of it now."""
        if self.outbox or self.peer_closed:
            return False
        buffer, tag = call.inputs[0], call.tag
        assert tag is not None
        size, code = buffer.nbytes, buffer.dtype.code
        if size > CHUNK:
            return False
        flat: Flat = buffer.flat  # type: ignore[assignment]
        writer = self._ring_of(size)
        if writer is not None:
            data = flat.tobytes() if size < _VIEW_BYTES else flat.view(np.uint8).data
            if not writer.put(code, tag, data):
                return False
            if writer.must_notify():
                self.notify()
            return True
        # The peer has mapped the ring: enqueue() sends the frame that switches to it first. It also
        # sends the offer of a ring, which comes before the first message.
        must_switch = not self.shared and self.writer is not None and self.writer.ready
        if (
            size > INLINE_LIMIT
            or self.remainder
            or self.control_frames
            or self._may_offer
            or must_switch
        ):
            return False
        joined = message_header(code, tag, size) + flat.tobytes()
        try:
            sent = self._sock.send(joined, _DONTWAIT)
        except OSError as e:
            if raised_by_handler(e):
                raise
            # A Channel may have sent a part of its record. Its next send has to begin with the same
            # data, as the remainder does.
            sent, self.peer_closed = 0, not isinstance(e, BlockingIOError)
        if sent < len(joined):
            # The rest is a copy of the array's bytes. So the message counts as sent, and the caller
            # may write to its array again.
            self.remainder = memoryview(joined)[sent:]
            self._block(not self.peer_closed)
        return not self.peer_closed

    def enqueue(self, pending: PendingMessage) -> None:
        """Queue a send, and send as much as the socket and the ring take now."""
        self.outbox.append(pending)
        if len(self.outbox) == 1:
            self.flush()

    def flush(self) -> None:
        """Send as much as the socket and the ring take now."""
        if self.peer_closed:
            return
        blocked = False
        try:
            while self._advance():
                pass
        except OSError as e:
            if raised_by_handler(e):
                raise
            blocked = isinstance(e, BlockingIOError)
            self.peer_closed = not blocked
        self._block(blocked)

    def _block(self, blocked: bool) -> None:
        if blocked is not self.blocked:
            self.blocked = blocked
            self._poll.modify(
                self._descriptor, select.EPOLLIN | (select.EPOLLOUT if blocked else 0)
            )

    def _advance(self) -> bool:
        """Make one step of sending; False if nothing is queued or the ring is full."""
        # The order is that of the stream. The rest of a frame that has left in part has to follow
        # it. So has the rest of a message that has begun on the socket. Control frames come between
        # messages, and before the next one: an offer or a switch to the ring concerns the messages
        # behind it. A message in the ring does not keep control frames from the socket.
        if self.remainder:
            self.remainder = self.remainder[self._sock.send(self.remainder, _DONTWAIT) :]
            return True
        pending = self.outbox[0] if self.outbox else None
        if pending is not None and pending.begun:
            if pending.offset == len(pending.view):
                self.outbox.popleft()
                self._finish(pending)
                return True
            if not self.shared:
                pending.offset += self._sock.send(
                    pending.view[pending.offset : pending.offset + _SYSCALL_BYTES], _DONTWAIT
                )
                return True
        if self.control_frames:
            self.remainder = memoryview(bytes(self.control_frames))
            self.control_frames.clear()
            return True
        if pending is None:
            return False
        # No message is incomplete on the socket here, so all that follow may use the ring.
        if not self.shared:
            self._agree_on_ring()
        writer = self._ring_of(len(pending.view))
        return self._begin_send(pending) if writer is None else self._write(writer, pending)

    def _begin_send(self, pending: PendingMessage) -> bool:
        if self.control_frames:
            # The offer of a ring, or the switch to it, is sent first.
            return True
        size, header = len(pending.view), pending.header()
        joined = size <= INLINE_LIMIT
        data = header + pending.view if joined else header
        try:
            if joined:
                sent = self._sock.send(data, _DONTWAIT)
            else:
                sent = self._sock.sendmsg([header, pending.view[:_SYSCALL_BYTES]], (), _DONTWAIT)
        except BlockingIOError as e:
            if not isinstance(self._sock, Channel) or raised_by_handler(e):
                raise
            # A part of the Channel's record may have left, and its next send must have the same
            # data. So the message counts as begun.
            sent = 0
        self.remainder = memoryview(data)[sent:]
        pending.offset = size if joined else max(0, sent - len(header))
        pending.begun = True
        return True

    def _write(self, writer: RingWriter, pending: PendingMessage) -> bool:
        """Write the next part of a message to the ring; False if there is no space."""
        if not self._write_part(writer, pending):
            # The notice is requested before the second try. Space that the peer makes before the
            # request is seen by that try; later space is announced.
            writer.await_space()
            if not self._write_part(writer, pending):
                return False
        if writer.must_notify():
            # The notice is only queued: flush(), which calls this, sends it.
            self.control_frames += self._notice()
        return True

    @staticmethod
    def _write_part(writer: RingWriter, pending: PendingMessage) -> bool:
        call, size = pending.call, len(pending.view)
        if pending.begun:
            count = writer.write(pending.view[pending.offset :])
            pending.offset += count
            return count > 0
        code, tag = call.inputs[0].dtype.code, call.tag
        assert tag is not None
        if size <= CHUNK:
            pending.begun = writer.put(code, tag, pending.view)
            pending.offset = size if pending.begun else 0
        else:
            pending.begun = writer.begin(code, tag, size)
            if pending.begun and not writer.strong:
                # One notice announces both the header and the first bytes.
                pending.offset = writer.write(pending.view)
        return pending.begun

    # --- control frames ---------------------------------------------------------------------------

    def notify(self) -> None:
        """Tell the peer that there is data, or space, in a ring."""
        self.control_frames += self._notice()
        self.flush()

    def _notice(self) -> bytes:
        written = self.writer.position if self.writer is not None else 0
        return frame(NOTICE, written, self.reader.position if self.reader is not None else 0)

    def _agree_on_ring(self) -> None:
        """Switch to the ring if the peer has mapped it; before the first message offer one to a
        peer on this host."""
        if self.writer is not None and self.writer.ready:
            # The receiver reads the ring only behind this frame, so messages on the socket and in
            # the ring stay in order.
            self.shared = True
            self.control_frames += frame(SWITCH)
        elif self._may_offer:
            self._may_offer = False
            if self._on_this_host():
                try:
                    self.writer = RingWriter()
                except OSError as e:
                    if raised_by_handler(e):
                        raise
                    self._log(f"no shared memory is available ({e})")
                    return
                self.control_frames += frame(OFFER, len(self.writer.offer)) + self.writer.offer

    def _on_this_host(self) -> bool:
        """True if the peer may be able to map memory of this process."""
        return within_a_host(self._sock) and hasattr(os, "memfd_create")

    def answered(self, error: int) -> None:
        """The peer's answer to the offer: 0 if it has mapped the ring, or an error number."""
        assert self.writer is not None
        if not error:
            self.writer.accepted()
            return
        self.writer.close()
        self.writer = None
        self._log(f"it cannot map this process's shared memory ({os.strerror(error)})")
