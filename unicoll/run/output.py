"""Output of the workers: from their pipes to the console and the log files, as whole lines with
prefixes.

``Lines`` splits one stream into lines. ``Console`` writes to the launcher's own stdout and stderr
in a thread, so that a slow reader (a pager, a full pipe) does not block the launcher's main loop.
``OutputPipe`` is one worker's pipe; ``OutputPipes`` reads all of them with the main loop's
selector.
"""

from __future__ import annotations

import errno
import os
import re
import select
import selectors
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import BinaryIO, NamedTuple

_READ_SIZE = 1 << 16
# Reads that empty the largest pipe of an unprivileged process, by default 1 MiB.
_PIPE_READS = 16
_MAX_LINE = 1 << 20
# With more bytes in the console's queue the pipes are not read, and the workers block when theirs
# are full.
_MAX_BACKLOG = 8 << 20
_TAIL_SIZE = 16 << 10
# Seconds between the printed states of a progress bar, if the output is not a terminal.
_PROGRESS_PERIOD = 1.0
# Seconds after which a terminal shows an unfinished line: it may be a prompt.
_PROMPT_DELAY = 0.2
_ERASE_LINE = b"\r\x1b[K"
_READER_ENDED = (errno.EPIPE, errno.EBADF, errno.EIO)
_RETURN = re.compile(rb"\r(?=[^\r\n])")


class Lines:
    """Splits a stream of bytes into whole lines and puts ``prefix`` before each.

    No byte is dropped. A line longer than 1 MiB is split by an additional newline. The prefix is
    repeated after a carriage return inside a line, since the following bytes overwrite the line on
    a terminal.
    """

    def __init__(self, prefix: bytes = b"", max_line: int = _MAX_LINE) -> None:
        self._prefix = prefix
        self._max_line = max_line
        self._pending = bytearray()

    @property
    def unfinished(self) -> bytes:
        """The text after the last carriage return of the unfinished line, with the prefix; empty if
        there is none."""
        state = bytes(self._pending.rpartition(b"\r")[2])
        return self._prefix + state if state else b""

    def feed(self, data: bytes) -> bytes:
        """Add received bytes; returns the lines that they complete."""
        # Only the new bytes are searched, so that a long line in small parts is searched once.
        searched = len(self._pending)
        self._pending += data
        end = self._pending.rfind(b"\n", searched) + 1
        if end:
            return self._take(end)
        return self.finish() if len(self._pending) > self._max_line else b""

    def progress(self) -> bytes:
        """The unfinished line up to its last carriage return, as a line; empty if there is none."""
        end = self._pending.rfind(b"\r")
        if end < 0 or not self._pending[:end].strip(b"\r"):
            return b""
        return self._take(end) + b"\n"

    def finish(self) -> bytes:
        """The unfinished line, ended by a newline; empty if there is none."""
        return self._take(len(self._pending)) + b"\n" if self._pending else b""

    def _take(self, end: int) -> bytes:
        block = bytes(self._pending[:end])
        del self._pending[:end]
        if not self._prefix:
            return block
        if b"\r" in block:
            block = _RETURN.sub(lambda _match: b"\r" + self._prefix, block)
        body = block.removesuffix(b"\n")
        ending = block[len(body) :]
        return self._prefix + body.replace(b"\n", b"\n" + self._prefix) + ending


class _Output(NamedTuple):
    fd: int
    data: bytes
    owner: object
    is_state: bool


