"""The message connection to one peer: its sends, its receives, and what is known about the messages
in flight."""

from __future__ import annotations

import fcntl
import select
import struct
import termios
from typing import TYPE_CHECKING

from gloo_fallback.p2p.receiver import MessageReceiver
from gloo_fallback.p2p.sender import MessageSender
from unicoll.net.wire.channel import Connection
from unicoll.process import logs

if TYPE_CHECKING:
    from gloo_fallback.p2p.engine import P2PEngine

_log = logs.logger("gloo")

_MORE_THAN_ANY = 1 << 60
_SLACK = 1 << 20
"""Bytes by which the system may exceed its limit."""


def _most_buffered(setting: str) -> int:
    """Bytes that the system buffers at most in one direction of a TCP connection; more than any if
    it is not known."""
    try:
        with open(f"/proc/sys/net/ipv4/{setting}", encoding="ascii") as file:
            return int(file.read().split()[2]) + _SLACK
    except (OSError, ValueError, IndexError):
        return _MORE_THAN_ANY


class PeerConnection:
    """The message connection to one peer. The caller holds the engine's lock.

    Args:
        engine: matches the messages to receives, and finishes sends.
        peer: the peer's rank in the group.
        sock: the connection.
        poll: the epoll object to register it at.
        share: True if messages may use shared memory.

    Attributes:
        sender, receiver: the sends and the receives.
        descriptor: of the socket.
        closed: True once :meth:`close` was called.
    """

    def __init__(
        self, engine: P2PEngine, peer: int, sock: Connection, poll: select.epoll, share: bool
    ) -> None:
        context = engine.context

        def log(reason: str) -> None:
            _log.info("messages to %s use the socket: %s", context.who(peer), reason)

        self.peer = peer
        self.sock = sock
        self.sender = MessageSender(sock, poll, share, engine.finish, log)
        self.receiver = MessageReceiver(engine, peer, sock, share, self.sender)
        self.closed = False
        self._poll = poll
        self.descriptor = sock.fileno()
        poll.register(self.descriptor, select.EPOLLIN)

    def close(self) -> None:
        """Unregister the connection and release the rings; the endpoint closes the socket."""
        # The mark comes first: a thread that has polled a ring without the lock looks at it once it
        # holds the lock.
        self.closed = self.receiver.closed = True
        try:
            self._poll.unregister(self.descriptor)
        # The endpoint may have closed the socket before, which removes it from the epoll object.
        except OSError:
            pass
        for ring in (self.sender.writer, self.receiver.reader):
            if ring is not None:
                ring.close()

    # --- state ------------------------------------------------------------------------------------

    @property
    def has_unsent(self) -> bool:
        """True if closing the socket could lose data that has not reached the peer's kernel.

        An unread frame makes the kernel answer a close with a reset, which drops unsent data.
        """
        sender = self.sender
        if sender.peer_closed:
            return False
        if sender.outbox or sender.remainder:
            return True
        # Without a ring no notices are sent, which may come while no receive waits, and stay
        # unread.
        if sender.writer is None and sender.reader is None:
            return False
        # The kernel still counts unsent bytes after the peer has reset the connection.
        return self._queued(termios.TIOCOUTQ) > 0 and not self._reset

    # --- for the search of deadlocks --------------------------------------------------------------

    @property
    def delivered(self) -> bool:
        """True if all that was queued has reached the peer's host."""
        return not (self.sender.queued or self._queued(termios.TIOCOUTQ) > 0)

    @property
    def all_read(self) -> bool:
        """True if all that has come was read, and no message is incomplete."""
        return not (self.receiver.has_unread or self._queued(termios.FIONREAD) > 0)

    @property
    def unsent(self) -> int:
        """Bytes of the first queued send that the system does not take while the peer reads
        nothing."""
        sender = self.sender
        if not sender.outbox or sender.peer_closed:
            return 0
        has_space = sender.ring_has_space
        if has_space is None:
            first = sender.outbox[0]
            return max(0, len(first.view) - first.offset - _most_buffered("tcp_wmem"))
        # A full ring takes nothing until the peer reads. But a frame that is queued, or has come
        # and is not read, may let one side go on, so the send is not reported as stuck then.
        return 0 if has_space or sender.frames_queued or not self.all_read else _MORE_THAN_ANY

    @property
    def receive_space(self) -> int:
        """Maximum bytes in the socket's receive buffer; -1 while a notice to the peer is unsent."""
        return -1 if self._queued(termios.TIOCOUTQ) > 0 else _most_buffered("tcp_rmem")

    @property
    def _reset(self) -> bool:
        """True if the peer can receive nothing any more."""
        poll = select.poll()
        # Errors and a hang-up are reported whatever the mask is.
        poll.register(self.descriptor, 0)
        return bool(poll.poll(0))

    def _queued(self, request: int) -> int:
        """Bytes in the socket's buffer for sends or receives."""
        return int(struct.unpack("i", fcntl.ioctl(self.descriptor, request, bytes(4)))[0])
