"""Serialised objects as messages: headers, bodies, and loading.

The body is the object's bytes. A header of fixed size has the size of the body, or the reason why
there is none. It also has the body if that is small, so that small objects take one exchange. A
list of objects is one object.

A message has a tag of its own for its body, which its header names: threads that send to, or
receive from, one rank at the same time exchange headers and bodies in any order.
"""

from __future__ import annotations

import struct
import time
from collections.abc import MutableSequence, Sequence
from itertools import count
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from unicoll.calls.call import INTERNAL_TAGS
from unicoll.errors import DistArgumentError, DistError, PickleRefusedError
from unicoll.net.objects import object_codec
from unicoll.process.timeouts import Timeout, positive_seconds

if TYPE_CHECKING:
    from unicoll.group.process_group import ProcessGroup

ByteArray = np.ndarray[Any, np.dtype[np.uint8]]
Body = ByteArray | bytes

_OK, _FAILED, _REFUSED = range(3)
HEADER = struct.Struct("<qqq232s")
"""Status, bytes in the body, a message's tag of the body, the body if it fits or why there is
none."""
_ROOM = 232
# The first internal tag is that of the fallbacks (unicoll.backend.host.fallbacks).
_BODY_TAGS = INTERNAL_TAGS[1:]


_serials = count()
"""Of the messages of this process, in all groups."""


class Deadline:
    """Splits a call's timeout over its steps."""

    def __init__(self, timeout: Timeout) -> None:
        seconds = positive_seconds(timeout)
        self._end = None if seconds is None else time.monotonic() + seconds

    def left(self) -> float | None:
        # At least a millisecond is left: many calls read 0 as no limit.
        return None if self._end is None else max(self._end - time.monotonic(), 0.001)


class Payload:
    """A serialised object, or the error that prevented it.

    Attributes:
        size: bytes of the body.
        tag: of the body, in a message.
        error: why there is no body, or None.
    """

    def __init__(self, data: bytes, error: DistError | None = None) -> None:
        self._data = data
        self._plain_size = len(data)
        self.size = len(data)
        self.tag = 0
        self.error = error

    @classmethod
    def of(cls, pg: ProcessGroup, obj: Any, op: str) -> Payload:
        try:
            return cls(object_codec.dumps(obj, pg.job.allows_pickle))
        # Any exception of a user's object must reach the other ranks, which wait for this one.
        except Exception as error:
            kind = PickleRefusedError if isinstance(error, PickleRefusedError) else DistError
            reason = (
                str(error) if isinstance(error, DistError) else f"{type(error).__name__}: {error}"
            )
            # The error is not raised here. This rank first sends the reason in its header, so that
            # no other rank waits for an object; read_headers and send_list raise it then.
            wrapped = kind(
                f"{op}: {reason}", group=pg.group_name, rank=pg.global_rank(pg.rank()), op=op
            )
            wrapped.__cause__ = error
            return cls(b"", wrapped)

    def seal(self, pg: ProcessGroup, call: int | None, receiver: int = -1) -> Payload:
        """Add the MAC, if the group has them: of a collective, by its number, or a message; for one
        receiver or all.

        A message gets its tag, if the group has tags.
        """
        # Without tags the messages between two ranks match in their order, and the body is the next
        # one.
        if call is None and pg.has_tags:
            self.tag = _BODY_TAGS[next(_serials) % len(_BODY_TAGS)]
        if self.error is None:
            self._data = pg.object_seals.seal(self._data, call, receiver)
            self.size = len(self._data)
        return self

    @property
    def is_small(self) -> bool:
        """True if the header has the body."""
        return self.error is None and self.size <= _ROOM

    @property
    def plain(self) -> memoryview:
        """The object's bytes, without a MAC."""
        return memoryview(self._data)[: self._plain_size]

    @property
    def body(self) -> ByteArray:
        """The body; read-only."""
        return np.frombuffer(self._data, np.uint8)

    def header(self) -> ByteArray:
        """The header, with the body if it is small."""
        status, rest = _OK, self._data if self.is_small else b""
        if self.error is not None:
            status = _REFUSED if isinstance(self.error, PickleRefusedError) else _FAILED
            reason = (
                str(self.error).partition(": ")[2].removesuffix(object_codec.HOW_TO_ALLOW).rstrip()
            )
            rest = reason.encode("utf-8", "replace")[:_ROOM]
        packed = np.empty(HEADER.size, np.uint8)
        HEADER.pack_into(packed.data, 0, status, self.size, self.tag, rest)
        return packed


def read_headers(
    pg: ProcessGroup, headers: ByteArray, senders: Sequence[int], mine: Payload | None, op: str
) -> tuple[list[int], list[Body] | None]:
    """Read one header of each sender; raises if one of them announces an error.

    Returns:
        The sizes of the bodies; and the bodies, if all of them are small. Else all bodies follow.
    """
    # The exchange is over, so the other ranks have the reason and raise, too. This rank's own error
    # has the original exception as its cause.
    if mine is not None and mine.error is not None:
        raise mine.error
    sizes: list[int] = []
    bodies: list[Body] = []
    for sender, (status, size, _, rest) in zip(
        senders, HEADER.iter_unpack(headers.data), strict=True
    ):
        # No object is serialised to 0 bytes: such a header is malformed.
        if status != _OK or size <= 0:
            _raise_for(pg, sender, status, rest.rstrip(b"\0").decode("utf-8", "replace"), op)
        sizes.append(size)
        bodies.append(rest[:size])
    return sizes, bodies if max(sizes) <= _ROOM else None


def body_tag(header: ByteArray) -> int:
    """The tag of a message's body; :func:`read_headers` has read the header."""
    return int(HEADER.unpack(header.data)[2])


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


def load(
    pg: ProcessGroup,
    body: Body,
    sender: int,
    op: str,
    call: int | None,
    receiver: int = -1,
    mine: Payload | None = None,
) -> Any:
    """The object of a body; of ``mine``, what this rank has sent, if the sender is this rank."""
    try:
        if mine is not None and sender == pg.rank():
            data: memoryview | bytes = mine.plain
        else:
            received = body if isinstance(body, bytes) else body.data
            data = pg.object_seals.open(received, sender, call, receiver)
        return object_codec.loads(data, pg.job.allows_pickle)
    except DistError as error:
        rank = pg.global_rank(sender)
        raise type(error)(
            f"{op}: from rank {rank}: {error}", group=pg.group_name, rank=rank, op=op
        ) from error


def fill(
    pg: ProcessGroup,
    target: MutableSequence[Any],
    body: Body,
    sender: int,
    op: str,
    call: int | None,
    receiver: int = -1,
) -> None:
    objects = load(pg, body, sender, op, call, receiver)
    if type(objects) is not list:
        rank = pg.global_rank(sender)
        raise DistError(
            f"{op}: rank {rank} sent {type(objects).__name__} in place of a list",
            group=pg.group_name,
            rank=rank,
            op=op,
        )
    if len(objects) != len(target):
        raise DistArgumentError(
            f"{op}: rank {pg.global_rank(sender)} sent {len(objects)} objects, object_list has"
            f" {len(target)}",
            group=pg.group_name,
            op=op,
        )
    for i, obj in enumerate(objects):
        target[i] = obj


def fill_each(
    pg: ProcessGroup,
    target: MutableSequence[Any],
    bodies: Sequence[Body],
    op: str,
    call: int,
    mine: Payload,
) -> None:
    """One object of each rank; the list is filled only when all of them could be loaded."""
    objects = [load(pg, body, rank, op, call, mine=mine) for rank, body in enumerate(bodies)]
    for i, obj in enumerate(objects):
        target[i] = obj
