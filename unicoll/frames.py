"""Authenticated connections that carry small JSON messages: framing, and a server of one thread.

The control plane's relay and the CPU backend's listener are both such servers: they accept, make every client prove
that it knows the job's secret, and only then read its frames. A client that says nothing is shown out after a while
and holds up nobody.
"""

from __future__ import annotations

import errno
import json
import logging
import selectors
import socket
import struct
import threading
import time
from abc import ABC, abstractmethod
from typing import Any

from . import auth
from .errors import AuthenticationError
from .forks import guard
from .net import raise_descriptor_limit

__all__ = ["Client", "FrameServer", "frame", "read_exactly", "read_frame"]

Message = dict[str, Any]

_HEADER = struct.Struct("<I")
_MAX_FRAME = 1 << 20
_HANDSHAKE_S = 10.0
_OUT_OF_DESCRIPTORS_S = 0.05

log = logging.getLogger("unicoll")


def frame(message: Message) -> bytes:
    """A message as it travels: its length, then JSON."""
    body = json.dumps(message).encode()
    return _HEADER.pack(len(body)) + body


def read_frame(sock: socket.socket) -> Message:
    """The next message from a blocking socket.

    Raises:
        EOFError, OSError: the connection ended.
        ValueError: it is no frame of ours.
    """
    (length,) = _HEADER.unpack(read_exactly(sock, _HEADER.size))
    if length > _MAX_FRAME:
        raise ValueError(f"frame of {length} bytes")
    message: Message = json.loads(read_exactly(sock, length))
    return message


def read_exactly(sock: socket.socket, n: int) -> bytes:
    """``n`` bytes from a blocking socket; EOFError if it ends before."""
    data = b""
    while len(data) < n:
        piece = sock.recv(n - len(data))
        if not piece:
            raise EOFError("the connection was closed")
        data += piece
    return data


class Client:
    """A server's end of one connection: first a handshake, then frames."""

    def __init__(self, sock: socket.socket, handshake: auth.ServerHandshake) -> None:
        self.sock = sock
        self.handshake: auth.ServerHandshake | None = handshake
        self.introduced = False
        self.deadline = time.monotonic() + _HANDSHAKE_S
        self.inbox = bytearray()
        self.outbox = bytearray()
        self.state: Any = None


