"""The store that one process serves over TCP to all the others."""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Sequence

from ..auth import Secret, find_secret
from ..channel import Connection, TamperedError
from ..errors import (
    AuthenticationError,
    DistArgumentError,
    DistNetworkError,
    DistStoreError,
    DistTypeError,
    StoreTimeoutError,
)
from .base import DEFAULT_TIMEOUT, Timeout
from .links import Links, address_text
from .listening import adopt_server, listen_addresses, own_addresses, release_server
from .requests import RequestStore, seconds_left
from .table import HIDDEN
from .tcp_server import StoreServer
from .wire import REPLY, MalformedError, Op, Status, unpack_fields, validate_reply

__all__ = ["TCPStore"]

_JOINED = HIDDEN + b"joined"
_ANSWER_SECONDS = 10.0
_SLOWEST = 1e6
_READ_SIZE = 64 * 1024


class TCPStore(RequestStore):
    """A client of a store server, and with ``is_master`` that server too (torch.distributed.TCPStore).

    The server runs in one thread of the master's process and takes thousands of clients. Every connection proves
    the job's secret first. The master listens on loopback alone if ``host_name`` is a loopback address, else on
    all interfaces, with a loud warning if there is no secret.

    Args:
        host_name: name or address, of either family, at which clients reach the master.
        port: the master's port; the master itself may give 0 for a free one, see :attr:`port`.
        world_size: how many processes join, the master included; None if that is not fixed.
        is_master: whether this process serves the store.
        timeout: how long to wait for the server, the other processes and missing keys (timedelta or seconds).
        wait_for_workers: whether to return only once ``world_size`` processes have joined.
        multi_tenant: whether masters of one process share the server of one port, and so its keys.
        master_listen_fd: a bound TCP socket for the master to take over in place of making its own.
        use_libuv: taken for compatibility; there is one server.
        secret: the job's secret; None looks for it in the environment (:func:`unicoll.auth.find_secret`).
        bind: addresses for the master to listen on, separated by commas, in place of the rule above.

    Raises:
        AuthenticationError: the server has another secret, or is another program.
        DistNetworkError: the server cannot be reached, or the port cannot be had.
        StoreTimeoutError: fewer than ``world_size`` processes joined; the message says how many did.
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
    ) -> None:
        super().__init__(timeout)
        deadline = time.monotonic() + self._timeout
        host = _checked_host(host_name)
        _check_port(port, is_master or master_listen_fd is not None)
        secret = find_secret() if secret is None else secret
        server: StoreServer | None = None
        hosts = [host]
        if is_master:
            addresses = listen_addresses(host, bind)
            server = adopt_server(addresses, port, secret, multi_tenant, master_listen_fd)
            port = server.port
            hosts = own_addresses(addresses)
        self._use(Links(hosts, port, secret, address_text(host, port)), server, host)
        try:
            self._links.connect(deadline)
            if world_size is not None and world_size > 0 and wait_for_workers:
                self._join(world_size, deadline)
        except BaseException:
            self.close()
            raise

    def _use(self, links: Links, server: StoreServer | None, host: str) -> None:
        self._links = links
        self._host = host
        self._finalizer = weakref.finalize(self, _shut, links, server, os.getpid(), False)

    @property
    def host(self) -> str:
        """The host name given."""
        return self._host

    @property
    def port(self) -> int:
        """The server's port."""
        return self._links.port

    @property
    def private(self) -> bool:
        """Whether only processes of this host that hold the store's secret, or else are of this user, can use it."""
        return bool(self._links.private)

    def close(self, linger: bool = False) -> None:
        """Closes the connections, and on the last master of a server the server.

        Args:
            linger: let the server go on until its last client has gone, or this process exits. A new master of the
                same host and port in this process takes it over, keys included.
        """
        pending = self._finalizer.detach()
        if pending is not None:
            links, server, pid, _ = pending[2]
            _shut(links, server, pid, linger)

    def clone(self) -> TCPStore:
        """A further client of the same server, with its own connections and timeout. It does not own the server."""
        links = Links(self._links.hosts, self._links.port, self._links.secret, self._links.shown)
        if self._links.closed:
            raise self._closed("clone")
        twin = TCPStore.__new__(TCPStore)
        RequestStore.__init__(twin, self._timeout)
        twin._use(links, None, self._host)
        return twin

    def _join(self, world_size: int, deadline: float) -> None:
        self._run(Op.ADD, (_JOINED, b"1"), 0.0, "TCPStore")
        try:
            self._run(Op.AT_LEAST, (_JOINED, b"%d" % world_size), seconds_left(deadline), "TCPStore")
        except StoreTimeoutError:
            joined = int(self._run(Op.ADD, (_JOINED, b"0"), 0.0, "TCPStore")[0])
            raise StoreTimeoutError(
                f"{joined} of {world_size} processes have joined the store at {self._links.shown} within "
                f"{self._timeout:g} s. Have the others failed or not been started? Do they use this address?",
                op="TCPStore",
            ) from None

    def _run(self, op: Op, fields: Sequence[bytes], seconds: float, name: str) -> Sequence[bytes]:
        links = self._links
        if links.closed:
            raise self._closed(name)
        request = self._pack(op, fields, seconds, name)
        patience = seconds + _ANSWER_SECONDS + len(request) / _SLOWEST
        try:
            sock = links.take()
        except DistNetworkError as error:
            raise self._lost(name, error) from error
        try:
            sock.settimeout(patience)
            sock.sendall(request)
            status, reply = _receive(sock)
            validate_reply(op, status, reply, len(fields))
        except MalformedError as error:
            links.discard(sock)
            raise DistNetworkError(
                f"{name}: the store server at {links.shown} sent what is no reply: {error}", op=name
            ) from error
        except TamperedError as error:
            links.discard(sock)
            raise AuthenticationError(
                f"{name}: the store server at {links.shown}: {error.strerror}", op=name
            ) from error
        except OSError as error:
            links.discard(sock)
            if links.closed:
                raise self._closed(name) from error
            if isinstance(error, TimeoutError):
                raise DistNetworkError(
                    f"{name}: the store server at {links.shown} has not answered for {patience:.3g} s: its process "
                    "is stopped or overloaded, or the network is down",
                    op=name,
                ) from error
            raise self._lost(name, error) from error
        except BaseException:
            links.discard(sock)
            raise
        links.give(sock)
        if status == Status.OK:
            return reply
        if status == Status.TIMEOUT:
            raise self._timed_out(reply, seconds, name)
        raise DistStoreError(f"{name}: {reply[0].decode('utf-8', 'replace')} ({self!r})", op=name)

    def _lost(self, name: str, error: Exception) -> DistNetworkError:
        kind = type(error) if isinstance(error, DistNetworkError) else DistNetworkError
        return kind(
            f"{name}: lost the store server at {self._links.shown}: {error}. The process that hosts it (rank 0 or "
            "the launcher) has died or has closed the store",
            op=name,
        )

    def __repr__(self) -> str:
        return f"TCPStore({self._links.shown})"


