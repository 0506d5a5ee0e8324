"""What the ranks of :mod:`test_interrupts` do: one rank gets an exception at a point of a call, and all go on."""

from __future__ import annotations

import gc
import logging
import os
import random
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from datetime import timedelta
from types import FrameType
from typing import Any

import numpy as np
import pytest

import unicoll as dist
from tests.conformance.p2p_jobs import must
from tests.support.interrupts import Interrupt, Point, Points, describe
from tests.support.order import await_true
from unicoll.calls.thread_activity import entries
from unicoll.calls.work import HostCompletion

Step = tuple[Callable[[], Any], Callable[[], None]]
"""A call, and the check of its result."""
Operation = Callable[[Any, int], "Step | None"]
"""Makes the call number k of this rank on a group; None for a rank that makes none."""

VICTIM = 0
"""The rank that is interrupted."""
TRIALS_S = 3600.0
"""Seconds for all trials of an operation, of which the functions that make groups have 500, each half a second."""
TIMEOUT_S = 30.0
"""No call needs it: it is wrong if one ends by it."""
_CALLS = 3
"""Calls that each rank makes after the one that is interrupted."""
SMALL, LARGE = 1, 400_000
"""Elements: of a call in one step, and of one in chunks."""


def me(group: Any) -> int:
    return int(group.rank())


def _value(rank: int, k: int) -> float:
    return 1000.0 * k + rank


class Library:
    """The functions that are called, and their arrays: unicoll's and NumPy's. Others are subclasses."""

    dist: Any = dist
    """The module."""
    outside: tuple[str, ...] = ()
    """Directories of code that is not unicoll's."""

    def full(self, shape: int | tuple[int, int], value: float) -> Any:
        """A new array."""
        return np.full(shape, value)

    def values(self, x: Any) -> Any:
        """The elements of an array."""
        return x

    def group(self, group: Any) -> Any:
        """The unicoll group of a group."""
        return group

    def check(self, group: Any, check: Callable[[], None]) -> str:
        """Check the result of a call; returns the type of an error that the group has by then."""
        check()
        return ""

    def current(self) -> AbstractContextManager[Any]:
        """What a trial is in."""
        return nullcontext()

    def equals(self, x: Any, value: float) -> Callable[[], None]:
        """A check that all elements of an array have a value."""

        def check() -> None:
            found = self.values(x)
            assert (found == value).all(), f"{np.unique(found)[:4]} in place of {value}"

        return check


def all_reduce(of: Library, count: int, async_op: bool = False, strided: bool = False) -> Operation:
    def step(group: Any, k: int) -> Step:
        x = of.full((3, count) if strided else count, _value(me(group), k))
        if strided:
            x = x.T

        def call() -> None:
            work = of.dist.all_reduce(x, group=group, async_op=async_op)
            if work is not None:
                try:
                    work.wait()
                except (Interrupt, KeyboardInterrupt):
                    work.wait()

        return call, of.equals(x, sum(_value(r, k) for r in range(group.size())))

    return step


def future(of: Library) -> Operation:
    """The future of a receive ends, whatever becomes of the thread that has received the message."""

    def step(group: Any, k: int) -> Step | None:
        y = of.full(8, 0.0)
        if me(group) == 1:
            return lambda: of.dist.send(of.full(8, float(k)), VICTIM, group=group), _nothing
        if me(group) != VICTIM:
            return None

        def call() -> None:
            work = must(of.dist.irecv(y, 1, group=group))
            made = work.get_future()
            try:
                work.synchronize()
            finally:
                await_true(made.done)

        return call, _nothing

    return step


