"""Arrays in symmetric memory on the CPU: same results as others, without the slots; allocation, lifetime, failures."""

from __future__ import annotations

import random
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from gloo_fallback.transport.selection import OPERATIONS as ALGORITHMS
from tests.gloo import symmetric_jobs as jobs
from tests.gloo.victims import check_victim_is_named
from tests.support.ranks import Pool, ProcessJob, run_ranks
from tests.support.worker import enter
from unicoll.backend.ops import OPS

Pools = Callable[[int], Pool]

DIRECT = {name: ALGORITHMS[name] for name in jobs.OPERATIONS} | {"gather": "all_gather"}
BETWEEN_HOSTS = ("broadcast", "all_reduce", "reduce", "all_gather_into_tensor")
KINDS = [
    ("float32", "SUM"),
    ("float64", "AVG"),
    ("int32", "MAX"),
    ("uint8", "BXOR"),
    ("float16", "SUM"),
    ("bfloat16", "AVG"),
    ("complex64", "PRODUCT"),
    ("int64", "AVG"),
]


@pytest.mark.every(9)
@pytest.mark.sampled("name", "kind", 2)
@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("name", jobs.OPERATIONS)
@pytest.mark.parametrize("size", [2, 3, 5])
def test_results_are_the_same_bytes_without_the_slots(
    size: int, name: str, kind: tuple[str, str], pool: Pools, seed: int
) -> None:
    dtype, reduction = kind
    if reduction in OPS[name].refuses:
        reduction = "SUM"
    rng = random.Random(f"{seed} {size} {name} {kind}")
    count = rng.randint(600_000, 700_000)  # in some operations the first MiB goes through the slots
    if dtype == "uint8":
        count *= 2
    even = rng.random() < 0.5
    root = rng.randrange(size)
    taken = pool(size).run(jobs.equal_results, name, count, dtype, reduction, root, even, None)
    assert taken == [[DIRECT[name]]] * size


@pytest.mark.every(2)
@pytest.mark.parametrize("name", jobs.OPERATIONS)
def test_all_ranks_use_the_slots_if_one_rank_has_ordinary_arrays(name: str, pool: Pools) -> None:
    for odd in range(3):
        taken = pool(3).run(jobs.equal_results, name, 600_011, "float32", "SUM", 0, True, odd)
        # only the root's list counts in a scatter
        assert taken == [["scatter"] if name == "scatter" and odd else []] * 3


@pytest.mark.parametrize("count", [1, 5, 4000])
@pytest.mark.parametrize("name", jobs.OPERATIONS)
def test_small_arrays_take_the_slots(name: str, count: int, pool: Pools) -> None:
    assert pool(3).run(jobs.equal_results, name, count, "int32", "SUM", 1, False, None) == [[]] * 3


@pytest.mark.every(2)
@pytest.mark.parametrize("name", ["all_reduce", "all_to_all_single", "scan", "gather"])
def test_processors_with_a_weak_memory_order(name: str) -> None:
    env = {"UNICOLL_MEMORY_ORDER": "weak"}
    taken = run_ranks(3, jobs.equal_results, name, 600_000, "float32", "SUM", 1, True, None, env=env)
    assert taken == [[DIRECT[name]]] * 3


def test_arrays_of_several_allocations(pool: Pools) -> None:
    assert pool(3).run(jobs.regions_differ, False) == [[["scatter"], ["all_reduce"]] * 2] * 3
    # a rank that has dropped its array cannot read those of the other ranks in the same memory
    assert pool(3).run(jobs.regions_differ, True) == [[[], ["all_reduce"]] * 2] * 3


@pytest.mark.parametrize("size", [2, 4])
def test_a_part_of_the_output_as_input(size: int, pool: Pools) -> None:
    assert pool(size).run(jobs.in_place_gather_and_scatter) == [["all_gather", "reduce_scatter"]] * size


def test_tensors_of_torch() -> None:
    pytest.importorskip("torch")
    with ProcessJob(2, modules=("torch",)) as job:
        job.call(enter)
        job.results()
        job.call(jobs.torch_tensors)
        assert job.results() == [["all_reduce"] * 2] * 2
        job.call(jobs.gradient_buckets, True)
        assert job.results() == [["all_reduce"] * 4] * 2


