"""The flight recorder's contents: ended and pending calls from the ring, running ones from what the
threads are in."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from math import prod
from typing import Any

from unicoll.arrays.types import DType
from unicoll.calls import flight_recorder, thread_activity
from unicoll.calls.call_site import place_text, site_of
from unicoll.calls.flight_recorder import (
    ArrayKind,
    CallKind,
    MessageDetail,
    PendingEntry,
    call_kind,
    message_detail,
    ring,
)
from unicoll.calls.thread_activity import Activity

_MESSAGES = ("send", "recv", "probe")


@dataclass(frozen=True)
class RecordedCall:
    """One call, as the flight recorder has it.

    Attributes:
        group, ranks, op, inputs, outputs, nbytes, reduce, root, peer, tag, backend, compression:
            see :class:`CallKind`.
        seq: sequence number in the group, from 1; 0 for messages of most backends, and before the
            backend has it.
        site: ``file:line`` of the caller.
        state: "scheduled" (behind other calls, or just posted), "started", "completed" or "failed".
        created, started, ended: seconds on the clock of ``time.monotonic``; 0 if not yet.
        blocking: True if the caller was blocked until it ended.
        error: text, or "".
    """

    group: str
    ranks: tuple[int, ...]
    seq: int
    op: str
    inputs: tuple[ArrayKind, ...]
    outputs: tuple[ArrayKind, ...]
    nbytes: int
    reduce: str
    root: int
    peer: int
    tag: int | None
    backend: str
    site: str
    state: str
    created: float
    started: float
    ended: float
    blocking: bool
    error: str = ""
    compression: str = ""

    @property
    def is_message(self) -> bool:
        """True for sends, receives and probes."""
        return self.op in _MESSAGES

    def describe(self) -> str:
        """The call in words: ``all_reduce(float32[4], SUM)``."""
        parts = [f"{dtype.name}{list(shape)}" for dtype, shape in (self.inputs or self.outputs)[:1]]
        parts += [self.reduce] if self.reduce else []
        parts += [f"compression={self.compression}"] if self.compression else []
        parts += [f"root={self.root}"] if self.root >= 0 else []
        if self.is_message:
            parts.append(f"peer={self.peer if self.peer >= 0 else 'any'}")
            parts.append(f"tag={'any' if self.tag is None else self.tag}")
        return f"{self.op}({', '.join(parts)})"


def recorded_calls(job: int = 0) -> list[RecordedCall]:
    """The last calls of this process, in the order in which they began; any thread.

    ``job`` is the number of the job whose calls are wanted; 0 means all.
    """
    found = [
        _ended(e) if isinstance(e, tuple) else _pending(e)
        for e in flight_recorder.snapshot()
        if job in (0, call_kind(e).job)
    ]
    found += [_running_call(a) for a in _running() if a.kind is not None and job in (0, a.kind.job)]
    return sorted(found, key=lambda call: call.created)


def _ended(entry: tuple[Any, ...]) -> RecordedCall:
    kind, seq, begun, ended, site, offset = entry[:6]
    error = entry[6] if len(entry) > 6 else ""
    state = "failed" if error else "completed"
    return _record(
        kind,
        seq,
        place_text(site, offset),
        state,
        (begun, begun, ended),
        True,
        error,
        entry[7] if len(entry) > 7 else None,
    )


def _pending(entry: PendingEntry) -> RecordedCall:
    # Read once: the end of the call sets it to None, on another thread.
    call = entry.call
    seq = call.seq if call is not None else entry.seq
    # The error is set before the time of the end, so it is complete here.
    if entry.ended:
        state = "failed" if entry.error else "completed"
    else:
        state = "started" if entry.started else "scheduled"
    times = entry.created, entry.started, entry.ended
    return _record(entry.kind, seq, entry.site, state, times, False, entry.error)


def _running() -> list[Activity]:
    """What the threads are in."""
    if not ring().maxlen:
        return []
    threads = [thread.ident for thread in threading.enumerate()]
    return [activity for thread in threads for activity in thread_activity.activities(thread)]


def _running_call(activity: Activity) -> RecordedCall:
    call: Any = activity.what
    assert activity.kind is not None
    assert activity.frame is not None
    site, begun = site_of(activity.frame), activity.begun
    detail = message_detail(call) if call.op.message else None
    return _record(activity.kind, call.seq, site, "started", (begun, begun, 0.0), True, "", detail)


def _record(
    kind: CallKind,
    seq: int,
    site: str,
    state: str,
    times: tuple[float, float, float],
    blocking: bool,
    error: str = "",
    message: MessageDetail | None = None,
) -> RecordedCall:
    inputs, outputs, nbytes, peer, tag = kind.inputs, kind.outputs, kind.nbytes, kind.peer, kind.tag
    if message is not None:
        shape, peer, tag = message
        inputs, outputs = _reshaped(inputs, shape), _reshaped(outputs, shape)
        nbytes = sum(prod(shape) * dtype.itemsize for dtype, shape in inputs or outputs)
    return RecordedCall(
        kind.group,
        kind.ranks,
        seq,
        kind.op,
        inputs,
        outputs,
        nbytes,
        kind.reduce,
        kind.root,
        peer,
        tag,
        kind.backend,
        site,
        state,
        *times,
        blocking,
        error,
        kind.compression,
    )


def _reshaped(
    arrays: tuple[ArrayKind, ...], shape: tuple[int, ...]
) -> tuple[tuple[DType, tuple[int, ...]], ...]:
    return tuple((dtype, shape) for dtype, _ in arrays)
