"""Puts and signals as calls of NCCL, and what NCCL wants to be true before."""

from __future__ import annotations

from typing import TYPE_CHECKING

from unicoll.backend import Call, OneSidedCall
from unicoll.errors import BackendUnavailableError, DistArgumentError

from .api import Nccl
from .structs import version_text
from .types import BYTES

if TYPE_CHECKING:
    from .operations import Ranks
    from .registration import Region

__all__ = ["ONE_SIDED", "refuse_one_sided", "refuse_put"]

_NO_FLAGS = _FIRST = 0
"""Signal index and context: NCCL has one of each so far."""


def refuse_one_sided(call: Call, nccl: Nccl) -> None:
    """Raise BackendUnavailableError if NCCL is too old for it."""
    if not nccl.has("ncclPutSignal"):
        raise BackendUnavailableError(
            f"{call.op.name}: NCCL {version_text(nccl.version)} has no one-sided operations, which came with 2.29",
            op=call.op.name,
        )


def refuse_put(call: OneSidedCall, target: Region | None, windows: list[Region]) -> None:
    """Raise DistArgumentError if a put does not fit its window, or its array is in none.

    Args:
        call: the put.
        target: memory of its window here, as large as on the other ranks; None if that is none of the group's.
        windows: all windows of the group.
    """
    source = call.inputs[0]
    if target is None:
        raise DistArgumentError(
            f"put: {call.window!r} is no symmetric window of this group: give what register(symmetric=True) or"
            " symmetric_empty() of it has returned",
            op="put",
        )
    start, end = source.ptr, source.ptr + source.nbytes
    if not any(w.ptr <= start and end <= w.ptr + w.nbytes for w in windows):
        raise DistArgumentError(f"put: {source} is in no symmetric window of this group", op="put")
    if source.unpack is not None:
        raise DistArgumentError(f"put: {source} is not contiguous", op="put")
    item = source.dtype.itemsize
    if call.offset * item + source.nbytes > target.nbytes:
        raise DistArgumentError(
            f"put: {source} at offset {call.offset} goes beyond the window of {target.nbytes} bytes", op="put"
        )


def _put(c: Ranks, call: Call, stream: int) -> int:
    assert isinstance(call, OneSidedCall)
    source, (peer,) = call.inputs[0], call.signals
    if not source.count:
        return _signal(c, call, stream)
    at = call.offset * source.dtype.itemsize
    return c.nccl.put_signal(
        source.ptr, source.nbytes, BYTES, peer, call.handle, at, _FIRST, _FIRST, _NO_FLAGS, c.handle, stream
    )


def _signal(c: Ranks, call: Call, stream: int) -> int:
    assert isinstance(call, OneSidedCall)
    (peer,) = call.signals
    return c.nccl.signal(peer, _FIRST, _FIRST, _NO_FLAGS, c.handle, stream)


def _wait_signal(c: Ranks, call: Call, stream: int) -> int:
    assert isinstance(call, OneSidedCall)
    return c.nccl.wait_signal(tuple(call.signals.items()), c.handle, stream)


ONE_SIDED = {"put": _put, "signal": _signal, "wait_signal": _wait_signal}