class Console:
    """Writes to file descriptors 1 and 2 in a thread, in the order of the calls.

    Attributes:
        terminals: those of the two that are terminals.

    Args:
        wake: called by the thread when the backlog is small enough to read from the workers again.
    """

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._queue: deque[_Output] = deque()
        self._backlog = 0
        self._changed = threading.Condition()
        self._closing = False
        # These describe what was written, and belong to the console's thread alone.
        self._closed_fds: set[int] = set()
        self._state: _Output | None = None
        self._status = self._last_line = b""
        # The last state that the main loop's thread has queued.
        self._status_text = ""
        self.terminals = {fd for fd in (1, 2) if _is_terminal(fd)}
        # A daemon: a write that blocks because the reader has stopped must not keep the process
        # from ending. close() waits as long as its caller allows.
        self._thread = threading.Thread(target=self._run, name="unicoll-console", daemon=True)
        self._thread.start()

    @property
    def full(self) -> bool:
        """True if the backlog is so large that the workers' pipes should not be read."""
        return self._backlog > _MAX_BACKLOG

    def write(self, fd: int, data: bytes, owner: object = None, is_state: bool = False) -> None:
        """Queue whole lines for ``fd``.

        With ``is_state``, on a terminal: an unfinished line, shown below all others until ``owner``
        writes again.
        """
        if data:
            self._enqueue(_Output(fd, data, owner, is_state))

    def write_text(self, text: str) -> None:
        """Queue whole lines of the launcher for standard error."""
        self.write(2, text.encode("utf-8", "backslashreplace"))

    def log(self, text: str) -> None:
        """Queue one line of the launcher for standard error."""
        self.write_text(f"unicoll.run: {text}\n")

    def show_status(self, text: str) -> None:
        """On a terminal: the launcher's state in one line, shown below all others; none if empty.

        Not in the background, where the terminal shows what the user types, and not if TERM is
        "dumb".
        """
        text = f"unicoll.run: {text}" if text and self._may_show_status() else ""
        if text != self._status_text:
            self._status_text = text
            self._enqueue(_Output(2, text.encode("ascii", "backslashreplace"), self, True))

    def _may_show_status(self) -> bool:
        try:
            in_foreground = os.tcgetpgrp(2) == os.getpgrp()
        except OSError:
            # Standard error is not the terminal of this session.
            return False
        return 2 in self.terminals and in_foreground and os.environ.get("TERM", "dumb") != "dumb"

    def _enqueue(self, output: _Output) -> None:
        with self._changed:
            self._queue.append(output)
            self._backlog += len(output.data)
            self._changed.notify()

    def close(self, give_up: Callable[[], bool]) -> None:
        """Write the queued output and end the thread, unless ``give_up()`` returns True before."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        while self._thread.is_alive() and not give_up():
            self._thread.join(0.2)

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._queue and not self._closing:
                    self._changed.wait()
                if not self._queue:
                    return
                output = self._queue.popleft()
            # Without the lock: the write may block, and the main loop must be able to queue more.
            self._write(
                output.fd, self._with_state(output) if output.fd in self.terminals else output.data
            )
            with self._changed:
                was_full = self.full
                self._backlog -= len(output.data)
                freed = was_full and not self.full
            if freed:
                # The pipes were taken from the selector when the queue was full, so no output ends
                # the main loop's poll.
                self._wake()

    def _with_state(self, output: _Output) -> bytes:
        """The bytes that write ``output`` above the last line, which is a worker's state, else the
        launcher's."""
        data = _ERASE_LINE if self._last_line else b""
        if output.owner is self:
            self._status = output.data[: _columns() - 1]
        elif output.is_state:
            self._state = output
        else:
            data += output.data
            if self._state is not None and output.owner is self._state.owner:
                self._state = None
        self._last_line = self._state.data if self._state is not None else self._status
        return data + self._last_line

    def _write(self, fd: int, data: bytes) -> None:
        view = memoryview(data)
        while view and fd not in self._closed_fds:
            try:
                view = view[os.write(fd, view) :]
            except BlockingIOError:
                # The descriptor is in non-blocking mode, which another process that shares it may
                # have set.
                select.select([], [fd], [], 1.0)
            except OSError as error:
                # The job goes on without this output.
                self._closed_fds.add(fd)
                if fd == 1 and error.errno not in _READER_ENDED:
                    text = f"unicoll.run: standard output: {error.strerror}; no longer written\n"
                    self._write(2, text.encode())


def _columns() -> int:
    try:
        return os.get_terminal_size(2).columns or 80
    except OSError:
        return 80


def _is_terminal(fd: int) -> bool:
    try:
        return os.isatty(fd)
    except OSError:
        return False


class LogFile:
    """A file that the launcher writes; after an error it is not written any more, and the console
    says so."""

    def __init__(self, file: BinaryIO, path: str, console: Console) -> None:
        self._console = console
        self._path = path
        self._file: BinaryIO | None = file

    def write(self, data: bytes) -> None:
        if self._file is None or not data:
            return
        try:
            self._file.write(data)
        except OSError as error:
            text = f"unicoll.run: {self._path}: {error.strerror}; no longer written\n"
            self._console.write(2, os.fsencode(text))
            self.close()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


class LineCopies:
    """A file of all workers' lines that have one of some texts.

    Of a line with carriage returns, a progress bar, it has the text after the last one.
    """

    def __init__(self, texts: Sequence[str], file: LogFile) -> None:
        self._texts = [os.fsencode(text) for text in texts]
        self._file = file

    def write(self, prefix: bytes, lines: bytes) -> None:
        """Copy those of some whole lines, each after ``prefix``."""
        if any(text in lines for text in self._texts):
            shown = [
                line.rstrip(b"\r").rpartition(b"\r")[2]
                for line in lines.removesuffix(b"\n").split(b"\n")
            ]
            found = [
                prefix + line + b"\n" for line in shown if any(text in line for text in self._texts)
            ]
            self._file.write(b"".join(found))

    def close(self) -> None:
        self._file.close()


