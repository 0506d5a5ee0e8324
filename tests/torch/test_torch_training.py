"""What torch builds on torch.distributed, on unicoll's backends: data parallel, sharded, pipelined, compiled."""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.support.ranks import ProcessJob

if importlib.util.find_spec("torch") is None:
    pytest.skip("torch is not installed", allow_module_level=True)

import copy
import inspect
import os
import tempfile
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as power
from torch.nn.parallel import DistributedDataParallel as DDP

from tests.torch import torch_jobs
from tests.torch.torch_jobs import me, size

STEPS = 3


class Net(nn.Module):
    """A small network; ``unused`` has no gradient, ``embedding`` has sparse gradients if requested."""

    def __init__(self, unused: bool = False, sparse: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 8, sparse=sparse)
        self.first = nn.Linear(8, 16)
        self.second = nn.Linear(16, 4)
        self.spare = nn.Linear(4, 4) if unused else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.relu(self.first(self.embedding(x).mean(1))))


def net(**options: bool) -> Net:
    torch.manual_seed(1)
    return Net(**options)


def batch(step: int, rank: int) -> torch.Tensor:
    return torch.randint(0, 10, (4, 3), generator=torch.Generator().manual_seed(100 * step + rank))


def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()


def alone(model: nn.Module, lr: float = 0.1) -> nn.Module:
    """The model after training on all ranks' batches in one process."""
    optimizer = torch.optim.SGD(model.parameters(), lr)
    for step in range(STEPS):
        optimizer.zero_grad()
        (sum(loss_of(model, batch(step, rank)) for rank in range(size())) / size()).backward()  # type: ignore[union-attr]
        optimizer.step()
    return model


def train(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> nn.Module:
    optimizer = optimizer or torch.optim.SGD(model.parameters(), 0.1)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, batch(step, me())).backward()
        optimizer.step()
    return model


def alike(found: Iterable[torch.Tensor], expected: Iterable[torch.Tensor], rtol: float = 1e-5) -> None:
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine.detach(), theirs.detach(), rtol=rtol, atol=rtol)


# --- data parallel --------------------------------------------------------------------------------------------------


def ddp() -> None:
    expected = alone(net())
    for options in (
        {},
        {"static_graph": True},
        {"gradient_as_bucket_view": True},
        {"bucket_cap_mb": 0.0001},  # many buckets in flight
        {"find_unused_parameters": True, "gradient_as_bucket_view": True},
    ):
        alike(train(DDP(net(), **options)).parameters(), expected.parameters())
    group = dist.new_group(list(range(size())))
    alike(train(DDP(net(), process_group=group)).parameters(), expected.parameters())
    dist.destroy_process_group(group)
    normalised = DDP(nn.BatchNorm1d(3))  # with buffers, which rank 0 broadcasts
    for step in range(2):
        normalised(torch.full((2, 3), me() + 1.0 + step)).sum().backward()
    alike([normalised.module.running_mean], [torch.full((3,), 0.1 * 0.9 + 0.1 * (me() + 2))])
    unused = train(DDP(net(unused=True), find_unused_parameters=True))
    alike(unused.module.first.parameters(), expected.first.parameters())
    data = DDP(net(sparse=True))
    alike(train(data).parameters(), alone(net(sparse=True)).parameters())


def ddp_names_unused_parameters() -> str:
    model = DDP(net(unused=True))
    loss_of(model, batch(0, me())).backward()
    try:
        loss_of(model, batch(1, me())).backward()
    except RuntimeError as error:
        return str(error)
    return "nothing"


def comm_hooks() -> None:
    expected = alone(net())
    for hook, rtol in ((default_hooks.allreduce_hook, 1e-5), (default_hooks.fp16_compress_hook, 2e-2)):
        for cap in (25, 0.0001):
            model = DDP(net(), bucket_cap_mb=cap)
            model.register_comm_hook(dist.group.WORLD, hook)
            alike(train(model).parameters(), expected.parameters(), rtol)
    for cap in (25, 0.0001):
        model = DDP(net(), bucket_cap_mb=cap)
        state = power.PowerSGDState(
            dist.group.WORLD, matrix_approximation_rank=8, start_powerSGD_iter=2, min_compression_rate=0.5
        )
        model.register_comm_hook(state, power.powerSGD_hook)
        alike(train(model).parameters(), expected.parameters(), 5e-2)

    def python_hook(state, bucket):  # type: ignore[no-untyped-def]
        tensor = bucket.buffer().div_(size())
        future = dist.all_reduce(tensor, async_op=True).get_future()
        return future.then(lambda f: f.value()[0])

    model = DDP(net())
    model.register_comm_hook(None, python_hook)
    alike(train(model).parameters(), expected.parameters())


