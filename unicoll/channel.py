"""What protects the bytes of a connection after its handshake: a MAC, TLS, or nothing.

``UNICOLL_CHANNEL`` chooses for the connections between hosts: ``plain``, ``mac`` or ``tls``. The store's and the
control plane's connections have a MAC at least, everywhere. A connection within a host has no more than that, because
only root can come between its ends; but ``UNICOLL_TRANSPORT=tcp``, with which the ranks of a host talk as those of
different hosts do, holds here, too. Both sides state their choice in the handshake (:mod:`unicoll.auth`), which proves
that it is the same, and derives the keys.

    record = data's length (u32) | MAC (16) | data, up to 128 KiB
    MAC    = HMAC-SHA256(key of the direction, record's number (u64) | data's length (u32) | data), cut to 16 bytes

The number, which is not sent, makes a record that is repeated, left out or moved as wrong as one that was changed.
"""

from __future__ import annotations

import errno
import hmac
import socket
import struct
import time
from typing import Any, Protocol

from . import settings
from .auth import Key, client_handshake
from .errors import AuthenticationError, DistNetworkError

__all__ = [
    "RECORD",
    "Channel",
    "Connection",
    "MacRecords",
    "Records",
    "TamperedError",
    "authenticate",
    "choose",
    "records_for",
    "within_a_host",
]

RECORD = 1 << 17
"""Bytes of data in a record at most."""

_LENGTH = struct.Struct("<I")
_NUMBERED = struct.Struct("<QI")
_TAG = 16
_HEADER = _LENGTH.size + _TAG
_READ = RECORD + _HEADER


Buffer = bytes | memoryview


class TamperedError(OSError):
    """What came was not sent by the peer in this form: it was changed, repeated or made on the way."""

    def __init__(self, what: str) -> None:
        super().__init__(errno.EBADMSG, f"its connection delivered bytes that it has not sent: {what}")


class Records(Protocol):
    """The protection of one connection, apart from its socket. One thread may seal while another one opens."""

    def seal(self, data: Any) -> bytes:
        """What to send for up to :data:`RECORD` bytes of data."""

    def open(self, received: Any) -> Buffer:
        """Takes bytes as they come; returns the data of the records that are complete.

        Raises:
            TamperedError: they are not the peer's.
        """

    def outgoing(self) -> bytes:
        """What the protection itself has to send now; to be asked at the start and after each :meth:`open`."""

    @property
    def ready(self) -> bool:
        """Whether data can be sealed."""


class MacRecords:
    """Data in the clear, each record with a MAC.

    Args:
        key: from the handshake.
        server: which side this is.
    """

    ready = True

    def __init__(self, key: Key, server: bool) -> None:
        keys = [hmac.digest(key, side + b" sends", "sha256") for side in (b"client", b"server")]
        self._sealing, self._opening = (hmac.new(k, b"", "sha256") for k in (reversed(keys) if server else keys))
        self._sealed = self._opened = 0
        self._received = bytearray()

    def seal(self, data: Any) -> bytes:
        tag = _tag(self._sealing, self._sealed, data)
        self._sealed += 1
        return b"".join((_LENGTH.pack(len(data)), tag, data))

    def open(self, received: Any) -> Buffer:
        self._received += received
        view = memoryview(self._received)
        found = []
        at = 0
        while len(view) - at >= _HEADER:
            (length,) = _LENGTH.unpack_from(view, at)
            if length > RECORD:
                raise TamperedError(f"a record of {length} bytes")
            start, stop = at + _HEADER, at + _HEADER + length
            if stop > len(view):
                break
            data = view[start:stop]
            if not hmac.compare_digest(view[at + _LENGTH.size : start], _tag(self._opening, self._opened, data)):
                raise TamperedError("their MAC is wrong")
            self._opened += 1
            found.append(data)
            at = stop
        if at:
            self._received = bytearray(view[at:])  # the old one is the data's from now on
        return found[0] if len(found) == 1 else b"".join(found)

    def outgoing(self) -> bytes:
        return b""


def _tag(keyed: hmac.HMAC, number: int, data: Any) -> bytes:
    mac = keyed.copy()
    mac.update(_NUMBERED.pack(number, len(data)))
    mac.update(data)
    return mac.digest()[:_TAG]


def choose(sock: socket.socket, least: str = "plain") -> str:
    """How a connection is to be protected: ``"plain"``, ``"mac"`` or ``"tls"``; both of its ends find the same.

    Args:
        sock: connected.
        least: what this kind of connection has in any case, ``"plain"`` or ``"mac"``.

    Raises:
        DistArgumentError: ``UNICOLL_CHANNEL`` has an unknown value.
    """
    wanted = settings.choice("UNICOLL_CHANNEL")
    if wanted == "plain":
        return least
    return least if within_a_host(sock) and settings.choice("UNICOLL_TRANSPORT") != "tcp" else wanted


