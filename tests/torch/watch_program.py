"""A program over torch's own Gloo, one process per rank; argument: what rank 1 does in place of the last all_reduce.

With UNICOLL_WATCH=1 the program needs no change; with the word "watch" it calls ``watch()`` itself. A rank that is to
hang does so until the test ends it.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as F

import unicoll

fault, *words = sys.argv[1:]
fault, _, how = fault.partition(" with ")
backend = "gloo"
if how == "the default backend":
    backend = None
elif how == "two backends":
    import torch.testing._internal.distributed.fake_pg  # a backend for CUDA without CUDA

    backend = "cpu:gloo,cuda:fake"
elif how == "DETAIL":
    os.environ["TORCH_DISTRIBUTED_DEBUG"] = "DETAIL"
    dist.set_debug_level_from_env()
if "watch" in words:
    from unicoll.torch_plugin import watch

    watch()
    watch(
        on_hang=lambda error: os._exit(len(error.ranks)) if isinstance(error, unicoll.DeadlockError) else None
    )
if (
    fault == "device"
):  # Gloo in place of NCCL: what torch's flight recorder says of a call decides whether it has ended
    from torch._C import _distributed_c10d as torchs

    from unicoll.torch_watch.torch_groups import TorchGroup

    torchs._dump_nccl_trace_json = torchs._dump_fr_trace_json
    TorchGroup.completes = property(lambda group: False, lambda group, value: None)
dist.init_process_group(backend, timeout=timedelta(minutes=10))
rank, size = dist.get_rank(), dist.get_world_size()
x = torch.ones(3)


def begin_again(number: int) -> None:
    """Make torch's default group again: it hangs if something keeps rank 0's store, with the last addresses, alive."""
    dist.destroy_process_group()
    destroyed = f"{words[-1]}.{number}"
    if rank == 0:
        open(destroyed, "w").close()
    while not os.path.exists(destroyed):
        time.sleep(0.01)
    dist.init_process_group("gloo", timeout=timedelta(minutes=10))
    dist.all_reduce(x)


if fault == "again":
    dist.all_reduce(x)
    for number in range(6):
        dist.barrier()
        begin_again(number)
        time.sleep(number / 40)  # the thread that joins may be anywhere
    print("left", flush=True)
    os._exit(0)
others = range(fault.endswith("without rank 0"), size)
group = dist.new_group([*others]) if others.start else dist.group.WORLD
other = dist.new_group([*others])
model = None
if dist.get_debug_level() != dist.DebugLevel.DETAIL:  # there torch 2.13 crashes
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))


def step() -> None:
    """One step of training; torch's C++ code makes its all_reduce."""
    if model is not None:
        model(torch.ones(2, 4)).sum().backward()


def await_watched() -> None:
    """Wait until this rank's groups are watched, which begins on a thread."""
    while True:
        try:
            folder = os.path.dirname(unicoll.dump_flight_recorder())
        except unicoll.NotInitializedError:
            time.sleep(0.05)
        else:
            return print(f"dump in {folder}", flush=True)


@torch.compile(backend="eager")
def compiled(tensor: torch.Tensor) -> torch.Tensor:
    """The work is waited for between two graphs."""
    tensor = tensor * 2
    work = dist.all_reduce(tensor, async_op=True)
    work.wait()
    return tensor + 1


def hang() -> None:
    """Do something else than to communicate."""
    threading.Event().wait()


step()
dist.all_reduce(x)
await_watched()
dist.barrier()
print("ready", flush=True)
if rank not in others:
    dist.destroy_process_group()
    hang()
if rank == 1:
    if fault in ("killed", "killed in training"):
        os.kill(os.getpid(), signal.SIGKILL)
    if fault == "stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
    if fault == "exits":
        sys.exit(3)
    if fault == "raises":
        raise ValueError("bad batch")
    if fault == "leaves":  # model keeps torch's group, and its connections, alive
        dist.destroy_process_group()
        hang()
    if fault in ("sleeps", "trains", "device"):
        hang()
    if fault.startswith("other group"):
        dist.broadcast(x, others[0], group=other)
    if fault == "other shape":
        x = torch.ones(5)
    if fault == "other type":
        x = x.double()
    if fault == "other in C++":
        F.broadcast(x, 0, dist.group.WORLD).sum()
    if fault in ("other order", "skips"):
        dist.broadcast(x, 0)
if fault in ("trains", "killed in training"):
    step()
elif fault == "other in C++":
    F.all_reduce(x, "sum", dist.group.WORLD).sum()
elif fault == "device":
    dist.all_reduce(x, async_op=True)
    dist.barrier(async_op=True)
    hang()
elif fault == "other of many":
    works = [dist.broadcast(x, int(rank == 1 and i == 77), async_op=True) for i in range(200)]
    try:
        for work in works:
            work.wait()
    except RuntimeError:  # Gloo ends calls of some ranks
        hang()
    hang()
elif fault == "other order":
    dist.all_reduce(x)
    dist.broadcast(x, 0) if rank != 1 else hang()
elif fault == "skips":
    dist.barrier()
elif fault == "messages":
    received = dist.irecv(torch.empty(3), (rank - 1) % size, tag=7)
    sent = dist.isend(x, (rank + 1) % size, tag=7)
    received.wait()
    sent.wait()
    dist.recv(x, (rank + 1) % size, tag=7)
elif fault == "raises" and "later" in words:
    from unicoll.torch_watch.torch_groups import end_completed

    work = dist.all_reduce(x, async_op=True)
    while not work.is_completed():
        time.sleep(0.01)
    end_completed()  # as a thread of unicoll does
    work.wait()
elif fault == "receives":
    dist.recv(x, 1) if rank == 0 else hang()
elif fault == "none":
    works = [dist.all_reduce(x, async_op=True) for _ in range(3)]
    for work in works:
        work.wait()
    dist.all_gather([torch.empty(2) for _ in range(size)], torch.ones(2))
    dist.send(x, 1, tag=5) if rank == 0 else dist.recv(x, 0, tag=5) if rank == 1 else None
    dist.monitored_barrier()
    dist.all_gather_object([None] * size, {"rank": rank})
    dist.barrier(group=other)
    dist.destroy_process_group(other)
    unicoll.dump_flight_recorder(words[-1])
    assert compiled(torch.ones(2)).tolist() == [2 * size + 1.0] * 2
    dist.barrier()
elif fault.startswith("other "):
    try:
        dist.all_reduce(x, group=group)
    except RuntimeError:  # Gloo ends the processes of some ranks, and calls of others
        hang()
else:
    dist.all_reduce(x)
dist.destroy_process_group()
print("left", *sorted(thread.name for thread in threading.enumerate()), flush=True)
