"""What ranks of every stage do."""

from __future__ import annotations

import gc
import importlib
import threading
import time
import warnings
from collections.abc import Sequence

import numpy as np

import unicoll as dist
from unicoll.testing import worker

from . import asking
from .kits import kit
from .record import Skip

__all__ = ["count_what_is_asked", "device_facts", "enter", "leave", "left_over", "ready", "run", "warm_up"]

_END_S = 3.0


def count_what_is_asked() -> None:
    """Count what is asked of CUDA from now on."""
    asking.install()


def ready(kits: Sequence[str], modules: Sequence[str]) -> None:
    """Import modules, and bring the device and array libraries to where they have done something."""
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
    """Leave the job; threads of ours that are still there after a while."""
    if dist.is_initialized():
        dist.destroy_process_group()
    return left_over()


def left_over() -> list[str]:
    """Threads of ours that are still there, once they have had time to go."""
    deadline = time.monotonic() + _END_S
    while True:
        left = sorted(t.name for t in threading.enumerate() if t.name.startswith("unicoll"))
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.02)


def warm_up(name: str) -> float:
    """Connect, and do one operation of each way of calling; the sum of the ranks and one more each."""
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
    """The device, the driver and NCCL, as this rank finds them."""
    from nccl_comm import library
    from unicoll import streams

    cuda = streams.cuda()
    facts = cuda.facts(0)
    nccl = library.nccl()
    return {
        "name": facts.name, "uuid": facts.uuid, "bus": facts.bus, "memory_bytes": facts.memory,
        "capability": list(facts.capability), "driver": cuda.description, "devices": cuda.device_count(),
        "nccl": nccl.version, "nccl_path": nccl.path,
    }  # fmt: skip


def run(name: str, module: str, program: str) -> tuple[str, object]:
    """A program of a stage with an array library: ("done", what it returns) or ("skip", why)."""
    k = kit(name)
    try:
        found = getattr(importlib.import_module(module), program)(k)
    except Skip as why:
        return "skip", str(why)
    k.synchronize()
    gc.collect()  # graphs that only a cycle of garbage holds would keep NCCL from ending
    return "done", found
