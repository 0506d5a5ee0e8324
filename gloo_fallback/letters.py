"""What a mailroom handles: letters (operations), messages on their way in, lines to members, and the bell."""

from __future__ import annotations

import os
import socket
import struct
import threading
import time
from collections import deque

import numpy as np

from unicoll.backend import Call
from unicoll.kernels import Flat
from unicoll.work import HostCompletion

__all__ = ["HEADER", "JOIN", "MAGIC", "Bell", "Letter", "Line", "Message"]

HEADER = struct.Struct("<QqQQ")
"""Magic, tag, dtype code, bytes of payload."""
MAGIC = 0x3167736D63696E75
JOIN = 1 << 16
"""Messages up to this size leave in one system call with their header."""


class Bell:
    """Wakes the thread that polls. Once closed it stays silent: its descriptor may be somebody else's by then."""

    def __init__(self) -> None:
        self.descriptor = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._lock = threading.Lock()

    def ring(self) -> None:
        """Wake the thread, now or when it polls next; any thread."""
        with self._lock:
            if self.descriptor >= 0:
                os.eventfd_write(self.descriptor, 1)

    def hush(self) -> None:
        """Heard."""
        try:
            os.eventfd_read(self.descriptor)
        except BlockingIOError:
            pass

    def close(self) -> None:
        """Give the descriptor back; idempotent."""
        with self._lock:
            if self.descriptor >= 0:
                os.close(self.descriptor)
                self.descriptor = -1


class Letter:
    """A send or receive in flight."""

    __slots__ = ("call", "completion", "deadline", "offset", "start", "view")

    def __init__(self, call: Call) -> None:
        self.call = call
        self.completion = HostCompletion((call,))
        self.deadline = time.monotonic() + call.timeout
        self.offset = 0
        buffer = (call.inputs or call.outputs)[0]
        flat: Flat = buffer.flat  # type: ignore[assignment]
        self.view = flat.view(np.uint8).data
        if call.inputs:
            header = HEADER.pack(MAGIC, call.tag, buffer.dtype.code, len(self.view))
            if len(self.view) <= JOIN:
                self.view = memoryview(header + self.view.tobytes())
            else:
                self.offset = -len(header)
        self.start = self.offset

    def header(self) -> bytes:
        buffer = self.call.inputs[0]
        return HEADER.pack(MAGIC, self.call.tag, buffer.dtype.code, len(self.view))


class Message:
    """A message on its way in: where its bytes go, and how many have come."""

    __slots__ = ("claimed", "code", "got", "letter", "serial", "tag", "view")

    def __init__(self, tag: int, code: int, serial: int) -> None:
        self.tag = tag
        self.code = code
        self.serial = serial
        self.got = 0
        self.letter: Letter | None = None  # who gets it, directly
        self.claimed: Letter | None = None  # who gets it when it is complete, from the queue
        self.view = memoryview(b"")


class Line:
    """The connection to one member."""

    __slots__ = ("header", "message", "outbox", "queue", "sock")

    def __init__(self, sock: socket.socket | None) -> None:
        self.sock = sock
        self.outbox: deque[Letter] = deque()
        self.queue: deque[Message] = deque()  # arrived, and not yet asked for
        self.header = bytearray()
        self.message: Message | None = None
