"""A server of one thread whose clients prove that they hold the job's secret before anything else they say is read.

The store, the control plane's relay and the CPU backend's listener are such servers. A *stranger* is a client whose
handshake is not done. Strangers are limited in every way, so that those who never finish cost little and keep nobody
out:

* in number, per server: one that has said nothing for a moment makes room for the next, then one that has taken its
  time; while there is none, new connections wait in the kernel's queue;
* in time: :data:`HANDSHAKE_SECONDS`;
* in bytes: nothing beyond a handshake is kept, but for what comes with its last bytes;
* in pieces in which these bytes come, each of which costs a turn;
* in descriptors: the last ones of the process are never spent on strangers;
* in accepts per turn of the thread, between which all other clients are served;
* in accepts per second; clients whose handshake succeeds do not count.
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
from functools import partial
from typing import Any

from . import channel, users
from .auth import HANDSHAKE_SECONDS, ServerHandshake
from .errors import AuthenticationError
from .forks import guard
from .net import raise_descriptor_limit

__all__ = ["Client", "Server", "listen"]

MAX_STRANGERS = 1024
"""How many connections without a finished handshake a server keeps; fewer where the limit of open files is low."""
SILENT_SECONDS, SLOW_SECONDS = 0.25, 2.0
"""After how long a stranger that has said nothing, or not enough, may have to make room for another."""
ACCEPTS_PER_TURN = 32
STRANGERS_PER_SECOND = 2000
"""How many connections a server accepts, beyond the first :data:`MAX_STRANGERS`, that do not become known."""

_READ_SIZE = 256 * 1024
_STRANGERS_READ = 4096
_STRANGERS_PIECES = 16
_PAUSE = 0.05
_MOST_WARNINGS = 100
_OUT_OF_DESCRIPTORS = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)

log = logging.getLogger("unicoll")


class Client:
    """A server's end of one connection: first a handshake, then what the server makes of it.

    Attributes:
        handshake: None once it is done.
        inbox: bytes that have come and have not been taken.
        outbox: bytes that are to go.
        pieces: how often something of its handshake has come.
        state: the server's own.
        records: the protection of the connection, once the handshake is done; None for none.
        error: what ended the connection, if that was not its end.
        rank: what the client has proved to be; None if it is no rank.
    """

    __slots__ = ("error", "handshake", "inbox", "outbox", "pieces", "rank", "records", "since", "sock", "state")

    def __init__(self, sock: socket.socket, handshake: ServerHandshake) -> None:
        self.sock = sock
        self.handshake: ServerHandshake | None = handshake
        self.inbox = bytearray()
        self.outbox = bytearray()
        self.pieces = 0
        self.since = time.monotonic()
        self.state: Any = None
        self.records: channel.Records | None = None
        self.error: Exception | None = None
        self.rank: int | None = None


def listen(host: str, port: int = 0) -> socket.socket:
    """A socket that listens at an address."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.bind((host, port))
        listener.listen(4096)
    except BaseException:
        listener.close()
        raise
    return listener


