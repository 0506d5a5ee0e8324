"""Operations captured into CUDA graphs and replayed; and errors of those that cannot be captured."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

import unicoll as dist
from tests.gpu.check.kits import Kit

__all__ = ["PROGRAMS"]

_COUNT = 4096
_REPLAYS = 3


def _replayed(k: Kit, operation: Callable[[Any], object], expected: Callable[[float], float]) -> None:
    """Capture ``x -> operation(x)`` and replay it on new values, which only the replay can have used."""
    stream = k.stream()
    with stream:
        x, y = k.full(_COUNT, 1.0), k.full(_COUNT, 0.0)

    def body() -> None:
        operation(x)
        k.compute(y, lambda xp, given: given * 2, x)

    with stream:
        body()  # makes connections and fills the pool, which may not allocate during a capture
    k.synchronize()
    replay = k.capture(stream, body)
    for turn in range(_REPLAYS):
        value = float(dist.get_rank() + turn)
        with stream:
            k.compute(x, lambda xp, given, value=value: given * 0 + value, x)
            replay()
            found = np.asarray(k.numpy(y))
        due = 2 * expected(float(turn))
        assert (found == due).all(), f"replay {turn}: {found[:4]}, expected {due}"
    with stream:
        dist.all_reduce(x)  # outside the graph, after it
    k.synchronize()
    replay.close()


def _total(turn: float) -> float:
    return sum(r + turn for r in range(dist.get_world_size()))


def a_graph_of_a_blocking_call(k: Kit) -> None:
    """On the capturing stream itself."""
    _replayed(k, lambda x: dist.all_reduce(x), _total)


def a_graph_of_an_asynchronous_call(k: Kit) -> None:
    """On the group's stream, and wait()."""

    def operation(x: Any) -> None:
        work = dist.all_reduce(x, async_op=True)
        assert work is not None
        work.wait()

    _replayed(k, operation, _total)


def a_graph_of_a_coalesced_call(k: Kit) -> None:
    """Both halves of an array in one group call."""

    def operation(x: Any) -> None:
        work = dist.all_reduce_coalesced([x[: _COUNT // 2], x[_COUNT // 2 :]], async_op=True)
        assert work is not None
        work.wait()

    _replayed(k, operation, _total)


def a_graph_of_an_exchange(k: Kit) -> None:
    """Sends and receives in a graph: each rank receives from the rank before it."""
    n, me = dist.get_world_size(), dist.get_rank()
    given = k.full(n * 16, float(me))
    taken = k.full(n * 16, -1.0)
    stream = k.stream()
    k.synchronize()
    with stream:
        dist.all_to_all_single(taken, given)
    k.synchronize()
    replay = k.capture(stream, lambda: dist.all_to_all_single(taken, given))
    with stream:
        k.compute(given, lambda xp, x: x + 1, given)
        replay()
        found = np.asarray(k.numpy(taken))
    replay.close()
    assert (found.reshape(n, 16) == np.arange(1, n + 1)[:, None]).all(), found[::16]


def what_cannot_be_recorded_says_so(k: Kit) -> list[str]:
    """The first operation of a group connects its ranks; in a graph it is refused, and the group works afterwards."""
    fresh: Any = dist.new_group(list(range(dist.get_world_size())))
    stream = k.stream()
    x = k.full(8, 1.0)
    k.synchronize()
    with stream:
        dist.all_reduce(x)
        k.compute(x, lambda xp, given: given * 1, x)
    k.synchronize()
    said: list[str] = []

    def body() -> None:
        k.compute(x, lambda xp, given: given * 1, x)
        try:
            dist.all_reduce(x, group=fresh)
        except dist.DistArgumentError as e:
            said.append(str(e))

    k.capture(stream, body).close()
    assert said, "a first operation was recorded"
    assert "graph" in said[0], said
    dist.all_reduce(x, group=fresh)
    k.synchronize()
    dist.destroy_process_group(fresh)
    return said


PROGRAMS = [
    a_graph_of_a_blocking_call,
    a_graph_of_an_asynchronous_call,
    a_graph_of_a_coalesced_call,
    a_graph_of_an_exchange,
    what_cannot_be_recorded_says_so,
]
