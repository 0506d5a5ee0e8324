"""Rank functions of torch.distributed with tensors on the simulated device and unicoll's NCCL backend."""

from __future__ import annotations

import gc
import time
import weakref
from typing import Any

import torch
import torch.distributed as dist

import unicoll
from tests.gpu.check.plugin_jobs import split_group
from tests.nccl.nccl_jobs import error_of
from tests.simulated_nccl import arrays, ranks, torch_tensors
from tests.simulated_nccl.torch_tensors import captured, full, values
from tests.support.order import await_true
from tests.torch import reconfigure_jobs, torch_jobs
from tests.torch.torch_jobs import me


def join(bound: bool, limit: float) -> tuple[int, int, str]:
    """Join, bound to a device or not."""
    torch_tensors.install()
    device = arrays.simulation().cuda.current_device()
    return torch_jobs.join("unicoll", limit, f"cuda:{device}" if bound else None)


def join_without_members(path: str) -> None:
    """Join with a group whose members change, bound to a device."""
    torch_tensors.install()
    reconfigure_jobs.join(path, "unicoll", f"cuda:{arrays.simulation().cuda.current_device()}")


def members_change() -> list[list[float]]:
    """The sum of the ranks, from 1 on, of each group that this process is in."""
    found = []
    for processes in (0, 1, 2), (2, 0), (1, 2, 0), (0, 1, 2):
        reconfigure_jobs.reconfigure(processes)
        if reconfigure_jobs.process in processes:
            total = full(1, me() + 1.0)
            dist.all_reduce(total)
            found.append(values(total))
    return found


def leave() -> list[str]:
    """Leave; returns leaked resources and faults of the device."""
    return [*torch_jobs.leave(), *ranks.complaints()]


def world() -> Any:
    return dist.group.WORLD


def connect() -> None:
    """The first operation of a group that is not bound connects its ranks."""
    dist.all_reduce(full(1, 1.0))
    ranks.simulation().synchronize()


def last_operation_fails(by_unicoll: bool) -> tuple[str, bool]:
    """Rank 1 ends the group while rank 0 is in an operation; destroy's error, and whether there is a group then."""
    group, store = world().unicoll, dist.distributed_c10d._get_default_store()
    if me() == 0:
        dist.all_reduce(full(1, 1.0))
        store.set("started", "")
    else:
        store.wait(["started"])
        group.abort("the test ends it")
    await_true(lambda: group.job.control.group_failure(group.name))
    said = error_of((unicoll if by_unicoll else dist).destroy_process_group)
    return said, dist.is_initialized() or unicoll.is_initialized()


# --- messages -------------------------------------------------------------------------------------------------------


def _crossing(count: int, order: int) -> tuple[list[dist.P2POp], Any]:
    """Messages to the other rank and from it; with order 1 both ranks receive first."""
    other = 1 - me()
    got, given = full(count, 0.0), full(count, me() + 1.0)
    ops = [dist.P2POp(dist.isend, given, other), dist.P2POp(dist.irecv, got, other)]
    return ops[::-1] if order else ops, got


def batches() -> list[list[float]]:
    """Crossing messages, sends first and receives first; several in each direction; a batch in a row of others."""
    found = []
    for order in (0, 1):
        ops, got = _crossing(1 << 16, order)
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        found.append(values(got))
    several = [_crossing(10 * (k + 1), k % 2) for k in range(4)]
    works = dist.batch_isend_irecv([op for ops, _ in several for op in ops])
    x = full(3, 1.0)
    dist.all_reduce(x)
    for work in works:
        work.wait()
    return [*found, *(values(got) for _, got in several), values(x)]


def coalesced_messages() -> list[list[float]]:
    """As torch 2.6 and 2.15 do it themselves: isend and irecv between the start and the end of coalescing."""
    found = []
    for order in (0, 1):
        ops, got = _crossing(1 << 16, order)
        with dist._coalescing_manager(device=ops[0].tensor.device, async_ops=True) as several:
            for op in ops:
                assert op.op(op.tensor, op.peer) is None
        several.wait()
        found.append(values(got))
    return found


def tagged_messages() -> list[list[float]]:
    """Messages with tags, which have no effect: a send and a receive, and a batch."""
    x = full(3, me() + 1.0)
    dist.send(x, 1, tag=3) if me() == 0 else dist.recv(x, 0, tag=5)
    ops, got = _crossing(8, 0)
    for op, tag in zip(ops, (7, 9), strict=True):
        op.tag = tag
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    return [values(x), values(got)]


def refused_messages() -> tuple[str, list[float]]:
    """An invalid batch sends nothing, and the group stays usable."""
    ops, _ = _crossing(8, 0)
    try:
        with arrays.device(1 - me()):
            elsewhere = full(8, 1.0)
        dist.batch_isend_irecv([*ops, dist.P2POp(dist.isend, elsewhere, 1 - me())])
        said = "nothing"
    except RuntimeError as error:
        said = str(error)
    x = full(3, 1.0)
    dist.send(x, 1 - me()) if me() else dist.recv(x, 1 - me())
    dist.all_reduce(x)
    return said, values(x)


# --- what works hold ------------------------------------------------------------------------------------------------


def _nccl() -> Any:
    """The NCCL backend of the default group."""
    group: Any = dist.group.WORLD
    return group.unicoll._backends.for_device("cuda")


