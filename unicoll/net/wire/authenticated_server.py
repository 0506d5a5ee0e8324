"""An authenticated server with one thread.

The store, the control plane's relay and the CPU backend's listener are such servers. Nothing that a
client sends is interpreted before it has proved that it holds the job's secret. Until then it is
limited:

* in number, time and accepts per second (:mod:`unicoll.net.wire.admission`); at the limit, an old
  unauthenticated client is evicted for a new one, or new connections wait in the kernel's queue;
* in bytes: nothing beyond a handshake is kept, except what arrives with its last bytes;
* in the number of chunks in which these bytes arrive, since each one wakes the thread;
* in descriptors: the last ones of the process are never used for unauthenticated clients;
* in accepts per wake-up of the thread, between which all other clients are served.
"""

from __future__ import annotations

import errno
import logging
import resource
import selectors
import socket
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from unicoll.errors import AuthenticationError
from unicoll.net.wire import channel, interfaces, peer_credentials
from unicoll.net.wire.admission import Admission, uses_last_descriptors
from unicoll.net.wire.handshake import ServerHandshake
from unicoll.net.wire.records import MAX_DATA, Records, TamperedError
from unicoll.net.wire.secret import OwnUserKey
from unicoll.process import logs
from unicoll.process.fork_safety import guard

ACCEPTS_PER_WAKEUP = 32

_READ_SIZE = 256 * 1024
_HANDSHAKE_READ_SIZE = 4096
_MAX_HANDSHAKE_CHUNKS = 16
_PAUSE = 0.05
_MAX_WARNINGS = 100
_OTHER_PORT = (errno.EADDRINUSE, errno.EACCES)
_MAX_REFUSALS = 8
_OUT_OF_DESCRIPTORS = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)

log = logs.logger("server")

_refusals: dict[str, tuple[float, str]] = {}
"""By host, the last client that a server of this process has refused, its time and the reason."""


def describe_refusals() -> str:
    """The clients that servers of this process have refused, for the error of a process that waits
    for them.

    The text begins with a semicolon; it is "" without refusals.
    """
    now = time.monotonic()
    found = [f"{text} {now - when:.0f} s ago" for when, text in [*_refusals.values()]]
    return f"; refused: {', '.join(found)}" if found else ""


@dataclass(eq=False, repr=False)
class Client:
    """The server's end of one connection.

    Attributes:
        handshake: None once it is done.
        handshake_chunks: the number of reads that the handshake has taken.
        inbox: bytes received and not yet consumed.
        outbox: bytes to send.
        state: for the subclass of the server.
        records: the protection of the connection after the handshake; None for none.
        error: the reason of a disconnection other than the end of the connection.
        rank: the rank that the client has proved; None if it has none.
        peer: its host and port.
    """

    sock: socket.socket
    handshake: ServerHandshake | None
    handshake_chunks: int = 0
    inbox: bytearray = field(default_factory=bytearray)
    outbox: bytearray = field(default_factory=bytearray)
    state: Any = None
    records: Records | None = None
    error: Exception | None = None
    rank: int | None = None
    peer: tuple[str, int] = "", 0


def listen(
    host: str, port: int = 0, *, reuse: bool = False, dual_stack: bool = False, backlog: int = 4096
) -> socket.socket:
    """A socket that listens at a numeric address or a name.

    Args:
        host, port: 0 picks a free port (:func:`unicoll.net.wire.interfaces.free_ports`).
        dual_stack: an IPv6 socket takes IPv4 connections too.
        backlog: length of the kernel's queue.

    Raises:
        OSError: the address cannot be used.
        DistNetworkError: no port of ``UNICOLL_PORT_RANGE`` is free.
    """
    if port:
        return _listen_on(host, port, reuse, dual_stack, backlog)
    for candidate in interfaces.free_ports(host):
        try:
            # A port of a range may be in TIME_WAIT after the last job.
            return _listen_on(host, candidate, reuse or candidate > 0, dual_stack, backlog)
        except OSError as error:
            if not candidate or error.errno not in _OTHER_PORT:
                raise
    raise AssertionError


