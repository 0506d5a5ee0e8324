"""What the ranks of :mod:`test_interrupts` do: one rank gets an exception at a point of a call, and all go on."""

from __future__ import annotations

import logging
import time
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np

import unicoll as dist
from tests.conformance.p2p_jobs import must
from tests.support.interrupts import Interrupt, Point, Points, describe

Step = tuple[Callable[[], Any], Callable[[], None]]
"""A call, and the check of its result."""
Operation = Callable[[Any, int], "Step | None"]
"""Makes the call number k of this rank on a group; None for a rank that makes none."""

VICTIM = 0
"""The rank that is interrupted."""
_TIMEOUT_S = 10.0
_SLOW_S = 2.0
"""A trial that takes longer waited for a timeout."""
_CALLS = 3
"""Calls that each rank makes after the one that is interrupted."""
SMALL, LARGE = 1, 400_000
"""Elements: of a call in one step, and of one in chunks."""


def me(group: Any) -> int:
    return int(group.rank())


def _value(rank: int, k: int) -> float:
    return 1000.0 * k + rank


class Arrays:
    """The arrays of the calls: NumPy's. Those of a device are a subclass."""

    full: Callable[[int | tuple[int, int], float], Any] = staticmethod(np.full)
    """Makes an array."""

    def values(self, x: Any) -> Any:
        """The elements of an array."""
        return x

    def check(self, group: Any, check: Callable[[], None]) -> str:
        """Check the result of a call; returns the type of an error that the group has by then."""
        check()
        return ""

    def current(self) -> AbstractContextManager[Any]:
        """What a trial is in."""
        return nullcontext()


ARRAYS = Arrays()


def _equals(x: Any, value: float) -> Callable[[], None]:
    def check() -> None:
        found = ARRAYS.values(x)
        assert (found == value).all(), f"{np.unique(found)[:4]} in place of {value}"

    return check


def all_reduce(count: int, async_op: bool = False, strided: bool = False) -> Operation:
    def step(group: Any, k: int) -> Step:
        x = ARRAYS.full((3, count) if strided else count, _value(me(group), k))
        if strided:
            x = x.T

        def call() -> None:
            work = dist.all_reduce(x, group=group, async_op=async_op)
            if work is not None:
                try:
                    work.wait()
                except Interrupt:
                    work.wait()

        return call, _equals(x, sum(_value(r, k) for r in range(group.size())))

    return step


def all_gather(group: Any, k: int) -> Step:
    """Of uneven sizes."""
    sizes = [10 + 70_000 * r for r in range(group.size())]
    x, found = ARRAYS.full(sizes[me(group)], _value(me(group), k)), [ARRAYS.full(size, 0.0) for size in sizes]

    def check() -> None:
        for rank, each in enumerate(found):
            _equals(each, _value(rank, k))()

    return lambda: dist.all_gather(found, x, group=group), check


def objects(group: Any, k: int) -> Step:
    found: list[Any] = [None] * group.size()

    def check() -> None:
        assert found == [(k, rank) for rank in range(group.size())], found

    return lambda: dist.all_gather_object(found, (k, me(group)), group=group), check


def barrier(group: Any, k: int) -> Step:
    return lambda: dist.barrier(group=group), lambda: None


def _nothing() -> None:
    pass


def send(count: int, sender: int, posted: bool = False) -> Operation:
    """Messages of one rank to the next; with ``posted`` by isend and irecv."""
    arrays: dict[Any, list[tuple[Any, Any]]] = {}
    last: dict[Any, int] = {}

    def step(group: Any, k: int) -> Step | None:
        receiver = (sender + 1) % 2
        if me(group) == sender:
            x = ARRAYS.full(count, float(k))
            if posted:
                return lambda: must(dist.isend(x, receiver, group=group)).wait(), _nothing
            return lambda: dist.send(x, receiver, group=group), _nothing
        if me(group) != receiver:
            return None
        y = ARRAYS.full(count, 0.0)
        received = arrays.setdefault(group, [])

        def call() -> None:
            if not posted:
                dist.recv(y, sender, group=group)
                received.append((None, y))
                return
            work = must(dist.irecv(y, sender, group=group))
            received.append((work, y))
            work.wait()

        def check() -> None:
            """No message is lost, also none that an interrupted wait was for; an interrupted receive consumed none."""
            while received:
                work, array = received.pop(0)
                if work is not None:
                    work.wait()
                each = ARRAYS.values(array)
                expected = last.get(group, -1) + 1
                assert (each == each[0]).all(), f"a mixture of messages: {np.unique(each)[:4]}"
                assert each[0] == expected, f"message {each[0]:g} in place of {expected}"
                last[group] = expected

        return call, check

    return step