def all_gather(of: Library) -> Operation:
    """Of uneven sizes."""

    def step(group: Any, k: int) -> Step:
        sizes = [10 + 70_000 * r for r in range(group.size())]
        x, found = of.full(sizes[me(group)], _value(me(group), k)), [of.full(size, 0.0) for size in sizes]

        def check() -> None:
            for rank, each in enumerate(found):
                of.equals(each, _value(rank, k))()

        return lambda: of.dist.all_gather(found, x, group=group), check

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
            x = of.full(count, float(k))
            if posted:
                return lambda: must(of.dist.isend(x, receiver, group=group)).wait(), _nothing
            return lambda: of.dist.send(x, receiver, group=group), _nothing
        if me(group) != receiver:
            return None
        y = of.full(count, 0.0)
        received = arrays.setdefault(group, [])

        def call() -> None:
            if not posted:
                of.dist.recv(y, sender, group=group)
                received.append((None, y))
                return
            work = must(of.dist.irecv(y, sender, group=group))
            received.append((work, y))
            work.wait()

        def check() -> None:
            """No message is lost, also none that an interrupted wait was for; an interrupted receive consumed none."""
            while received:
                work, array = received.pop(0)
                if work is not None:
                    work.wait()
                each = of.values(array)
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
        x, y = of.full(5, _value(rank, k)), of.full(5, 0.0)
        before = (rank - 1) % size

        messages = [
            of.dist.P2POp(of.dist.isend, x, (rank + 1) % size, group),
            of.dist.P2POp(of.dist.irecv, y, before, group),
        ]

        def call() -> None:
            for work in of.dist.batch_isend_irecv(messages):
                work.wait()

        return call, of.equals(y, _value(before, k))

    return step


def creation(make: Callable[[Any], Callable[[], Any]]) -> Operation:
    """A new group; on the ranks that have made it, its calls work or fail. ``make(group)`` gives the call."""

    def step(group: Any, k: int) -> Step:
        made: list[Any] = []
        x = np.full(1, _value(dist.get_rank(), k))
        call = make(group)

        def check() -> None:
            new = made[0]
            members = new.ranks if isinstance(new, dist.ProcessGroup) else ()
            try:
                if members:
                    dist.all_reduce(x, group=new)
            finally:
                if members:
                    dist.destroy_process_group(new)
            if members:
                UNICOLL.equals(x, sum(_value(r, k) for r in members))()

        return lambda: made.append(call()), check

    return step


def new_group(_: Any) -> Callable[[], Any]:
    return lambda: dist.new_group(timeout=TIMEOUT_S)


def split(group: Any) -> Callable[[], Any]:
    return lambda: dist.split_group(group, [[*range(group.size())]])


def subgroups(group: Any) -> Callable[[], Any]:
    return lambda: dist.new_subgroups(group.size(), timeout=TIMEOUT_S)[0]


def mesh(group: Any) -> Callable[[], Any]:
    """Several groups at once: one of all ranks, and one of each."""
    options = {"mesh_dim_names": ("a", "b"), "backend_override": {"a": "gloo"}}
    return lambda: dist.init_device_mesh("cpu", (group.size(), 1), **options).get_group("a")


def flattened(group: Any) -> Callable[[], Any]:
    whole = dist.init_device_mesh("cpu", (group.size(), 1), mesh_dim_names=("a", "b"))
    return lambda: whole.flatten("both", "gloo").get_group()


def shrink(group: Any) -> Callable[[], Any]:
    """The last rank is excluded, which does not call it."""
    last = group.size() - 1
    return (lambda: None) if me(group) == last else lambda: dist.shrink_group([last], group)


def grow(group: Any) -> Callable[[], Any]:
    """By the last rank."""
    last = group.size() - 1
    smaller = dist.new_group([*range(last)], timeout=TIMEOUT_S)

    return lambda: dist.grow_group([last], smaller, timeout=TIMEOUT_S)


def destroy(_: Any, k: int) -> Step:
    """The end of a group that has been used."""
    made = dist.new_group(timeout=TIMEOUT_S)
    dist.all_reduce(np.full(1, float(k)), group=made)
    return lambda: dist.destroy_process_group(made), _nothing


def symmetric(group: Any, k: int) -> Step:
    """Symmetric memory, and an all_reduce on it."""
    made: list[Any] = []

    def check() -> None:
        made[0][:] = _value(me(group), k)
        dist.all_reduce(made[0], group=group)
        UNICOLL.equals(made[0], sum(_value(r, k) for r in range(group.size())))()

    return lambda: made.append(group.symmetric_empty(1000)), check


