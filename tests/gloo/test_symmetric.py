"""Arrays in symmetric memory on the CPU: same results as others, without the slots; allocation, lifetime, failures.

Large arrays that ranks read from each other's processes (:mod:`test_peer_memory`) give the same results.
"""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import unicoll as dist
from gloo_fallback.algorithms import peer_memory
from gloo_fallback.transport.selection import OPERATIONS as ALGORITHMS
from tests.gloo.symmetric_jobs import OPERATIONS, TAKEN, equal_results, watch
from tests.support.memory import mapped_bytes, memory_files
from tests.support.on_ranks import on_ranks
from tests.support.ranks import Pool, joined, run_ranks
from unicoll.calls.ops import OPS

Pools = Callable[[int], Pool]

DIRECT = {name: ALGORITHMS[name] for name in OPERATIONS} | {"gather": "all_gather"}
READING = [name for name in OPERATIONS if name not in ("reduce", "scan", "exscan")]
"""Operations in which ranks read the memory of other processes."""
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


def world() -> Any:
    return dist.group.WORLD


@pytest.mark.every(n=30)
@pytest.mark.sampled("name", "kind", 2)
@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize("size", [2, 3, 5])
@pytest.mark.parametrize("reads", [False, True])
def test_results_are_the_same_bytes_without_the_slots(
    reads: bool, size: int, name: str, kind: tuple[str, str], pool: Pools, seed: int
) -> None:
    dtype, reduction = kind
    if reduction in OPS[name].refuses:
        reduction = "SUM"
    rng = random.Random(f"{seed} {reads} {size} {name} {kind}")
    # in some operations the first MiB goes through the slots
    count = rng.randint(600_000, 700_000) * (2 if dtype == "uint8" else 1)
    even, root = rng.random() < 0.5, rng.randrange(size)
    taken = pool(size).run(equal_results, name, count, dtype, reduction, root, even, None, reads)
    assert taken == [[DIRECT[name]] if name in READING or not reads else []] * size


@pytest.mark.every(n=6)
@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize("reads", [False, True])
def test_all_ranks_use_the_slots_if_one_rank_has_other_arrays(reads: bool, name: str, pool: Pools) -> None:
    """That are not in symmetric memory, or that others cannot read."""
    for odd in range(3):
        taken = pool(3).run(equal_results, name, 600_011, "float32", "SUM", 0, True, odd, reads)
        # only the root's list counts in a scatter
        assert taken == [["scatter"] if name == "scatter" and odd else []] * 3


@pytest.mark.parametrize("count", [1, 5, 4000])
@pytest.mark.parametrize("name", OPERATIONS)
def test_small_arrays_take_the_slots(name: str, count: int, pool: Pools) -> None:
    assert pool(3).run(equal_results, name, count, "int32", "SUM", 1, False, None) == [[]] * 3


@pytest.mark.every(n=2)
@pytest.mark.parametrize(
    ("name", "reads"),
    [
        ("all_reduce", False),
        ("all_reduce", True),
        ("all_to_all_single", False),
        ("scan", False),
        ("gather", False),
    ],
)
def test_processors_with_a_weak_memory_order(name: str, reads: bool) -> None:
    env = {"UNICOLL_MEMORY_ORDER": "weak"}
    taken = run_ranks(3, equal_results, name, 600_000, "float32", "SUM", 1, True, None, reads, env=env)
    assert taken == [[DIRECT[name]]] * 3


@pytest.mark.parametrize("drop", [False, True])
@on_ranks(3)
def test_arrays_of_several_allocations(drop: bool) -> None:
    """A rank that has dropped its array cannot read those of the other ranks in the same memory."""
    watch()
    rank, count = dist.get_rank(), 1 << 20
    for scattered_here in (True, False):
        big = world().symmetric_empty(3 * count, "int32")
        small = world().symmetric_empty(count, "int32")
        if drop and rank == 2:
            big = None
            gc.collect()
        if rank == 0:
            big[:] = np.arange(3 * count) % 1000
        TAKEN.clear()
        dist.scatter(small, [*big.reshape(3, count)] if rank == 0 else None, src=0)
        assert (small == np.arange(rank * count, (rank + 1) * count) % 1000).all()
        assert ([] if drop else ["scatter"]) == TAKEN
        first, second = world().symmetric_empty(count, "int32"), world().symmetric_empty(count, "int32")
        mine = first if (rank == 0) == scattered_here else second
        mine[:] = rank + 1
        TAKEN.clear()
        dist.all_reduce(mine)
        assert (mine == 6).all()
        assert TAKEN == ["all_reduce"]


