"""The TCPStore servers of this process, and the addresses that they listen on."""

from __future__ import annotations

import atexit
import errno
import socket
import threading
from collections.abc import Sequence

from unicoll.errors import DistArgumentError, DistNetworkError
from unicoll.net.stores.tcp_server import StoreServer
from unicoll.net.wire.authenticated_server import listen
from unicoll.net.wire.interfaces import is_loopback_name, join_hostport
from unicoll.net.wire.secret import Secret
from unicoll.process import logs
from unicoll.process.fork_safety import in_child

_BACKLOG = 65535
_ALL_INTERFACES = "*"
_PORT_TRIES = 20

log = logs.logger("store")

# The lock is reentrant: the garbage collector may close one store while another one is created.
_lock = threading.RLock()
_servers: dict[tuple[tuple[str, ...], int], StoreServer] = {}


def bind_addresses(host: str, bind: str | None) -> tuple[str, ...]:
    """The addresses to listen on: those of ``bind`` (comma-separated), else loopback if ``host``
    is, else all (``*``).

    A name other than localhost counts as reachable from other hosts even if this host resolves it
    to loopback, as many hosts do with their own name.
    """
    if bind is not None:
        return tuple(part.strip().strip("[]") for part in bind.split(","))
    if host == "localhost":
        return ("127.0.0.1", "::1")
    return (host,) if is_loopback_name(host) else (_ALL_INTERFACES,)


def connect_addresses(addresses: Sequence[str]) -> list[str]:
    """The addresses at which this process connects to its own server."""
    specific = [
        address for address in addresses if address not in {_ALL_INTERFACES, "0.0.0.0", "::"}
    ]
    return specific or ["127.0.0.1", "::1"]


def acquire_server(
    addresses: tuple[str, ...], port: int, secret: Secret, multi_tenant: bool, listen_fd: int | None
) -> StoreServer:
    """A server for a new owner: a server of this process that lingers or is multi-tenant, else a
    new one.

    Raises:
        DistNetworkError: the port cannot be used. DistArgumentError: the running server has another
            secret.
    """
    with _lock:
        _remove_ended()
        running = _servers.get((addresses, port)) if port and listen_fd is None else None
        if running is not None and running.attach(multi_tenant):
            # The secrets are compared after attach(), without which a server that lingers could end
            # in the meantime.
            if running.secret.key != secret.key:
                release_server(running, linger=True)
                raise DistArgumentError(
                    f"this process already serves port {port} with another secret"
                    f" ({running.secret.source})"
                )
            return running
        listeners = (
            [_from_descriptor(listen_fd, port)]
            if listen_fd is not None
            else _listen(addresses, port)
        )
        try:
            server = StoreServer(listeners, secret, multi_tenant)
        except BaseException:
            _close(listeners)
            raise
        _servers[addresses, server.port] = server
    if not secret.key and not server.private:
        log.warning(
            "the store on port %d is OPEN: any process that can reach this host can read and change"
            " it, since there is no secret. Set UNICOLL_SECRET (or UNICOLL_SECRET_FILE) to the same"
            " random text in every process of the job, or start the job with the unicoll launcher,"
            " which sets it",
            server.port,
        )
    return server


def release_server(server: StoreServer, linger: bool) -> None:
    """Ends one ownership; see :meth:`StoreServer.release`."""
    with _lock:
        server.release(linger)
        _remove_ended()


def _remove_ended() -> None:
    for key in [key for key, server in _servers.items() if server.ended]:
        del _servers[key]


def _listen(addresses: Sequence[str], port: int) -> list[socket.socket]:
    for attempt in range(_PORT_TRIES):
        listeners: list[socket.socket] = []
        chosen = port
        try:
            for address in addresses:
                try:
                    listeners.append(_listen_at(address, chosen))
                except OSError as error:
                    # A host without IPv6 serves localhost at 127.0.0.1 only.
                    if error.errno in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT) and listeners:
                        continue
                    raise
                chosen = listeners[0].getsockname()[1]
            return listeners
        except OSError as error:
            _close(listeners)
            if port == 0 and error.errno == errno.EADDRINUSE and attempt + 1 < _PORT_TRIES:
                # Free at the first address, in use at the second: try another port.
                continue
            raise _cannot_listen(address, port, error) from error
    raise AssertionError


def _cannot_listen(address: str, port: int, error: OSError) -> DistNetworkError:
    where = join_hostport("0.0.0.0" if address == _ALL_INTERFACES else address, port)
    if error.errno == errno.EADDRINUSE:
        return DistNetworkError(
            f"{where} is in use: another job or program, or another process with rank 0, listens"
            " there. Choose another port, or 0 for any free port"
        )
    return DistNetworkError(f"cannot listen at {where}: {error.strerror or error}")


def _listen_at(address: str, port: int) -> socket.socket:
    if address != _ALL_INTERFACES:
        return listen(address, port, reuse=True, backlog=_BACKLOG)
    if socket.has_dualstack_ipv6():
        try:
            return listen("::", port, reuse=True, dual_stack=True, backlog=_BACKLOG)
        except OSError as error:
            # Any other error may mean that IPv6 is turned off here.
            if error.errno == errno.EADDRINUSE:
                raise
    return listen("0.0.0.0", port, reuse=True, backlog=_BACKLOG)


def _from_descriptor(fd: int, port: int) -> socket.socket:
    try:
        listener = socket.socket(fileno=fd)
    except OSError as error:
        raise DistArgumentError(
            f"master_listen_fd={fd} is not a socket: {error.strerror or error}"
        ) from error
    try:
        # Children of this process must not keep the port in use.
        listener.set_inheritable(False)
        listener.listen(_BACKLOG)
        actual = listener.getsockname()[1]
    except (OSError, IndexError) as error:
        listener.close()
        raise DistArgumentError(f"master_listen_fd={fd} cannot listen: {error}") from error
    if port not in (0, actual):
        listener.close()
        raise DistArgumentError(f"master_listen_fd={fd} is bound to port {actual}, not to {port}")
    return listener


def _close(sockets: Sequence[socket.socket]) -> None:
    for sock in sockets:
        sock.close()


@atexit.register
def _stop_all() -> None:
    with _lock:
        for server in _servers.values():
            server.stop()
        _servers.clear()


@in_child
def _clear_in_child() -> None:
    # The parent still serves them; the child must not stop them. The lock may be held at the fork.
    global _lock
    _lock = threading.RLock()
    _servers.clear()
