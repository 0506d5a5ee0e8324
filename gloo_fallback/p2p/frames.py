"""Frames, operations and messages of point-to-point communication, and the waker of its polling
thread."""

from __future__ import annotations

import errno
import os
import struct
import threading
import time
from collections.abc import Callable

import numpy as np

from unicoll.arrays.kernels import Flat
from unicoll.backend import Call
from unicoll.calls.work import HostCompletion

HEADER = struct.Struct("<IBBHqQQ")
"""Magic, kind, dtype code, padding, tag, and two numbers."""
MAGIC = 0x736D6375
INLINE_LIMIT = 1 << 16
"""Messages up to this size are copied behind their header and sent by one system call."""


MESSAGE, OFFER, ANSWER, SWITCH, NOTICE = range(5)
"""Frame kinds, and their numbers.

MESSAGE: a message; its size. Its bytes follow.
OFFER: the address of a ring follows; its size.
ANSWER: whether the ring could be mapped: 0 or an error number.
SWITCH: all further messages are in the ring.
NOTICE: data was written to, or read from, a ring: the positions up to which its sender has written
its own ring and read the peer's.
"""


def frame(kind: int, first: int = 0, second: int = 0) -> bytes:
    """A frame other than a message."""
    return HEADER.pack(MAGIC, kind, 0, 0, 0, first, second)


def message_header(code: int, tag: int, size: int) -> bytes:
    """The header of a message of ``size`` bytes."""
    return HEADER.pack(MAGIC, MESSAGE, code, 0, tag, size, 0)


class Waker:
    """Wakes the polling thread through an eventfd. After closing it does nothing: the descriptor
    may be reused."""

    def __init__(self) -> None:
        self.descriptor = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._lock = threading.Lock()

    def wake(self) -> None:
        """Wake the thread, now or when it polls next; callable from any thread."""
        # Without the lock close() could come between the check and the write, and the write would
        # go to another file.
        with self._lock:
            if self.descriptor >= 0:
                os.eventfd_write(self.descriptor, 1)

    def clear(self) -> None:
        """Reset the eventfd."""
        try:
            os.eventfd_read(self.descriptor)
        except BlockingIOError:
            pass

    def close(self) -> None:
        """Close the descriptor; idempotent."""
        with self._lock:
            if self.descriptor >= 0:
                os.close(self.descriptor)
                self.descriptor = -1


class PendingMessage:
    """A send, receive or probe in flight.

    Args:
        call: the operation.
        progress: runs progress until a background operation is done; None if the caller waits.

    Attributes:
        view: the array's bytes; empty for a probe.
        background: True if callbacks may be attached to the completion.
        begun: True once part of a send has left.
        offset: bytes of a send that have left.
    """

    __slots__ = ("background", "begun", "call", "completion", "deadline", "offset", "view")

    def __init__(self, call: Call, progress: Callable[[PendingMessage], None] | None) -> None:
        self.call = call
        self.background = progress is not None
        self.completion = HostCompletion((call,))
        if progress is not None:
            self.completion.before_wait = lambda _: progress(self)
        self.deadline = time.monotonic() + call.timeout
        self.view = memoryview(b"")
        # A probe has no array.
        if buffers := call.inputs or call.outputs:
            flat: Flat = buffers[0].flat  # type: ignore[assignment]
            self.view = flat.view(np.uint8).data
        self.begun = False
        self.offset = 0

    def header(self) -> bytes:
        """The header of a send."""
        call = self.call
        assert call.tag is not None
        return message_header(call.inputs[0].dtype.code, call.tag, len(self.view))


class IncomingMessage:
    """A message that is being received: the destination of its bytes and the number received.

    Attributes:
        peer: the sender's rank in the group.
        receive: the receive whose array it is written to.
        mismatched: the receive that it matches, but whose array has another type, or no room.
        got: bytes received.
        shared: True if its bytes come through the ring.
    """

    __slots__ = ("code", "got", "mismatched", "peer", "receive", "shared", "size", "tag", "view")

    def __init__(self, peer: int, tag: int, code: int, size: int, shared: bool = False) -> None:
        self.shared = shared
        self.peer = peer
        self.tag = tag
        self.code = code
        self.size = size
        self.got = 0
        self.receive: PendingMessage | None = None
        self.mismatched: PendingMessage | None = None
        self.view = memoryview(b"")

    def allocate(self) -> None:
        """Allocate memory for a message without a matching array.

        Raises:
            OSError: the memory is not available.
        """
        try:
            storage: Flat = np.empty(self.size, np.uint8)
        # The size comes from the peer. An OSError ends the connection to it; another exception
        # would fail the group.
        except (MemoryError, ValueError, OverflowError) as error:
            raise OSError(errno.ENOMEM, f"no memory for a message of {self.size} bytes") from error
        self.view = storage.data

    def redirect_to(self, pending: PendingMessage) -> None:
        """Copy the bytes received so far to a receive's array, and receive the rest into it."""
        pending.view[: self.got] = self.view[: self.got]
        self.view = pending.view[: self.size]
        self.receive = pending
