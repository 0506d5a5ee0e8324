"""The connection to one member: frames and bytes out, frames and bytes in, through the socket and the rings.

Nothing here waits. Sending stops where the socket or the ring is full and is taken up again by :meth:`Line.flush`;
receiving takes what has come. The mailroom's lock is held in all of it.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import select
import socket
import struct
import termios
from collections import deque
from typing import Protocol

import numpy as np

from unicoll.backend import Call
from unicoll.channel import Channel, Connection, within_a_host
from unicoll.kernels import Flat

from . import ring
from .letters import (
    ANSWER,
    CREDIT,
    HEADER,
    JOIN,
    MAGIC,
    MESSAGE,
    OFFER,
    PART,
    SHARED,
    Letter,
    Message,
    frame,
)
from .ring import Inlet, Outlet

__all__ = ["Line", "Office"]

_DONTWAIT = socket.MSG_DONTWAIT
_PIECE = 1 << 20
"""Bytes handed to one system call."""
_LONGEST_OFFER = 4096
_GREATEST_ERROR = 4095


class Office(Protocol):
    """Whom a line asks and tells."""

    def deliver(self, peer: int, tag: int, code: int, body: memoryview) -> bool:
        """A whole message has come: hand it to its receive; False if that is to be done piece by piece."""

    def begin(self, peer: int, message: Message) -> None:
        """A message's header has come: find out where its bytes go."""

    def complete(self, peer: int, message: Message) -> None:
        """All of it has come."""

    def sent(self, letter: Letter) -> None:
        """All of it has left."""

    def who(self, peer: int) -> str:
        """A member in words."""


