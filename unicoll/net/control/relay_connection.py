"""A process's connection to the relay of the control plane: connecting, sending, and leaving the job."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from unicoll.net.channel import Connection, authenticate, keep_alive
from unicoll.net.fork_safety import guard
from unicoll.net.framed_server import frame, handshake_address

Message = dict[str, Any]


class RelayConnection:
    """The connection to the relay, which the control thread replaces when another rank hosts the relay.

    Any thread may send; the control thread reads.

    Args:
        host_timeout: seconds after which the relay's host counts as down if it does not answer; None is no limit.
    """

    def __init__(self, rank: int, key: bytes, host_timeout: float | None = None) -> None:
        self._rank = rank
        self._key = key
        self._host_timeout = host_timeout
        self._sending = threading.Lock()
        self._sock: Connection | None = None
        self._connecting: socket.socket | None = None
        self._goodbye: bytes | None = None  # the frame with which this process leaves the job

    def connect(self, host: str, port: int, relay_rank: int, timeout: float, deadline: float) -> Connection:
        """A new connection to the relay in ``relay_rank``, without a timeout; :meth:`introduce` comes next.

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
        self._connecting = bare
        try:
            bare.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if self._host_timeout is not None:
                keep_alive(bare, self._host_timeout)
            address = handshake_address(host, port)
            sock, _ = authenticate(
                bare, self._key, b"control", deadline, rank=self._rank, server=relay_rank, address=address
            )
        except BaseException:
            with self._sending:
                self._connecting = None
                bare.close()
            raise
        self._connecting = None
        sock.settimeout(None)
        return sock

    def introduce(self, sock: Connection, hello: Message, failures: Callable[[], list[Message]]) -> None:
        """Send ``hello`` and ``failures()`` on a new connection, and let all threads use it.

        ``failures`` is called while no thread can send, so that each failure is in its result or sent afterwards.
        """
        with self._sending:
            for message in (hello, *failures()):
                sock.sendall(frame(message))
            self._sock = sock
            if self._goodbye is not None:  # this process has left while there was no connection
                sock.sendall(self._goodbye)
                sock.shutdown(socket.SHUT_WR)

    def send(self, message: Message) -> None:
        """Send a message to the relay; without effect while there is none."""
        data = frame(message)
        with self._sending, suppress(OSError):
            # the control thread also sees the error and records that the relay's process has ended
            if self._sock is not None:
                self._sock.sendall(data)

    def leave(self, goodbye: Message) -> None:
        """Send the last message, now or on the connection that is being made."""
        data = frame(goodbye)
        with self._sending:
            self._goodbye = data
            with suppress(OSError):
                if self._sock is not None:
                    self._sock.sendall(data)
                    # the relay closes its end once it has read everything
                    self._sock.shutdown(socket.SHUT_WR)
            with suppress(OSError):
                if self._connecting is not None:
                    self._connecting.shutdown(socket.SHUT_RDWR)

    def disconnect(self, sock: Connection) -> None:
        """Close a connection that this thread reads from, while no other thread sends to it.

        The system gives its descriptor's number to the next socket, which other threads must not use for this one.
        """
        with suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)  # a thread that waits to send gets an error
        with self._sending:
            self._sock = None
            sock.close()

    def interrupt(self) -> None:
        """End the connection; the thread that reads from it closes it."""
        with self._sending, suppress(OSError):
            if self._sock is not None:
                self._sock.shutdown(socket.SHUT_RDWR)