def asking() -> list[bool]:
    """True if the watchdog has pending callbacks: for operations without, and for one with a callback."""
    found = []
    deadline = time.monotonic() + 30
    # the watchdog alone removes operations that have ended, so wait until it has
    while _nccl().resources.in_flight.operations:
        assert time.monotonic() < deadline
        time.sleep(0.005)
    with ranks.simulation().hold():
        works = [dist.all_reduce(full(8, 1.0), async_op=True) for _ in range(3)]
        found.append(_nccl().detection.sweep(time.monotonic()))
        works[0]._handle.add_done_callback(lambda: None)
        found.append(_nccl().detection.sweep(time.monotonic()))
    for work in works:
        work.wait()
    return found


def futures() -> list[float]:
    """A future's value is there for the stream that waits for it; the host waits for nothing."""
    here = ranks.simulation()
    with here.hold():
        future = dist.all_reduce(full(8, 1.0), async_op=True).get_future()
        (x,) = future.wait()
    return values(x)


def _posted(count: int = 8, wait: bool = True) -> weakref.ref[Any]:
    """An operation whose tensor only the plug-in references."""
    x = full(count, 1.0)
    work = dist.all_reduce(x, async_op=True)
    if wait:
        work.wait()
    return weakref.ref(x)


def _more(count: int) -> None:
    """Operations on other tensors; with each the plug-in checks some earlier works."""
    y = full(4, 1.0)
    for _ in range(count):
        dist.all_reduce(y, async_op=True).wait()


def waited_for() -> dict[str, bool]:
    """Tensors of works that were waited for before the device started them."""
    here = ranks.simulation()
    with here.hold():
        first = _posted()
        work = dist.all_reduce(full(8, 1.0), async_op=True)
        work.wait()
        _more(3)
        gc.collect()
        found = {"let go on the same stream": first() is None, "early": work.is_completed()}
    here.synchronize()
    found["ended"] = work.is_completed() and work.is_success()
    return found


def waited_for_elsewhere() -> bool:
    """A tensor of a work that was waited for on another stream stays until the device is done with it, then goes."""
    here = ranks.simulation()
    other = arrays.Stream()
    with here.hold():
        x = full(8, 1.0)
        work = dist.all_reduce(x, async_op=True)
        with other:
            work.wait()
        kept = weakref.ref(x)
        del x, work
        _more(6)
        gc.collect()
        held = kept() is not None
    here.synchronize()
    _nccl().detection.sweep(time.monotonic())
    _more(30)
    gc.collect()
    await_true(lambda: kept() is None)  # the watchdog has another thread let go of it
    return held


def never_waited_for() -> bool:
    """Works without a wait are released once they have ended; one that has not ended stays in the queue."""
    here = ranks.simulation()
    with here.hold():
        first = _posted(wait=False)
        for _ in range(40):
            _posted(wait=False)
        held = first() is not None
    here.synchronize()
    for _ in range(40):
        _posted(wait=False)
    gc.collect()
    await_true(lambda: first() is None)
    return held


def recorded(mode: str) -> dict[str, Any]:
    """Operations captured into a graph, after some that the device has not started; returns the remaining works."""
    here = ranks.simulation()
    world: Any = dist.group.WORLD
    stream = arrays.Stream()
    _more(30)
    here.synchronize()
    with here.hold():
        early = [_posted(wait=k % 2 == 0) for k in range(30)]
        with captured(stream, mode) as graphs:
            refs = [_posted() for _ in range(30)]
            x = full(4, me() + 1.0)
            work = dist.all_reduce(x, async_op=True)
            work.wait()
            within = work.is_completed()
    after = work.is_completed()
    here.synchronize()
    with stream:
        here.launch(graphs[0], stream.ptr)
        value = values(x)
    graphs[0].destroy()
    _more(60)
    gc.collect()
    await_true(lambda: all(ref() is None for ref in (*early, *refs)))
    return {
        "within": within,
        "after": after,
        "value": value,
        "works": sum(not work.released for work in world.members.works._held.values()),
    }


# --- groups ---------------------------------------------------------------------------------------------------------


def subgroups() -> dict[str, Any]:
    """Groups of ranks that are bound to devices: by new_group and split_group, and those that cannot be split."""
    nccl: Any = ranks.nccl()
    split, colors = nccl.comm_split, []

    def counting(comm: int, color: int | None, key: int, config: Any) -> Any:
        colors.append(color)
        return split(comm, color, key, config)

    nccl.comm_split = counting

    def made(group: Any) -> list[Any]:
        """The communicator calls that created a group, and the result of an operation."""
        took, colors[:] = list(colors), []
        if not isinstance(group, dist.ProcessGroup):
            return [took]
        x = full(3, me() + 1.0)
        dist.all_reduce(x, group=group)
        on_host = torch.ones(2)
        dist.all_reduce(on_host, group=group)
        assert on_host.tolist() == [group.size()] * 2
        devices = [str(group.bound_device_id), str(group.unicoll.bound_device_id)]
        return [took, values(x), *devices, len(colors)]

    try:
        ends = dist.new_group([0, 2])
        found = {"new_group": made(ends)}
        cpu = dist.new_group([0, 1], backend="unicoll-gloo")
        theirs = dist.new_group([0, 1], backend="gloo")
        if me() < 2:
            for group in (cpu, theirs):
                x = torch.ones(2)
                dist.all_reduce(x, group=group)
                assert x.tolist() == [2.0, 2.0]
        found["on the CPU"] = list(colors)
        parts = split_group([[0, 1]])
        found["split_group"] = made(parts)
        if me() < 2:  # from here on torch 2.15 counts groups that the others do not
            alone = split_group([[0], [1]], parts)
            found["part of a part"] = made(alone)
            alone.shutdown()  # torch 2.6 does not know them
            parts.shutdown()
        if me() == 1:
            alone = dist.new_group([1], use_local_synchronization=True)
            found["members only"] = made(alone)
    finally:
        nccl.comm_split = split
    return found
