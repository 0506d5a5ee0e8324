"""Authenticated connections that carry small JSON messages: framing, and a server.

The control plane's relay and the CPU backend's listener are such servers.
"""

from __future__ import annotations

import json
import socket
import struct
import time
from abc import abstractmethod
from typing import Any

from .channel import Channel, Connection
from .server import Client, Server, listen

__all__ = ["MAX_FRAME", "Client", "FrameServer", "frame", "published", "read_exactly", "read_frame"]

Message = dict[str, Any]

_HEADER = struct.Struct("<I")
MAX_FRAME = 1 << 20
"""Bytes of a message at most."""


def frame(message: Message) -> bytes:
    """A message as it travels: its length, then JSON."""
    body = json.dumps(message).encode()
    return _HEADER.pack(len(body)) + body


def published(host: str, port: int) -> str:
    """An address of :attr:`FrameServer.addresses` as handshakes prove it."""
    return f"{host} {port}"


def read_frame(sock: Connection) -> Message:
    """The next message from a blocking socket.

    Raises:
        EOFError, OSError: the connection ended.
        ValueError: it is no frame of ours.
    """
    (length,) = _HEADER.unpack(read_exactly(sock, _HEADER.size))
    if length > MAX_FRAME:
        raise ValueError(f"frame of {length} bytes")
    return _parsed(read_exactly(sock, length))


def _parsed(body: bytes) -> Message:
    """The message of a frame; ValueError if it is no JSON object."""
    try:
        message = json.loads(body.decode())  # of bytes json would guess the encoding
    except RecursionError:
        raise ValueError("a frame that is nested too deeply") from None
    if not isinstance(message, dict):
        raise ValueError("a frame that is no JSON object")
    return message


def read_exactly(sock: Connection, n: int) -> bytes:
    """``n`` bytes from a blocking socket; EOFError if it ends before."""
    data = b""
    while len(data) < n:
        piece = sock.recv(n - len(data))
        if not piece:
            raise EOFError("the connection was closed")
        data += piece
    return data


class FrameServer(Server):
    """Hands every message of an authenticated client to :meth:`handle`.

    Args:
        hosts: addresses to listen on, each on a free port; ``self.addresses`` tells.
        key: the job's secret key.
        purpose: label of the handshake.
        name: of the thread.
        rank: this process's.
    """

    linger: float = 0.0
    """Seconds that close() leaves the clients to go by themselves."""

    def __init__(self, hosts: list[str], key: bytes, purpose: bytes, name: str, rank: int) -> None:
        listeners = [listen(host) for host in hosts]
        self.addresses = [(h, int(s.getsockname()[1])) for h, s in zip(hosts, listeners, strict=True)]
        self.rank = rank
        self._closing = False
        self._until: float | None = None
        super().__init__(listeners, key, purpose, name)

    def close(self, timeout: float = 3.0) -> None:
        """Stop: no new clients, what is queued goes out, connections end. Idempotent."""
        self._closing = True
        self.wake()
        self._thread.join(timeout)

    @abstractmethod
    def handle(self, client: Client, message: Message) -> None:
        """A message from an authenticated client; any error here ends the connection."""

    def send(self, client: Client, message: Message) -> None:
        """Queue a message for a client and send what fits now (server thread only)."""
        self._send(client, frame(message))

    def detach(self, client: Client) -> Connection:
        """Take a client's connection out of the server, back in blocking mode (server thread only)."""
        self._forget(client)
        client.sock.setblocking(True)
        return client.sock if client.records is None else Channel(client.sock, client.records)

    # --- the thread ---------------------------------------------------------------------------------------------

    def published(self, listener: socket.socket) -> str:
        return published(*self.addresses[self._listeners.index(listener)])

    def finished(self) -> bool:
        if not self._closing:
            return False
        if self._until is None:
            self._until = time.monotonic() + self.linger
        return time.monotonic() >= self._until or not self._clients

    def patience(self) -> float | None:
        return 0.02 if self._closing else None

    def received(self, client: Client) -> None:
        while client in self._clients and len(client.inbox) >= _HEADER.size:
            (length,) = _HEADER.unpack_from(client.inbox)
            if length > MAX_FRAME:
                raise ValueError(f"frame of {length} bytes")
            end = _HEADER.size + length
            if len(client.inbox) < end:
                return
            body = bytes(client.inbox[_HEADER.size : end])
            del client.inbox[:end]
            self.handle(client, _parsed(body))