class Line:
    """The connection to one member.

    Args:
        office: the mailroom.
        peer: the member's rank in the group.
        sock: the connection.
        poll: where it is registered.
        share: whether large messages may go through shared memory.

    Attributes:
        outbox: the sends that wait, the first of them perhaps half done.
        message: what is half there.
        number: the socket's descriptor.
        over: whether it was closed here.
    """

    def __init__(
        self, office: Office, peer: int, sock: Connection, poll: select.epoll, share: bool
    ) -> None:
        self.peer = peer
        self.sock = sock
        self._channel = sock if isinstance(sock, Channel) else None
        self.outbox: deque[Letter] = deque()
        self.message: Message | None = None
        self.over = False
        self.outlet: Outlet | None = None
        self.inlet: Inlet | None = None
        self._office = office
        self._poll = poll
        self._share = share
        self._may_offer = share
        self._control = bytearray()  # frames that are no messages
        self._rest = memoryview(b"")  # of a frame that has left in part
        self._head = bytearray()  # of a header that has come in part
        self._offered: Message | None = None
        self._mute = False  # the peer has closed its end; what it sent is still to be read
        self._blocked = False
        self.number = sock.fileno()
        poll.register(self.number, select.EPOLLIN)

    @property
    def busy(self) -> bool:
        """Whether something is to be sent, or half received."""
        return bool(self.outbox or self.message or self._rest or self._control)

    @property
    def unsent(self) -> bool:
        """Whether something has not reached the peer's kernel yet that closing the socket could destroy.

        Unread credit makes the kernel answer a close with a reset, which drops what waits to be sent.
        """
        if self.outbox or self._rest:
            return True
        if self.outlet is None or self._mute:
            return False
        queued: int = struct.unpack("i", fcntl.ioctl(self.number, termios.TIOCOUTQ, bytes(4)))[0]
        return queued > 0

    @property
    def asked(self) -> bool:
        """Whether the peer has not yet answered the offer of a ring."""
        return self.outlet is not None and not self.outlet.ready

    def close(self) -> None:
        """No more of it; the socket is closed by its owner."""
        self.over = True
        try:
            self._poll.unregister(self.number)
        except OSError:
            pass
        for end in (self.outlet, self.inlet):
            if end is not None:
                end.close()

    # --- out ------------------------------------------------------------------------------------------------------

    def send_at_once(self, call: Call) -> bool:
        """Send a message that nothing is before, if the socket or the ring takes all of it now."""
        if self.outbox or self._rest or self._control or self._mute:
            return False
        buffer = call.inputs[0]
        size, code, outlet = buffer.nbytes, buffer.dtype.code, self.outlet
        flat: Flat = buffer.flat  # type: ignore[assignment]
        if size < ring.SHARED_FROM or (size <= JOIN and outlet is None and not self._may_offer):
            data = HEADER.pack(MAGIC, MESSAGE, code, 0, call.tag, size, 0) + flat.tobytes()
        elif outlet is not None and outlet.ready and outlet.part(size, size) == size:
            outlet.put(flat.view(np.uint8).data)
            data = HEADER.pack(MAGIC, SHARED, code, 0, call.tag, size, size)
        else:
            return False
        try:
            sent = self.sock.send(data, _DONTWAIT)
        except BlockingIOError:
            sent = 0
        except OSError:
            sent, self._mute = 0, True
        if sent < len(data):
            self._rest = memoryview(data)[sent:]
            self._block(not self._mute)
        return not self._mute

    def flush(self) -> None:
        """Send what the socket and the ring take now."""
        if self._mute:
            return
        blocked = False
        try:
            while self._advance():
                pass
        except BlockingIOError:
            blocked = True
        except OSError:
            self._mute = True
        self._block(blocked)

    def _block(self, blocked: bool) -> None:
        if blocked is not self._blocked:
            self._blocked = blocked
            self._poll.modify(self.number, select.EPOLLIN | (select.EPOLLOUT if blocked else 0))

    @property
    def blocked(self) -> bool:
        """Whether the socket takes no more for now."""
        return self._blocked

    def _advance(self) -> bool:
        """One thing more to the socket or the ring; False if there is none, or no room in the ring."""
        if self._rest:
            self._rest = self._rest[self.sock.send(self._rest, _DONTWAIT) :]
            return True
        letter = self.outbox[0] if self.outbox else None
        if letter is not None and letter.begun:
            if letter.offset == len(letter.view):
                self.outbox.popleft()
                self._office.sent(letter)
                return True
            if not letter.shared:
                letter.offset += self.sock.send(
                    letter.view[letter.offset : letter.offset + _PIECE], _DONTWAIT
                )
                return True
        if self._control:
            self._rest = memoryview(bytes(self._control))
            self._control.clear()
            return True
        if letter is None:
            return False
        return self._put(letter, PART) if letter.begun else self._begin(letter)

    def _begin(self, letter: Letter) -> bool:
        size = len(letter.view)
        if size >= ring.SHARED_FROM and self._shared():
            return self._put(letter, SHARED)
        if self._control:
            return True  # the offer of a ring goes first
        header = letter.header(MESSAGE)
        joined = size <= JOIN
        data = header + letter.view if joined else header
        try:
            if joined:
                sent = self.sock.send(data, _DONTWAIT)
            else:
                sent = self.sock.sendmsg([header, letter.view[:_PIECE]], (), _DONTWAIT)
        except BlockingIOError:
            if self._channel is None:
                raise
            sent = 0  # a part of its record may have left, so nothing else can be sent before it
        self._rest = memoryview(data)[sent:]
        letter.offset = size if joined else max(0, sent - len(header))
        letter.begun = True
        return True

    def _put(self, letter: Letter, kind: int) -> bool:
        """The next part of a message into the ring, and its doorbell on the way."""
        outlet = self.outlet
        assert outlet is not None
        count = outlet.part(len(letter.view) - letter.offset, len(letter.view))
        if not count:
            return False
        outlet.put(letter.view[letter.offset : letter.offset + count])
        letter.begun = letter.shared = True
        letter.offset += count
        self._rest = memoryview(letter.header(kind, count))
        return True

    def _shared(self) -> bool:
        """Whether the peer has mapped a ring; offers one the first time, if the peer is on this host."""
        if self.outlet is not None:
            return self.outlet.ready
        if self._may_offer:
            self._may_offer = False
            if self._is_near():
                try:
                    self.outlet = Outlet()
                except OSError as e:
                    self._over_the_socket(f"there is no shared memory to be had ({e})")
                    return False
                self._control += frame(OFFER, len(self.outlet.offer)) + self.outlet.offer
        return False

    def _is_near(self) -> bool:
        """Whether the peer may be able to map this process's memory."""
        return within_a_host(self.sock) and hasattr(os, "memfd_create")

    def _over_the_socket(self, why: str) -> None:
        logging.getLogger("unicoll").info(
            "messages to %s go over the socket: %s", self._office.who(self.peer), why
        )

    # --- in -------------------------------------------------------------------------------------------------------

    def pull(self, inbox: memoryview) -> None:
        """Take what has come.

        Args:
            inbox: memory for what comes before it is known where it goes.

        Raises:
            BlockingIOError: nothing has.
            OSError, EOFError: the connection is over.
        """
        self._pull(inbox)
        while self._channel is not None and self._channel.pending and not self.over:
            self._pull(inbox)  # no event would tell of it
        if self._control:
            self.flush()

    def _pull(self, inbox: memoryview) -> None:
        message = self.message
        if message is not None and not message.shared:
            got = self.sock.recv_into(message.view[message.got :], 0, _DONTWAIT)
            if not got:
                raise EOFError
            self._arrive(message, got)
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
                self._arrive(message, count)
            elif self._head or stop - start < HEADER.size:
                missing = HEADER.size - len(self._head)
                self._head += inbox[start : min(start + missing, stop)]
                start += missing
                if len(self._head) == HEADER.size:
                    fields = HEADER.unpack(self._head)
                    self._head.clear()
                    self._frame(*fields)
            else:
                magic, kind, code, _, tag, size, part = HEADER.unpack_from(inbox, start)
                start += HEADER.size
                end = start + size
                whole = kind == MESSAGE and end <= stop and magic == MAGIC
                if whole and self._office.deliver(self.peer, tag, code, inbox[start:end]):
                    start = end
                else:
                    self._frame(magic, kind, code, 0, tag, size, part)

    def _frame(self, magic: int, kind: int, code: int, _: int, tag: int, size: int, part: int) -> None:
        if magic != MAGIC:
            raise OSError(errno.EPROTO, "not a message")
        if kind <= SHARED and self.message is None:
            message = Message(tag, code, size)
            self._office.begin(self.peer, message)
            self.message = message
            if kind == SHARED:
                message.shared = True
                self._take(message, part)
            elif not size:
                self._arrive(message, 0)
        elif kind == PART and self.message is not None:
            self._take(self.message, part)
        elif kind == CREDIT and self.outlet is not None and self.outlet.free + part <= ring.RING:
            self.outlet.free += part
            self.flush()
        elif kind == OFFER and self.message is None and 0 < size <= _LONGEST_OFFER:
            self.message = self._offered = Message(0, 0, size)
            self.message.store()
        elif kind == ANSWER and self.asked and size <= _GREATEST_ERROR:
            self._answered(size)
        else:
            raise OSError(errno.EPROTO, "not a message")

    def _take(self, message: Message, count: int) -> None:
        """A part of a message lies in the ring."""
        inlet = self.inlet
        if inlet is None or not 0 < count <= min(message.size - message.got, ring.PART):
            raise OSError(errno.EPROTO, "not a part of a message")
        inlet.take(message.view[message.got : message.got + count])
        if inlet.owed >= ring.CREDIT:
            self._control += frame(CREDIT, 0, inlet.owed)
            inlet.owed = 0
            self.flush()
        self._arrive(message, count)

    def _arrive(self, message: Message, count: int) -> None:
        message.got += count
        if message.got < message.size:
            return
        self.message = None
        if message is self._offered:
            self._offered = None
            self._accept(message)
        else:
            self._office.complete(self.peer, message)

    def _accept(self, offer: Message) -> None:
        """Map the ring that was offered, and say whether it could be done."""
        error = 0
        try:
            if not self._share:
                raise OSError(errno.EOPNOTSUPP, "UNICOLL_TRANSPORT=tcp")
            self.inlet = Inlet(bytes(offer.view))
        except OSError as e:
            error = e.errno or errno.EIO
        self._control += frame(ANSWER, error)

    def _answered(self, error: int) -> None:
        assert self.outlet is not None
        if not error:
            self.outlet.accepted()
            return
        self.outlet.close()
        self.outlet = None
        self._over_the_socket(f"it cannot map this process's shared memory ({os.strerror(error)})")
