"""What the ranks of test_striping.py do."""

from __future__ import annotations

import os
from typing import Any

import numpy as np

import unicoll as dist


def collective_connections() -> int:
    """This rank's connections for collectives."""
    backend: Any = dist.group.WORLD.backends[0]
    connections = backend._connections
    return len([s for s in connections._sockets if s is not None]) + len(connections._more_sockets)


def want(connections: int) -> None:
    os.environ["UNICOLL_SOCKET_CONNECTIONS"] = str(connections)


def large_and_small() -> int:
    """All algorithms over sockets, with messages of many sizes; the number of connections at the end."""
    rank, size = dist.get_rank(), dist.get_world_size()
    for count in (1, 3000, 16_384, 40_001, 300_007):
        data = np.arange(count, dtype=np.float64) * (rank + 1)
        dist.all_reduce(data)
        np.testing.assert_array_equal(data, np.arange(count) * (size * (size + 1) / 2))
        data = np.full(count, float(rank))
        dist.broadcast(data, src=size - 1)
        assert (data == size - 1).all()
        dist.reduce(data, dst=0)
        assert rank or (data == size * (size - 1)).all()
        outputs = [np.empty(count + r) for r in range(size)]
        dist.all_gather(outputs, np.full(count + rank, float(rank)))
        assert all((output == r).all() for r, output in enumerate(outputs))
        outputs = [np.empty(count + rank) for _ in range(size)]
        dist.all_to_all(outputs, [np.full(count + r, 10.0 * rank + r) for r in range(size)])
        assert all((output == 10.0 * r + rank).all() for r, output in enumerate(outputs))
        own = np.empty(count)
        dist.scatter(own, [np.full(count, float(r)) for r in range(size)] if rank == 0 else None, src=0)
        assert (own == rank).all()
        dist.gather(own, outputs := [np.empty(count) for _ in range(size)] if rank == 0 else None, dst=0)
        assert outputs is None or all((output == r).all() for r, output in enumerate(outputs))
    found = collective_connections()
    dist.barrier()
    return found
