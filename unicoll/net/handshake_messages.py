"""The messages of the handshake: hello, verdict and proof, as bytes; :mod:`unicoll.net.handshake` has their order."""

from __future__ import annotations

import hmac
import secrets
import struct
from typing import NamedTuple

from unicoll.net.secret import SOURCES

MAGIC = b"unicoll1\r\n\r\n"
PURPOSE_SIZE = 16
NONCE_SIZE = 32
PROOF_SIZE = 32
_HELLO = struct.Struct(f"<{len(MAGIC)}sB{PURPOSE_SIZE}sI{NONCE_SIZE}s")
HELLO_SIZE = _HELLO.size
NO_RANK = (1 << 32) - 1
KEYED, PRIVATE = 1, 2
PROTECTIONS = {"plain": 0, "mac": 4, "tls": 8}

ACCEPTED = 1
WRONG_SECRET = 2
CLIENT_HAS_NONE = 3
SERVER_HAS_NONE = 4
WRONG_PURPOSE = 5
OTHER_USER = 6
OTHER_PROTECTION = 7
"""Verdicts of the server."""


class Hello(NamedTuple):
    """A hello; ``flags`` are KEYED, PRIVATE and the protection, ``rank`` is that of the process, or None."""

    flags: int
    purpose: bytes
    rank: int | None

    @property
    def protection(self) -> int:
        """A value of PROTECTIONS."""
        return self.flags & sum(PROTECTIONS.values())


def make_hello(key: bytes, purpose: bytes, flags: int = 0, rank: int | None = None) -> bytes:
    """A hello with a fresh nonce; ``rank`` is that of the process, or None."""
    if not 0 < len(purpose) <= PURPOSE_SIZE or b"\0" in purpose:
        raise ValueError(f"a purpose has 1 to {PURPOSE_SIZE} bytes and no zero byte, not {purpose!r}")
    flags |= KEYED if key else 0
    nonce = secrets.token_bytes(NONCE_SIZE)
    return _HELLO.pack(MAGIC, flags, purpose, NO_RANK if rank is None else rank, nonce)


def parse_hello(hello: bytes) -> Hello:
    """The fields of a hello."""
    _, flags, purpose, rank, _ = _HELLO.unpack(hello)
    return Hello(flags, purpose.rstrip(b"\0"), None if rank == NO_RANK else rank)


def make_proof(
    key: bytes, direction: bytes, server_hello: bytes, client_hello: bytes, address: str = ""
) -> bytes:
    """The proof of ``direction``, ``b"client"`` or ``b"server"``; with ``b"channel"`` the key of the connection."""
    return hmac.digest(key, direction + server_hello + client_hello + address.encode(), "sha256")


REASONS = {
    WRONG_SECRET: f"the two sides have different secrets; {SOURCES}",
    CLIENT_HAS_NONE: f"the server requires a secret and the client has none; {SOURCES}",
    SERVER_HAS_NONE: f"the client has a secret and the server has none; {SOURCES}",
    OTHER_USER: "there is no secret, and without one the server accepts only processes of its own user and host; "
    + SOURCES,
    WRONG_PURPOSE: "the server is unicoll's, but for another kind of connection; check the address and port",
    OTHER_PROTECTION: "the two sides use different protection of the connection; give all processes the same "
    "UNICOLL_CHANNEL",
}


def check_hellos(server_hello: bytes, client_hello: bytes) -> int | None:
    """The verdict if the hellos alone are incompatible, else None."""
    server, client = parse_hello(server_hello), parse_hello(client_hello)
    if server.purpose != client.purpose:
        return WRONG_PURPOSE
    if (server.flags ^ client.flags) & KEYED:
        return CLIENT_HAS_NONE if server.flags & KEYED else SERVER_HAS_NONE
    if server.protection != client.protection:
        return OTHER_PROTECTION
    return None
