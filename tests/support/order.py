"""The order of events on several ranks: what a rank does next waits for an event on another one, not for a time."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import unicoll as dist
from unicoll.diagnosis.recorder_contents import recorded_calls

__all__ = [
    "await_true",
    "await_word",
    "deadline_in",
    "named_pipe",
    "reading",
    "send_word",
    "send_word_in_call",
]

PATIENCE_S = 180.0


def _world() -> Any:
    return dist.group.WORLD


def send_word(rank: int) -> None:
    """Let one :func:`await_word` of a rank return. It takes no group, so it can be used beside any operation."""
    _world().job.store.queue_push(f"word/{rank}", b"")


def await_word() -> None:
    """Wait for a :func:`send_word` to this rank."""
    _world().job.store.queue_pop(f"word/{dist.get_rank()}")


def send_word_in_call(rank: int) -> threading.Thread:
    """A thread that does :func:`send_word` once this rank is in its next blocking call; join it after the call."""

    def run() -> None:
        await_true(lambda: any(call.blocking and call.state == "started" for call in recorded_calls()))
        send_word(rank)

    thread = threading.Thread(target=run)
    thread.start()
    return thread


def await_true(condition: Callable[[], object]) -> None:
    """Wait for a condition."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def deadline_in(seconds: float = 20.0) -> float:
    """A time of time.monotonic for calls that take a deadline."""
    return time.monotonic() + seconds


def named_pipe(folder: Path) -> str:
    """A named pipe; a rank that reads from it waits for the end of a :func:`reading`."""
    path = str(folder / "told")
    os.mkfifo(path)
    return path


@contextmanager
def reading(path: str) -> Iterator[None]:
    """Wait until a rank reads from a named pipe; it goes on at the end of the block."""
    opened: list[int] = []

    def is_read() -> bool:
        try:
            opened.append(os.open(path, os.O_WRONLY | os.O_NONBLOCK))
        except OSError as error:
            if error.errno != errno.ENXIO:  # no process has opened it for reading
                raise
        return bool(opened)

    await_true(is_read)
    try:
        yield
    finally:
        os.close(opened[0])
