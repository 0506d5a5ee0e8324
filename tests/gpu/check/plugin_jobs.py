"""Programs with torch.distributed over unicoll, on each of two ranks: tests of the torch plug-in that need CUDA.

On the simulated device tensors are those of tests/simulated_nccl/torch_tensors.py; torch's C++ code (DDP, FSDP2,
functional collectives) has tensors of the CPU there.
"""

from __future__ import annotations

import gc
import importlib
import time
import warnings
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import numpy as np

from tests.gpu.check import kits
from tests.gpu.check.kits import Kit, SimulatedKit
from tests.gpu.check.rank_jobs import expect, left_over, local_rank
from tests.gpu.check.record import Skip
from tests.gpu.check.streaming_jobs import replayed
from tests.support import worker

_LARGE = 64 << 20
_COUNT = 4096
_STEPS = 3


class _Rehearsal(SimulatedKit):
    """torch's tensors on the simulated device."""

    def __init__(self) -> None:
        super().__init__()
        self.torch: Any = importlib.import_module("tests.simulated_nccl.torch_tensors")

    def full(self, count: int, value: float, dtype: str = "float32") -> Any:
        return self.torch.full(count, value, np.dtype(dtype))

    def numpy(self, array: Any) -> Any:
        return array.array.numpy()

    def compute(self, out: Any, formula: Callable[..., Any], *inputs: Any) -> None:
        super().compute(out.array, formula, *(x.array for x in inputs))


def enter(simulated: bool, timeout: float) -> None:
    """Join torch.distributed's job, bound to the device."""
    torch: Any = importlib.import_module("torch")
    importlib.import_module("unicoll.torch_plugin")
    if simulated:
        importlib.import_module("tests.simulated_nccl.torch_tensors").install()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # functions that newer versions of torch have renamed
    kits.KITS[""] = (lambda device: _Rehearsal()) if simulated else kits.TorchKit
    kits.kit("", local_rank())
    rank, size = worker.rank_and_size()
    torch.distributed.init_process_group(
        "unicoll",
        init_method="env://" if worker._init == "env" else worker._init,
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=timeout),
        device_id=torch.device("cuda", local_rank()),
    )


def leave() -> list[str]:
    """Leave; unicoll's threads that are still running."""
    _dist().destroy_process_group()
    return left_over()


def _dist() -> Any:
    return importlib.import_module("torch.distributed")


# --- calls of torch.distributed itself --------------------------------------------------------------------------------


def collectives(k: Kit) -> None:
    """Blocking and asynchronous, into lists and one tensor; objects; a barrier; a future."""
    dist = _dist()
    me, n = dist.get_rank(), dist.get_world_size()
    x = k.full(_COUNT, me + 1.0)
    dist.all_reduce(x)
    expect(k, x, n * (n + 1) / 2)
    work = dist.all_reduce(x, async_op=True)
    work.wait()
    expect(k, x, n * n * (n + 1) / 2)
    whole, parts = k.full(n * 8, 0.0), [k.full(8, 0.0) for _ in range(n)]
    dist.all_gather_into_tensor(whole, k.full(8, float(me)))
    dist.all_gather(parts, k.full(8, float(me)))
    assert np.asarray(k.numpy(whole)).reshape(n, 8)[:, 0].tolist() == list(range(n))
    for r, part in enumerate(parts):
        expect(k, part, float(r))
    objects: list[Any] = [None] * n
    dist.all_gather_object(objects, {"rank": me})
    assert objects == [{"rank": r} for r in range(n)]
    y = k.full(_COUNT, 1.0)
    expect(k, dist.all_reduce(y, async_op=True).get_future().wait()[0], float(n))
    dist.barrier()


def _crossing(k: Kit, count: int) -> tuple[list[Any], Any]:
    """Both ranks receive first; the messages are not buffered."""
    dist = _dist()
    other = 1 - dist.get_rank()
    got, given = k.full(count, 0.0), k.full(count, dist.get_rank() + 1.0)
    return [dist.P2POp(dist.irecv, got, other), dist.P2POp(dist.isend, given, other)], got


