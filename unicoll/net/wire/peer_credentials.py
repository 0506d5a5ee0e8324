"""The user of the process at the other end of a connection within this host, from the kernel.

For TCP, Linux answers who owns a socket (sock_diag(7)). An address, even loopback's, proves nothing
about the owner.
"""

from __future__ import annotations

import os
import socket
import struct
from functools import cache
from typing import Any

_SOCK_DIAG, _BY_FAMILY, _REQUEST = 4, 20, 1
"""NETLINK_SOCK_DIAG, SOCK_DIAG_BY_FAMILY, NLM_F_REQUEST (linux/netlink.h, linux/sock_diag.h)."""
_ALL = 0xFFFFFFFF
_ESTABLISHED = 1
_HEADER = struct.Struct("=IHHII")
_OPTIONS = struct.Struct("=BBBBI")
_PORTS = struct.Struct("!HH16s16s")
_INTERFACE_AND_COOKIE = struct.Struct("=3I")
_FOUND = struct.Struct("=BBxx48x12xII")
"""Family, state, uid and inode of struct inet_diag_msg (linux/inet_diag.h)."""
_WAIT_S = 1.0


@cache
def is_supported() -> bool:
    """True if this system says who owns TCP sockets; tested once, on a connection within this
    process."""
    try:
        with (
            socket.create_server(("127.0.0.1", 0)) as listener,
            socket.create_connection(listener.getsockname(), 5) as near,
        ):
            far, _ = listener.accept()
            with far:
                return is_same_user(near) and is_same_user(far)
    except OSError:
        return False


def is_same_user(sock: socket.socket) -> bool:
    """True if the process at the other end runs as this process's user; False if that is
    unknown."""
    return is_own(peer_uid(sock))


def is_own(uid: int | None) -> bool:
    """True if a user is that of this process; False if that is unknown.

    The overflow uid is no user: in a user namespace it stands for all that have no uid there.
    """
    return uid == os.geteuid() and uid != _overflow_uid()


@cache
def _overflow_uid() -> int:
    try:
        with open("/proc/sys/kernel/overflowuid", encoding="ascii") as file:
            return int(file.read())
    except (OSError, ValueError):
        return 65534


def peer_uid(sock: socket.socket) -> int | None:
    """The user of the process at the other end of a connected socket; None for another host, or if
    unknown.

    It is the user that created that end's socket. For the end of a server, call this after the
    server has answered: before its accept the kernel knows no user.
    """
    if sock.family == socket.AF_UNIX:
        credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        return int(struct.unpack("3i", credentials)[1])
    try:
        # The kernel is asked for the other socket, whose own address is the peer of this one.
        return _uid_of(sock.getpeername(), sock.getsockname())
    except (OSError, ValueError):
        return None


def _uid_of(near: tuple[Any, ...], far: tuple[Any, ...]) -> int | None:
    """The user of the socket of this host with these addresses of its own and of its peer."""
    family = socket.AF_INET6 if ":" in near[0] else socket.AF_INET
    hosts = [
        socket.inet_pton(family, host.partition("%")[0]).ljust(16, b"\0")
        for host in (near[0], far[0])
    ]
    scope = near[3] if len(near) > 3 else 0
    request = (
        _OPTIONS.pack(family, socket.IPPROTO_TCP, 0, 0, _ALL)
        + _PORTS.pack(near[1], far[1], *hosts)
        + _INTERFACE_AND_COOKIE.pack(scope, _ALL, _ALL)
    )
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _SOCK_DIAG) as kernel:
        kernel.settimeout(_WAIT_S)
        kernel.sendto(
            _HEADER.pack(_HEADER.size + len(request), _BY_FAMILY, _REQUEST, 0, 0) + request, (0, 0)
        )
        answer = kernel.recv(4096)
    if _HEADER.unpack_from(answer)[1] != _BY_FAMILY:
        return None
    _, state, uid, inode = _FOUND.unpack_from(answer, _HEADER.size)
    # An inode of 0 means that no process has the socket open.
    return uid if state == _ESTABLISHED and inode else None
