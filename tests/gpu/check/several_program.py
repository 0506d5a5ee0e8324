"""A program for ``unicoll.run``, with a GPU for each rank; writes what each check has found to a file per rank.

    python -m unicoll.run --nproc-per-node=2 -m tests.gpu.check.several_program FOLDER unicoll cupy

The last words are "unicoll" or "torch" (torch.distributed over unicoll), and the array library.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np

import unicoll as dist
from tests.gpu.check import memory_jobs
from tests.gpu.check.kits import Kit, kit
from tests.gpu.check.record import Skip

_TIMEOUT_S = 20.0
_LARGE = 16 << 20
_APPLICATIONS = ("nvidia-smi", "--query-compute-apps=pid,gpu_uuid", "--format=csv,noheader")
_LOCAL = int(os.environ["LOCAL_RANK"])
Check = Callable[[Kit], Any]


def main(folder: str, what: str, name: str) -> None:
    """Join, make the checks, and leave."""
    size = int(os.environ["WORLD_SIZE"])
    if name == "simulated":
        from tests.simulated_nccl import ranks

        ranks.install(ranks.Settings(policy="random", seed=5), _LOCAL, size)
    made = kit(name, _LOCAL)
    checks = _TORCH if what == "torch" else _UNICOLL
    results: dict[str, dict[str, Any]] = {}
    for check in checks:
        words = check.__name__.strip("_").replace("_", " ")
        try:
            results[words] = {"value": check(made)}
        except Skip as why:
            results[words] = {"skip": str(why)}
        except Exception as error:
            results[words] = {"error": f"{type(error).__name__}: {error}"}
        Path(folder, f"{os.environ['RANK']}.json").write_text(json.dumps(results))


def _sum_of_ranks(size: int) -> float:
    return size * (size + 1) / 2


def _check(k: Kit, array: Any, due: float) -> None:
    found = np.asarray(k.numpy(array))
    assert (found == due).all(), f"{found[found != due][:4]} where {due} was due"


# --- unicoll ---------------------------------------------------------------------------------------------------------


def _a_rank_is_bound_to_the_device_of_its_local_rank(k: Kit) -> None:
    dist.init_process_group("cpu:gloo,cuda:nccl", timeout=_TIMEOUT_S)
    from unicoll.arrays import cuda

    group: Any = dist.group.WORLD
    resources = group._backends.for_device("cuda").resources
    assert resources is not None, "the group has not connected"
    assert resources.device == _LOCAL
    assert cuda.cuda().device_count() >= dist.get_world_size()


def _the_first_all_reduce_on_the_default_stream(k: Kit) -> None:
    x = k.full(8, dist.get_rank() + 1.0)
    dist.all_reduce(x)
    _check(k, x, _sum_of_ranks(dist.get_world_size()))


def _a_thread_without_a_context(k: Kit) -> None:
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
    _check(k, x, float(dist.get_world_size()))


def _messages_around_a_ring(k: Kit) -> None:
    me, n = dist.get_rank(), dist.get_world_size()
    given, got = k.full(1 << 16, float(me)), k.full(1 << 16, -1.0)
    ops = [dist.P2POp(dist.isend, given, (me + 1) % n), dist.P2POp(dist.irecv, got, (me - 1) % n)]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    _check(k, got, float((me - 1) % n))


def _all_to_all_between_all_pairs(k: Kit) -> None:
    me, n = dist.get_rank(), dist.get_world_size()
    given, got = k.array(np.arange(n, dtype=np.float32) + n * me), k.full(n, -1.0)
    dist.all_to_all_single(got, given)
    assert k.numpy(got).tolist() == [float(n * rank + me) for rank in range(n)]


def _a_large_all_reduce(k: Kit) -> dict[str, float]:
    x = k.full(_LARGE // 4, 1.0)
    dist.all_reduce(x)
    _check(k, x, float(dist.get_world_size()))
    work = dist.all_reduce(x, async_op=True)
    assert work is not None
    work.synchronize()
    began = time.perf_counter()
    seconds = k.elapsed(lambda: dist.all_reduce(x))
    return {"bytes": _LARGE, "device seconds": seconds, "host seconds": time.perf_counter() - began}


def _each_process_uses_its_own_device_only(k: Kit) -> None:
    """A context on device 0 takes memory there; NCCL makes one for a thread without a context."""
    if k.simulated:
        raise Skip("the simulated device reports it as a fault")
    from unicoll.arrays import cuda

    dist.barrier()
    try:
        listed = subprocess.run(_APPLICATIONS, capture_output=True, text=True, timeout=15, check=True).stdout
    except (OSError, subprocess.SubprocessError) as e:
        raise Skip(f"nvidia-smi: {e}") from None
    finally:
        dist.barrier()
    used = [
        uuid.strip()
        for pid, _, uuid in (line.partition(",") for line in listed.splitlines())
        if pid.strip() == str(os.getpid())
    ]
    if not used:
        raise Skip("nvidia-smi does not list this process (in a container)")
    assert used == [cuda.cuda().facts(_LOCAL).uuid]


def _leaving(k: Kit) -> None:
    dist.destroy_process_group()
    left = sorted(t.name for t in threading.enumerate() if t.name.startswith("unicoll"))
    if k.simulated:
        from tests.simulated_nccl import ranks

        left += ranks.complaints()
    assert not left, left


# --- torch.distributed -----------------------------------------------------------------------------------------------


def _torch() -> Any:
    return importlib.import_module("torch")


def _torch_distributed_over_unicoll(k: Kit) -> None:
    torch = _torch()
    importlib.import_module("unicoll.torch_plugin")
    torch.distributed.init_process_group(
        "unicoll", timeout=timedelta(seconds=_TIMEOUT_S), device_id=torch.device("cuda", _LOCAL)
    )
    x = k.full(8, torch.distributed.get_rank() + 1.0)
    torch.distributed.all_reduce(x)
    _check(k, x, _sum_of_ranks(torch.distributed.get_world_size()))


def _gradients_of_ddp_are_the_mean(k: Kit) -> None:
    torch = _torch()
    n = torch.distributed.get_world_size()
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 4).cuda(), device_ids=[_LOCAL])
    for _ in range(3):
        model.zero_grad()
        model(torch.full((1, 8), torch.distributed.get_rank() + 1.0, device="cuda")).sum().backward()
        _check(k, model.module.weight.grad.flatten(), (n + 1) / 2)


def _leaving_torch_distributed(k: Kit) -> None:
    _torch().distributed.destroy_process_group()


_UNICOLL: tuple[Check, ...] = (
    _a_rank_is_bound_to_the_device_of_its_local_rank,
    _the_first_all_reduce_on_the_default_stream,
    _a_thread_without_a_context,
    _messages_around_a_ring,
    _all_to_all_between_all_pairs,
    _a_large_all_reduce,
    *memory_jobs.PROGRAMS,
    _each_process_uses_its_own_device_only,
    _leaving,
)
_TORCH: tuple[Check, ...] = (
    _torch_distributed_over_unicoll,
    _gradients_of_ddp_are_the_mean,
    _leaving_torch_distributed,
)

if __name__ == "__main__":
    main(*sys.argv[1:])
