"""Functions that ranks run in the tests of the flight recorder's dumps."""

from __future__ import annotations

import faulthandler
import os
import signal
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

import unicoll as dist
from tests.support.outcomes import failure_of
from tests.support.worker import enter, rank_and_size, send_note
from unicoll.calls import flight_recorder
from unicoll.group import dispatcher
from unicoll.net.control import clock

PATIENCE_S = 30.0


def _await_file(path: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not os.path.exists(path):
        assert time.monotonic() < deadline, f"{path} was not written"
        time.sleep(0.01)


def _error(call: Callable[[], Any]) -> str:
    """The type of a call's error, or ""."""
    failure = failure_of(call)
    return "" if failure is None else failure.type


def some_calls(directory: str) -> str:
    """Collectives and a message, all completed; then the dump."""
    me = dist.get_rank()
    x = np.ones(4, np.float32)
    pair = dist.new_group([0, 1])
    dist.all_reduce(x)
    dist.broadcast(x, 1)
    dist.all_gather([np.empty_like(x) for _ in range(dist.get_world_size())], x)
    dist.all_reduce_coalesced([x, x[:2].copy()])
    dist.all_to_all_single(np.empty(dist.get_world_size() * 2), np.ones(dist.get_world_size() * 2))
    dist.scan(x)
    if me < 2:
        dist.barrier(group=pair)
    if me == 0:
        dist.send(x, 1, tag=5)
    elif me == 1:
        dist.recv(x, 0, tag=5)
    if me == 0:
        dist.recv(np.empty(1), 1)
    elif me == 1:
        dist.send(np.empty(1), 0)
    dist.barrier()
    path = dist.dump_flight_recorder(directory)
    dist.barrier()
    return path


def refused_directories(file: str) -> list[str]:
    """Dumps into directories that cannot be written."""
    failures = [failure_of(partial(dist.dump_flight_recorder, path)) for path in (file, f"{file}/below")]
    return [f"{failure.type}: {failure.message}" for failure in failures if failure is not None]


def enter_with_signal() -> bool:
    """Join in a process without a handler of SIGUSR1; True if it has one then."""
    faulthandler.unregister(signal.SIGUSR1)
    signal.signal(signal.SIGUSR1, signal.SIG_DFL)
    enter()
    return signal.getsignal(signal.SIGUSR1) is not signal.SIG_DFL


def enter_in(directory: str) -> None:
    """Join in a working directory, then change it."""
    os.chdir(directory)
    enter()
    os.chdir("/")


def _own_handler(number: int, frame: Any) -> None:
    pass


def enter_with_own_handler() -> bool:
    """Join in a process that handles SIGUSR1; True if its handler stays."""
    signal.signal(signal.SIGUSR1, _own_handler)
    enter()
    return signal.getsignal(signal.SIGUSR1) is _own_handler


def leave_and_look() -> bool:
    """Leave; True if SIGUSR1 has its default action again."""
    dist.destroy_process_group()
    return signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL


def blocked_when_signalled(go: str) -> float:
    """Rank 0 blocks in an all_reduce, which the others call once a file is there."""
    x = np.ones(3)
    if dist.get_rank() == 0:
        send_note(os.getpid())
    else:
        _await_file(go)
    dist.all_reduce(x)
    return float(x[0])


def one_is_missing(directory: str) -> str:
    """The last rank does not call an all_reduce, in which the others time out; returns the error's type."""
    me, n = dist.get_rank(), dist.get_world_size()
    x = np.ones(4, np.float32)
    dist.all_reduce(x)
    if me == n - 1:
        _await_file(os.path.join(directory, f"rank_{me}.json"))
        return ""
    return _error(lambda: dist.all_reduce(x, timeout=1.0))


def one_calls_another() -> str:
    """The last rank calls another operation; returns the error's type."""
    x = np.ones(4, np.float32)
    dist.all_reduce(x)
    is_last = dist.get_rank() == dist.get_world_size() - 1
    return _error(lambda: dist.broadcast(x, 0) if is_last else dist.all_reduce(x))


def one_dies() -> str:
    """The last rank's process ends; returns the error's type."""
    x = np.ones(4, np.float32)
    dist.all_reduce(x)
    if dist.get_rank() == dist.get_world_size() - 1:
        os._exit(7)
    return _error(lambda: dist.all_reduce(x))


def enter_with_wrong_clock(rank: int, seconds: float) -> None:
    """Join; the clock of a rank is ahead by so many seconds."""
    if rank_and_size()[0] == rank:

        def shifted() -> float:
            return time.monotonic() + seconds

        clock.now = shifted
        flight_recorder.monotonic = dispatcher.monotonic = shifted
    enter()


def dump_of_barriers(directory: str) -> None:
    for _ in range(5):
        dist.barrier()
        time.sleep(0.05)
    dist.dump_flight_recorder(directory)
    dist.barrier()


def pair_fails(directory: str) -> list[str]:
    """Rank 0 times out in two groups with rank 1, which waits for rank 2, which is in neither; the errors' types."""
    groups = [dist.new_group([0, 1]) for _ in range(2)]
    found = []
    if dist.get_rank() == 0:
        found = [_error(partial(dist.all_reduce, np.ones(4), group=group, timeout=1.0)) for group in groups]
    elif dist.get_rank() == 2:
        _await_file(os.path.join(directory, "rank_2.json"))
    dist.barrier()
    return found


def pair_differs() -> list[str]:
    """Ranks 0 and 1 make different calls in a group of their own; the error's type."""
    group = dist.new_group([0, 1])
    calls = [lambda: dist.all_reduce(np.ones(4), group=group), lambda: dist.barrier(group)]
    found = [_error(call) for call in calls[dist.get_rank() : dist.get_rank() + 1]]
    dist.barrier()
    return found
