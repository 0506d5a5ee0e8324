"""A socket is not closed while another thread uses it: the system may give its descriptor's number to a new one."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

from gloo_fallback.transport.connections import GroupConnections
from unicoll.backend.group_state import GroupState
from unicoll.errors import GroupAbortedError
from unicoll.net.stores.connections import ConnectionPool
from unicoll.net.wire.authenticated_server import Client, Server, listen

SOON_S = 60.0


class SlowSocket:
    """A socket whose ``shutdown`` and ``send`` wait until :attr:`proceed` is set."""

    def __init__(self) -> None:
        self.entered = threading.Event()
        self.proceed = threading.Event()
        self.closed = threading.Event()
        self.closed_in_use = False
        self._in_use = False

    def _use(self) -> None:
        self._in_use = True
        self.entered.set()
        self.proceed.wait(SOON_S)
        self._in_use = False

    def shutdown(self, how: int) -> None:
        self._use()

    def send(self, data: bytes) -> int:
        self._use()
        return len(data)

    def close(self) -> None:
        self.closed_in_use = self._in_use
        self.closed.set()


def assert_close_waits(sock: SlowSocket, use: Callable[[], None], close: Callable[[], None]) -> None:
    """``close`` closes ``sock`` only once ``use``, in another thread, has finished with it."""
    using = threading.Thread(target=use)
    using.start()
    assert sock.entered.wait(SOON_S)
    closing = threading.Thread(target=close)
    closing.start()
    assert not sock.closed.wait(0.2)
    sock.proceed.set()
    using.join(SOON_S)
    closing.join(SOON_S)
    assert sock.closed.wait(SOON_S)
    assert not sock.closed_in_use


def test_connections_of_a_group_are_not_closed_while_abort_shuts_them_down() -> None:
    sock = SlowSocket()
    context = SimpleNamespace(name="g", rank=0, size=2, options={})
    endpoint = SimpleNamespace(close_group=lambda name: sock.close())
    state = GroupState(cast(Any, context))
    connections = GroupConnections(state, cast(Any, endpoint), 0)
    connections._sockets[1] = cast(Any, sock)
    assert_close_waits(sock, lambda: state.abort(GroupAbortedError("aborted")), connections.close)


def test_a_connection_of_a_store_is_not_discarded_while_the_pool_closes() -> None:
    sock = SlowSocket()
    pool = ConnectionPool(["127.0.0.1"], 1, cast(Any, None), "127.0.0.1:1")
    user = object()
    pool._users[cast(Any, sock)] = user
    assert_close_waits(sock, pool.close, lambda: pool.discard(user))


class Idle(Server):
    """A server that ends when :attr:`ended` is set."""

    ended = False

    def received(self, client: Client) -> None:
        raise AssertionError("no client connects")

    def should_stop(self) -> bool:
        return self.ended


def test_the_socket_that_wakes_a_server_is_not_closed_in_use() -> None:
    sock = SlowSocket()
    server = Idle([listen("127.0.0.1")], b"", b"test", "test")
    real: socket.socket = server._wake_out
    server._wake_out = cast(Any, sock)
    server.start()

    def end() -> None:
        server.ended = True
        real.send(b"x")
        server._thread.join(SOON_S)

    try:
        assert_close_waits(sock, server.wake, end)
    finally:
        server.ended = True
        real.close()
