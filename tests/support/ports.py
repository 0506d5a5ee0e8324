"""The ports on which a process accepts connections."""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from pathlib import Path


def listening_ports() -> list[tuple[str, int]]:
    """Addresses on which this process accepts TCP connections over IPv4."""
    files = set()
    for fd in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # closed in the meantime, like the descriptor that listed the directory
            files.add(os.readlink(f"/proc/self/fd/{fd}"))
    found = []
    for line in Path("/proc/self/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        if fields[3] == "0A" and f"socket:[{fields[9]}]" in files:
            address, _, port = fields[1].partition(":")
            found.append((socket.inet_ntoa(bytes.fromhex(address)[::-1]), int(port, 16)))
    return sorted(found)