def operations(of: Library) -> dict[str, Operation]:
    return {
        "all_reduce": all_reduce(of, SMALL),
        "all_reduce large": all_reduce(of, LARGE),
        "all_reduce async": all_reduce(of, SMALL, True),
        "all_reduce strided": all_reduce(of, 5, strided=True),
        "all_reduce strided async": all_reduce(of, 5, True, True),
        "future": future(of),
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


UNICOLL = Library()
OPERATIONS = operations(UNICOLL)
CREATIONS = {
    "new_group": creation(new_group),
    "split_group": creation(split),
    "new_subgroups": creation(subgroups),
    "init_device_mesh": creation(mesh),
    "flatten": creation(flattened),
    "shrink_group": creation(shrink),
    "grow_group": creation(grow),
}
ON_HOSTS: dict[str, Operation] = {
    **OPERATIONS,
    **CREATIONS,
    "destroy": destroy,
    "symmetric_empty": symmetric,
}
"""With those that depend on no array of the caller."""
_RECEIVES = {name for name in OPERATIONS if name.startswith("recv")}
"""What is made again if it was interrupted: either it has consumed nothing, or it fails like the group."""


def _do(of: Library, group: Any, step: Step | None) -> str:
    """Make a call and check its result; returns the type of the error that it raises."""
    if step is None:
        return ""
    try:
        step[0]()
        return of.check(group, step[1])
    except dist.DistError as e:
        return type(e).__name__


def _has_failed(group: Any) -> bool:
    return group.job.control.group_failure(group.name) is not None


def _trial(
    name: str,
    of: Library,
    interrupted: Callable[[Callable[[], Any]], None],
    goes_on: bool = True,
    warm: bool = True,
    late_s: float = 0.0,
    without_error: bool = False,
) -> str:
    """Make calls on a new group, one of rank :data:`VICTIM` by ``interrupted``; returns what was wrong.

    Args:
        late_s: the other ranks make that call later.
        without_error: True if no call may raise.
    """
    operation = operations(of).get(name) or ON_HOSTS[name]
    group, wrong = of.dist.new_group(timeout=timedelta(seconds=TIMEOUT_S)), ""
    results: list[str] = []
    try:
        with of.current():
            first = int(warm)
            if warm:
                results.append(_do(of, group, operation(group, 0)))
            time.sleep(late_s)
            calls = 1 + _CALLS
            while len(results) < first + calls:
                step = operation(group, len(results))
                if me(group) == VICTIM and len(results) == first and step is not None:
                    call, check = step
                    step = (lambda: interrupted(call), check)  # noqa: B023
                try:
                    results.append(_do(of, group, step))
                except (Interrupt, KeyboardInterrupt) as e:
                    results.append(type(e).__name__)
                    if not goes_on and _has_failed(of.group(group)):
                        break
                    calls += name in _RECEIVES
            results.append(_do(of, group, (lambda: of.dist.destroy_process_group(group), _nothing)))
    except BaseException as e:
        wrong = f"{type(e).__name__}: {e}"
    if {"OperationTimeoutError", "RankLostError"} & {*results}:
        wrong += " a wait without end, or a living rank that is lost"
    if without_error and any(results):
        wrong += " an error without an interrupt"
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
    seen: dict[Point, None] = {}

    def interrupted(call: Callable[[], Any]) -> None:
        with Points(point, of.outside) as points:
            call()
        if point is None:
            seen.update(dict.fromkeys(points.seen))

    point: Point | None = None
    for _ in range(3):  # what depends on time may differ
        wrong = _trial(name, of, interrupted, True, warm, without_error=True)
        assert not wrong, wrong
    chosen = [[*seen]]
    dist.broadcast_object_list(chosen, VICTIM)
    tried, found = chosen[0][first % every :: every], []
    for point in tried:
        dist.barrier()
        wrong = _trial(name, of, interrupted, goes_on, warm)
        if wrong:
            found.append(f"{name}: rank {dist.get_rank()}: {describe(point)}: {wrong}")
    return len(chosen[0]), len(tried), found


def shared_descriptors() -> int:
    """The number of open descriptors of shared memory."""
    gc.collect()
    folder, found = "/proc/self/fd", 0
    for name in os.listdir(folder):
        with suppress(FileNotFoundError):  # that of the folder
            found += os.readlink(f"{folder}/{name}").startswith("/memfd:unicoll")
    return found


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
            name = rng.choice([*ON_HOSTS])
            late_s = 5e-3 * rng.random() * (dist.get_rank() != VICTIM)
            dist.barrier()
            wrong = _trial(name, UNICOLL, struck.interrupted, late_s=late_s)
            if wrong:
                found.append(f"{name}: rank {dist.get_rank()}: trial {trial}: {wrong}")
    return struck.count, found
