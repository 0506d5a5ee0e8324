"""The receives of one message connection: frames from the socket, and messages from the ring of
shared memory.

Nothing blocks: receiving reads the data that has arrived. The caller holds the engine's lock.
"""

from __future__ import annotations

import errno
import socket
from typing import TYPE_CHECKING

import numpy as np

from gloo_fallback.p2p.frames import (
    ANSWER,
    HEADER,
    MAGIC,
    MESSAGE,
    NOTICE,
    OFFER,
    SWITCH,
    IncomingMessage,
    frame,
)
from gloo_fallback.p2p.sender import MessageSender
from gloo_fallback.shm.ring_buffer import RingReader
from unicoll.arrays.kernels import Flat
from unicoll.backend import Call
from unicoll.net.wire.channel import Channel, Connection
from unicoll.net.wire.records import TamperedError
from unicoll.process.interrupts import raised_by_handler

if TYPE_CHECKING:
    from gloo_fallback.p2p.engine import P2PEngine

_DONTWAIT = socket.MSG_DONTWAIT
_MAX_OFFER = 4096
_MAX_READS = 16
"""Messages, or chunks of them, that are read from the ring before other connections are read."""
_MAX_ERRNO = 4095


class MessageReceiver:
    """Receives the messages and control frames of one peer.

    Args:
        engine: matches the messages to receives.
        peer: the peer's rank in the group.
        sock: the connection.
        share: True if messages may use shared memory.
        sender: of the same connection; it sends answers and notices.

    Attributes:
        message: the message that is being received, or None.
        reader: the ring, or None. Messages use it once ``shared`` is True.
        closed: True once the connection was closed.
    """

    def __init__(
        self, engine: P2PEngine, peer: int, sock: Connection, share: bool, sender: MessageSender
    ) -> None:
        self.message: IncomingMessage | None = None
        self.reader: RingReader | None = None
        self.shared = False
        self.closed = False
        self._engine = engine
        self._peer = peer
        self._sock = sock
        self._channel = sock if isinstance(sock, Channel) else None
        self._share = share
        self._sender = sender
        # It has the bytes of a header whose rest has not come.
        self._partial_header = bytearray()
        self._offered: IncomingMessage | None = None

    # --- state ------------------------------------------------------------------------------------

    @property
    def has_shared_data(self) -> bool:
        """True if the peer's ring has unread data."""
        try:
            return self.shared and self.reader is not None and self.reader.available > 0
        except OSError:
            # The position is invalid: the thread that reads the ring raises the error.
            return True

    @property
    def has_unread(self) -> bool:
        """True if a message is incomplete, or received data was not handled; data in the socket
        does not count."""
        unread = self._partial_header or (self._channel is not None and self._channel.pending)
        return bool(self.message or unread or self.has_shared_data)

    # --- receive ----------------------------------------------------------------------------------

    def receive(self, inbox: memoryview) -> None:
        """Receive the data that has arrived.

        Args:
            inbox: memory for data without a known destination.

        Raises:
            BlockingIOError: no data has arrived.
            OSError, EOFError: the connection has ended.
        """
        reader = self.reader
        if reader is not None and self.shared and reader.strong:
            self._receive_from_both(inbox)
        else:
            self._receive_once(inbox)
            if self._channel is not None:
                self._receive_pending(inbox)
        # What was received may have queued an answer or a notice, for which the peer waits.
        if self._sender.control_frames:
            self._sender.flush()

    def _receive_from_both(self, inbox: memoryview) -> None:
        """Receive frames, and messages in the ring, which are not announced while this side
        polls."""
        try:
            self._receive_once(inbox)
            self._receive_pending(inbox)
        except BlockingIOError:
            if not self.receive_shared():
                raise
        # It is an OSError as well. Of a peer whose data was altered nothing more is received, not
        # even from the ring.
        except TamperedError:
            raise
        except (OSError, EOFError):
            while self.receive_shared():
                # The peer has written this before its connection ended, so it is still received.
                pass
            raise
        else:
            self.receive_shared()

    def _receive_pending(self, inbox: memoryview) -> None:
        """Receive decrypted data, for which epoll reports no event."""
        while self._channel is not None and self._channel.pending and not self.closed:
            self._receive_once(inbox)

    def _receive_once(self, inbox: memoryview) -> None:
        message = self.message
        if message is not None and not message.shared:
            # The rest of a long message is received at its destination, without a copy.
            got = self._sock.recv_into(message.view[message.got :], 0, _DONTWAIT)
            if not got:
                raise EOFError
            self._received(message, got)
        else:
            got = self._sock.recv_into(inbox, 0, _DONTWAIT)
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
                magic, kind, code, _, tag, first, second = HEADER.unpack_from(inbox, start)
                start += HEADER.size
                end = start + first
                # A message that is complete in this buffer, and whose receive is posted, is copied
                # to its array at once.
                whole = kind == MESSAGE and end <= stop and magic == MAGIC and self._may_begin()
                if whole and self._engine.deliver(self._peer, tag, code, inbox[start:end]):
                    start = end
                else:
                    self._handle_frame(magic, kind, code, 0, tag, first, second)

    def _may_begin(self) -> bool:
        """True if a message may begin on the socket."""
        if self.message is not None:
            return False
        return not self.shared or (self.reader is not None and not self.reader.strong)

    def _handle_frame(
        self, magic: int, kind: int, code: int, _: int, tag: int, first: int, second: int
    ) -> None:
        if magic != MAGIC:
            raise OSError(errno.EPROTO, "invalid frame")
        if kind == NOTICE:
            self._handle_notice(first, second)
        elif kind == ANSWER and self._sender.awaits_answer and first <= _MAX_ERRNO:
            self._sender.answered(first)
        elif kind == MESSAGE and self._may_begin():
            self._begin_message(IncomingMessage(self._peer, tag, code, first))
        # An answer or a notice may come at any time. An offer or a switch may not come within a
        # message, nor once the ring is used.
        elif self.shared or self.message is not None:
            raise OSError(errno.EPROTO, "invalid frame")
        elif kind == OFFER and self.reader is None and 0 < first <= _MAX_OFFER:
            self.message = self._offered = IncomingMessage(self._peer, 0, 0, first)
            self.message.allocate()
        elif kind == SWITCH and self.reader is not None:
            self.shared = True
        else:
            raise OSError(errno.EPROTO, "invalid frame")

    def _begin_message(self, message: IncomingMessage) -> None:
        self._engine.begin(message)
        self.message = message
        if not message.size:
            self._received(message, 0)

    def _received(self, message: IncomingMessage, count: int) -> None:
        message.got += count
        if message.got < message.size:
            return
        self.message = None
        if message is self._offered:
            self._offered = None
            self._accept_offer(message)
        else:
            self._engine.complete(message)

    # --- the ring ---------------------------------------------------------------------------------

    def receive_shared(self) -> bool:
        """Receive messages, or chunks of one, from the ring; False if it is empty.

        After a message that matched a posted receive, a message that nothing awaits is left in the
        ring, so that a receive posted later can read it without another copy.

        Raises:
            OSError: the ring is invalid.
        """
        reader, matched = self.reader, False
        assert reader is not None
        start = reader.position
        for _ in range(_MAX_READS):
            message = self.message
            if message is not None:
                # A message that has begun on the socket comes before those in the ring.
                count = reader.read(message.view[message.got :]) if message.shared else 0
                if not count:
                    break
                if reader.must_notify():
                    self._sender.notify()
                self._received(message, count)
                matched = message.receive is not None
                continue
            header = reader.header()
            if header is None:
                break
            code, tag, size = header
            if matched and not self._engine.is_awaited(self._peer, tag):
                break
            body = reader.body(size)
            if body is not None and self._engine.deliver(self._peer, tag, code, body):
                matched = True
                reader.skip(size)
            else:
                reader.skip()
                self._begin_message(IncomingMessage(self._peer, tag, code, size, shared=True))
            if reader.must_notify():
                self._sender.notify()
        return reader.position != start

    def take(self, call: Call) -> bool:
        """Complete a receive with the next message in the ring, if that has one chunk and matches;
        False if not.

        Raises:
            OSError: the ring is invalid.
        """
        reader, buffer = self.reader, call.outputs[0]
        assert reader is not None
        header = reader.header() if self.message is None else None
        if header is None:
            return False
        code, tag, size = header
        if (call.tag is not None and call.tag != tag) or not call.accepts(code, size):
            return False
        body = reader.body(size)
        if body is None:
            return False
        flat: Flat = buffer.flat  # type: ignore[assignment]
        # The bytes are copied before skip() stores the new position, which permits the sender to
        # overwrite them.
        flat.view(np.uint8).data[:size] = body
        reader.skip(size)
        if reader.must_notify():
            self._sender.notify()
        call.matched(self._peer, tag, code, size)
        call.write_back()
        return True

    def _handle_notice(self, written: int, read: int) -> None:
        """Store the peer's positions, if they are not read from the shared memory; continue to send
        and receive."""
        reader, writer = self.reader, self._sender.writer
        if writer is not None and not writer.strong:
            writer.read = read
        if reader is not None and not reader.strong:
            reader.written = written
            while self.shared and self.receive_shared():
                # Frames that follow on the socket are of later messages, so what was written to the
                # ring before this notice is received first.
                pass
        self._sender.flush()

    def _accept_offer(self, offer: IncomingMessage) -> None:
        """Map an offered ring, and answer with 0 or an error number."""
        error = 0
        try:
            if not self._share:
                raise OSError(errno.EOPNOTSUPP, "UNICOLL_TRANSPORT=tcp")
            self.reader = self._sender.reader = RingReader(bytes(offer.view))
        except OSError as e:
            # An exception of a signal's handler does not mean that the ring cannot be mapped.
            if raised_by_handler(e):
                raise
            error = e.errno or errno.EIO
        self._sender.control_frames += frame(ANSWER, error)
