"""The shared state of a job on one host: secret, store and reserved port."""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Mapping
from typing import TYPE_CHECKING

from unicoll.net.wire.interfaces import check_loopback, free_ports, join_hostport
from unicoll.net.wire.secret import Secret, find_secret, new_key_text
from unicoll.run.process_cleanup import JOB_VARIABLE

if TYPE_CHECKING:
    from unicoll.net.stores import TCPStore


def job_token() -> str:
    """A fresh random token that identifies the job's processes."""
    return secrets.token_hex(16)


def job_variable(token: str) -> str:
    """The value of UNICOLL_JOB for a job's processes: the tokens of the enclosing jobs, then its
    own."""
    enclosing = os.environ.get(JOB_VARIABLE)
    return f"{enclosing}:{token}" if enclosing else token


def reserve_port(port: int = 0, host: str = "127.0.0.1") -> socket.socket:
    """Bind a TCP port on all interfaces without listening: a program that sets SO_REUSEADDR can
    listen there.

    While the socket is open the kernel does not assign the port to sockets that request any free
    port, as 0 does here (:func:`unicoll.net.wire.interfaces.free_ports` of ``host``). If the port
    is in use, the message of the OSError has it.
    """
    if port:
        return _reserve(port, True)
    for candidate in free_ports(host):
        try:
            return _reserve(candidate, False)
        except OSError:
            if not candidate:
                raise
    raise AssertionError


def _reserve(port: int, is_requested: bool) -> socket.socket:
    try:
        sock = socket.socket(socket.AF_INET6, socket.SOCK_STREAM)
    except OSError:
        # This kernel has no IPv6.
        return _bind(
            socket.socket(socket.AF_INET, socket.SOCK_STREAM), "0.0.0.0", port, is_requested
        )
    sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
    return _bind(sock, "::", port, is_requested)


def _bind(sock: socket.socket, host: str, port: int, is_requested: bool) -> socket.socket:
    try:
        # Without SO_REUSEADDR, bind does not pick a port that another process has reserved. A
        # requested port may be in TIME_WAIT after the last job.
        if is_requested:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, port))
        # Linux binds a second socket to the port if both have the option and none listens. So a
        # program that sets it can still use the port.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    except OSError as error:
        sock.close()
        raise OSError(error.errno, f"port {port} cannot be used: {error.strerror}") from None
    return sock


def job_environment(store: str, master_port: int) -> dict[str, str]:
    """The variables of a job's processes for its store, ``host:port``, and its port."""
    return {"UNICOLL_LAUNCHER": "1", "UNICOLL_STORE": store, "MASTER_PORT": str(master_port)}


class LocalJob:
    """A job whose store this process serves: its secret, its store, its port.

    The secret is ``secret`` or that of ``environ``; on one host it is else a new one.
    ``master_port`` is for the job's own use (MASTER_PORT); None is a free one, and OSError is
    raised if it is in use. ``address`` is the one at which processes of other hosts reach this one;
    None if all processes are on this host. DistNetworkError: the loopback interface is down.
    """

    def __init__(
        self,
        environ: Mapping[str, str] = os.environ,
        master_port: int | None = None,
        address: str | None = None,
        secret: Secret | None = None,
    ) -> None:
        from unicoll.net.stores import TCPStore

        check_loopback()
        made: str | None = None
        secret = secret or find_secret(environ)
        # A new secret reaches only the processes that this one starts, so it is for jobs on one
        # host.
        if not secret.key and address is None:
            made = new_key_text()
            secret = find_secret({"UNICOLL_SECRET": made})
        host = address or "127.0.0.1"
        # Before the store is made: it takes any free port, which might be the requested one.
        self._port = reserve_port(master_port or 0, host)
        self.master_port: int = self._port.getsockname()[1]
        try:
            self.store: TCPStore = TCPStore(
                host, 0, is_master=True, wait_for_workers=False, secret=secret
            )
        except BaseException:
            self._port.close()
            raise
        self.environment = job_environment(join_hostport(host, self.store.port), self.master_port)
        if made is not None:
            self.environment["UNICOLL_SECRET"] = made

    def close(self) -> None:
        """Close the store and release the port."""
        self.store.close()
        self._port.close()
