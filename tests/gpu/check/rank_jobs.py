"""Functions that ranks of several stages run, and of those on conformance in addition to the suite's."""

from __future__ import annotations

import gc
import importlib
import os
import threading
import time
import warnings
from collections import Counter
from collections.abc import Sequence
from typing import Any, cast

import numpy as np

import unicoll as dist
from tests.gpu.check.kits import Kit, kit
from tests.gpu.check.record import Skip
from tests.support import worker
from unicoll.devices import runtimes
from unicoll.devices.device_runtime import DeviceRuntime

_END_S = 5.0


class _CountingCuda:
    """A :class:`unicoll.devices.device_runtime.DeviceRuntime` that counts the calls of each thread."""

    def __init__(self, real: DeviceRuntime) -> None:
        self._real = real
        self.calls: Counter[tuple[int, str]] = Counter()

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._real, name)
        if name.startswith("_") or not callable(found):
            return found

        def counted(*args: Any, **kwargs: Any) -> Any:
            self.calls[threading.get_ident(), name] += 1
            return found(*args, **kwargs)

        setattr(self, name, counted)
        return counted


def count_cuda_calls() -> None:
    """Start counting CUDA calls; before any group is made."""
    runtimes.install("cuda", cast(DeviceRuntime, _CountingCuda(runtimes.runtime("cuda"))))


def cuda_calls() -> Counter[str]:
    """The CUDA calls of this thread so far, by name."""
    me, counting = threading.get_ident(), cast(Any, runtimes.runtime("cuda"))
    return Counter({name: n for (thread, name), n in counting.calls.items() if thread == me})


def local_rank() -> int:
    """The number of this rank's device."""
    return int(os.environ.get("LOCAL_RANK", 0))


def ready(kits: Sequence[str], modules: Sequence[str], own_device: bool = False) -> None:
    """Import modules, and run a first operation of the device and array libraries."""
    if own_device:  # as a launcher does
        os.environ |= {"LOCAL_RANK": os.environ["RANK"], "LOCAL_WORLD_SIZE": os.environ["WORLD_SIZE"]}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in modules:
            importlib.import_module(name)
    for name in kits:
        k = kit(name, local_rank())
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


def expect(k: Kit, array: Any, value: float, what: str = "the array") -> None:
    """Compare an array's elements with the value that all of them should have."""
    found = np.asarray(k.numpy(array))
    wrong = int((found != value).sum())
    assert not wrong, f"{what}: {wrong} of {found.size} elements are not {value}: {found[found != value][:4]}"


def sum_of_ranks() -> int:
    """The sum of rank + 1 over the ranks."""
    n = dist.get_world_size()
    return n * (n + 1) // 2


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

    cuda = runtimes.runtime("cuda")
    facts = cuda.facts(0)
    nccl = locate.nccl()
    return {
        "name": facts.name,
        "uuid": facts.uuid,
        "bus": facts.bus,
        "memory_bytes": facts.memory,
        "capability": list(facts.capability),
        "driver": cuda.description,
        "runtime": cuda.name,
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


# --- conformance ------------------------------------------------------------------------------------------------------


def explained(name: str) -> str:
    """The group's description, after an operation on an array of a kit."""
    pg = dist.group.WORLD
    assert pg is not None
    pg.all_reduce(kit(name).full(4, 1.0))
    return pg.describe()


def sent_to_itself(name: str) -> None:
    """A batch of a send of a rank to itself and a receive."""
    k, me = kit(name), dist.get_rank()
    sent, got = k.full(1000, float(me)), k.full(1000, -1.0)
    for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, sent, me), dist.P2POp(dist.irecv, got, me)]):
        work.wait()
    expect(k, got, me)


def mixed(name: str) -> None:
    """CPU and CUDA arrays and objects in one group."""
    k, me, n = kit(name), dist.get_rank(), dist.get_world_size()
    for _ in range(3):
        host, device = np.full(100, me + 1.0), k.full(100, float(me + 1))
        works = [dist.all_reduce(x, async_op=True) for x in (host, device)]
        for work in reversed(works):
            assert work is not None
            work.wait()
        assert (host == sum_of_ranks()).all()
        expect(k, device, sum_of_ranks())
        found: list[Any] = [None] * n
        dist.all_gather_object(found, {"rank": me})
        assert found == [{"rank": r} for r in range(n)]
    said = dist.explain()
    assert "nccl" in said, said
    assert "; expected transports: " in said, said
    assert "not known" not in said, said
