"""An attacker on the path between a client and a server, which reads all bytes and may change them."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator

__all__ = ["OnPath", "on_path"]


class OnPath:
    """Forwards bytes between a client and a server, after the changes of the test."""

    def __init__(self, port: int) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._port = port
        self.port = self._listener.getsockname()[1]
        self.change: dict[str, Callable[[bytes], bytes]] = {}
        self.seen: dict[str, bytearray] = {"up": bytearray(), "down": bytearray()}
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()
        self._sockets: list[socket.socket] = []

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.socket()
                server.connect(("127.0.0.1", self._port))
                self._sockets += [client, server]
                for name, source, target in (("up", client, server), ("down", server, client)):
                    thread = threading.Thread(target=self._pass, args=(name, source, target), daemon=True)
                    self._threads.append(thread)
                    thread.start()

    def _pass(self, name: str, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                self.seen[name] += data
                target.sendall(self.change.get(name, bytes)(data))
            target.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        for sock in (self._listener, *self._sockets):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()
        for thread in self._threads:
            thread.join(60)


@contextlib.contextmanager
def on_path(port: int) -> Iterator[OnPath]:
    """An attacker in front of a port of 127.0.0.1."""
    made = OnPath(port)
    try:
        yield made
    finally:
        made.close()