def test_calls_in_the_background(pool: Pools) -> None:
    assert pool(3).run(jobs.in_the_background) == [["all_reduce"] * 15] * 3


# --- allocation and lifetime ----------------------------------------------------------------------------------------


def test_ranks_that_ask_for_different_sizes_are_named(pool: Pools) -> None:
    for text, usable in pool(3).run(jobs.sizes_differ):
        assert "rank 0: symmetric_empty(float32[10])" in text
        assert "rank 2: symmetric_empty(float32[12])" in text
        assert usable == "(3, 5) int16 0"


def test_too_much_memory_raises_on_all_ranks(pool: Pools) -> None:
    for text in pool(2).run(jobs.too_much):
        assert text.startswith(
            "DistBackendError: symmetric_empty(uint8[4611686018427387904]): rank 0 cannot map"
        )


def test_memory_lasts_as_long_as_its_views(pool: Pools) -> None:
    for one, with_view, left in pool(2).run(jobs.memory_is_released):
        assert one == 2 * (1 << 20) + 4096
        assert with_view == one
        assert left == 0


def test_views_of_the_other_ranks_arrays(pool: Pools) -> None:
    for seen, refusals in pool(3).run(jobs.peers):
        assert seen == [102, 100, 101]
        assert "is not in symmetric memory" in refusals[0]
        assert "is not in symmetric memory" in refusals[1]
        assert "group rank 3" in refusals[2]
        assert "group rank -1" in refusals[3]


def test_arrays_survive_their_group(tmp_path: Path) -> None:
    with ProcessJob(2) as job:
        for rank in range(2):
            job.call(jobs.survives_the_group, rank, 2, str(tmp_path), ranks=[rank])
        assert job.results() == [[0, 8], [8, 8]]


def test_callbacks_may_call_collectives_during_an_allocation(pool: Pools) -> None:
    assert pool(3).run(jobs.allocation_beside_callbacks) == [20] * 3


def test_a_group_of_one_rank() -> None:
    assert run_ranks(1, jobs.alone) == ["[[0, 0, 0], [7, 7, 7]]"]


@pytest.mark.parametrize("transport", ["tcp", "hierarchical"])
def test_other_transports(transport: str) -> None:
    views = run_ranks(3, jobs.other_transports, env={"UNICOLL_TRANSPORT": transport})
    if transport == "hierarchical":  # two ranks count as one host
        assert views.pop(0) == ["view"]
    for kind, text in views:
        assert kind == "BackendUnavailableError"
        assert "shares no memory with rank" in text


@pytest.mark.every(2)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_ranks_of_each_host_read_arrays_in_place(dtype: str) -> None:
    with ProcessJob(5, env={"UNICOLL_TRANSPORT": "hierarchical"}) as job:
        job.call(enter)
        job.results()
        for name in jobs.OPERATIONS:
            for count in (5, 600_001):
                job.call(jobs.equal_results_between_hosts, name, count, dtype, "SUM", 3)
                found = job.results()
                in_place = name in BETWEEN_HOSTS and count > 5
                assert found == ([1, 1, 1, 1, 0] if in_place else [0] * 5), name  # the last rank is alone


# --- failures -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["operation", "size", "allocation"])
def test_another_call_on_one_rank_is_named(how: str) -> None:
    texts = run_ranks(3, jobs.mismatch, how)
    assert len(set(texts)) == 1
    other = {
        "operation": "broadcast(float32[200000]",
        "size": "float32[199999]",
        "allocation": "symmetric_empty",
    }
    assert "all_reduce(float32[200000]" in texts[0]
    assert other[how] in texts[0]
    assert "symmetric_jobs.py" in texts[0]


@pytest.mark.every(4)
@pytest.mark.parametrize("name", ["all_reduce", "all_gather_into_tensor", "all_to_all_single"])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_a_rank_killed_or_stopped_in_the_middle_is_named(name: str, number: signal.Signals) -> None:
    check_victim_is_named(number, jobs.loop, name, 60.0 if number == signal.SIGKILL else 1.5)
