"""What the ranks of ``test_torch_ddp.py`` do: modules, steps, and what one process gets on the whole batch."""

from __future__ import annotations

import copy
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import unicoll as dist
from unicoll.parallel import DistributedDataParallel, DistributedSampler
from unicoll.parallel.comm_hooks import allreduce_hook, bf16_compress_hook, fp16_compress_hook

SMALL = 100 / 2**20  # MiB: several buckets for each module here
ROWS = 4  # of the batch, on each rank
Gradients = dict[str, "torch.Tensor | None"]

if torch.__version__ < "2.7":  # it leaves a folder of its own to the end of the interpreter
    warnings.filterwarnings("ignore", "Implicitly cleaning up", ResourceWarning)


class Perceptron(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 6), nn.Tanh(), nn.Linear(6, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


class Transformer(nn.Module):
    """Two layers of attention and two heads, of which a pass uses one; ``spare`` is used by none."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True) for _ in range(2)
        )
        self.heads = nn.ModuleList(nn.Linear(8, 4) for _ in range(2))
        self.spare = nn.Linear(8, 8)

    def forward(self, tokens: torch.Tensor, head: int = 0) -> dict[str, Any]:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return {"logits": [self.heads[head](x.mean(1))]}


def seeded(make: Callable[[], nn.Module], seed: int) -> nn.Module:
    torch.manual_seed(seed)
    torch.set_num_threads(1)
    return make().double()


def rows(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    x = torch.randn(ROWS, 5, generator=generator, dtype=torch.float64)
    return x, torch.randn(ROWS, 3, generator=generator, dtype=torch.float64)


def loss_of(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    x, y = rows(step, rank)
    return nn.functional.mse_loss(model(x), y)


def gradients_of(model: nn.Module) -> Gradients:
    return {n.removeprefix("module."): p.grad for n, p in model.named_parameters()}


def compare(found: Gradients, expected: Gradients, tolerance: float = 1e-12) -> None:
    assert found.keys() == expected.keys()
    for name, theirs in expected.items():
        ours = found[name]
        if theirs is None or ours is None:
            assert ours is theirs, name
        else:
            torch.testing.assert_close(
                ours, theirs, rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}"
            )


@contextmanager
def counting() -> Iterator[list[str]]:
    """The operations that the default group's methods are asked for within."""
    group = dist.group.WORLD
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


def train_perceptron(settings: dict[str, Any]) -> int:
    """Three steps against one process on the whole batch; returns the number of averaged buckets in the last."""
    rank, size = dist.get_rank(), dist.get_world_size()
    alone = seeded(Perceptron, 0)
    ours = DistributedDataParallel(seeded(Perceptron, rank), bucket_cap_mb=SMALL, **settings)
    optimizers = [torch.optim.SGD(m.parameters(), 0.1, momentum=0.9) for m in (alone, ours)]
    for step in range(3):
        for optimizer in optimizers:
            optimizer.zero_grad()
        (sum(loss_of(alone, step, r) for r in range(size)) / size).backward()
        with counting() as operations:
            loss_of(ours, step, rank).backward()
        compare(gradients_of(ours), gradients_of(alone))
        for optimizer in optimizers:
            optimizer.step()
    for theirs, mine in zip(alone.parameters(), ours.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)
    return len(operations)


def train_transformer(settings: dict[str, Any], heads: str) -> list[str]:
    """As :func:`train_perceptron`; all use the first head, or all another in each step, or each rank its own.

    Returns the parameters that have no gradient after the last step.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    alone = seeded(Transformer, 0)
    ours = DistributedDataParallel(seeded(Transformer, rank), bucket_cap_mb=4 * SMALL, **settings)

    def loss(model: nn.Module, step: int, rank: int) -> torch.Tensor:
        tokens = torch.randint(11, (ROWS, 6), generator=torch.Generator().manual_seed(10 * step + rank))
        head = {"first": 0, "in turn": step % 2, "own": (rank + step) % 2}[heads]
        return nn.functional.cross_entropy(model(tokens, head)["logits"][0], tokens[:, 0] % 4)

    for step in range(3):
        for model in (alone, ours):
            model.zero_grad()
        (sum(loss(alone, step, r) for r in range(size)) / size).backward()
        loss(ours, step, rank).backward()
        compare(gradients_of(ours), gradients_of(alone), 1e-9)
        with torch.no_grad():
            for model in (alone, ours):
                for p in model.parameters():
                    if p.grad is not None:
                        p -= 0.1 * p.grad
    return sorted(n for n, g in gradients_of(ours).items() if g is None)


def accumulate(settings: dict[str, Any]) -> None:
    """Two passes under no_sync and one outside give the average of the ranks' sums."""
    rank, size = dist.get_rank(), dist.get_world_size()
    alone = seeded(Perceptron, 0)
    ours = DistributedDataParallel(seeded(Perceptron, 0), bucket_cap_mb=SMALL, **settings)
    for first in (0, 3):
        for model in (alone, ours):
            model.zero_grad()
        (sum(loss_of(alone, first + s, r) for r in range(size) for s in range(3)) / size).backward()
        with counting() as operations, ours.no_sync():
            for step in (first, first + 1):
                loss_of(ours, step, rank).backward()
        assert operations == []
        assert ours.require_backward_grad_sync
        loss_of(ours, first + 2, rank).backward()
        compare(gradients_of(ours), gradients_of(alone))


def many_passes() -> None:
    """Two forward passes before a backward pass of both; two backward passes after one another."""
    rank, size = dist.get_rank(), dist.get_world_size()
    for find in (False, True):
        alone = seeded(Perceptron, 0)
        ours = DistributedDataParallel(
            seeded(Perceptron, 0), bucket_cap_mb=SMALL, find_unused_parameters=find
        )
        both = sum(loss_of(alone, s, r) for r in range(size) for s in range(2)) / size
        both.backward()
        (loss_of(ours, 0, rank) + loss_of(ours, 1, rank)).backward()
        compare(gradients_of(ours), gradients_of(alone))
        ours.zero_grad()
        for loss in [loss_of(ours, s, rank) for s in range(2)]:
            loss.backward()
        compare(gradients_of(ours), gradients_of(alone))


def two_heads() -> None:
    """Two forward passes that use different parameters before the one backward pass of both."""
    alone = seeded(Transformer, 0)
    ours = DistributedDataParallel(seeded(Transformer, 0), find_unused_parameters=True)
    tokens = torch.zeros(1, 3, dtype=torch.int64)
    for _ in range(2):
        for model in (alone, ours):
            model.zero_grad()
            sum(model(tokens, head)["logits"][0].square().sum() for head in range(2)).backward()
        compare(gradients_of(ours), gradients_of(alone), 1e-9)


def hooked(which: str) -> list[tuple[int, bool]]:
    """A hook of each kind; the numbers of the buckets that it got."""
    rank, size = dist.get_rank(), dist.get_world_size()
    group = dist.group.WORLD
    seen: list[tuple[int, bool]] = []

    def whole(state: Any, bucket: Any) -> Any:
        """As the hook is called, with a look at what it gets."""
        assert state is group
        seen.append((bucket.index(), bucket.is_last()))
        for view, parameter in zip(bucket.gradients(), bucket.parameters(), strict=True):
            torch.testing.assert_close(view, parameter.grad)
        return hook(state, bucket)

    def by_work(state: Any, bucket: Any) -> Any:
        bucket.buffer().div_(size)
        return state.all_reduce(bucket.buffer(), async_op=True)

    def by_future(state: Any, bucket: Any) -> Any:
        return by_work(state, bucket).get_future()

    def by_torchs_future(state: Any, bucket: Any) -> Any:
        future: Any = torch.futures.Future()
        by_future(state, bucket).add_done_callback(lambda done: future.set_result(done.value()[0].clone()))
        return future.then(lambda done: done.value() * 1)

    def by_tensor(state: Any, bucket: Any) -> Any:
        copied = bucket.buffer() / size
        state.all_reduce(copied)
        bucket.set_buffer(copied)
        return bucket.buffer()

    hooks: dict[str, tuple[Callable[..., Any], float]] = {
        "allreduce": (allreduce_hook, 1e-12), "fp16": (fp16_compress_hook, 2e-3), "bf16": (bf16_compress_hook, 2e-2),
        "work": (by_work, 1e-12), "future": (by_future, 1e-12), "torch": (by_torchs_future, 1e-12),
        "tensor": (by_tensor, 1e-12),
    }  # fmt: skip
    hook, tolerance = hooks[which]
    for as_views in (False, True):
        alone = seeded(Perceptron, 0)
        ours = DistributedDataParallel(
            seeded(Perceptron, 0), bucket_cap_mb=SMALL, gradient_as_bucket_view=as_views
        )
        ours.register_comm_hook(group, whole)
        for _ in range(2):
            alone.zero_grad()
            ours.zero_grad()
            (sum(loss_of(alone, 0, r) for r in range(size)) / size).backward()
            seen.clear()
            loss_of(ours, 0, rank).backward()
            compare(gradients_of(ours), gradients_of(alone), tolerance)
    return seen


def views() -> None:
    """``.grad`` lies in the bucket, whether it was None or zeros before, and adds up there."""
    rank, size = dist.get_rank(), dist.get_world_size()
    ours = DistributedDataParallel(seeded(Perceptron, 0), gradient_as_bucket_view=True)
    storages = set()
    for to_none in (True, False, True):
        ours.zero_grad(set_to_none=to_none)
        loss_of(ours, 0, rank).backward()
        storages.add(tuple(p.grad.untyped_storage().data_ptr() for p in ours.parameters()))
    assert len(storages) == 1
    assert len(set(*storages)) == 1  # one bucket
    loss_of(ours, 0, rank).backward()
    alone = seeded(Perceptron, 0)
    (2 * sum(loss_of(alone, 0, r) for r in range(size)) / size).backward()
    compare(gradients_of(ours), gradients_of(alone))


def reentrant() -> None:
    """A layer within two reentrant checkpoints gets two gradients in a pass: allowed for a static graph."""
    rank, size = dist.get_rank(), dist.get_world_size()

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.layer, self.last = nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, 3)
            self.spare = nn.Linear(2, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.first(x)
            for _ in range(2):
                x = checkpoint(self.layer, x, use_reentrant=True)
            return self.last(x)

    alone, ours = (
        seeded(Twice, 0),
        DistributedDataParallel(seeded(Twice, 0), bucket_cap_mb=SMALL, static_graph=True),
    )
    for step in range(3):
        alone.zero_grad()
        ours.zero_grad()
        (sum(loss_of(alone, step, r) for r in range(size)) / size).backward()
        loss_of(ours, step, rank).backward()
        compare(gradients_of(ours), gradients_of(alone))


def beginnings(settings: dict[str, Any]) -> tuple[float, float]:
    """A parameter and a buffer, which differ by rank before, once the module is wrapped."""
    torch.manual_seed(0)
    module = nn.BatchNorm1d(2)
    with torch.no_grad():
        for tensor in (module.bias, module.running_mean):
            tensor.fill_(dist.get_rank())
    wrapped = DistributedDataParallel(module, **settings).module
    return wrapped.bias[0].item(), wrapped.running_mean[0].item()


def normalise(broadcast: bool) -> tuple[list[float], list[float]]:
    """Running means after a step, and after the forward pass of the next, where rank 0's are spread first."""

    class Normal(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.last = nn.BatchNorm1d(5, momentum=0.5), nn.Linear(5, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.seen = self.norm.running_mean.tolist()
            return self.last(self.norm(x))

    rank = dist.get_rank()
    ours = DistributedDataParallel(seeded(Normal, rank), broadcast_buffers=broadcast)
    loss_of(ours, 0, rank).backward()
    after = ours.module.norm.running_mean.tolist()
    loss_of(ours, 1, rank).backward()
    seen = ours.module.seen
    assert int(ours.module.norm.num_batches_tracked) == 2
    ours.eval()
    with torch.no_grad(), counting() as operations:
        for _ in range(2):
            ours(rows(2, rank)[0])
    assert operations == ["broadcast"] * (2 if broadcast else 0)  # one per dtype, before the first pass only
    return after, seen


def kinds() -> list[tuple[str, int]]:
    """Parameters of three dtypes, one of them fixed; the buckets by dtype and length."""
    rank = dist.get_rank()

    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(5, 4), nn.Linear(4, 4).float()
            self.c, self.fixed = nn.Linear(4, 3).bfloat16(), nn.Linear(3, 3)
            self.fixed.requires_grad_(False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.b(self.a(x.float()))
            return self.fixed(self.c(x.bfloat16()).float()).double()

    torch.manual_seed(rank)
    ours = DistributedDataParallel(Mixed())
    ours.module.a.double().float()
    buckets: list[tuple[str, int]] = []

    def look(state: Any, bucket: Any) -> Any:
        buckets.append((str(bucket.buffer().dtype), bucket.buffer().numel()))
        return allreduce_hook(state, bucket)

    ours.register_comm_hook(None, look)
    loss_of(ours, 0, rank).backward()
    assert ours.module.fixed.weight.grad is None
    told: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(
        told,
        [
            [p.double().tolist() for p in ours.parameters()],
            [None if p.grad is None else p.grad.double().tolist() for p in ours.parameters()],
        ],
    )
    assert all(other == told[0] for other in told)
    return buckets


def channels_last() -> None:
    """Gradients keep the order of dimensions of their parameters, in the bucket too."""
    rank, size = dist.get_rank(), dist.get_world_size()

    def loss(model: nn.Module, rank: int) -> torch.Tensor:
        x = torch.randn(2, 3, 6, 6, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)
        return model(x.to(memory_format=torch.channels_last)).square().mean()

    def make() -> nn.Module:
        model = seeded(lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 2)), 0)
        return model.to(memory_format=torch.channels_last)

    alone, ours = make(), DistributedDataParallel(make(), gradient_as_bucket_view=True)
    (sum(loss(alone, r) for r in range(size)) / size).backward()
    loss(ours, rank).backward()
    compare(gradients_of(ours), gradients_of(alone))
    for p in ours.parameters():
        assert p.grad is not None
        assert p.grad.stride() == p.stride()


def order_of_events() -> list[str]:
    """What happens in a backward pass: gradients that are complete, buckets that are launched."""
    rank = dist.get_rank()
    ours = DistributedDataParallel(seeded(Perceptron, 0), bucket_cap_mb=SMALL)
    events: list[str] = []
    for name, parameter in ours.module.named_parameters():
        parameter.register_hook(lambda g, n=name: events.append(n))
    group = dist.group.WORLD

    def noted(tensor: Any, **settings: Any) -> Any:
        assert settings["async_op"]
        events.append("launch")
        return type(group).all_reduce(group, tensor, **settings)

    group.all_reduce = noted
    try:
        loss = loss_of(ours, 0, rank)
        loss.backward()
    finally:
        del group.all_reduce
    return events


def copies() -> list[str]:
    """state_dict's keys; a deep copy works as the original; without it, hooks of a dropped wrapper do nothing."""
    rank = dist.get_rank()
    ours = DistributedDataParallel(seeded(Perceptron, rank))
    keys = list(ours.state_dict())
    other = copy.deepcopy(ours)
    for model in (ours, other):
        loss_of(model, 0, rank).backward()
    compare(gradients_of(other), gradients_of(ours))
    bare = ours.module
    del ours
    bare.zero_grad()
    with counting() as operations:
        loss_of(bare, 0, rank).backward()
    assert operations == []
    return keys


def message(kind: str) -> str:
    """What a misuse raises, on this rank."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Lazy modules")
        try:
            MISUSES[kind]()
        except (dist.DistError, RuntimeError) as error:
            return f"{type(error).__name__}: {error}"
    raise AssertionError("nothing was raised")


def _unused() -> None:
    ours = DistributedDataParallel(seeded(Transformer, 0))
    tokens = torch.zeros(1, 3, dtype=torch.int64)
    ours(tokens)["logits"][0].sum().backward()
    ours(tokens)


def _changing() -> None:
    ours = DistributedDataParallel(seeded(Transformer, 0), static_graph=True)
    for head in range(2):
        ours(torch.zeros(1, 3, dtype=torch.int64), head)["logits"][0].sum().backward()


def _unseen() -> None:
    ours = DistributedDataParallel(seeded(Perceptron, 0), find_unused_parameters=True)
    ours.module.forward = lambda x: None  # what comes out is hidden
    ours(rows(0, 0)[0])
    ours.module.layers[0].weight.sum().backward()


def _shape() -> None:
    DistributedDataParallel(nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2 + dist.get_rank())))


def _number() -> None:
    DistributedDataParallel(nn.Linear(3, 2, bias=dist.get_rank() == 0))


def _dtype() -> None:
    DistributedDataParallel(nn.Linear(3, 2).to(torch.float64 if dist.get_rank() else torch.float32))


def _two_hooks() -> None:
    ours = DistributedDataParallel(nn.Linear(3, 2))
    ours.register_comm_hook(None, allreduce_hook)
    ours.register_comm_hook(None, allreduce_hook)


def _bad_result() -> None:
    ours = DistributedDataParallel(nn.Linear(3, 2))
    ours.register_comm_hook(None, lambda state, bucket: bucket.buffer()[1:])
    ours(torch.ones(1, 3)).sum().backward()


def _hook_raises() -> None:
    def refuse(state: Any, bucket: Any) -> Any:
        raise OSError("no room")

    ours = DistributedDataParallel(nn.Linear(3, 2))
    ours.register_comm_hook(None, refuse)
    ours(torch.ones(1, 3)).sum().backward()


MISUSES: dict[str, Callable[[], Any]] = {
    "unused": _unused,
    "changing": _changing,
    "unseen": _unseen,
    "shape": _shape,
    "number": _number,
    "dtype": _dtype,
    "two hooks": _two_hooks,
    "bad result": _bad_result,
    "hook raises": _hook_raises,
    "sparse": lambda: DistributedDataParallel(nn.Sequential(nn.Embedding(3, 2, sparse=True))),
    "no shape": lambda: DistributedDataParallel(nn.LazyLinear(2)),
    "nothing to learn": lambda: DistributedDataParallel(nn.Linear(3, 2).requires_grad_(False)),
    "no module": lambda: DistributedDataParallel([nn.Linear(3, 2)]),
    "devices": lambda: DistributedDataParallel(nn.Linear(3, 2), device_ids=[0]),
    "output": lambda: DistributedDataParallel(nn.Linear(3, 2), output_device=0),
    "cap": lambda: DistributedDataParallel(nn.Linear(3, 2), bucket_cap_mb=0),
}


def in_groups() -> list[float]:
    """One wrapper over a group of this rank alone, one over a group of both: the gradients of the bias."""
    rank = dist.get_rank()
    alone = [dist.new_group([r]) for r in range(dist.get_world_size())][rank]
    both = dist.new_group([0, 1])
    found = []
    with counting() as operations:
        for group in (alone, both):
            ours = DistributedDataParallel(nn.Linear(1, 1), process_group=group)
            (rank * ours(torch.ones(1, 1))).sum().backward()
            found.append(ours.module.bias.grad.item())
    assert operations == []  # in the default group
    for group in (alone, both):
        dist.destroy_process_group(group)
    return found


def left_alone() -> None:
    """Rank 1 dies between its forward and its backward pass."""
    rank = dist.get_rank()
    ours = DistributedDataParallel(seeded(Perceptron, 0), bucket_cap_mb=SMALL)
    loss = loss_of(ours, 0, rank)
    if rank == 1:
        os._exit(3)
    loss.backward()


def load_and_train() -> list[int]:
    """Training as torch's users write it, through a DataLoader; the samples that this rank got."""
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
