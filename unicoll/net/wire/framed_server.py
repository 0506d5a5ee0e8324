"""Small JSON messages over authenticated connections: their framing, and a server base.

The control plane's relay and the CPU backend's listener are such servers.
"""

from __future__ import annotations

import json
import socket
import struct
import time
from abc import abstractmethod
from typing import Any

from unicoll.net.objects.received_json import parse
from unicoll.net.wire.authenticated_server import Client, Server, listen
from unicoll.net.wire.channel import Channel, Connection

Message = dict[str, Any]

_HEADER = struct.Struct("<I")
MAX_FRAME = 1 << 20
"""Bytes of a message at most."""


def frame(message: Message) -> bytes:
    """A message as bytes: its length, then JSON."""
    body = json.dumps(message).encode()
    return _HEADER.pack(len(body)) + body


def handshake_address(host: str, port: int) -> str:
    """An address of :attr:`FrameServer.addresses` in the form that handshakes prove.

    Without the zone of a link-local address, which differs between the hosts.
    """
    return f"{host.partition('%')[0]} {port}"


def read_frame(sock: Connection) -> Message:
    """The next message from a blocking socket.

    Raises:
        EOFError, OSError: the connection ended.
        ValueError: the bytes are not a frame.
    """
    (length,) = _HEADER.unpack(read_exactly(sock, _HEADER.size))
    if length > MAX_FRAME:
        raise ValueError(f"frame of {length} bytes")
    message: Message = parse(read_exactly(sock, length), {}, MAX_FRAME)
    return message


def read_exactly(sock: Connection, n: int) -> bytes:
    """``n`` bytes from a blocking socket; EOFError if the connection ends before."""
    data = b""
    while len(data) < n:
        chunk = sock.recv(n - len(data))
        if not chunk:
            raise EOFError("the connection was closed")
        data += chunk
    return data


class FrameServer(Server):
    """A server that passes every message of an authenticated client to :meth:`handle`.

    Args:
        hosts: addresses to listen on, each on a free port.
        purpose: label of the handshake.
        listener: a listening socket, bound to the one address of ``hosts``, which the server then
            owns; None: the server creates one per address.

    Attributes:
        addresses: host and port of each listener.
    """

    linger: float = 0.0
    """Seconds that close() waits for the clients to disconnect."""

    def __init__(
        self,
        hosts: list[str],
        key: bytes,
        purpose: bytes,
        name: str,
        rank: int,
        listener: socket.socket | None = None,
    ) -> None:
        listeners = [listen(host) for host in hosts] if listener is None else [listener]
        self.addresses = [
            (h, int(s.getsockname()[1])) for h, s in zip(hosts, listeners, strict=True)
        ]
        self.rank = rank
        self._closing = False
        self._stop_time: float | None = None
        super().__init__(listeners, key, purpose, name)

    def close(self, timeout: float = 3.0) -> None:
        """Stop: accept no clients, send queued messages, close the connections. Idempotent."""
        self._closing = True
        self.wake()
        self._thread.join(timeout)

    @abstractmethod
    def handle(self, client: Client, message: Message) -> None:
        """A message from an authenticated client; an exception closes the connection."""

    def send(self, client: Client, message: Message) -> None:
        """Send a message to a client; what the socket does not take now is queued (server thread
        only)."""
        self._send(client, frame(message))

    def detach(self, client: Client) -> Connection:
        """Remove a client and return its connection, in blocking mode (server thread only)."""
        self._remove(client)
        client.sock.setblocking(True)
        return client.sock if client.records is None else Channel(client.sock, client.records)

    # --- the thread -------------------------------------------------------------------------------

    def handshake_address(self, listener: socket.socket) -> str:
        return handshake_address(*self.addresses[self._listeners.index(listener)])

    def should_stop(self) -> bool:
        if not self._closing:
            return False
        if self._stop_time is None:
            self._stop_time = time.monotonic() + self.linger
        return time.monotonic() >= self._stop_time or not self._clients

    def wait_seconds(self) -> float | None:
        return 0.02 if self._closing else None

    def received(self, client: Client) -> None:
        # A call of handle() may drop or detach the client.
        while client in self._clients and len(client.inbox) >= _HEADER.size:
            (length,) = _HEADER.unpack_from(client.inbox)
            if length > MAX_FRAME:
                raise ValueError(f"frame of {length} bytes")
            end = _HEADER.size + length
            if len(client.inbox) < end:
                return
            body = bytes(client.inbox[_HEADER.size : end])
            del client.inbox[:end]
            self.handle(client, parse(body, {}, MAX_FRAME))
