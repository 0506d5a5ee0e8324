"""Rank functions: joining and leaving a torch.distributed job on unicoll's backends, and every operation."""

from __future__ import annotations

import ctypes
import gc
import inspect
import json
import os
import time
import traceback
import warnings
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import unicoll
import unicoll.torch_plugin as plugin
from unicoll.testing.ranks import leftovers, snapshot

before: list[str] = []
F32, I64 = torch.float32, torch.int64


def join(
    backend: str, limit: float = 60.0, device: str | None = None, **arguments: Any
) -> tuple[int, int, str]:
    """Join, bound to a device or not; torch's own warnings are ignored."""
    global before
    warnings.simplefilter("ignore")
    warnings.filterwarnings("error", module="unicoll|gloo_fallback|mpi_comm")
    torch.set_num_threads(1)
    before = snapshot()
    if backend == "mpi":
        plugin.enable_mpi()
    bound = torch.device(device) if device is not None else None
    dist.init_process_group(backend, timeout=timedelta(seconds=limit), device_id=bound, **arguments)
    return dist.get_rank(), dist.get_world_size(), dist.get_backend()


def leave() -> list[str]:
    """Leave; what was not given back.

    Two pipes of torch's TCPStore stay with any backend, and the threads of torch's compiler once it has had to compile.
    """
    if dist.is_initialized():
        dist.destroy_process_group()
    gc.collect()
    compilers = [word for word in snapshot() if word.startswith("thread ThreadPoolExecutor-")]
    return leftovers([*before, "fd pipe", "fd pipe", *compilers])


def join_again(rounds: int, late: int) -> None:
    """Destroy the groups and join again at once, several times; one rank destroys them later than the others."""
    for _ in range(rounds):
        if me() == late:
            time.sleep(0.05)
        dist.destroy_process_group()
        dist.init_process_group("unicoll-gloo", timeout=timedelta(seconds=60))
        x = torch.ones(2)
        dist.all_reduce(x)
        assert x.tolist() == [size()] * 2


def timeouts() -> tuple[str, str]:
    """Errors of calls that rank 0 alone makes, with the group's timeout as set by torch's functions."""
    both = [dist.new_group(), dist.new_group()]
    c10d = dist.distributed_c10d
    for group in both:
        dist.all_reduce(torch.ones(1), group=group)
        c10d._set_pg_timeout(timedelta(seconds=0.4), group)
    c10d._add_ephemeral_timeout_for_all_pgs(timedelta(seconds=60))
    x = torch.ones(1)
    time.sleep(1.0 * me())
    for group in both:  # one asynchronous call, one blocking call, within the longer timeout
        work = dist.all_reduce(x, group=group, async_op=group is both[0])
        if work is not None:
            work.wait()
    assert x.tolist() == [4.0]
    found = [_failure_of(dist.all_reduce, x, group) if me() == 0 else "" for group in both]
    dist.barrier()
    return found[0], found[1]


def _failure_of(call: Callable[..., Any], x: torch.Tensor, group: Any) -> str:
    try:
        call(x, group=group)
    except unicoll.OperationTimeoutError as error:
        return str(error)
    return ""


def gradients_of_gathers() -> None:
    """A rank's gradient is the sum over the ranks of those of its part; reduce_scatter makes it."""
    from torch.distributed.nn import functional

    weights = [torch.arange(2.0 * size()) + 10 * rank for rank in range(size())]
    expected = sum(weights)[2 * me() : 2 * me() + 2].tolist()  # type: ignore[index]
    with mock.patch.object(type(dist.group.WORLD), "alltoall", None):
        x = torch.ones(2, requires_grad=True)
        (torch.cat(functional.all_gather(x)) * weights[me()]).sum().backward()
        assert x.grad.tolist() == expected
        x = torch.ones(2, requires_grad=True)
        gathered = functional._all_gather_base(torch.zeros(2 * size()), x)
        (gathered * weights[me()]).sum().backward()
        assert x.grad.tolist() == expected


def me() -> int:
    return dist.get_rank()


def size() -> int:
    return dist.get_world_size()


def mine(count: int = 6, dtype: Any = F32, rank: int | None = None) -> torch.Tensor:
    """A rank's contribution: different on every rank, exact in every type."""
    return (torch.arange(count) + 1 + 3 * (me() if rank is None else rank)).to(dtype)


