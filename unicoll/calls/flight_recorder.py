"""The flight recorder: the last calls of this process, in a ring of fixed size.

Every collective and message is recorded with its group, sequence number, arrays, call site and
times; arrays are not kept alive. A blocking call is one tuple, which the ring gets when the call
has ended; until then it is what its thread is in (:mod:`unicoll.calls.thread_activity`). An
asynchronous call, and one that is enqueued on a device, is a :class:`PendingEntry` from its start.
What is equal for all calls of a kind is one :class:`CallKind`. PyTorch has the same for NCCL:
https://docs.pytorch.org/tutorials/unstable/flight_recorder_tutorial.html
"""

from __future__ import annotations

import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from time import monotonic
from types import FrameType
from typing import Any

from unicoll.arrays.types import DType
from unicoll.calls.call import Call
from unicoll.calls.call_site import caller_frame, place_of, site_of
from unicoll.process.environment import number

MessageDetail = tuple[tuple[int, ...], int, "int | None"]
Entry = tuple[Any, ...]
"""A call that has ended: kind, sequence number, start, end (on the clock of ``time.monotonic``),
and the place of the call (:func:`unicoll.calls.call_site.place_of`). If it failed, the error as
text follows; of a message the error or "", and shape, peer and tag."""

_MAX_ERROR = 1000
_MAX_MESSAGE_KINDS = 256
"""Kinds of messages that are kept for each operation and element type."""
_ATTEMPTS = 10
_ON_END_LOCK = threading.Lock()
_ring: deque[Entry | PendingEntry] | None = None


def ring() -> deque[Any]:
    """The ring of this process, of ``UNICOLL_FLIGHT_RECORDER`` entries. Appending is atomic:
    threads need no lock."""
    global _ring
    if _ring is None:
        _ring = deque(maxlen=number("UNICOLL_FLIGHT_RECORDER"))
    return _ring


def snapshot() -> list[Any]:
    """The entries of the ring."""
    for _ in range(_ATTEMPTS):
        try:
            return list(ring())
        except RuntimeError:
            # Another thread has recorded a call meanwhile.
            continue
    return list(ring().copy())


def call_kind(entry: Any) -> CallKind:
    """The kind of the call of an entry of the ring."""
    kind: CallKind = entry[0] if isinstance(entry, tuple) else entry.kind
    return kind


def replace_ring(size: int | None) -> None:
    """Have later calls recorded in a ring of ``size`` entries, at first empty.

    None: of ``UNICOLL_FLIGHT_RECORDER`` entries, with the last ones of the present ring.
    """
    global _ring
    _ring = deque(
        ring() if size is None else (),
        maxlen=number("UNICOLL_FLIGHT_RECORDER") if size is None else size,
    )


ArrayKind = tuple[DType, tuple[int, ...]]
"""Element type and shape of an array."""


class CallKind:
    """What all calls of a kind have in common.

    Attributes:
        job: number of the job in this process.
        group, ranks: name of the group, and the global ranks of its members.
        op: name of the operation.
        inputs, outputs: element type and shape of each array; the same tuple for operations in
            place.
        nbytes: bytes of the inputs, or of the outputs where a rank has no inputs.
        reduce: the reduction in words, or "".
        compression: of what is sent between hosts, or "".
        root: rank in the group, or -1.
        backend: name of the backend.
        peer, tag: of a message; else -1 and 0.
    """

    def __init__(
        self, call: Call, job: int, group: str, ranks: tuple[int, ...], backend: str
    ) -> None:
        self.job = job
        self.group = group
        self.ranks = ranks
        self.op = call.op.name
        self.inputs = _arrays(call.inputs)
        self.outputs = self.inputs if call.outputs is call.inputs else _arrays(call.outputs)
        self.nbytes = sum([b.count * b.dtype.itemsize for b in call.inputs or call.outputs])
        self.reduce = "" if call.reduce is None else str(call.reduce)
        self.compression = call.compression
        self.root = call.root
        self.backend = backend
        self.peer = call.peer
        self.tag = call.tag
        # Each message is a kind of its own, so the text is the name of the operation alone.
        self._text = call.op.name if call.op.message else call.describe()
        self._messages: dict[Any, CallKind] = {}

    def describe(self) -> str:
        """Collectives in words, for errors: ``all_reduce(float32[4], SUM)``; messages without their
        arrays."""
        return self._text

    def of_message(self, call: Call) -> CallKind:
        """The kind of a message, where this one is of all messages of an operation and element
        type."""
        key = message_detail(call)
        found = self._messages.get(key)
        if found is None:
            if len(self._messages) >= _MAX_MESSAGE_KINDS:
                self._messages.clear()
            found = self._messages[key] = CallKind(
                call, self.job, self.group, self.ranks, self.backend
            )
        return found


