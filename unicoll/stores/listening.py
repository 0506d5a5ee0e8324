"""Where a TCPStore's server listens, and the servers of this process."""

from __future__ import annotations

import atexit
import errno
import ipaddress
import logging
import socket
import threading
from collections.abc import Sequence

from ..auth import Secret
from ..errors import DistArgumentError, DistNetworkError
from ..forks import in_child
from .links import address_text
from .tcp_server import StoreServer

__all__ = ["adopt_server", "listen_addresses", "own_addresses", "release_server"]

_BACKLOG = 65535
_WIDE = "*"
_PORT_TRIES = 20

log = logging.getLogger("unicoll")

# Reentrant, for the garbage collector may close one store while another is being made.
_lock = threading.RLock()
_servers: dict[tuple[tuple[str, ...], int], StoreServer] = {}
_multi_tenant: set[int] = set()


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def listen_addresses(host: str, bind: str | None) -> tuple[str, ...]:
    """The addresses to listen on: what ``bind`` lists (by commas), else loopback if ``host`` is, else all (``*``).

    A name other than localhost counts as reachable from outside even if this machine resolves it to loopback, as
    many do with their own name.
    """
    if bind is not None:
        return tuple(part.strip().strip("[]") for part in bind.split(","))
    if host == "localhost":
        return ("127.0.0.1", "::1")
    return (host,) if _is_loopback(host) else (_WIDE,)


def own_addresses(addresses: Sequence[str]) -> list[str]:
    """Under which this process reaches its own server."""
    wide = {_WIDE, "0.0.0.0", "::"}
    found = [address for address in addresses if address not in wide]
    return found or ["127.0.0.1", "::1"]


def adopt_server(
    addresses: tuple[str, ...], port: int, secret: Secret, multi_tenant: bool, listen_fd: int | None
) -> StoreServer:
    """A server for one more owner: one of this process that lingers or takes several tenants, else a new one.

    Raises:
        DistNetworkError: the port cannot be had. DistArgumentError: the running server has another secret.
    """
    with _lock:
        _forget_ended()
        running = _servers.get((addresses, port)) if port and listen_fd is None else None
        if running is not None and running.attach(id(running) in _multi_tenant and multi_tenant):
            if running.secret.key != secret.key:
                release_server(running, linger=True)
                raise DistArgumentError(
                    f"port {port} is served by this process already, with another secret ({running.secret.source})"
                )
            return running
        listeners = [_inherit(listen_fd, port)] if listen_fd is not None else _listen(addresses, port)
        try:
            server = StoreServer(listeners, secret)
        except BaseException:
            _close(listeners)
            raise
        _servers[addresses, server.port] = server
        if multi_tenant:
            _multi_tenant.add(id(server))
    if not secret.key and not server.private:
        log.warning(
            "the store on port %d is OPEN: whoever can reach this machine can read and change it, for there is no "
            "secret. Set UNICOLL_SECRET (or UNICOLL_SECRET_FILE) to the same random text in every process of the job, "
            "or start the job with the unicoll launcher, which does",
            server.port,
        )
    return server


def release_server(server: StoreServer, linger: bool) -> None:
    """Gives an ownership back; see :meth:`StoreServer.release`."""
    with _lock:
        server.release(linger)
        _forget_ended()


def _forget_ended() -> None:
    for key in [key for key, server in _servers.items() if server.ended]:
        _multi_tenant.discard(id(_servers.pop(key)))


def _listen(addresses: Sequence[str], port: int) -> list[socket.socket]:
    for attempt in range(_PORT_TRIES):
        listeners: list[socket.socket] = []
        chosen = port
        try:
            for address in addresses:
                try:
                    listeners.append(
                        _listen_wide(chosen) if address == _WIDE else _listen_at(address, chosen)
                    )
                except OSError as error:
                    if error.errno in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT) and listeners:
                        continue
                    raise
                chosen = listeners[0].getsockname()[1]
            return listeners
        except OSError as error:
            _close(listeners)
            if port == 0 and error.errno == errno.EADDRINUSE and attempt + 1 < _PORT_TRIES:
                # Free at the first address, taken at the second: another one.
                continue
            raise _cannot_listen(address, port, error) from error
    raise AssertionError


def _cannot_listen(address: str, port: int, error: OSError) -> DistNetworkError:
    where = address_text("0.0.0.0" if address == _WIDE else address, port)
    if error.errno == errno.EADDRINUSE:
        return DistNetworkError(
            f"{where} is in use already: another job or program listens there. Choose another port, or 0 to have a "
            "free one picked"
        )
    return DistNetworkError(f"cannot listen at {where}: {error.strerror or error}")


def _listen_wide(port: int) -> socket.socket:
    if socket.has_dualstack_ipv6():
        try:
            return _listen_at("::", port, dual=True)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise
    return _listen_at("0.0.0.0", port)


def _listen_at(address: str, port: int, dual: bool = False) -> socket.socket:
    family, kind, protocol, _, where = socket.getaddrinfo(
        address, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, not dual)
        listener.bind(where)
        listener.listen(_BACKLOG)
    except BaseException:
        listener.close()
        raise
    return listener


def _inherit(fd: int, port: int) -> socket.socket:
    try:
        listener = socket.socket(fileno=fd)
    except OSError as error:
        raise DistArgumentError(f"master_listen_fd={fd} is no socket: {error.strerror or error}") from error
    try:
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
def _forget_all() -> None:
    # The parent serves them; the child must not stop them, nor find the lock taken.
    global _lock
    _lock = threading.RLock()
    _servers.clear()
    _multi_tenant.clear()
