"""Groups that grow by ranks of the job, over NCCL and on the host, and large ones that start by several unique ids."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import unicoll as dist
from nccl_comm.communicators.unique_id import RANKS_PER_ROOT, roots
from tests.nccl.nccl_jobs import connect, error_of, new_group
from tests.simulated_nccl import arrays, ranks
from tests.simulated_nccl.ranks import run
from tests.support.ranks import run_ranks
from unicoll.api import world
from unicoll.net import environment


def grown(lazy: bool) -> dict[str, Any]:
    """A group of ranks 0 and 1 that grows by ranks 3 and 2."""
    me = dist.get_rank()
    device = None if lazy else me
    small: Any = dist.new_group([0, 1], backend="cpu:gloo,cuda:nccl", device_id=device)
    x, y, host = arrays.full(2, me + 1.0), arrays.full(3, me + 1.0), np.full(3, me + 1.0)
    found: dict[str, Any] = {}
    if me < 2:
        work = None if lazy else dist.all_reduce(x, group=small, async_op=True)
        larger: Any = small.grow([3, 2])
        if work is not None:
            found["before"] = work.is_completed()
            work.wait()
        found["growths"] = [c.growths for c in ranks.nccl().communicators if c.size == 2]
        dist.destroy_process_group(small)
    else:
        larger = dist.grow_group([3, 2], small, device_id=device)
    found["ranks"] = dist.get_process_group_ranks(larger)
    dist.all_reduce(y, group=larger)
    dist.all_reduce(host, group=larger)
    found["sums"] = (y.numpy()[0], host[0])
    found["gathered"] = [None] * 4
    dist.all_gather_object(found["gathered"], me, group=larger)
    found["said"] = "expected transports: 3 peers" in larger.describe()
    dist.destroy_process_group(larger)
    return found


@pytest.mark.every(2)
@pytest.mark.parametrize(
    ("version", "lazy", "growths"), [(23007, False, [1]), (22809, False, [0]), (23007, True, [])]
)
def test_a_group_grows_by_nccl_or_by_a_new_communicator(version: int, lazy: bool, growths: list[int]) -> None:
    for me, found in enumerate(run(4, grown, lazy, version=version)):
        assert found["ranks"] == found["gathered"] == [0, 1, 3, 2]
        assert found["sums"] == (10.0, 10.0)
        assert found["said"]
        if me < 2:
            assert found["growths"] == growths
            assert lazy or found["before"]  # the operation in flight has ended


def grown_without_waiting(blocking: bool) -> list[float]:
    """A group of two grows by one, its communicator blocking or not."""
    me = dist.get_rank()
    options = {"blocking": blocking}
    small: Any = dist.new_group([0, 1], backend="cuda:nccl", device_id=me, pg_options=options)
    larger = dist.grow_group([2], small, pg_options=options, device_id=me)
    x = arrays.full(2, me + 1.0)
    dist.all_reduce(x, group=larger)
    values: list[float] = x.numpy().tolist()
    dist.destroy_process_group(larger)
    return values


@pytest.mark.parametrize("blocking", [True, False])
def test_non_blocking_communicators_grow(blocking: bool) -> None:
    assert run(3, grown_without_waiting, blocking) == [[6.0, 6.0]] * 3


def not_grown() -> list[str]:
    """Errors of growing."""
    me = dist.get_rank()
    connect()
    small: Any = dist.new_group([0, 1], backend="nccl", device_id=me)
    if me < 2:
        attempts: list[Callable[[], Any]] = [
            lambda: small.grow([1]),
            lambda: small.grow([]),
            lambda: small.grow([7]),
        ]
        said = [error_of(attempt) for attempt in attempts]
        made: Any = small.grow([2])
        small.abort()
        said.append(error_of(lambda: small.grow([2])))
    else:
        attempts = [
            lambda: dist.grow_group([0], small),
            lambda: dist.grow_group([2, 0], small),
            lambda: dist.grow_group([2], small, timeout=0.2),
        ]
        said = [error_of(attempt) for attempt in attempts]
        # the next call reads the same record again
        world.current("test").store.add("grow/2/received", -1)
        made = dist.grow_group([2], small)
    dist.destroy_process_group(made)
    return said


def test_invalid_growth_is_refused() -> None:
    member = (
        "ranks [1] are in group 'group-1' already",
        "ranks is empty",
        "7 is not a rank of a world of 3",
        "GroupAbortedError",
    )
    added = (
        "this rank, 2, is not in ranks_to_add=[0]",
        "this rank adds ranks [2, 0], but the group of ranks [0, 1] adds [2]",
        "timed out on rank 2 after 0.2 s: no group was grown by ranks [2]",
    )
    for found, expected in zip(run(3, not_grown), (member, member, added), strict=True):
        for said, words in zip(found, expected, strict=True):
            assert words in said


def on_the_host() -> list[float]:
    """Two ranks become three, over sockets and shared memory."""
    small: Any = dist.new_group([0, 2])
    larger = dist.grow_group([1], small)
    x = np.full(3, dist.get_rank() + 1.0)
    dist.all_reduce(x, group=larger)
    return [*map(float, x[:1]), dist.get_rank(larger)]


def test_a_group_of_host_arrays_grows() -> None:
    assert run_ranks(3, on_the_host) == [[6.0, 0], [6.0, 2], [6.0, 1]]


# --- unique ids -------------------------------------------------------------------------------------------------------


def _has_root(rank: int, size: int, count: int) -> bool:
    """The rule of NCCL's user guide."""
    more, each = size % count, size // count
    limit = more * (each + 1)
    return not rank % (each + 1) if rank < limit else not (rank - limit) % each


def test_the_ranks_that_make_ids_are_nccls_roots() -> None:
    assert roots(7, 3) == [0, 3, 5]
    for size in range(1, 40):
        for count in range(1, size + 1):
            assert roots(size, count) == [r for r in range(size) if _has_root(r, size, count)]


def connected_by_several_ids() -> tuple[int, list[float]]:
    """The number of unique ids of a new group's communicator, and the result of an all_reduce."""
    group = new_group()
    x = arrays.full(2, dist.get_rank() + 1.0)
    dist.all_reduce(x, group=group)
    (comm,) = ranks.nccl().communicators
    values = x.numpy().tolist()
    dist.destroy_process_group(group)
    return comm.key.count(".") + 1, values


@pytest.mark.parametrize(("version", "per_root", "ids"), [(23007, None, 1), (23007, "2", 3), (22203, "2", 1)])
def test_more_than_128_ranks_use_several_ids_if_nccl_has_them(
    version: int, per_root: str | None, ids: int
) -> None:
    assert environment.number(RANKS_PER_ROOT, {}) == 128
    env = {RANKS_PER_ROOT: per_root} if per_root else None
    assert run(5, connected_by_several_ids, version=version, env=env) == [(ids, [15.0, 15.0])] * 5


def a_root_fails(failing: int) -> str:
    """The error on all ranks when a rank cannot make its unique id."""
    if dist.get_rank() == failing:
        ranks.nccl().unique_id = lambda: (2, b"")  # type: ignore[method-assign]
    return error_of(new_group)


def test_all_ranks_learn_which_rank_could_not_make_an_id() -> None:
    for said in run(3, a_root_fails, 2, env={RANKS_PER_ROOT: "2"}):
        assert said.startswith("DistBackendError: rank 2 ")
        assert "could not start NCCL: ncclGetUniqueId" in said
        assert "ncclSystemError" in said
