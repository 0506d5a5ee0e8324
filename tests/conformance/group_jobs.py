"""What ranks do in the tests of groups."""

from __future__ import annotations

import os
import socket
import threading
import warnings
from fractions import Fraction
from typing import Any

import numpy as np

import unicoll as dist
from tests.support import worker
from tests.support.calls import COLLECTIVES, invoke
from tests.support.outcomes import failure_of
from tests.support.worker import Failure


def me() -> int:
    return dist.get_rank()


def size() -> int:
    return dist.get_world_size()


def total(group: Any = None) -> float:
    """The sum of the global ranks of a group's members, by all_reduce."""
    x = np.array([float(me())])
    dist.all_reduce(x, group=group)
    return float(x[0])


def shrunk() -> list[Any]:
    """A group of the world without a rank, by the method, and one of that without another, by the function."""
    found: list[Any] = []
    for excluded in ([], [0, 0], [9], [me()]):
        try:
            dist.shrink_group(excluded)
        except dist.DistArgumentError as error:
            found.append(str(error).partition(": ")[2])
    pg = dist.group.WORLD
    assert pg is not None
    if me() != 1:
        first = pg.shrink([1])
        found.append((first.ranks, first.rank(), total(first)))
        if me() != 3:
            second = dist.shrink_group([2], first)
            found.append((second.ranks, total(second)))
            dist.destroy_process_group(second)
        dist.destroy_process_group(first)
    again = dist.split_group(None, [[*range(size())]])
    assert total(again) == sum(range(size()))
    found.append(total())
    return found


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


def subset_of(members: list[int], sort: bool) -> Any:
    """Facts of a group of some ranks, and that its collectives stay inside; None outside it."""
    group: Any = dist.new_group(members, sort_ranks=sort, group_desc="some")
    order = sorted(members) if sort else members
    if me() not in members:
        outside: Any = dist.GroupMember.NON_GROUP_MEMBER
        assert group is outside
        assert dist.get_rank(group) == -1
        assert dist.get_world_size(group) == -1
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            failure = failure_of(lambda: dist.all_reduce(np.ones(1), group=group))
        assert failure is not None
        assert failure.type == "UserWarning"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert dist.all_reduce(np.ones(1), group=group, async_op=True) is None
        return None
    assert dist.get_process_group_ranks(group) == order
    for i, r in enumerate(order):
        assert dist.get_group_rank(group, r) == i
        assert dist.get_global_rank(group, i) == r
    assert group.rank() == order.index(me())
    assert total(group) == sum(members)
    x = np.array([me()])
    dist.broadcast(x, src=order[-1], group=group)
    assert x[0] == order[-1]
    x[0] = me()
    dist.broadcast(x, group_src=0, group=group)
    assert x[0] == order[0]
    parts = [np.zeros(1, np.int64) for _ in order]
    dist.all_gather(parts, np.array([me()]), group=group)
    assert [int(p[0]) for p in parts] == order
    for name in COLLECTIVES:
        invoke(name, group, root=len(order) - 1)
    dist.destroy_process_group(group)
    gone = failure_of(lambda: dist.all_reduce(np.ones(1), group=group))
    assert gone is not None
    assert gone.type == "GroupAbortedError"
    return "member"


def local_group(members: list[int]) -> Any:
    """Only the members call new_group; twice, for two different groups."""
    if me() not in members:
        failure = failure_of(lambda: dist.new_group(members, use_local_synchronization=True))
        assert failure is not None
        assert failure.type == "DistArgumentError"
        return None
    one = dist.new_group(members, use_local_synchronization=True)
    two = dist.new_group(members, use_local_synchronization=True)
    assert one.name != two.name
    result = total(one), total(two)
    dist.destroy_process_group(one)
    assert total(two) == result[1]
    dist.destroy_process_group(two)
    return result


def subgroups() -> None:
    """new_subgroups, by size and by enumeration, on 4 worker."""
    mine, every = dist.new_subgroups(2)
    assert len(every) == 2
    assert mine is every[me() // 2]
    assert total(mine) == (1 if me() < 2 else 5)
    other, every = dist.new_subgroups_by_enumeration([[0, 3], [2, 1]])
    assert total(other) == 3
    only, every = dist.new_subgroups_by_enumeration([[1, 2]])
    assert (only is None) == (me() in (0, 3))
    if only is not None:
        assert total(only) == 3
    nested, _ = dist.new_subgroups(1, group=mine) if me() < 2 else (None, None)
    if me() >= 2:
        dist.new_group([2])
        dist.new_group([3])
    else:
        assert nested is not None
        assert total(nested) == me()
    for bad in (
        lambda: dist.new_subgroups(3),
        lambda: dist.new_subgroups_by_enumeration([[0, 1], [1, 2]]),
        lambda: dist.new_group([0, 0]),
        lambda: dist.new_group([]),
        lambda: dist.new_group([9]),
    ):
        failure = failure_of(bad)
        assert failure is not None
        assert failure.type == "DistArgumentError"
    assert total() == 6


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
    if some is not None:
        assert total(some) == 4
    for bad in ([], [[0], [0]], [[7]]):
        failure = failure_of(lambda b=bad: dist.split_group(None, b))  # type: ignore[misc]
        assert failure is not None
        assert failure.type == "DistArgumentError"
    assert total() == 6


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


def concurrent_groups(rounds: int) -> list[str]:
    """Overlapping groups, each used by a thread of its own, all at once; what went wrong."""
    n = size()
    lists = [
        list(range(n)),
        list(range(n)),
        *([r, (r + 1) % n] for r in range(n) if n > 2),
        list(range(n - 1)),
    ]
    groups = [(members, dist.new_group(members)) for members in lists]
    wrong: list[str] = []

    def work(k: int, members: list[int], group: Any) -> None:
        try:
            for i in range(rounds):
                count = (k * 37 + i * 1013) % 40_000
                x = np.full(count, k + i + 1.0)
                dist.all_reduce(x, group=group)
                if not (x == (k + i + 1) * len(members)).all():
                    wrong.append(f"group {k}, round {i}")
                y = np.full(3, me())
                dist.broadcast(y, group_src=i % len(members), group=group)
                if y[0] != sorted(members)[i % len(members)]:
                    wrong.append(f"group {k}, round {i}: broadcast {y}")
        except Exception as e:
            wrong.append(f"group {k}: {e!r}")

    threads = [
        threading.Thread(target=work, args=(k, members, group))
        for k, (members, group) in enumerate(groups)
        if me() in members
    ]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    for _, group in groups:
        if isinstance(group, dist.ProcessGroup):
            dist.destroy_process_group(group)
    return wrong


def many_groups(count: int) -> int:
    """Many groups alive at once, used in turn and all in flight together."""
    groups = [dist.new_group() for _ in range(count)]
    for g in groups:
        assert total(g) == sum(range(size()))
    xs = [np.full(5, i) for i in range(count)]
    works = [dist.all_reduce(x, group=g, async_op=True) for x, g in zip(xs, groups, strict=True)]
    for w in reversed(works):
        assert w is not None
        w.wait()
    assert all((x == i * size()).all() for i, x in enumerate(xs))
    alive = dist.get_pg_count()
    for g in groups[::2] + groups[1::2]:
        dist.destroy_process_group(g)
    assert dist.get_pg_count() == alive - count
    return threading.active_count()


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


def twice_refused() -> Failure | None:
    failure = failure_of(worker.enter)
    assert total() == sum(range(size()))
    return failure
