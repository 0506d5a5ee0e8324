"""One program for every backend; the backend's name is the one word that changes.

    unirun -n 4 -m tests.support.one_program gloo
    mpirun -n 4 python -m tests.support.one_program mpi

Rank 0 prints, as JSON, what each operation gave on each rank: by name a list of the ranks' values, as in
:func:`expected`. With ``nccl`` the arrays are those of a simulated device, with its NCCL; else they are NumPy's.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np

import unicoll as dist
from unicoll.testing.families import FAMILIES

COUNT = 6


def use_simulation() -> str:
    """Replace the devices and NCCL by the simulated ones; returns the family of their arrays."""
    from tests.simulated_nccl import ranks

    ranks.install(ranks.Settings(policy="newest"), int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
    return "simulated"


def main(backend: str) -> None:
    family = FAMILIES[use_simulation() if backend == "nccl" else "numpy"]()
    dist.init_process_group(backend)
    rank, size = dist.get_rank(), dist.get_world_size()
    right, left = (rank + 1) % size, (rank - 1) % size
    results: dict[str, list[float]] = {}

    def array(count: int, value: float) -> Any:
        return family.from_numpy(np.full(count, value, "f4"))

    def note(name: str, *arrays: Any) -> None:
        results[name] = [float(x) for one in arrays for x in family.to_numpy(one)]

    for name, op in (("SUM", dist.ReduceOp.SUM), ("MAX", dist.ReduceOp.MAX), ("AVG", dist.ReduceOp.AVG)):
        x = array(COUNT, size * rank)
        dist.all_reduce(x, op)
        note(f"all_reduce {name}", x)

    works = []
    chain = [array(COUNT, rank + i) for i in range(3)]
    for x in chain:
        works.append(dist.all_reduce(x, async_op=True))
    for work in works:
        work.wait()
    note("three asynchronous all_reduces", *chain)

    x = array(COUNT, rank)
    dist.broadcast(x, src=size - 1)
    note("broadcast", x)

    x = array(COUNT, rank + 1)
    dist.reduce(x, dst=0)
    note("reduce", *([x] if rank == 0 else []))  # elsewhere it is undefined

    out = array(size * 2, -1)
    dist.all_gather_into_tensor(out, array(2, rank))
    note("all_gather_into_tensor", out)

    out = array(2, -1)
    dist.reduce_scatter_tensor(out, family.from_numpy(np.arange(2 * size, dtype="f4")))
    note("reduce_scatter_tensor", out)

    out = array(size, -1)
    dist.all_to_all_single(out, family.from_numpy(np.arange(size, dtype="f4") + 10 * rank))
    note("all_to_all_single", out)

    out = array(COUNT, -1)
    ops = [dist.P2POp(dist.isend, array(COUNT, rank), right), dist.P2POp(dist.irecv, out, left)]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    note("messages around the ring", out)

    half, _ = dist.new_subgroups(size // 2)
    x = array(COUNT, rank + 1)
    dist.all_reduce(x, group=half)
    note("all_reduce in a half", x)

    names = [None] * size
    dist.all_gather_object(names, f"rank {rank}")
    assert names == [f"rank {r}" for r in range(size)]
    dist.barrier()
    of_all: list[Any] = [None] * size
    dist.all_gather_object(of_all, results)
    if rank == 0:
        print(json.dumps({name: [one[name] for one in of_all] for name in results}))
    dist.destroy_process_group()


def expected(size: int) -> dict[str, list[list[float]]]:
    """What the program prints on ``size`` ranks, an even number, by the definitions of the operations."""
    return {name: [[float(x) for x in values] for values in ranks] for name, ranks in _expected(size)}


def _expected(size: int) -> Iterator[tuple[str, list[list[float]]]]:
    ranks, total = range(size), sum(range(size))
    yield "all_reduce SUM", [[size * total] * COUNT] * size
    yield "all_reduce MAX", [[size * (size - 1)] * COUNT] * size
    yield "all_reduce AVG", [[total] * COUNT] * size
    yield (
        "three asynchronous all_reduces",
        [[total + size * i for i in range(3) for _ in range(COUNT)]] * size,
    )
    yield "broadcast", [[size - 1] * COUNT] * size
    yield "reduce", [[total + size] * COUNT if rank == 0 else [] for rank in ranks]
    yield "all_gather_into_tensor", [[r for r in ranks for _ in range(2)]] * size
    yield "reduce_scatter_tensor", [[size * (2 * rank), size * (2 * rank + 1)] for rank in ranks]
    yield "all_to_all_single", [[rank + 10 * r for r in ranks] for rank in ranks]
    yield "messages around the ring", [[(rank - 1) % size] * COUNT for rank in ranks]
    half = size // 2
    halves = [range(half), range(half, size)]
    yield "all_reduce in a half", [[sum(halves[rank // half]) + half] * COUNT for rank in ranks]


def check(output: str, size: int) -> None:
    """Compare what the program has printed on ``size`` ranks, after what the library prints."""
    assert json.loads(output.splitlines()[-1]) == expected(size)


if __name__ == "__main__":
    main(sys.argv[1])
