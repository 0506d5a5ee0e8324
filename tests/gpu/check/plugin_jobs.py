"""Programs with torch.distributed over unicoll, on each of two ranks: tests of the torch plug-in that need CUDA.

On the simulated device tensors are those of tests/simulated_nccl/torch_tensors.py; torch's C++ code (DDP, FSDP2,
functional collectives) has tensors of the CPU there.
"""

from __future__ import annotations

import gc
import importlib
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import numpy as np

from tests.gpu.check.kits import Kit, SimulatedKit, TorchKit
from tests.gpu.check.record import Skip
from unicoll.testing import worker

__all__ = ["PROGRAMS", "enter", "leave", "run", "split_group"]

_LARGE = 64 << 20
_COUNT = 4096
_STEPS = 3
_END_S = 5.0
"""Seconds for threads to end."""


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


_kit: Kit


def enter(simulated: bool, timeout: float) -> None:
    """Join torch.distributed's job, bound to the device."""
    global _kit
    torch: Any = importlib.import_module("torch")
    importlib.import_module("unicoll.torch_plugin")
    if simulated:
        importlib.import_module("tests.simulated_nccl.torch_tensors").install()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # functions that newer versions of torch have renamed
    _kit = _Rehearsal() if simulated else TorchKit()
    rank, size = worker.rank_and_size()
    torch.distributed.init_process_group(
        "unicoll",
        init_method=worker._init,
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=timeout),
        device_id=torch.device("cuda", 0),
    )


def leave() -> list[str]:
    """Leave; unicoll's threads that are still running."""
    _dist().destroy_process_group()
    ours = [t for t in threading.enumerate() if t.name.startswith("unicoll")]
    for thread in ours:
        thread.join(_END_S)
    return sorted(t.name for t in ours if t.is_alive())


def run(program: str) -> tuple[str, object]:
    """Run a program: ("done", its result) or ("skip", the reason)."""
    try:
        found = globals()[program](_kit)
    except Skip as why:
        return "skip", str(why)
    _kit.synchronize()
    gc.collect()  # graphs in a garbage cycle would keep NCCL from ending
    return "done", found


def _dist() -> Any:
    return importlib.import_module("torch.distributed")


def _check(k: Kit, tensor: Any, due: float) -> None:
    found = np.asarray(k.numpy(tensor))
    assert (found == due).all(), f"found {sorted(set(found.tolist()))[:4]}, expected {due}"


# --- calls of torch.distributed itself --------------------------------------------------------------------------------


def collectives(k: Kit) -> None:
    """Blocking and asynchronous, into lists and one tensor; objects; a barrier; a future."""
    dist = _dist()
    me, n = dist.get_rank(), dist.get_world_size()
    x = k.full(_COUNT, me + 1.0)
    dist.all_reduce(x)
    _check(k, x, n * (n + 1) / 2)
    work = dist.all_reduce(x, async_op=True)
    work.wait()
    _check(k, x, n * n * (n + 1) / 2)
    whole, parts = k.full(n * 8, 0.0), [k.full(8, 0.0) for _ in range(n)]
    dist.all_gather_into_tensor(whole, k.full(8, float(me)))
    dist.all_gather(parts, k.full(8, float(me)))
    assert np.asarray(k.numpy(whole)).reshape(n, 8)[:, 0].tolist() == list(range(n))
    for r, part in enumerate(parts):
        _check(k, part, float(r))
    objects: list[Any] = [None] * n
    dist.all_gather_object(objects, {"rank": me})
    assert objects == [{"rank": r} for r in range(n)]
    y = k.full(_COUNT, 1.0)
    _check(k, dist.all_reduce(y, async_op=True).get_future().wait()[0], float(n))
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
        _check(k, got, 2.0 - dist.get_rank())
    return {"bytes": nbytes, "seconds": seconds}


