"""One-sided operations as calls of the library, and the checks before them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

from unicoll.backend import Call, OneSidedCall
from unicoll.device_collectives.communicators.communicator import AnyCommunicator, Communicator
from unicoll.device_collectives.interface import CollectiveLibrary
from unicoll.device_collectives.memory.registered_memory import Region
from unicoll.device_collectives.reductions import BYTES
from unicoll.errors import BackendUnavailableError, DistArgumentError

_SIGNAL_INDEX = _CONTEXT = 0
"""NCCL has one of each so far."""
_NO_FLAGS = 0
_UNSUPPORTED = (4, 5)
"""Codes for devices without a suitable transport, and for drivers before CUDA 12.5."""


def check_one_sided(call: Call, library: CollectiveLibrary) -> None:
    """Raise BackendUnavailableError if the library cannot, DistArgumentError if the call's array is
    not on a GPU."""
    if not library.has("put_signal"):
        raise BackendUnavailableError(
            f"{call.op.name}: one-sided operations need {library.needed('put_signal')}",
            op=call.op.name,
        )
    if call.inputs[0].device.type == "cpu":
        raise DistArgumentError(
            f"{call.op.name}: {call.inputs[0]} is not on a GPU", op=call.op.name
        )


def no_window(call: Call, group: str) -> DistArgumentError:
    """The error of a call in a group that has had no symmetric window."""
    return DistArgumentError(
        f"{call.op.name}: group {group!r} has had no symmetric window yet; one-sided operations"
        " need one: call symmetric_empty() or register(symmetric=True) on all ranks first",
        op=call.op.name,
    )


def set_up(
    comm: Communicator,
    blocking: bool,
    stream: int,
    lock: AbstractContextManager[Any],
    deadline: float,
) -> None:
    """Set one-sided operations up after a communicator's first window, on all ranks, as NCCL 2.31
    does itself.

    NCCL 2.29 and 2.30 do it within the first one-sided operation of each rank, which waits for all
    ranks to make one, though the others may have none to make. So each rank signals itself here. A
    failed signal would end a non-blocking communicator, so for those the first one-sided operation
    does the set-up.

    Args:
        lock: held by a thread that issues operations on the device.
    """
    library, what = comm.library, "setting one-sided operations up"
    if not library.has("signal") or library.sets_up_one_sided or not blocking:
        return
    signal = partial(
        library.signal, comm.rank, _SIGNAL_INDEX, _CONTEXT, _NO_FLAGS, comm.handle, stream
    )
    with lock:
        # The first signal waits in NCCL until all ranks make theirs, so it is made on a thread that
        # can be left behind at the deadline.
        code = comm.on_thread(signal, what, deadline)
        if code not in _UNSUPPORTED:
            comm.await_completion(code, what, deadline)
            # The signal is taken by a wait on the stream, or a wait of the program for a signal of
            # its own rank would take it.
            comm.await_completion(
                library.wait_signal([(comm.rank, 1)], comm.handle, stream), what, deadline
            )


def check_put(call: OneSidedCall, target: Region | None, windows: list[Region]) -> None:
    """Raise DistArgumentError if a put does not fit its window, or its array is in no window.

    Args:
        target: this rank's memory in the put's window, as large as on the other ranks; None if the
            window is not one of the group's.
        windows: all windows of the group.
    """
    source = call.inputs[0]
    if target is None:
        raise DistArgumentError(
            f"put: {call.window!r} is no symmetric window of this group: give what"
            " register(symmetric=True) or symmetric_empty() of it has returned",
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
            f"put: {source} at offset {call.offset} goes beyond the window of {target.nbytes}"
            " bytes",
            op="put",
        )


def _put(c: AnyCommunicator, call: Call, stream: int) -> int:
    assert isinstance(call, OneSidedCall)
    source, (peer,) = call.inputs[0], call.signals
    # Every put signals, also one without data.
    if not source.count:
        return _signal(c, call, stream)
    offset = call.offset * source.dtype.itemsize
    return c.library.put_signal(
        source.ptr,
        source.nbytes,
        BYTES,
        peer,
        call.handle,
        offset,
        _SIGNAL_INDEX,
        _CONTEXT,
        _NO_FLAGS,
        c.handle,
        stream,
    )


def _signal(c: AnyCommunicator, call: Call, stream: int) -> int:
    assert isinstance(call, OneSidedCall)
    (peer,) = call.signals
    return c.library.signal(peer, _SIGNAL_INDEX, _CONTEXT, _NO_FLAGS, c.handle, stream)


def _wait_signal(c: AnyCommunicator, call: Call, stream: int) -> int:
    assert isinstance(call, OneSidedCall)
    return c.library.wait_signal(tuple(call.signals.items()), c.handle, stream)


ONE_SIDED: dict[str, Callable[[AnyCommunicator, Call, int], int]] = {
    "put": _put,
    "signal": _signal,
    "wait_signal": _wait_signal,
}
