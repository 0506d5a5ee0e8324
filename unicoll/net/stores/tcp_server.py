"""The server of a TCPStore, with one thread. A waiting request is an entry in a table and uses no
thread."""

from __future__ import annotations

import heapq
import math
import socket
import threading
import time
from collections.abc import Sequence
from itertools import count

from unicoll.errors import DistStoreError
from unicoll.net.stores.protocol import (
    REQUEST,
    MalformedError,
    Status,
    StoreOp,
    max_request,
    max_value,
    pack_reply,
    unpack_fields,
    validate,
)
from unicoll.net.stores.table import Table, WaitRequired
from unicoll.net.wire import peer_credentials
from unicoll.net.wire.authenticated_server import Client, Server
from unicoll.net.wire.channel import keep_alive
from unicoll.net.wire.interfaces import is_loopback_name
from unicoll.net.wire.secret import Secret
from unicoll.process.timeouts import seconds_left

PURPOSE = b"store"

_STOP_SECONDS = 5.0
_MAX_WAIT_SECONDS = 3600.0


class _ClientState:
    """The state of an authenticated client, which makes one request at a time.

    Attributes:
        request: the request that waits for keys, or None.
        awaited_key: the key under which it is registered.
        serial: its number, with which a timer detects that the request has changed.
    """

    request: tuple[StoreOp, Sequence[bytes]] | None = None
    awaited_key = b""
    serial = 0