def no_sync_and_join() -> None:
    model, twin = DDP(net()), net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with model.no_sync():
        loss_of(model, batch(0, me())).backward()
    loss_of(model, batch(1, me())).backward()
    optimizer.step()
    for step in range(2):
        (sum(loss_of(twin, batch(step, r)) for r in range(size())) / size()).backward()  # type: ignore[union-attr]
    torch.optim.SGD(twin.parameters(), 0.1).step()
    alike(model.parameters(), twin.parameters())
    uneven = DDP(net())
    optimizer = torch.optim.SGD(uneven.parameters(), 0.1)
    with uneven.join():
        for step in range(2 + 2 * me()):
            optimizer.zero_grad()
            loss_of(uneven, batch(step, me())).backward()
            optimizer.step()
    states = [torch.empty_like(uneven.module.first.weight) for _ in range(size())]
    dist.all_gather(states, uneven.module.first.weight.detach())
    alike(states, [states[-1]] * size())


def zero_redundancy() -> None:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = DDP(net())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
    alike(train(model, optimizer).parameters(), alone(net()).parameters())
    optimizer.consolidate_state_dict(0)
    assert me() != 0 or optimizer.state_dict()["param_groups"]


# --- sharded --------------------------------------------------------------------------------------------------------


def fsdp1() -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
    from torch.distributed.fsdp import ShardingStrategy

    expected = alone(net())
    for strategy in (ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy.NO_SHARD):
        model = FSDP(net(), sharding_strategy=strategy, device_id=torch.device("cpu"))
        train(model)
        with FSDP.summon_full_params(model):
            alike(
                model.parameters(),
                [torch.cat([p.reshape(-1) for p in expected.parameters()])]
                if len(list(model.parameters())) == 1
                else expected.parameters(),
            )


def fsdp2_in_symmetric_memory() -> None:
    """FSDP2 takes the memory of its collectives from the group, which moves it without copies."""
    from torch.distributed.fsdp import fully_shard

    from gloo_fallback.algorithms import peer_memory

    torch.manual_seed(0)
    moved: list[str] = []
    for name in ("all_gather", "reduce_scatter"):
        function = getattr(peer_memory, name)

        def watched(*args: Any, _function: Any = function, _name: str = name) -> bool:
            done: bool = _function(*args)
            moved.extend([_name] * done)
            return done

        setattr(peer_memory, name, watched)
    width = 256
    layers = [torch.nn.Linear(width, width, bias=False) for _ in range(2)]
    model = torch.nn.Sequential(*layers)
    twin = torch.nn.Sequential(*(torch.nn.Linear(width, width, bias=False) for _ in range(2)))
    twin.load_state_dict(model.state_dict())
    for part in (*layers, model):
        fully_shard(part)
    for part in layers:
        part.set_allocate_memory_from_process_group_for_comm(True)
    steps = 8
    for step in range(steps):
        inputs = [torch.full((4, width), 0.01 * (1 + r + step)) for r in range(size())]
        model(inputs[me()]).square().mean().backward()
        sum(twin(each).square().mean() for each in inputs).div(size()).backward()
    alike([p.grad.full_tensor() for p in model.parameters()], [p.grad for p in twin.parameters()], 1e-4)
    assert set(moved) == {"all_gather", "reduce_scatter"}, moved
    blocks = sum(map(len, dist.group.WORLD.members.pool._blocks.values()))
    assert blocks < 2 * steps, blocks  # of four collectives in a step at least; the memory is used again


