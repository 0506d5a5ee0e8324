"""A torch.distributed program; arguments: the backend's name and the scenario."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from contextlib import suppress
from datetime import timedelta

import torch
import torch.distributed as dist

import unicoll.torch_plugin as plugin

backend, *words = sys.argv[1:]
if backend in ("mpi", "cpu:mpi"):
    plugin.enable_mpi()
dist.init_process_group(backend, timeout=timedelta(seconds=30))
rank, size = dist.get_rank(), dist.get_world_size()
x = torch.tensor([rank + 1.0])
dist.all_reduce(x)
assert x.item() == size * (size + 1) / 2
pair = dist.new_group([0, 1])
if rank < 2:
    dist.all_reduce(x, group=pair)
work = dist.all_reduce(x, async_op=True)


def say(text: str) -> None:
    """Print one line with a single write."""
    os.write(1, f"{text}\n".encode())


def threads() -> list[str]:
    """Threads except the main one and MPI's, which run until interpreter exit; a store server waits for late peers."""
    for _ in range(100):
        left = [t.name for t in threading.enumerate()[1:] if not t.name.startswith("unicoll-mpi-")]
        if not left:
            break
        time.sleep(0.05)
    return left


def soon() -> dist.distributed_c10d.AllreduceOptions:
    """Options with a timeout of one second."""
    opts = dist.distributed_c10d.AllreduceOptions()
    opts.timeout = timedelta(seconds=1)
    if hasattr(opts, "asyncOp"):  # not in torch 2.6
        opts.asyncOp = False
    return opts


for word in words:
    if word == "explain" and rank == 0:
        say(plugin.explain())
    elif word == "detail":
        dist.monitored_barrier(timeout=timedelta(seconds=20))
    elif word == "leave":
        work.wait()
        dist.destroy_process_group()
        left = threads()
        say(f"rank {rank} of {size}: left {left}")
    elif word == "torchs":
        theirs = dist.new_group(backend="gloo", timeout=timedelta(seconds=30))
        y = torch.tensor([rank + 1.0])
        dist.all_reduce(y, group=theirs)
        assert y.item() == size * (size + 1) / 2
        dist.destroy_process_group(theirs)
    elif word == "again":
        dist.init_process_group(backend, timeout=timedelta(seconds=30))
        dist.barrier()
    elif word == "die":
        work.wait()
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            dist.all_reduce(x)
        except RuntimeError as error:
            say(f"rank {rank}: {type(error).__name__}: {error}")
            os._exit(0)
    elif word == "late":
        work.wait()
        store = dist.distributed_c10d._get_default_store()
        if rank == 1:
            with suppress(RuntimeError):  # rank 0's end may end the store
                store.get("rank 0 is done")
            os._exit(0)
        for call in (
            lambda: dist.monitored_barrier(pair, timedelta(seconds=1)),
            lambda: dist.distributed_c10d._get_default_group().allreduce([x], soon()).wait(),
        ):
            try:
                call()
            except RuntimeError as error:
                say(f"rank {rank}: {type(error).__name__}: {error}")
        store.set("rank 0 is done", "")
        os._exit(0)
    elif word == "abort":
        work.wait()
        if rank == 0:
            time.sleep(0.5)
            dist.distributed_c10d._abort_process_group()
        else:
            try:
                dist.all_reduce(x)
            except RuntimeError as error:
                say(f"rank {rank}: {type(error).__name__}")
            dist.destroy_process_group()
        left = threads()
        say(f"rank {rank} of {size}: left {left}")
    elif word == "raise" and rank == 1:
        raise ValueError("an error of the program")
    elif word == "mismatch":
        y = torch.ones(2 + rank)
        try:
            dist.all_reduce(y)
        except RuntimeError as error:
            say(f"rank {rank}: {type(error).__name__}: {error}")
