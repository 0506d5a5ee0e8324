"""Groups that grow by ranks of the job, over NCCL and on the host, and large ones that start by several unique ids."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest

import unicoll as dist
from tests.nccl.nccl_jobs import connect, error_of, new_group
from tests.simulated_nccl import arrays, ranks
from tests.simulated_nccl.ranks import run
from tests.support.on_ranks import on_ranks
from unicoll.api import world
from unicoll.device_collectives.communicators.unique_id import roots
from unicoll.process import environment

RANKS_PER_ROOT = "UNICOLL_NCCL_RANKS_PER_ROOT"


@pytest.mark.every(n=2)
@pytest.mark.parametrize(
    ("version", "lazy", "growths"), [(23007, False, [1]), (22809, False, [0]), (23007, True, [])]
)
@on_ranks(4, start=run, options=["version"])
def test_a_group_grows_by_nccl_or_by_a_new_communicator(version: int, lazy: bool, growths: list[int]) -> None:
    """A group of ranks 0 and 1 by ranks 3 and 2."""
    me = dist.get_rank()
    device = None if lazy else me
    small: Any = dist.new_group([0, 1], backend="cpu:gloo,cuda:nccl", device_id=device)
    x, y, host = arrays.full(2, me + 1.0), arrays.full(3, me + 1.0), np.full(3, me + 1.0)
    if me < 2:
        work = None if lazy else dist.all_reduce(x, group=small, async_op=True)
        larger: Any = small.grow([3, 2])
        if work is not None:
            assert work.is_completed()  # the operation in flight has ended
            work.wait()
        assert [c.growths for c in ranks.nccl().communicators if c.size == 2] == growths
        dist.destroy_process_group(small)
    else:
        larger = dist.grow_group([3, 2], small, device_id=device)
    assert dist.get_process_group_ranks(larger) == [0, 1, 3, 2]
    dist.all_reduce(y, group=larger)
    dist.all_reduce(host, group=larger)
    assert (y.numpy()[0], host[0]) == (10.0, 10.0)
    gathered: list[Any] = [None] * 4
    dist.all_gather_object(gathered, me, group=larger)
    assert gathered == [0, 1, 3, 2]
    assert "expected transports: 3 peers" in larger.describe()
    dist.destroy_process_group(larger)


@pytest.mark.parametrize("blocking", [True, False])
@on_ranks(3, start=run)
def test_non_blocking_communicators_grow(blocking: bool) -> None:
    me = dist.get_rank()
    options = {"blocking": blocking}
    small: Any = dist.new_group([0, 1], backend="cuda:nccl", device_id=me, pg_options=options)
    larger = dist.grow_group([2], small, pg_options=options, device_id=me)
    x = arrays.full(2, me + 1.0)
    dist.all_reduce(x, group=larger)
    assert x.numpy().tolist() == [6.0, 6.0]
    dist.destroy_process_group(larger)


@on_ranks(3, start=run)
def test_invalid_growth_is_refused() -> None:
    me = dist.get_rank()
    connect()
    small: Any = dist.new_group([0, 1], backend="nccl", device_id=me)
    if me < 2:
        for added, words in (
            ([1], "ranks [1] are in group 'group-1' already"),
            ([], "ranks is empty"),
            ([7], "7 is not a rank of a world of 3"),
        ):
            assert words in (said := error_of(partial(small.grow, added))), said
        made: Any = small.grow([2])
        small.abort()
        assert "GroupAbortedError" in error_of(lambda: small.grow([2]))
    else:
        for call, words in (
            (lambda: dist.grow_group([0], small), "this rank, 2, is not in ranks_to_add=[0]"),
            (
                lambda: dist.grow_group([2, 0], small),
                "this rank adds ranks [2, 0], but the group of ranks [0, 1] adds [2]",
            ),
            (
                lambda: dist.grow_group([2], small, timeout=0.2),
                "timed out on rank 2 after 0.2 s: no group was grown by ranks [2]",
            ),
        ):
            assert words in (said := error_of(call)), said
        # the next call reads the same record again
        world.current("test").store.add("grow/2/received", -1)
        made = dist.grow_group([2], small)
    dist.destroy_process_group(made)


@on_ranks(3, env={})
def test_a_group_of_host_arrays_grows() -> None:
    """Two ranks become three, over sockets and shared memory."""
    small: Any = dist.new_group([0, 2])
    larger = dist.grow_group([1], small)
    x = np.full(3, dist.get_rank() + 1.0)
    dist.all_reduce(x, group=larger)
    assert x[0] == 6.0
    assert dist.get_rank(larger) == [0, 2, 1][dist.get_rank()]


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


@pytest.mark.parametrize(
    ("version", "env", "ids"),
    [(23007, {}, 1), (23007, {RANKS_PER_ROOT: "2"}, 3), (22203, {RANKS_PER_ROOT: "2"}, 1)],
)
@on_ranks(5, start=run, options=["version"])
def test_more_than_128_ranks_use_several_ids_if_nccl_has_them(
    version: int, env: dict[str, str], ids: int
) -> None:
    assert environment.number(RANKS_PER_ROOT, {}) == 128
    group = new_group()
    x = arrays.full(2, dist.get_rank() + 1.0)
    dist.all_reduce(x, group=group)
    (comm,) = ranks.nccl().communicators
    assert comm.key.count(".") + 1 == ids
    assert x.numpy().tolist() == [15.0, 15.0]
    dist.destroy_process_group(group)


@on_ranks(3, start=run, env={RANKS_PER_ROOT: "2"})
def test_all_ranks_learn_which_rank_could_not_make_an_id() -> None:
    if dist.get_rank() == 2:
        ranks.nccl().unique_id = lambda: (2, b"")  # type: ignore[method-assign]
    said = error_of(new_group)
    assert said.startswith("DistBackendError: rank 2 ")
    assert "could not start NCCL: ncclGetUniqueId" in said
    assert "ncclSystemError" in said
