"""The server of a TCPStore: one thread, one selector, any number of clients.

A waiting request is an entry in a table of waiters, not a thread and not a poll. A client is read no further than
its handshake until that has succeeded, and one that dawdles over it is shown out.
"""

from __future__ import annotations

import errno
import heapq
import logging
import math
import selectors
import socket
import threading
import time
from collections.abc import Sequence
from itertools import count

from ..auth import HANDSHAKE_SECONDS, Secret, ServerHandshake
from ..errors import AuthenticationError, DistStoreError
from ..forks import guard
from ..net import raise_descriptor_limit
from .table import NotYet, Table
from .wire import (
    REQUEST,
    WAITING,
    MalformedError,
    Op,
    Status,
    max_request,
    max_value,
    pack_reply,
    unpack_fields,
    validate,
)

__all__ = ["PURPOSE", "StoreServer", "keep_alive"]

PURPOSE = b"store"

_READ_SIZE = 256 * 1024
_ACCEPT_PAUSE = 0.2
_STOP_SECONDS = 5.0
_LONGEST_SLEEP = 3600.0
_OUT_OF_DESCRIPTORS = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)

log = logging.getLogger("unicoll")


def keep_alive(sock: socket.socket) -> None:
    """No delay for small messages, and probes that notice within about a minute that the other machine has gone."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (("TCP_KEEPIDLE", 30), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, option):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)


class _Client:
    """A connection: its handshake until that is done, then one request at a time.

    Attributes:
        request: the request that waits for keys, or None.
        waits_for: the key that it is registered under.
        serial: number of that request, by which a timer knows whether it is still the same.
    """

    __slots__ = ("handshake", "inbox", "outbox", "request", "serial", "sock", "waits_for")

    def __init__(self, sock: socket.socket, handshake: ServerHandshake) -> None:
        self.sock = sock
        self.handshake: ServerHandshake | None = handshake
        self.inbox = bytearray()
        self.outbox = bytearray()
        self.request: tuple[Op, Sequence[bytes]] | None = None
        self.waits_for = b""
        self.serial = 0


class StoreServer:
    """Serves a table of keys on listening sockets that it takes over, until :meth:`stop`.

    Args:
        listeners: bound and listening, all on one port.
        secret: what clients must prove that they hold.
    """

    def __init__(self, listeners: Sequence[socket.socket], secret: Secret) -> None:
        self.secret = secret
        self.port: int = listeners[0].getsockname()[1]
        self._listeners = [guard(sock) for sock in listeners]
        self._table = Table()
        self._largest = max_value()
        self._clients: set[_Client] = set()
        self._refused: set[str] = set()
        self._joined = 0
        self._waiters: dict[bytes, dict[_Client, None]] = {}
        self._timers: list[tuple[float, int, _Client | None, int]] = []
        self._tickets = count()
        self._paused = False
        self._lock = threading.Lock()
        self._owners = 1
        self._stopping = False
        self._wake_in, self._wake_out = (guard(sock) for sock in socket.socketpair())
        self._selector = selectors.DefaultSelector()
        for sock in (*self._listeners, self._wake_in):
            sock.setblocking(False)
            self._selector.register(sock, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._serve, name=f"unicoll-store-{self.port}", daemon=True)
        self._thread.start()

    # --- called from any thread ---------------------------------------------------------------------------------

    @property
    def ended(self) -> bool:
        """Whether it has stopped and closed its sockets."""
        return not self._thread.is_alive()

    def attach(self, share: bool) -> bool:
        """Makes the caller an owner, of a server that lingers, or with ``share`` of any; False if that cannot be.

        A server that is at its end has closed its sockets when this returns.
        """
        with self._lock:
            if not self._stopping:
                if self._owners and not share:
                    return False
                self._owners += 1
                return True
        self.stop()
        return False

    def release(self, linger: bool) -> None:
        """Gives an ownership back. With the last one the server stops: now, or once its last client has gone."""
        with self._lock:
            self._owners -= 1
            if self._owners:
                return
            self._stopping = not linger
        if linger:
            self._wake()
        else:
            self.stop()

    def stop(self) -> None:
        """Ends the thread and every connection. Idempotent, and bounded in time."""
        with self._lock:
            self._stopping = True
        self._wake()
        if threading.current_thread() is not self._thread:
            self._thread.join(_STOP_SECONDS)

    def _wake(self) -> None:
        try:
            self._wake_out.send(b"x")
        except OSError:
            # Full: it is awake anyway. Closed: it has ended.
            pass

    # --- the server's thread ------------------------------------------------------------------------------------

    def _serve(self) -> None:
        try:
            while not self._finished():
                for key, events in self._selector.select(self._patience()):
                    if isinstance(key.data, _Client):
                        self._turn(key.data, events)
                    elif key.fileobj is self._wake_in:
                        self._wake_in.recv(4096)
                    else:
                        self._accept(key.fileobj)  # type: ignore[arg-type]
                self._expire()
        except Exception:
            log.exception("the store server on port %d failed", self.port)
        finally:
            with self._lock:
                self._stopping = True
            for client in self._clients:
                client.sock.close()
            for sock in (*self._listeners, self._wake_in, self._wake_out):
                sock.close()
            self._selector.close()

    def _finished(self) -> bool:
        with self._lock:
            if self._owners == 0 and not self._joined:
                self._stopping = True
            return self._stopping

    def _patience(self) -> float | None:
        if not self._timers:
            return None
        # A client may ask for more seconds than a selector takes.
        return min(max(0.0, self._timers[0][0] - time.monotonic()), _LONGEST_SLEEP)

    def _accept(self, listener: socket.socket) -> None:
        try:
            while not self._paused:
                sock, _ = listener.accept()
                self._welcome(sock)
        except BlockingIOError:
            pass
        except OSError as error:
            if error.errno in _OUT_OF_DESCRIPTORS and not raise_descriptor_limit():
                log.warning("the store on port %d cannot take more clients: %s", self.port, error)
                self._pause()

    def _pause(self) -> None:
        """Stops accepting for a moment: the listeners stay readable, and this thread would spin."""
        self._paused = True
        for listener in self._listeners:
            self._selector.unregister(listener)
        self._set_timer(_ACCEPT_PAUSE, None, 0)

    def _resume(self) -> None:
        self._paused = False
        for listener in self._listeners:
            self._selector.register(listener, selectors.EVENT_READ)

    def _welcome(self, sock: socket.socket) -> None:
        guard(sock)
        sock.setblocking(False)
        keep_alive(sock)
        handshake = ServerHandshake(self.secret.key, PURPOSE)
        client = _Client(sock, handshake)
        self._clients.add(client)
        self._selector.register(sock, selectors.EVENT_READ, client)
        self._set_timer(HANDSHAKE_SECONDS, client, 0)
        self._send(client, handshake.outgoing())

    def _turn(self, client: _Client, events: int) -> None:
        if client not in self._clients:
            return
        try:
            if events & selectors.EVENT_WRITE:
                self._flush(client)
            if events & selectors.EVENT_READ and client in self._clients:
                self._read(client)
        except (AuthenticationError, MalformedError) as error:
            peer = _peer(client.sock)
            host = peer.rpartition(":")[0]
            news = isinstance(error, AuthenticationError) and host not in self._refused
            self._refused.add(host)
            level = logging.WARNING if news else logging.INFO  # once a host: it may be a port scanner
            log.log(level, "the store on port %d closed a connection from %s: %s", self.port, peer, error)
            self._drop(client)
        except Exception:
            log.exception("the store on port %d failed to serve %s", self.port, _peer(client.sock))
            self._drop(client)

    def _read(self, client: _Client) -> None:
        try:
            data = client.sock.recv(_READ_SIZE)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._drop(client)
            return
        if client.handshake is not None:
            self._shake(client, client.handshake, data)
        elif client.request is not None or client.outbox:
            raise MalformedError("a request before the last one's reply")
        else:
            client.inbox += data
        if client.handshake is None:
            self._take_request(client)

    def _shake(self, client: _Client, handshake: ServerHandshake, data: bytes) -> None:
        try:
            handshake.feed(data)
        finally:
            self._send(client, handshake.outgoing())
        if handshake.done and client in self._clients:
            client.handshake = None
            client.inbox += handshake.leftover
            self._joined += 1

    def _take_request(self, client: _Client) -> None:
        inbox = client.inbox
        if len(inbox) < REQUEST.size:
            return
        size, code, seconds = REQUEST.unpack_from(inbox)
        if size > max_request(self._largest):
            raise MalformedError(f"a request of {size} bytes")
        end = REQUEST.size + size
        if len(inbox) < end:
            return
        if len(inbox) > end:
            raise MalformedError("a request before the last one's reply")
        fields = unpack_fields(memoryview(inbox)[REQUEST.size :])
        op = validate(code, fields, self._largest)
        client.inbox = bytearray()
        answer = self._answer(op, fields)
        if isinstance(answer, NotYet):
            if op not in WAITING or not math.isfinite(seconds):
                raise MalformedError(f"{op.name} cannot wait for {seconds} s")
            client.serial += 1
            self._park(client, op, fields, answer)
            self._set_timer(seconds, client, client.serial)
        else:
            self._send(client, answer)
        self._wake_waiters()

    def _answer(self, op: Op, fields: Sequence[bytes]) -> bytes | NotYet:
        try:
            return pack_reply(Status.OK, self._table.apply(op, fields))
        except NotYet as state:
            return state
        except DistStoreError as error:
            return pack_reply(Status.ERROR, (str(error).encode("utf-8", "replace"),))

    def _park(self, client: _Client, op: Op, fields: Sequence[bytes], state: NotYet) -> None:
        """Registers the request under its first missing key; when that comes, it moves on to the next."""
        client.request = (op, fields)
        client.waits_for = state.keys[0]
        self._waiters.setdefault(client.waits_for, {})[client] = None

    def _unpark(self, client: _Client) -> None:
        client.request = None
        waiters = self._waiters.get(client.waits_for)
        if waiters is not None:
            waiters.pop(client, None)
            if not waiters:
                del self._waiters[client.waits_for]

    def _wake_waiters(self) -> None:
        touched = self._table.touched
        while touched:
            for client in self._waiters.pop(touched.pop(), ()):
                if client.request is None:
                    continue
                op, fields = client.request
                answer = self._answer(op, fields)
                if isinstance(answer, NotYet):
                    self._park(client, op, fields, answer)
                else:
                    client.request = None
                    self._send(client, answer)

    def _set_timer(self, seconds: float, client: _Client | None, serial: int) -> None:
        """Serial 0 stands for the client's handshake; no client, for the end of a pause."""
        if len(self._timers) > 1024 + 4 * len(self._clients):
            self._timers = [timer for timer in self._timers if self._live(timer[2], timer[3])]
            heapq.heapify(self._timers)
        heapq.heappush(self._timers, (time.monotonic() + seconds, next(self._tickets), client, serial))

    def _live(self, client: _Client | None, serial: int) -> bool:
        if client is None:
            return True
        if serial == 0:
            return client.handshake is not None and client in self._clients
        return client.request is not None and client.serial == serial

    def _expire(self) -> None:
        now = time.monotonic()
        while self._timers and self._timers[0][0] <= now:
            _, _, client, serial = heapq.heappop(self._timers)
            if not self._live(client, serial):
                continue
            if client is None:
                self._resume()
            elif client.request is None:
                self._drop(client)
            else:
                op, fields = client.request
                answer = self._answer(op, fields)
                if isinstance(answer, NotYet):
                    answer = pack_reply(Status.TIMEOUT, answer.keys)
                self._unpark(client)
                self._send(client, answer)

    def _send(self, client: _Client, data: bytes) -> None:
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

    def _flush(self, client: _Client) -> None:
        try:
            del client.outbox[: client.sock.send(client.outbox)]
        except BlockingIOError:
            return
        except OSError:
            self._drop(client)
            return
        if not client.outbox:
            self._selector.modify(client.sock, selectors.EVENT_READ, client)

    def _drop(self, client: _Client) -> None:
        if client not in self._clients:
            return
        self._clients.discard(client)
        self._joined -= client.handshake is None
        self._unpark(client)
        self._selector.unregister(client.sock)
        client.sock.close()


def _peer(sock: socket.socket) -> str:
    try:
        return "{}:{}".format(*sock.getpeername()[:2])
    except OSError:
        return "a client that has gone"
