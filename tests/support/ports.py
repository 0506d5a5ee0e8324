"""The ports on which a process accepts connections, and whether it can over IPv6."""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from pathlib import Path


def listening_ports(pid: int | str = "self") -> list[tuple[str, int]]:
    """Addresses on which a process, by default this one, accepts TCP connections over IPv4."""
    files = set()
    for fd in os.listdir(f"/proc/{pid}/fd"):
        with suppress(OSError):  # closed in the meantime, like the descriptor that listed the directory
            files.add(os.readlink(f"/proc/{pid}/fd/{fd}"))
    found = []
    for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        if fields[3] == "0A" and f"socket:[{fields[9]}]" in files:
            address, _, port = fields[1].partition(":")
            found.append((socket.inet_ntoa(bytes.fromhex(address)[::-1]), int(port, 16)))
    return sorted(found)


def has_ipv6() -> bool:
    """True if a process can listen on the loopback address of IPv6."""
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True
