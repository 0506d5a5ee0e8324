"""Links between two processes: an address of each, in one network; and connections on which nothing
arrives.

A process may listen on several interfaces (``UNICOLL_SOCKET_IFNAME``). Both processes of a pair
compute the same links from the addresses that both have published.
"""

from __future__ import annotations

import errno
import ipaddress
import socket
import struct
import zlib
from collections.abc import Iterable
from contextlib import suppress
from typing import NamedTuple

from unicoll.errors import DistNetworkError
from unicoll.net.wire.channel import Connection
from unicoll.net.wire.interfaces import interfaces, join_hostport

_TCP_INFO = struct.Struct("=2xB21xI28xI")
"""Of the kernel's struct tcp_info: retransmits (since the last acknowledgement), unacked,
last_ack_recv (ms ago)."""
_UNREACHABLE = {
    errno.ETIMEDOUT,
    errno.EHOSTUNREACH,
    errno.ENETUNREACH,
    errno.EHOSTDOWN,
    errno.ENETDOWN,
}
_RETRANSMISSIONS = 2
"""Consecutive ones from which on a connection counts as unacknowledged; a slow connection may have
one."""


class Address(NamedTuple):
    """An address on which a process listens; interface and network (as 10.0.0.0/24) are "" if
    unknown."""

    host: str
    port: int
    interface: str = ""
    network: str = ""

    def __str__(self) -> str:
        return join_hostport(self.host, self.port) + (
            f" ({self.interface})" if self.interface else ""
        )


def with_interfaces(addresses: Iterable[tuple[str, int]]) -> list[Address]:
    """Hosts and ports of this process with the interfaces that have these addresses."""
    known = {}
    with suppress(DistNetworkError):
        known = {found.address: (found.name, found.network) for found in interfaces()}
    return [Address(host, port, *known.get(_bare(host), ("", ""))) for host, port in addresses]


def links(lower: list[Address], higher: list[Address]) -> list[tuple[Address, Address]]:
    """The links between the process of the lower rank and that of the higher one.

    They are in the order of the lower rank's addresses. Where no two addresses are in one network,
    as between hosts that reach each other through routers, the first addresses of both make a link,
    the second ones another, and so on. An address that both processes have is left out if they have
    others, too: on two hosts it is that of a bridge to containers on each, and connections to it
    stay on the own host.
    """
    shared = {address.host for address in lower} & {address.host for address in higher}
    lower = [address for address in lower if address.host not in shared] or lower
    higher = [address for address in higher if address.host not in shared] or higher
    found, rest = [], list(higher)
    for mine in lower:
        theirs = next((address for address in rest if _in_one_network(mine, address)), None)
        if theirs is not None:
            rest.remove(theirs)
            found.append((mine, theirs))
    return found or list(zip(lower, higher, strict=False))


def first_link(group: str, rank: int, peer: int) -> int:
    """A hash of two ranks and a group: modulo the number of links, the first link that they use."""
    # Both ranks need the same number, and hash() of a text differs between processes.
    return zlib.crc32(f"{min(rank, peer)} {max(rank, peer)} {group}".encode())


def endpoints(
    sock: Connection, own: Iterable[Address], theirs: Iterable[Address], peer: str
) -> str:
    """A connection to a peer for errors: both addresses, with the interfaces of published ones."""
    try:
        ends = (sock.getsockname(), own), (sock.getpeername(), theirs)
    except OSError:
        # The connection has ended.
        return f"to {peer}"
    near, far = (
        Address(
            address[0],
            address[1],
            next((a.interface for a in known if _bare(a.host) == address[0]), ""),
        )
        for address, known in ends
    )
    return f"{near} to {peer} at {far}"


def unacknowledged(sock: Connection) -> str:
    """What the other host has not acknowledged; "" if it acknowledges, or if that is unknown."""
    try:
        found = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size)
        retransmits, packets, since = _TCP_INFO.unpack(found)
    except (OSError, struct.error):
        # The connection is closed, or is not TCP.
        return ""
    if not packets or retransmits < _RETRANSMISSIONS:
        return ""
    return (
        f"{packets} packets sent and {retransmits} times retransmitted, no acknowledgement for"
        f" {since / 1000:.1f} s"
    )


def given_up(sock: Connection, error: BaseException | None) -> bool:
    """True if the kernel has ended a connection with this error, because the other host
    acknowledged nothing."""
    if not isinstance(error, OSError) or error.errno not in _UNREACHABLE:
        return False
    try:
        # A connection that the kernel has ended has no peer any more.
        sock.getpeername()
    except OSError:
        return True
    return False


def _in_one_network(one: Address, other: Address) -> bool:
    return _contains(one.network, other.host) and _contains(other.network, one.host)


def _bare(host: str) -> str:
    return host.partition("%")[0]


def _contains(network: str, host: str) -> bool:
    return bool(network) and ipaddress.ip_address(_bare(host)) in ipaddress.ip_network(network)
