"""What ranks do in the tests of groups."""

from __future__ import annotations

import os
import socket
from fractions import Fraction
from typing import Any

import numpy as np

import unicoll as dist
from tests.support import worker
from tests.support.calls import COLLECTIVES, invoke
from tests.support.outcomes import failure_of


def me() -> int:
    return dist.get_rank()


def size() -> int:
    return dist.get_world_size()


def total(group: Any = None) -> float:
    """The sum of the global ranks of a group's members, by all_reduce."""
    x = np.array([float(me())])
    dist.all_reduce(x, group=group)
    return float(x[0])


# --- groups -------------------------------------------------------------------------------------------------


def facts() -> dict[str, Any]:
    """What the world group says of itself."""
    pg = dist.group.WORLD
    assert pg is not None
    assert pg is dist.GroupMember.WORLD
    return {
        "rank": (pg.rank(), dist.get_rank(), dist.get_rank(pg)),
        "size": (pg.size(), dist.get_world_size(), dist.get_world_size(pg)),
        "ranks": (list(pg.ranks), dist.get_process_group_ranks(pg), dist.get_process_group_ranks(None)),
        "backend": (dist.get_backend(), dist.get_backend(pg), pg.backend_name),
        "initialized": dist.is_initialized(),
        "count": dist.get_pg_count(),
        "explained": dist.explain(),
    }


def splits() -> None:
    """split_group, and of a part again, on 4 worker."""
    part = dist.split_group(None, [[0, 2], [1, 3]])
    assert part is not None
    assert part.ranks == ((0, 2) if me() % 2 == 0 else (1, 3))
    assert total(part) == sum(part.ranks)
    alone = dist.split_group(part, [[1], [0]])
    assert alone is not None
    assert total(alone) == me()
    some = dist.split_group(None, [[3, 1]])
    assert (some is None) == (me() % 2 == 0)
    if some is not None:  # the position in the list is the rank
        assert some.ranks == (3, 1)
        assert some.rank() == {3: 0, 1: 1}[me()]
        gathered = np.zeros(2)
        dist.all_gather_into_tensor(gathered, np.full(1, float(me())), group=some)
        assert gathered.tolist() == [3, 1]
    for bad in ([], [[0], [0]], [[7]]):
        failure = failure_of(lambda b=bad: dist.split_group(None, b))  # type: ignore[misc]
        assert failure is not None
        assert failure.type == "DistArgumentError"
    assert total() == 6


def very_uneven_sizes(count: int) -> None:
    """all_gather where one rank has nothing or little, and the others have ``count`` elements; well within 20 s."""
    for few in (0, 1, 10):
        for small in range(size()):
            sizes = [few if rank == small else count for rank in range(size())]
            out = [np.full(n, -1.0) for n in sizes]
            dist.all_gather(out, np.arange(sizes[me()]) + 0.5 * me(), timeout=20)
            for rank, found in enumerate(out):
                assert np.array_equal(found, np.arange(sizes[rank]) + 0.5 * rank), (sizes, rank)


def pickled_objects() -> None:
    """Objects that need pickle, by all functions; they have MACs where ranks are, or count as, on several hosts."""
    n, pg = size(), dist.group.WORLD
    assert pg is not None
    for length in (10, 5000, 100_000):

        def obj(rank: int, length: int = length) -> list[Any]:
            return [Fraction(1, 3 + rank), "x" * length]

        gathered: list[Any] = [None] * n
        dist.all_gather_object(gathered, [socket.gethostname(), obj(me())])
        assert [found for _, found in gathered] == [obj(r) for r in range(n)]
        hosts = {host for host, _ in gathered}
        apart = len(hosts) > 1 or os.environ.get("UNICOLL_TRANSPORT") == "tcp"
        protected = dist.get_backend(pg) == "gloo" and os.environ.get("UNICOLL_CHANNEL", "plain") != "plain"
        assert pg.object_seals._wanted == (apart and not protected)
        received: list[Any] | None = [None] * n if me() == 1 else None
        dist.gather_object(obj(me()), received, 1)
        assert received in (None, [obj(r) for r in range(n)])
        scattered: list[Any] = [None]
        dist.scatter_object_list(scattered, [obj(r) for r in range(n)] if me() == 1 else None, 1)
        assert scattered == [obj(me())]
        listed = [obj(1), Fraction(1, 2)] if me() == 1 else [None, None]
        dist.broadcast_object_list(listed, 1)
        assert listed == [obj(1), Fraction(1, 2)]
        if me() > 0:
            dist.send_object_list([obj(me())] * 2, 0)
        for _ in range(1, n if me() == 0 else 1):
            sent: list[Any] = [None, None]
            sender = dist.recv_object_list(sent)
            assert sent == [obj(sender)] * 2


def again(times: int, folder: str) -> None:
    """Leave and join again and again, at the same address or, by file, now the same one and now another."""
    first = worker._init
    for i in range(times):
        dist.destroy_process_group()
        assert not dist.is_initialized()
        if i % 2 and first.startswith("file"):
            worker._init = f"file://{folder}/store-{i}"
        else:
            worker._init = first
        worker.enter()
        for name in COLLECTIVES:
            invoke(name)
        group = dist.new_group()
        assert total(group) == total() == sum(range(size()))
