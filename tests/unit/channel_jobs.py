"""Jobs of the tests of protected connections."""

from __future__ import annotations

import socket
from typing import Any

import numpy as np

import unicoll as dist
from tests.unit.on_path import OnPath
from unicoll.backend import endpoint


def collectives() -> None:
    """Collectives of sizes from a part of a record to many records."""
    rank, size = dist.get_rank(), dist.get_world_size()
    for count in (1, 1000, 40_000, 700_001):
        mine = np.arange(count, dtype=np.float64) + rank
        total = size * np.arange(count) + sum(range(size))
        x = mine.copy()
        dist.all_reduce(x)
        assert np.array_equal(x, total)
        dist.broadcast(x := mine.copy(), 1)
        assert np.array_equal(x, np.arange(count) + 1)
        gathered = np.zeros((size, count))
        dist.all_gather_into_tensor(gathered, mine)
        assert all(np.array_equal(gathered[r], np.arange(count) + r) for r in range(size))
        swapped = np.zeros((size, count))
        dist.all_to_all_single(swapped, np.full((size, count), rank + 0.5))
        assert all((swapped[r] == r + 0.5).all() for r in range(size))
        part = np.zeros(count)
        dist.reduce_scatter_tensor(part, np.full((size, count), 1.0))
        assert (part == size).all()
    objects: list[Any] = [None] * size
    dist.all_gather_object(objects, {"rank": rank, "bytes": b"x" * 300_000})
    assert [o["rank"] for o in objects] == list(range(size))


def changed_on_the_path(what: str) -> str:
    """An operation over a connection whose bytes are changed: "right", "wrong", or the error."""
    dist.barrier()  # over the connections of the world group, which are not changed
    paths = []
    real = socket.create_connection

    def through_a_relay(address: tuple[str, int], timeout: float) -> socket.socket:
        paths.append(OnPath(address[1]))
        return real(("127.0.0.1", paths[-1].port), timeout)

    endpoint.socket.create_connection = through_a_relay  # type: ignore[assignment]
    try:
        group = dist.new_group(timeout=20)
        assert _transfer(what, group) == "right"
        dist.barrier()
        for path in paths:
            path.change = dict.fromkeys(("up", "down"), _middle_changed)
        dist.barrier()
        try:
            return _transfer(what, group)
        except dist.DistError as error:
            return f"{type(error).__name__}: {error}"
        finally:
            dist.barrier()
    finally:
        endpoint.socket.create_connection = real
        for path in paths:
            path.close()


def _middle_changed(data: bytes) -> bytes:
    at = len(data) // 2
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :] if len(data) > 1000 else data


def _transfer(what: str, group: Any) -> str:
    x = np.ones(100_000)
    if what == "all_reduce":
        dist.all_reduce(x, group=group)
        return "right" if (x == 2).all() else "wrong"
    if dist.get_rank() == 0:
        dist.send(x + 1, 1, group=group)
        return "right"
    dist.recv(x, 0, group=group)
    return "right" if (x == 2).all() else "wrong"
