"""The messages of the handshake: hello, verdict and proof, as bytes;
:mod:`unicoll.net.wire.handshake` has their order.
"""

from __future__ import annotations

import hmac
import secrets
import struct
from typing import NamedTuple

from unicoll.net.wire.secret import SOURCES
from unicoll.process.host_identity import HOST_ID_SIZE, UNKNOWN_HOST, host_id

NAME = b"unicoll"
"""The beginning of the magic of all versions."""
MAGIC = NAME + b"3\r\n\r\n"
PURPOSE_SIZE = 16
NONCE_SIZE = 32
PROOF_SIZE = 32
_HELLO = struct.Struct(f"<{len(MAGIC)}sB{PURPOSE_SIZE}sI{HOST_ID_SIZE}s{NONCE_SIZE}s")
HELLO_SIZE = _HELLO.size
NO_RANK = (1 << 32) - 1
KEYED, PRIVATE = 1, 2
PROTECTIONS = {"plain": 0, "mac": 4, "tls": 8}
LOCAL = 16

ACCEPTED = 1
WRONG_SECRET = 2
CLIENT_HAS_NONE = 3
SERVER_HAS_NONE = 4
WRONG_PURPOSE = 5
OTHER_USER = 6
OTHER_PROTECTION = 7
NO_DESCRIPTORS = 8
"""Verdicts of the server. After the last one comes its limit of open files, as LIMIT."""
LIMIT = struct.Struct("<I")


class Protection(NamedTuple):
    """The protection that one side wants for a connection.

    Attributes:
        within_a_host, between_hosts: ``"plain"``, ``"mac"`` or ``"tls"``.
        local: True if both ends have the same address; False with UNICOLL_TRANSPORT=tcp.
    """

    within_a_host: str = "plain"
    between_hosts: str = "plain"
    local: bool = False


PLAIN = Protection()


class Hello(NamedTuple):
    """A hello.

    ``flags`` are KEYED, PRIVATE, LOCAL and the protection between hosts; ``rank`` is that of the
    process, or None; ``host`` is :func:`host_id` with the nonce as its key. Not with the secret:
    anybody who connects is sent a hello and, knowing the host, could test guesses of a secret.
    """

    flags: int
    purpose: bytes
    rank: int | None
    host: bytes
    nonce: bytes

    @property
    def protection(self) -> int:
        """A value of PROTECTIONS."""
        return self.flags & sum(PROTECTIONS.values())


def make_hello(
    key: bytes,
    purpose: bytes,
    protection: Protection = PLAIN,
    rank: int | None = None,
    private: bool = False,
) -> bytes:
    """A hello with a fresh nonce; ``rank`` is that of the process, or None."""
    if not 0 < len(purpose) <= PURPOSE_SIZE or b"\0" in purpose:
        raise ValueError(
            f"a purpose has 1 to {PURPOSE_SIZE} bytes and no zero byte, not {purpose!r}"
        )
    flags = PROTECTIONS[protection.between_hosts]
    flags |= (
        (KEYED if key else 0) | (PRIVATE if private else 0) | (LOCAL if protection.local else 0)
    )
    nonce = secrets.token_bytes(NONCE_SIZE)
    return _HELLO.pack(
        MAGIC, flags, purpose, NO_RANK if rank is None else rank, host_id(nonce), nonce
    )


def parse_hello(hello: bytes) -> Hello:
    """The fields of a hello."""
    _, flags, purpose, rank, host, nonce = _HELLO.unpack(hello)
    return Hello(flags, purpose.rstrip(b"\0"), None if rank == NO_RANK else rank, host, nonce)


def within_a_host(server: Hello, client: Hello) -> bool:
    """True if both sides are on one host and have the same address there."""
    if not server.flags & client.flags & LOCAL:
        return False
    return all(hello.host == host_id(hello.nonce) != UNKNOWN_HOST for hello in (server, client))


def make_proof(
    key: bytes, direction: bytes, server_hello: bytes, client_hello: bytes, address: str = ""
) -> bytes:
    """The proof of ``direction``, ``b"client"`` or ``b"server"``; with ``b"channel"`` the key of
    the connection."""
    # All parts but the last have a fixed size for a direction, so two different handshakes never
    # have the same text.
    return hmac.digest(key, direction + server_hello + client_hello + address.encode(), "sha256")


REASONS = {
    WRONG_SECRET: f"the two sides have different secrets; {SOURCES}",
    CLIENT_HAS_NONE: f"the server requires a secret and the client has none; {SOURCES}",
    SERVER_HAS_NONE: f"the client has a secret and the server has none; {SOURCES}",
    OTHER_USER: (
        "there is no secret, and without one the server accepts only processes of its own user and"
        " host; " + SOURCES
    ),
    WRONG_PURPOSE: (
        "the server is unicoll's, but for another kind of connection; check the address and port"
    ),
    OTHER_PROTECTION: (
        "the two sides use different protection of the connection; give all processes the same "
        "UNICOLL_CHANNEL"
    ),
}


def check_hellos(server: Hello, client: Hello) -> int | None:
    """The verdict if the hellos alone are incompatible, else None."""
    if server.purpose != client.purpose:
        return WRONG_PURPOSE
    if (server.flags ^ client.flags) & KEYED:
        return CLIENT_HAS_NONE if server.flags & KEYED else SERVER_HAS_NONE
    if server.protection != client.protection and not within_a_host(server, client):
        return OTHER_PROTECTION
    return None
