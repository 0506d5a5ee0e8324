"""The network of the simulated NCCL between the processes of one machine: pickled messages over Unix sockets.

Each channel has a thread that reads its messages and handles them; one lock of the process is held meanwhile, so the
handlers of :mod:`tests.simulated_nccl.rendezvous` need none. One thread writes all messages, so that no handler blocks.
A connecting process sends a token first, because messages are pickles.
"""

from __future__ import annotations

import hmac
import pickle
import secrets
import socket
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

__all__ = ["Address", "Channel", "Network"]

_TOKEN = 16
Address = tuple[str, bytes]
"""Name of an abstract Unix socket, and its token."""
Handler = Callable[[Any], None]
"""Called with each message, and with None when the channel has been closed."""


class Channel:
    """One end of a connection."""

    def __init__(self, network: Network, sock: socket.socket) -> None:
        self.sock = sock
        self.handler: Handler = lambda message: None
        self._network = network

    def send(self, message: Any) -> None:
        """Send a message, later; without effect if the peer has closed the connection."""
        self._network.outgoing.put((self, pickle.dumps(message, protocol=5)))

    def close(self) -> None:
        """Close this end once all messages are sent."""
        self._network.outgoing.put((self, None))

    def read(self, token: bytes | None) -> None:
        """Handle the messages until the connection is closed; nothing if the peer does not send the token first."""
        with self.sock, self.sock.makefile("rb") as file:
            try:
                if token is not None and not hmac.compare_digest(file.read(_TOKEN), token):
                    return
                while True:
                    message = pickle.load(file)
                    with self._network.lock:
                        self.handler(message)
            except (EOFError, OSError, pickle.UnpicklingError):  # the last: in the middle of a message
                pass
            finally:
                with self._network.lock:
                    self._network.channels.discard(self)
                    self.handler(None)


class Network:
    """A process's listener in the simulated network, and its channels.

    Args:
        accept: called with each new channel; returns the handler for its messages.
    """

    def __init__(self, accept: Callable[[Channel], Handler]) -> None:
        self.address: Address = (f"\0unicoll-simulated-{secrets.token_hex(12)}", secrets.token_bytes(_TOKEN))
        self.lock = threading.RLock()
        self.channels: set[Channel] = set()
        self.outgoing: SimpleQueue[tuple[Channel, bytes | None] | None] = SimpleQueue()
        self._accept = accept
        self._readers: list[threading.Thread] = []
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(self.address[0])
        self._listener.listen(128)
        self._listening, self._writing = self._start(self._listen), self._start(self._write)

    @staticmethod
    def _start(target: Callable[..., None], *args: Any) -> threading.Thread:
        thread = threading.Thread(target=target, args=args, name="simulated network", daemon=True)
        thread.start()
        return thread

    def _open(
        self, sock: socket.socket, token: bytes | None, accept: Callable[[Channel], Handler]
    ) -> Channel:
        channel = Channel(self, sock)
        channel.handler = accept(channel)
        with self.lock:
            self.channels.add(channel)
            readers = [thread for thread in self._readers if thread.is_alive()]
            self._readers = [*readers, self._start(channel.read, token)]
        return channel

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
        channel = self._open(sock, None, lambda channel: handler)
        self.outgoing.put((channel, address[1]))
        return channel

    def _listen(self) -> None:
        try:
            while True:
                self._open(self._listener.accept()[0], self.address[1], self._accept)
        except OSError:  # it has been shut down
            self._listener.close()

    def _write(self) -> None:
        while (item := self.outgoing.get()) is not None:
            channel, data = item
            try:
                if data is None:
                    channel.sock.shutdown(socket.SHUT_RDWR)
                else:
                    channel.sock.sendall(data)
            except OSError:  # the reader closes the channel
                pass

    def close(self) -> None:
        """Close all channels and end the threads."""
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listening.join()
        with self.lock:
            for channel in self.channels:
                channel.close()
        self.outgoing.put(None)
        for thread in (self._writing, *self._readers):
            thread.join()
