"""What the ranks of :mod:`test_interrupts` do: one rank gets an exception at a point of a call, and all go on."""

from __future__ import annotations

import logging
import random
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from types import FrameType
from typing import Any, NamedTuple

import numpy as np
import pytest

import unicoll as dist
from tests.conformance.p2p_jobs import must
from tests.support.interrupts import Interrupt, Point, Points, describe
from tests.support.order import await_true
from unicoll.backend.thread_activity import entries
from unicoll.backend.work import HostCompletion

Step = tuple[Callable[[], Any], Callable[[], None]]
"""A call, and the check of its result."""
Operation = Callable[[Any, int], "Step | None"]
"""Makes the call number k of this rank on a group; None for a rank that makes none."""

VICTIM = 0
"""The rank that is interrupted."""
TIMEOUT_S = 10.0
SLOW_S = 2.0
"""A trial that takes longer waited for a timeout."""
_CALLS = 3
"""Calls that each rank makes after the one that is interrupted."""
SMALL, LARGE = 1, 400_000
"""Elements: of a call in one step, and of one in chunks."""


def me(group: Any) -> int:
    return int(group.rank())


def _value(rank: int, k: int) -> float:
    return 1000.0 * k + rank


def _equals(x: Any, value: float) -> Callable[[], None]:
    def check() -> None:
        assert (x == value).all(), f"{np.unique(x)[:4]} in place of {value}"

    return check


class Library(NamedTuple):
    """Whose functions are called.

    Attributes:
        dist: its module, unicoll or torch.distributed.
        array: what its functions take for an array, of the same memory.
        group: the unicoll group of its group.
        outside: directories of code that is not unicoll's.
    """

    dist: Any
    array: Callable[[Any], Any]
    group: Callable[[Any], Any]
    outside: tuple[str, ...] = ()


def all_reduce(of: Library, count: int, async_op: bool = False) -> Operation:
    def step(group: Any, k: int) -> Step:
        x = np.full(count, _value(me(group), k))
        array = of.array(x)

        def call() -> None:
            work = of.dist.all_reduce(array, group=group, async_op=async_op)
            if work is not None:
                work.wait()

        return call, _equals(x, sum(_value(r, k) for r in range(group.size())))

    return step


def all_gather(of: Library) -> Operation:
    """Of uneven sizes."""

    def step(group: Any, k: int) -> Step:
        sizes = [10 + 70_000 * r for r in range(group.size())]
        x, found = np.full(sizes[me(group)], _value(me(group), k)), [np.zeros(size) for size in sizes]
        array, arrays = of.array(x), [*map(of.array, found)]

        def check() -> None:
            for rank, each in enumerate(found):
                _equals(each, _value(rank, k))()

        return lambda: of.dist.all_gather(arrays, array, group=group), check

    return step


def objects(of: Library) -> Operation:
    def step(group: Any, k: int) -> Step:
        found: list[Any] = [None] * group.size()

        def check() -> None:
            assert found == [(k, rank) for rank in range(group.size())], found

        return lambda: of.dist.all_gather_object(found, (k, me(group)), group=group), check

    return step


def barrier(of: Library) -> Operation:
    return lambda group, k: (lambda: of.dist.barrier(group=group), _nothing)


def _nothing() -> None:
    pass


def send(of: Library, count: int, sender: int, posted: bool = False) -> Operation:
    """Messages of one rank to the next; with ``posted`` by isend and irecv."""
    arrays: dict[Any, list[tuple[Any, Any]]] = {}
    last: dict[Any, int] = {}

    def step(group: Any, k: int) -> Step | None:
        receiver = (sender + 1) % 2
        if me(group) == sender:
            x = of.array(np.full(count, float(k)))
            if posted:
                return lambda: must(of.dist.isend(x, receiver, group=group)).wait(), _nothing
            return lambda: of.dist.send(x, receiver, group=group), _nothing
        if me(group) != receiver:
            return None
        y = np.zeros(count)
        array = of.array(y)
        received = arrays.setdefault(group, [])

        def call() -> None:
            if not posted:
                of.dist.recv(array, sender, group=group)
                received.append((None, y))
                return
            work = must(of.dist.irecv(array, sender, group=group))
            received.append((work, y))
            work.wait()

        def check() -> None:
            """No message is lost, also none that an interrupted wait was for; an interrupted receive consumed none."""
            while received:
                work, each = received.pop(0)
                if work is not None:
                    work.wait()
                expected = last.get(group, -1) + 1
                assert (each == each[0]).all(), f"a mixture of messages: {np.unique(each)[:4]}"
                assert each[0] == expected, f"message {each[0]:g} in place of {expected}"
                last[group] = expected

        return call, check

    return step


