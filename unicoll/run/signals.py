"""Signals to the launcher: their handlers queue them, and the main loop handles them."""

from __future__ import annotations

import signal
import socket
import sys
import threading
from collections import deque
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

from unicoll.errors import DistError

HANDED_ON = (signal.SIGUSR1, signal.SIGUSR2)
"""Signals that end nobody: they are sent to the workers that handle them. SIGUSR1 requests dumps of
unicoll's jobs; batch systems warn of the end of a job by either."""


class SignalQueue:
    """The signals that end a launch, in the order of their arrival, and those that are handed on to
    the workers.

    While no worker has been started, a signal that ends the launch raises SystemExit(128 + N).

    Attributes:
        received: those that end the launch and are not handled yet.
        handed_on: those of :data:`HANDED_ON` that have arrived and are not handled yet.
        started: a worker has been started, and :meth:`exit_on_signal` is not in effect.
        seen: a signal has arrived that ends the launch.
        exit_signal: the signal that has raised SystemExit.
    """

    def __init__(self, numbers: Collection[signal.Signals]) -> None:
        self.received: deque[signal.Signals] = deque()
        self.handed_on: deque[signal.Signals] = deque()
        self.started = False
        self.seen = False
        self.exit_signal: signal.Signals | None = None
        self._numbers = frozenset(numbers)
        self._previous: dict[signal.Signals, Any] = {}
        self._read, self._write = socket.socketpair()
        for end in (self._read, self._write):
            end.setblocking(False)

    def install(self) -> None:
        """Set the handlers; DistError outside the main thread."""
        if threading.current_thread() is not threading.main_thread():
            raise DistError("the launcher handles signals and must run in the main thread")
        for number in {*self._numbers, signal.SIGCHLD, *HANDED_ON}:
            # Signals that are ignored at the start stay ignored: SIGHUP under nohup, SIGINT in the
            # background. SIGCHLD needs a handler, though that does nothing: only signals with one
            # write to the wakeup descriptor.
            if number == signal.SIGCHLD or signal.getsignal(number) != signal.SIG_IGN:
                self._previous[number] = signal.signal(number, self._on_signal)
        # A handler alone does not wake the main loop: Python calls an interrupted select() again,
        # and a signal just before select() would go unnoticed until its timeout.
        signal.set_wakeup_fd(self._write.fileno(), warn_on_full_buffer=False)

    def close(self) -> None:
        """Restore the previous handlers."""
        if self._previous:
            # Before the socket is closed: a signal would be written to its descriptor, which may be
            # another file by then.
            signal.set_wakeup_fd(-1)
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._read.close()
        self._write.close()

    @contextmanager
    def exit_on_signal(self) -> Iterator[None]:
        """While no worker runs: a signal that has arrived or arrives now ends the launch with
        SystemExit(128 + N)."""
        # Before the queue is read: a signal after this line raises SystemExit in the handler, and
        # one before it is in the queue. In the other order one in between would wait in the queue.
        before, self.started = self.started, False
        try:
            if self.received:
                self._exit(self.received.popleft())
            yield
        finally:
            self.started = before

    def _exit(self, number: signal.Signals) -> None:
        self.exit_signal = number
        sys.exit(128 + number)

    def fileno(self) -> int:
        """A descriptor that is readable after a signal, or after :meth:`wake`."""
        return self._read.fileno()

    def clear(self) -> None:
        """Make :meth:`fileno` unreadable until the next signal."""
        with suppress(BlockingIOError):
            self._read.recv(4096)

    def wake(self) -> None:
        """Make :meth:`fileno` readable, from any thread."""
        # If the buffer is full, the descriptor is readable already. If the socket is closed, the
        # launch has ended.
        with suppress(OSError):
            self._write.send(b"\0")

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        if number in HANDED_ON and number not in self._numbers:
            self.handed_on.append(signal.Signals(number))
        elif number != signal.SIGCHLD:
            self.seen = True
            if not self.started:
                # No worker runs, and the main loop, which reads the queue, may not be reached: this
                # thread may be blocked, for example in the read of a secret from a pipe.
                self._exit(signal.Signals(number))
            self.received.append(signal.Signals(number))