class Server(ABC):
    """Listens, authenticates and hands what clients send to :meth:`received`, all on one daemon thread.

    Args:
        listeners: bound and listening; the server takes them over.
        key: the job's secret key.
        purpose: label of the handshake.
        name: of the thread.

    Attributes:
        private: whether it listens on loopback only, and clients without a key to prove must be of this user.
    """

    private = False
    rank: int | None = None
    """This process's rank, where the connections are between ranks."""
    least_protection = "mac"
    """Of connections, whatever UNICOLL_CHANNEL says."""

    def __init__(self, listeners: Sequence[socket.socket], key: bytes, purpose: bytes, name: str) -> None:
        self._key = key
        self._purpose = purpose
        self._listeners = [guard(sock) for sock in listeners]
        self._clients: set[Client] = set()
        self._silent: dict[Client, None] = {}  # strangers that have said nothing, in the order of their coming
        self._speaking: dict[Client, None] = {}  # the other strangers
        self._allowance = float(MAX_STRANGERS)  # how many strangers may still be accepted
        self._allowance_at = time.monotonic()
        self._warned: set[str] = set()
        self._paused_until: float | None = None
        self._selector = selectors.DefaultSelector()
        self._wake_in, self._wake_out = (guard(s) for s in socket.socketpair())
        self._wake_out.setblocking(False)
        for sock in (*self._listeners, self._wake_in):
            sock.setblocking(False)
            self._selector.register(sock, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)

    def start(self) -> None:
        """Begin to serve."""
        self._thread.start()

    def wake(self) -> None:
        """Have the thread look at :meth:`finished` (any thread)."""
        try:
            self._wake_out.send(b"x")
        except OSError:
            pass  # full: it is awake anyway; closed: it has ended

    # --- what a server is (its thread only) -----------------------------------------------------------------------

    @abstractmethod
    def received(self, client: Client) -> None:
        """There is more in an authenticated client's inbox; any error here ends the connection."""

    def published(self, listener: socket.socket) -> str:
        """The address under which clients find a listener, if a store tells them; the handshake proves it."""
        return ""

    def joined(self, client: Client) -> None:  # noqa: B027 - optional
        """A client's handshake is done."""

    def lost(self, client: Client) -> None:  # noqa: B027 - optional
        """A client's connection is over."""

    @abstractmethod
    def finished(self) -> bool:
        """Whether to end."""

    def patience(self) -> float | None:
        """Seconds until :meth:`tick` is to be called though nothing comes; called before each wait."""
        return None

    def tick(self) -> None:  # noqa: B027 - optional
        """Called after each turn."""

    # --- the thread -------------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        try:
            while not self.finished():
                callers = []
                for key, events in self._selector.select(self._patience()):
                    if isinstance(key.data, Client):
                        self._turn(key.data, events)
                    elif key.fileobj is self._wake_in:
                        self._wake_in.recv(4096)
                    else:
                        callers.append(key.fileobj)
                for listener in callers:  # after the clients, some of whom may become known
                    self._accept(listener)  # type: ignore[arg-type]
                self._expire()
                self.tick()
        except Exception:
            log.exception("%s failed", self._thread.name)
        finally:
            for sock in (*(c.sock for c in self._clients), *self._listeners, self._wake_in, self._wake_out):
                sock.close()
            self._selector.close()

    def _patience(self) -> float | None:
        now = time.monotonic()
        times = [next(iter(s)).since + HANDSHAKE_SECONDS for s in (self._silent, self._speaking) if s]
        if self._paused_until is not None:
            times.append(self._paused_until)
        own = self.patience()
        sleeps = [max(0.0, t - now) for t in times] + ([] if own is None else [own])
        return min(sleeps) if sleeps else None

    def _expire(self) -> None:
        now = time.monotonic()
        for strangers in (self._silent, self._speaking):
            while strangers and (first := next(iter(strangers))).since + HANDSHAKE_SECONDS <= now:
                self._drop(first)
        if self._paused_until is not None and self._paused_until <= now:
            self._paused_until = None
            for listener in self._listeners:
                self._selector.register(listener, selectors.EVENT_READ)

    # --- accepting --------------------------------------------------------------------------------------------------

    def _accept(self, listener: socket.socket) -> None:
        for _ in range(ACCEPTS_PER_TURN):
            if self._paused_until is not None:
                return
            if not self._may_take_one():
                self._pause()
                return
            if len(self._silent) + len(self._speaking) >= _most_strangers() and not self._make_room():
                self._pause()
                return
            try:
                sock, _ = listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno not in _OUT_OF_DESCRIPTORS:
                    return
                if not raise_descriptor_limit():
                    self._cannot_take_more(str(error))
                    return
                continue
            self._allowance -= 1
            guard(sock)
            if _is_among_the_last(sock) and not raise_descriptor_limit() and not self._make_room(at_once=True):
                sock.close()
                self._cannot_take_more("the limit of open files is near (ulimit -n)")
                return
            self._welcome(sock, self.published(listener))

    def _may_take_one(self) -> bool:
        """Whether another stranger may be accepted by now."""
        now = time.monotonic()
        more = (now - self._allowance_at) * STRANGERS_PER_SECOND
        self._allowance = min(MAX_STRANGERS, self._allowance + more)
        self._allowance_at = now
        return self._allowance >= 1

    def _make_room(self, at_once: bool = False) -> bool:
        """Drop a stranger that has had its time, or with ``at_once`` any; False if there is none."""
        now = time.monotonic()
        for strangers, seconds in ((self._silent, SILENT_SECONDS), (self._speaking, SLOW_SECONDS)):
            if strangers and (at_once or next(iter(strangers)).since + seconds <= now):
                self._drop(next(iter(strangers)))
                return True
        return False

    def _cannot_take_more(self, why: str) -> None:
        log.log(self._level(why), "%s cannot take more clients: %s", self._thread.name, why)
        self._pause()

    def _level(self, subject: str) -> int:
        """At which level to log: a warning the first time."""
        if subject in self._warned or len(self._warned) >= _MOST_WARNINGS:
            return logging.INFO
        self._warned.add(subject)
        return logging.WARNING

    def _pause(self) -> None:
        """Stop accepting for a moment: the listeners stay readable, and the thread would spin."""
        self._paused_until = time.monotonic() + _PAUSE
        for listener in self._listeners:
            self._selector.unregister(listener)

    def _welcome(self, sock: socket.socket, address: str) -> None:
        try:
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            same_user = partial(users.is_own, sock) if self.private and not self._key else None
            protection = channel.choose(sock, self.least_protection)
            handshake = ServerHandshake(
                self._key, self._purpose, same_user, self.rank, address, self.private, protection
            )
            client = Client(sock, handshake)
            self._selector.register(sock, selectors.EVENT_READ, client)
        except OSError:
            sock.close()  # it has gone again
            return
        self._clients.add(client)
        self._silent[client] = None
        self._send(client, handshake.outgoing())

    # --- clients ----------------------------------------------------------------------------------------------------

    def _turn(self, client: Client, events: int) -> None:
        if client not in self._clients:
            return
        try:
            if events & selectors.EVENT_WRITE:
                self._flush(client)
            if events & selectors.EVENT_READ and client in self._clients:
                if client.handshake is not None:
                    client.pieces += 1
                    if client.pieces > _STRANGERS_PIECES:
                        raise AuthenticationError(f"a handshake in more than {_STRANGERS_PIECES} pieces")
                self._read(client)
        except OSError as error:
            client.error = error if isinstance(error, channel.TamperedError) else None
            self._drop(client)
        except Exception as error:
            # Whatever a client sends may end its own connection, never the thread that serves the others.
            peer = _peer(client.sock)
            kind = type(error).__name__
            client.error = error
            level = self._level(f"{peer.rpartition(':')[0]} {kind}")  # once a host: it may be a port scanner
            what = error if isinstance(error, AuthenticationError) else f"{kind}: {error}"
            log.log(level, "%s closed a connection from %s: %s", self._thread.name, peer, what)
            self._drop(client)

    def _read(self, client: Client) -> None:
        try:
            data = client.sock.recv(_STRANGERS_READ if client.handshake is not None else _READ_SIZE)
        except BlockingIOError:
            return
        if not data:
            self._drop(client)
            return
        if client.handshake is not None:
            self._shake(client, client.handshake, data)
        else:
            self._take(client, data)
        if client.handshake is None and client.inbox and client in self._clients:
            self.received(client)

    def _shake(self, client: Client, handshake: ServerHandshake, data: bytes) -> None:
        if client in self._silent:
            del self._silent[client]
            self._speaking[client] = None
        try:
            handshake.feed(data)
        finally:
            self._send(client, handshake.outgoing())
        if handshake.done and client in self._clients:
            del self._speaking[client]
            self._allowance += 1
            client.handshake = None
            client.rank = handshake.peer
            client.records = channel.records_for(handshake.channel, handshake.channel_key, server=True)
            self.joined(client)
            self._take(client, handshake.leftover)

    def _take(self, client: Client, received: bytes) -> None:
        """Put what has come into the inbox, out of its records."""
        records = client.records
        if records is None:
            client.inbox += received
            return
        client.inbox += records.open(received)
        self._put(client, records.outgoing())

    def _send(self, client: Client, data: bytes) -> None:
        """Send what fits now, and the rest when it does."""
        if client.records is None:
            self._put(client, data)
            return
        for start in range(0, len(data), channel.RECORD):
            self._put(client, client.records.seal(data[start : start + channel.RECORD]))

    def _put(self, client: Client, data: bytes) -> None:
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

    def _forget(self, client: Client) -> None:
        self._clients.discard(client)
        self._silent.pop(client, None)
        self._speaking.pop(client, None)
        self._selector.unregister(client.sock)

    def _drop(self, client: Client) -> None:
        if client not in self._clients:
            return
        self._forget(client)
        client.sock.close()
        self.lost(client)


def _most_strangers() -> int:
    limit = _descriptor_limit()
    return MAX_STRANGERS if limit is None else min(MAX_STRANGERS, max(16, limit // 8))


def _is_among_the_last(sock: socket.socket) -> bool:
    """Whether few descriptors are left beside this one: the kernel gives out the lowest that is free."""
    limit = _descriptor_limit()
    return limit is not None and sock.fileno() >= limit - min(64, limit // 8)


def _descriptor_limit() -> int | None:
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return None if limit == resource.RLIM_INFINITY else limit


def _peer(sock: socket.socket) -> str:
    try:
        return "{}:{}".format(*sock.getpeername()[:2])
    except OSError:
        return "a client that has gone"
