"""``breakpoint``: the debugger pdb on one rank, at a terminal, while the others wait."""

from __future__ import annotations

import contextlib
import os
import pdb
import signal
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, TextIO

from unicoll.api import world
from unicoll.bootstrap.enclosing_jobs import ancestors
from unicoll.errors import DistArgumentError, DistError
from unicoll.group.arguments import as_integer
from unicoll.net.stores import PrefixStore

_visits: dict[tuple[str, int], int] = {}
"""Number of calls with ``skip`` at each line."""


def breakpoint(rank: int = 0, skip: int = 0, timeout_s: float | None = 3600) -> None:
    """Stop one rank in pdb; the others wait until it continues. All ranks of the default group call
    this.

    pdb stops at the call, before Python 3.13 at the line after it. The others wait in a barrier,
    which the first command that continues the program (``c``, ``n``, ``s``) ends; ``q`` ends the
    program. pdb uses the terminal of the process or, where its input and output are redirected (by
    a launcher), the terminal of a process that started it. Ctrl-C goes to the launcher.

    Args:
        rank: global rank that enters pdb, equal on all ranks.
        skip: ignore the first ``skip`` calls at this line, equal on all ranks.
        timeout_s: how long the others wait, in seconds; None takes the default group's timeout. It
            must be longer than the time in pdb: torch's default is one hour.

    Raises:
        DistArgumentError: not a rank of the job.
        DistError: that rank has no terminal; raised on all ranks.
        OperationTimeoutError, RankLostError: as :func:`barrier`.
        NotInitializedError: there is no default group.
    """
    job = world.current("breakpoint")
    rank, skip = as_integer("breakpoint: rank", rank), as_integer("breakpoint: skip", skip)
    if not 0 <= rank < job.size:
        raise DistArgumentError(f"breakpoint: {rank} is not a rank of a world of {job.size}")
    frame = sys._getframe(1)
    if skip > 0:
        line = frame.f_code.co_filename, frame.f_lineno
        _visits[line] = _visits.get(line, 0) + 1
        if _visits[line] <= skip:
            return
    # Every call has a key of its own, because the key of an earlier one still has its result.
    job.named["breakpoint()"] += 1
    store, key = PrefixStore("breakpoint", job.store), str(job.named["breakpoint()"])
    terminal = None
    # Before the barrier: after it every rank finds the result of this rank, so that all ranks wait,
    # or all raise.
    if job.rank == rank:
        try:
            terminal = _Terminal()
        except DistError as e:
            store.set(key, str(e))
        else:
            store.set(key, b"")
    try:
        job.default.barrier()
        if reason := store.get(key).decode():
            raise DistError(reason, rank=rank)
    except BaseException:
        if terminal is not None:
            terminal.close()
        raise

    def release() -> None:
        # The user may take longer than the timeout of the group.
        job.default.barrier(timeout=timeout_s)

    if terminal is None:
        release()
        return
    debugger = _Debugger(terminal, release)
    debugger.message(
        f"rank {rank} of {job.size} (pid {os.getpid()}); the other ranks wait until it continues"
    )
    # This call must be the last one: pdb stops in the next frame that runs.
    debugger.set_trace(frame)


class _Debugger(pdb.Pdb):
    """pdb at a terminal.

    Args:
        terminal: closed when the program continues without breakpoints.
        release: called once, after the first command that continues the program.
    """

    def __init__(self, terminal: _Terminal, release: Callable[[], None]) -> None:
        # With nosigint pdb leaves the program's handler of SIGINT as it is.
        super().__init__(stdin=terminal.input, stdout=terminal.output, nosigint=True)
        self._terminal = terminal
        self._release: Callable[[], None] | None = release
        # True after a command that ends the debugging.
        self._done = False

    def interaction(self, frame: FrameType | None, *rest: Any) -> None:
        # Only at the prompt: while the program runs, Ctrl-C has to reach the launcher.
        with self._terminal.foreground():
            super().interaction(frame, *rest)
        if self._done:
            self._terminal.close()
        # Taken before it is called, so that the next prompt does not repeat a barrier that has
        # failed.
        release, self._release = self._release, None
        if release is not None and not self.quitting:
            release()

    def set_continue(self) -> None:
        super().set_continue()
        # At a breakpoint there is another prompt, which needs the terminal.
        self._done = not self.breaks

    def set_quit(self) -> None:
        super().set_quit()
        self._done = True


class _Terminal:
    """A terminal of this process, or of the nearest process above it that has one.

    Attributes:
        input, output: its files. None if they are this process's stdin and stdout, with which pdb
            edits lines.

    Raises:
        DistError: there is none.
    """

    input: TextIO | None = None
    output: TextIO | None = None

    def __init__(self) -> None:
        # The streams may be None, closed, or no files.
        with contextlib.suppress(AttributeError, ValueError, OSError):
            if sys.stdin.isatty() and sys.stdout.isatty():
                self._fd = sys.stdin.fileno()
                return
        self._fd = _open_terminal()
        self.input = open(self._fd, encoding="utf-8", errors="replace")
        self.output = open(os.dup(self._fd), "w", encoding="utf-8", errors="replace")

    def close(self) -> None:
        """Close the files; idempotent."""
        for file in (self.input, self.output):
            if file is not None:
                file.close()

    @contextlib.contextmanager
    def foreground(self) -> Iterator[None]:
        """Make this process's group the terminal's foreground group: the kernel stops others that
        read from it.

        Without effect on a terminal of another session, which has no job control for this process.
        """
        fd, own, before = self._fd, os.getpgrp(), 0
        with contextlib.suppress(OSError):
            before = os.tcgetpgrp(fd)
        if before > 0 and before != own:
            _set_foreground(fd, own)
        try:
            yield
        finally:
            if before > 0 and before != own:
                _set_foreground(fd, before)


def _set_foreground(fd: int, group: int) -> None:
    # The kernel sends SIGTTOU to a process in the background that changes the foreground group; it
    # would be stopped.
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTTOU,))
    try:
        # The group may have ended.
        with contextlib.suppress(OSError):
            os.tcsetpgrp(fd, group)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


def _open_terminal() -> int:
    """A file descriptor of the terminal."""
    for path in _possible_terminals():
        try:
            # A worker leads a session without a terminal. Without O_NOCTTY this one could become
            # its controlling terminal.
            fd = os.open(path, os.O_RDWR | os.O_NOCTTY)
        except OSError:
            continue
        if os.isatty(fd):
            return fd
        os.close(fd)
    raise DistError(
        f"breakpoint: {os.uname().nodename} process {os.getpid()} has no terminal, and neither do"
        " its parent processes: start the job from a terminal, and give a rank of the host where"
        " you started it"
    )


def _possible_terminals() -> Iterator[str]:
    # The terminal of this process's session comes first.
    yield "/dev/tty"
    for pid in (os.getpid(), *(pid for _, pid in ancestors())):
        for fd in (0, 1, 2):
            with contextlib.suppress(OSError):
                path = os.readlink(f"/proc/{pid}/fd/{fd}")
                if path.startswith(("/dev/pts/", "/dev/tty", "/dev/console")):
                    yield path
