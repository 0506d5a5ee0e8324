"""The message connection to one peer: sends and receives frames and data through the socket and the rings.

Nothing blocks. Sending stops when the socket or the ring is full, and :meth:`PeerConnection.flush` continues it;
receiving reads the data that has arrived. The caller holds the engine's lock.
"""

from __future__ import annotations

import errno
import fcntl
import os
import select
import socket
import struct
import termios
from collections import deque
from typing import TYPE_CHECKING

import numpy as np

from gloo_fallback.p2p.frames import (
    ANSWER,
    CHUNK,
    CREDIT,
    HEADER,
    INLINE_LIMIT,
    MAGIC,
    MESSAGE,
    OFFER,
    SHARED,
    IncomingMessage,
    PendingMessage,
    frame,
)
from gloo_fallback.shm import ring_buffer
from gloo_fallback.shm.ring_buffer import RingReader, RingWriter
from unicoll.arrays.kernels import Flat
from unicoll.backend import Call
from unicoll.net import logs
from unicoll.net.channel import Channel, Connection, within_a_host

if TYPE_CHECKING:
    from gloo_fallback.p2p.engine import P2PEngine

_DONTWAIT = socket.MSG_DONTWAIT
_SYSCALL_BYTES = 1 << 20
"""Maximum bytes per system call."""
_MAX_OFFER = 4096
_MORE_THAN_ANY = 1 << 60
_SLACK = 1 << 20
"""Bytes by which the system may exceed its limit."""
_MAX_ERRNO = 4095


def _most_buffered(setting: str) -> int:
    """Bytes that the system buffers at most in one direction of a TCP connection; more than any if it is not known."""
    try:
        with open(f"/proc/sys/net/ipv4/{setting}", encoding="ascii") as file:
            return int(file.read().split()[2]) + _SLACK
    except (OSError, ValueError, IndexError):
        return _MORE_THAN_ANY


