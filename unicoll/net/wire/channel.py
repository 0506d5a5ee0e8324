"""Protection of a connection's bytes after its handshake: a MAC, TLS, or none.

``UNICOLL_CHANNEL`` sets the protection of connections between hosts: ``plain``, ``mac`` or ``tls``.
Connections of the store and the control plane always have at least a MAC. Connections within a host
get no more than that, since only root can read or change them; ``UNICOLL_TRANSPORT=tcp``, which
treats the ranks of one host like ranks of different hosts, also applies here. Both sides state what
they want in the handshake (:mod:`unicoll.net.wire.handshake`), which verifies that they are on one
host, or else want the same protection, and derives the keys.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Any

from unicoll.errors import AuthenticationError, DistNetworkError
from unicoll.net.wire import interfaces, peer_credentials
from unicoll.net.wire.handshake import client_handshake
from unicoll.net.wire.handshake_messages import Protection
from unicoll.net.wire.records import HEADER_SIZE, MAX_DATA, MacRecords, Records, TamperedError
from unicoll.net.wire.secret import Key, OwnUserKey
from unicoll.process import environment
from unicoll.process.interrupts import InterruptedStreamError, raised_by_handler
from unicoll.process.timeouts import seconds_left

_READ_SIZE = MAX_DATA + HEADER_SIZE


def keep_alive(sock: Connection, host_timeout: float | None = None) -> None:
    """Send small messages without delay, and detect that the other host is down.

    Args:
        host_timeout: seconds until then, also while sent data is unacknowledged (TCP_USER_TIMEOUT);
            None is about a minute, for a connection without such data.
    """
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    part = 10 if host_timeout is None else max(1, round(host_timeout / 6))
    options = {"TCP_KEEPIDLE": 3 * part, "TCP_KEEPINTVL": part, "TCP_KEEPCNT": 3}
    if host_timeout is not None:
        options["TCP_USER_TIMEOUT"] = round(1000 * host_timeout)
    for option, value in options.items():
        if hasattr(socket, option):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)


def wanted_protection(sock: socket.socket, minimum: str = "plain") -> Protection:
    """The protection that this side wants for a connection.

    Args:
        minimum: protection that this kind of connection always has, ``"plain"`` or ``"mac"``.

    Raises:
        DistArgumentError: ``UNICOLL_CHANNEL`` has an unknown value.
    """
    wanted = environment.choice("UNICOLL_CHANNEL")
    local = within_a_host(sock) and environment.choice("UNICOLL_TRANSPORT") != "tcp"
    return Protection(minimum, minimum if wanted == "plain" else wanted, local)


def within_a_host(sock: Connection) -> bool:
    """True if both ends of a connection have the same address, and so are on one host, unless an
    attacker forwards."""
    return bool(sock.getsockname()[0] == sock.getpeername()[0])


def records_for(protection: str, key: Key, server: bool) -> Records | None:
    """The records of a connection with this protection, or None for ``"plain"``; ``key`` is for
    this connection."""
    if protection == "plain":
        return None
    if protection == "mac":
        return MacRecords(key, server)
    # The import is here because it loads OpenSSL.
    from unicoll.net.wire.tls import TlsRecords

    return TlsRecords(key, server)


class Channel:
    """A connection whose data are sent in records, with the socket methods that its users need.

    ``send`` behaves like OpenSSL's SSL_write: it may raise BlockingIOError or TimeoutError after a
    part of a record was sent. The next ``send`` must then pass the same data, possibly followed by
    more.

    After any other exception in the middle of a ``send``, ``sendall`` or receive (of a signal's
    handler, or of ``part_moved``) each further one in that direction raises InterruptedStreamError.

    Attributes:
        part_moved: called in ``send`` and ``recv_into`` while a record moves in parts; raises to
            stop.
    """

    def __init__(self, sock: socket.socket, records: Records) -> None:
        self._sock = sock
        self._records = records
        # The rest of a record that was sent in part.
        self._unsent = memoryview(b"")
        # The number of bytes of data in that record.
        self._unsent_size = 0
        # Data that are decoded and not yet returned.
        self._data = memoryview(b"")
        self._buffer = memoryview(b"")
        # Each is set to True before the records and the socket are used, and back once the state
        # here is right again. After an exception in between, this direction of the stream is out of
        # step.
        self._send_in_doubt = self._receive_in_doubt = False
        self.part_moved: Callable[[], None] = lambda: None
        self.fileno = sock.fileno
        self.close = sock.close
        self.getpeername = sock.getpeername
        self.getsockname = sock.getsockname
        self.getsockopt = sock.getsockopt
        self.gettimeout = sock.gettimeout
        self.setsockopt = sock.setsockopt
        self.settimeout = sock.settimeout
        self.shutdown = sock.shutdown

    @property
    def pending(self) -> bool:
        """True if decoded data are buffered; polling the descriptor does not show them."""
        return bool(self._data)

    def send(self, data: Any, flags: int = 0) -> int:
        """Send up to one record; returns the number of bytes of ``data`` in it."""
        if self._send_in_doubt:
            raise InterruptedStreamError("send")
        self._send_in_doubt = True
        try:
            sent = self._send(data, flags)
        except OSError as error:
            # An error of the system call leaves the unsent rest here, and the same data can be sent
            # again. The exception of a handler may come after bytes were sent that are not counted.
            self._send_in_doubt = raised_by_handler(error)
            raise
        self._send_in_doubt = False
        return sent

    def _send(self, data: Any, flags: int) -> int:
        # The number in the MAC of a record is used up when it is sealed. So the rest of the last
        # one must be sent first, unchanged.
        if not self._unsent:
            chunk = data[:MAX_DATA]
            if not len(chunk):
                return 0
            self._unsent = memoryview(self._records.seal(chunk))
            self._unsent_size = len(chunk)
        while self._unsent:
            self._unsent = self._unsent[self._sock.send(self._unsent, flags) :]
            if self._unsent:
                self.part_moved()
        return self._unsent_size

    def sendmsg(self, buffers: Any, ancdata: tuple[()] = (), flags: int = 0) -> int:
        """Send of the first buffer only."""
        return self.send(buffers[0], flags)

    def sendall(self, data: Any) -> None:
        """Send all of ``data``; the socket's timeout applies to each record. After an error nothing
        can be sent."""
        if self._send_in_doubt:
            raise InterruptedStreamError("send")
        view = memoryview(data)
        self._send_in_doubt = True
        while view:
            view = view[self._send(view, 0) :]
        # This is not set back after an error: the caller does not know how much of the data was
        # sent.
        self._send_in_doubt = False

    def recv(self, size: int, flags: int = 0) -> bytes:
        """Receive up to ``size`` bytes; ``b""`` at the end of the connection."""
        if not self._data and not self._receive(flags):
            return b""
        data = bytes(self._data[:size])
        # This comes after the last call of a function: an exception between the two would lose
        # data.
        self._data = self._data[size:]
        return data

    def recv_into(self, buffer: Any, size: int = 0, flags: int = 0) -> int:
        """Receive into a buffer of bytes; returns the number of bytes, 0 at the end of the
        connection."""
        if not len(buffer) or (not self._data and not self._receive(flags)):
            # An empty buffer returns at once, as with a socket: no record is sent for an empty
            # message.
            return 0
        count = min(size or len(buffer), len(buffer), len(self._data))
        buffer[:count] = self._data[:count]
        self._data = self._data[count:]
        return count

    def _receive(self, flags: int) -> bool:
        """Wait for a record; False if the connection has ended."""
        if self._receive_in_doubt:
            raise InterruptedStreamError("receive")
        if not self._buffer:
            self._buffer = memoryview(bytearray(_READ_SIZE))
        self._receive_in_doubt = True
        try:
            while not self._data:
                got = self._sock.recv_into(self._buffer, 0, flags)
                if not got:
                    break
                self._data = memoryview(self._records.open(self._buffer[:got]))
                if not self._data:
                    self.part_moved()
        except OSError as error:
            # A timeout of the socket has received nothing. The exception of a handler may hide
            # bytes that were.
            self._receive_in_doubt = raised_by_handler(error)
            raise
        self._receive_in_doubt = False
        return bool(self._data)

    def start(self, deadline: float) -> None:
        """The client's part of the protection's own handshake (TLS)."""
        while True:
            self._sock.sendall(self._records.outgoing())
            if self._records.ready:
                return
            self._sock.settimeout(seconds_left(deadline, 0.001))
            received = self._sock.recv(_READ_SIZE)
            if not received:
                raise ConnectionResetError("it closed the connection")
            self._data = memoryview(self._records.open(received))


Connection = socket.socket | Channel


def authenticate(
    sock: socket.socket,
    key: bytes,
    purpose: bytes,
    deadline: float,
    *,
    rank: int | None = None,
    server: int | None = None,
    address: str = "",
    minimum: str = "mac",
) -> tuple[Connection, bool]:
    """The client's side of the handshake and of the protection.

    The server's side is in :mod:`unicoll.net.wire.authenticated_server`.

    Args:
        sock, key, purpose, deadline, rank, server, address: as for
            :func:`unicoll.net.wire.handshake.client_handshake`.
        minimum: protection that this kind of connection always has.

    Returns:
        The connection to use from now on, and True if its server is private
        (see :class:`unicoll.net.wire.handshake.HandshakeResult`).

    Raises:
        AuthenticationError: as :func:`unicoll.net.wire.handshake.client_handshake`; or the peer of
            the protected connection is not the peer of the handshake.
        DistNetworkError: the connection broke, or the deadline passed.
    """
    wanted = wanted_protection(sock, minimum)
    result = client_handshake(
        sock, key, purpose, deadline, rank=rank, server=server, address=address, protection=wanted
    )
    # The check comes after the handshake: the kernel knows no user of the other end before the
    # server has accepted.
    if isinstance(key, OwnUserKey) and not peer_credentials.is_same_user(sock):
        where = interfaces.join_hostport(*sock.getpeername()[:2])
        who = "the server" if server is None else f"rank {server}"
        raise AuthenticationError(
            f"{who} at {where} belongs to another user, and this job has no secret"
        )
    protection = result.protection
    records = records_for(protection, result.channel_key, server=False)
    if records is None:
        return sock, result.private
    protected = Channel(sock, records)
    timeout_before = sock.gettimeout()
    try:
        protected.start(deadline)
    except TamperedError as error:
        raise AuthenticationError(
            f"the {protection} connection failed to start: {error.strerror}"
        ) from error
    except OSError as error:
        raise DistNetworkError(f"the {protection} connection failed to start: {error}") from error
    finally:
        sock.settimeout(timeout_before)
    return protected, result.private
