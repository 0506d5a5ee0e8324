"""Device arrays over the CPU backend, through the host's memory: order, messages, and what goes wrong."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest

import unicoll as dist
from tests.nccl import staged
from tests.nccl import staged_jobs as jobs
from tests.nccl.nccl_jobs import error_of
from tests.simulated_nccl import arrays
from tests.simulated_nccl.ranks import Settings, simulation
from tests.support.memory import freed
from tests.support.on_ranks import on_ranks
from tests.support.ranks import Pool, ProcessJob, pools


@pytest.fixture(scope="module", params=["gloo", "cpu:gloo,cuda:gloo"])
def pool(request: pytest.FixtureRequest, seed: int) -> Iterator[Callable[[int], Pool]]:
    settings = Settings(policy="random", seed=seed, backend=request.param)
    with pools(partial(ProcessJob, prepare=(staged.prepare, settings))) as made:
        yield made


@pytest.mark.every(n=4)
@pytest.mark.parametrize(
    ("size", "job", "expected"),
    [
        (2, partial(jobs.mixed_kinds, 10), True),
        (3, partial(jobs.mixed_kinds, 10), True),
        (1, partial(jobs.ordered, 5), True),
        (2, partial(jobs.ordered, 5), True),
        (2, jobs.messages, [True] * 12),
        (3, jobs.messages, [True] * 12),
    ],
)
def test_order_and_messages(size: int, job: Any, expected: Any, pool: Callable[[int], Pool]) -> None:
    """Arrays of device and host keep one order, and streams are ordered on both sides of a call."""
    function, arguments = getattr(job, "func", job), getattr(job, "args", ())
    assert pool(size).run(function, *arguments) == [expected] * size


def test_messages_that_are_shorter_than_the_array(pool: Callable[[int], Pool]) -> None:
    for found in pool(2).run(jobs.shorter_messages):
        assert [count for count, _ in found] == [2] * 4 + [59_999] * 4


@on_ranks(2)
def test_messages_are_not_kept_alive() -> None:
    me, n = dist.get_rank(), dist.get_world_size()
    x, y = arrays.full(100, me, np.float32), arrays.empty(100, np.float32)
    references = [weakref.ref(x), weakref.ref(y)]
    works = [dist.isend(x, (me + 1) % n), dist.irecv(y, (me - 1) % n)]
    for work in works:
        work.synchronize()
    del x, y, work, works
    assert freed(*references) == [True, True]


def test_it_says_how_device_arrays_go(pool: Callable[[int], Pool]) -> None:
    for facts in pool(2).run(jobs.facts):
        assert facts["sum"] == [2.0] * 3
        assert "through page-locked memory" in facts["after"]
        assert 0 < facts["staging"] <= 64 << 20


@pytest.mark.every(n=2)
@on_ranks(2)
def test_a_device_that_is_late_is_named() -> None:
    """Rank 0's device does not come to what is before the call."""
    group = dist.new_group()
    x = arrays.full(10, 1.0, np.float32)
    go, held = threading.Event(), threading.Event()

    def hold() -> None:
        with simulation().hold():
            held.set()
            go.wait(60)

    holder = threading.Thread(target=hold)
    if dist.get_rank() == 0:
        x.numpy()
        holder.start()
        held.wait(60)
        x += 1
    said = error_of(lambda: dist.all_reduce(x, group=group, timeout=1.0))
    go.set()
    if dist.get_rank() == 0:
        holder.join()
        assert said.startswith("OperationTimeoutError")
        assert "the device of this rank has not finished the work before it" in said
    else:
        assert said.startswith(("OperationTimeoutError", "GroupAbortedError")), said
    simulation().synchronize()
    dist.destroy_process_group(group)


# --- exchanges of sizes that differ -----------------------------------------------------------------------------------