class PeerConnection:
    """The message connection to one peer.

    Args:
        engine: matches the messages to receives, and finishes sends.
        peer: the peer's rank in the group.
        sock: the connection.
        poll: the epoll object to register it at.
        share: True if large messages may use shared memory.

    Attributes:
        outbox: the queued sends; part of the first may have left.
        message: the message that is being received, or None.
        descriptor: of the socket.
        closed: True once :meth:`close` was called.
        blocked: True if the socket's send buffer is full.
        writer, reader: the rings of large messages, or None.
    """

    def __init__(
        self, engine: P2PEngine, peer: int, sock: Connection, poll: select.epoll, share: bool
    ) -> None:
        self.peer = peer
        self.sock = sock
        self._channel = sock if isinstance(sock, Channel) else None
        self.outbox: deque[PendingMessage] = deque()
        self.message: IncomingMessage | None = None
        self.closed = False
        self.writer: RingWriter | None = None
        self.reader: RingReader | None = None
        self._engine = engine
        self._poll = poll
        self._share = share
        self._may_offer = share
        self._control_frames = bytearray()  # queued frames other than messages
        self._remainder = memoryview(b"")  # unsent bytes of a frame
        self._partial_header = bytearray()  # received bytes of an incomplete header
        self._offered: IncomingMessage | None = None
        self._send_closed = False  # the peer has closed its end; its data can still be read
        self.blocked = False
        self.descriptor = sock.fileno()
        poll.register(self.descriptor, select.EPOLLIN)

    @property
    def busy(self) -> bool:
        """True if data is queued, or a message is incomplete."""
        return bool(self.outbox or self.message or self._remainder or self._control_frames)

    @property
    def has_unsent(self) -> bool:
        """True if closing the socket could lose data that has not reached the peer's kernel.

        Unread credit makes the kernel answer a close with a reset, which drops unsent data.
        """
        if self.outbox or self._remainder:
            return True
        if self.writer is None or self._send_closed:
            return False
        return self._queued(termios.TIOCOUTQ) > 0

    @property
    def delivered(self) -> bool:
        """True if all that was queued has reached the peer's host."""
        queued = self.outbox or self._remainder or self._control_frames
        return not (queued or self._queued(termios.TIOCOUTQ) > 0)

    @property
    def all_read(self) -> bool:
        """True if all that has come was read, and no message is incomplete."""
        unread = self._partial_header or (self._channel is not None and self._channel.pending)
        return not (self.message or unread or self._queued(termios.FIONREAD) > 0)

    @property
    def unsent(self) -> int:
        """Bytes of the first queued send that the system does not take while the peer reads nothing."""
        if not self.outbox or self._send_closed:
            return 0
        first, writer = self.outbox[0], self.writer
        left = len(first.view) - first.offset
        ready = writer is not None and writer.ready and len(first.view) >= ring_buffer.SHARED_THRESHOLD
        if not ready or (first.begun and not first.shared):
            return max(0, left - _most_buffered("tcp_wmem"))
        assert writer is not None
        moves = self._remainder or self._control_frames or not self.all_read
        full = left > 0 and not moves and not writer.next_chunk(left, len(first.view))
        return _MORE_THAN_ANY if full else 0

    @property
    def takes(self) -> int:
        """Bytes that the system takes from the peer while this rank does not read; -1 if credit is on its way to it."""
        return -1 if self._queued(termios.TIOCOUTQ) > 0 else _most_buffered("tcp_rmem")

    def _queued(self, request: int) -> int:
        """Bytes in the socket's buffer for sends or receives."""
        return int(struct.unpack("i", fcntl.ioctl(self.descriptor, request, bytes(4)))[0])

    @property
    def awaits_answer(self) -> bool:
        """True if the peer has not yet answered the offer of a ring."""
        return self.writer is not None and not self.writer.ready

    def close(self) -> None:
        """Unregister the connection and release the rings; the endpoint closes the socket."""
        self.closed = True
        try:
            self._poll.unregister(self.descriptor)
        except OSError:
            pass
        for end in (self.writer, self.reader):
            if end is not None:
                end.close()

    # --- send -----------------------------------------------------------------------------------------------

    def try_send(self, call: Call) -> bool:
        """Send a message, if none is queued before it and the socket or the ring takes all of it now."""
        if self.outbox or self._remainder or self._control_frames or self._send_closed:
            return False
        buffer = call.inputs[0]
        size, code, writer = buffer.nbytes, buffer.dtype.code, self.writer
        flat: Flat = buffer.flat  # type: ignore[assignment]
        if size < ring_buffer.SHARED_THRESHOLD or (
            size <= INLINE_LIMIT and writer is None and not self._may_offer
        ):
            data = HEADER.pack(MAGIC, MESSAGE, code, 0, call.tag, size, 0) + flat.tobytes()
        elif writer is not None and writer.ready and writer.next_chunk(size, size) == size:
            writer.write(flat.view(np.uint8).data)
            data = HEADER.pack(MAGIC, SHARED, code, 0, call.tag, size, size)
        else:
            return False
        try:
            sent = self.sock.send(data, _DONTWAIT)
        except BlockingIOError:
            sent = 0
        except OSError:
            sent, self._send_closed = 0, True
        if sent < len(data):
            self._remainder = memoryview(data)[sent:]
            self._block(not self._send_closed)
        return not self._send_closed

    def flush(self) -> None:
        """Send as much as the socket and the ring take now."""
        if self._send_closed:
            return
        blocked = False
        try:
            while self._advance():
                pass
        except BlockingIOError:
            blocked = True
        except OSError:
            self._send_closed = True
        self._block(blocked)

    def _block(self, blocked: bool) -> None:
        if blocked is not self.blocked:
            self.blocked = blocked
            self._poll.modify(self.descriptor, select.EPOLLIN | (select.EPOLLOUT if blocked else 0))

    def _advance(self) -> bool:
        """Make one step of sending; False if nothing is queued or the ring is full."""
        if self._remainder:
            self._remainder = self._remainder[self.sock.send(self._remainder, _DONTWAIT) :]
            return True
        pending = self.outbox[0] if self.outbox else None
        if pending is not None and pending.begun:
            if pending.offset == len(pending.view):
                self.outbox.popleft()
                self._engine.finish(pending)
                return True
            if not pending.shared:
                pending.offset += self.sock.send(
                    pending.view[pending.offset : pending.offset + _SYSCALL_BYTES], _DONTWAIT
                )
                return True
        if self._control_frames:
            self._remainder = memoryview(bytes(self._control_frames))
            self._control_frames.clear()
            return True
        if pending is None:
            return False
        return self._send_chunk(pending, CHUNK) if pending.begun else self._begin_send(pending)

    def _begin_send(self, pending: PendingMessage) -> bool:
        size = len(pending.view)
        if size >= ring_buffer.SHARED_THRESHOLD and self._ring_ready():
            return self._send_chunk(pending, SHARED)
        if self._control_frames:
            return True  # the offer of a ring is sent first
        header = pending.header(MESSAGE)
        joined = size <= INLINE_LIMIT
        data = header + pending.view if joined else header
        try:
            if joined:
                sent = self.sock.send(data, _DONTWAIT)
            else:
                sent = self.sock.sendmsg([header, pending.view[:_SYSCALL_BYTES]], (), _DONTWAIT)
        except BlockingIOError:
            if self._channel is None:
                raise
            sent = 0  # part of its record may have left, so it must be sent next
        self._remainder = memoryview(data)[sent:]
        pending.offset = size if joined else max(0, sent - len(header))
        pending.begun = True
        return True

    def _send_chunk(self, pending: PendingMessage, kind: int) -> bool:
        """Write the next chunk of a message to the ring, and queue its frame."""
        writer = self.writer
        assert writer is not None
        count = writer.next_chunk(len(pending.view) - pending.offset, len(pending.view))
        if not count:
            return False
        writer.write(pending.view[pending.offset : pending.offset + count])
        pending.begun = pending.shared = True
        pending.offset += count
        self._remainder = memoryview(pending.header(kind, count))
        return True

    def _ring_ready(self) -> bool:
        """True if the peer has mapped a ring; the first call offers one to a peer on this host."""
        if self.writer is not None:
            return self.writer.ready
        if self._may_offer:
            self._may_offer = False
            if self._on_this_host():
                try:
                    self.writer = RingWriter()
                except OSError as e:
                    self._log_socket_fallback(f"no shared memory is available ({e})")
                    return False
                self._control_frames += frame(OFFER, len(self.writer.offer)) + self.writer.offer
        return False

    def _on_this_host(self) -> bool:
        """True if the peer may be able to map memory of this process."""
        return within_a_host(self.sock) and hasattr(os, "memfd_create")

    def _log_socket_fallback(self, reason: str) -> None:
        logs.logger("gloo").info(
            "messages to %s use the socket: %s", self._engine.context.who(self.peer), reason
        )

    # --- receive --------------------------------------------------------------------------------------------

    def receive(self, inbox: memoryview) -> None:
        """Receive the data that has arrived.

        Args:
            inbox: memory for data without a known destination.

        Raises:
            BlockingIOError: no data has arrived.
            OSError, EOFError: the connection has ended.
        """
        self._receive_once(inbox)
        while self._channel is not None and self._channel.pending and not self.closed:
            self._receive_once(inbox)  # epoll reports no event for it
        if self._control_frames:
            self.flush()

    def _receive_once(self, inbox: memoryview) -> None:
        message = self.message
        if message is not None and not message.shared:
            got = self.sock.recv_into(message.view[message.got :], 0, _DONTWAIT)
            if not got:
                raise EOFError
            self._received(message, got)
        else:
            got = self.sock.recv_into(inbox, 0, _DONTWAIT)
            if not got:
                raise EOFError
            self._parse(inbox, got)

    def _parse(self, inbox: memoryview, stop: int) -> None:
        start = 0
        while start < stop:
            message = self.message
            if message is not None and not message.shared:
                count = min(stop - start, message.size - message.got)
                message.view[message.got : message.got + count] = inbox[start : start + count]
                start += count
                self._received(message, count)
            elif self._partial_header or stop - start < HEADER.size:
                missing = HEADER.size - len(self._partial_header)
                self._partial_header += inbox[start : min(start + missing, stop)]
                start += missing
                if len(self._partial_header) == HEADER.size:
                    fields = HEADER.unpack(self._partial_header)
                    self._partial_header.clear()
                    self._handle_frame(*fields)
            else:
                magic, kind, code, _, tag, size, length = HEADER.unpack_from(inbox, start)
                start += HEADER.size
                end = start + size
                whole = kind == MESSAGE and end <= stop and magic == MAGIC
                if whole and self._engine.deliver(self.peer, tag, code, inbox[start:end]):
                    start = end
                else:
                    self._handle_frame(magic, kind, code, 0, tag, size, length)

    def _handle_frame(
        self, magic: int, kind: int, code: int, _: int, tag: int, size: int, length: int
    ) -> None:
        if magic != MAGIC:
            raise OSError(errno.EPROTO, "invalid frame")
        if kind <= SHARED and self.message is None:
            message = IncomingMessage(tag, code, size)
            self._engine.begin(self.peer, message)
            self.message = message
            if kind == SHARED:
                message.shared = True
                self._read_chunk(message, length)
            elif not size:
                self._received(message, 0)
        elif kind == CHUNK and self.message is not None:
            self._read_chunk(self.message, length)
        elif kind == CREDIT and self.writer is not None and self.writer.free + length <= ring_buffer.RING:
            self.writer.free += length
            self.flush()
        elif kind == OFFER and self.message is None and 0 < size <= _MAX_OFFER:
            self.message = self._offered = IncomingMessage(0, 0, size)
            self.message.allocate()
        elif kind == ANSWER and self.awaits_answer and size <= _MAX_ERRNO:
            self._handle_answer(size)
        else:
            raise OSError(errno.EPROTO, "invalid frame")

    def _read_chunk(self, message: IncomingMessage, count: int) -> None:
        """Read a chunk of a message from the ring."""
        reader = self.reader
        if reader is None or not 0 < count <= min(message.size - message.got, ring_buffer.CHUNK):
            raise OSError(errno.EPROTO, "invalid chunk of a message")
        reader.read(message.view[message.got : message.got + count])
        if reader.uncredited >= ring_buffer.CREDIT:
            self._control_frames += frame(CREDIT, 0, reader.uncredited)
            reader.uncredited = 0
            self.flush()
        self._received(message, count)

    def _received(self, message: IncomingMessage, count: int) -> None:
        message.got += count
        if message.got < message.size:
            return
        self.message = None
        if message is self._offered:
            self._offered = None
            self._accept_offer(message)
        else:
            self._engine.complete(self.peer, message)

    def _accept_offer(self, offer: IncomingMessage) -> None:
        """Map an offered ring, and answer with 0 or an error number."""
        error = 0
        try:
            if not self._share:
                raise OSError(errno.EOPNOTSUPP, "UNICOLL_TRANSPORT=tcp")
            self.reader = RingReader(bytes(offer.view))
        except OSError as e:
            error = e.errno or errno.EIO
        self._control_frames += frame(ANSWER, error)

    def _handle_answer(self, error: int) -> None:
        assert self.writer is not None
        if not error:
            self.writer.accepted()
            return
        self.writer.close()
        self.writer = None
        self._log_socket_fallback(f"it cannot map this process's shared memory ({os.strerror(error)})")
