"""What the ranks of ``test_torch_ddp_join.py`` do: loops of different lengths, beside torch's own on Gloo."""

from __future__ import annotations

import copy
import gc
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as torchs
from ddp_programs import ROWS, SMALL, counting, seeded
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

import unicoll as dist
from unicoll.parallel import DistributedDataParallel
from unicoll.parallel.comm_hooks import fp16_compress_hook
from unicoll.testing.worker import place, start_here

EPOCHS = 2


class Net(nn.Module):
    """Two heads, of which a pass uses one, behind a normalisation with buffers; ``spare`` is used by none."""

    def __init__(self, spare: bool) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Tanh())
        self.heads = nn.ModuleList(nn.Linear(6, 3) for _ in range(2 if spare else 1))
        self.spare = nn.Linear(2, 2) if spare else None

    def forward(self, x: torch.Tensor, head: int = 0) -> torch.Tensor:
        return self.heads[head % len(self.heads)](self.body(x))


@contextmanager
def torch_on_gloo(meeting: str) -> Iterator[None]:
    """torch.distributed within; what the group has is not given back before it is garbage, and collected."""
    rank, size = place()
    torchs.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=size)
    try:
        yield
    finally:
        torchs.destroy_process_group()
        gc.collect()


def use_gloo(meeting: str) -> None:
    """What Gloo leaves behind counts as what was there before the job was joined."""
    with torch_on_gloo(meeting):
        pass
    start_here(list)


def batch(*which: int) -> torch.Tensor:
    seed = 0
    for number in which:
        seed = 50 * seed + number
    return torch.randn(ROWS, 5, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def train(
    model: nn.Module, counts: Sequence[int], by_initial: bool, synced: Callable[[int], bool], momentum: float
) -> dict[str, torch.Tensor]:
    """Two epochs with ``counts[rank]`` steps, in the second with those of the next rank; the weights and buffers."""
    rank, size = dist.get_rank(), dist.get_world_size()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=momentum)
    for epoch in range(EPOCHS):
        with model.join(divide_by_initial_world_size=by_initial):
            for step in range(counts[(rank + epoch) % size]):
                with nullcontext() if synced(step) else model.no_sync():
                    model(batch(epoch, step, rank), rank + step).square().mean().backward()
                if synced(step):
                    optimizer.step()
                    optimizer.zero_grad()
    return {name.removeprefix("module."): t for name, t in model.state_dict().items()}


def beside_torch(
    meeting: str, counts: Sequence[int], ours: dict[str, Any], accumulate: bool = False, hooked: bool = False
) -> None:
    """The same loops in unicoll and in torch on Gloo end with the same weights, on all ranks."""
    theirs = {} if "static_graph" in ours else ours
    finds_unused = "find_unused_parameters" in ours
    # in torch a rank that has run out counts as one that uses what its last pass used; then momentum goes on
    momentum = 0.0 if finds_unused else 0.5
    tolerance = 1e-3 if hooked else 1e-9

    def synced(step: int) -> bool:
        return not accumulate or step % 2 == 1

    def expected(by_initial: bool) -> dict[str, torch.Tensor]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # broadcast_buffers has another name since 2.13
            module = seeded(lambda: Net(finds_unused), 0)
            model = nn.parallel.DistributedDataParallel(module, bucket_cap_mb=SMALL, **theirs)
        if hooked:
            model.register_comm_hook(None, default_hooks.fp16_compress_hook)
        return train(model, counts, by_initial, synced, momentum)

    for by_initial in (True, False):
        model = DistributedDataParallel(seeded(lambda: Net(finds_unused), 0), bucket_cap_mb=SMALL, **ours)
        if hooked:
            model.register_comm_hook(None, fp16_compress_hook)
        found = train(model, counts, by_initial, synced, momentum)
        with torch_on_gloo(f"{meeting}-{by_initial}"):
            reference = expected(by_initial)
        for name, tensor in reference.items():
            torch.testing.assert_close(
                found[name], tensor, rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}"
            )
        same = found if model.broadcast_buffers else dict(model.module.named_parameters())
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, {name: t.tolist() for name, t in same.items()})
        assert all(each == everyone[0] for each in everyone)


def thrown(meeting: str) -> tuple[int, str, int, str]:
    """Steps until the error and the error, of ours and of torch's; rank 0 has two inputs, the others have four.

    Afterwards the group and the module are of use still.
    """
    rank = dist.get_rank()

    def loop(model: nn.Module) -> tuple[int, str]:
        done = 0
        try:
            with model.join(throw_on_early_termination=True):
                for step in range(4 if rank else 2):
                    model(batch(step, rank)).sum().backward()
                    done += 1
        except RuntimeError as error:
            return done, f"{type(error).__name__}: {error}"
        return done, ""

    ours = DistributedDataParallel(seeded(lambda: Net(False), 0), bucket_cap_mb=SMALL)
    found = loop(ours)
    ours.zero_grad()
    ours(batch(rank)).sum().backward()
    with torch_on_gloo(meeting):
        theirs = loop(nn.parallel.DistributedDataParallel(seeded(lambda: Net(False), 0)))
    return (*found, *theirs)


def as_many_inputs() -> int:
    """Nobody runs out early: with ``throw_on_early_termination`` nothing is raised; the operations of a step."""
    ours = DistributedDataParallel(seeded(lambda: Net(False), 0), broadcast_buffers=False)
    with ours.join(throw_on_early_termination=True):
        ours(batch(0, dist.get_rank())).sum().backward()
    with counting() as operations, ours.join(enable=False):
        ours(batch(1, dist.get_rank())).sum().backward()
    return len(operations)


def several_passes() -> None:
    """What torch cannot follow: two forward passes before a backward pass, evaluation, and passes that are dropped."""
    rank, size = dist.get_rank(), dist.get_world_size()
    module = seeded(lambda: Net(False), 0)
    ours = DistributedDataParallel(copy.deepcopy(module), bucket_cap_mb=SMALL, broadcast_buffers=False)
    with ours.join():
        for step in range(rank):
            first, second = ours(batch(step, rank)), ours(batch(step + 9, rank))
            with torch.no_grad():
                ours(batch(step, 7))
            (first.sum() + second.sum()).backward()
            ours(batch(step, 8))
            expected = {}
            for other in range(step + 1, size):  # those that still have inputs
                for which in (batch(step, other), batch(step + 9, other)):
                    alone = copy.deepcopy(module)
                    alone(which).sum().backward()
                    for name, p in alone.named_parameters():
                        expected[name] = expected.get(name, 0) + p.grad / size
            for name, p in ours.module.named_parameters():
                torch.testing.assert_close(p.grad, expected[name], rtol=1e-9, atol=1e-9)
            ours.zero_grad()


def misused(how: str) -> str:
    """The error of a loop that is not as the others'."""
    rank = dist.get_rank()
    ours = DistributedDataParallel(seeded(lambda: Net(False), 0), broadcast_buffers=False)
    try:
        with ours.join():
            loss = ours(batch(0)).sum()
            if how == "twice":
                with ours.join():
                    pass
            if rank:
                ours(batch(1))
            else:
                loss.backward()
    except RuntimeError as error:
        return f"{type(error).__name__}: {error}"
    return ""