def a_crossing_batch(k: Kit) -> dict[str, float]:
    """64 MiB each way by ``batch_isend_irecv``, receives first and sends first."""
    dist = _dist()
    nbytes = 1 << 20 if k.simulated else _LARGE
    seconds = 0.0
    for order in (1, -1):
        ops, got = _crossing(k, nbytes // 4)

        def body(ops: list[Any] = ops[::order]) -> None:
            for work in dist.batch_isend_irecv(ops):
                work.wait()

        seconds = k.elapsed(body)
        expect(k, got, 2.0 - dist.get_rank())
    return {"bytes": nbytes, "seconds": seconds}


def works_give_up_their_tensors(k: Kit) -> dict[str, int]:
    """Many asynchronous operations on tensors without other references, as fast as the host can."""
    dist = _dist()
    made = []
    with k.late(0.05):
        for _ in range(50):
            x = k.full(_COUNT, 1.0)
            dist.all_reduce(x, async_op=True).wait()
            made.append(weakref.ref(x))
            del x
        held = sum(ref() is not None for ref in made)
    assert held <= 5, f"{held} of {len(made)} tensors are held"
    return {"held": held}


# --- groups -----------------------------------------------------------------------------------------------------------


def split_group(parts: list[list[int]], group: Any = None) -> Any:
    """torch's ``split_group``, which in torch 2.6 works only for groups of its own NCCL."""
    dist = _dist()
    try:
        return dist.split_group(group, parts)
    except (RuntimeError, ValueError) as error:
        if not any(words in str(error) for words in ("does not support splitting", "is not registered")):
            raise
    parent = group or dist.group.WORLD
    return parent.split_group(next((part for part in parts if parent.rank() in part), parts[0]))


def subgroups(k: Kit) -> None:
    """In a job bound to devices, parts made by new_group and split_group, for one rank and for all."""
    dist = _dist()
    me, n = dist.get_rank(), dist.get_world_size()
    made = [(dist.new_group(list(range(n))), range(n)), (dist.new_group([0]), range(1))]
    made.append((split_group([[r] for r in range(n)]), range(me, me + 1)))
    for group, members in made:
        if me in members:
            x = k.full(_COUNT, me + 1.0)
            dist.all_reduce(x, group=group)
            expect(k, x, sum(r + 1.0 for r in members))
            assert str(group.bound_device_id) == "cuda:0"
    for group, _ in reversed(made):
        if isinstance(group, dist.ProcessGroup):
            group.shutdown()


# --- graphs -----------------------------------------------------------------------------------------------------------


def _recorded(k: Kit, reduce: Callable[[Any], object]) -> dict[str, int]:
    """Replay a graph; the number of works that hold tensors afterwards."""
    dist = _dist()
    world: Any = dist.group.WORLD
    kept = weakref.ref(replayed(k, dist.get_rank(), dist.get_world_size(), reduce))
    for _ in range(60):  # each checks a few earlier works
        dist.all_reduce(k.full(8, 1.0), async_op=True).wait()
    gc.collect()
    deadline = time.monotonic() + 5.0
    while kept() is not None and time.monotonic() < deadline:  # the watchdog has another thread let go of it
        time.sleep(0.02)
    assert kept() is None, "a tensor of a graph is still held"
    return {"works with tensors": sum(not work.released for work in world.members.works._held.values())}


def a_graph_of_a_blocking_all_reduce(k: Kit) -> dict[str, int]:
    """torch.cuda.graph around ``dist.all_reduce``."""
    return _recorded(k, lambda x: _dist().all_reduce(x))


def a_graph_of_asynchronous_all_reduces(k: Kit) -> dict[str, int]:
    """An asynchronous all_reduce in torch.cuda.graph, with many works in one graph."""

    def operation(x: Any) -> None:
        for _ in range(20):
            _dist().all_reduce(k.full(8, 1.0), async_op=True).wait()
        _dist().all_reduce(x, async_op=True).wait()

    return _recorded(k, operation)


# --- DDP, FSDP2, functional collectives -------------------------------------------------------------------------------


def _network(torch: Any) -> Any:
    torch.manual_seed(1)
    layers = [torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 32), torch.nn.ReLU()]
    return torch.nn.Sequential(*layers, torch.nn.Linear(32, 4)).double()


def _trained(torch: Any, model: Any, batches: Callable[[int], Any]) -> Any:
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(_STEPS):
        optimizer.zero_grad()
        model(batches(step)).square().mean().backward()
        optimizer.step()
    return model