def contributions(count: int = 6, dtype: Any = F32) -> list[torch.Tensor]:
    return [mine(count, dtype, rank) for rank in range(size())]


def total(count: int = 6, dtype: Any = F32) -> torch.Tensor:
    return torch.stack(contributions(count, dtype)).sum(0).to(dtype)


def same(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def done(work: Any, async_op: bool) -> None:
    """Wait for an asynchronous operation; a blocking one returns nothing."""
    if not async_op:
        assert work is None
        return
    assert work.wait() is True
    assert work.is_completed()


# --- the collectives ------------------------------------------------------------------------------------------------


def all_reduces(async_op: bool) -> None:
    ops = dist.ReduceOp
    for dtype in (
        torch.float32,
        torch.float64,
        torch.float16,
        torch.bfloat16,
        I64,
        torch.uint8,
        torch.complex64,
    ):
        x = mine(5, dtype)
        done(dist.all_reduce(x, async_op=async_op), async_op)
        same(x, total(5, dtype))
    everyone = torch.stack(contributions(5, I64))
    for op, expected in (
        (ops.PRODUCT, everyone.prod(0)),
        (ops.MIN, everyone.amin(0)),
        (ops.MAX, everyone.amax(0)),
        (ops.BAND, everyone[0] & everyone[-1] if size() == 2 else None),
    ):
        x = mine(5, I64)
        done(dist.all_reduce(x, op, async_op=async_op), async_op)
        if expected is not None:
            same(x, expected)
    x = mine(5)
    done(dist.all_reduce(x, ops.AVG, async_op=async_op), async_op)
    same(x, total(5) / size())
    x = mine(5)
    done(dist.all_reduce(x, dist._make_nccl_premul_sum(0.5), async_op=async_op), async_op)
    same(x, total(5) / 2)
    x = torch.tensor([me() == 0, True, False])
    done(dist.all_reduce(x, ops.MIN, async_op=async_op), async_op)
    same(x, torch.tensor([size() == 1, True, False]))


def strided_and_large(async_op: bool) -> None:
    x = torch.zeros(4, 6)
    x[:, ::2] = mine(12).reshape(4, 3)
    done(dist.all_reduce(x[:, ::2], async_op=async_op), async_op)
    same(x[:, ::2], total(12).reshape(4, 3))
    assert (x[:, 1::2] == 0).all()
    large = torch.full((1 << 20,), me() + 1.0)
    done(dist.all_reduce(large, async_op=async_op), async_op)
    assert (large == size() * (size() + 1) / 2).all()
    empty = torch.empty(0)
    done(dist.all_reduce(empty, async_op=async_op), async_op)


def rooted(async_op: bool) -> None:
    for root in range(size()):
        x = mine()
        done(dist.broadcast(x, root, async_op=async_op), async_op)
        same(x, mine(rank=root))
        x = mine()
        done(dist.reduce(x, root, async_op=async_op), async_op)
        same(x, total() if me() == root else mine())
        here = me() == root
        out = [torch.zeros(6) for _ in range(size())] if here else None
        done(dist.gather(mine(), out, root, async_op=async_op), async_op)
        if out is not None:
            same(out, contributions())
        if hasattr(dist, "gather_single"):  # from torch 2.15 on
            for count in (6, 0):
                flat = torch.zeros(size(), count) if here else None
                done(dist.gather_single(mine(count), flat, root, async_op=async_op), async_op)
                if flat is not None:
                    same(flat, torch.stack(contributions(count)))
        x = torch.zeros(6)
        parts = [mine() * (r + 1) for r in range(size())] if here else None
        done(dist.scatter(x, parts, root, async_op=async_op), async_op)
        same(x, mine(rank=root) * (me() + 1))


def gathers(async_op: bool) -> None:
    out = [torch.zeros(6) for _ in range(size())]
    done(dist.all_gather(out, mine(), async_op=async_op), async_op)
    same(out, contributions())
    uneven = [torch.zeros(r + 1, dtype=I64) for r in range(size())]
    done(dist.all_gather(uneven, torch.full((me() + 1,), me()), async_op=async_op), async_op)
    same(uneven, [torch.full((r + 1,), r) for r in range(size())])
    flat = torch.zeros(6 * size())
    done(dist.all_gather_into_tensor(flat, mine(), async_op=async_op), async_op)
    same(flat, torch.cat(contributions()))
    place = flat[6 * me() : 6 * me() + 6]
    flat.zero_()
    place.copy_(mine())
    done(dist.all_gather_into_tensor(flat, place, async_op=async_op), async_op)  # in place, as FSDP does
    same(flat, torch.cat(contributions()))


def scatters(async_op: bool) -> None:
    sources = [mine() * (r + 1) for r in range(size())]
    x = torch.zeros(6)
    done(dist.reduce_scatter(x, sources, async_op=async_op), async_op)
    same(x, total() * (me() + 1))
    x.zero_()
    done(dist.reduce_scatter_tensor(x, torch.cat(sources), async_op=async_op), async_op)
    same(x, total() * (me() + 1))
    y = torch.zeros(6)
    done(dist.reduce_scatter_tensor(y, torch.cat(sources), dist.ReduceOp.AVG, async_op=async_op), async_op)
    same(y, total() * (me() + 1) / size())


def all_to_alls(async_op: bool) -> None:
    sources = [torch.full((2,), 10 * me() + r) for r in range(size())]
    expected = [torch.full((2,), 10 * r + me()) for r in range(size())]
    out = [torch.zeros(2, dtype=I64) for _ in range(size())]
    done(dist.all_to_all(out, sources, async_op=async_op), async_op)
    same(out, expected)
    flat = torch.zeros(2 * size(), dtype=I64)
    done(dist.all_to_all_single(flat, torch.cat(sources), async_op=async_op), async_op)
    same(flat, torch.cat(expected))
    uneven = torch.cat([torch.full((r + 1, 2), 10 * me() + r) for r in range(size())])
    received = torch.zeros((me() + 1) * size(), 2, dtype=I64)
    splits = [r + 1 for r in range(size())]
    work = dist.all_to_all_single(received, uneven, [me() + 1] * size(), splits, async_op=async_op)
    done(work, async_op)
    same(received, torch.cat([torch.full((me() + 1, 2), 10 * r + me()) for r in range(size())]))
    lists = [torch.zeros(r + 1) for r in range(size())]
    given = [torch.full((me() + 1,), float(me())) for _ in range(size())]
    done(dist.all_to_all(lists, given, async_op=async_op), async_op)
    same(lists, [torch.full((r + 1,), float(r)) for r in range(size())])


MOVED = """
float8_e4m3fnuz float8_e5m2fnuz float8_e8m0fnu float4_e2m1fn_x2 uint1 uint2 uint4 uint7 int2 int4 int7
bits8 bits1x8 bits2x4 bits4x2 bits16 complex32 qint8 quint8 qint32
"""


def moved_types() -> None:
    """Types that are not reduced: their elements arrive bit by bit."""
    for name in MOVED.split():
        if hasattr(torch, name):
            _moved_type(getattr(torch, name))


def _moved_type(dtype: torch.dtype) -> None:
    width = dtype.itemsize

    def of(rank: int, to: int) -> torch.Tensor:
        """What a rank has for another: four elements."""
        return torch.arange(4 * width, dtype=torch.uint8) + 16 * rank + 64 * to

    def made(bits: torch.Tensor) -> torch.Tensor:
        if not str(dtype).startswith("torch.q"):
            return bits.view(dtype)
        made = torch._empty_affine_quantized([len(bits) // width], scale=0.5, zero_point=1, dtype=dtype)
        ctypes.memmove(made.data_ptr(), bits.data_ptr(), len(bits))
        return made

    def empty(count: int) -> torch.Tensor:
        return made(torch.zeros(count * width, dtype=torch.uint8))

    def holds(tensor: torch.Tensor, *expected: torch.Tensor) -> None:
        found = ctypes.string_at(tensor.data_ptr(), tensor.numel() * width)
        assert found == b"".join(bytes(bits.tolist()) for bits in expected), dtype

    mine = of(me(), 0)
    ranks = range(size())
    x = made(mine.clone())
    dist.broadcast(x, 1)
    holds(x, of(1, 0))
    outs = [empty(4) for _ in ranks] if me() == 0 else None
    dist.gather(made(mine), outs, 0)
    for rank, out in enumerate(outs or ()):
        holds(out, of(rank, 0))
    dist.scatter(x, [made(of(0, rank)) for rank in ranks] if me() == 0 else None, 0)
    holds(x, of(0, me()))
    flat = empty(4 * size())
    dist.all_gather_into_tensor(flat, made(mine))
    holds(flat, *(of(rank, 0) for rank in ranks))
    outs = [empty(4) for _ in ranks]
    dist.all_gather(outs, made(mine))
    for rank, out in enumerate(outs):
        holds(out, of(rank, 0))
    given = made(torch.cat([of(me(), rank) for rank in ranks]))
    dist.all_to_all_single(flat, given)
    holds(flat, *(of(rank, me()) for rank in ranks))
    to, frm = (me() + 1) % size(), (me() - 1) % size()
    work = dist.isend(made(mine), to)
    dist.recv(x, frm)
    holds(x, of(frm, 0))
    assert work is not None
    work.wait()
    if dtype.is_complex:  # torch passes it on as float16
        return
    name = str(dtype).removeprefix("torch.")
    with pytest.raises(TypeError, match=rf"SUM is not defined for {name} \(it is moved, and not reduced\)"):
        dist.all_reduce(x)


def barriers(async_op: bool) -> None:
    done(dist.barrier(async_op=async_op), async_op)
    dist.monitored_barrier(timeout=timedelta(seconds=30))
    dist.monitored_barrier(wait_all_ranks=True)


def coalesced(async_op: bool) -> None:
    with dist._coalescing_manager(async_ops=async_op) as several:
        xs = [mine(n) for n in (1, 5, 100)]
        for x in xs:
            dist.all_reduce(x)
    if async_op:
        several.wait()
    same(xs, [total(n) for n in (1, 5, 100)])
    outs = [torch.zeros(n * size()) for n in (2, 7)]
    with dist._coalescing_manager(async_ops=async_op) as several:
        for out, n in zip(outs, (2, 7), strict=True):
            dist.all_gather_into_tensor(out, mine(n))
    if async_op:
        several.wait()
    same(outs, [torch.cat(contributions(n)) for n in (2, 7)])
    parts = [torch.zeros(n) for n in (3, 4)]
    with dist._coalescing_manager(async_ops=async_op) as several:
        for part, n in zip(parts, (3, 4), strict=True):
            dist.reduce_scatter_tensor(part, torch.cat([mine(n)] * size()))
    if async_op:
        several.wait()
    same(parts, [total(3), total(4)])
    with dist._coalescing_manager(device=torch.device("cpu"), async_ops=async_op) as several:
        x, y = mine(), mine()
        dist.broadcast(x, 0, async_op=True)
        dist.broadcast(y, 0, async_op=True)
    if async_op:
        several.wait()
    same([x, y], [mine(rank=0)] * 2)
    lists = [[torch.zeros(n) for n in (2, 3)] for _ in range(size())]
    future = dist.all_gather_coalesced(lists, [mine(2), mine(3)], async_op=async_op)
    if async_op:  # torch returns the future instead of the work
        future.wait()
    same(lists, [[mine(2, rank=r), mine(3, rank=r)] for r in range(size())])


def sparse(async_op: bool) -> None:
    rows = torch.arange(me() + 1).reshape(1, -1)
    x = torch.sparse_coo_tensor(rows, torch.ones(me() + 1, 2), (size(), 2))
    dense = sum(
        torch.sparse_coo_tensor(
            torch.arange(r + 1).reshape(1, -1), torch.ones(r + 1, 2), (size(), 2)
        ).to_dense()
        for r in range(size())
    )
    done(dist.all_reduce(x, async_op=async_op), async_op)
    same(x.to_dense(), dense)


COLLECTIVES = (
    all_reduces,
    strided_and_large,
    rooted,
    gathers,
    scatters,
    all_to_alls,
    barriers,
    coalesced,
    sparse,
)


# --- messages, objects, groups --------------------------------------------------------------------------------------


def messages() -> None:
    to, frm = (me() + 1) % size(), (me() - 1) % size()
    x = torch.zeros(6)
    if me() % 2 == 0:
        dist.send(mine(), to, tag=7)
        assert dist.recv(x, frm, tag=7) == frm
    else:
        assert dist.recv(x, frm, tag=7) == frm
        dist.send(mine(), to, tag=7)
    same(x, mine(rank=frm))
    works = dist.group.WORLD.members.works  # type: ignore[union-attr]
    held = len(works._held)
    dist.send(mine(), to) if me() else dist.recv(x, frm)
    dist.recv(x, frm) if me() else dist.send(mine(), to)
    assert len(works._held) == held  # blocking messages create no work
    y = torch.zeros(6)
    works = [dist.isend(mine(), to), dist.irecv(y, frm)]
    for work in works:
        work.wait()
    same(y, mine(rank=frm))
    outs = [torch.zeros(6), torch.zeros(3)]
    ops = [
        dist.P2POp(dist.isend, mine(6), to),
        dist.P2POp(dist.irecv, outs[0], frm),
        dist.P2POp(dist.isend, mine(3), to),
        dist.P2POp(dist.irecv, outs[1], frm),
    ]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    same(outs, [mine(6, rank=frm), mine(3, rank=frm)])
    if me() == 0:
        senders = set()
        for _ in range(size() - 1):
            z = torch.zeros(6)
            source = dist.recv(z)
            same(z, mine(rank=source))
            senders.add(source)
        assert senders == set(range(1, size()))
    else:
        dist.send(mine(), 0)
    dist.barrier()


def objects() -> None:
    mine_too = {"rank": me(), "text": "x" * 1000 * me(), "set": {1, 2}}
    out: list[Any] = [None] * size()
    dist.all_gather_object(out, mine_too)
    assert [o["rank"] for o in out] == list(range(size()))
    there: list[Any] = [mine_too] if me() == 0 else [None]
    dist.broadcast_object_list(there, 0)
    assert there[0]["rank"] == 0
    collected: Any = [None] * size() if me() == 1 else None
    dist.gather_object(mine_too, collected, 1)
    assert collected is None or [o["rank"] for o in collected] == list(range(size()))
    got: list[Any] = [None]
    dist.scatter_object_list(got, [f"for {r}" for r in range(size())] if me() == 0 else None, 0)
    assert got == [f"for {me()}"]
    if me() == 0:
        dist.send_object_list([mine_too, 5], 1)
    elif me() == 1:
        received: list[Any] = [None, None]
        dist.recv_object_list(received, 0)
        assert received[0]["rank"] == 0
        assert received[1] == 5


def groups() -> None:
    """Further groups, splits, names and timeouts; a group that is destroyed and created again."""
    world = dist.group.WORLD
    assert isinstance(world, plugin.ProcessGroupUnicoll)
    everyone = dist.new_group(timeout=timedelta(seconds=20), group_desc="all of us")
    assert (everyone.group_desc, everyone.unicoll.timeout) == ("all of us", 20.0)
    if "sort_ranks" in inspect.signature(dist.new_group).parameters:
        backwards = dist.new_group(list(reversed(range(size()))), sort_ranks=False)
        assert dist.get_rank(backwards) == size() - 1 - me()
        assert dist.get_process_group_ranks(backwards) == list(reversed(range(size())))
        out = torch.zeros(size(), dtype=I64)
        dist.all_gather_into_tensor(out, torch.tensor([me()]), group=backwards)
        assert out.tolist() == list(reversed(range(size())))
        x = mine()
        dist.broadcast(x, 1, group=backwards)
        same(x, mine(rank=1))
    for _ in range(2):  # the same name twice, one after the other
        alone = dist.new_group([me()], use_local_synchronization=True)
        x = mine()
        dist.all_reduce(x, group=alone)
        same(x, mine())
        dist.destroy_process_group(alone)
    pair, same_pair = dist.new_group([0, 1]), dist.new_group([0, 1])
    if me() < 2:
        names = {group.unicoll.name for group in (pair, same_pair)}
        # The job may have had others of these ranks.
        assert {name.partition("#")[0] for name in names} == {"ranks 0, 1"}
        assert len(names) == 2
        x = torch.tensor([me() + 1.0])
        dist.all_reduce(x, group=pair)
        assert x.item() == 3
        part = pair.split_group([1, 0], timedelta(seconds=20), group_name="swapped")
        assert part.rank() == 1 - me()
        assert part.unicoll.timeout == 20
        dist.all_reduce(x, group=world if size() < 2 else pair)
        y = torch.tensor([me()])
        part.broadcast([y], _broadcast_from(0)).wait()
        assert y.item() == 1
        part.shutdown()
    if torch.__version__ >= (2, 15):  # others split groups only with a GPU
        halves = dist.split_group(split_ranks=[[1, 0], list(range(2, size()))][: size() - 1])
        assert halves.rank() == (1 - me() if me() < 2 else 0)
        x = torch.tensor([me()])
        dist.broadcast(x, group=halves, group_src=0)
        assert x.item() == (1 if me() < 2 else 2)
        dist.destroy_process_group(halves)
    world.set_timeout(timedelta(seconds=40))
    dist.barrier()
    everyone.shutdown()
    everyone.shutdown()


def recovery() -> None:
    """The default group is torch's."""
    with pytest.raises(unicoll.DistArgumentError, match="init_process_group has made the default group"):
        unicoll.recover({})
    dist.barrier()


def flight_recorder() -> None:
    """torch's flight recorder is not attached to unicoll groups, and still records others."""
    world: Any = dist.group.WORLD
    for name in ("reconfigure", "window", "abort_hooks", "time_estimate"):
        assert not getattr(world, f"supports_{name}")
    hooks = getattr(dist.distributed_c10d._world, "pg_flight_recorder_hooks", None)
    if hooks is None:  # before torch 2.15 only torch's own backends record
        return
    assert world not in hooks
    theirs = dist.new_group(backend="gloo")
    for group in (world, theirs):
        dist.all_reduce(mine(), group=group)
    trace = json.loads(torch._C._distributed_c10d._dump_fr_trace_json())
    assert {entry["process_group"][0] for entry in trace["entries"]} == {theirs.group_name}
    dist.barrier()
    dist.destroy_process_group(theirs)


def _broadcast_from(root: int) -> Any:
    opts = dist.distributed_c10d.BroadcastOptions()
    opts.rootRank = root
    return opts


def facts() -> dict[str, Any]:
    world: Any = dist.group.WORLD
    return {
        "backend": dist.get_backend(),
        "config": dist.get_backend_config(),
        "name": world.name(),
        "devices": [str(d) for d in world._device_types],
        "explained": plugin.explain(),
        "available": dist.is_backend_available("unicoll-gloo"),
        "environment": sorted(set(os.environ) & {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}),
    }


# --- works and futures ----------------------------------------------------------------------------------------------


def futures() -> None:
    x = mine()
    future = dist.all_reduce(x, async_op=True).get_future()
    same(future.wait(), [total()])
    y = mine()
    chained = dist.all_reduce(y, async_op=True).get_future().then(lambda f: f.value()[0] * 2)
    same(chained.wait(), total() * 2)
    z = mine()

    def again(f: Any) -> torch.Tensor:  # waits on the thread that runs the operation
        first = f.value()[0].clone()
        second = dist.all_reduce(first, async_op=True).get_future().wait()[0]
        dist.all_reduce(second)
        return second

    nested = dist.all_reduce(z, async_op=True).get_future().then(again)
    behind = [mine() for _ in range(5)]
    works = [dist.all_reduce(b, async_op=True) for b in behind]
    same(nested.wait(), total() * size() * size())
    for work in works:
        work.wait()
    same(behind, [total()] * 5)
    work = dist.all_reduce(mine(), async_op=True)
    work.wait(timedelta(seconds=20))
    assert work.is_success()
    assert work.exception() is None
    first = weakref.ref(dropped := torch.ones(1))
    dist.all_reduce(dropped, async_op=True)
    del dropped
    for _ in range(40):  # never waited for
        dist.all_reduce(torch.ones(1), async_op=True)
    for _ in range(20):  # remaining works are checked a few at a time
        dist.barrier(async_op=True).wait()
    assert first() is None
    works = [dist.all_reduce(torch.ones(1), async_op=True) for _ in range(40)]
    dist.barrier()
    assert all(work.result()[0].item() == size() for work in works)
    assert all(work.get_future().wait()[0].item() == size() for work in works)


def error_of(call: Callable[[], Any]) -> str:
    try:
        call()
    except unicoll.errors.DistArgumentError as error:
        return str(error)
    return ""


def unicoll_functions(directory: str) -> None:
    """unicoll's functions serve torch's job; its default group is that of torch."""
    here = unicoll.group.WORLD
    assert here is not None
    assert (unicoll.get_rank(), unicoll.get_world_size(), here.name) == (me(), size(), "world")
    assert plugin.torch_group() is dist.group.WORLD
    assert f"group 'world' of {size()}: unicoll (gloo)" in unicoll.explain()
    unicoll.metrics.reset()
    unicoll.metrics.enable()
    called: list[Any] = []
    hook = unicoll.add_hook(called.append, group=here)
    annotation = unicoll.annotate(nvtx=False, torch=True)
    with unicoll.profile(f"{directory}/profile", file=None) as profile, torch.profiler.profile() as profiler:
        dist.all_reduce(x := mine())
        theirs = dist.new_group([0, 1])
        ours = unicoll.new_group([0, 1])
        if me() < 2:
            dist.broadcast(mine(), 0, theirs)
            unicoll.broadcast(mine(), 0, ours)
    same(x, total())
    assert "all_reduce" in profile.text or me()
    assert any(event.key.startswith("unicoll::all_reduce all_reduce(") for event in profiler.key_averages())
    annotation.remove()
    assert unicoll.metrics.snapshot()["all_reduce", "world"].bytes == 24
    unicoll.metrics.disable()
    assert any(call.op == "all_reduce" and __file__ in call.site for call in called)
    hook.remove()
    with unicoll.check_finite():
        assert "has 1 NaN" in error_of(lambda: dist.all_reduce(torch.tensor([float("nan")])))
    unicoll.barrier()
    assert unicoll.dump_flight_recorder(directory).endswith(f"rank_{me()}.json")
    with open(f"{directory}/rank_{me()}.json") as file:
        assert {"world", "group-1"} <= {group["name"] for group in json.load(file)["groups"]} or me() > 1
    if me() < 2:
        unicoll.destroy_process_group(plugin.torch_group(theirs).unicoll)  # and torch's
        assert theirs not in dist.distributed_c10d._world.pg_map
        unicoll.destroy_process_group(ours)
    dist.barrier()


def a_part_that_torch_has_not_registered() -> None:
    """Its group is closed with the job."""
    dist.barrier()
    world: Any = dist.group.WORLD
    world.split_group([0] if me() == 0 else list(range(1, size())))
    dist.destroy_process_group()
    assert not unicoll.is_initialized()


def joined_without_metrics(backend: str) -> str:
    """The error of a counters' file in no directory; its only frame of unicoll is that of the plug-in."""
    os.environ["UNICOLL_METRICS_FILE"] = "/nowhere/metrics"
    try:
        dist.init_process_group(backend)
    except unicoll.errors.DistArgumentError as error:
        frames = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
        assert sum(file.startswith(os.path.dirname(unicoll.__file__)) for file in frames) == 1
        return str(error)
    finally:
        del os.environ["UNICOLL_METRICS_FILE"]
    return ""


def both_ways_end(by_unicoll: bool) -> None:
    """One call destroys the default groups of torch and of unicoll, and all others."""
    dist.barrier()
    dist.new_group([0, 1])
    unicoll.new_group([0, 1])
    assert "torch.distributed.init_process_group makes it" in error_of(unicoll.init_process_group)
    (unicoll if by_unicoll else dist).destroy_process_group()
    assert not dist.is_initialized()
    assert not unicoll.is_initialized()


def refusals() -> list[str]:
    """Invalid arguments raise at once, and the group stays usable."""
    said = []
    for attempt in (
        lambda: dist.all_reduce(torch.ones(2, dtype=torch.complex64), dist.ReduceOp.MAX),
        lambda: dist.all_reduce(torch.ones(2, dtype=torch.float32), dist.ReduceOp.BOR),
        lambda: dist.all_reduce(torch.ones(2, device="meta")),
        lambda: dist.all_gather_into_tensor(torch.ones(3), torch.ones(2)),
        lambda: dist.all_reduce(torch.eye(2).to_sparse_csr()),
        lambda: plugin.explain(5),
        lambda: dist.isend(torch.ones(2), 1 - dist.get_rank(), tag=2**63),
        lambda: dist.recv(torch.ones(2), 1 - dist.get_rank(), tag=-(2**63) - 1),
        lambda: dist.all_reduce(torch.sparse_coo_tensor([[0]], [1.0], (4 + dist.get_rank(),))),
    ):
        try:
            attempt()
            said.append("nothing")
        except (RuntimeError, ValueError) as error:
            said.append(f"{type(error).__name__}: {error}")
    x = mine()
    dist.all_reduce(x)
    same(x, total())
    return said