def _listen_on(host: str, port: int, reuse: bool, dual_stack: bool, backlog: int) -> socket.socket:
    family, kind, protocol, _, address = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    listener = socket.socket(family, kind, protocol)
    try:
        if reuse:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, not dual_stack)
        listener.bind(address)
        listener.listen(backlog)
    except BaseException:
        listener.close()
        raise
    return listener


class Server(ABC):
    """Listens, authenticates clients and passes their bytes to :meth:`received`, all on one daemon
    thread.

    Args:
        listeners: bound and listening; owned by the server from now on.
        purpose: label of the handshake.

    Attributes:
        private: True if it listens on loopback only, and clients without a key to prove must be of
            this user. With an :class:`OwnUserKey` clients must be of this user, too.
    """

    private = False
    rank: int | None = None
    """This process's rank, if the connections are between ranks."""
    minimum_protection = "mac"
    """Of connections, for any UNICOLL_CHANNEL."""

    def __init__(
        self, listeners: Sequence[socket.socket], key: bytes, purpose: bytes, name: str
    ) -> None:
        self._key = key
        self._purpose = purpose
        self._listeners = [guard(sock) for sock in listeners]
        self._clients: set[Client] = set()
        self._admission: Admission[Client] = Admission()
        self._warned: set[str] = set()
        self._paused_until: float | None = None
        self._selector = selectors.DefaultSelector()
        self._wake_in, self._wake_out = (guard(s) for s in socket.socketpair())
        self._wake_out.setblocking(False)
        # The lock is reentrant: a finalizer may wake the thread in the middle of another wake().
        self._waking = threading.RLock()
        for sock in (*self._listeners, self._wake_in):
            sock.setblocking(False)
            self._selector.register(sock, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def wake(self) -> None:
        """Wake the thread, which then checks :meth:`should_stop` (any thread)."""
        # An error means that the pipe is full, so the thread is about to wake, or closed, so it has
        # ended.
        with self._waking, suppress(OSError):
            self._wake_out.send(b"x")

    # --- for subclasses (called on the server's thread) -------------------------------------------

    @abstractmethod
    def received(self, client: Client) -> None:
        """An authenticated client's inbox has new bytes; an exception closes the connection."""

    def handshake_address(self, listener: socket.socket) -> str:
        """The address of a listener that a store gives to clients; it is part of the handshake's
        proofs."""
        return ""

    def authenticated(self, client: Client) -> None:  # noqa: B027 - optional
        """A client's handshake is done."""

    def disconnected(self, client: Client) -> None:  # noqa: B027 - optional
        """A client's connection is closed."""

    @abstractmethod
    def should_stop(self) -> bool:
        """True to end the thread."""

    def wait_seconds(self) -> float | None:
        """Longest wait for events until the next :meth:`tick`; called before each wait."""
        return None

    def tick(self) -> None:  # noqa: B027 - optional
        """Called after each wait, once its events are handled."""

    # --- the thread -------------------------------------------------------------------------------

    def _serve(self) -> None:
        try:
            while not self.should_stop():
                ready_listeners = []
                for key, events in self._selector.select(self._select_timeout()):
                    if isinstance(key.data, Client):
                        self._handle_events(key.data, events)
                    elif key.fileobj is self._wake_in:
                        self._wake_in.recv(4096)
                    else:
                        ready_listeners.append(key.fileobj)
                # Listeners come after the clients: some of these may have authenticated, which
                # makes room, and endless new connections must not delay the others.
                for listener in ready_listeners:
                    self._accept(listener)  # type: ignore[arg-type]
                self._expire()
                self.tick()
        except Exception:
            log.exception("%s failed", self._thread.name)
        finally:
            for sock in (*(c.sock for c in self._clients), *self._listeners, self._wake_in):
                sock.close()
            # The lock excludes wake(), which could otherwise write to a new socket with the same
            # descriptor.
            with self._waking:
                self._wake_out.close()
            self._selector.close()

    def _select_timeout(self) -> float | None:
        now = time.monotonic()
        times = [self._admission.next_expiry(), self._paused_until]
        waits = [max(0.0, t - now) for t in times if t is not None]
        own = self.wait_seconds()
        if own is not None:
            waits.append(own)
        return min(waits) if waits else None

    def _expire(self) -> None:
        for client in self._admission.expired():
            self._drop(client)
        if self._paused_until is not None and self._paused_until <= time.monotonic():
            self._paused_until = None
            for listener in self._listeners:
                self._selector.register(listener, selectors.EVENT_READ)

    # --- accepting --------------------------------------------------------------------------------

    def _accept(self, listener: socket.socket) -> None:
        for _ in range(ACCEPTS_PER_WAKEUP):
            # Another listener of this wake-up has paused all of them.
            if self._paused_until is not None:
                return
            if not self._admission.may_accept() or not self._has_place():
                self._pause()
                return
            try:
                sock, peer = listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                # Any other error is that of one connection, which has ended before it was accepted.
                if error.errno not in _OUT_OF_DESCRIPTORS:
                    return
                if not interfaces.raise_descriptor_limit():
                    self._refuse_clients(str(error))
                    return
                continue
            self._admission.count_accept()
            guard(sock)
            if (
                # The last descriptors are left to the program, whose own open() would fail without
                # them.
                uses_last_descriptors(sock)
                and not interfaces.raise_descriptor_limit()
                and not self._evict(any_age=True)
            ):
                self._refuse_for_descriptors(sock, self.handshake_address(listener))
                return
            self._add_client(sock, peer[:2], self.handshake_address(listener))

    def _has_place(self) -> bool:
        """True if another unauthenticated client fits: after an eviction, or under a higher limit
        of open files."""
        if not self._admission.full or self._evict():
            return True
        return interfaces.raise_descriptor_limit() and not self._admission.full

    def _evict(self, any_age: bool = False) -> bool:
        """Disconnect an unauthenticated client in favour of a new one; False if none may be."""
        client = self._admission.evictable(any_age)
        if client is None:
            return False
        self._drop(client)
        return True

    def _refuse_for_descriptors(self, sock: socket.socket, address: str) -> None:
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        with sock, suppress(OSError):
            sock.setblocking(False)
            sock.send(self._handshake(sock, address).refuse_for_descriptors(limit))
        self._refuse_clients(
            f"of its limit of {limit} open files (ulimit -n) only the last are left"
        )

    def _refuse_clients(self, reason: str) -> None:
        log.log(
            self._log_level(reason), "%s cannot accept more clients: %s", self._thread.name, reason
        )
        self._pause()

    def _log_level(self, subject: str) -> int:
        """WARNING for the first message about a subject, then INFO."""
        if subject in self._warned or len(self._warned) >= _MAX_WARNINGS:
            return logging.INFO
        self._warned.add(subject)
        return logging.WARNING

    def _pause(self) -> None:
        """Stop accepting for a short time: the listeners stay readable, and the thread would
        spin."""
        self._paused_until = time.monotonic() + _PAUSE
        for listener in self._listeners:
            self._selector.unregister(listener)

    def _add_client(self, sock: socket.socket, peer: tuple[str, int], address: str) -> None:
        try:
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            handshake = self._handshake(sock, address)
            client = Client(sock, handshake, peer=peer)
            self._selector.register(sock, selectors.EVENT_READ, client)
        except OSError:
            # The client has disconnected meanwhile.
            sock.close()
            return
        self._clients.add(client)
        self._admission.add(client)
        # Both sides send their hello at once: neither waits for that of the other.
        self._send(client, handshake.outgoing())

    def _handshake(self, sock: socket.socket, address: str) -> ServerHandshake:
        own_user = (self.private and not self._key) or isinstance(self._key, OwnUserKey)
        same_user = partial(_is_same_user, sock) if own_user else None
        protection = channel.wanted_protection(sock, self.minimum_protection)
        return ServerHandshake(
            self._key, self._purpose, same_user, self.rank, address, self.private, protection
        )

    # --- clients ----------------------------------------------------------------------------------

    def _handle_events(self, client: Client, events: int) -> None:
        # An earlier event of this wake-up may have dropped the client: a send to it has failed.
        if client not in self._clients:
            return
        try:
            if events & selectors.EVENT_WRITE:
                self._flush(client)
            if events & selectors.EVENT_READ and client in self._clients:
                if client.handshake is not None:
                    client.handshake_chunks += 1
                    if client.handshake_chunks > _MAX_HANDSHAKE_CHUNKS:
                        raise AuthenticationError(
                            f"a handshake in more than {_MAX_HANDSHAKE_CHUNKS} chunks"
                        )
                self._read(client)
        except OSError as error:
            # Apart from a failed integrity check, an OSError is just the end of the connection.
            client.error = error if isinstance(error, TamperedError) else None
            self._drop(client)
        except Exception as error:
            # Input of a client may close its own connection, never the thread that serves the
            # others.
            host, peer = client.peer[0], interfaces.join_hostport(*client.peer)
            kind = type(error).__name__
            client.error = error
            # There is one warning for each host, which may be a port scanner.
            level = self._log_level(f"{host} {kind}")
            detail = error if isinstance(error, AuthenticationError) else f"{kind}: {error}"
            log.log(level, "%s closed a connection from %s: %s", self._thread.name, peer, detail)
            # A scanner with many addresses must not lengthen the errors that list them without
            # limit.
            if isinstance(error, AuthenticationError) and (
                host in _refusals or len(_refusals) < _MAX_REFUSALS
            ):
                _refusals[host] = time.monotonic(), f"{peer} ({detail})"
            self._drop(client)

    def _read(self, client: Client) -> None:
        try:
            data = client.sock.recv(
                _HANDSHAKE_READ_SIZE if client.handshake is not None else _READ_SIZE
            )
        except BlockingIOError:
            return
        if not data:
            self._drop(client)
            return
        if client.handshake is not None:
            self._continue_handshake(client, client.handshake, data)
        else:
            self._decode(client, data)
        if client.handshake is None and client.inbox and client in self._clients:
            self.received(client)

    def _continue_handshake(self, client: Client, handshake: ServerHandshake, data: bytes) -> None:
        self._admission.received(client)
        try:
            handshake.feed(data)
        finally:
            # The verdict is sent after an error, too: it tells the client the reason.
            self._send(client, handshake.outgoing())
        # The send may have found that the connection has ended.
        if handshake.done and client in self._clients:
            # An error here ends the connection as one in the handshake does: a subclass is told of
            # the end of a client only if it was told of its beginning.
            records = channel.records_for(handshake.protection, handshake.channel_key, server=True)
            self._admission.authenticated(client)
            client.handshake = None
            client.rank = handshake.peer
            # The verdict above was the last data without records.
            client.records = records
            self.authenticated(client)
            # The bytes behind the handshake are the first of the protected data.
            self._decode(client, handshake.leftover)

    def _decode(self, client: Client, received: bytes) -> None:
        """Put received data into the inbox, without their records."""
        records = client.records
        if records is None:
            client.inbox += received
            return
        client.inbox += records.open(received)
        # These are messages of the protection itself, as in the handshake of TLS.
        self._write(client, records.outgoing())

    def _send(self, client: Client, data: bytes) -> None:
        """Send data in records: now as much as the socket takes, the rest when it is writable."""
        if client.records is None:
            self._write(client, data)
            return
        for start in range(0, len(data), MAX_DATA):
            self._write(client, client.records.seal(data[start : start + MAX_DATA]))

    def _write(self, client: Client, data: bytes) -> None:
        if client not in self._clients or not data:
            return
        if not client.outbox:
            try:
                sent = client.sock.send(data)
            except BlockingIOError:
                sent = 0
            except OSError:
                self._drop(client)
                return
            if sent == len(data):
                return
            data = data[sent:]
            self._selector.modify(client.sock, selectors.EVENT_READ | selectors.EVENT_WRITE, client)
        client.outbox += data

    def _flush(self, client: Client) -> None:
        try:
            del client.outbox[: client.sock.send(client.outbox)]
        except BlockingIOError:
            return
        if not client.outbox:
            self._selector.modify(client.sock, selectors.EVENT_READ, client)

    def _remove(self, client: Client) -> None:
        self._clients.discard(client)
        self._admission.discard(client)
        self._selector.unregister(client.sock)

    def _drop(self, client: Client) -> None:
        if client not in self._clients:
            return
        # The selector has the client by its descriptor, which a new socket may get once this one is
        # closed.
        self._remove(client)
        client.sock.close()
        self.disconnected(client)


def _is_same_user(sock: socket.socket) -> bool:
    """True if a client is a process of this user. OSError if it has ended: then its user is not
    known any more."""
    same = peer_credentials.is_same_user(sock)
    if not same:
        sock.getpeername()
    return same
