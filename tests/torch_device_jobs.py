"""What ranks of torch.distributed do with tensors of the simulated device, over unicoll's NCCL backend."""

from __future__ import annotations

from typing import Any

import simulated_arrays as arrays
import simulated_ranks
import simulated_torch
import torch
import torch.distributed as dist
import torch_jobs
from simulated_torch import full, values
from torch_jobs import me


def join(bound: bool, limit: float) -> tuple[int, int, str]:
    """Join, bound to a device or not."""
    simulated_torch.install()
    device = arrays.simulation().cuda.current_device()
    return torch_jobs.join("unicoll", limit, f"cuda:{device}" if bound else None)


def leave() -> list[str]:
    """Leave; what was not given back, and what the device complains of."""
    return [*torch_jobs.leave(), *simulated_ranks.complaints()]


def world() -> Any:
    return dist.group.WORLD


def connect() -> None:
    """The first operation of a group that is not bound connects its ranks."""
    dist.all_reduce(full(1, 1.0))
    simulated_ranks.here().synchronize()


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


def refused_messages() -> tuple[str, list[float]]:
    """A batch that is refused sends nothing, and the group goes on."""
    ops, _ = _crossing(8, 0)
    try:
        dist.batch_isend_irecv([*ops, dist.P2POp(dist.isend, ops[0].tensor, 1 - me(), tag=3)])
        said = "nothing"
    except RuntimeError as error:
        said = str(error)
    x = full(3, 1.0)
    dist.send(x, 1 - me()) if me() else dist.recv(x, 1 - me())
    dist.all_reduce(x)
    return said, values(x)


# --- groups ---------------------------------------------------------------------------------------------------------


def subgroups() -> dict[str, Any]:
    """Groups of ranks that are bound to devices: by new_group and split_group, and those that cannot be split."""
    nccl: Any = simulated_ranks.nccl()
    split, colors = nccl.comm_split, []

    def counting(comm: int, color: int | None, key: int, config: Any) -> Any:
        colors.append(color)
        return split(comm, color, key, config)

    nccl.comm_split = counting

    def made(group: Any) -> list[Any]:
        """What it took to make a group, and whether it works."""
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
        parts = dist.split_group(split_ranks=[[0, 1]])
        found["split_group"] = made(parts)
        if me() < 2:
            assert parts is not None
            found["part of a part"] = made(dist.split_group(parts, [[0], [1]]))
        if me() == 1:
            alone = dist.new_group([1], use_local_synchronization=True)
            found["members only"] = made(alone)
        cpu = dist.new_group([0, 1], backend="unicoll-gloo")
        theirs = dist.new_group([0, 1], backend="gloo")
        if me() < 2:
            for group in (cpu, theirs):
                x = torch.ones(2)
                dist.all_reduce(x, group=group)
                assert x.tolist() == [2.0, 2.0]
        found["on the CPU"] = list(colors)
    finally:
        nccl.comm_split = split
    return found
