"""What the ranks of :mod:`test_interrupts` do: one rank gets an exception at a point of a call, and all go on."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
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
_TIMEOUT_S = 30.0
"""No call needs it: it is wrong if one ends by it."""
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


def all_reduce(count: int, async_op: bool = False) -> Operation:
    def step(group: Any, k: int) -> Step:
        x = np.full(count, _value(me(group), k))

        def call() -> None:
            work = dist.all_reduce(x, group=group, async_op=async_op)
            if work is not None:
                work.wait()

        return call, _equals(x, sum(_value(r, k) for r in range(group.size())))

    return step


def all_gather(group: Any, k: int) -> Step:
    """Of uneven sizes."""
    sizes = [10 + 70_000 * r for r in range(group.size())]
    x, found = np.full(sizes[me(group)], _value(me(group), k)), [np.zeros(size) for size in sizes]

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
            x = np.full(count, float(k))
            if posted:
                return lambda: must(dist.isend(x, receiver, group=group)).wait(), _nothing
            return lambda: dist.send(x, receiver, group=group), _nothing
        if me(group) != receiver:
            return None
        y = np.zeros(count)
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
                work, each = received.pop(0)
                if work is not None:
                    work.wait()
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
    x, y = np.full(5, _value(rank, k)), np.zeros(5)
    before = (rank - 1) % size

    messages = [
        dist.P2POp(dist.isend, x, (rank + 1) % size, group),
        dist.P2POp(dist.irecv, y, before, group),
    ]

    def call() -> None:
        for work in dist.batch_isend_irecv(messages):
            work.wait()

    return call, _equals(y, _value(before, k))


def new_group(_: Any, k: int) -> Step:
    """A new group; on the ranks that have made it, its calls work or fail."""
    made: list[Any] = []
    x = np.full(1, _value(dist.get_rank(), k))

    def check() -> None:
        try:
            dist.all_reduce(x, group=made[0])
        finally:
            dist.destroy_process_group(made[0])
        _equals(x, sum(_value(r, k) for r in range(dist.get_world_size())))()

    return lambda: made.append(dist.new_group(timeout=_TIMEOUT_S)), check


def destroy(group: Any, k: int) -> Step:
    """The end of a group that has been used."""
    made = dist.new_group(timeout=_TIMEOUT_S)
    all_reduce(SMALL)(made, k)[0]()
    return lambda: dist.destroy_process_group(made), _nothing


def symmetric(group: Any, k: int) -> Step:
    """Symmetric memory, and an all_reduce on it."""
    made: list[Any] = []

    def check() -> None:
        made[0][:] = _value(me(group), k)
        dist.all_reduce(made[0], group=group)
        _equals(made[0], sum(_value(r, k) for r in range(group.size())))()

    return lambda: made.append(group.symmetric_empty(1000)), check


OPERATIONS: dict[str, Operation] = {
    "all_reduce": all_reduce(SMALL),
    "all_reduce large": all_reduce(LARGE),
    "all_reduce async": all_reduce(SMALL, True),
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
    "new_group": new_group,
    "destroy": destroy,
    "symmetric_empty": symmetric,
}


_RECEIVES = {name for name in OPERATIONS if name.startswith("recv")}
"""What is made again if it was interrupted: either it has consumed nothing, or it fails like the group."""


def _do(step: Step | None) -> str:
    """Make a call and check its result; returns the type of the error that it raises."""
    if step is None:
        return ""
    try:
        step[0]()
        step[1]()
    except dist.DistError as e:
        return type(e).__name__
    return ""


def _interrupted(step: Step | None, point: Point | None) -> tuple[str, Points]:
    """Make a call with an exception at a point."""
    points = Points(point)
    if step is None:
        return "", points
    try:
        with points:
            step[0]()
        step[1]()
    except Interrupt:
        return "Interrupt", points
    except dist.DistError as e:
        return type(e).__name__, points
    return "", points


def _trial(name: str, point: Point | None, goes_on: bool, warm: bool) -> tuple[Points | None, str]:
    """Interrupt a call on a new group; returns the points, and what was wrong."""
    operation = OPERATIONS[name]
    group, points, wrong = dist.new_group(timeout=_TIMEOUT_S), None, ""
    results: list[str] = []
    try:
        if warm:
            results.append(_do(operation(group, 0)))
        if me(group) == VICTIM:
            result, points = _interrupted(operation(group, int(warm)), point)
            results.append(result)
        calls = 1 + _CALLS
        if me(group) == VICTIM:
            if result == "Interrupt" and not goes_on:
                calls = 0
            elif result != "Interrupt" or name not in _RECEIVES:
                calls -= 1
        for _ in range(calls):
            results.append(_do(operation(group, len(results))))
    except BaseException as e:
        wrong = f"{type(e).__name__}: {e}"
    if "OperationTimeoutError" in results:
        wrong += " a wait without end"
    if point is None and me(group) == VICTIM and any(results):
        wrong += " an error without an interrupt"
    dist.destroy_process_group(group)
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