def allocated_tensors() -> None:
    """Tensors that the ranks free at different times."""
    group = dist.group.WORLD._get_backend(torch.device("cpu"))
    assert group.supports_tensor_alloc(torch.device("cpu"))
    kept = []
    for step in range(12):
        tensor = group.allocate_tensor(70_000, dtype=torch.bfloat16, device=torch.device("cpu"))
        tensor.fill_(1)
        dist.all_reduce(tensor)
        assert (tensor == size()).all()
        if (step + me()) % 3 == 0:
            kept.append(tensor[5:])
        assert all((other == size()).all() for other in kept)
    assert group.allocate_tensor(3, dtype=torch.int64, device=torch.device("cpu")).shape == (3,)


def fsdp2() -> None:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    for options, rtol in (
        ({}, 1e-5),
        ({"reshard_after_forward": False}, 1e-5),
        ({"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)}, 5e-2),
    ):
        model = net()
        for part in (model.first, model.second):
            fully_shard(part, **options)
        fully_shard(model, **options)
        train(model)
        full = [p.full_tensor() for p in model.parameters()]
        alike(full, alone(net()).parameters(), rtol)


def dtensor() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (size(),))
    whole = torch.arange(8.0 * size()).reshape(2 * size(), 4)
    sharded = distribute_tensor(whole, mesh, [Shard(0)])
    assert sharded.to_local().shape == (2, 4)
    alike([sharded.redistribute(mesh, [Replicate()]).to_local(), sharded.full_tensor()], [whole, whole])
    alike([sharded.redistribute(mesh, [Shard(1)]).full_tensor()], [whole])
    alike(
        [(sharded @ distribute_tensor(whole.T.contiguous(), mesh, [Replicate()])).full_tensor()],
        [whole @ whole.T],
    )
    alike([sharded.sum().full_tensor()], [whole.sum()])


def tensor_parallel() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (size(),))
    plan = {"first": ColwiseParallel(), "second": RowwiseParallel()}
    model, twin = parallelize_module(net(), mesh, plan), net()
    x = batch(0, 0)
    loss_of(model, x).backward()
    loss_of(twin, x).backward()
    alike([model(x)], [twin(x)])
    gradient = model.first.weight.grad
    alike([gradient.full_tensor()], [twin.first.weight.grad])


def meshes() -> None:
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (size(), 1), mesh_dim_names=("data", "model"))
    x = torch.tensor([me() + 1.0])
    dist.all_reduce(x, group=mesh.get_group("data"))
    assert x.item() == size() * (size() + 1) / 2
    dist.all_reduce(x, group=mesh["model"].get_group())
    assert mesh.get_local_rank("data") == me()
    assert mesh["data"].size() == size()
    flat = init_device_mesh("cpu", (size(),))
    assert flat.get_group().size() == size()