def _arrays(buffers: Iterable[Any]) -> tuple[ArrayKind, ...]:
    return tuple([(b.dtype, b.shape) for b in buffers])


@dataclass(slots=True, eq=False)
class PendingEntry:
    """A call that may not have ended.

    Attributes:
        kind: of the call.
        call: until the backend has numbered it; then None.
        seq: sequence number, or 0.
        created, started, ended: on the clock of ``time.monotonic``; 0 if not yet.
        site: ``file:line``.
        error: text, or "".
        on_end: called when the call has ended, or None.
    """

    kind: CallKind
    call: Call | None
    created: float
    started: float
    site: str
    seq: int = 0
    ended: float = 0.0
    error: str = ""
    on_end: Callable[[], None] | None = None

    def release(self) -> None:
        """Take the call's number; the call, which keeps the arrays alive, is no longer needed."""
        call = self.call
        if call is not None:
            self.seq, self.call = call.seq, None


def begin(
    kinds: Sequence[CallKind],
    calls: Sequence[Call],
    started: float = 0.0,
    frame: FrameType | None = None,
) -> list[PendingEntry]:
    """Record calls that a backend gets now, or that it got at the time ``started``; none if the
    ring keeps none.

    ``frame`` is that of the user's code, None looks for it.
    """
    calls_ring = ring()
    if not calls_ring.maxlen:
        return []
    created = started or monotonic()
    site = calls[0].site or site_of(frame or caller_frame(sys._getframe(1)))
    pending = []
    for kind, call in zip(kinds, calls, strict=True):
        own = kind.of_message(call) if call.op.message else kind
        recorded = PendingEntry(own, call, created, started, site)
        pending.append(recorded)
        calls_ring.append(recorded)
    return pending


def start(pending: Sequence[PendingEntry], when: float) -> None:
    """Mark queued calls as started."""
    for entry in pending:
        entry.started = when


def end(pending: Sequence[PendingEntry], error: BaseException | None) -> None:
    """Mark calls as ended, with an error or None; only the first time counts."""
    for entry in pending:
        if not entry.ended:
            entry.error = failure_text(error) if error is not None else ""
            entry.release()
            # The time is set last, because an entry with one is read as a call that has ended.
            entry.ended = monotonic()
            if entry.on_end is not None:
                # The thread that posts a call may end it at the same time as the one that ran it:
                # the function is called once.
                with _ON_END_LOCK:
                    on_end, entry.on_end = entry.on_end, None
                if on_end is not None:
                    on_end()


def entry(kind: CallKind, call: Call, begun: float, frame: FrameType, error: str = "") -> Entry:
    """What the ring gets of a blocking call that has ended, made in ``frame``."""
    code, offset = place_of(frame)
    if call.op.message:
        return (kind, call.seq, begun, monotonic(), code, offset, error, message_detail(call))
    if error:
        return (kind, call.seq, begun, monotonic(), code, offset, error)
    return (kind, call.seq, begun, monotonic(), code, offset)


def message_detail(call: Call) -> MessageDetail:
    """What messages of a kind differ in: shape, peer and tag."""
    buffers = call.inputs or call.outputs
    return buffers[0].shape if buffers else (), call.peer, call.tag


def failure_text(error: BaseException) -> str:
    """An exception as text. The exception itself would keep frames alive, and with them arrays."""
    return f"{type(error).__name__}: {error}"[:_MAX_ERROR]
