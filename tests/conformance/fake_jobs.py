"""A program that runs with real ranks and with the backend ``fake``, and what the flight recorder has of it."""

from __future__ import annotations

from typing import Any

import numpy as np

import unicoll as dist
from tests.support.worker import rank_and_size
from unicoll.calls.flight_recorder import ring
from unicoll.diagnosis.recorder_contents import recorded_calls
from unicoll.parallel import GradientBuckets, average_gradients, broadcast_parameters, check_identical


def facts() -> list[tuple[Any, ...]]:
    """The recorded calls without times and backend."""

    def named(arrays: Any) -> list[Any]:
        return [(dtype.name, shape) for dtype, shape in arrays]

    return [
        (c.group, c.ranks, c.seq, c.op, named(c.inputs), named(c.outputs), c.nbytes, c.reduce, c.root)
        + (c.peer, c.tag, c.site, c.state, c.blocking, c.error)
        for c in recorded_calls()
    ]


def program() -> list[tuple[Any, ...]]:
    """Training with buckets, sub-groups, objects and messages; at least four ranks."""
    me, n = dist.get_rank(), dist.get_world_size()
    ring().clear()
    pair, _ = dist.new_subgroups(2)
    odd = dist.new_group([1, 3])
    part = dist.split_group(None, [[0, 2], [1, 3]])
    parameters = {"w": np.ones((40, 30), np.float32), "b": np.ones(30, np.float32), "s": np.ones(7)}
    broadcast_parameters(parameters, src=1)
    buckets = GradientBuckets(parameters, bucket_cap_mb=0.001, first_bucket_mb=0.0001)
    for step in range(3):
        for name in reversed(parameters):
            buckets.ready(name, np.full_like(parameters[name], step))
        buckets.wait()
        losses: list[Any] = [None] * n
        dist.all_gather_object(losses, {"step": step})
        average_gradients([np.ones((3, 2), np.float16)], group=pair)
    check_identical(parameters)
    _collectives(me, n, part)
    _objects(me, n)
    _messages(me, n)
    if me % 2:
        dist.all_reduce(np.ones(5, np.int8), op=dist.ReduceOp.MAX, group=odd)
        dist.gather(np.ones(2), [np.empty(2), np.empty(2)] if me == 1 else None, group_dst=0, group=odd)
    dist.monitored_barrier()
    return facts()


def _collectives(me: int, n: int, part: Any) -> None:
    mesh = dist.init_device_mesh("cpu", (2, n // 2), mesh_dim_names=("dp", "tp"))
    for name in ("dp", "tp"):
        dist.all_reduce(np.ones((2, 2)), group=mesh[name].get_group())
    dist.reduce(np.ones((2, 2)), dst=2)
    dist.all_reduce_coalesced([np.ones(3), np.ones((2, 5)), np.ones(4, np.float32)])
    works = [dist.all_reduce(np.ones(1000 * i), async_op=True) for i in range(1, 5)]
    for work in works:
        work.wait()
    dist.scan(np.ones(6), group=part)
    rows = [1] * n
    dist.all_to_all_single(np.empty((n, 3)), np.ones((n, 3)), rows, rows)
    dist.reduce_scatter_tensor(np.empty(2), np.ones(2 * n))
    dist.all_gather_into_tensor(np.empty((n, 4)), np.ones(4), async_op=True).wait()
    try:
        dist.all_reduce(np.ones(3), op="nonsense")
    except dist.DistError:
        pass


def _objects(me: int, n: int) -> None:
    for text in ("two", "2" * 1000):  # the second does not fit the header
        dist.broadcast_object_list([1, text], src=3)
        dist.gather_object(text, [None] * n if me == 2 else None, dst=2)
        dist.scatter_object_list([text], [text] * n if me == 1 else None, src=1)
        dist.all_gather_object([None] * n, text)
    if me == 0:
        dist.send_object_list(["x", 5], dst=3)
    elif me == 3:
        dist.recv_object_list(["y", 6], src=0)


def _messages(me: int, n: int) -> None:
    after, before = (me + 1) % n, (me - 1) % n
    work = dist.isend(np.ones(10), after, tag=3)
    dist.recv(np.empty(10), before, tag=3)
    work.wait()
    sends = [dist.P2POp(dist.isend, np.ones(i), after, tag=i) for i in (1, 2)]
    receives = [dist.P2POp(dist.irecv, np.empty(i), before, tag=i) for i in (1, 2)]
    for each in dist.batch_isend_irecv([*sends, *receives]):
        each.wait()
    if me == 0:
        dist.recv(np.empty(2, np.int32), tag=9)
    elif me == 2:
        dist.send(np.empty(2, np.int32), 0, tag=9)


def fake() -> list[tuple[Any, ...]]:
    """The program in this process alone, as one rank of the job that it was started for."""
    rank, size = rank_and_size()
    dist.init_process_group("fake", rank=rank, world_size=size)
    try:
        return program()
    finally:
        dist.destroy_process_group()