class FrameServer(ABC):
    """Listens, authenticates, and hands every message to :meth:`handle`, all on one daemon thread.

    Args:
        hosts: addresses to listen on, each on a free port; ``self.addresses`` tells.
        key: the job's secret key.
        purpose: label of the handshake.
        name: of the thread.
    """

    def __init__(self, hosts: list[str], key: bytes, purpose: bytes, name: str) -> None:
        self._key = key
        self._purpose = purpose
        self._clients: set[Client] = set()
        self._selector = selectors.DefaultSelector()
        self._closing = False
        self.addresses: list[tuple[str, int]] = []
        self._listeners = [self._listen(host) for host in hosts]
        self._wake_in, self._wake = (guard(s) for s in socket.socketpair())
        self._selector.register(self._wake_in, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)

    def start(self) -> None:
        """Begin to serve."""
        self._thread.start()

    def close(self, timeout: float = 3.0) -> None:
        """Stop: no new clients, what is queued goes out, connections end. Idempotent."""
        self._closing = True
        try:
            self._wake.send(b"x")
        except OSError:
            pass
        self._thread.join(timeout)
        self._wake.close()

    @abstractmethod
    def handle(self, client: Client, message: Message) -> None:
        """A message from an authenticated client; any error here ends the connection."""

    def lost(self, client: Client) -> None:  # noqa: B027 - optional
        """A client's connection is over."""

    def send(self, client: Client, message: Message) -> None:
        """Queue a message for a client and send what fits now (server thread only)."""
        client.outbox += frame(message)
        self._flush(client)

    def detach(self, client: Client) -> socket.socket:
        """Take a client's socket out of the server, back in blocking mode (server thread only)."""
        self._clients.discard(client)
        self._selector.unregister(client.sock)
        client.sock.setblocking(True)
        return client.sock

    # --- the thread ---------------------------------------------------------------------------------------------

    def _listen(self, host: str) -> socket.socket:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = guard(socket.socket(family, socket.SOCK_STREAM))
        listener.bind((host, 0))
        listener.listen(4096)
        listener.setblocking(False)
        self.addresses.append((host, listener.getsockname()[1]))
        self._selector.register(listener, selectors.EVENT_READ, listener)
        return listener

    def _serve(self) -> None:
        until: float | None = None
        try:
            while until is None or (time.monotonic() < until and self._clients):
                for key, events in self._selector.select(self._patience()):
                    if isinstance(key.data, Client):
                        self._turn(key.data, events)
                    elif key.data is not None:
                        self._accept(key.data)
                    else:
                        self._wake_in.recv(64)
                self._show_out_the_silent()
                if self._closing and until is None:
                    until = time.monotonic() + self.linger
        finally:
            for client in self._clients:
                client.sock.close()
            for listener in self._listeners:
                listener.close()
            self._wake_in.close()
            self._selector.close()

    linger: float = 0.0
    """Seconds that close() leaves the clients to go by themselves."""

    def _patience(self) -> float | None:
        if self._closing:
            return 0.02
        return 1.0 if any(not c.introduced for c in self._clients) else None

    def _accept(self, listener: socket.socket) -> None:
        try:
            sock, _ = listener.accept()
        except OSError as e:
            if e.errno in (errno.EMFILE, errno.ENFILE) and not raise_descriptor_limit():
                time.sleep(_OUT_OF_DESCRIPTORS_S)  # who calls goes on waiting: do not spin meanwhile
            return
        guard(sock)
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        handshake = auth.ServerHandshake(self._key, self._purpose)
        client = Client(sock, handshake)
        client.outbox += handshake.outgoing()
        self._clients.add(client)
        self._selector.register(sock, selectors.EVENT_READ, client)
        self._flush(client)

    def _show_out_the_silent(self) -> None:
        now = time.monotonic()
        for client in [c for c in self._clients if not c.introduced and now > c.deadline]:
            self._drop(client)

    def _turn(self, client: Client, events: int) -> None:
        if events & selectors.EVENT_WRITE:
            self._flush(client)
        if not events & selectors.EVENT_READ or client not in self._clients:
            return
        try:
            data = client.sock.recv(65536)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._drop(client)
        elif client.handshake is not None:
            self._shake(client, client.handshake, data)
        else:
            self._read(client, data)

    def _shake(self, client: Client, handshake: auth.ServerHandshake, data: bytes) -> None:
        try:
            handshake.feed(data)
        except AuthenticationError:
            client.outbox += handshake.outgoing()
            self._flush(client)
            self._drop(client)
            return
        client.outbox += handshake.outgoing()
        self._flush(client)
        if handshake.done and client in self._clients:
            client.handshake = None
            self._read(client, handshake.leftover)

    def _read(self, client: Client, data: bytes) -> None:
        client.inbox += data
        while client in self._clients and len(client.inbox) >= _HEADER.size:
            (length,) = _HEADER.unpack_from(client.inbox)
            if length > _MAX_FRAME:
                self._drop(client)
                return
            end = _HEADER.size + length
            if len(client.inbox) < end:
                return
            body = bytes(client.inbox[_HEADER.size : end])
            del client.inbox[:end]
            try:
                client.introduced = True
                self.handle(client, json.loads(body))
            except Exception as e:
                # Whatever a client sends may end its own connection, never the thread that serves the others.
                if not isinstance(e, OSError):
                    log.warning("%s dropped a client: %s: %s", self._thread.name, type(e).__name__, e)
                self._drop(client)
                return

    def _flush(self, client: Client) -> None:
        if client not in self._clients:
            return
        try:
            while client.outbox:
                del client.outbox[: client.sock.send(client.outbox)]
        except BlockingIOError:
            pass
        except OSError:
            self._drop(client)
            return
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if client.outbox else 0)
        self._selector.modify(client.sock, wanted, client)

    def _drop(self, client: Client) -> None:
        if client not in self._clients:
            return
        self._clients.discard(client)
        self._selector.unregister(client.sock)
        client.sock.close()
        self.lost(client)
