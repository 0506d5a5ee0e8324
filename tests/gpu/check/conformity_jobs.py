"""Functions that ranks run in the conformance stages in addition to the suite's cases."""

from __future__ import annotations

from typing import Any

import numpy as np

import unicoll as dist
from tests.gpu.check.kits import Kit, kit

__all__ = ["explained", "mixed", "together"]


def explained(name: str) -> str:
    """The group's description, after an operation on an array of a kit."""
    pg = dist.group.WORLD
    assert pg is not None
    pg.all_reduce(kit(name).full(4, 1.0))
    return pg.describe()


def _done(k: Kit, works: list[Any]) -> None:
    for work in works:
        work.wait()


def together(name: str) -> None:
    """Coalesced calls, blocking and not; an exchange with the neighbours as one batch; sends to the rank itself."""
    k, me, n = kit(name), dist.get_rank(), dist.get_world_size()
    sizes = (3, 17, 30000)
    for async_op in (False, True):
        x = [k.full(s, float(me + i)) for i, s in enumerate(sizes)]
        _finish(dist.all_reduce_coalesced(x, async_op=async_op), async_op)
        for i, each in enumerate(x):
            _same(k, each, sum(r + i for r in range(n)))
        inputs = [k.full(s, float(10 * me + i)) for i, s in enumerate(sizes)]
        outs = [k.full(n * s, -1.0) for s in sizes]
        _finish(dist.all_gather_into_tensor_coalesced(outs, inputs, async_op=async_op), async_op)
        for i, each in enumerate(outs):
            expected = np.repeat([10.0 * r + i for r in range(n)], sizes[i])
            assert np.array_equal(k.numpy(each), expected), (name, i)
    sent, got, own = k.full(1000, float(me)), k.full(1000, -1.0), k.full(1000, -1.0)
    ops = [dist.P2POp(dist.isend, sent, (me + 1) % n), dist.P2POp(dist.irecv, got, (me - 1) % n)]
    ops += [dist.P2POp(dist.isend, sent, me), dist.P2POp(dist.irecv, own, me)]
    _done(k, dist.batch_isend_irecv(ops))
    _same(k, got, (me - 1) % n)
    _same(k, own, me)
    if n > 1 and me < 2:  # one after the other, blocking
        for turn in (0, 1):
            x = k.full(77, float(me))
            (dist.send if me == turn else dist.recv)(x, 1 - me)
            _same(k, x, turn)
    dist.barrier()


def mixed(name: str) -> None:
    """CPU and CUDA arrays and objects in one group."""
    k, me, n = kit(name), dist.get_rank(), dist.get_world_size()
    for _ in range(3):
        host, device = np.full(100, me + 1.0), k.full(100, float(me + 1))
        on_host = dist.all_reduce(host, async_op=True)
        on_device = dist.all_reduce(device, async_op=True)
        assert on_host is not None
        assert on_device is not None
        on_device.wait()
        on_host.wait()
        total = n * (n + 1) / 2
        assert (host == total).all()
        _same(k, device, total)
        found: list[Any] = [None] * n
        dist.all_gather_object(found, {"rank": me})
        assert found == [{"rank": r} for r in range(n)]
    said = dist.explain()
    assert "nccl" in said, said
    assert "; expected transports: " in said, said
    assert "not known" not in said, said


def _finish(work: Any, async_op: bool) -> None:
    assert (work is not None) == async_op
    if async_op:
        work.wait()


def _same(k: Kit, array: Any, value: float) -> None:
    found = np.asarray(k.numpy(array))
    assert (found == value).all(), f"{found[:4]}, expected {value}"
