"""Main loop of a rank: started by :class:`ranks.ProcessJob`, it executes calls from a pipe until it is ended."""

from __future__ import annotations

import faulthandler
import importlib
import signal
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from unicoll.testing.ranks import die_with_parent, leftovers, snapshot


@dataclass(frozen=True)
class Failure:
    """An exception of a rank: names of its type and base types, message, attributes of a DistError, traceback."""

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
"""The backend with which this rank joins; None for the library's choice."""
DEVICE: int | None = None
"""The ``device_id`` with which this rank joins."""


def use(backend: str, imports: Sequence[str] = ()) -> None:
    """Set the backend of :func:`enter`; modules in ``imports``, which may register it, are imported now."""
    global BACKEND
    BACKEND = backend
    for name in imports:
        importlib.import_module(name)


class Uncaught(Exception):
    """If a function raises it, the rank ends like a program with an uncaught exception."""


_pipe: Connection
_rank, _size, _init = -1, -1, ""
_baseline: list[str] = []
_complaints: list[Callable[[], list[str]]] = []
_pipe_lock = threading.Lock()


def work(descriptor: int, rank: int, size: int, init: str) -> None:
    """Main loop of a rank: execute the calls from the pipe until a call returns the end marker."""
    global _pipe, _rank, _size, _init, _baseline
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    die_with_parent()
    _pipe, _rank, _size, _init = Connection(descriptor), rank, size, init
    import unicoll  # noqa: F401 - descriptors that it opens at import belong to the baseline

    _baseline = snapshot()
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
        with _pipe_lock:
            _pipe.send(("done", value, failure, time.monotonic()))
        if value == _END:
            return


_END = "this rank ends now"


def end() -> str:
    """End this rank's interpreter; does not leave the job."""
    return _END


def rank_and_size() -> tuple[int, int]:
    return _rank, _size


def set_baseline(complaints: Callable[[], list[str]]) -> None:
    """Take the snapshot for leak detection again, and add a function that reports further leaks after :func:`leave`."""
    global _baseline
    _baseline = snapshot()
    _complaints.append(complaints)


def send_note(note: Any) -> None:
    """Send a note to the test (see :meth:`ranks.ProcessJob.await_note`)."""
    with _pipe_lock:
        _pipe.send(("note", note))


def enter(timeout: float = 60.0) -> None:
    import unicoll as dist

    if _init == "env":
        dist.init_process_group(BACKEND, timeout=timeout, device_id=DEVICE)
    else:
        dist.init_process_group(
            BACKEND, _init, timeout=timeout, rank=_rank, world_size=_size, device_id=DEVICE
        )


def leave() -> list[str]:
    """Leave the job; returns leaked threads and descriptors, and other complaints."""
    import unicoll as dist

    if dist.is_initialized():
        dist.destroy_process_group()
    left = leftovers(_baseline)
    return left + [text for complaints in _complaints for text in complaints()]
