"""A program that ends without destroying its groups: ``exit_program.py BACKEND HOW [RANK SIZE INIT]``.

Under mpirun the last three are left out. With HOW "raises" the last rank ends with an exception. Rank 0 stays until the
others have left, and prints how they did. With HOW "late" rank 0 alone starts an operation, and all end when that has
failed.
"""

from __future__ import annotations

import atexit
import sys
import time
from typing import Any

import unicoll as dist

kept: list[Any] = []


def main(backend: str, how: str, *place: str) -> None:
    arrays: Any
    if how == "late":
        atexit.register(print, "at the end")  # after unicoll's own function
    rank, size = (int(place[0]), int(place[1])) if place else (-1, -1)
    if backend == "nccl":
        from tests.simulated_nccl import arrays, ranks

        ranks.install(ranks.Settings(), rank, size)
    else:
        import numpy as arrays
    dist.init_process_group(backend, place[2] if place else None, rank=rank, world_size=size, timeout=60)
    rank, size = dist.get_rank(), dist.get_world_size()
    world: Any = dist.group.WORLD
    control = world.job.control
    if how == "late":
        atexit.register(print, "at exit")
        dist.all_reduce(arrays.full(4, 1.0))
        if rank == 0:
            kept.append(dist.all_reduce(arrays.full(4, 1.0), timeout=0.5, async_op=True))
        while control.group_failure("world") is None:
            time.sleep(0.01)
        return
    group = dist.new_group()
    x = arrays.full(4, rank + 1.0)
    dist.all_reduce(x)
    work = dist.all_reduce(x, group=group, async_op=True)
    assert work is not None
    work.synchronize()
    sums = (x.numpy() if backend == "nccl" else x).tolist()
    assert sums == [size * size * (size + 1) / 2.0] * 4, sums
    kept.append(dist.all_reduce(x, async_op=True))  # under way at exit
    if how == "raises" and rank == size - 1:
        raise ValueError("enough")
    if rank == 0:
        deadline = time.monotonic() + 60
        while len(control.departed) < size - 1 and time.monotonic() < deadline:
            time.sleep(0.01)
        print(
            "died", sorted(control.died), "left", sorted(control.left), control.departed[size - 1], flush=True
        )


if __name__ == "__main__":
    main(*sys.argv[1:])
