"""An all-reduce of one's own: every process hands on, to its right, what came from its left."""

from __future__ import annotations

import torch
import torch.distributed as dist
from processes import say, start


def ring_all_reduce(data: torch.Tensor, total: torch.Tensor) -> None:
    """``total`` becomes the sum of all ranks' ``data``."""
    rank, size = dist.get_rank(), dist.get_world_size()
    left, right = (rank - 1) % size, (rank + 1) % size
    total.copy_(data)
    outgoing, incoming = data.clone(), torch.empty_like(data)
    for _ in range(size - 1):
        request = dist.isend(outgoing, right)
        dist.recv(incoming, left)
        request.wait()
        total += incoming
        outgoing, incoming = incoming, outgoing


def worker(rank: int, size: int) -> None:
    dist.init_process_group("gloo", rank=rank, world_size=size)
    for elements in (1, 7, 100_000):
        data = torch.arange(elements, dtype=torch.float64) * (rank + 1)
        total, expected = torch.empty_like(data), data.clone()
        ring_all_reduce(data, total)
        dist.all_reduce(expected)
        say("rank", rank, "elements", elements, "sum", total.sum().item(), torch.equal(total, expected))
    dist.destroy_process_group()


if __name__ == "__main__":
    start(worker, 4)
