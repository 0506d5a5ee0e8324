"""An exception of a signal's handler in a function of the control plane: no living rank is lost, and nothing waits."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.support.order import await_true
from tests.unit.interrupt_points import each_point, interrupt_at
from tests.unit.test_control_plane import joined
from unicoll.errors import DistError, OperationTimeoutError
from unicoll.net.control.client import ControlClient


def our_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("unicoll")}


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Iterator[None]:
    before = our_threads()
    yield
    await_true(lambda: our_threads() <= before)


def on_another_thread(call: Callable[[], Any]) -> Any:
    """The result of a call, for which a lock that is left held would wait without end."""
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(call()), daemon=True)
    thread.start()
    thread.join(60)
    (result,) = found
    return result


def assert_alive(clients: list[ControlClient]) -> None:
    assert [client.departed for client in clients] == [{}] * len(clients)


def test_messages() -> None:
    """Those after it arrive, in their order."""
    arrived: list[int] = []
    with joined(2) as clients:
        clients[0].handle("calls", lambda message: arrived.append(message["n"]))
        numbers = itertools.count()

        def send() -> None:
            clients[1].send({"t": "calls", "to": [0], "n": next(numbers)})

        for what, point in each_point(send):
            interrupt_at(send, point)
            last = next(numbers)
            clients[1].send({"t": "calls", "to": [0], "n": last})
            await_true(lambda last=last: last in arrived)
            assert arrived == sorted(set(arrived)), what
        assert_alive(clients)


def failure() -> OperationTimeoutError:
    return OperationTimeoutError("too late", op="all_reduce")


@pytest.mark.parametrize("first", [True, False])
def test_announcements(first: bool) -> None:
    """Another announcement of the same failure reaches all members; ``first`` without one of another member before."""
    with joined(2) as clients:
        numbers = itertools.count()

        def announce() -> DistError:
            group = str(next(numbers))
            if not first:
                clients[0].announce_failure(group, [0, 1], failure())
            return clients[1].announce_failure(group, [0, 1], failure())

        for what, point in each_point(announce, 3):
            interrupt_at(announce, point)
            group = str(next(numbers) - 1)
            if group == "-1":
                continue
            found = on_another_thread(
                lambda group=group: clients[1].announce_failure(group, [0, 1], failure())
            )
            assert isinstance(found, OperationTimeoutError), what
            assert clients[0].group_failure(group, 60) is not None
        assert_alive(clients)


def _requested(clients: list[ControlClient]) -> Any:
    return clients[1].request_reports("g", "b", [0])


CALLS: dict[str, tuple[Callable[[list[ControlClient]], Any], Any]] = {
    "request_reports": (_requested, {0: {"seq": 3}}),
    "measure_clock": (lambda clients: clients[1].measure_clock() is not None, True),
    "group_failure": (lambda clients: clients[1].group_failure("none", 0.01), None),
    "await_departure": (lambda clients: clients[1].await_departure(0, 0.01), None),
    "find_lost_rank": (lambda clients: clients[1].find_lost_rank(0, [0, 1], 0.01), None),
    "replacement_store": (lambda clients: clients[1].replacement_store(), None),
    "watch": (
        lambda clients: clients[1].watch("h", "b", lambda error: None, dict),
        None,
    ),
    "unwatch": (lambda clients: clients[1].unwatch("h", "b"), None),
    "initialized": (lambda clients: clients[1].initialized(60), None),
    "initialized on rank 0": (lambda clients: clients[0].initialized(60), None),
}


@pytest.mark.parametrize("name", CALLS)
def test_other_calls(name: str) -> None:
    """The next one has the right result, on each thread."""
    call, expected = CALLS[name]
    with joined(2) as clients:
        clients[0].watch("g", "b", lambda error: None, lambda: {"seq": 3})
        if name.startswith("initialized"):
            clients[1].initialized(60)
        for what, point in each_point(lambda: call(clients)):
            interrupt_at(lambda: call(clients), point)
            assert on_another_thread(lambda: call(clients)) == expected, what
            assert call(clients) == expected, what
        assert clients[1]._reports._received == {}
        assert_alive(clients)
        found = clients[0].announce_failure("g", [0, 1], failure())
        assert type(clients[1].group_failure("g", 60)) is type(found)


@pytest.mark.parametrize("rank", [0, 1])
def test_close(rank: int) -> None:
    """It can be repeated; the rank has left, and no thread of it remains."""

    def closed(point: Any) -> None:
        before = our_threads()
        with joined(2) as clients:
            interrupt_at(clients[rank].close, point)
            clients[rank].close()
            other = clients[1 - rank]
            assert other.await_departure(rank, 60) is not None
            assert other.left == {rank}
            assert other.died == set()
        await_true(lambda: our_threads() <= before)

    points: dict[Any, None] = {}
    with joined(2) as clients:
        for _, point in each_point(clients[rank].close, 4, runs=1):
            points[point] = None
    for point in points:
        closed(point)