class OutputPipe:
    """One worker's stdout or stderr: the read end of the pipe, and the destinations of its bytes.

    Args:
        fd: the pipe; owned by this object.
        console, target: lines are written to the console's file descriptor ``target`` (1 or 2), not
            if None.
        prefix: put before each line.
        log: the file for the unchanged bytes, or None; owned by this object.
        copies: for the lines that have some texts, or None.
    """

    def __init__(
        self,
        fd: int,
        console: Console,
        target: int | None,
        prefix: bytes,
        log: LogFile | None,
        copies: LineCopies | None = None,
    ) -> None:
        self.fd = fd
        self._console = console
        self._target = target
        self._lines = Lines(prefix)
        self._log = log
        self._copies = copies
        self._copied = Lines()
        self._prefix = prefix
        self._tail = bytearray()
        self._last_read = 0.0
        self._last_progress = 0.0
        self._state = b""
        os.set_blocking(fd, False)

    @property
    def closed(self) -> bool:
        """True once the stream has ended or ``close`` was called."""
        return self.fd < 0

    @property
    def tail(self) -> str:
        """The last lines, at most 16 KiB."""
        return bytes(self._tail[-_TAIL_SIZE:]).decode("utf-8", "replace")

    @property
    def is_shown(self) -> bool:
        """True if its lines are written to the console."""
        return self._target is not None

    @property
    def unfinished(self) -> bool:
        """True if there is an unfinished line that ``tick`` may show."""
        return self._target is not None and bool(self._lines.unfinished)

    def read(self) -> int | None:
        """Forward up to 64 KiB from the pipe; returns the number of bytes, 0 at its end, None if
        nothing is there."""
        try:
            data = os.read(self.fd, _READ_SIZE)
        except BlockingIOError:
            return None
        except OSError:
            data = b""
        if not data:
            return 0
        self._last_read = time.monotonic()
        self._tail += data
        # Cut at a multiple of the size, so that not every read moves the bytes.
        if len(self._tail) > 4 * _TAIL_SIZE:
            del self._tail[:-_TAIL_SIZE]
        if self._log is not None:
            self._log.write(data)
        if self._target is not None:
            self._console.write(self._target, self._lines.feed(data), self)
        if self._copies is not None:
            self._copies.write(self._prefix, self._copied.feed(data))
        return len(data)

    def tick(self, now: float) -> None:
        """Show the state of a progress bar, or a prompt, if it is old enough."""
        if self._target is None:
            return
        if self._target not in self._console.terminals:
            if now - self._last_progress >= _PROGRESS_PERIOD and (state := self._lines.progress()):
                self._last_progress = now
                self._console.write(self._target, state, self)
        # A terminal shows only the last state, so the text of the earlier ones is dropped.
        elif self._lines.progress() or now - self._last_read >= _PROMPT_DELAY:
            state = self._lines.unfinished
            if state != self._state:
                self._state = state
                self._console.write(self._target, state, self, is_state=True)

    def close(self) -> None:
        """Forward an unfinished last line and close everything."""
        if self.closed:
            return
        if self._target is not None:
            self._console.write(self._target, self._lines.finish(), self)
        if self._copies is not None:
            self._copies.write(self._prefix, self._copied.finish())
        os.close(self.fd)
        self.fd = -1
        if self._log is not None:
            self._log.close()

    def copy_lines(self, text: str) -> None:
        """Copy those of some lines that are not read from the pipe."""
        if self._copies is not None:
            self._copies.write(self._prefix, text.encode("utf-8", "backslashreplace"))


class OutputPipes:
    """All workers' pipes, registered with a selector while the console is not full."""

    def __init__(self, selector: selectors.BaseSelector, console: Console) -> None:
        self._selector = selector
        self._console = console
        self._open: list[OutputPipe] = []
        self._paused = False

    def add(self, stream: OutputPipe) -> None:
        self._open.append(stream)
        if not self._paused:
            self._selector.register(stream.fd, selectors.EVENT_READ, stream)

    @property
    def open(self) -> bool:
        """True while a pipe has not ended."""
        return bool(self._open)

    @property
    def unfinished(self) -> bool:
        """True if ``tick`` should be called again soon."""
        return any(stream.unfinished for stream in self._open)

    def read(self, stream: OutputPipe) -> None:
        """``stream`` is readable according to the selector."""
        if not stream.closed and stream.read() == 0:
            self._drop(stream)

    def tick(self) -> None:
        """Pause or resume reading according to the console's backlog, and show old unfinished
        lines."""
        # While the reader of the console is slow, the workers block in their writes, and the
        # launcher's memory stays bounded. The main loop still handles signals and ends of workers.
        if self._paused != self._console.full:
            self._paused = self._console.full
            for stream in self._open:
                if self._paused:
                    self._selector.unregister(stream.fd)
                else:
                    self._selector.register(stream.fd, selectors.EVENT_READ, stream)
        now = time.monotonic()
        for stream in self._open:
            stream.tick(now)

    def close(self) -> None:
        """Forward what the pipes have now and close them all."""
        for stream in list(self._open):
            # Bounded, because a process that has left the job may write to the pipe without end.
            for _ in range(_PIPE_READS):
                if not stream.read():
                    break
            self._drop(stream)

    def _drop(self, stream: OutputPipe) -> None:
        self._open.remove(stream)
        # Before the descriptor is closed, whose number the next opened file gets.
        if not self._paused:
            self._selector.unregister(stream.fd)
        stream.close()