def _shut(links: Links, server: StoreServer | None, pid: int, linger: bool) -> None:
    links.close()
    # A forked child inherits the handle, not the server.
    if server is not None and pid == os.getpid():
        release_server(server, linger)


def _checked_host(host_name: str) -> str:
    if not isinstance(host_name, str):
        raise DistTypeError(f"TCPStore: host_name is a str, not {type(host_name).__name__}")
    host = host_name.strip("[]")
    if not host:
        raise DistArgumentError("TCPStore: host_name is empty")
    return host


def _check_port(port: int, may_pick: bool) -> None:
    if isinstance(port, bool) or not isinstance(port, int):
        raise DistTypeError(f"TCPStore: port is an int, not {type(port).__name__}")
    if not (0 if may_pick else 1) <= port <= 65535:
        raise DistArgumentError(
            f"TCPStore: {port} is no port {'' if may_pick else 'of a server '}to connect to"
        )


def _receive(sock: Connection) -> tuple[int, list[bytes]]:
    data = sock.recv(_READ_SIZE)
    while len(data) < REPLY.size:
        piece = sock.recv(_READ_SIZE)
        if not piece:
            raise ConnectionResetError("it closed the connection")
        data += piece
    size, status = REPLY.unpack_from(data)
    end = REPLY.size + size
    if len(data) >= end:
        return status, unpack_fields(memoryview(data)[REPLY.size : end])
    whole = bytearray(data)
    at = len(data)
    while at < end:
        if at == len(whole):
            whole += bytes(min(end - at, max(at, _READ_SIZE)))  # the length is a claim: memory follows what has come
        with memoryview(whole) as view, view[at:] as free:
            got = sock.recv_into(free)
        if not got:
            raise ConnectionResetError("it closed the connection")
        at += got
    return status, unpack_fields(memoryview(whole)[REPLY.size :])
