"""The messages of the handshake: hello, verdict and proof, as bytes; :mod:`unicoll.net.auth` has their order."""

from __future__ import annotations

import hmac
import secrets

from unicoll.net.secret import SOURCES

MAGIC = b"unicoll1\r\n\r\n"
PURPOSE_SIZE = 16
NONCE_SIZE = 32
PROOF_SIZE = 32
RANK_SIZE = 4
HELLO_SIZE = len(MAGIC) + 1 + PURPOSE_SIZE + RANK_SIZE + NONCE_SIZE
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


def make_hello(key: bytes, purpose: bytes, flags: int = 0, rank: int | None = None) -> bytes:
    """A hello with a fresh nonce; ``rank`` is that of the client, or None."""
    if not 0 < len(purpose) <= PURPOSE_SIZE or b"\0" in purpose:
        raise ValueError(f"a purpose has 1 to {PURPOSE_SIZE} bytes and no zero byte, not {purpose!r}")
    flags |= KEYED if key else 0
    rank_field = (NO_RANK if rank is None else rank).to_bytes(RANK_SIZE, "little")
    return (
        MAGIC
        + bytes([flags])
        + purpose.ljust(PURPOSE_SIZE, b"\0")
        + rank_field
        + secrets.token_bytes(NONCE_SIZE)
    )


def flags_of(hello: bytes) -> int:
    """The flags of a hello: KEYED, PRIVATE and the protection."""
    return hello[len(MAGIC)]


def protection_of(hello: bytes) -> int:
    """The protection that a hello states; a value of PROTECTIONS."""
    return flags_of(hello) & sum(PROTECTIONS.values())


def purpose_of(hello: bytes) -> bytes:
    """The purpose of a hello, without padding."""
    start = len(MAGIC) + 1
    return hello[start : start + PURPOSE_SIZE].rstrip(b"\0")


def rank_of(hello: bytes) -> int | None:
    """The rank of a hello, or None."""
    start = len(MAGIC) + 1 + PURPOSE_SIZE
    rank = int.from_bytes(hello[start : start + RANK_SIZE], "little")
    return None if rank == NO_RANK else rank


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
    if purpose_of(server_hello) != purpose_of(client_hello):
        return WRONG_PURPOSE
    if (flags_of(server_hello) ^ flags_of(client_hello)) & KEYED:
        return CLIENT_HAS_NONE if flags_of(server_hello) & KEYED else SERVER_HAS_NONE
    if protection_of(server_hello) != protection_of(client_hello):
        return OTHER_PROTECTION
    return None
