"""Every reduction and every collective that the tutorial names, on a group of some of the processes."""

from __future__ import annotations

import torch
import torch.distributed as dist
from processes import say, start

MEMBERS = [0, 2, 3]


def reductions(rank: int, group: object) -> None:
    for name in ("SUM", "PRODUCT", "MAX", "MIN"):
        data = torch.tensor([1.5, -2.0, float(rank + 1)])
        dist.all_reduce(data, op=getattr(dist.ReduceOp, name), group=group)
        say("rank", rank, name, data.tolist())
    for name in ("BAND", "BOR", "BXOR"):
        bits = torch.tensor([0b1100, 0b1010, rank + 4])
        dist.all_reduce(bits, op=getattr(dist.ReduceOp, name), group=group)
        say("rank", rank, name, bits.tolist())


def rooted(rank: int, group: object) -> None:
    data = torch.arange(4.0) + rank
    dist.broadcast(data, 2, group)
    say("rank", rank, "broadcast", data.tolist())

    data = torch.full((2, 2), rank + 1.0)
    dist.reduce(data, 3, dist.ReduceOp.SUM, group)
    if rank == 3:  # elsewhere the contents are nobody's promise
        say("rank", rank, "reduce", data.tolist())

    mine = torch.zeros(2)
    parts = [torch.tensor([10.0 * i, rank]) for i in range(len(MEMBERS))] if rank == 0 else None
    dist.scatter(mine, parts, 0, group)
    say("rank", rank, "scatter", mine.tolist())

    gathered = [torch.zeros(2) for _ in MEMBERS] if rank == 2 else None
    dist.gather(mine + rank, gathered, 2, group)
    if gathered is not None:
        say("rank", rank, "gather", [g.tolist() for g in gathered])


def symmetric(rank: int, group: object) -> None:
    gathered = [torch.zeros(1, dtype=torch.int64) for _ in MEMBERS]
    dist.all_gather(gathered, torch.tensor([rank * rank]), group)
    say("rank", rank, "all_gather", [g.item() for g in gathered])

    inputs = [torch.tensor([rank, i]) for i in range(len(MEMBERS))]
    outputs = [torch.zeros(2, dtype=torch.int64) for _ in MEMBERS]
    dist.all_to_all(outputs, inputs, group)
    say("rank", rank, "all_to_all", [o.tolist() for o in outputs])

    dist.barrier(group)


def worker(rank: int, size: int) -> None:
    dist.init_process_group("gloo", rank=rank, world_size=size)
    say("rank", dist.get_rank(), "of", dist.get_world_size(), "on", dist.get_backend())
    group = dist.new_group(MEMBERS)
    if rank in MEMBERS:
        say("rank", rank, "is number", dist.get_rank(group), "of", dist.get_world_size(group))
        reductions(rank, group)
        rooted(rank, group)
        symmetric(rank, group)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    start(worker, 4)