def received_objects() -> Operation:
    """Lists of objects from rank 1, each a header and a body. An interrupted receive has consumed both or none."""
    last: dict[Any, int] = {}

    def step(group: Any, k: int) -> Step | None:
        if me(group) == 1:
            return lambda: dist.send_object_list([k, bytes(20_000)], 0, group=group), _nothing
        if me(group) != VICTIM:
            return None
        found: list[Any] = [None, None]

        def check() -> None:
            expected = last.get(group, -1) + 1
            assert found == [expected, bytes(20_000)], f"{found[0]} in place of {expected}"
            last[group] = expected

        return lambda: dist.recv_object_list(found, 1, group=group), check

    return step


def batch(group: Any, k: int) -> Step:
    """Messages in a ring, to the next rank from the one before."""
    rank, size = me(group), group.size()
    x, y = ARRAYS.full(5, _value(rank, k)), ARRAYS.full(5, 0.0)
    before = (rank - 1) % size

    messages = [
        dist.P2POp(dist.isend, x, (rank + 1) % size, group),
        dist.P2POp(dist.irecv, y, before, group),
    ]

    def call() -> None:
        for work in dist.batch_isend_irecv(messages):
            work.wait()

    return call, _equals(y, _value(before, k))


OPERATIONS: dict[str, Operation] = {
    "all_reduce": all_reduce(SMALL),
    "all_reduce large": all_reduce(LARGE),
    "all_reduce async": all_reduce(SMALL, True),
    "all_reduce strided": all_reduce(5, strided=True),
    "all_reduce strided async": all_reduce(5, True, True),
    "all_gather": all_gather,
    "all_gather_object": objects,
    "barrier": barrier,
    "send": send(8, VICTIM),
    "send large": send(LARGE, VICTIM),
    "recv": send(8, 1),
    "recv large": send(LARGE, 1),
    "isend": send(8, VICTIM, True),
    "irecv": send(8, 1, True),
    "irecv large": send(LARGE, 1, True),
    "batch": batch,
    "recv_object_list": received_objects(),
}


def _do(group: Any, step: Step | None) -> str:
    """Make a call and check its result; returns the type of the error that it raises."""
    if step is None:
        return ""
    try:
        step[0]()
    except dist.DistError as e:
        return type(e).__name__
    return ARRAYS.check(group, step[1])


def _interrupted(group: Any, step: Step | None, point: Point | None) -> tuple[str, Points]:
    """Make a call with an exception at a point."""
    points = Points(point)
    if step is None:
        return "", points
    try:
        with points:
            step[0]()
    except Interrupt:
        return "Interrupt", points
    except dist.DistError as e:
        return type(e).__name__, points
    return ARRAYS.check(group, step[1]), points


def _trial(name: str, point: Point | None, goes_on: bool, warm: bool) -> tuple[Points | None, str]:
    """Interrupt a call on a new group; returns the points, and what was wrong."""
    operation = OPERATIONS[name]
    group, points, wrong = dist.new_group(timeout=_TIMEOUT_S), None, ""
    began = time.monotonic()
    results = []
    try:
        with ARRAYS.current():
            if warm:
                results.append(_do(group, operation(group, 0)))
            if me(group) == VICTIM:
                result, points = _interrupted(group, operation(group, int(warm)), point)
                results.append(result)
            for k in range(int(warm) + (me(group) == VICTIM), int(warm) + 1 + _CALLS):
                if me(group) == VICTIM and result == "Interrupt" and not goes_on:
                    break
                results.append(_do(group, operation(group, k)))
            results.append(_do(group, (lambda: dist.destroy_process_group(group), _nothing)))
    except BaseException as e:
        wrong = f"{type(e).__name__}: {e}"
    took = time.monotonic() - began
    if took > _SLOW_S:
        wrong += f" took {took:.1f} s"
    return points, wrong and f"{wrong} {results}"


def trials(
    name: str, goes_on: bool = True, warm: bool = True, every: int = 1, first: int = 0
) -> tuple[int, int, list[str]]:
    """Interrupt a call at each of its points, or at every nth of them.

    Args:
        name: of the operation.
        goes_on: False: the interrupted rank leaves the group, and makes no more calls.
        warm: False: the call is the group's first.
        every, first: which points.

    Returns:
        The number of points, of trials, and what was wrong on this rank.
    """
    logging.getLogger("unicoll").setLevel(logging.CRITICAL + 1)
    warnings.simplefilter("ignore", ResourceWarning)  # a Work that an exception has kept from the caller
    seen: dict[Point, None] = {}
    for _ in range(3):  # what depends on time may differ
        points, wrong = _trial(name, None, True, warm)
        assert not wrong, wrong
        seen |= dict.fromkeys(points.seen if points else ())
    chosen = [[*seen]]
    dist.broadcast_object_list(chosen, VICTIM)
    tried, found = chosen[0][first % every :: every], []
    for point in tried:
        dist.barrier()
        wrong = _trial(name, point, goes_on, warm)[1]
        if wrong:
            found.append(f"{name}: rank {dist.get_rank()}: {describe(point)}: {wrong}")
    return len(chosen[0]), len(tried), found
