"""TCPStore: a store served by one process over TCP."""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Sequence

from unicoll.errors import (
    AuthenticationError,
    DistArgumentError,
    DistNetworkError,
    DistStoreError,
    DistTypeError,
    StoreTimeoutError,
)
from unicoll.net.stores.base import DEFAULT_TIMEOUT, Timeout
from unicoll.net.stores.client import RequestStore
from unicoll.net.stores.connections import ConnectionPool
from unicoll.net.stores.listener import (
    acquire_server,
    bind_addresses,
    connect_addresses,
    release_server,
)
from unicoll.net.stores.protocol import (
    REPLY,
    MalformedError,
    Status,
    StoreOp,
    unpack_fields,
    validate_reply,
)
from unicoll.net.stores.table import HIDDEN
from unicoll.net.stores.tcp_server import StoreServer
from unicoll.net.wire.channel import Connection
from unicoll.net.wire.interfaces import join_hostport
from unicoll.net.wire.records import TamperedError
from unicoll.net.wire.secret import Secret, find_secret
from unicoll.process.interrupts import raised_by_handler
from unicoll.process.timeouts import seconds_left

_JOINED = HIDDEN + b"joined"
_ANSWER_SECONDS = 10.0
_MIN_BYTES_PER_SECOND = 1e6
_READ_SIZE = 64 * 1024


class TCPStore(RequestStore):
    """A client of a store server, and with ``is_master`` also that server
    (torch.distributed.TCPStore).

    The server runs in one thread of the master's process and supports thousands of clients. Every
    connection proves the job's secret first. An exception of a signal's handler in a request ends
    its connection, and the next request has another one. The master listens on loopback only if
    ``host_name`` is a loopback address, else on all interfaces, with a warning if there is no
    secret.

    Args:
        host_name: name or address, of either family, at which clients reach the master.
        port: the master's port; the master may pass 0 for a free port, see :attr:`port`.
        world_size: number of processes that join, including the master; None if that is not fixed.
        is_master: True if this process serves the store.
        timeout: how long to wait for the server, the other processes and missing keys (timedelta or
            seconds).
        wait_for_workers: return only once ``world_size`` processes have joined.
        multi_tenant: masters of one process share the server of one port, and so its keys.
        master_listen_fd: a bound TCP socket for the master to use instead of creating one.
        use_libuv: accepted for compatibility, without effect.
        secret: the job's secret; None reads it from the environment
            (:func:`unicoll.net.wire.secret.find_secret`).
        bind: addresses for the master to listen on, comma-separated, instead of the rule above.
        retry: False: a server that cannot be reached is an error at once, and not awaited until the
            timeout.

    Raises:
        AuthenticationError: the server has another secret, or is another program.
        DistNetworkError: the server cannot be reached, or the port cannot be used.
        StoreTimeoutError: fewer than ``world_size`` processes joined; the message has their number.
    """

    def __init__(
        self,
        host_name: str,
        port: int,
        world_size: int | None = None,
        is_master: bool = False,
        timeout: Timeout = DEFAULT_TIMEOUT,
        wait_for_workers: bool = True,
        multi_tenant: bool = False,
        master_listen_fd: int | None = None,
        use_libuv: bool = True,
        *,
        secret: Secret | None = None,
        bind: str | None = None,
        retry: bool = True,
    ) -> None:
        super().__init__(timeout)
        deadline = time.monotonic() + self._timeout
        host = _checked_host(host_name)
        _check_port(port, is_master or master_listen_fd is not None)
        secret = find_secret() if secret is None else secret
        server: StoreServer | None = None
        hosts = [host]
        if is_master:
            addresses = bind_addresses(host, bind)
            server = acquire_server(addresses, port, secret, multi_tenant, master_listen_fd)
            port = server.port
            hosts = connect_addresses(addresses)
        # The server has an owner before anything can fail, so that close() releases it.
        self._attach(ConnectionPool(hosts, port, secret, join_hostport(host, port)), server, host)
        try:
            self._pool.connect(deadline, retry)
            if world_size is not None and world_size > 0 and wait_for_workers:
                self._join(world_size, deadline)
        except BaseException:
            self.close()
            raise

    def _attach(self, pool: ConnectionPool, server: StoreServer | None, host: str) -> None:
        self._pool = pool
        self._host = host
        self._finalizer = weakref.finalize(self, _close_handle, pool, server, os.getpid(), False)

    @property
    def host(self) -> str:
        """The ``host_name`` argument."""
        return self._host

    @property
    def port(self) -> int:
        """The server's port."""
        return self._pool.port

    @property
    def libuvBackend(self) -> bool:
        """False: the server is unicoll's own (torch.distributed's has two)."""
        return False

    @property
    def private(self) -> bool:
        """True if only processes of this host that hold the secret or, without one, are of this
        user can use it."""
        return bool(self._pool.private)

    @property
    def has_secret(self) -> bool:
        """True if its clients prove a secret."""
        return bool(self._pool.secret.key)

    def close(self, linger: bool = False) -> None:
        """Closes the connections; the last master of a server also closes the server.

        Args:
            linger: the server continues until its last client has disconnected, or this process
                exits. A new master of the same host and port in this process takes it over, with
                its keys.
        """
        pending = self._finalizer.peek()
        if pending is not None:
            pool, server, pid, _ = pending[2]
            # This comes before detach(), which removes what close() needs: an interrupted close is
            # repeated.
            pool.close()
            # Of two threads that close at once, one releases the server.
            if self._finalizer.detach() is not None:
                _close_handle(pool, server, pid, linger)

    def clone(self) -> TCPStore:
        """Another client of the same server, with its own connections and timeout. It does not own
        the server."""
        pool = ConnectionPool(
            self._pool.hosts, self._pool.port, self._pool.secret, self._pool.address
        )
        if self._pool.closed:
            raise self._closed_error("clone")
        clone = TCPStore.__new__(TCPStore)
        RequestStore.__init__(clone, self._timeout)
        clone._attach(pool, None, self._host)
        return clone

    def _join(self, world_size: int, deadline: float) -> None:
        self._execute(StoreOp.ADD, (_JOINED, b"1"), 0.0, "TCPStore")
        try:
            self._execute(
                StoreOp.AT_LEAST, (_JOINED, b"%d" % world_size), seconds_left(deadline), "TCPStore"
            )
        except StoreTimeoutError:
            joined = int(self._execute(StoreOp.ADD, (_JOINED, b"0"), 0.0, "TCPStore")[0])
            raise StoreTimeoutError(
                f"{joined} of {world_size} processes have joined the store at {self._pool.address}"
                f" within {self._timeout:g} s. Have the others failed or not been started? Do they"
                " use this address?",
                op="TCPStore",
            ) from None

    def _execute(
        self, op: StoreOp, fields: Sequence[bytes], seconds: float, name: str
    ) -> Sequence[bytes]:
        pool = self._pool
        if pool.closed:
            raise self._closed_error(name)
        request = self._pack(op, fields, seconds, name)
        # The server itself ends a wait in time. Only one that is stopped, overloaded or cut off
        # does not answer for this long.
        reply_timeout = seconds + _ANSWER_SECONDS + len(request) / _MIN_BYTES_PER_SECOND
        # By this name discard() finds the connection also if an exception comes within acquire().
        user = object()
        try:
            sock = pool.acquire(user)
            sock.settimeout(reply_timeout)
            sock.sendall(request)
            status, reply = _receive(sock)
            validate_reply(op, status, reply, len(fields))
            pool.release(sock)
        except DistNetworkError as error:
            pool.discard(user)
            raise self._lost_error(name, error) from error
        except MalformedError as error:
            pool.discard(user)
            raise DistNetworkError(
                f"{name}: the store server at {pool.address} sent an invalid reply: {error}",
                op=name,
            ) from error
        except TamperedError as error:
            pool.discard(user)
            raise AuthenticationError(
                f"{name}: the store server at {pool.address}: {error.strerror}", op=name
            ) from error
        except OSError as error:
            pool.discard(user)
            # A TimeoutError may be that of a signal's handler.
            if raised_by_handler(error):
                raise
            # Another thread has called close(), which has shut the connection down.
            if pool.closed:
                raise self._closed_error(name) from error
            if isinstance(error, TimeoutError):
                raise DistNetworkError(
                    f"{name}: the store server at {pool.address} has not answered for"
                    f" {reply_timeout:.3g} s: its process is stopped or overloaded, or the network"
                    " is down",
                    op=name,
                ) from error
            raise self._lost_error(name, error) from error
        except BaseException:
            # The reply may come later, so the next request has another connection.
            pool.discard(user)
            raise
        if status == Status.OK:
            return reply
        if status == Status.TIMEOUT:
            raise self._timeout_error(reply, seconds, name)
        raise DistStoreError(f"{name}: {reply[0].decode('utf-8', 'replace')} ({self!r})", op=name)

    def _lost_error(self, name: str, error: Exception) -> DistNetworkError:
        kind = type(error) if isinstance(error, DistNetworkError) else DistNetworkError
        return kind(
            f"{name}: lost the store server at {self._pool.address}: {error}. The process that"
            " hosts it (rank 0 or the launcher) has died or has closed the store",
            op=name,
        )

    def __repr__(self) -> str:
        return f"TCPStore({self._pool.address})"


