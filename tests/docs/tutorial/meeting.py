"""The three ways to meet: the environment's variables, a file that all processes can lock, an address."""

from __future__ import annotations

import os
import tempfile

import torch
import torch.distributed as dist
from processes import say, start

SIZE = 3


def join_by(way: str, rank: int) -> None:
    port = os.environ["MASTER_PORT"]
    if way == "env":
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(SIZE))
        dist.init_process_group("gloo", init_method="env://")
        del os.environ["RANK"], os.environ["WORLD_SIZE"]
    elif way == "tcp":
        dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=SIZE)
    else:
        path = os.path.join(tempfile.gettempdir(), f"tutorial-meeting-{port}")
        dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=SIZE)


def worker(rank: int, size: int) -> None:
    for way in (
        "env",
        "file",
        "tcp",
    ):  # not tcp after env: a process could reach the store that is being closed
        join_by(way, rank)
        data = torch.tensor([rank + 1.0])
        dist.all_reduce(data)
        say(way, "rank", dist.get_rank(), "of", dist.get_world_size(), "sum", data.item())
        dist.barrier()
        dist.destroy_process_group()
        assert not dist.is_initialized()


if __name__ == "__main__":
    start(worker, SIZE)
