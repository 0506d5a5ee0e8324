"""Requests to a store as bytes, for a TCPStore's connections and a FileStore's log.

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

from unicoll.net import settings

__all__ = [
    "MAX_KEY",
    "MAX_NUMBER",
    "MUTATING",
    "REPLY",
    "REQUEST",
    "WAITING",
    "MalformedError",
    "StoreOp",
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
    """Bytes that are not a valid request or reply."""


class StoreOp(IntEnum):
    """The operations. The codes are stored in files, so none is ever reused."""

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
    """The result of a request: ``TIMEOUT``'s fields are the missing keys, ``ERROR``'s is a message."""

    OK = 0
    TIMEOUT = 1
    ERROR = 2


# The fields of a request: k a key, v a value, n a number; "*" for any number of such groups.
_SHAPES = {
    StoreOp.SET: "kv",
    StoreOp.GET: "k",
    StoreOp.TRY_GET: "k",
    StoreOp.ADD: "kn",
    StoreOp.COMPARE_SET: "kvv",
    StoreOp.WAIT: "k*",
    StoreOp.CHECK: "k*",
    StoreOp.DELETE: "k",
    StoreOp.NUM_KEYS: "",
    StoreOp.LIST_KEYS: "",
    StoreOp.APPEND: "kv",
    StoreOp.MULTI_GET: "k*",
    StoreOp.MULTI_SET: "kv*",
    StoreOp.QUEUE_PUSH: "kv",
    StoreOp.QUEUE_POP: "k",
    StoreOp.QUEUE_TRY_POP: "k",
    StoreOp.QUEUE_LEN: "k",
    StoreOp.AT_LEAST: "kn",
}
# The fields of a successful reply; "?" for one or none.
_REPLIES = {
    StoreOp.SET: "",
    StoreOp.GET: "v",
    StoreOp.TRY_GET: "v?",
    StoreOp.ADD: "n",
    StoreOp.COMPARE_SET: "v",
    StoreOp.WAIT: "",
    StoreOp.CHECK: "n",
    StoreOp.DELETE: "n",
    StoreOp.NUM_KEYS: "n",
    StoreOp.LIST_KEYS: "v*",
    StoreOp.APPEND: "",
    StoreOp.MULTI_GET: "v*",
    StoreOp.MULTI_SET: "",
    StoreOp.QUEUE_PUSH: "",
    StoreOp.QUEUE_POP: "v",
    StoreOp.QUEUE_TRY_POP: "v?",
    StoreOp.QUEUE_LEN: "n",
    StoreOp.AT_LEAST: "",
}
MUTATING = frozenset(
    {
        StoreOp.SET,
        StoreOp.ADD,
        StoreOp.COMPARE_SET,
        StoreOp.DELETE,
        StoreOp.APPEND,
        StoreOp.MULTI_SET,
        StoreOp.QUEUE_PUSH,
        StoreOp.QUEUE_POP,
        StoreOp.QUEUE_TRY_POP,
    }
)
WAITING = frozenset({StoreOp.GET, StoreOp.WAIT, StoreOp.MULTI_GET, StoreOp.QUEUE_POP, StoreOp.AT_LEAST})


def max_value() -> int:
    """The largest value that a store accepts, in bytes: ``UNICOLL_STORE_MAX_VALUE``, default 1 GiB."""
    return settings.number("UNICOLL_STORE_MAX_VALUE")


def max_request(largest_value: int) -> int:
    """The largest body of a request, in bytes, if values may have ``largest_value``."""
    return largest_value + 2 * MAX_KEY


def _pack_fields(fields: Sequence[bytes]) -> bytes:
    parts: list[bytes] = []
    for field in fields:
        parts.append(_LENGTH.pack(len(field)))
        parts.append(field)
    return b"".join(parts)


def pack_request(op: StoreOp, fields: Sequence[bytes], seconds: float = 0.0) -> bytes:
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
        MalformedError: the lengths do not match the size of the body.
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


def validate(code: int, fields: Sequence[bytes], largest_value: int) -> StoreOp:
    """The operation of a request, after a check of the number, kinds and sizes of its fields.

    Raises:
        MalformedError: the code or a field is invalid.
    """
    try:
        op = StoreOp(code)
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
            raise MalformedError("a field that is not a number")
    return op


def validate_reply(op: StoreOp, status: int, fields: Sequence[bytes], request_fields: int) -> None:
    """Check the fields of a server's reply to a request with so many fields.

    Raises:
        MalformedError: the status or a field is invalid.
    """
    shape = {Status.OK: _REPLIES[op], Status.TIMEOUT: "v*", Status.ERROR: "v"}.get(status)  # type: ignore[call-overload]
    if shape is None:
        raise MalformedError(f"no status has the code {status}")
    kinds = shape.rstrip("?*")
    if not (shape.endswith("*") or len(fields) == len(kinds) or (shape.endswith("?") and not fields)):
        raise MalformedError(f"a reply to {op.name} with {len(fields)} fields")
    if op is StoreOp.MULTI_GET and status == Status.OK and len(fields) != request_fields:
        raise MalformedError(f"a reply to {op.name} of {request_fields} keys with {len(fields)} fields")
    if (
        kinds == "n"
        and status == Status.OK
        and not (len(fields[0]) <= MAX_NUMBER + 1 and _NUMBER.fullmatch(fields[0]))
    ):
        raise MalformedError(f"a reply to {op.name} that is not a number")
