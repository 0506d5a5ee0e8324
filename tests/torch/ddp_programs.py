"""Programs of ``test_torch_ddp.py``: modules, training steps, and the reference of one process on the full batch."""

from __future__ import annotations

import copy
import gc
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as torchs
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

import unicoll as dist
from tests.support.worker import enter, rank_and_size, set_baseline
from unicoll.parallel import DistributedDataParallel, DistributedSampler

SMALL = 100 / 2**20  # MiB: several buckets
ROWS = 4  # of the batch, on each rank
LAYERS = (0, 2, 4)

if torch.__version__ < "2.7":  # it removes a temporary folder only at interpreter exit
    warnings.filterwarnings("ignore", "Implicitly cleaning up", ResourceWarning)


class Net(nn.Module):
    """Three layers, and two heads; a forward pass uses one head, and never ``spare``."""

    def __init__(self, heads: int = 0) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 6), nn.Tanh(), nn.Linear(6, 3))
        self.heads = nn.ModuleList(nn.Linear(3, 3) for _ in range(heads))
        self.spare = nn.Linear(2, 2) if heads else None

    def forward(self, x: torch.Tensor, head: int = 0) -> torch.Tensor:
        x = self.layers(x)
        return self.heads[head](x) if self.heads else x


def net(seed: int, heads: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    torch.set_num_threads(1)
    return Net(heads).double()


def loss_of(model: nn.Module, step: int, rank: int, head: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    x = torch.randn(ROWS, 5, generator=generator, dtype=torch.float64)
    y = torch.randn(ROWS, 3, generator=generator, dtype=torch.float64)
    return nn.functional.mse_loss(model(x, head), y)


def compare(ours: nn.Module, alone: nn.Module, tolerance: float = 1e-12) -> None:
    """Assert that the gradients equal those of one process."""
    for (name, mine), theirs in zip(ours.named_parameters(), alone.parameters(), strict=True):
        assert (mine.grad is None) == (theirs.grad is None), name
        if mine.grad is not None:
            torch.testing.assert_close(mine.grad, theirs.grad, rtol=tolerance, atol=tolerance)


@contextmanager
def counting(group: Any = None) -> Iterator[list[str]]:
    """Context with a list of the calls of the group's methods."""
    group = group or dist.group.WORLD
    seen: list[str] = []
    for name in ("all_reduce", "broadcast"):

        def noted(*args: Any, _name: str = name, **settings: Any) -> Any:
            seen.append(_name)
            return getattr(type(group), _name)(group, *args, **settings)

        setattr(group, name, noted)
    try:
        yield seen
    finally:
        del group.all_reduce, group.broadcast


def train(settings: dict[str, Any]) -> int:
    """Three steps of two passes, one under no_sync, compared with one process; returns the last step's reductions."""
    rank, size = dist.get_rank(), dist.get_world_size()
    alone = net(0)
    ours = DistributedDataParallel(net(rank), bucket_cap_mb=SMALL, **settings)
    assert isinstance(ours, nn.parallel.DistributedDataParallel)
    optimizers = [torch.optim.SGD(m.parameters(), 0.1, momentum=0.9) for m in (alone, ours)]
    accumulated = "static_graph" not in settings
    for step in range(3):
        for optimizer in optimizers:
            optimizer.zero_grad()
        passes = (step, step + 10) if accumulated else (step,)
        (sum(loss_of(alone, s, r) for r in range(size) for s in passes) / size).backward()
        if accumulated:
            with ours.no_sync(), counting() as operations:
                loss_of(ours, step + 10, rank).backward()
            assert "all_reduce" not in operations
        with counting() as operations:
            loss_of(ours, step, rank).backward()
        compare(ours, alone)
        for optimizer in optimizers:
            optimizer.step()
    return operations.count("all_reduce")


def unused(settings: dict[str, Any]) -> list[str]:
    """Each rank uses another head in each step; returns the parameters without a gradient."""
    rank, size = dist.get_rank(), dist.get_world_size()
    alone, ours = net(0, 2), DistributedDataParallel(net(0, 2), bucket_cap_mb=SMALL, **settings)
    for step in range(2):
        alone.zero_grad()
        ours.zero_grad()
        (sum(loss_of(alone, step, r, (r + step) % 2) for r in range(size)) / size).backward()
        loss_of(ours, step, rank, (rank + step) % 2).backward()
        compare(ours, alone)
    return [name for name, p in ours.named_parameters() if p.grad is None]


def hooked(which: str) -> None:
    """A comm hook of torch with the default group, or a custom one with the module's group."""
    rank, size = dist.get_rank(), dist.get_world_size()
    alone, ours = net(0), DistributedDataParallel(net(0), bucket_cap_mb=SMALL)

    def by_gathering(group: Any, bucket: Any) -> Any:
        parts = [torch.empty_like(bucket.buffer()) for _ in range(group.size())]
        future = torchs.all_gather(parts, bucket.buffer(), group=group, async_op=True).get_future()
        return future.then(lambda done: sum(done.value()) / group.size())

    if which == "own":
        # torch requires its own class as the annotation of the bucket
        ours.register_comm_hook(ours.process_group, lambda group, bucket: by_gathering(group, bucket))
    else:
        ours.register_comm_hook(None, getattr(default_hooks, which))
    for step in range(2):
        alone.zero_grad()
        ours.zero_grad()
        (sum(loss_of(alone, step, r) for r in range(size)) / size).backward()
        loss_of(ours, step, rank).backward()
        compare(ours, alone, 2e-3 if which == "fp16_compress_hook" else 1e-12)


def uneven(counts: list[int], by_initial: bool) -> None:
    """Different numbers of steps per rank within join; all ranks end with the results of one process."""
    rank, size = dist.get_rank(), dist.get_world_size()
    alone, ours = net(0), DistributedDataParallel(net(0), bucket_cap_mb=SMALL)
    for step in range(max(counts)):
        alone.zero_grad()
        left = [r for r in range(size) if step < counts[r]]
        (sum(loss_of(alone, step, r) for r in left) / (size if by_initial else len(left))).backward()
        torch.optim.SGD(alone.parameters(), 0.1).step()
    optimizer = torch.optim.SGD(ours.parameters(), 0.1)
    # join replaces the warning filters permanently
    with warnings.catch_warnings(), ours.join(divide_by_initial_world_size=by_initial):
        for step in range(counts[rank]):
            optimizer.zero_grad()
            loss_of(ours, step, rank).backward()
            optimizer.step()
    for mine, theirs in zip(ours.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)


def bias_gradient(**settings: Any) -> float:
    """The gradient of one bias: the average of the global ranks in the module's group."""
    ours = DistributedDataParallel(nn.Linear(1, 1), **settings)
    (dist.get_rank() * ours(torch.ones(1, 1))).sum().backward()
    return float(ours.module.bias.grad.item())


def in_groups() -> list[float]:
    """With a group of this rank only, a group of all ranks in reverse order, and a view of the default group."""
    rank, size = dist.get_rank(), dist.get_world_size()
    alone = [dist.new_group([r]) for r in range(size)][rank]
    back = dist.new_group(list(reversed(range(size))), sort_ranks=False)
    found = [bias_gradient(process_group=g) for g in (alone, back, dist.group.WORLD.using(timeout=30))]
    wrapped = DistributedDataParallel(nn.Linear(1, 1), process_group=back).process_group
    again = DistributedDataParallel(nn.Linear(1, 1), process_group=back).process_group
    assert wrapped is again
    assert torchs.get_rank(wrapped) == wrapped.rank() == size - 1 - rank
    assert torchs.get_process_group_ranks(wrapped) == list(back.ranks)
    for group in (alone, back):
        dist.destroy_process_group(group)
    assert wrapped not in torchs.distributed_c10d._world.pg_map
    assert torchs.is_initialized()
    return found


def default_group_states() -> list[bool]:
    """True if torch has a default group: initially, with a module, after destroy, with a new module, at the end."""
    assert not torchs.is_initialized()
    seen = [torchs.is_initialized()]
    bias_gradient()
    assert torchs.get_world_size() == dist.get_world_size()
    other = torchs.new_group(backend="unicoll-gloo")  # torch's functions can create further groups
    torchs.all_reduce(torch.ones(1), group=other)
    seen.append(torchs.is_initialized())
    torchs.destroy_process_group()
    seen.append(torchs.is_initialized())
    dist.all_reduce(torch.ones(1))  # unicoll's group is unchanged
    bias_gradient()
    torchs.all_reduce(torch.ones(1), group=torchs.new_group())
    seen.append(torchs.is_initialized())
    dist.destroy_process_group()
    seen.append(torchs.is_initialized())
    enter()
    return seen


@contextmanager
def torch_joined(backend: str, meeting: str) -> Iterator[None]:
    """Context with a default group of torch."""
    rank, size = rank_and_size()
    torchs.init_process_group(backend, init_method=f"file://{meeting}", rank=rank, world_size=size)
    try:
        yield
    finally:
        torchs.destroy_process_group()
        gc.collect()


def with_torchs_default_group(backend: str, meeting: str) -> list[float]:
    """With an existing default group of torch: over unicoll's default group, another unicoll group, and torch's."""
    if torchs.is_initialized():
        torchs.destroy_process_group()
    with torch_joined(backend, meeting):
        group = dist.new_group([0, 1])
        with counting() as ours:
            found = [bias_gradient()]
        assert "all_reduce" in ours
        with counting() as ours, counting(group) as its:
            found.append(bias_gradient(process_group=group))
            found.append(bias_gradient(process_group=torchs.group.WORLD))
        assert ours == []
        assert its.count("all_reduce") == 1
        dist.destroy_process_group(group)
        assert torchs.get_backend() == backend
    set_baseline(list)  # resources that torch's Gloo leaks are not counted
    dist.all_reduce(torch.ones(1))
    return found


def torch_alone(meeting: str) -> tuple[list[float], str]:
    """Without unicoll's init_process_group: over torch's default group; and the error without one."""
    import unicoll.torch_plugin  # noqa: F401 - its backends

    rank, _ = rank_and_size()
    with torch_joined("unicoll", meeting):
        ours = DistributedDataParallel(nn.Linear(1, 1))
        assert ours.process_group is torchs.group.WORLD
        (rank * ours(torch.ones(1, 1))).sum().backward()
        found = [ours.module.bias.grad.item()]
    return found, message(lambda: DistributedDataParallel(nn.Linear(1, 1)))


def message(function: Callable[[], Any]) -> str:
    """The message of the error that a call raises."""
    try:
        function()
    except (RuntimeError, ValueError, TypeError) as error:
        return f"{type(error).__name__}: {error}"
    raise AssertionError("nothing was raised")


def misused(kind: str) -> str:
    """The error for an invalid group."""

    def with_group(group: Any) -> Callable[[], Any]:
        return lambda: DistributedDataParallel(nn.Linear(1, 1), process_group=group)

    rank = dist.get_rank()
    group = dist.new_group([0, 1])
    others = [dist.new_group([r]) for r in (0, 1)][1 - rank]
    dist.destroy_process_group(group)
    return message(with_group({"destroyed": group, "not in it": others, "no group": "nothing"}[kind]))


def copies() -> list[str]:
    """The keys of state_dict; a deep copy behaves like the original."""
    ours = DistributedDataParallel(net(dist.get_rank()))
    other = copy.deepcopy(ours)
    for model in (ours, other):
        loss_of(model, 0, dist.get_rank()).backward()
    compare(other, ours)
    return list(ours.state_dict())


def rank_1_exits() -> None:
    """Rank 1 exits between its forward and its backward pass."""
    ours = DistributedDataParallel(net(0), bucket_cap_mb=SMALL)
    loss = loss_of(ours, 0, dist.get_rank())
    if dist.get_rank() == 1:
        os._exit(3)
    loss.backward()


def load_and_train() -> list[int]:
    """Training with torch's DataLoader; returns the samples of this rank."""
    samples = torch.utils.data.TensorDataset(torch.arange(20.0).reshape(-1, 1))
    sampler = DistributedSampler(samples, shuffle=True)
    loader = torch.utils.data.DataLoader(samples, batch_size=5, sampler=sampler)
    torch.manual_seed(dist.get_rank())
    ours = DistributedDataParallel(nn.Linear(1, 1))
    optimizer = torch.optim.SGD(ours.parameters(), 1e-3)
    got: list[int] = []
    sampler.set_epoch(3)
    for (x,) in loader:
        optimizer.zero_grad()
        ours(x).square().mean().backward()
        optimizer.step()
        got += [int(i) for i in x]
    weights: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(weights, [p.tolist() for p in ours.parameters()])
    assert all(w == weights[0] for w in weights)
    return got