def _batch(torch: Any, step: int, rank: int) -> Any:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(16, 8, dtype=torch.float64, generator=generator)


def _difference(torch: Any, found: Any, expected: Any) -> float:
    """The largest relative difference of parameters."""
    pairs = zip(found, expected, strict=True)
    worst = max(float((a.detach().cpu() - b.detach()).abs().max() / b.detach().abs().max()) for a, b in pairs)
    assert worst < 1e-9, f"parameters differ by {worst:g} (relative)"
    return worst


def _training(k: Kit) -> tuple[Any, str, Any, Callable[[int], Any]]:
    """torch, the device, the parameters of one process with all batches, and this rank's batches."""
    torch: Any = importlib.import_module("torch")
    dist = _dist()
    me, n = dist.get_rank(), dist.get_world_size()
    device = "cpu" if k.simulated else "cuda"
    expected = _trained(
        torch, _network(torch), lambda step: torch.cat([_batch(torch, step, r) for r in range(n)])
    )
    return torch, device, expected, lambda step: _batch(torch, step, me).to(device)


def ddp(k: Kit) -> dict[str, float]:
    """DistributedDataParallel with its options and comm hooks, against one process with the whole batch."""
    torch, device, expected, batches = _training(k)
    hooks = importlib.import_module("torch.distributed.algorithms.ddp_comm_hooks.default_hooks")
    world = _dist().group.WORLD
    found = {}
    for name, options, hook in (
        ("plain", {}, None),
        ("many buckets", {"bucket_cap_mb": 0.0001}, None),
        ("views of buckets", {"gradient_as_bucket_view": True, "static_graph": True}, None),
        ("a comm hook", {"bucket_cap_mb": 0.0001}, hooks.allreduce_hook),
    ):
        model = torch.nn.parallel.DistributedDataParallel(_network(torch).to(device), **options)
        if hook is not None:
            model.register_comm_hook(world, hook)
        trained = _trained(torch, model, batches)
        found[name] = _difference(torch, trained.module.parameters(), expected.parameters())
    return found


def fsdp2(k: Kit) -> dict[str, float]:
    """``fully_shard``, with and without resharding after the forward pass."""
    torch, device, expected, batches = _training(k)
    if device == "cpu" and not hasattr(torch.cpu.Stream, "record_event"):
        raise Skip("this version of torch has FSDP2 on GPUs only")
    fully_shard = importlib.import_module("torch.distributed.fsdp").fully_shard
    mesh = importlib.import_module("torch.distributed.device_mesh").init_device_mesh(
        device, (_dist().get_world_size(),)
    )
    found = {}
    for reshard in (True, False):
        model = _network(torch).to(device)
        for layer in model:
            if list(layer.parameters()):
                fully_shard(layer, mesh=mesh, reshard_after_forward=reshard)
        fully_shard(model, mesh=mesh, reshard_after_forward=reshard)
        trained = _trained(torch, model, batches)
        parameters = [p.full_tensor() for p in trained.parameters()]
        found[f"reshard_after_forward={reshard}"] = _difference(torch, parameters, expected.parameters())
    return found


def functional_collectives(k: Kit) -> None:
    """Functional all_reduce and all_gather, which tensor parallelism and compiled programs call."""
    torch: Any = importlib.import_module("torch")
    functional = importlib.import_module("torch.distributed._functional_collectives")
    dist = _dist()
    me, n = dist.get_rank(), dist.get_world_size()
    x = torch.full((8,), me + 1.0, device="cpu" if k.simulated else "cuda")
    total = functional.all_reduce(x, "sum", dist.group.WORLD)
    whole = functional.all_gather_tensor(x, 0, dist.group.WORLD)
    assert (total == n * (n + 1) / 2).all()
    assert whole.reshape(n, 8)[:, 0].tolist() == [r + 1.0 for r in range(n)]


PROGRAMS = (
    collectives,
    a_crossing_batch,
    subgroups,
    ddp,
    fsdp2,
    a_graph_of_a_blocking_all_reduce,
    a_graph_of_asynchronous_all_reduces,
    works_give_up_their_tensors,
    functional_collectives,
)
"""The most important programs come first."""
