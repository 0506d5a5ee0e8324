"""A process's connection to the relay of the control plane: connecting, sending, and leaving the
job."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue
from typing import Any, NamedTuple

from unicoll.net.wire.channel import Connection, authenticate, keep_alive
from unicoll.net.wire.framed_server import frame, handshake_address
from unicoll.process.fork_safety import guard
from unicoll.process.interrupts import Changes

Message = dict[str, Any]


class _Outgoing(NamedTuple):
    """A frame to send, and a lock to release once that is done; ``last`` for that with which this
    process leaves."""

    data: bytes
    sent: threading.Lock | None = None
    last: bool = False


class RelayConnection:
    """The connection to the relay, which the control thread replaces when another rank hosts the
    relay.

    The control thread reads. Any thread may send: a thread of its own sends the messages, in their
    order, because an exception of a signal's handler in the middle of one would end the connection,
    and with it this rank. It is not the control thread, which may be in a slow function of a group
    that has failed.

    Args:
        host_timeout: seconds after which the relay's host counts as down if it does not answer;
            None is no limit.
    """

    def __init__(self, rank: int, key: bytes, host_timeout: float | None = None) -> None:
        self._rank = rank
        self._key = key
        self._host_timeout = host_timeout
        # A SimpleQueue is written in C. Its put() is reentrant, and an exception leaves no lock of
        # it held.
        self._outgoing: SimpleQueue[_Outgoing] = SimpleQueue()
        # True while the thread that sends runs; leave() waits for its end.
        self._sends = False
        self._left = Changes()
        # This is held while sending and while the connection is replaced, by the control thread and
        # the one that only sends. No handler of a signal runs on these.
        self._sending = threading.Lock()
        # This is held for a shutdown or a close only, so that no thread shuts down a descriptor
        # that another one has closed. Whoever needs both locks takes this one last.
        self._closing = threading.Lock()
        self._sock: Connection | None = None
        self._connecting: socket.socket | None = None
        # The frame with which this process leaves the job; introduce() sends it on a connection
        # that was not made yet.
        self._goodbye: bytes | None = None

    def start(self) -> None:
        """Start the thread that sends; it ends after :meth:`leave`."""
        # This comes before the thread runs, which sets it to False at its end.
        self._sends = True
        threading.Thread(target=self._send_queued, name="unicoll-control-send", daemon=True).start()

    def connect(
        self, host: str, port: int, relay_rank: int, timeout: float, deadline: float
    ) -> Connection:
        """A new connection to the relay in ``relay_rank``, without a timeout; :meth:`introduce`
        comes next.

        Args:
            relay_rank: the rank that hosts the relay.
            timeout: seconds until the relay's process has accepted the connection.
            deadline: of the handshake, on the clock of ``time.monotonic``.

        Raises:
            OSError: nothing listens there, or the host does not answer.
            AuthenticationError: the relay has another key.
            DistNetworkError: the connection has ended during the handshake.
        """
        bare = guard(socket.create_connection((host, port), timeout))
        # From here on leave() can end the handshake (_stop_connecting()).
        self._connecting = bare
        try:
            bare.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if self._host_timeout is not None:
                keep_alive(bare, self._host_timeout)
            address = handshake_address(host, port)
            sock, _ = authenticate(
                bare,
                self._key,
                b"control",
                deadline,
                rank=self._rank,
                server=relay_rank,
                address=address,
            )
        except BaseException:
            # The lock keeps a shutdown by the thread that leaves from a new socket with the same
            # descriptor.
            with self._closing:
                self._connecting = None
                bare.close()
            raise
        self._connecting = None
        sock.settimeout(None)
        return sock

    def introduce(
        self, sock: Connection, hello: Message, failures: Callable[[], list[Message]]
    ) -> None:
        """Send ``hello`` and ``failures()`` on a new connection, and let all threads use it; on the
        control thread.

        ``failures`` is called while nothing else is sent, so that each failure is in its result or
        sent afterwards.
        """
        with self._sending:
            for message in (hello, *failures()):
                sock.sendall(frame(message))
            self._sock = sock
            # This process has left while there was no connection to send the goodbye on.
            if self._goodbye is not None:
                sock.sendall(self._goodbye)
                sock.shutdown(socket.SHUT_WR)

    def send(self, message: Message) -> None:
        """Send a message to the relay, in the background; without effect while there is none.

        An exception that interrupts this call changes nothing but whether the message is sent.
        """
        self._outgoing.put(_Outgoing(frame(message)))

    def send_and_wait(self, message: Message, timeout: float) -> None:
        """:meth:`send`, and wait until that is done, ``timeout`` seconds at most."""
        # This lock stands in for an Event, which an exception may leave unusable
        # (unicoll.process.interrupts).
        sent = threading.Lock()
        sent.acquire()
        self._outgoing.put(_Outgoing(frame(message), sent))
        sent.acquire(timeout=timeout)

    def leave(self, goodbye: Message, timeout: float) -> None:
        """Send the last message, now or on the connection that is being made; waits ``timeout``
        seconds at most.

        The first one counts, if it is repeated.
        """
        self._outgoing.put(_Outgoing(frame(goodbye), last=True))
        self._left.wait_for(lambda: not self._sends, timeout)

    def _send_queued(self) -> None:
        last = False
        while not last:
            data, sent, last = self._outgoing.get()
            with self._sending:
                # The lock is the one that introduce() takes: either that finds the goodbye, or the
                # connection that it has made is used here.
                if last:
                    self._goodbye = data
                    self._stop_connecting()
                self._send(data, last)
            if sent is not None:
                sent.release()
        with self._left.lock:
            self._sends = False
        self._left.notify_all()

    def _send(self, data: bytes, last: bool) -> None:
        if self._sock is None:
            return
        try:
            self._sock.sendall(data)
            if last:
                # Only the direction to the relay is closed. The relay closes the other one once it
                # has read everything, and that ends the read of the control thread.
                self._sock.shutdown(socket.SHUT_WR)
        except Exception:
            # The control thread, which reads, sees that the connection has ended, and records that
            # the relay's process has.
            self.interrupt()

    def _stop_connecting(self) -> None:
        with self._closing, suppress(OSError):
            if self._connecting is not None:
                self._connecting.shutdown(socket.SHUT_RDWR)

    def disconnect(self, sock: Connection) -> None:
        """Close a connection that this thread reads from, while no other thread uses it.

        The system gives its descriptor's number to the next socket, which other threads must not
        use for this one.
        """
        with suppress(OSError):
            # The shutdown comes first and without the locks: a thread that waits in a send holds
            # one of them, and gets an error now.
            sock.shutdown(socket.SHUT_RDWR)
        with self._sending, self._closing:
            self._sock = None
            sock.close()

    def interrupt(self) -> None:
        """End the connection; the thread that reads from it closes it."""
        with self._closing, suppress(OSError):
            if self._sock is not None:
                self._sock.shutdown(socket.SHUT_RDWR)
