"""What a mailroom handles: letters (operations), messages on their way in, the frames around them, and the bell."""

from __future__ import annotations

import errno
import os
import struct
import threading
import time
from collections.abc import Callable

import numpy as np

from unicoll.backend import Call
from unicoll.kernels import Flat
from unicoll.work import HostCompletion

__all__ = [
    "ANSWER",
    "CREDIT",
    "HEADER",
    "JOIN",
    "MAGIC",
    "MESSAGE",
    "OFFER",
    "PART",
    "SHARED",
    "Bell",
    "Letter",
    "Message",
    "frame",
]

HEADER = struct.Struct("<IBBHqQQ")
"""Magic, kind, dtype code, nothing, tag, bytes of the message, bytes of this part of it."""
MAGIC = 0x736D6375
JOIN = 1 << 16
"""Messages up to this size are copied behind their header and leave in one piece."""


MESSAGE, SHARED, PART, CREDIT, OFFER, ANSWER = range(6)
"""What a frame is. A message, its bytes behind it in the stream; a message whose bytes come through the ring, the
first part of them with this frame; more of it is in the ring; so much has been taken out of the ring; where a ring is,
told behind the header; whether the ring could be mapped, with 0 or an error number for the size."""


def frame(kind: int, size: int = 0, part: int = 0) -> bytes:
    """A frame that is no message."""
    return HEADER.pack(MAGIC, kind, 0, 0, 0, size, part)


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
    """A send or receive in flight.

    Args:
        call: the operation.
        drive: for one in the background: moves messages until it is done; None if its caller waits anyway.

    Attributes:
        view: the array's bytes.
        background: whether somebody may have hung callbacks on the completion.
        begun: of a send, whether anything of it has left.
        shared: of a send that has begun, whether it goes through the ring.
        offset: of a send, how many bytes have left.
    """

    __slots__ = ("background", "begun", "call", "completion", "deadline", "offset", "shared", "view")

    def __init__(self, call: Call, drive: Callable[[Letter], None] | None) -> None:
        self.call = call
        self.background = drive is not None
        self.completion = HostCompletion((call,)) if drive is None else Posted(self, drive)
        self.deadline = time.monotonic() + call.timeout
        flat: Flat = (call.inputs or call.outputs)[0].flat  # type: ignore[assignment]
        self.view = flat.view(np.uint8).data
        self.begun = False
        self.shared = False
        self.offset = 0

    def header(self, kind: int, part: int = 0) -> bytes:
        """The header of a send."""
        call = self.call
        return HEADER.pack(MAGIC, kind, call.inputs[0].dtype.code, 0, call.tag, len(self.view), part)


class Posted(HostCompletion):
    """Of a letter in the background: whoever waits for it drives."""

    __slots__ = ("_drive", "_letter")

    def __init__(self, letter: Letter, drive: Callable[[Letter], None]) -> None:
        super().__init__((letter.call,))
        self._letter: Letter | None = letter
        self._drive = drive

    def finish(self, error: BaseException | None = None) -> None:
        self._letter = None  # else each kept the other, and the array, until the next collection of garbage
        super().finish(error)

    def wait(self, timeout: float | None) -> None:
        letter = self._letter
        if letter is not None and timeout is None:
            self._drive(letter)
        super().wait(timeout)


class Message:
    """A message on its way in: where its bytes go, and how many have come.

    Attributes:
        letter: the receive that it goes to directly.
        claimed: the receive that it does not fit.
        shared: whether it comes through the ring.
    """

    __slots__ = ("claimed", "code", "got", "letter", "serial", "shared", "size", "tag", "view")

    def __init__(self, tag: int, code: int, size: int) -> None:
        self.tag = tag
        self.code = code
        self.size = size
        self.got = 0
        self.serial = 0
        self.shared = False
        self.letter: Letter | None = None
        self.claimed: Letter | None = None
        self.view = memoryview(b"")

    def fits(self, letter: Letter) -> bool:
        """Whether the receiver's array is of the message's type and size."""
        return letter.call.outputs[0].dtype.code == self.code and len(letter.view) == self.size

    def store(self) -> None:
        """Nobody's array is there for it (yet): memory of its own.

        Raises:
            OSError: there is not so much.
        """
        try:
            room: Flat = np.empty(self.size, np.uint8)
        except (MemoryError, ValueError, OverflowError) as error:
            raise OSError(errno.ENOMEM, f"no memory for a message of {self.size} bytes") from error
        self.view = room.data

    def give(self, letter: Letter) -> None:
        """Hand what has come to a receive; the rest will go there directly."""
        letter.view[: self.got] = self.view[: self.got]
        self.view = letter.view
        self.letter = letter
