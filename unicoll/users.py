"""Whose process is at the other end of a connection within this host, as the kernel knows it.

For TCP, Linux tells the owner of every socket in ``/proc/net/tcp``; an address alone, loopback's included, says nothing
about who is there.
"""

from __future__ import annotations

import os
import socket
import struct
import sys
from functools import cache

__all__ = ["can_tell", "is_own", "peer_uid"]

_TABLES = {socket.AF_INET: "/proc/net/tcp", socket.AF_INET6: "/proc/net/tcp6"}
_ESTABLISHED = b"01"
_LOOKS = 3
"""A table that changes while it is read may leave a line out."""


@cache
def can_tell() -> bool:
    """Whether this system tells the owners of TCP sockets: tried once, on a connection to ourselves."""
    try:
        with (
            socket.create_server(("127.0.0.1", 0)) as listener,
            socket.create_connection(listener.getsockname(), 5) as near,
        ):
            far, _ = listener.accept()
            with far:
                return is_own(near) and is_own(far)
    except OSError:
        return False


def is_own(sock: socket.socket) -> bool:
    """Whether the process at the other end runs as this process's user; False where that is not known."""
    return peer_uid(sock) == os.geteuid()


def peer_uid(sock: socket.socket) -> int | None:
    """The user of the process at the other end of a connected socket; None for another host's, or where unknown.

    It is the user who made that end's socket. Ask a server that has begun to answer: before it takes a connection, the
    kernel has no user for that.
    """
    if sock.family == socket.AF_UNIX:
        credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        return int(struct.unpack("3i", credentials)[1])
    try:
        here, there = sock.getsockname(), sock.getpeername()
        ends = [(there[0].partition("%")[0], there[1]), (here[0].partition("%")[0], here[1])]
    except OSError:
        return None
    for _ in range(_LOOKS):
        for family, addresses in _forms(ends):
            uid = _look_up(_TABLES[family], addresses)
            if uid is not None:
                return uid
    return None


def _forms(ends: list[tuple[str, int]]) -> list[tuple[socket.AddressFamily, bytes]]:
    """How the peer's line begins, in each table that may have it: an IPv4 connection may be IPv6's to one end."""
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
        words = (address[i : i + 4] for i in range(0, len(address), 4))
        digits = "".join(f"{int.from_bytes(word, sys.byteorder):08X}" for word in words)
        texts.append(f"{digits}:{port:04X}")
    return b" " + " ".join(texts).encode() + b" "


def _look_up(table: str, line: bytes) -> int | None:
    try:
        with open(table, "rb") as file:
            text = file.read()
    except OSError:
        return None
    at = text.find(line)
    if at < 0:
        return None
    # state, queues, timer, retransmits, uid, timeout, inode; a socket without an inode has no process
    fields = text[at + len(line) : text.find(b"\n", at)].split()
    return int(fields[4]) if fields[0] == _ESTABLISHED and fields[6] != b"0" else None