def messages_that_torch_coalesces(k: Kit) -> None:
    """isend and irecv between the start and the end of coalescing, as torch 2.6 and 2.15 call them for a batch."""
    dist = _dist()
    ops, got = _crossing(k, 1 << 18 if k.simulated else _LARGE // 4)
    with dist._coalescing_manager(device=ops[0].tensor.device, async_ops=True) as several:
        for op in ops:
            op.op(op.tensor, op.peer)
    several.wait()
    _check(k, got, 2.0 - dist.get_rank())


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


@contextmanager
def _splits() -> Iterator[list[Any]]:
    """For each ncclCommSplit the ranks of the new communicator, None if this rank is not in it."""
    from nccl_comm.communicators.factory import CommunicatorFactory as Factory

    split, leave_out, seen = Factory.split, Factory.leave_out, []

    def counting(self: Any, *args: Any) -> Any:
        seen.append(list(self.context.ranks))
        return split(self, *args)

    def counting_without(self: Any, *args: Any) -> None:
        seen.append(None)
        leave_out(self, *args)

    Factory.split, Factory.leave_out = counting, counting_without  # type: ignore[method-assign]
    try:
        yield seen
    finally:
        Factory.split, Factory.leave_out = split, leave_out  # type: ignore[method-assign]


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


def subgroups(k: Kit) -> list[Any]:
    """In a job bound to devices new_group and split_group split NCCL's communicator, for one rank and for all."""
    dist = _dist()
    me, n = dist.get_rank(), dist.get_world_size()
    with _splits() as seen:
        everybody = dist.new_group(list(range(n)))
        first = dist.new_group([0])
        halves = split_group([[r] for r in range(n)])
        assert seen == [list(range(n)), [0] if me == 0 else None, [me]], seen
        for group, members in ((everybody, range(n)), (first, range(1)), (halves, range(me, me + 1))):
            if me in members:
                x = k.full(_COUNT, me + 1.0)
                dist.all_reduce(x, group=group)
                _check(k, x, sum(r + 1.0 for r in members))
                assert str(group.bound_device_id) == "cuda:0"
        assert len(seen) == 3, seen
    for group in (halves, first, everybody):
        if isinstance(group, dist.ProcessGroup):
            group.shutdown()
    return list(seen)


# --- graphs -----------------------------------------------------------------------------------------------------------


def _replayed(k: Kit, operation: Callable[[Any], object]) -> weakref.ref[Any]:
    """Capture an all_reduce and a kernel after it, and replay them on new values; a weak reference to the tensor."""
    dist = _dist()
    me, n = dist.get_rank(), dist.get_world_size()
    stream = k.stream()
    with stream:
        x, y = k.full(_COUNT, 1.0), k.full(_COUNT, 0.0)

    def body() -> None:
        operation(x)
        k.compute(y, lambda xp, given: given * 2, x)

    with stream:
        body()
    k.synchronize()
    replay = k.capture(stream, body)
    for turn in range(_STEPS):
        with stream:
            k.compute(x, lambda xp, given, value=float(me + turn): given * 0 + value, x)
            replay()
            _check(k, y, 2.0 * sum(r + turn for r in range(n)))
    k.synchronize()
    replay.close()
    return weakref.ref(x)


def _recorded(k: Kit, operation: Callable[[Any], object]) -> dict[str, int]:
    """:func:`_replayed`; the number of works that hold tensors afterwards."""
    dist = _dist()
    world: Any = dist.group.WORLD
    kept = _replayed(k, operation)
    for _ in range(60):  # each checks a few earlier works
        dist.all_reduce(k.full(8, 1.0), async_op=True).wait()
    gc.collect()
    deadline = time.monotonic() + 5.0
    while kept() is not None and time.monotonic() < deadline:  # the watchdog has another thread let go of it
        time.sleep(0.02)
    assert kept() is None, "a tensor of a graph is still held"
    return {"works with tensors": sum(not work.released for work in world._works._held.values())}


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
    messages_that_torch_coalesces,
    subgroups,
    ddp,
    fsdp2,
    a_graph_of_a_blocking_all_reduce,
    a_graph_of_asynchronous_all_reduces,
    works_give_up_their_tensors,
    functional_collectives,
)
"""The most important programs come first."""