class StoreServer(Server):
    """Serves a table of keys until :meth:`stop`.

    Args:
        listeners: bound and listening, all on one port; owned by the server from now on.
        secret: the secret that clients must prove. Without one, if all listeners are on loopback,
            clients must run as this process's user.
        multi_tenant: True if it may have several owners.
    """

    def __init__(
        self, listeners: Sequence[socket.socket], secret: Secret, multi_tenant: bool = False
    ) -> None:
        self.secret = secret
        self._multi_tenant = multi_tenant
        self.port: int = listeners[0].getsockname()[1]
        on_loopback = all(is_loopback_name(str(sock.getsockname()[0])) for sock in listeners)
        self.private = on_loopback and (bool(secret.key) or peer_credentials.is_supported())
        self._table = Table()
        self._max_value = max_value()
        self._client_count = 0
        self._waiters: dict[bytes, dict[Client, None]] = {}
        self._timers: list[tuple[float, int, Client, int]] = []
        self._timer_ids = count()
        self._lock = threading.Lock()
        self._owners = 1
        self._stopping = False
        super().__init__(listeners, secret.key, PURPOSE, f"unicoll-store-{self.port}")
        self.start()

    # --- called from any thread -------------------------------------------------------------------

    @property
    def ended(self) -> bool:
        """True once the thread has ended and closed the sockets."""
        return not self._thread.is_alive()

    def attach(self, multi_tenant: bool) -> bool:
        """Adds an owner: to a server that lingers, or if both are multi-tenant; False if that is
        not possible.

        A server that is stopping has closed its sockets when this returns.
        """
        with self._lock:
            if not self._stopping:
                if self._owners and not (multi_tenant and self._multi_tenant):
                    return False
                self._owners += 1
                return True
        # The new owner may need the port at once: this waits until the thread has closed the
        # sockets.
        self.stop()
        return False

    def release(self, linger: bool) -> None:
        """Ends one ownership. After the last one the server stops: now, or once its last client has
        disconnected."""
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
        """Ends the thread and all connections. Idempotent, and bounded in time."""
        with self._lock:
            self._stopping = True
        self.wake()
        # The garbage collector may close a store on this thread.
        if threading.current_thread() is not self._thread:
            self._thread.join(_STOP_SECONDS)

    # --- the server's thread ----------------------------------------------------------------------

    def _serve(self) -> None:
        try:
            super()._serve()
        finally:
            # The thread may have failed: attach() must not add an owner to it.
            with self._lock:
                self._stopping = True

    def should_stop(self) -> bool:
        with self._lock:
            # The lock decides: a new owner is either counted, or finds that the server stops.
            if self._owners == 0 and not self._client_count:
                self._stopping = True
            return self._stopping

    def wait_seconds(self) -> float | None:
        if not self._timers:
            return None
        # The timeout of a client may exceed the maximum of the selector, which would raise an
        # error.
        return min(seconds_left(self._timers[0][0]), _MAX_WAIT_SECONDS)

    def authenticated(self, client: Client) -> None:
        client.state = _ClientState()
        # Clients without a handshake do not keep a server alive that lingers.
        self._client_count += 1
        keep_alive(client.sock)

    def received(self, client: Client) -> None:
        # A client that sends requests and reads no replies would otherwise make the outbox grow
        # without limit.
        if client.state.request is not None or client.outbox:
            raise MalformedError("a request before the reply to the previous one")
        self._handle_request(client)

    def _handle_request(self, client: Client) -> None:
        inbox = client.inbox
        if len(inbox) < REQUEST.size:
            return
        size, code, seconds = REQUEST.unpack_from(inbox)
        if size > max_request(self._max_value):
            raise MalformedError(f"a request of {size} bytes")
        end = REQUEST.size + size
        if len(inbox) < end:
            return
        if len(inbox) > end:
            raise MalformedError("a request before the reply to the previous one")
        fields = unpack_fields(memoryview(inbox)[REQUEST.size :])
        op = validate(code, fields, self._max_value)
        client.inbox = bytearray()
        answer = self._try_request(op, fields)
        if isinstance(answer, WaitRequired):
            # The list of timers has no order with NaN in it, and the selector takes no infinite
            # time.
            if not op.waits or not math.isfinite(seconds):
                raise MalformedError(f"{op.name} cannot wait for {seconds} s")
            client.state.serial += 1
            self._add_waiter(client, op, fields, answer)
            self._set_timer(seconds, client, client.state.serial)
        else:
            self._send(client, answer)
        self._wake_waiters()

    def _try_request(
        self, op: StoreOp, fields: Sequence[bytes], waited: bool = False
    ) -> bytes | WaitRequired:
        try:
            return pack_reply(Status.OK, self._table.apply(op, fields, waited))
        except WaitRequired as waiting:
            return waiting
        except DistStoreError as error:
            return pack_reply(Status.ERROR, (str(error).encode("utf-8", "replace"),))

    def _add_waiter(
        self, client: Client, op: StoreOp, fields: Sequence[bytes], missing: WaitRequired
    ) -> None:
        """Registers the request under its first missing key; when that is set, under the next
        one."""
        client.state.request = (op, fields)
        client.state.awaited_key = missing.keys[0]
        self._waiters.setdefault(client.state.awaited_key, {})[client] = None

    def _remove_waiter(self, client: Client) -> None:
        client.state.request = None
        waiters = self._waiters.get(client.state.awaited_key)
        if waiters is not None:
            waiters.pop(client, None)
            if not waiters:
                del self._waiters[client.state.awaited_key]

    def _wake_waiters(self) -> None:
        changed = self._table.changed_keys
        # A request that is answered may change keys itself, as QUEUE_POP does.
        while changed:
            for client in self._waiters.pop(changed.pop(), ()):
                if client.state.request is None:
                    continue
                op, fields = client.state.request
                answer = self._try_request(op, fields, waited=True)
                if isinstance(answer, WaitRequired):
                    self._add_waiter(client, op, fields, answer)
                else:
                    client.state.request = None
                    self._send(client, answer)

    def _set_timer(self, seconds: float, client: Client, serial: int) -> None:
        # A timer stays after its request was answered, until it is due: with long timeouts there
        # would be one for each request.
        if len(self._timers) > 1024 + 4 * len(self._clients):
            self._timers = [timer for timer in self._timers if self._is_waiting(timer[2], timer[3])]
            heapq.heapify(self._timers)
        # The number decides between equal times, since clients have no order.
        heapq.heappush(
            self._timers, (time.monotonic() + seconds, next(self._timer_ids), client, serial)
        )

    def _is_waiting(self, client: Client, serial: int) -> bool:
        return client.state.request is not None and client.state.serial == serial

    def tick(self) -> None:
        now = time.monotonic()
        while self._timers and self._timers[0][0] <= now:
            _, _, client, serial = heapq.heappop(self._timers)
            if not self._is_waiting(client, serial):
                continue
            op, fields = client.state.request
            # The request is tried once more, for the keys that are missing now: it was registered
            # under one of them.
            answer = self._try_request(op, fields, waited=True)
            if isinstance(answer, WaitRequired):
                answer = pack_reply(Status.TIMEOUT, answer.keys)
            self._remove_waiter(client)
            self._send(client, answer)

    def disconnected(self, client: Client) -> None:
        if client.handshake is None:
            self._client_count -= 1
            self._remove_waiter(client)
