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

from unicoll.process import environment

REQUEST = struct.Struct("<QBd")
REPLY = struct.Struct("<QB")
_LENGTH = struct.Struct("<I")

MAX_KEY = 64 * 1024
MAX_NUMBER = 40
# The thread of the server calls int() on these fields; this is what int() accepts without an error.
_NUMBER = re.compile(rb"-?[0-9]+")


class MalformedError(ValueError):
    """Bytes that are not a valid request or reply."""


class StoreOp(IntEnum):
    """The operations. The codes are stored in files, so none is ever reused.

    Attributes:
        fields: those of a request: k a key, v a value, n a number; "*" for any number of such
            groups.
        reply: the fields of a successful reply; "?" for one or none.
        mutates: True if the operation may change a key.
        waits: True if it may wait for a key.
    """

    fields: str
    reply: str
    mutates: bool
    waits: bool

    SET = 1, "kv", "", "mutates"
    GET = 2, "k", "v", "waits"
    TRY_GET = 3, "k", "v?"
    ADD = 4, "kn", "n", "mutates"
    COMPARE_SET = 5, "kvv", "v", "mutates"
    WAIT = 6, "k*", "", "waits"
    CHECK = 7, "k*", "n"
    DELETE = 8, "k", "n", "mutates"
    NUM_KEYS = 9, "", "n"
    LIST_KEYS = 10, "", "v*"
    APPEND = 11, "kv", "", "mutates"
    MULTI_GET = 12, "k*", "v*", "waits"
    MULTI_SET = 13, "kv*", "", "mutates"
    QUEUE_PUSH = 14, "kv", "", "mutates"
    QUEUE_POP = 15, "k", "v", "mutates", "waits"
    QUEUE_TRY_POP = 16, "k", "v?", "mutates"
    QUEUE_LEN = 17, "k", "n"
    AT_LEAST = 18, "kn", "", "waits"

    def __new__(cls, code: int, fields: str = "", reply: str = "", *properties: str) -> StoreOp:
        made = int.__new__(cls, code)
        made._value_ = code
        made.fields, made.reply = fields, reply
        made.mutates, made.waits = "mutates" in properties, "waits" in properties
        return made


class Status(IntEnum):
    """The result of a request: ``TIMEOUT``'s fields are the missing keys, ``ERROR``'s is a
    message."""

    OK = 0
    TIMEOUT = 1
    ERROR = 2


def max_value() -> int:
    """The largest value that a store accepts, in bytes: ``UNICOLL_STORE_MAX_VALUE``, default 1
    GiB."""
    return environment.number("UNICOLL_STORE_MAX_VALUE")


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
    shape = op.fields
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
    """Check the fields of a server's reply to a request with this many fields.

    Raises:
        MalformedError: the status or a field is invalid.
    """
    shape = {Status.OK: op.reply, Status.TIMEOUT: "v*", Status.ERROR: "v"}.get(status)  # type: ignore[call-overload]
    if shape is None:
        raise MalformedError(f"no status has the code {status}")
    kinds = shape.rstrip("?*")
    if not (
        shape.endswith("*") or len(fields) == len(kinds) or (shape.endswith("?") and not fields)
    ):
        raise MalformedError(f"a reply to {op.name} with {len(fields)} fields")
    if op is StoreOp.MULTI_GET and status == Status.OK and len(fields) != request_fields:
        raise MalformedError(
            f"a reply to {op.name} of {request_fields} keys with {len(fields)} fields"
        )
    if (
        kinds == "n"
        and status == Status.OK
        # A sum may have one digit more than the longer of its parts.
        and not (len(fields[0]) <= MAX_NUMBER + 1 and _NUMBER.fullmatch(fields[0]))
    ):
        raise MalformedError(f"a reply to {op.name} that is not a number")