def within_a_host(sock: Connection) -> bool:
    """Whether both ends of a connection are in one network stack, and so on one host."""
    return bool(sock.getsockname()[0] == sock.getpeername()[0])


def records_for(channel: str, key: Key, server: bool) -> Records | None:
    """The protection that :func:`choose` has named, with a key that only this connection has; None for none."""
    if channel == "plain":
        return None
    if channel == "mac":
        return MacRecords(key, server)
    from .tls import TlsRecords

    return TlsRecords(key, server)


class Channel:
    """A connection whose data travel in records, with the methods of a socket that its users need.

    ``send`` does as OpenSSL's SSL_write: it may raise BlockingIOError or TimeoutError with a part of a record sent.
    Then the next ``send`` has to be of the same data, which may be longer now.
    """

    def __init__(self, sock: socket.socket, records: Records) -> None:
        self._sock = sock
        self._records = records
        self._out = memoryview(b"")  # of a record that is sent in part
        self._size = 0  # its data
        self._data = memoryview(b"")  # received and not taken
        self._buffer = memoryview(b"")
        self.fileno = sock.fileno
        self.close = sock.close
        self.getpeername = sock.getpeername
        self.getsockname = sock.getsockname
        self.gettimeout = sock.gettimeout
        self.setsockopt = sock.setsockopt
        self.settimeout = sock.settimeout
        self.shutdown = sock.shutdown

    @property
    def pending(self) -> bool:
        """Whether there is something to receive that no poll of the descriptor tells of."""
        return bool(self._data)

    def send(self, data: Any, flags: int = 0) -> int:
        """Send up to one record; returns how many bytes of ``data`` that were."""
        if not self._out:
            piece = data[:RECORD]
            self._out = memoryview(self._records.seal(piece))
            self._size = len(piece)
        while self._out:
            self._out = self._out[self._sock.send(self._out, flags) :]
        return self._size

    def sendmsg(self, buffers: Any, ancdata: tuple[()] = (), flags: int = 0) -> int:
        """Send of the first buffer only."""
        return self.send(buffers[0], flags)

    def sendall(self, data: Any) -> None:
        """Send all; the timeout is for each record."""
        view = memoryview(data)
        while view:
            view = view[self.send(view) :]

    def recv(self, size: int, flags: int = 0) -> bytes:
        """Receive up to ``size`` bytes, none at the end of the connection."""
        if not self._data and not self._receive(flags):
            return b""
        data, self._data = self._data[:size], self._data[size:]
        return bytes(data)

    def recv_into(self, buffer: Any, size: int = 0, flags: int = 0) -> int:
        """Receive into a buffer of bytes; returns how many, 0 at the end of the connection."""
        if not self._data and not self._receive(flags):
            return 0
        count = min(size or len(buffer), len(buffer), len(self._data))
        buffer[:count] = self._data[:count]
        self._data = self._data[count:]
        return count

    def _receive(self, flags: int) -> bool:
        """Wait for a record; False if the connection is over."""
        if not self._buffer:
            self._buffer = memoryview(bytearray(_READ))
        while not self._data:
            got = self._sock.recv_into(self._buffer, 0, flags)
            if not got:
                return False
            self._data = memoryview(self._records.open(self._buffer[:got]))
        return True

    def start(self, deadline: float) -> None:
        """The client's part of what the protection does at its start."""
        while True:
            self._sock.sendall(self._records.outgoing())
            if self._records.ready:
                return
            self._sock.settimeout(max(0.001, deadline - time.monotonic()))
            received = self._sock.recv(_READ)
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
    least: str = "mac",
) -> tuple[Connection, bool]:
    """The client's part of the handshake and of what follows it; the server's is :class:`unicoll.server.Server`'s.

    Args:
        least: the protection that this kind of connection has in any case.
        sock, key, purpose, deadline, rank, server, address: as :func:`unicoll.auth.client_handshake` takes them.

    Returns:
        The connection as it is to be used from now on, and whether its server is private
        (see :class:`unicoll.auth.Proved`).

    Raises:
        AuthenticationError: as :func:`unicoll.auth.client_handshake`; or what answers is not who made the handshake.
        DistNetworkError: the connection broke, or the deadline passed.
    """
    channel = choose(sock, least)
    proved = client_handshake(
        sock, key, purpose, deadline, rank=rank, server=server, address=address, channel=channel
    )
    records = records_for(channel, proved.channel_key, server=False)
    if records is None:
        return sock, proved.private
    protected = Channel(sock, records)
    before = sock.gettimeout()
    try:
        protected.start(deadline)
    except TamperedError as error:
        raise AuthenticationError(f"the {channel} connection could not be begun: {error.strerror}") from error
    except OSError as error:
        raise DistNetworkError(f"the {channel} connection could not be begun: {error}") from error
    finally:
        sock.settimeout(before)
    return protected, proved.private
