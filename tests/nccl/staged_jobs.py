"""What ranks do in the tests of device arrays over a backend of the host: the CPU backend or MPI."""

from __future__ import annotations

from typing import Any

import numpy as np

import unicoll as dist
from tests.simulated_nccl import arrays
from unicoll.diagnosis.recorder_contents import recorded_calls


def mixed_kinds(rounds: int) -> bool:
    """Asynchronous calls on arrays of the device and of the host in turns, in one group: their order is the same on
    all ranks, however late a device is."""
    me, n = dist.get_rank(), dist.get_world_size()
    total, good = sum(range(n)), True
    for i in range(rounds):
        x, y = arrays.full(5000, me + i, np.float64), np.full(300, me - i, np.float64)
        z = arrays.full(7, me, np.int32)
        for work in [dist.all_reduce(a, async_op=True) for a in (x, y, z)]:
            work.wait()
        found = (x.numpy() == total + n * i, y == total - n * i, z.numpy() == total)
        good = good and all(bool(each.all()) for each in found)
    return good


def ordered(rounds: int) -> bool:
    """The call takes what the stream will have made, and the stream goes on with what the call gives."""
    me, n = dist.get_rank(), dist.get_world_size()
    good = True
    for i in range(rounds):
        x = arrays.full(3000, me, np.float32)
        with arrays.Stream():
            y = arrays.full(3000, me, np.float32)
            y *= 2
            y += i
            work = dist.all_reduce(y, async_op=True)
        dist.all_reduce(x)
        x += 1
        with arrays.Stream():
            work.wait()
            y += 1
            good = good and bool((y.numpy() == sum(range(n)) * 2 + n * i + 1).all())
        good = good and bool((x.numpy() == sum(range(n)) + 1).all())
    calls = recorded_calls()[-2 * rounds :]
    return good and all(0 < c.created <= c.started <= c.ended for c in calls)


def messages() -> list[bool]:
    """Sends and receives of device arrays, blocking and not, strided, from anyone, and to an array of the host."""
    me, n = dist.get_rank(), dist.get_world_size()
    to, frm = (me + 1) % n, (me - 1) % n
    good = []
    for count in (0, 1, 1000, 300_000):
        x, y = arrays.full(count, me + 1, np.float32), arrays.empty(count, np.float32)
        work = dist.isend(x, to, tag=1)
        dist.recv(y, frm, tag=1)
        work.wait()
        good.append(bool((y.numpy() == frm + 1).all()))
        z = arrays.full((count, 2), 0, np.float32)
        coming = dist.irecv(z.T, None, tag=2)
        dist.send(arrays.full(2 * count, me + 5, np.float32), to, tag=2)
        coming.wait()
        good.append(bool((z.numpy() == frm + 5).all()) and coming.source_rank() == frm)
        host = np.zeros(count, np.float32)
        works = dist.batch_isend_irecv(
            [dist.P2POp(dist.irecv, host, frm, tag=3), dist.P2POp(dist.isend, x, to, tag=3)]
        )
        for one in works:
            one.wait()
        good.append(bool((host == frm + 1).all()))
    return good


def shorter_messages() -> list[tuple[int, Any]]:
    """Messages that are shorter than the arrays of the device: contiguous or not, to another rank or to this one."""
    me, n = dist.get_rank(), dist.get_world_size()
    to, frm = (me + 1) % n, (me - 1) % n
    found: list[tuple[int, Any]] = []
    for count, rows in ((3, 2), (60_000, 30_000)):
        for shape in ("contiguous", "transposed"):
            for peer, source in ((to, frm), (me, me)):
                x, status = arrays.full((rows, 2), -1, np.float32), dist.Status()
                work = dist.irecv(x if shape == "contiguous" else x.T, source, tag=None, status=status)
                dist.send(arrays.full(count - 1, 4, np.float32), peer, tag=9)
                work.wait()
                assert (status.source, status.tag) == (source, 9)
                got = (x.numpy() if shape == "contiguous" else x.numpy().T).ravel()
                assert (got[: count - 1] == 4).all()
                assert (got[count - 1 :] == -1).all()
                found.append((status.count, shape))
    x, status = arrays.full((2, 2), -1, np.float32), dist.Status()
    work = dist.isend(arrays.full(2, 4, np.float32), to)
    dist.recv(x, frm, status=status)
    work.wait()
    assert (status.source, status.count, x.numpy().ravel().tolist()) == (frm, 2, [4, 4, -1, -1])
    dist.barrier()
    return found


def facts() -> dict[str, Any]:
    """What the group says of itself before and after its first device array."""
    before = dist.explain()
    x = arrays.full(3, 1.0, np.float32)
    dist.all_reduce(x)
    return {
        "before": before,
        "after": dist.explain(),
        "backend": dist.get_backend(),
        "sum": x.numpy().tolist(),
        "staging": dist.group.WORLD.staging_bytes()["cuda"],
    }


def over_nccl() -> dict[str, Any]:
    """Device arrays go over NCCL, whose members have met in the job's store."""
    x = arrays.full(3, dist.get_rank() + 1.0, np.float32)
    dist.all_reduce(x)
    y = np.full(3, dist.get_rank() + 1.0)
    dist.all_reduce(y)
    return {"device": x.numpy().tolist(), "host": y.tolist(), "explained": dist.explain()}
