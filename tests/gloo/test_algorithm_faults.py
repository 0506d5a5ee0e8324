"""A rank that is killed or stopped within an algorithm of the CPU backend, or makes another call, is named by all."""

from __future__ import annotations

import copy
import os
import random
import re
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import numpy as np
import pytest

import unicoll as dist
from gloo_fallback.transport.selection import OPERATIONS
from tests.gloo.symmetric_jobs import Parts, read_from
from tests.gloo.test_symmetric import READING
from tests.support.calls import COLLECTIVES, invoke
from tests.support.outcomes import failures_of, leave_cleanly
from tests.support.ranks import joined

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


# --- tests ------------------------------------------------------------------------------------------

ALL = tuple(OPERATIONS)
MOVING = tuple(name for name in ALL if name != "barrier")
GATHERING = ("all_gather", "all_gather_into_tensor")
TO_ALL = ("broadcast", "all_reduce", *GATHERING)
SCATTERED = ("reduce_scatter", "reduce_scatter_tensor")
DIRECT = ("gather", "scatter", "all_to_all", "all_to_all_single")
MESSAGES = ("send and recv",)

TCP = {"UNICOLL_TRANSPORT": "tcp"}
HOSTS = {"UNICOLL_TRANSPORT": "hierarchical"}
SLOTS = {"UNICOLL_TRANSPORT": "shm", "UNICOLL_PEER_MEMORY": "off"}
WEAK = {**SLOTS, "UNICOLL_MEMORY_ORDER": "weak"}
CODE = "gloo_fallback.algorithms."
ALGORITHMS = {
    "slots small": Algorithm(CODE + "shared_memory", ALL, env=SLOTS),
    "slots large": Algorithm(CODE + "shared_memory", MOVING, LARGE, env=SLOTS),
    "semaphores small": Algorithm("gloo_fallback.shm.slots", ALL, env=WEAK),
    "semaphores large": Algorithm("gloo_fallback.shm.slots", MOVING, LARGE, env=WEAK),
    "slots in the background": Algorithm("gloo_fallback.shm.slots", ALL, env=SLOTS, background=True),
    "symmetric": Algorithm(CODE + "peer_memory", MOVING, LARGE, arrays="symmetric"),
    "peer memory": Algorithm(CODE + "peer_memory", tuple(READING), LARGE, arrays="read"),
    "exchange": Algorithm(CODE + "over_sockets", ALL, env=TCP),
    "circulant": Algorithm(CODE + "circulant", (*GATHERING, "all_reduce", *SCATTERED), 10_000, env=TCP),
    "tree": Algorithm(CODE + "over_sockets", ("broadcast",), 20_000, env=TCP),
    "rings": Algorithm(CODE + "rings", (*TO_ALL, "reduce", *SCATTERED, "scan", "exscan"), LARGE, env=TCP),
    "pair": Algorithm(CODE + "rings", ("all_reduce", *SCATTERED), LARGE, 2, env=TCP),
    "messages of a collective": Algorithm(CODE + "over_sockets", DIRECT, LARGE, env=TCP),
    "deterministic": Algorithm(
        CODE + "over_sockets",
        ("all_reduce", "reduce", *SCATTERED),
        LARGE,
        env=TCP,
        options={"deterministic": True},
    ),
    "compressed": Algorithm(
        CODE + "compressed", ("all_reduce",), LARGE, env=TCP, options={"compression": "int8"}
    ),
    "striped": Algorithm(
        "gloo_fallback.transport.striping", MOVING, LARGE, env={**TCP, "UNICOLL_SOCKET_CONNECTIONS": "3"}
    ),
    "rings in the background": Algorithm(
        "gloo_fallback.transport.connections", MOVING, LARGE, env=TCP, background=True
    ),
    "hosts small": Algorithm(CODE + "hierarchical", ALL, env=HOSTS),
    "hosts large": Algorithm(CODE + "hierarchical", MOVING, LARGE, env=HOSTS),
    "hosts symmetric": Algorithm(CODE + "hierarchical", TO_ALL, LARGE, env=HOSTS, arrays="symmetric"),
    "hosts compressed": Algorithm(
        CODE + "hierarchical", ("all_reduce",), LARGE, env=HOSTS, options={"compression": "bfloat16"}
    ),
    "ring buffer small": Algorithm("gloo_fallback.shm.ring_buffer", MESSAGES, size=2),
    "ring buffer large": Algorithm("gloo_fallback.shm.ring_buffer", MESSAGES, LARGE, 2),
    "messages small": Algorithm("gloo_fallback.p2p.sender", MESSAGES, size=2, env=TCP),
    "messages large": Algorithm("gloo_fallback.p2p.receiver", MESSAGES, LARGE, 2, env=TCP),
    "topology": Algorithm("gloo_fallback.transport.topology", ("first collective",)),
    "topology of hosts": Algorithm("gloo_fallback.transport.topology", ("first collective",), env=HOSTS),
    "allocation": Algorithm("gloo_fallback.shm.symmetric_segments", ("symmetric_empty",)),
}
SIGNALS = {"killed": signal.SIGKILL, "stopped": signal.SIGSTOP}