def _close_handle(pool: ConnectionPool, server: StoreServer | None, pid: int, linger: bool) -> None:
    pool.close()
    # A forked child inherits the handle, but not the server.
    if server is not None and pid == os.getpid():
        release_server(server, linger)


def _checked_host(host_name: str) -> str:
    if not isinstance(host_name, str):
        raise DistTypeError(f"TCPStore: host_name is a str, not {type(host_name).__name__}")
    host = host_name.strip("[]")
    if not host:
        raise DistArgumentError("TCPStore: host_name is empty")
    return host


def _check_port(port: int, allow_zero: bool) -> None:
    if isinstance(port, bool) or not isinstance(port, int):
        raise DistTypeError(f"TCPStore: port is an int, not {type(port).__name__}")
    if not (0 if allow_zero else 1) <= port <= 65535:
        raise DistArgumentError(
            f"TCPStore: port must be from {0 if allow_zero else 1} to 65535, not {port}"
        )


def _receive(sock: Connection) -> tuple[int, list[bytes]]:
    data = sock.recv(_READ_SIZE)
    while len(data) < REPLY.size:
        chunk = sock.recv(_READ_SIZE)
        if not chunk:
            raise ConnectionResetError("it closed the connection")
        data += chunk
    size, status = REPLY.unpack_from(data)
    end = REPLY.size + size
    if len(data) >= end:
        return status, unpack_fields(memoryview(data)[REPLY.size : end])
    whole = bytearray(data)
    at = len(data)
    while at < end:
        if at == len(whole):
            # Not end - at: the length is not trusted, so memory grows only with the data received.
            whole += bytes(min(end - at, max(at, _READ_SIZE)))
        # Both views are released at the end: a bytearray that has one cannot grow.
        with memoryview(whole) as view, view[at:] as free:
            got = sock.recv_into(free)
        if not got:
            raise ConnectionResetError("it closed the connection")
        at += got
    return status, unpack_fields(memoryview(whole)[REPLY.size :])
