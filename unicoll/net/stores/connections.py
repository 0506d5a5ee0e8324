"""A TCPStore client's pool of authenticated connections."""

from __future__ import annotations

import os
import random
import socket
import threading
import time
from collections.abc import Sequence
from contextlib import suppress

from unicoll.errors import AuthenticationError, DistNetworkError
from unicoll.net.stores.tcp_server import PURPOSE
from unicoll.net.wire import peer_credentials
from unicoll.net.wire.channel import Connection, authenticate, keep_alive
from unicoll.net.wire.handshake import NoAnswerError
from unicoll.net.wire.interfaces import join_hostport
from unicoll.net.wire.secret import Secret
from unicoll.process.fork_safety import guard
from unicoll.process.interrupts import raised_by_handler
from unicoll.process.timeouts import backoff, seconds_left

_ATTEMPT_SECONDS = 10.0
_PAUSES = (0.01, 1.0)
_SHUTTING_DOWN_SECONDS = 5.0
_LEAST_SECONDS = 0.1
"""An attempt to connect with less time left is late."""


class ConnectionPool:
    """Connections to one server. Each has one request at a time, so that a waiting request does not
    block others.

    A forked child does not use its parent's connections; it makes its own. Each connection is in
    :attr:`_users`, with its user, from its beginning to its end, so that an exception in the middle
    of any method loses none.

    Args:
        hosts: names or addresses of the server; every address that they resolve to is tried.
        address: the server's address for messages.

    Attributes:
        private: True if the server accepts only processes of its own host that hold its secret or,
            without one, are of this process's user, which is the server's user too; None before the
            first connection. If a later connection is not private, it is refused.
    """

    def __init__(self, hosts: Sequence[str], port: int, secret: Secret, address: str) -> None:
        self.hosts = hosts
        self.port = port
        self.secret = secret
        self.address = address
        self.closed = False
        self.private: bool | None = None
        self._reset()

    def _reset(self) -> None:
        self._pid = os.getpid()
        # The user of each connection; None if it is idle.
        self._users: dict[Connection, object | None] = {}
        # This is held for a close or shutdown: otherwise the shutdown of one thread could reach a
        # new socket with the descriptor that another one has just closed.
        self._lock = threading.RLock()

    def connect(self, deadline: float, retry: bool = True) -> None:
        """Makes the first connection; retries until the deadline, since the server may start later.

        Args:
            retry: False for a server that is known to run: where it cannot be reached it has ended.

        Raises:
            AuthenticationError: a server of another job or protocol answers. DistNetworkError: no
                server was reached in time.
        """
        started = time.monotonic()
        pauses = backoff(*_PAUSES)
        silent_since: float | None = None
        cause: DistNetworkError | None = None
        while True:
            late = seconds_left(deadline) < _LEAST_SECONDS
            try:
                self._connect(deadline, None)
                return
            except AuthenticationError as error:
                # The server of an earlier job may be shutting down; a server of another protocol
                # stays.
                now = time.monotonic()
                silent_since = silent_since or now
                temporary = (
                    isinstance(error, NoAnswerError) and now - silent_since < _SHUTTING_DOWN_SECONDS
                )
                if not temporary or now >= deadline:
                    raise
            except DistNetworkError as error:
                silent_since = None
                # A late attempt fails by the deadline, not by the server, so its error does not
                # replace that of an earlier one.
                if cause is None or not late:
                    cause = error
                if not retry or time.monotonic() >= deadline:
                    waited = time.monotonic() - started
                    within = f" within {waited:.3g} s" if waited >= 0.001 else ""
                    raise DistNetworkError(
                        f"no store could be reached at {self.address}{within}: {cause}. Is the"
                        " process that hosts it running there, and the address the same"
                        " everywhere?"
                    ) from error
            # The pause is random, so that clients which were started together do not all come at
            # once.
            time.sleep(min(next(pauses) * random.uniform(0.5, 1.0), seconds_left(deadline)))

    def acquire(self, user: object) -> Connection:
        """A connection for one request of ``user``; :meth:`release` it afterwards, after an error
        :meth:`discard`."""
        # The parent's connections are closed in the child (fork_safety), and a thread that does not
        # exist here may have held the lock at the fork.
        if self._pid != os.getpid():
            self._reset()
        with self._lock:
            for sock, other in self._users.items():
                if other is None:
                    self._users[sock] = user
                    return sock
        return self._connect(time.monotonic() + _ATTEMPT_SECONDS, user)

    def release(self, sock: Connection) -> None:
        """Returns a connection to the pool."""
        self._users[sock] = None
        # This connection was in use when close() closed the idle ones.
        if self.closed:
            self.close()

    def discard(self, user: object) -> None:
        """Closes the connection of a user, whose state is unknown; no effect if there is none."""
        with self._lock:
            for sock in [sock for sock, other in self._users.items() if other is user]:
                sock.close()
                del self._users[sock]

    def close(self) -> None:
        """Closes all connections; a request in progress in another thread fails."""
        # This comes first, so that release() closes what is returned from now on.
        self.closed = True
        if self._pid != os.getpid():
            self._reset()
        self.discard(None)
        with self._lock:
            for sock in self._users:
                with suppress(OSError):
                    # The thread that uses the connection wakes with an error, and closes it.
                    sock.shutdown(socket.SHUT_RDWR)

    def _connect(self, deadline: float, user: object | None) -> Connection:
        """A new connection for a user: tries every address of the server once."""
        causes: list[str] = []
        refused: AuthenticationError | None = None
        for host in self.hosts:
            try:
                found = socket.getaddrinfo(host, self.port, type=socket.SOCK_STREAM)
            except OSError as error:
                if raised_by_handler(error):
                    raise
                causes.append(f"{host}: {error.strerror or error}")
                continue
            for family, kind, protocol, _, address in found:
                try:
                    return self._open(family, kind, protocol, address, deadline, user)
                except AuthenticationError as error:
                    # Another address of the name may be the right server.
                    refused = error
                except (OSError, DistNetworkError) as error:
                    if raised_by_handler(error):
                        raise
                    reason = getattr(error, "strerror", None) or error
                    causes.append(f"{join_hostport(str(address[0]), self.port)}: {reason}")
        if refused is not None:
            raise refused
        raise DistNetworkError("; ".join(dict.fromkeys(causes)) or f"{self.address} has no address")

    def _open(
        self,
        family: int,
        kind: int,
        protocol: int,
        address: tuple[object, ...],
        deadline: float,
        user: object | None,
    ) -> Connection:
        sock = guard(socket.socket(family, kind, protocol))
        try:
            sock.settimeout(min(seconds_left(deadline, 0.001), _ATTEMPT_SECONDS))
            sock.connect(address)
            if sock.getsockname() == sock.getpeername():
                # No process listens, and the kernel assigned the destination port to this socket.
                raise ConnectionRefusedError("connection refused")
            keep_alive(sock)
            connection, private = authenticate(sock, self.secret.key, PURPOSE, deadline)
            # The question comes after the handshake: the kernel knows no user of the other end
            # before the server has accepted.
            private = private and (bool(self.secret.key) or peer_credentials.is_same_user(sock))
            if self.private is None:
                self.private = private
            # What was read over the first connection counts as written by this user.
            elif self.private and not private:
                raise AuthenticationError(
                    f"the store server at {self.address} is no longer this user's own"
                )
            # The `try` encloses this: an exception after it closes the socket, and discard() drops
            # the entry.
            with self._lock:
                self._users[connection] = user
        except BaseException:
            sock.close()
            raise
        return connection
