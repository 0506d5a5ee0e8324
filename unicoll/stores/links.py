"""A TCPStore client's connections: made with patience, authenticated, and lent to one request at a time."""

from __future__ import annotations

import os
import random
import socket
import time
from collections.abc import Sequence

from .. import users
from ..auth import NoAnswerError, Secret
from ..channel import Connection, authenticate
from ..errors import AuthenticationError, DistNetworkError
from ..forks import guard
from .tcp_server import PURPOSE, keep_alive

__all__ = ["Links", "address_text"]

_ATTEMPT_SECONDS = 10.0
_PAUSES = (0.01, 1.0)
_SHUTTING_DOWN_SECONDS = 5.0


def address_text(host: str, port: int) -> str:
    """``host:port``, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


class Links:
    """Connections to one server. Each serves one request at a time, so that one that waits holds up no other.

    A forked child has none of its parent's and makes its own.

    Attributes:
        private: whether the server takes only processes of its own host that hold its secret or, without one, are of
            this process's user, as it is itself; None before the first connection. It stays so, or is refused.

    Args:
        hosts: names or addresses of the server, each to be tried with every address that it resolves to.
        port: the server's port.
        secret: what to prove that we hold.
        shown: the server's address for messages.
    """

    def __init__(self, hosts: Sequence[str], port: int, secret: Secret, shown: str) -> None:
        self.hosts = hosts
        self.port = port
        self.secret = secret
        self.shown = shown
        self.closed = False
        self.private: bool | None = None
        self._forget()

    def _forget(self) -> None:
        self._pid = os.getpid()
        self._idle: list[Connection] = []
        self._all: set[Connection] = set()

    def connect(self, deadline: float) -> None:
        """Makes the first connection, trying again until the deadline: the server may start later.

        Raises:
            AuthenticationError: it is a server, but not ours. DistNetworkError: none could be reached in time.
        """
        started = time.monotonic()
        pause, longest = _PAUSES
        silent_since: float | None = None
        while True:
            try:
                self._idle.append(self._connect(deadline))
                return
            except AuthenticationError as error:
                # It may be the last job's server that is just shutting down; another protocol's stays.
                now = time.monotonic()
                silent_since = silent_since or now
                fleeting = isinstance(error, NoAnswerError) and now - silent_since < _SHUTTING_DOWN_SECONDS
                if not fleeting or now + pause >= deadline:
                    raise
            except DistNetworkError as error:
                silent_since = None
                if time.monotonic() + pause >= deadline:
                    waited = time.monotonic() - started
                    within = f" within {waited:.3g} s" if waited >= 0.001 else ""
                    raise DistNetworkError(
                        f"no store could be reached at {self.shown}{within}: {error}. Is the process that hosts"
                        " it running there, and the address the same everywhere?"
                    ) from error
            time.sleep(pause * random.uniform(0.5, 1.0))
            pause = min(2 * pause, longest)

    def take(self) -> Connection:
        """A connection for one request; :meth:`give` it back, or :meth:`discard` it after an error."""
        if self._pid != os.getpid():
            self._forget()
        try:
            return self._idle.pop()
        except IndexError:
            return self._connect(time.monotonic() + _ATTEMPT_SECONDS)

    def give(self, sock: Connection) -> None:
        """Takes a connection back."""
        self._idle.append(sock)
        if self.closed:
            self.close()

    def discard(self, sock: Connection) -> None:
        """Closes a connection whose state is unknown."""
        self._all.discard(sock)
        sock.close()

    def close(self) -> None:
        """Closes all connections; a request under way in another thread fails."""
        self.closed = True
        if self._pid != os.getpid():
            self._forget()
        while self._idle:
            self.discard(self._idle.pop())
        for sock in list(self._all):
            try:
                sock.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass

    def _connect(self, deadline: float) -> Connection:
        """Tries every address of the server once."""
        causes: list[str] = []
        refused: AuthenticationError | None = None
        for host in self.hosts:
            try:
                found = socket.getaddrinfo(host, self.port, type=socket.SOCK_STREAM)
            except OSError as error:
                causes.append(f"{host}: {error.strerror or error}")
                continue
            for family, kind, protocol, _, address in found:
                try:
                    return self._open(family, kind, protocol, address, deadline)
                except AuthenticationError as error:
                    refused = error
                except (OSError, DistNetworkError) as error:
                    reason = getattr(error, "strerror", None) or error
                    causes.append(f"{address_text(str(address[0]), self.port)}: {reason}")
        if refused is not None:
            raise refused
        raise DistNetworkError("; ".join(dict.fromkeys(causes)) or f"{self.shown} has no address")

    def _open(
        self, family: int, kind: int, protocol: int, address: tuple[object, ...], deadline: float
    ) -> Connection:
        sock = guard(socket.socket(family, kind, protocol))
        try:
            sock.settimeout(max(0.001, min(deadline - time.monotonic(), _ATTEMPT_SECONDS)))
            sock.connect(address)
            if sock.getsockname() == sock.getpeername():
                # Nobody listens, and the kernel gave us the very port that we were asking for.
                raise ConnectionRefusedError("connection refused")
            keep_alive(sock)
            link, private = authenticate(sock, self.secret.key, PURPOSE, deadline)
            private = private and (bool(self.secret.key) or users.is_own(sock))
            if self.private is None:
                self.private = private
            elif self.private and not private:
                raise AuthenticationError(f"the store server at {self.shown} is no longer this user's own")
        except BaseException:
            sock.close()
            raise
        self._all.add(link)
        return link
