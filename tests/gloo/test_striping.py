"""Large messages over several connections between two ranks."""

from __future__ import annotations

import os
from typing import Any

import pytest

import unicoll as dist
from tests.support.ranks import ProcessJob, run_ranks
from tests.support.worker import enter
from unicoll.calls.ops import OPS
from unicoll.testing.cases import Case, run_cases


def env(connections: int, channel: str = "plain") -> dict[str, str]:
    return {
        "UNICOLL_TRANSPORT": "tcp",
        "UNICOLL_SOCKET_CONNECTIONS": str(connections),
        "UNICOLL_CHANNEL": channel,
    }


def _want(connections: int) -> None:
    os.environ["UNICOLL_SOCKET_CONNECTIONS"] = str(connections)


def _large_and_small() -> int:
    """All algorithms over sockets, with messages of many sizes; the number of connections at the end."""
    names = ("all_reduce", "broadcast", "reduce", "all_gather", "all_to_all", "scatter", "gather")
    cases = [
        Case(op, "float64", "SUM" if OPS[op].reduces else None, count, uneven=OPS[op].uneven, seed=count)
        for count in (1, 3000, 16_384, 40_001, 300_007)
        for op in names
    ]
    assert [wrong for wrong, _ in run_cases(cases) if wrong] == []  # type: ignore[misc]
    backend: Any = dist.group.WORLD.backends[0]  # type: ignore[union-attr]
    connections = backend._connections
    found = len([s for s in connections._sockets if s is not None]) + len(connections._more_sockets)
    dist.barrier()
    return found


@pytest.mark.every(n=6)
@pytest.mark.parametrize("channel", ["plain", "mac", "tls"])
@pytest.mark.parametrize(("size", "connections"), [(2, 1), (2, 3), (3, 2)])
def test_results_and_number_of_connections(size: int, connections: int, channel: str) -> None:
    found = run_ranks(size, _large_and_small, env=env(connections, channel))
    assert found == [connections * (size - 1)] * size


def test_ranks_that_want_different_numbers_use_the_smaller_one() -> None:
    with ProcessJob(3, env=env(1)) as job:
        for rank, wanted in enumerate((1, 2, 3)):
            job.call(_want, wanted, ranks=[rank])
        job.results()
        job.call(enter)
        job.results()
        job.call(_large_and_small)
        assert job.results() == [2, 3, 3]
