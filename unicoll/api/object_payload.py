"""Serialised objects as messages: headers, bodies, and loading.

A header of fixed size says how large the body is, or why there is none. It has room for a small body, so that small
objects take one exchange. A body is the number of objects, the size of each, and their bytes.
"""

from __future__ import annotations

import struct
import time
from collections.abc import MutableSequence, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from unicoll.errors import DistArgumentError, DistError, PickleRefusedError
from unicoll.net import object_codec, settings
from unicoll.net.timeouts import Timeout, positive_seconds

if TYPE_CHECKING:
    from unicoll.group.process_group import ProcessGroup

ByteArray = np.ndarray[Any, np.dtype[np.uint8]]
Body = ByteArray | bytes

_OK, _FAILED, _REFUSED = range(3)
HEADER = struct.Struct("<qq240s")  # status, bytes in the body, the body if it fits or why there is none
_ROOM = 240
_SIZE = struct.Struct("<Q")
_ONE = struct.Struct("<QQ")  # number and size of one object


class Deadline:
    """Splits a call's timeout over its steps."""

    def __init__(self, timeout: Timeout) -> None:
        seconds = positive_seconds(timeout)
        self._end = None if seconds is None else time.monotonic() + seconds

    def left(self) -> float | None:
        return None if self._end is None else max(self._end - time.monotonic(), 0.001)


class Payload:
    """Serialised objects, or the error that prevented it.

    Attributes:
        size: bytes of the body.
        error: why there is no body, or None.
    """

    def __init__(self, parts: Sequence[bytes], error: DistError | None = None) -> None:
        self._parts = parts
        self.size = sum(map(len, parts))
        self.error = error

    @classmethod
    def of(cls, pg: ProcessGroup, objects: Sequence[Any], op: str) -> Payload:
        try:
            allowed = partial(pickle_allowed, pg)
            parts = [object_codec.dumps(obj, allowed) for obj in objects]
        # Any exception of a user's object must reach the other ranks, which wait for this one.
        except Exception as error:
            kind = PickleRefusedError if isinstance(error, PickleRefusedError) else DistError
            reason = str(error) if isinstance(error, DistError) else f"{type(error).__name__}: {error}"
            wrapped = kind(f"{op}: {reason}", group=pg.group_name, rank=pg.global_rank(pg.rank()), op=op)
            wrapped.__cause__ = error
            return cls((), wrapped)
        if len(parts) == 1:
            return cls((_ONE.pack(1, len(parts[0])), parts[0]))
        return cls((struct.pack(f"<{1 + len(parts)}Q", len(parts), *map(len, parts)), *parts))

    @property
    def is_small(self) -> bool:
        """True if the header has the body."""
        return self.error is None and self.size <= _ROOM

    @property
    def body(self) -> ByteArray:
        """The body, in an array of its own."""
        return np.frombuffer(bytearray().join(self._parts), np.uint8)  # writable, as broadcast wants

    def header(self) -> ByteArray:
        """The header, with the body if it is small."""
        if self.error is None:
            body = b"".join(self._parts) if self.size <= _ROOM else b""
            packed = HEADER.pack(_OK, self.size, body)
        else:
            status = _REFUSED if isinstance(self.error, PickleRefusedError) else _FAILED
            reason = str(self.error).partition(": ")[2].removesuffix(object_codec.HOW_TO_ALLOW).rstrip()
            packed = HEADER.pack(status, 0, reason.encode("utf-8", "replace")[:_ROOM])
        return np.frombuffer(bytearray(packed), np.uint8)


def read_headers(
    pg: ProcessGroup, headers: ByteArray, senders: Sequence[int], mine: Payload | None, op: str
) -> tuple[list[int], list[Body] | None]:
    """Read one header of each sender; raises if one of them announces an error.

    Returns:
        The sizes of the bodies; and the bodies, if all of them are small. Else all bodies follow.
    """
    if mine is not None and mine.error is not None:
        raise mine.error
    sizes: list[int] = []
    bodies: list[Body] = []
    for sender, (status, size, rest) in zip(senders, HEADER.iter_unpack(headers.data), strict=True):
        if status != _OK or size < _SIZE.size:
            _raise_for(pg, sender, status, rest.rstrip(b"\0").decode("utf-8", "replace"), op)
        sizes.append(size)
        bodies.append(rest[:size])
    return sizes, bodies if max(sizes) <= _ROOM else None


def _raise_for(pg: ProcessGroup, sender: int, status: int, reason: str, op: str) -> NoReturn:
    rank = pg.global_rank(sender)
    kind = PickleRefusedError if status == _REFUSED else DistError
    advice = f" {object_codec.HOW_TO_ALLOW}" if status == _REFUSED else ""
    raise kind(
        f"{op}: rank {rank} has nothing to send: {reason or 'malformed header'}{advice}",
        group=pg.group_name,
        rank=rank,
        op=op,
    )


def pickle_allowed(group: ProcessGroup) -> bool:
    """True if objects may be pickled: the group is trusted and the environment does not forbid it."""
    return group.trusted and bool(settings.flag("UNICOLL_ALLOW_PICKLE"))


def load_all(pg: ProcessGroup, body: Body, sender: int, op: str, allowed: object_codec.Allowed) -> list[Any]:
    """The objects of a body, pickled ones if that is ``allowed``."""
    data = memoryview(body) if isinstance(body, bytes) else body.data
    try:
        if len(data) > _ONE.size and _ONE.unpack_from(data) == (1, len(data) - _ONE.size):
            return [object_codec.loads(data[_ONE.size :], allowed)]
        count = _SIZE.unpack_from(data)[0] if len(data) >= _SIZE.size else 1
        start = _SIZE.size * (1 + count)
        sizes = struct.unpack(f"<{count}Q", data[_SIZE.size : start]) if start <= len(data) else ()
        if start + sum(sizes) != len(data):
            raise DistError("malformed object data: the sizes do not add up")
        objects = []
        for size in sizes:
            objects.append(object_codec.loads(data[start : start + size], allowed))
            start += size
        return objects
    except DistError as error:
        rank = pg.global_rank(sender)
        raise type(error)(
            f"{op}: from rank {rank}: {error}", group=pg.group_name, rank=rank, op=op
        ) from error


def load_one(pg: ProcessGroup, body: Body, sender: int, op: str, allowed: object_codec.Allowed) -> Any:
    """The object of a body that must hold exactly one."""
    objects = load_all(pg, body, sender, op, allowed)
    if len(objects) != 1:
        rank = pg.global_rank(sender)
        raise DistError(
            f"{op}: from rank {rank}: malformed object data: {len(objects)} objects in place of one",
            group=pg.group_name,
            rank=rank,
            op=op,
        )
    return objects[0]


def fill(pg: ProcessGroup, target: MutableSequence[Any], body: Body, sender: int, op: str) -> None:
    objects = load_all(pg, body, sender, op, partial(pickle_allowed, pg))
    if len(objects) != len(target):
        raise DistArgumentError(
            f"{op}: rank {pg.global_rank(sender)} sent {len(objects)} objects, object_list has {len(target)}",
            group=pg.group_name,
            op=op,
        )
    for i, obj in enumerate(objects):
        target[i] = obj


def fill_each(pg: ProcessGroup, target: MutableSequence[Any], bodies: Sequence[Body], op: str) -> None:
    """One object of each rank; the list is filled only when all of them could be loaded."""
    allowed = partial(pickle_allowed, pg)
    objects = [load_one(pg, body, rank, op, allowed) for rank, body in enumerate(bodies)]
    for i, obj in enumerate(objects):
        target[i] = obj
