"""Requests to a store as bytes: on the wire of a TCPStore and in the log of a FileStore alike.

    request = body's length (u64) | operation (u8) | seconds to wait (f64) | body
    reply   = body's length (u64) | status (u8) | body
    body    = fields, each its length (u32) and its bytes

Integers are little-endian; numbers in fields are decimal text.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Sequence
from enum import IntEnum
from itertools import cycle

from .. import settings

__all__ = [
    "MAX_KEY",
    "MAX_NUMBER",
    "MUTATING",
    "REPLY",
    "REQUEST",
    "WAITING",
    "MalformedError",
    "Op",
    "Status",
    "max_request",
    "max_value",
    "pack_reply",
    "pack_request",
    "unpack_fields",
    "validate",
    "validate_reply",
]

REQUEST = struct.Struct("<QBd")
REPLY = struct.Struct("<QB")
_LENGTH = struct.Struct("<I")

MAX_KEY = 64 * 1024
MAX_NUMBER = 40
_NUMBER = re.compile(rb"-?[0-9]+")


class MalformedError(ValueError):
    """Bytes that are no request."""


class Op(IntEnum):
    """The operations. The codes are written to files: none is ever reused."""

    SET = 1
    GET = 2
    TRY_GET = 3
    ADD = 4
    COMPARE_SET = 5
    WAIT = 6
    CHECK = 7
    DELETE = 8
    NUM_KEYS = 9
    LIST_KEYS = 10
    APPEND = 11
    MULTI_GET = 12
    MULTI_SET = 13
    QUEUE_PUSH = 14
    QUEUE_POP = 15
    QUEUE_TRY_POP = 16
    QUEUE_LEN = 17
    AT_LEAST = 18


class Status(IntEnum):
    """How a request went: ``TIMEOUT``'s fields are the missing keys, ``ERROR``'s is a message."""

    OK = 0
    TIMEOUT = 1
    ERROR = 2


# What the fields of a request are: k a key, v a value, n a number; "*" for any number of such groups.
_SHAPES = {
    Op.SET: "kv",
    Op.GET: "k",
    Op.TRY_GET: "k",
    Op.ADD: "kn",
    Op.COMPARE_SET: "kvv",
    Op.WAIT: "k*",
    Op.CHECK: "k*",
    Op.DELETE: "k",
    Op.NUM_KEYS: "",
    Op.LIST_KEYS: "",
    Op.APPEND: "kv",
    Op.MULTI_GET: "k*",
    Op.MULTI_SET: "kv*",
    Op.QUEUE_PUSH: "kv",
    Op.QUEUE_POP: "k",
    Op.QUEUE_TRY_POP: "k",
    Op.QUEUE_LEN: "k",
    Op.AT_LEAST: "kn",
}
# The fields of a reply to a request that was done; "?" for one or none.
_REPLIES = {
    Op.SET: "",
    Op.GET: "v",
    Op.TRY_GET: "v?",
    Op.ADD: "n",
    Op.COMPARE_SET: "v",
    Op.WAIT: "",
    Op.CHECK: "n",
    Op.DELETE: "n",
    Op.NUM_KEYS: "n",
    Op.LIST_KEYS: "v*",
    Op.APPEND: "",
    Op.MULTI_GET: "v*",
    Op.MULTI_SET: "",
    Op.QUEUE_PUSH: "",
    Op.QUEUE_POP: "v",
    Op.QUEUE_TRY_POP: "v?",
    Op.QUEUE_LEN: "n",
    Op.AT_LEAST: "",
}
MUTATING = frozenset(
    {
        Op.SET,
        Op.ADD,
        Op.COMPARE_SET,
        Op.DELETE,
        Op.APPEND,
        Op.MULTI_SET,
        Op.QUEUE_PUSH,
        Op.QUEUE_POP,
        Op.QUEUE_TRY_POP,
    }
)
WAITING = frozenset({Op.GET, Op.WAIT, Op.MULTI_GET, Op.QUEUE_POP, Op.AT_LEAST})


def max_value() -> int:
    """The largest value a store takes, in bytes: ``UNICOLL_STORE_MAX_VALUE``, or 1 GiB."""
    return settings.number("UNICOLL_STORE_MAX_VALUE")


def max_request(largest_value: int) -> int:
    """The largest body of a request, in bytes, where values may have ``largest_value``."""
    return largest_value + 2 * MAX_KEY


def _pack_fields(fields: Sequence[bytes]) -> bytes:
    parts: list[bytes] = []
    for field in fields:
        parts.append(_LENGTH.pack(len(field)))
        parts.append(field)
    return b"".join(parts)


def pack_request(op: Op, fields: Sequence[bytes], seconds: float = 0.0) -> bytes:
    """A request; ``seconds`` is how long to wait for missing keys."""
    body = _pack_fields(fields)
    return REQUEST.pack(len(body), op, seconds) + body


def pack_reply(status: Status, fields: Sequence[bytes]) -> bytes:
    """A reply."""
    body = _pack_fields(fields)
    return REPLY.pack(len(body), status) + body


def unpack_fields(body: bytes | bytearray | memoryview) -> list[bytes]:
    """The fields of a body.

    Raises:
        MalformedError: the lengths do not add up.
    """
    fields: list[bytes] = []
    view = memoryview(body)
    at, end = 0, len(view)
    while at < end:
        if at + _LENGTH.size > end:
            raise MalformedError("a field's length is cut off")
        (length,) = _LENGTH.unpack_from(view, at)
        at += _LENGTH.size
        if at + length > end:
            raise MalformedError("a field is longer than its message")
        fields.append(bytes(view[at : at + length]))
        at += length
    return fields


def validate(code: int, fields: Sequence[bytes], largest_value: int) -> Op:
    """The operation, once its fields have the right number, kinds and sizes.

    Raises:
        MalformedError: they have not.
    """
    try:
        op = Op(code)
    except ValueError:
        raise MalformedError(f"no operation has the code {code}") from None
    shape = _SHAPES[op]
    kinds = shape.rstrip("*")
    if len(fields) % len(kinds) if shape.endswith("*") else len(fields) != len(kinds):
        raise MalformedError(f"{op.name} with {len(fields)} fields")
    for kind, field in zip(cycle(kinds), fields, strict=False):
        if kind == "k" and len(field) > MAX_KEY:
            raise MalformedError(f"a key of {len(field)} bytes")
        if kind == "v" and len(field) > largest_value:
            raise MalformedError(f"a value of {len(field)} bytes")
        if kind == "n" and not (len(field) <= MAX_NUMBER and _NUMBER.fullmatch(field)):
            raise MalformedError("a number that is none")
    return op


def validate_reply(op: Op, status: int, fields: Sequence[bytes], asked: int) -> None:
    """Check that a server's reply has the fields that such a request, of ``asked`` fields, is answered with.

    Raises:
        MalformedError: it has not, or the status is unknown.
    """
    shape = {Status.OK: _REPLIES[op], Status.TIMEOUT: "v*", Status.ERROR: "v"}.get(status)  # type: ignore[call-overload]
    if shape is None:
        raise MalformedError(f"no status has the code {status}")
    kinds = shape.rstrip("?*")
    if not (shape.endswith("*") or len(fields) == len(kinds) or (shape.endswith("?") and not fields)):
        raise MalformedError(f"a reply to {op.name} with {len(fields)} fields")
    if op is Op.MULTI_GET and status == Status.OK and len(fields) != asked:
        raise MalformedError(f"a reply to {op.name} of {asked} keys with {len(fields)} fields")
    if kinds == "n" and status == Status.OK and not (len(fields[0]) <= MAX_NUMBER + 1 and _NUMBER.fullmatch(fields[0])):
        raise MalformedError(f"a reply to {op.name} that is no number")
