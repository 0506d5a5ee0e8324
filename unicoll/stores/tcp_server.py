"""The server of a TCPStore: one thread, one selector, any number of clients.

A waiting request is an entry in a table of waiters, not a thread and not a poll.
"""

from __future__ import annotations

import heapq
import math
import socket
import threading
import time
from collections.abc import Sequence
from itertools import count

from .. import users
from ..auth import Secret
from ..errors import DistStoreError
from ..net import is_loopback_name
from ..server import Client, Server
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

_STOP_SECONDS = 5.0
_LONGEST_SLEEP = 3600.0


def keep_alive(sock: socket.socket) -> None:
    """No delay for small messages, and probes that notice within about a minute that the other machine has gone."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (("TCP_KEEPIDLE", 30), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, option):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)


class _Waiting:
    """What the server keeps of an authenticated client, which makes one request at a time.

    Attributes:
        request: the request that waits for keys, or None.
        waits_for: the key that it is registered under.
        serial: number of that request, by which a timer knows whether it is still the same.
    """

    __slots__ = ("request", "serial", "waits_for")

    def __init__(self) -> None:
        self.request: tuple[Op, Sequence[bytes]] | None = None
        self.waits_for = b""
        self.serial = 0


class StoreServer(Server):
    """Serves a table of keys on listening sockets that it takes over, until :meth:`stop`.

    Args:
        listeners: bound and listening, all on one port.
        secret: what clients must prove that they hold. Where there is none and all listeners are on loopback, clients
            must run as this process's user instead.
    """

    def __init__(self, listeners: Sequence[socket.socket], secret: Secret) -> None:
        self.secret = secret
        self.port: int = listeners[0].getsockname()[1]
        on_loopback = all(is_loopback_name(str(sock.getsockname()[0])) for sock in listeners)
        self.private = on_loopback and (bool(secret.key) or users.can_tell())
        self._table = Table()
        self._largest = max_value()
        self._joined = 0
        self._waiters: dict[bytes, dict[Client, None]] = {}
        self._timers: list[tuple[float, int, Client, int]] = []
        self._tickets = count()
        self._lock = threading.Lock()
        self._owners = 1
        self._stopping = False
        super().__init__(listeners, secret.key, PURPOSE, f"unicoll-store-{self.port}")
        self.start()

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
            self.wake()
        else:
            self.stop()

    def stop(self) -> None:
        """Ends the thread and every connection. Idempotent, and bounded in time."""
        with self._lock:
            self._stopping = True
        self.wake()
        if threading.current_thread() is not self._thread:
            self._thread.join(_STOP_SECONDS)

    # --- the server's thread ------------------------------------------------------------------------------------

    def _serve(self) -> None:
        try:
            super()._serve()
        finally:
            with self._lock:
                self._stopping = True

    def finished(self) -> bool:
        with self._lock:
            if self._owners == 0 and not self._joined:
                self._stopping = True
            return self._stopping

    def patience(self) -> float | None:
        if not self._timers:
            return None
        # A client may ask for more seconds than a selector takes.
        return min(max(0.0, self._timers[0][0] - time.monotonic()), _LONGEST_SLEEP)

    def joined(self, client: Client) -> None:
        client.state = _Waiting()
        self._joined += 1
        keep_alive(client.sock)

    def received(self, client: Client) -> None:
        if client.state.request is not None or client.outbox:
            raise MalformedError("a request before the last one's reply")
        self._take_request(client)

    def _take_request(self, client: Client) -> None:
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
            client.state.serial += 1
            self._park(client, op, fields, answer)
            self._set_timer(seconds, client, client.state.serial)
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

    def _park(self, client: Client, op: Op, fields: Sequence[bytes], state: NotYet) -> None:
        """Registers the request under its first missing key; when that comes, it moves on to the next."""
        client.state.request = (op, fields)
        client.state.waits_for = state.keys[0]
        self._waiters.setdefault(client.state.waits_for, {})[client] = None

    def _unpark(self, client: Client) -> None:
        client.state.request = None
        waiters = self._waiters.get(client.state.waits_for)
        if waiters is not None:
            waiters.pop(client, None)
            if not waiters:
                del self._waiters[client.state.waits_for]

    def _wake_waiters(self) -> None:
        touched = self._table.touched
        while touched:
            for client in self._waiters.pop(touched.pop(), ()):
                if client.state.request is None:
                    continue
                op, fields = client.state.request
                answer = self._answer(op, fields)
                if isinstance(answer, NotYet):
                    self._park(client, op, fields, answer)
                else:
                    client.state.request = None
                    self._send(client, answer)

    def _set_timer(self, seconds: float, client: Client, serial: int) -> None:
        if len(self._timers) > 1024 + 4 * len(self._clients):
            self._timers = [timer for timer in self._timers if self._live(timer[2], timer[3])]
            heapq.heapify(self._timers)
        heapq.heappush(self._timers, (time.monotonic() + seconds, next(self._tickets), client, serial))

    def _live(self, client: Client, serial: int) -> bool:
        return client.state.request is not None and client.state.serial == serial

    def tick(self) -> None:
        now = time.monotonic()
        while self._timers and self._timers[0][0] <= now:
            _, _, client, serial = heapq.heappop(self._timers)
            if not self._live(client, serial):
                continue
            op, fields = client.state.request
            answer = self._answer(op, fields)
            if isinstance(answer, NotYet):
                answer = pack_reply(Status.TIMEOUT, answer.keys)
            self._unpark(client)
            self._send(client, answer)

    def lost(self, client: Client) -> None:
        if client.handshake is None:
            self._joined -= 1
            self._unpark(client)
