"""Large arrays that ranks read from each other's processes: the same results as through the slots, and failures."""

from __future__ import annotations

import random
import signal
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from gloo_fallback.shm import peer_memory
from tests.gloo import peer_memory_jobs as jobs
from tests.gloo.symmetric_jobs import equal_results, loop
from tests.gloo.test_symmetric import DIRECT, KINDS
from tests.gloo.victims import check_victim_is_named
from tests.support.ranks import Pool, ProcessJob, run_ranks

Pools = Callable[[int], Pool]

READING = ["broadcast", "all_reduce", "all_gather_into_tensor", "all_gather", "gather", "scatter"]
READING += ["reduce_scatter_tensor", "reduce_scatter", "all_to_all", "all_to_all_single"]
SLOTS = ["reduce", "scan", "exscan"]


@pytest.mark.every(4)
@pytest.mark.sampled("name", "kind", 1)
@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("name", READING)
@pytest.mark.parametrize("size", [2, 3, 5])
def test_results_are_the_same_bytes_without_the_slots(
    size: int, name: str, kind: tuple[str, str], pool: Pools, seed: int
) -> None:
    dtype, reduction = kind
    rng = random.Random(f"{seed} {size} {name} {kind}")
    count = rng.randint(600_000, 700_000) * (2 if dtype == "uint8" else 1)
    even, root = rng.random() < 0.5, rng.randrange(size)
    taken = pool(size).run(equal_results, name, count, dtype, reduction, root, even, None, True)
    assert taken == [[DIRECT[name]]] * size


@pytest.mark.parametrize("name", SLOTS)
def test_the_other_operations_take_the_slots(name: str, pool: Pools) -> None:
    assert pool(3).run(equal_results, name, 600_011, "float32", "SUM", 0, True, None, True) == [[]] * 3


@pytest.mark.every(2)
@pytest.mark.parametrize("name", READING)
def test_all_ranks_use_the_slots_if_one_rank_has_arrays_that_others_cannot_read(
    name: str, pool: Pools
) -> None:
    for odd in range(3):
        taken = pool(3).run(equal_results, name, 600_011, "float32", "SUM", 0, True, odd, True)
        # only the root's list counts in a scatter
        assert taken == [["scatter"] if name == "scatter" and odd else []] * 3


def test_weak_memory_order() -> None:
    env = {"UNICOLL_MEMORY_ORDER": "weak"}
    taken = run_ranks(3, equal_results, "all_reduce", 600_000, "float32", "SUM", 1, True, None, True, env=env)
    assert taken == [["all_reduce"]] * 3


@pytest.mark.parametrize("size", [2, 3])
def test_an_output_that_is_not_the_input(size: int, pool: Pools) -> None:
    count = 100_003
    bounds = [count * i // size for i in range(size + 1)]
    read = pool(size).run(jobs.out_of_place, count)
    own = [high - low for low, high in pairwise(bounds)]
    # of each other rank this rank's part of the input, and that rank's part of the result
    assert read == [8 * ((size - 1) * part + count - part) for part in own]


def test_arrays_below_the_threshold_take_the_slots(pool: Pools) -> None:
    nbytes = 6 << 20
    assert pool(3).run(jobs.bytes_read, nbytes, nbytes + 1) == [0] * 3
    assert pool(3).run(jobs.bytes_read, nbytes, nbytes) == [nbytes * 2 // 3] * 3


def test_the_setting() -> None:
    large = 64 << 20
    assert run_ranks(2, jobs.bytes_read, large, env={"UNICOLL_PEER_MEMORY": "always"}) == [large // 2] * 2
    assert run_ranks(2, jobs.bytes_read, large, env={"UNICOLL_PEER_MEMORY": "off"}) == [0] * 2


@pytest.mark.parametrize("fast", [(True, True), (True, False), (False, False)])
def test_all_ranks_use_the_slots_where_one_reads_slowly(fast: tuple[bool, bool], tmp_path: Path) -> None:
    """Except in a scatter, in which the root alone would copy."""
    with ProcessJob(2) as job:
        for rank in range(2):
            job.call(jobs.reads_of, fast[rank], rank, 2, str(tmp_path), ranks=[rank])
        for rank, (gathered, scattered) in enumerate(job.results()):
            assert gathered == ((16 << 20) if all(fast) else 0)
            assert (scattered > 15 << 20) == (rank == 1)


def test_a_process_measures_once() -> None:
    """The result is a property of the processor and the system; here it may be either."""
    assert all(run_ranks(2, jobs.measurements))


def test_a_read_that_fails_while_it_is_timed_is_not_raised() -> None:
    """A rank that has ended is named by the step that follows."""
    assert run_ranks(2, jobs.unreadable_sample, 1) == [(False, True), (False, None)]


@pytest.mark.parametrize("odd", [0, 1])
def test_a_system_that_forbids_it(odd: int, tmp_path: Path) -> None:
    with ProcessJob(2) as job:
        for rank in range(2):
            job.call(jobs.refused_by_the_system, rank, 2, str(tmp_path), odd, ranks=[rank])
        for read, text in job.results():
            assert read == 0
            assert "all ranks are on one host, and cannot read each other's memory" in text


def test_files_and_shared_mappings(pool: Pools) -> None:
    nbytes = (2 << 20) - 4
    for read in pool(2).run(jobs.unusual_memory):
        assert read == [nbytes] * 3


def test_memory_that_is_not_mapped_is_not_readable() -> None:
    array = np.zeros(8, np.uint8)
    assert peer_memory.is_readable(array)
    assert peer_memory.is_readable(array[:0])
    assert not peer_memory.is_readable(np.lib.stride_tricks.as_strided(array, (1 << 46,), (1,)))


# --- failures -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["operation", "size", "small"])
def test_another_call_on_one_rank_is_named(how: str, pool: Pools) -> None:
    texts = pool(3).run(jobs.mismatch, how)
    assert len(set(texts)) == 1
    other = {"operation": "broadcast(float32[200000]", "size": "float32[199999]", "small": "float32[8]"}
    assert "all_reduce(float32[200000]" in texts[0]
    assert other[how] in texts[0]
    assert "_jobs.py" in texts[0]


def test_a_rank_whose_array_is_gone_is_named(pool: Pools) -> None:
    texts = pool(3).run(jobs.array_is_gone, 1)
    assert len(set(texts)) == 1
    assert texts[0].startswith("RankLostError: all_reduce(float32[1048576], SUM)")
    assert "has an array that cannot be read: [Errno 14] Bad address" in texts[0]


@pytest.mark.every(2)
@pytest.mark.parametrize("name", ["all_reduce", "all_gather_into_tensor", "all_to_all_single"])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_a_rank_killed_or_stopped_in_the_middle_is_named(name: str, number: signal.Signals) -> None:
    check_victim_is_named(number, loop, name, 60.0 if number == signal.SIGKILL else 1.5, True)
