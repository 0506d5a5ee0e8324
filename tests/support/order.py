"""The order of events on several ranks: what a rank does next waits for an event on another one, not for a time."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import unicoll as dist
from unicoll.group.recorded_calls import recorded_calls

__all__ = ["await_true", "await_word", "in_a_call", "named_pipe", "send_word", "tell"]

PATIENCE_S = 60.0


def _world() -> Any:
    return dist.group.WORLD


def send_word(rank: int) -> None:
    """Let one :func:`await_word` of a rank return. It takes no group, so it can be used beside any operation."""
    _world().job.store.queue_push(f"word/{rank}", b"")


def await_word() -> None:
    """Wait for a :func:`send_word` to this rank."""
    _world().job.store.queue_pop(f"word/{dist.get_rank()}")


def await_true(condition: Callable[[], object]) -> None:
    """Wait for a condition."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def in_a_call() -> bool:
    """True if a thread of this process is in a call."""
    return any(call.state == "started" for call in recorded_calls())


def named_pipe(folder: Path) -> str:
    """A named pipe; a rank that reads from it waits until the test calls :func:`tell`."""
    path = str(folder / "told")
    os.mkfifo(path)
    return path


def tell(path: str) -> None:
    """Let the rank that reads from a named pipe go on."""
    os.close(os.open(path, os.O_WRONLY | os.O_NONBLOCK))
