"""The network of the simulated NCCL between the processes of one machine: framed messages over Unix sockets.

One thread in each process reads all messages, handles them, and does most of the writing, so the handlers of
:mod:`tests.simulated_nccl.rendezvous` need no locks. A connecting process sends a token first, because messages are
pickles.
"""

from __future__ import annotations

import hmac
import pickle
import secrets
import selectors
import socket
import struct
import threading
from collections.abc import Callable
from typing import Any

__all__ = ["Address", "Channel", "Network"]

_LENGTH = struct.Struct("=Q")
_TOKEN = 16
_CHUNK = 1 << 20
_LINGER_S = 2.0
Address = tuple[str, bytes]
"""Name of an abstract Unix socket, and its token."""
Handler = Callable[[Any], None]
"""Called on the network's thread with each message, and with None when the channel has been closed."""


class Channel:
    """One end of a connection; :meth:`send` may be called from any thread and never blocks."""

    def __init__(self, network: Network, sock: socket.socket, handler: Handler, token: bytes | None) -> None:
        sock.setblocking(False)
        self.sock = sock
        self.handler = handler
        self._network = network
        self._expected = token
        self._lock = threading.Lock()
        self._outgoing = bytearray()
        self._incoming = bytearray()
        self.closed = False

    def send(self, message: Any) -> None:
        """Send a message; without effect if the peer has closed the connection."""
        body = pickle.dumps(message, protocol=5)
        self.push(_LENGTH.pack(len(body)) + body)

    def push(self, data: bytes) -> None:
        """Send raw bytes."""
        with self._lock:
            if self.closed:
                return
            idle = not self._outgoing
            self._outgoing += data
            if idle:
                self._write()
            waiting = bool(self._outgoing)
        if idle and waiting:
            self._network.call(self._watch)

    def _write(self) -> None:
        try:
            while self._outgoing:
                sent = self.sock.send(memoryview(self._outgoing)[:_CHUNK])
                del self._outgoing[:sent]
        except BlockingIOError:
            pass
        except OSError:  # the next read closes the channel
            self._outgoing.clear()

    def _watch(self) -> None:
        if not self.closed:
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if self._outgoing else 0)
            self._network.selector.modify(self.sock, events, self)

    def ready(self, events: int) -> None:
        """The socket can be written or read; on the network's thread."""
        if events & selectors.EVENT_WRITE:
            with self._lock:
                self._write()
            self._watch()
        if events & selectors.EVENT_READ:
            self._read()

    def _read(self) -> None:
        try:
            data = self.sock.recv(_CHUNK)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self.close()
            return
        self._incoming += data
        if self._expected is not None:
            if len(self._incoming) < _TOKEN:
                return
            token = bytes(self._incoming[:_TOKEN])
            del self._incoming[:_TOKEN]
            if not hmac.compare_digest(token, self._expected):
                self.close()
                return
            self._expected = None
        while not self.closed and len(self._incoming) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._incoming)
            if len(self._incoming) < _LENGTH.size + length:
                return
            with memoryview(self._incoming) as view:
                message = pickle.loads(view[_LENGTH.size : _LENGTH.size + length])
            del self._incoming[: _LENGTH.size + length]
            self.handler(message)

    def flush(self) -> None:
        """Write the rest, for at most two seconds."""
        with self._lock:
            self.sock.settimeout(_LINGER_S)
            try:
                self.sock.sendall(self._outgoing)
            except OSError:
                pass
            self._outgoing.clear()

    def close(self) -> None:
        """Close this end; on the network's thread, idempotent."""
        with self._lock:
            if self.closed:
                return
            self.closed = True
        self._network.selector.unregister(self.sock)
        self.sock.close()
        self.handler(None)


class Network:
    """A process's listener in the simulated network, and the thread for all its channels.

    Args:
        accept: called with each new channel; returns the handler for its messages.
    """

    def __init__(self, accept: Callable[[Channel], Handler]) -> None:
        name, self._token = f"\0unicoll-simulated-{secrets.token_hex(12)}", secrets.token_bytes(_TOKEN)
        self.address: Address = (name, self._token)
        self._accept_channel = accept
        self.selector = selectors.DefaultSelector()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(name)
        self._listener.listen(128)
        self._listener.setblocking(False)
        self._wake_sender, self._wake_receiver = socket.socketpair()
        self._wake_receiver.setblocking(False)
        self._calls: list[Callable[[], None]] = []
        self._lock = threading.Lock()
        self._closing = False
        self.selector.register(self._listener, selectors.EVENT_READ, None)
        self.selector.register(self._wake_receiver, selectors.EVENT_READ, None)
        self._thread = threading.Thread(target=self._work, name="simulated network", daemon=True)
        self._thread.start()

    def call(self, function: Callable[[], None]) -> None:
        """Have a function called on the network's thread."""
        with self._lock:
            if self._closing:
                return
            self._calls.append(function)
            self._wake_sender.send(b"!")

    def connect(self, address: Address, handler: Handler) -> Channel:
        """A channel to another process (or this one).

        Raises:
            OSError: the address has no listener.
        """
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.connect(address[0])
        except OSError:
            sock.close()
            raise
        channel = Channel(self, sock, handler, None)
        channel.push(address[1])
        self.call(lambda: self._register(channel))
        return channel

    def _register(self, channel: Channel) -> None:
        self.selector.register(channel.sock, selectors.EVENT_READ, channel)
        channel._watch()

    def _work(self) -> None:
        while not self._closing:
            for key, events in self.selector.select():
                if key.fileobj is self._wake_receiver:
                    self._run_calls()
                elif key.fileobj is self._listener:
                    self._accept()
                elif not key.data.closed:
                    key.data.ready(events)
        for key in list(self.selector.get_map().values()):
            if isinstance(key.data, Channel):
                key.data.flush()
                key.data.close()

    def _run_calls(self) -> None:
        self._wake_receiver.recv(4096)
        with self._lock:
            calls, self._calls = self._calls, []
        for call in calls:
            call()

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except BlockingIOError:
            return
        channel = Channel(self, sock, lambda message: None, self._token)
        channel.handler = self._accept_channel(channel)
        self._register(channel)

    def close(self) -> None:
        """Close all channels and end the thread."""
        self.call(self._stop)
        self._thread.join()
        with self._lock:
            self.selector.close()
            for sock in (self._listener, self._wake_sender, self._wake_receiver):
                sock.close()

    def _stop(self) -> None:
        self._closing = True