def received_objects(of: Library) -> Operation:
    """Lists of objects from rank 1, each a header and a body. An interrupted receive has consumed both or none."""
    last: dict[Any, int] = {}

    def step(group: Any, k: int) -> Step | None:
        if me(group) == 1:
            return lambda: of.dist.send_object_list([k, bytes(20_000)], 0, group=group), _nothing
        if me(group) != VICTIM:
            return None
        found: list[Any] = [None, None]

        def check() -> None:
            expected = last.get(group, -1) + 1
            assert found == [expected, bytes(20_000)], f"{found[0]} in place of {expected}"
            last[group] = expected

        return lambda: of.dist.recv_object_list(found, 1, group=group), check

    return step


def batch(of: Library) -> Operation:
    """Messages in a ring, to the next rank from the one before."""

    def step(group: Any, k: int) -> Step:
        rank, size = me(group), group.size()
        x, y = np.full(5, _value(rank, k)), np.zeros(5)
        before = (rank - 1) % size

        messages = [
            of.dist.P2POp(of.dist.isend, of.array(x), (rank + 1) % size, group),
            of.dist.P2POp(of.dist.irecv, of.array(y), before, group),
        ]

        def call() -> None:
            for work in of.dist.batch_isend_irecv(messages):
                work.wait()

        return call, _equals(y, _value(before, k))

    return step


def operations(of: Library) -> dict[str, Operation]:
    return {
        "all_reduce": all_reduce(of, SMALL),
        "all_reduce large": all_reduce(of, LARGE),
        "all_reduce async": all_reduce(of, SMALL, True),
        "all_gather": all_gather(of),
        "all_gather_object": objects(of),
        "barrier": barrier(of),
        "send": send(of, 8, VICTIM),
        "send large": send(of, LARGE, VICTIM),
        "recv": send(of, 8, 1),
        "recv large": send(of, LARGE, 1),
        "isend": send(of, 8, VICTIM, True),
        "irecv": send(of, 8, 1, True),
        "irecv large": send(of, LARGE, 1, True),
        "batch": batch(of),
        "recv_object_list": received_objects(of),
    }


UNICOLL = Library(dist, lambda x: x, lambda group: group)
OPERATIONS = operations(UNICOLL)


def _do(step: Step | None) -> str:
    """Make a call and check its result; returns the type of the error that it raises."""
    if step is None:
        return ""
    try:
        step[0]()
    except dist.DistError as e:
        return type(e).__name__
    step[1]()
    return ""


def _has_failed(group: Any) -> bool:
    return group.job.control.group_failure(group.name) is not None


def _trial(
    operation: Operation,
    of: Library,
    interrupted: Callable[[Callable[[], Any]], None],
    goes_on: bool = True,
    warm: bool = True,
    late_s: float = 0.0,
) -> str:
    """Make calls on a new group, one of rank :data:`VICTIM` by ``interrupted``; returns what was wrong.

    With ``late_s`` the other ranks make that call later.
    """
    group, wrong = of.dist.new_group(timeout=timedelta(seconds=TIMEOUT_S)), ""
    began = time.monotonic()
    first, results = int(warm), []
    try:
        if warm:
            results.append(_do(operation(group, 0)))
        time.sleep(late_s)
        for k in range(first, first + 1 + _CALLS):
            step = operation(group, k)
            if me(group) == VICTIM and k == first and step is not None:
                call, check = step
                step = (lambda: interrupted(call), check)  # noqa: B023
            try:
                results.append(_do(step))
            except (Interrupt, KeyboardInterrupt) as e:
                results.append(type(e).__name__)
                if not goes_on and _has_failed(of.group(group)):
                    break
    except BaseException as e:
        wrong = f"{type(e).__name__}: {e}"
    took = time.monotonic() - began
    if took > SLOW_S:
        wrong += f" took {took:.1f} s"
    of.dist.destroy_process_group(group)
    return wrong and f"{wrong} {results}"


def prepare() -> None:
    logging.getLogger("unicoll").setLevel(logging.CRITICAL + 1)
    warnings.simplefilter("ignore", ResourceWarning)  # a Work that an exception has kept from the caller