def two_dimensions() -> None:
    """Four ranks as two by two: tensor parallel within FSDP2, and FSDP2 within replicas."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "model"))
    both = parallelize_module(net(), mesh["model"], {"first": ColwiseParallel(), "second": RowwiseParallel()})
    fully_shard(both, mesh=mesh["data"])
    replicas = net()
    fully_shard(replicas, mesh=mesh)
    for model, group_of in ((both, lambda rank: rank // 2), (replicas, lambda rank: rank)):
        expected = net()
        optimizers = [torch.optim.SGD(m.parameters(), 0.1) for m in (model, expected)]
        for step in range(STEPS):
            loss_of(model, batch(step, group_of(me()))).backward()
            losses = [loss_of(expected, batch(step, group_of(rank))) for rank in range(size())]
            (sum(losses) / size()).backward()  # type: ignore[union-attr]
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        alike([p.full_tensor() for p in model.parameters()], expected.parameters())


def checkpoints() -> None:
    from torch.distributed import checkpoint
    from torch.distributed.fsdp import fully_shard

    where = [tempfile.mkdtemp() if me() == 0 else None]
    dist.broadcast_object_list(where, 0)
    folder = str(where[0])
    torch.manual_seed(3)
    model = Net()
    fully_shard(model)
    saved = copy.deepcopy({k: v.full_tensor() for k, v in model.state_dict().items()})
    checkpoint.save({"model": model.state_dict()}, checkpoint_id=os.path.join(folder, "sync"))
    pending = checkpoint.async_save(
        {"model": model.state_dict()}, checkpoint_id=os.path.join(folder, "async")
    )
    pending.result(60)
    for kind in ("sync", "async"):
        torch.manual_seed(4)
        other = Net()
        fully_shard(other)
        state = {"model": other.state_dict()}
        checkpoint.load(state, checkpoint_id=os.path.join(folder, kind))
        other.load_state_dict(state["model"])
        alike([v.full_tensor() for v in other.state_dict().values()], saved.values())
    dist.barrier()


# --- pipelines, compiled, profiled ----------------------------------------------------------------------------------


def pipeline() -> None:
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

    # torch 2.6 adds up the microbatches' gradients, later versions average them
    parts = 1 if "scale_grads" in inspect.signature(ScheduleGPipe).parameters else 4
    torch.manual_seed(5)
    layers = [nn.Linear(4, 4) for _ in range(size())]
    whole = copy.deepcopy(nn.Sequential(*layers))
    x = torch.arange(32.0).reshape(8, 4) / 10
    expected = whole(x)
    expected.square().mean().backward()
    for schedule in (ScheduleGPipe, Schedule1F1B):
        module = copy.deepcopy(layers[me()])
        stage = PipelineStage(module, me(), size(), torch.device("cpu"))
        steps = schedule(stage, n_microbatches=4, loss_fn=lambda out, target: out.square().mean() / parts)
        first, last = me() == 0, me() == size() - 1
        out = steps.step(*([x] if first else []), **({"target": x} if last else {}))
        if last:
            alike([out], [expected])
        alike([module.weight.grad], [whole[me()].weight.grad])


def functional() -> None:
    """The functional collectives of compiled code, called directly."""
    import torch.distributed._functional_collectives as funcol

    group = dist.group.WORLD
    x = torch.arange(4.0) + me()
    ranks = [torch.arange(4.0) + r for r in range(size())]
    alike([funcol.all_reduce(x, "sum", group)], [sum(ranks)])  # type: ignore[list-item]
    alike([funcol.all_gather_tensor(x, 0, group)], [torch.cat(ranks)])
    alike([funcol.broadcast(x, 1, group)], [ranks[1]])
    scattered = funcol.reduce_scatter_tensor(torch.cat([x] * size()), "avg", 0, group)
    alike([scattered], [sum(ranks) / size()])  # type: ignore[list-item]
    swapped = funcol.all_to_all_single(torch.cat([x] * size()), None, None, group)
    alike([swapped], [torch.cat(ranks)])
    alike(funcol.all_reduce_coalesced([x, x * 2], "sum", group), [sum(ranks), 2 * sum(ranks)])  # type: ignore[list-item, operator]
    gathered = funcol.all_gather_into_tensor_coalesced([x, x * 2], group)
    alike(gathered, [torch.cat(ranks), 2 * torch.cat(ranks)])
    parts = funcol.reduce_scatter_tensor_coalesced([torch.cat([x] * size())], "sum", [0], group)
    alike(parts, [sum(ranks)])  # type: ignore[list-item]
    out = torch.empty(4 * size())
    name = group.group_name  # type: ignore[union-attr]
    done = torch.ops._c10d_functional.all_gather_into_tensor_out(x, size(), name, out=out)
    alike([torch.ops._c10d_functional.wait_tensor(done)], [torch.cat(ranks)])


def compiled() -> None:
    import torch._inductor.config
    import torch.distributed._functional_collectives as funcol

    torch._inductor.config.compile_threads = 1  # older versions keep worker processes
    group = dist.group.WORLD

    def step(x: torch.Tensor) -> torch.Tensor:
        y = funcol.all_reduce(x * 2, "sum", group) + 1
        return funcol.all_gather_tensor(y, 0, group).sum() * y

    x = torch.arange(4.0) + me()
    alike([torch.compile(step, fullgraph=True)(x)], [step(x)])

    def in_place(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        dist.all_reduce(y)
        return y + 1

    alike([torch.compile(in_place)(x)], [in_place(x)])


def compiled_with_graph_breaks() -> None:
    """Compiled data parallel and sharded training; asynchronous calls and messages in a compiled function."""
    from torch.distributed.fsdp import fully_shard

    expected = alone(net())
    alike(train(torch.compile(DDP(net()), backend="eager")).parameters(), expected.parameters())
    if torch.__version__ >= "2.7":  # before, FSDP2 was on GPUs alone
        model = fully_shard(net())
        train(torch.compile(model, backend="eager"))
        alike([p.full_tensor() for p in model.parameters()], expected.parameters())

    @torch.compile(backend="eager")
    def waited(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        dist.all_reduce(y, async_op=True).wait()
        ops = [dist.P2POp(dist.isend, y, (me() + 1) % size()), dist.P2POp(dist.irecv, x, (me() - 1) % size())]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        dist.barrier()
        return x + y

    for step in range(3):
        total = 2.0 * sum(range(step, step + size()))
        alike([waited(torch.full((3,), float(me() + step)))], [torch.full((3,), 2 * total)])


def profiled() -> dict[str, int]:
    from torch.profiler import ProfilerActivity, profile

    x = torch.ones(4)
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
        dist.all_reduce(x)
        dist.all_reduce(x, async_op=True).wait()
        dist.broadcast(x, 0)
        work = dist.isend(x, 1) if me() == 0 else dist.irecv(x, 0) if me() == 1 else None
        if work is not None:
            work.wait()
    return {e.key: e.count for e in profiler.key_averages() if e.key.startswith("unicoll:")}


JOBS: tuple[Callable[[], Any], ...] = (
    ddp,
    comm_hooks,
    no_sync_and_join,
    zero_redundancy,
    fsdp1,
    fsdp2,
    fsdp2_in_symmetric_memory,
    allocated_tensors,
    dtensor,
    tensor_parallel,
    meshes,
    checkpoints,
    pipeline,
    functional,
    compiled_with_graph_breaks,
)


# --- tests ------------------------------------------------------------------------------------------

pytestmark = pytest.mark.torch
Run = Callable[..., list[Any]]


@pytest.fixture(scope="module")
def run() -> Iterator[Run]:
    """``run(function)``: the results of a call on two ranks that stay joined."""
    with ProcessJob(2, join="env", quiet=False, modules=["torch"]) as job:
        job.call(torch_jobs.join, "unicoll")
        assert job.results() == [(0, 2, "unicoll"), (1, 2, "unicoll")]

        def call(function: Callable[..., Any]) -> list[Any]:
            job.call(function)
            return job.results(120.0)

        yield call
        job.call(torch_jobs.leave)
        assert job.results() == [[], []]


# torch 2.6's FSDP2 fails without a GPU, on any backend: its streams of the CPU have no events
has_fsdp2 = pytest.mark.skipif(torch.__version__ < "2.7", reason="this torch has FSDP2 on GPUs alone")


@pytest.mark.every(n=2)
@pytest.mark.parametrize(
    "job",
    [pytest.param(f, marks=has_fsdp2) if "fsdp2" in f.__name__ else f for f in JOBS],
    ids=lambda f: f.__name__,
)
def test_it_works_as_on_one_process(run: Run, job: Callable[[], None]) -> None:
    run(job)


@has_fsdp2
@pytest.mark.every(n=0)
def test_meshes_of_two_dimensions() -> None:
    with ProcessJob(4, join="env", quiet=False, modules=["torch"]) as job:
        for function in (torch_jobs.join, two_dimensions, torch_jobs.leave):
            job.call(function, *(["unicoll"] if function is torch_jobs.join else []))
            results = job.results(120.0)
    assert results == [[]] * 4


def test_ddp_names_unused_parameters(run: Run) -> None:
    for said in run(ddp_names_unused_parameters):
        assert "Parameter indices which did not receive grad" in said


@pytest.mark.skipif(shutil.which("c++") is None and shutil.which("g++") is None, reason="no C++ compiler")
@pytest.mark.every(n=0)
def test_compiled_collectives(run: Run) -> None:
    run(compiled)


def test_profiles_show_the_operations(run: Run) -> None:
    for seen in run(profiled):
        assert seen["unicoll:all_reduce"] == 2
        assert seen["unicoll:broadcast"] == 1
        assert ("unicoll:send" in seen) != ("unicoll:recv" in seen)
