"""Every operation through the counting backend, on the world and on a group; prints one line of JSON."""

from __future__ import annotations

import json
import sys
from typing import Any

import numpy as np
from counting import CountingBackend

import unicoll as dist


def vector(value: float, count: int = 4) -> Any:
    return np.full(count, float(value))


def each(value: float = 0.0) -> list[Any]:
    return [vector(value) for _ in range(dist.get_world_size())]


def collectives(group: Any) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    total = size * (size + 1) / 2
    x = vector(rank + 1)
    dist.all_reduce(x, group=group)
    assert (x == total).all()
    x = vector(rank)
    dist.broadcast(x, 1, group=group)
    assert (x == 1).all()
    x = vector(rank + 1)
    dist.reduce(x, 2, group=group)
    assert rank != 2 or (x == total).all()
    outputs = each()
    dist.all_gather(outputs, vector(rank), group=group)
    assert [o[0] for o in outputs] == list(range(size))
    flat = vector(0, 4 * size)
    dist.all_gather_into_tensor(flat, vector(rank), group=group)
    assert flat[::4].tolist() == list(range(size))
    outputs = each() if rank == 0 else []
    dist.gather(vector(rank), outputs or None, 0, group=group)
    assert [o[0] for o in outputs] == list(range(size))[: len(outputs)]
    x = vector(0)
    dist.scatter(x, [vector(i) for i in range(size)] if rank == 0 else None, 0, group=group)
    assert (x == rank).all()
    dist.reduce_scatter(x, each(rank + 1), group=group)
    assert (x == total).all()
    dist.reduce_scatter_tensor(x, vector(rank + 1, 4 * size), group=group)
    assert (x == total).all()
    outputs = each()
    dist.all_to_all(outputs, each(rank), group=group)
    assert [o[0] for o in outputs] == list(range(size))
    dist.all_to_all_single(flat, vector(rank, 4 * size), group=group)
    assert flat[::4].tolist() == list(range(size))
    x = vector(rank + 1)
    dist.scan(x, group=group)
    assert (x == (rank + 1) * (rank + 2) / 2).all()
    x = vector(rank + 1)
    dist.exscan(x, group=group)
    assert (x == (rank * (rank + 1) / 2 if rank else 1)).all()
    dist.barrier(group=group)


def batches_and_messages() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    pair = [vector(1), vector(2)]
    dist.all_reduce_coalesced(pair)
    assert [x[0] for x in pair] == [size, 2 * size]
    work = dist.all_reduce(vector(1), async_op=True)
    assert work is not None
    assert (work.result()[0] == size).all()
    right, left = (rank + 1) % size, (rank - 1) % size
    x = vector(0)
    ops = [dist.P2POp(dist.isend, vector(rank), right), dist.P2POp(dist.irecv, x, left)]
    for request in dist.batch_isend_irecv(ops):
        request.wait()
    assert (x == left).all()


ONCE = (
    "all_reduce",
    "broadcast",
    "reduce",
    "all_gather",
    "all_gather_into_tensor",
    "gather",
    "scatter",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "all_to_all",
    "all_to_all_single",
    "scan",
    "exscan",
    "barrier",
)


def main() -> None:
    if sys.argv[1] == "registered":
        dist.Backend.register_backend("counting", CountingBackend)
    dist.init_process_group("counting", timeout=60)
    group = dist.new_group()
    CountingBackend.counts.clear()
    collectives(None)
    collectives(group)
    batches_and_messages()
    expected = dict.fromkeys(ONCE, 2) | {"send": 1, "recv": 1}
    expected["all_reduce"] += 3  # two as one batch, one in the background
    report: dict[str, Any] = {
        "backend": dist.get_backend(),
        "config": dist.get_backend_config(),
        "explained": dist.explain(),
        "counts": dict(CountingBackend.counts),
        "expected": expected,
    }
    dist.destroy_process_group()
    report |= {"created": CountingBackend.created, "closed": CountingBackend.closed}
    print(json.dumps(report), flush=True)


if __name__ == "__main__":
    main()
