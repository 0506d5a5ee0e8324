"""The life of a rank: it is started by :class:`ranks.Job`, does the calls that come through a pipe, and ends."""

from __future__ import annotations

import faulthandler
import gc
import importlib
import os
import signal
import socket
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

PATIENCE_S = 8.0
"""How long things may take to be given back."""


@dataclass(frozen=True)
class Failure:
    """An exception of a rank: its type's name and those of its bases, message, fields of a DistError, traceback."""

    type: str
    bases: tuple[str, ...]
    message: str
    fields: dict[str, Any]
    traceback: str

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        names = ("group", "rank", "op", "seq", "host", "pid")
        fields = {name: getattr(error, name) for name in names if getattr(error, name, None) is not None}
        bases = tuple(base.__name__ for base in type(error).__mro__)
        text = "".join(traceback.format_exception(error))
        return cls(type(error).__name__, bases, str(error), fields, text)


BACKEND: str | None = "gloo"
"""The backend with which this rank joins; None leaves the choice to the library."""
DEVICE: int | None = None
"""The device that this rank binds itself to."""


def use(backend: str, imports: Sequence[str] = ()) -> None:
    """Join with a backend, which one of ``imports`` may register, when the time comes."""
    global BACKEND
    BACKEND = backend
    for name in imports:
        importlib.import_module(name)


class Uncaught(Exception):
    """Raised by a function, it ends the rank as an exception that nobody catches ends a program."""


_pipe: Connection
_rank, _size, _init = -1, -1, ""
_at_start: list[str] = []
_complaints: list[Callable[[], list[str]]] = []
_telling = threading.Lock()


def work(descriptor: int, rank: int, size: int, init: str) -> None:
    """The life of a rank: do the calls that come through the pipe, until told to end."""
    global _pipe, _rank, _size, _init, _at_start
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    die_with_parent()
    _pipe, _rank, _size, _init = Connection(descriptor), rank, size, init
    import unicoll  # noqa: F401 - what it opens at import, if anything, is there before and after

    _at_start = snapshot()
    while True:
        try:
            module, name, args = _pipe.recv()
        except (EOFError, OSError):
            return
        value, failure = None, None
        try:
            function: Any = importlib.import_module(module)
            for part in name.split("."):
                function = getattr(function, part)
            value = function(*args)
        except (Uncaught, SystemExit):
            raise
        except BaseException as error:
            failure = Failure.of(error)
        with _telling:
            _pipe.send(("done", value, failure, time.monotonic()))
        if value == _END:
            return


_END = "this rank ends now"


def end() -> str:
    """End this rank's interpreter without leaving the job."""
    return _END


def die_with_parent() -> None:
    """The kernel ends this process with the one that started it."""
    import ctypes

    ctypes.CDLL(None).prctl(1, int(signal.SIGKILL))


def place() -> tuple[int, int]:
    """This rank, and the number of ranks."""
    return _rank, _size


def start_here(complaints: Callable[[], list[str]]) -> None:
    """What is there now is there to stay; and once the rank has left the job, ask ``complaints`` what is wrong."""
    global _at_start
    _at_start = snapshot()
    _complaints.append(complaints)


def tell(note: Any) -> None:
    """A note for the test (see :meth:`Job.await_note`)."""
    with _telling:
        _pipe.send(("note", note))


def enter(timeout: float = 60.0) -> None:
    """Join the job."""
    import unicoll as dist

    if _init == "env":
        dist.init_process_group(BACKEND, timeout=timeout, device_id=DEVICE)
    else:
        dist.init_process_group(
            BACKEND, _init, timeout=timeout, rank=_rank, world_size=_size, device_id=DEVICE
        )


def leave() -> list[str]:
    """Leave the job; returns what was not given back (threads, descriptors), and other complaints."""
    import unicoll as dist

    if dist.is_initialized():
        dist.destroy_process_group()
    left = leftovers(_at_start)
    return left + [text for complaints in _complaints for text in complaints()]


def snapshot() -> list[str]:
    """Threads and descriptors of this process, one word each; descriptors by what they are."""
    threads = [f"thread {t.name}" for t in threading.enumerate()]
    return sorted(threads + list(_descriptors()))


def _descriptors() -> Iterator[str]:
    for fd in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{fd}")
        except OSError:  # the one that listed the directory
            continue
        if not target.startswith("/proc/"):
            yield f"fd {target.partition(':[')[0]}"


def leftovers(before: Sequence[str], patience: float = PATIENCE_S) -> list[str]:
    """What is there now and was not before, once things have had time to go."""
    deadline = time.monotonic() + patience
    while True:
        left = list(snapshot())
        for word in before:
            if word in left:
                left.remove(word)
        if not left or time.monotonic() > deadline:
            return left
        if not gc.collect():  # what only a cycle of garbage holds goes at once, the rest in time
            time.sleep(0.02)


def listening_ports(pid: int | str = "self") -> list[tuple[str, int]]:
    """Addresses on which a process accepts TCP connections over IPv4."""
    sockets = set()
    for fd in os.listdir(f"/proc/{pid}/fd"):
        try:
            sockets.add(os.readlink(f"/proc/{pid}/fd/{fd}"))
        except OSError:  # closed meanwhile, as the one that listed the directory
            continue
    found = []
    for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]:
        words = line.split()
        if words[3] == "0A" and f"socket:[{words[9]}]" in sockets:
            address, _, port = words[1].partition(":")
            found.append((socket.inet_ntoa(bytes.fromhex(address)[::-1]), int(port, 16)))
    return sorted(found)
