"""The stage on several GPUs: a GPU for each rank, chosen by the local rank that a launcher has set."""

from __future__ import annotations

import os
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

import unicoll as dist
from tests.gpu.check import memory_jobs, plugin_jobs, programs, rank_jobs
from tests.gpu.check.kits import Kit
from tests.gpu.check.place import Place, Ranks
from tests.gpu.check.rank_jobs import expect
from tests.gpu.check.record import Reporter, Skip
from unicoll.devices import runtimes
from unicoll.testing import conformance_jobs

_TIMEOUT_S = 20.0
_LARGE = 16 << 20
_APPLICATIONS = ("nvidia-smi", "--query-compute-apps=pid,gpu_uuid", "--format=csv,noheader")


def each_its_own(reporter: Reporter, place: Place) -> None:
    """Programs over unicoll, and over torch.distributed."""
    if place.devices < 2:
        reporter.check("ranks with a GPU each", _one_device)
        return
    own = replace(place, own_devices=True)
    for name in place.kits:
        ranks = Ranks(own, place.devices, [name], timeout=_TIMEOUT_S)
        try:
            programs.run_programs(reporter, ranks, name, PROGRAMS)
        finally:
            reporter.check(f"{name}: the ranks leave", ranks.depart)
    if "torch" in place.kits:
        programs.run_torch(reporter, own, place.devices, [plugin_jobs.collectives, plugin_jobs.ddp])


def _one_device() -> None:
    raise Skip("there is one device")


def a_rank_is_bound_to_the_device_of_its_local_rank(k: Kit) -> None:
    """The group has connected on the device that the launcher's variable names."""
    group: Any = dist.group.WORLD
    resources = group._backends.for_device("cuda").resources
    assert resources is not None, "the group has not connected"
    assert resources.device == rank_jobs.local_rank()
    assert runtimes.runtime("cuda").device_count() >= dist.get_world_size()


def the_first_all_reduce_on_the_default_stream(k: Kit) -> None:
    """As the first operation of any other stage."""
    assert rank_jobs.warm_up(k.name) == rank_jobs.sum_of_ranks()


def a_thread_without_a_context(k: Kit) -> None:
    """It makes operations on the device of its process."""
    x, errors = k.full(8, 1.0), []
    k.synchronize()

    def call() -> None:
        try:
            dist.barrier()
            dist.all_reduce(x)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    k.synchronize()
    expect(k, x, float(dist.get_world_size()))


def messages_around_a_ring(k: Kit) -> None:
    """Those of the conformance suite."""
    wrong = conformance_jobs.messages({"torch": "torch_cuda"}.get(k.name, k.name))
    assert not wrong, wrong


def all_to_all_between_all_pairs(k: Kit) -> None:
    """An element for each rank."""
    me, n = dist.get_rank(), dist.get_world_size()
    given, got = k.array(np.arange(n, dtype=np.float32) + n * me), k.full(n, -1.0)
    dist.all_to_all_single(got, given)
    assert k.numpy(got).tolist() == [float(n * rank + me) for rank in range(n)]


def a_large_all_reduce(k: Kit) -> dict[str, float]:
    """16 MiB, and the time that it takes."""
    x = k.full(_LARGE // 4, 1.0)
    dist.all_reduce(x)
    expect(k, x, float(dist.get_world_size()))
    work = dist.all_reduce(x, async_op=True)
    assert work is not None
    work.synchronize()
    began = time.perf_counter()
    seconds = k.elapsed(lambda: dist.all_reduce(x))
    return {"bytes": _LARGE, "device seconds": seconds, "host seconds": time.perf_counter() - began}


def each_process_uses_its_own_device_only(k: Kit) -> None:
    """A context on device 0 takes memory there; NCCL makes one for a thread without a context."""
    if k.simulated:
        raise Skip("the simulated device reports it as a fault")
    dist.barrier()
    try:
        listed = subprocess.run(_APPLICATIONS, capture_output=True, text=True, timeout=15, check=True).stdout
    except (OSError, subprocess.SubprocessError) as e:
        raise Skip(f"nvidia-smi: {e}") from None
    finally:
        dist.barrier()
    rows = [line.partition(",") for line in listed.splitlines()]
    used = [uuid.strip() for pid, _, uuid in rows if pid.strip() == str(os.getpid())]
    if not used:
        raise Skip("nvidia-smi does not list this process (in a container)")
    assert used == [runtimes.runtime("cuda").facts(rank_jobs.local_rank()).uuid]


PROGRAMS: tuple[Callable[[Kit], Any], ...] = (
    a_rank_is_bound_to_the_device_of_its_local_rank,
    the_first_all_reduce_on_the_default_stream,
    a_thread_without_a_context,
    messages_around_a_ring,
    all_to_all_between_all_pairs,
    a_large_all_reduce,
    *memory_jobs.PROGRAMS,
    each_process_uses_its_own_device_only,
)
