"""Two processes, messages from one to the other: blocking ones first, then immediate ones."""

from __future__ import annotations

import torch
import torch.distributed as dist
from processes import say, start


def blocking(rank: int) -> None:
    data = torch.zeros(1)
    if rank == 0:
        data += 1
        dist.send(tensor=data, dst=1)
    else:
        dist.recv(tensor=data, src=0)
    say("blocking: rank", rank, "has", data[0].item())


def immediate(rank: int) -> None:
    data = torch.zeros(1)
    if rank == 0:
        data += 1
        request = dist.isend(tensor=data, dst=1)
    else:
        request = dist.irecv(tensor=data, src=0)
    request.wait()
    say("immediate: rank", rank, "has", data[0].item(), "completed", request.is_completed())


def worker(rank: int, size: int) -> None:
    dist.init_process_group("gloo", rank=rank, world_size=size)
    blocking(rank)
    immediate(rank)  # and the process ends: it need not leave the job in so many words


if __name__ == "__main__":
    start(worker, 2)
