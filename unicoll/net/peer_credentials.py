"""The user of the process at the other end of a connection within this host, from the kernel.

For TCP, Linux lists the owner of every socket in ``/proc/net/tcp``. An address, even loopback's, proves nothing about
the owner.
"""

from __future__ import annotations

import os
import socket
import struct
import sys
from functools import cache

_TABLES = {socket.AF_INET: "/proc/net/tcp", socket.AF_INET6: "/proc/net/tcp6"}
_ESTABLISHED = b"01"
_READS = 3
"""A table that changes during a read may miss a line."""


@cache
def is_supported() -> bool:
    """True if this system lists the owners of TCP sockets; tested once, on a connection within this process."""
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
    """True if the process at the other end runs as this process's user; False if that is unknown."""
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
    """The user of the process at the other end of a connected socket; None for another host, or if unknown.

    It is the user that created that end's socket. For the end of a server, call this after the server has answered:
    before its accept the kernel lists no user.
    """
    if sock.family == socket.AF_UNIX:
        credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        return int(struct.unpack("3i", credentials)[1])
    try:
        ends = [(name[0].partition("%")[0], name[1]) for name in (sock.getpeername(), sock.getsockname())]
    except OSError:
        return None
    for _ in range(_READS):
        for family, line in _table_lines(ends):
            uid = _find_uid(_TABLES[family], line)
            if uid is not None:
                return uid
    return None


def _table_lines(ends: list[tuple[str, int]]) -> list[tuple[socket.AddressFamily, bytes]]:
    """The start of the peer's line for each table that may have it: one end of an IPv4 connection may be IPv6."""
    hosts = [host.removeprefix("::ffff:") for host, _ in ends]
    ports = [port for _, port in ends]
    if any(":" in host for host in hosts):
        return [(socket.AF_INET6, _line([socket.inet_pton(socket.AF_INET6, h) for h in hosts], ports))]
    plain = [socket.inet_aton(host) for host in hosts]
    mapped = [bytes(10) + b"\xff\xff" + address for address in plain]
    return [(socket.AF_INET, _line(plain, ports)), (socket.AF_INET6, _line(mapped, ports))]


def _line(addresses: list[bytes], ports: list[int]) -> bytes:
    texts = []
    for address, port in zip(addresses, ports, strict=True):
        groups = (address[i : i + 4] for i in range(0, len(address), 4))
        digits = "".join(f"{int.from_bytes(group, sys.byteorder):08X}" for group in groups)
        texts.append(f"{digits}:{port:04X}")
    return b" " + " ".join(texts).encode() + b" "


def _find_uid(table: str, line: bytes) -> int | None:
    try:
        with open(table, "rb") as file:
            text = file.read()
    except OSError:
        return None
    at = text.find(line)
    if at < 0:
        return None
    # state, queues, timer, retransmits, uid, timeout, inode; inode 0: no process has the socket open
    fields = text[at + len(line) : text.find(b"\n", at)].split()
    return int(fields[4]) if fields[0] == _ESTABLISHED and fields[6] != b"0" else None