@pytest.mark.parametrize("size", [2, 4])
@on_ranks()
def test_a_part_of_the_output_as_input(size: int) -> None:
    """And a part of the input as output."""
    watch()
    rank, count = dist.get_rank(), 70_000
    whole = world().symmetric_empty(size * count, "float64")
    part = whole[rank * count : (rank + 1) * count]
    part[:] = rank + 1
    TAKEN.clear()
    dist.all_gather_into_tensor(whole, part)
    assert (whole == np.repeat(np.arange(1.0, size + 1), count)).all()
    dist.reduce_scatter_tensor(part, whole)
    assert (part == size * (rank + 1)).all()
    assert TAKEN == ["all_gather", "reduce_scatter"]


def _torch_tensors() -> None:
    """Tensors in symmetric memory, and their slices."""
    import torch

    watch()
    rank, size = dist.get_rank(), dist.get_world_size()
    TAKEN.clear()
    for tensor in (
        torch.from_numpy(world().symmetric_empty((300, 400), torch.float32)),
        torch.from_dlpack(world().symmetric_empty((300, 400))),
    ):
        tensor.fill_(rank + 1)
        dist.all_reduce(tensor[10:])
        assert (tensor[10:] == size * (size + 1) / 2).all()
        assert (tensor[:10] == rank + 1).all()
    assert TAKEN == ["all_reduce"] * 2


def gradient_buckets(with_torch: bool) -> None:
    """Averages of large buckets, of NumPy arrays and tensors."""
    from unicoll.parallel import GradientBuckets

    watch()
    rank, size = dist.get_rank(), dist.get_world_size()
    TAKEN.clear()
    models: list[list[Any]] = [[np.zeros((100, 300), np.float32), np.zeros(70_000, np.float32)]]
    if with_torch:
        import torch

        models.append([torch.zeros(300, 400, dtype=torch.bfloat16), torch.zeros(7, dtype=torch.bfloat16)])
    for parameters in models:
        buckets = GradientBuckets(parameters, first_bucket_mb=25)
        for _ in range(2):
            for i, parameter in enumerate(parameters):
                buckets.ready(i, parameter + (rank + i))
            for i, average in enumerate(buckets.wait()):
                assert type(average) is type(parameters[i])
                assert average.dtype == parameters[i].dtype
                assert (average == (size - 1) / 2 + i).all()
    assert ["all_reduce"] * 2 * len(models) == TAKEN


def test_tensors_of_torch() -> None:
    pytest.importorskip("torch")
    with joined(2, modules=("torch",)) as job:
        job.call(_torch_tensors)
        job.results()
        job.call(gradient_buckets, True)
        job.results()


@on_ranks(3)
def test_calls_in_the_background() -> None:
    """Several in flight."""
    watch()
    arrays = [world().symmetric_empty(100_000 + i) for i in range(5)]
    TAKEN.clear()
    for _ in range(3):
        for i, array in enumerate(arrays):
            array[:] = dist.get_rank() + i
        works: list[Any] = [dist.all_reduce(array, async_op=True) for array in arrays]
        for i, (work, array) in enumerate(zip(works, arrays, strict=True)):
            work.wait()
            assert (array == 3 + 3 * i).all()
    assert TAKEN == ["all_reduce"] * 15


# --- allocation and lifetime ----------------------------------------------------------------------------------------


@on_ranks(3)
def test_ranks_that_ask_for_different_sizes_are_named() -> None:
    with pytest.raises(dist.DistArgumentError) as raised:
        world().symmetric_empty(10 + dist.get_rank())
    assert "rank 0: symmetric_empty(float32[10])" in str(raised.value)
    assert "rank 2: symmetric_empty(float32[12])" in str(raised.value)
    array = world().symmetric_empty((3, 5), np.int16)
    assert (array.shape, array.dtype, int(array.sum())) == ((3, 5), np.int16, 0)


@on_ranks(2)
def test_too_much_memory_raises_on_all_ranks() -> None:
    with pytest.raises(dist.DistError) as raised:
        world().symmetric_empty(1 << 62, "uint8")
    assert type(raised.value).__name__ == "DistBackendError"
    assert str(raised.value).startswith("symmetric_empty(uint8[4611686018427387904]): rank 0 cannot map")
    dist.barrier()


@on_ranks(2)
def test_memory_lasts_as_long_as_its_views() -> None:
    world().symmetric_empty(1)  # with the first one a group may map more, which stays
    dist.barrier()
    gc.collect()
    before = mapped_bytes()
    for _ in range(3):
        array: Any = world().symmetric_empty(1 << 20, "uint8")
        array[:] = 1
    assert mapped_bytes() - before == 2 * (1 << 20) + 4096
    view = array[5:7].reshape(2, 1)
    del array
    assert mapped_bytes() - before == 2 * (1 << 20) + 4096
    del view
    assert mapped_bytes() == before
    assert not any("memfd:unicoll" in file for file in memory_files())  # MPI may have files of its own


