"""What the ranks of test_algorithm_faults.py do."""

from __future__ import annotations

import copy
import os
import sys
import threading
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any, NamedTuple

import numpy as np

import unicoll as dist
from tests.gloo.symmetric_jobs import Parts, read_from
from tests.support.calls import invoke

SMALL = 4
LARGE = 400_000
"""Elements of an array that no algorithm moves in one step."""
_AGREEMENTS = {"agree", "agree_on_counts", "exchange_checked", "sync_step", "sync_step_checked"}
"""Functions that compare the ranks' calls at the beginning of a collective."""


class Algorithm(NamedTuple):
    """An algorithm, and what makes a group use it.

    Attributes:
        module: where its code is; a prefix of the names of its modules.
        operations: that use it.
        count: float32 elements of each array.
        size: number of ranks.
        env: environment variables.
        options: of the group.
        arrays: "symmetric": in symmetric memory; "read": other ranks read them from the process's memory.
        background: True if another thread than the caller's executes the operation.
    """

    module: str
    operations: tuple[str, ...]
    count: int = SMALL
    size: int = 3
    env: Mapping[str, str] = {}
    options: Mapping[str, Any] = {}
    arrays: str = ""
    background: bool = False


class SelfSignal:
    """A profile function that sends this process a signal in the middle of an algorithm.

    It counts events (calls and returns of functions in Python and C) while a function of the algorithm's module runs;
    in collectives of large arrays, only after the comparison of the ranks' calls.

    Args:
        algorithm: the algorithm.
        number: the signal.
        moment: the fraction of the previous call's events after which the signal is sent.
    """

    def __init__(self, algorithm: Algorithm, number: int, moment: float) -> None:
        self._module, self._number, self._moment = algorithm.module, number, moment
        self._agrees = algorithm.count > SMALL and algorithm.operations != ("send and recv",)
        self._local = threading.local()
        self.previous = self._events = 0
        self.armed = False

    def begin(self) -> None:
        """Begin to count the events of a call."""
        self.previous, self._events = self._events, 0
        self._agreed = not self._agrees

    def __call__(self, frame: FrameType, event: str, arg: object) -> None:
        if event == "return" and frame.f_code.co_name in _AGREEMENTS:
            self._agreed = True
        depth = getattr(self._local, "depth", 0)
        if event in ("call", "return") and frame.f_globals.get("__name__", "").startswith(self._module):
            depth = self._local.depth = depth + (1 if event == "call" else -1)
        if depth and self._agreed:
            self._events += 1
            if self.armed and self._events > self._moment * self.previous:
                os.kill(os.getpid(), self._number)


_call: Callable[..., None]
_signal: SelfSignal | None = None


def prepare(
    algorithm: Algorithm, name: str, root: int, victim: int = -1, number: int = 0, moment: float = 0.0
) -> int:
    """Make two calls; rank ``victim`` returns the number of the second one's events that :class:`SelfSignal` counts."""
    global _call, _signal
    if dist.get_rank() == victim:
        _signal = SelfSignal(algorithm, number, moment)
        _signal.begin()
        threading.setprofile(_signal)  # of the group's threads, which have not been started
        sys.setprofile(_signal)
    timeout = 1.5 if name == "symmetric_empty" else None  # which has none of its own
    group: Any = dist.new_group(timeout=timeout, pg_options=dict(algorithm.options) or None)
    make: Any = np.ones
    if algorithm.arrays == "read":
        read_from(1, group)
    if algorithm.arrays == "symmetric":
        make = Parts(4, 4 * 3 * algorithm.size * (algorithm.count + 16), group)

    def call(timeout: float, name: str = name, more: int = 0) -> None:
        if name == "first collective":
            dist.barrier(dist.new_group(timeout=timeout))
        elif name == "symmetric_empty":
            group.symmetric_empty(1000)
        else:
            work = invoke(
                name,
                group,
                count=algorithm.count + more,
                root=root,
                timeout=timeout,
                async_op=algorithm.background,
                make=copy.copy(make),
            )
            if algorithm.background:
                work.wait(60)  # without a timeout the caller may execute the operation

    _call = call
    for _ in range(2):
        if _signal is not None:
            _signal.begin()
        if (
            name == "send and recv"
        ):  # else a message can come before its call, in which nothing is then left to count
            dist.barrier()
        call(30)
    return _signal._events if _signal is not None else 0


def repeat(timeout: float) -> None:
    """Make calls until one fails; the victim gets the signal in one of them."""
    if _signal is not None:
        _signal.armed = True
    while True:
        if _signal is not None:
            _signal.begin()
        _call(timeout)


def differ(odd: int, name: str, more: int) -> None:
    """Make a call that is another operation, or one of ``more`` elements, on one rank."""
    if dist.get_rank() == odd:
        _call(10, name, more)
    else:
        _call(10)
