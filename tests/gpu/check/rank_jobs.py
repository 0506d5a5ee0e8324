"""Functions that ranks of every stage run."""

from __future__ import annotations

import gc
import importlib
import threading
import time
import warnings
from collections.abc import Sequence

import numpy as np

import unicoll as dist
from tests.gpu.check import call_counts
from tests.gpu.check.kits import kit
from tests.gpu.check.record import Skip
from unicoll.testing import worker

__all__ = ["count_cuda_calls", "device_facts", "enter", "leave", "left_over", "ready", "run", "warm_up"]

_END_S = 3.0


def count_cuda_calls() -> None:
    """Start counting CUDA calls."""
    call_counts.install()


def ready(kits: Sequence[str], modules: Sequence[str]) -> None:
    """Import modules, and run a first operation of the device and array libraries."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in modules:
            importlib.import_module(name)
    for name in kits:
        k = kit(name)
        k.numpy(k.full(8, 1.0))


def enter(timeout: float, device: int | None) -> None:
    """Join the job, bound to a device or not."""
    worker.DEVICE = device
    worker.enter(timeout)


def leave() -> list[str]:
    """Leave the job; unicoll's threads that still run after some seconds."""
    if dist.is_initialized():
        dist.destroy_process_group()
    return left_over()


def left_over() -> list[str]:
    """unicoll's threads that still run after some seconds."""
    deadline = time.monotonic() + _END_S
    while True:
        left = sorted(t.name for t in threading.enumerate() if t.name.startswith("unicoll"))
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.02)


def warm_up(name: str) -> float:
    """Connect, with one blocking and one asynchronous operation; the sum of rank + 1 over the ranks."""
    k = kit(name)
    x = k.full(8, float(dist.get_rank() + 1))
    dist.all_reduce(x)
    work = dist.all_reduce(k.full(8, 1.0), async_op=True)
    assert work is not None
    work.synchronize()
    k.synchronize()
    found = np.asarray(k.numpy(x))
    assert (found == found[0]).all()
    return float(found[0])


def device_facts() -> dict[str, object]:
    """This rank's device, driver and NCCL."""
    from nccl_comm.library import locate
    from unicoll.arrays import cuda as streams

    cuda = streams.cuda()
    facts = cuda.facts(0)
    nccl = locate.nccl()
    return {
        "name": facts.name,
        "uuid": facts.uuid,
        "bus": facts.bus,
        "memory_bytes": facts.memory,
        "capability": list(facts.capability),
        "driver": cuda.description,
        "devices": cuda.device_count(),
        "nccl": nccl.version,
        "nccl_path": nccl.path,
    }


def run(name: str, module: str, program: str) -> tuple[str, object]:
    """Run a program with an array library: ("done", its result) or ("skip", the reason)."""
    k = kit(name)
    try:
        found = getattr(importlib.import_module(module), program)(k)
    except Skip as why:
        return "skip", str(why)
    k.synchronize()
    gc.collect()  # graphs in a garbage cycle would keep NCCL from ending
    return "done", found