def _elements(give: int, take: int, much: int) -> int:
    """How many elements one rank has for another: none for some, many for others."""
    return (0, 1, much, 3, much // 7)[(3 * give + 2 * take + 2) % 5]


@pytest.mark.every(n=6)
@pytest.mark.parametrize(("size", "much"), [(2, 30_000), (3, 30_000), (2, 3)])
@on_ranks()
def test_an_exchange_of_any_sizes_goes_in_pieces(size: int, much: int) -> None:
    """Sizes differ between any two ranks; the largest has ``much`` elements."""
    group: Any = dist.new_group()
    me, n = dist.get_rank(), size
    sent = [[_elements(i, j, much) for j in range(n)] for i in range(n)]
    values = [[np.arange(sent[i][j], dtype=np.float32) + 1000 * i + j for j in range(n)] for i in range(n)]
    give, take = sent[me], [sent[i][me] for i in range(n)]
    for async_op in (False, True):
        outs = [arrays.full(count, -1, np.float32) for count in take]
        whole, out = (
            np.repeat(np.concatenate(values[me]), 2).reshape(-1, 2),
            arrays.full((sum(take), 2), -1, np.float32),
        )
        options = {"group": group, "async_op": async_op}
        for work in (
            dist.all_to_all(outs, [arrays.array(v) for v in values[me]], **options),
            dist.all_to_all_single(out, arrays.array(whole), take, give, **options),
        ):
            if work is not None:
                work.wait()
        assert all((out.numpy() == values[i][me]).all() for i, out in enumerate(outs))
        right = np.concatenate([values[i][me] for i in range(n)])
        assert (out.numpy() == right[:, None]).all()
    nothing = [arrays.empty(0, np.float32) for _ in range(2 * n)]
    dist.all_to_all(nothing[:n], nothing[n:], group=group)
    held = group.staging_bytes()
    dist.destroy_process_group(group)
    if much > staged.CHUNK:
        assert 4 * sum(map(sum, sent)) > 50 * staged.CHUNK
        assert held["cuda"] - held["cpu"] < 25 * staged.CHUNK


# --- calls that differ ------------------------------------------------------------------------------------------------


def misfit(way: str, count: int) -> str:
    """The error of calls that differ: of the sizes of many pieces, of an exchange's, of the calls themselves."""
    members = [0, 2] if way == "some sizes" else None
    group: Any = dist.new_group(members)
    if members and dist.get_rank() not in members:
        return ""
    n, me = dist.get_world_size(group), dist.get_rank(group)
    given = [arrays.full(count + (me == 0 and j == 1 and way.endswith("sizes")), 1.0) for j in range(n)]
    taken = [arrays.full(count, 0.0) for _ in range(n)]
    x, one = arrays.full(count + me, 1.0, np.float32), arrays.full(1, 1, np.int64)

    def call() -> Any:
        if way == "counts":
            return dist.all_reduce(x, group=group, timeout=20)
        if way == "calls" and me:  # what the others could agree with
            return dist.all_reduce(one, dist.ReduceOp.MAX, group=group, timeout=20)
        return dist.all_to_all(taken, given, group=group, timeout=20)

    said = error_of(call)
    dist.destroy_process_group(group)
    return said


@pytest.mark.parametrize(
    ("way", "size", "count", "words"),
    [
        ("counts", 2, 50_000, ["float32[50000]", "float32[50001]"]),
        ("sizes", 3, 3, ["all_to_all", "rank 0", "rank 1", "4 ", "room for 3"]),
        ("sizes", 3, 20_000, ["all_to_all", "rank 0", "rank 1", "20001 ", "room for 20000"]),
        ("some sizes", 3, 3, ["all_to_all", "rank 0", "rank 2", "4 ", "room for 3"]),
        ("some sizes", 3, 20_000, ["all_to_all", "rank 0", "rank 2", "20001 ", "room for 20000"]),
        (
            *("calls", 2, 10),
            [
                "rank 0: all_to_all(float64[10] on cuda:0) #1",
                "rank 1: all_reduce(int64[1] on cuda:1, MAX) #1",
            ],
        ),
    ],
)
def test_calls_that_differ_raise_the_same_error(
    way: str, size: int, count: int, words: list[str], pool: Callable[[int], Pool]
) -> None:
    (text,) = set(pool(size).run(misfit, way, count)) - {""}
    assert text.startswith("CollectiveMismatchError")
    for word in words:
        assert word in text


@on_ranks(2)
def test_a_graph_cannot_record_it() -> None:
    with arrays.Stream() as stream:
        x = arrays.full(10, 1.0, np.float32)
        stream.synchronize()
        simulation().begin_capture(stream.ptr)
        try:
            said = error_of(lambda: dist.all_reduce(x))
        finally:
            simulation().end_capture(stream.ptr)
    assert said.startswith("DistArgumentError")
    assert "a graph cannot record" in said