def trials(
    name: str,
    goes_on: bool = True,
    warm: bool = True,
    every: int = 1,
    first: int = 0,
    of: Library = UNICOLL,
) -> tuple[int, int, list[str]]:
    """Interrupt a call at each of its points, or at every nth of them.

    Args:
        name: of the operation.
        goes_on: False: if the group has failed, the interrupted rank leaves it, and makes no more calls. (If it can be
            used, the others wait for those until their timeout, whatever the reason for which a program leaves.)
        warm: False: the call is the group's first.
        every, first: which points.
        of: whose functions.

    Returns:
        The number of points, of trials, and what was wrong on this rank.
    """
    prepare()
    operation = operations(of)[name]
    seen: dict[Point, None] = {}

    def interrupted(call: Callable[[], Any]) -> None:
        with Points(point, of.outside) as points:
            call()
        if point is None:
            seen.update(dict.fromkeys(points.seen))

    point: Point | None = None
    for _ in range(3):  # what depends on time may differ
        wrong = _trial(operation, of, interrupted, True, warm)
        assert not wrong, wrong
    chosen = [[*seen]]
    dist.broadcast_object_list(chosen, VICTIM)
    tried, found = chosen[0][first % every :: every], []
    for point in tried:
        dist.barrier()
        wrong = _trial(operation, of, interrupted, goes_on, warm)
        if wrong:
            found.append(f"{name}: rank {dist.get_rank()}: {describe(point)}: {wrong}")
    return len(chosen[0]), len(tried), found


class Strikes:
    """Sends this process a SIGINT at a random time of a call, where Python's own handler raises KeyboardInterrupt.

    A signal that comes before or after the call is ignored: when the innermost frame is a test's, or at the beginning
    of a function that a test calls, as in :class:`Points`.

    Attributes:
        count: calls that were interrupted.
    """

    def __init__(self, seed: int, outside: Sequence[str] = ()) -> None:
        self.count = 0
        self._rng = random.Random(seed)
        self._points = Points(outside=outside)
        self._in_call = False

    def __enter__(self) -> Strikes:
        self._handler = signal.signal(signal.SIGINT, self._ring)
        self._hook, sys.unraisablehook = sys.unraisablehook, self._unraisable
        return self

    def __exit__(self, *_: object) -> None:
        sys.unraisablehook = self._hook
        signal.signal(signal.SIGINT, self._handler)

    def _unraisable(self, unraisable: Any) -> None:
        """The exception was raised in a finalizer, where CPython drops it."""
        if not isinstance(unraisable.exc_value, KeyboardInterrupt):
            self._hook(unraisable)

    def _ring(self, number: int, frame: FrameType | None) -> None:
        if self._in_call and self._points.is_within(frame):
            self._in_call = False
            self.count += 1
            signal.default_int_handler(number, frame)

    def interrupted(self, call: Callable[[], Any]) -> None:
        """Make a call with a signal in it, or soon after it."""
        delay = self._rng.choice((1e-4, 1e-3, 5e-3)) * self._rng.random()
        arguments = delay, threading.get_ident()
        sender = threading.Thread(target=_send_later, args=arguments)
        sender.start()
        try:
            self._in_call = True
            call()
        finally:
            self._in_call = False
            sender.join()


def _send_later(delay: float, thread: int) -> None:
    time.sleep(delay)
    signal.pthread_kill(thread, signal.SIGINT)


@contextmanager
def struck_while_waiting() -> Iterator[None]:
    """Context in which this thread gets KeyboardInterrupt once it waits for an operation."""
    thread = threading.get_ident()

    def strike() -> None:
        await_true(lambda: any(e[0] == thread and isinstance(e[1], HostCompletion) for e in [*entries]))
        signal.pthread_kill(thread, signal.SIGINT)

    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    striking = threading.Thread(target=strike)
    striking.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            yield
    finally:
        striking.join()
        signal.signal(signal.SIGINT, handler)


def strikes(count: int, seed: int) -> tuple[int, list[str]]:
    """Interrupt calls at random times; returns the number that were, and what was wrong on this rank."""
    prepare()
    rng, found = random.Random(seed), []
    with Strikes(seed) as struck:
        for trial in range(count):
            name = rng.choice([*OPERATIONS])
            operation, late_s = OPERATIONS[name], 5e-3 * rng.random()
            dist.barrier()
            wrong = _trial(
                operation, UNICOLL, struck.interrupted, late_s=late_s * (dist.get_rank() != VICTIM)
            )
            if wrong:
                found.append(f"{name}: rank {dist.get_rank()}: trial {trial}: {wrong}")
    return struck.count, found