def cases(*kinds: str) -> list[tuple[str, str]]:
    """Each algorithm with each of its operations, of each kind."""
    return [
        (key, f"{name} {kind}")
        for key, one in ALGORITHMS.items()
        for name in one.operations
        for kind in kinds
    ]


def can_differ(case: str) -> bool:
    return case.split()[0] in COLLECTIVES and case != "barrier size"


@pytest.mark.every(n=16)
@pytest.mark.sampled("key", "case", 1)
@pytest.mark.parametrize(("key", "case"), cases(*SIGNALS))
def test_a_rank_killed_or_stopped_in_the_middle_is_named(key: str, case: str, seed: int) -> None:
    algorithm, rng = ALGORITHMS[key], random.Random(f"{seed} {key} {case}")
    name, _, kind = case.rpartition(" ")
    number, kills = SIGNALS[kind], kind == "killed"
    victim, root, moment = rng.randrange(algorithm.size), rng.randrange(algorithm.size), rng.random()
    others = [r for r in range(algorithm.size) if r != victim]
    env = {"UNICOLL_CHANNEL": rng.choice(["plain", "mac", "tls"]), **algorithm.env}
    print(f"rank {victim}, root {root}, {env['UNICOLL_CHANNEL']}, moment {moment:.3f}")
    with joined(algorithm.size, env=env) as job:
        job.call(prepare, algorithm, name, root, victim, number, moment)
        assert job.results()[victim] > 0, "the algorithm has not run"
        job.call(repeat, 20.0 if kills else 1.5)
        kind, words = (
            "RankLostError" if kills else "OperationTimeoutError",
            (f"rank {victim} ", f"pid {job.pids[victim]}"),
        )
        for failure in failures_of(job, others, kind, *words):
            print(failure.message)
            if kills:
                assert (failure.fields["rank"], failure.fields["pid"]) == (victim, job.pids[victim])
                assert failure.fields["op"] == name or name not in COLLECTIVES
        if kills:
            assert job.wait_for_exit(ranks=[victim]) == [-number]
        else:
            assert Path(f"/proc/{job.pids[victim]}/stat").read_text().rpartition(") ")[2][0] == "T"
        leave_cleanly(job, others)


@pytest.mark.every(n=6)
@pytest.mark.sampled("key", "case", 1)
@pytest.mark.parametrize(
    ("key", "case"), [case for case in cases("operation", "size") if can_differ(case[1])]
)
def test_another_call_on_one_rank_is_named(key: str, case: str, seed: int) -> None:
    algorithm, rng = ALGORITHMS[key], random.Random(f"{seed} {key} {case}")
    name, kind = case.split()
    odd, root = rng.randrange(algorithm.size), rng.randrange(algorithm.size)
    other = name if kind == "size" else rng.choice([other for other in ALL if other != name])
    print(f"rank {odd}, root {root}, {other}")
    with joined(algorithm.size, env=dict(algorithm.env)) as job:
        job.call(prepare, algorithm, name, root)
        job.results()
        job.call(differ, odd, other, int(kind == "size"))
        everyone = range(algorithm.size)
        (text,) = {failure.message for failure in failures_of(job, everyone, "CollectiveMismatchError")}
        print(text)
        # where ranks may have different sizes, the error has the first pair whose sizes do not fit each other
        assert re.search(
            rf"rank {odd}\b" if kind == "size" and name in DIRECT else rf"rank {odd}: {other}\(", text
        )
        leave_cleanly(job, everyone)