@on_ranks(3)
def test_views_of_the_other_ranks_arrays() -> None:
    """Each rank writes to the next one's array and reads the previous one's."""
    group, rank = world(), dist.get_rank()
    array = group.symmetric_empty((4, 6), "int64")
    group.peer_view(array[1:3], (rank + 1) % 3)[0, 2] = 100 + rank
    group.fence()
    assert array[1, 2] == 100 + (rank - 1) % 3
    assert [int(group.peer_view(array[1, 2:3], r)[0]) for r in range(3)] == [102, 100, 101]
    group.fence()
    for bad, peer, words in (
        (np.zeros(3), 0, "is not in symmetric memory of group 'world'"),
        (array[:, 1], 0, "is not in symmetric memory"),
        (array, 3, "group rank 3"),
        (array, -1, "group rank -1"),
    ):
        with pytest.raises(dist.DistArgumentError, match=words):
            group.peer_view(bad, peer)


@on_ranks(2, env={})
def test_arrays_survive_the_job() -> None:
    array = world().symmetric_empty(8, "int64")
    view = world().peer_view(array, 0)
    dist.barrier()
    dist.destroy_process_group()
    array[:] = 5
    assert (int(array.sum()), int(view.size)) == (40, 8)


@on_ranks(3)
def test_arrays_survive_their_group() -> None:
    """What a rank writes after the end of the group is in the view of the rank before it."""
    group: Any = dist.new_group()
    rank = dist.get_rank()
    array = group.symmetric_empty(8, "int64")
    view = group.peer_view(array, (rank + 1) % 3)
    dist.destroy_process_group(group)
    array[:] = rank
    del array
    dist.barrier()
    assert set(view.tolist()) == {(rank + 1) % 3}


@on_ranks(3)
def test_callbacks_may_call_collectives_during_an_allocation() -> None:
    done: list[float] = []

    def again(work: Any) -> None:
        array = np.full(50_000, dist.get_rank() + 1.0)
        dist.all_reduce(array)
        done.append(float(array[0]))

    for _ in range(20):
        work: Any = dist.all_reduce(np.ones(4), async_op=True)
        work.get_future().then(again)
        world().symmetric_empty(1000)
    dist.barrier()
    deadline = time.monotonic() + 30
    while len(done) < 20 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert done == [6.0] * 20


@on_ranks(1)
def test_a_group_of_one_rank() -> None:
    array = world().symmetric_empty((2, 3), "int64")
    world().peer_view(array[1:], 0)[:] = 7
    world().fence()
    dist.all_reduce(array)
    assert array.tolist() == [[0, 0, 0], [7, 7, 7]]


@pytest.mark.every(n=2)
@pytest.mark.parametrize(
    "env", [{"UNICOLL_TRANSPORT": "tcp"}, {"UNICOLL_TRANSPORT": "hierarchical"}], ids=str
)
@on_ranks(3)
def test_other_transports(env: dict[str, str]) -> None:
    """Without shared memory, or with it within hosts only: the same results."""
    group, rank = world(), dist.get_rank()
    for count in (10, 300_000):
        array = group.symmetric_empty(count, "float64")
        array[:] = rank + 1
        dist.all_reduce(array)
        assert (array == 6).all()
        whole = group.symmetric_empty(3 * count, "float64")
        array[:] = rank
        dist.all_gather_into_tensor(whole, array)
        assert (whole == np.repeat(np.arange(3.0), count)).all()
    if env["UNICOLL_TRANSPORT"] == "hierarchical" and rank == 0:  # two ranks count as one host
        group.peer_view(array, 1)
    else:
        with pytest.raises(dist.BackendUnavailableError, match="shares no memory with rank"):
            group.peer_view(array, (rank + 1) % 3)


@pytest.mark.every(n=0)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@on_ranks(5, env={"UNICOLL_TRANSPORT": "hierarchical"})
def test_ranks_of_each_host_read_arrays_in_place(dtype: str) -> None:
    found = []
    function = peer_memory.arrays_of_all

    def watched(*args: Any, **options: Any) -> Any:
        arrays = function(*args, **options)
        found.append(arrays is not None)
        return arrays

    peer_memory.arrays_of_all = watched
    for name in OPERATIONS:
        for count in (5, 600_001):
            found.clear()
            equal_results(name, count, dtype, "SUM", 3, True, None)
            in_place = name in BETWEEN_HOSTS and count > 5 and dist.get_rank() < 4  # the last rank is alone
            assert sum(found) == in_place, name


@on_ranks(3, env={})
def test_another_call_on_one_rank_is_named() -> None:
    """Than an allocation; other calls are in test_algorithm_faults.py."""
    array = world().symmetric_empty(200_000)
    with pytest.raises(dist.CollectiveMismatchError) as raised:
        if dist.get_rank() == 1:
            world().symmetric_empty(3)
        else:
            dist.all_reduce(array)
    for word in ("all_reduce(float32[200000]", "symmetric_empty", "test_symmetric.py"):
        assert word in str(raised.value)
