"""Rank functions: torch's default group with members that change."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from itertools import count
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import unicoll
from tests.support.order import await_true
from tests.support.worker import send_note
from tests.torch import torch_jobs
from tests.torch.torch_jobs import same

api: Any = dist
"""torch.distributed, with the functions of torch 2.14."""
uuids = count(1)
store: Any = None
process = 0
ALL = (0, 1, 2)


def join(path: str, backend: str = "unicoll-gloo", device: str | None = None) -> None:
    """Join without members: there is no operation then."""
    global store, process
    process = int(os.environ["RANK"])
    store = dist.FileStore(path, len(ALL))
    arguments = {"rank": process, "world_size": len(ALL), "store": store, "enable_reconfigure": True}
    torch_jobs.join(backend, 30.0, device, **arguments)
    group: Any = dist.group.WORLD
    assert api._supports_reconfigure()
    for call in (lambda: dist.all_reduce(torch.ones(1)), dist.barrier, dist.new_group):
        with pytest.raises(unicoll.NotInitializedError, match="has no members: call reconfigure first"):
            call()
    assert str(group.get_error()) == "ErrorType.SUCCESS"
    assert not unicoll.is_initialized()


def handles_of(processes: Sequence[int], name: str) -> list[str]:
    """The handles of processes; all exchange theirs."""
    store.set(f"{name}/{process}", api._get_reconfigure_handle())
    handles = {each: store.get(f"{name}/{each}").decode() for each in ALL}
    return [handles[each] for each in processes]


def reconfigure(processes: Sequence[int], kind: Callable[[list[str]], Any] = list) -> None:
    """All call it; the given processes form the group."""
    uuid = next(uuids)
    handles = handles_of(processes, f"handles {uuid}")
    if process in processes:
        assert api._reconfigure(uuid, kind(handles), timeout=timedelta(seconds=30)).wait()
        check(processes.index(process) if kind is list else sorted(processes).index(process), len(processes))


def check(rank: int, size: int) -> None:
    """Rank and size in torch, in its C++ part, and in unicoll; and that operations work."""
    group: Any = dist.group.WORLD
    assert (dist.get_rank(), dist.get_world_size()) == (group.getRank(), group.getSize()) == (rank, size)
    assert dist.get_process_group_ranks(group) == [*range(size)]
    assert (unicoll.get_rank(), unicoll.get_world_size()) == (rank, size)
    total = torch.full((4,), rank + 1.0)
    dist.all_reduce(total)
    same(total, torch.full((4,), size * (size + 1) / 2))
    root = torch.full((2,), float(rank))
    dist.broadcast(root, src=size - 1)
    same(root, torch.full((2,), size - 1.0))
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1, 1, bias=False))
    model(torch.full((1, 1), rank + 1.0)).sum().backward()
    same(model.module.weight.grad, torch.full((1, 1), (size + 1) / 2))
    array = np.ones(3)
    unicoll.all_reduce(array)
    assert (array == size).all()


def members_change() -> None:
    reconfigure(ALL)
    unicoll.metrics.enable()
    dist.barrier()
    for processes in ALL, (0, 2), (0,), (2, 1, 0), (1, 2), ALL, ALL:
        reconfigure(processes)
    reconfigure((2, 0), kind=set)
    reconfigure(ALL)
    counted = unicoll.metrics.snapshot()["barrier", "world"].calls
    dist.barrier()
    assert unicoll.metrics.snapshot()["barrier", "world"].calls == counted + 1
    unicoll.metrics.disable()
    unicoll.metrics.reset()


def refusals() -> None:
    """The group stays as it is."""
    used = next(uuids) - 1
    handles = handles_of(ALL, f"refusals {used}")
    others = [each for each in handles if each != api._get_reconfigure_handle()]
    for wrong, text in (
        (others, f"unicoll:0000000{process}:.* is not among"),
        ([*handles, handles[0]], "twice"),
    ):
        with pytest.raises(unicoll.DistArgumentError, match=text):
            api._reconfigure(next(uuids), wrong)
    with pytest.raises(RuntimeError, match=f"uuid {used} was already used"):
        api._reconfigure(used, handles)
    check(process, len(ALL))


def a_member_is_late() -> None:
    """Process 2 does not come in time: the others have no members then."""
    uuid = next(uuids)
    handles = handles_of(ALL, f"late {uuid}")
    if process == 2:
        store.wait([f"missed {uuid}/0", f"missed {uuid}/1"])
    else:
        with pytest.raises(unicoll.DistError, match="ranks? .*2" if process == 0 else ""):
            api._reconfigure(uuid, handles, timeout=timedelta(seconds=1))
        with pytest.raises(unicoll.NotInitializedError):
            dist.barrier()
        store.set(f"missed {uuid}/{process}", "")
    reconfigure(ALL)


def after_abort() -> None:
    group: Any = dist.group.WORLD
    if process == 0:
        with pytest.raises(unicoll.GroupAbortedError, match=r"calls (abort|reconfigure)\(\)"):
            dist.all_reduce(torch.ones(1))
    else:
        group.abort()
        group.abort()
        assert str(group.get_error()) == "ErrorType.SUCCESS"
    reconfigure(ALL)


def other_groups_stay() -> None:
    pair: Any = dist.new_group([0, 1])
    reconfigure((2, 1, 0))
    if process < 2:
        total = torch.ones(1)
        dist.all_reduce(total, group=pair)
        same(total, torch.full((1,), 2.0))
        dist.destroy_process_group(pair)
    reconfigure(ALL)


def a_rank_is_lost() -> None:
    """Process 1 is killed; the others form a group of two."""
    group: Any = dist.group.WORLD
    handles = handles_of(ALL, "before the loss")
    send_note("ready")
    with pytest.raises(unicoll.RankLostError) as caught:
        dist.all_reduce(torch.ones(1))
    assert caught.value.rank == 1
    await_true(lambda: str(group.get_error()) == "ErrorType.REMOTE_ERROR")
    assert api._reconfigure(next(uuids), handles[::2]).wait()
    check(process // 2, 2)
