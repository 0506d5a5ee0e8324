"""Functions that ranks run in the conformance stages in addition to the suite's."""

from __future__ import annotations

from typing import Any

import numpy as np

import unicoll as dist
from tests.gpu.check.kits import kit
from tests.gpu.check.rank_jobs import expect


def explained(name: str) -> str:
    """The group's description, after an operation on an array of a kit."""
    pg = dist.group.WORLD
    assert pg is not None
    pg.all_reduce(kit(name).full(4, 1.0))
    return pg.describe()


def sent_to_itself(name: str) -> None:
    """A batch of a send of a rank to itself and a receive."""
    k, me = kit(name), dist.get_rank()
    sent, got = k.full(1000, float(me)), k.full(1000, -1.0)
    for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, sent, me), dist.P2POp(dist.irecv, got, me)]):
        work.wait()
    expect(k, got, me)


def mixed(name: str) -> None:
    """CPU and CUDA arrays and objects in one group."""
    k, me, n = kit(name), dist.get_rank(), dist.get_world_size()
    for _ in range(3):
        host, device = np.full(100, me + 1.0), k.full(100, float(me + 1))
        works = [dist.all_reduce(x, async_op=True) for x in (host, device)]
        for work in reversed(works):
            assert work is not None
            work.wait()
        total = n * (n + 1) / 2
        assert (host == total).all()
        expect(k, device, total)
        found: list[Any] = [None] * n
        dist.all_gather_object(found, {"rank": me})
        assert found == [{"rank": r} for r in range(n)]
    said = dist.explain()
    assert "nccl" in said, said
    assert "; expected transports: " in said, said
    assert "not known" not in said, said
