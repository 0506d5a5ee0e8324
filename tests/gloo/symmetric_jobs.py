"""What the ranks of test_symmetric.py do."""

from __future__ import annotations

import gc
import inspect
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

import unicoll as dist
from gloo_fallback.algorithms import peer_memory
from gloo_fallback.shm.peer_memory import is_readable
from gloo_fallback.transport.selection import OPERATIONS as ALGORITHMS
from tests.support.worker import send_note
from unicoll.arrays.types import BY_NAME
from unicoll.backend.ops import OPS, Arity, Sizes

Array = Any
Allocate = Callable[[int], Array]

_TAKEN: list[str] = []
"""The functions of ``peer_memory`` that have moved data, in order."""


def _watch() -> None:
    """Note in _TAKEN which functions of ``peer_memory`` move data."""
    if hasattr(peer_memory.all_reduce, "watched"):
        return
    for name, function in inspect.getmembers(peer_memory, inspect.isfunction):
        if function.__module__ != peer_memory.__name__ or name.startswith("_") or name == "arrays_of_all":
            continue

        def watched(*args: Any, _function: Any = function, _name: str = name) -> bool:
            done: bool = _function(*args)
            if done:
                _TAKEN.append(_name)
            return done

        watched.watched = True  # type: ignore[attr-defined]
        setattr(peer_memory, name, watched)


def _values(count: int, dtype: str, seed: int) -> Array:
    kind = BY_NAME[dtype]
    rng = np.random.default_rng(seed)
    if kind.half:
        high = (rng.standard_normal(count).astype("f4").view("u4") >> 16).astype("u2")
        return high if dtype == "bfloat16" else rng.standard_normal(count).astype("f2")
    if kind.storage.kind in "fc":
        values = rng.standard_normal(count)
        return (values + 1j * values[::-1] if kind.storage.kind == "c" else values).astype(kind.storage)
    if kind.storage.kind == "b":
        return rng.integers(0, 2, count).astype(bool)
    return rng.integers(0, 100, count).astype(kind.storage)


def _as_type(array: Array, dtype: str) -> Array:
    if dtype == "bfloat16":
        import ml_dtypes

        return array.view(ml_dtypes.bfloat16)
    return array


def _program(name: str, count: int, reduction: Any, root: int, even: bool) -> tuple[list[int], Any]:
    """The sizes of an operation's arrays on this rank, and the call."""
    row, rank, size = OPS[name], dist.get_rank(), dist.get_world_size()
    uneven = row.uneven and not row.root_has_sizes and not even  # uneven gathers and scatters use the slots
    exchanged = row.sizes is Sizes.EXCHANGED
    sends, gets = (
        [count + ((3 * a + 5 * b) % 7 if uneven else 0) for a, b in pairs]
        for pairs in ([(rank, r) for r in range(size)], [(r, rank) for r in range(size)])
    )
    arguments: list[tuple[Arity, list[int]]] = []
    for parameter in row.parameters:
        if parameter.side == "splits":
            continue
        arity = row.outputs if parameter.side == "output" else row.inputs
        parts = [count + (r if uneven else 0) for r in range(size)]
        if exchanged:
            parts = sends if parameter.side == "input" else gets
        if arity is Arity.PER_RANK_AT_ROOT and rank != root:
            parts = []
        elif arity is Arity.ONE:
            larger = exchanged or (parameter.side == "input") == row.scattered
            parts = [sum(parts)] if row.joined and larger else [parts[rank]]
        arguments.append((arity, parts))
    options: dict[str, Any] = {row.root_name: root} if row.rooted else {}
    if row.reduces:
        options["op"] = reduction
    if exchanged and row.joined:
        options |= {"output_split_sizes": gets, "input_split_sizes": sends}

    def call(arrays: list[Array]) -> None:
        left = iter(arrays)
        given = [(arity, [next(left) for _ in parts]) for arity, parts in arguments]
        getattr(dist, name)(
            *(own[0] if arity is Arity.ONE else own or None for arity, own in given), **options
        )

    return [part for _, parts in arguments for part in parts], call


OPERATIONS = tuple(name for name in ALGORITHMS if OPS[name].moves_data)


class Parts:
    """Cuts arrays from one symmetric array, at offsets that differ between the ranks."""

    def __init__(self, itemsize: int, nbytes: int, group: Any = None) -> None:
        group = group or dist.group.WORLD
        self._left = group.symmetric_empty(nbytes + 4096, "uint8")[dist.get_rank() * 16 * itemsize :]

    def __call__(self, count: int, dtype: np.dtype[Any]) -> Array:
        nbytes = count * dtype.itemsize
        part, self._left = self._left[:nbytes], self._left[-(-nbytes // 16) * 16 :]
        return part.view(dtype)


def equal_results_between_hosts(name: str, count: int, dtype: str, reduction: str, root: int) -> int:
    """As :func:`equal_results`, over several hosts; how often the ranks of this host had arrays of all in place."""
    found = []
    function = peer_memory.arrays_of_all

    def watched(*args: Any, **options: Any) -> Any:
        arrays = function(*args, **options)
        found.append(arrays is not None)
        return arrays

    peer_memory.arrays_of_all = watched
    try:
        equal_results(name, count, dtype, reduction, root, True, None)
    finally:
        peer_memory.arrays_of_all = function
    return sum(found)


def read_from(nbytes: int, group: Any = None) -> None:
    """Let collectives of a group (the world) from a number of bytes on read the memory of other processes."""
    group = group or dist.group.WORLD
    dist.all_reduce(np.zeros(1 << 15), group=group)  # selects the transport
    backend: Any = group._dispatcher._backends.all[-1]
    slots = backend._transport.slots
    if slots is not None and slots.peers is not None:
        slots.peers.minimum = slots.peers.scatter_minimum = nbytes


def equal_results(
    name: str,
    count: int,
    dtype: str,
    reduction: str,
    root: int,
    even: bool,
    ordinary_rank: int | None,
    reads: bool = False,
) -> list[str]:
    """One operation through the slots and without them gives the same bytes; returns the direct functions that ran.

    Args:
        ordinary_rank: a rank that has ordinary arrays both times; with ``reads`` arrays that others cannot read.
        reads: the arrays are read from the processes' memory; False: they are in symmetric memory.
    """
    _watch()
    read_from(1 << 60)
    rank, size = dist.get_rank(), dist.get_world_size()
    counts, call = _program(name, count, getattr(dist.ReduceOp, reduction), root, even)
    storage = BY_NAME[dtype].storage
    largest = (3 * size + 2) * (count + 16) * storage.itemsize
    cut = Parts(storage.itemsize, largest)
    results: list[list[Array]] = []
    _TAKEN.clear()
    for symmetric in (False, True):
        ordinary = not symmetric or reads or rank == ordinary_rank
        if symmetric and reads:
            read_from(1)
            peer_memory.is_readable = is_readable if rank != ordinary_rank else lambda array: False
        arrays = [np.empty(n, storage) if ordinary else cut(n, storage) for n in counts]
        for i, array in enumerate(arrays):
            array[:] = _values(array.size, dtype, 100 * rank + i).view(storage)
        call([_as_type(array, dtype) for array in arrays])
        results.append([array.copy() for array in arrays])
        if not symmetric:
            assert not _TAKEN, _TAKEN
    peer_memory.is_readable = is_readable
    for ordinary_array, symmetric_array in zip(*results, strict=True):
        np.testing.assert_array_equal(ordinary_array.view("u1"), symmetric_array.view("u1"))
    return list(_TAKEN)


def regions_differ(drop: bool) -> list[list[str]]:
    """Arrays from several allocations, of which some ranks have dropped theirs."""
    _watch()
    group, rank, size = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
    count = 1 << 20
    taken = []
    for scattered_here in (True, False):
        big = group.symmetric_empty(size * count, "int32")
        small = group.symmetric_empty(count, "int32")
        if drop and rank == size - 1:
            big = None
            gc.collect()
        if rank == 0:
            big[:] = np.arange(size * count) % 1000
        _TAKEN.clear()
        dist.scatter(small, [*big.reshape(size, count)] if rank == 0 else None, src=0)
        assert (small == np.arange(rank * count, (rank + 1) * count) % 1000).all()
        taken.append(list(_TAKEN))
        first, second = group.symmetric_empty(count, "int32"), group.symmetric_empty(count, "int32")
        mine = first if (rank == 0) == scattered_here else second
        mine[:] = rank + 1
        _TAKEN.clear()
        dist.all_reduce(mine)
        assert (mine == size * (size + 1) // 2).all()
        taken.append(list(_TAKEN))
    return taken


def in_place_gather_and_scatter() -> list[str]:
    """The input is the rank's own part of the output, or the output that of the input."""
    _watch()
    group, rank, size = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
    count = 70_000
    whole = group.symmetric_empty(size * count, "float64")
    part = whole[rank * count : (rank + 1) * count]
    part[:] = rank + 1
    _TAKEN.clear()
    dist.all_gather_into_tensor(whole, part)
    assert (whole == np.repeat(np.arange(1.0, size + 1), count)).all()
    dist.reduce_scatter_tensor(part, whole)
    assert (part == size * (rank + 1)).all()
    return list(_TAKEN)


def sizes_differ() -> tuple[str, str]:
    """The error of an allocation that differs between ranks, and the result of the next one."""
    group, rank = dist.group.WORLD, dist.get_rank()
    try:
        group.symmetric_empty(10 + rank)
        text = "none"
    except dist.DistArgumentError as e:
        text = str(e)
    array = group.symmetric_empty((3, 5), np.int16)
    return text, f"{array.shape} {array.dtype} {int(array.sum())}"


def too_much() -> str:
    """The error of an allocation that no machine can satisfy, on a group that stays usable."""
    group = dist.group.WORLD
    try:
        group.symmetric_empty(1 << 62, "uint8")
        return "none"
    except dist.DistError as e:
        dist.barrier()
        return f"{type(e).__name__}: {e}"


def mapped_bytes() -> int:
    """Bytes of shared segments that this process maps."""
    total = 0
    with open("/proc/self/maps") as lines:
        for line in lines:
            if "memfd:unicoll" in line:
                first, _, last = line.split()[0].partition("-")
                total += int(last, 16) - int(first, 16)
    return total


def memory_is_released() -> tuple[int, int, int]:
    """Growth of the mapped memory after one allocation, with a view of it left, and with nothing left."""
    group = dist.group.WORLD
    dist.barrier()
    gc.collect()
    before = mapped_bytes()
    for _ in range(3):
        array: Any = group.symmetric_empty(1 << 20, "uint8")
        array[:] = 1
    one = mapped_bytes() - before
    view = array[5:7].reshape(2, 1)
    del array
    with_view = mapped_bytes() - before
    del view
    left = mapped_bytes() - before
    descriptors = sum("memfd:unicoll" in _target(fd) for fd in os.listdir("/proc/self/fd"))
    assert descriptors == 0
    return one, with_view, left


def _target(descriptor: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{descriptor}")
    except OSError:
        return ""


def peers() -> list[Any]:
    """Each rank writes to the next one's array and reads the previous one's."""
    group, rank, size = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
    array = group.symmetric_empty((4, 6), "int64")
    part = array[1:3]
    group.peer_view(part, (rank + 1) % size)[0, 2] = 100 + rank
    group.fence()
    assert array[1, 2] == 100 + (rank - 1) % size
    assert group.peer_view(array, rank)[1, 2] == array[1, 2]
    seen = [int(group.peer_view(array[1, 2:3], r)[0]) for r in range(size)]
    group.fence()
    refusals = []
    for bad, peer in ((np.zeros(3), 0), (array[:, 1], 0), (array, size), (array, -1)):
        try:
            group.peer_view(bad, peer)
            refusals.append("none")
        except dist.DistArgumentError as e:
            refusals.append(str(e))
    return [seen, refusals]


def survives_the_group(rank: int, size: int, folder: str) -> list[int]:
    """Arrays of a destroyed group are ordinary memory that the ranks still share."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size)
    group = dist.group.WORLD
    array = group.symmetric_empty(8, "int64")
    view = group.peer_view(array, 0)
    dist.barrier()
    dist.destroy_process_group()
    array[:] = rank
    return [int(array.sum()), int(view.size)]


def survives_a_subgroup() -> list[int]:
    """What a rank writes after the end of the group is in the view of the rank before it."""
    group, rank, size = dist.new_group(), dist.get_rank(), dist.get_world_size()
    array = group.symmetric_empty(8, "int64")
    view = group.peer_view(array, (rank + 1) % size)
    dist.destroy_process_group(group)
    array[:] = rank
    del array
    dist.barrier()
    return [int(x) for x in set(view.tolist())]


def alone() -> str:
    """Symmetric memory in a group of one rank."""
    group = dist.group.WORLD
    array = group.symmetric_empty((2, 3), "int64")
    group.peer_view(array[1:], 0)[:] = 7
    group.fence()
    dist.all_reduce(array)
    return str(array.tolist())


def torch_tensors() -> list[str]:
    """Tensors in symmetric memory, and their slices."""
    import torch

    _watch()
    group, rank, size = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
    _TAKEN.clear()
    for tensor in (
        torch.from_numpy(group.symmetric_empty((300, 400), torch.float32)),
        torch.from_dlpack(group.symmetric_empty((300, 400))),
    ):
        tensor.fill_(rank + 1)
        dist.all_reduce(tensor[10:])
        assert (tensor[10:] == size * (size + 1) / 2).all()
        assert (tensor[:10] == rank + 1).all()
    return list(_TAKEN)


def gradient_buckets(with_torch: bool) -> list[str]:
    """Averages of large buckets, of NumPy arrays and tensors."""
    from unicoll.parallel import GradientBuckets

    _watch()
    rank, size = dist.get_rank(), dist.get_world_size()
    _TAKEN.clear()
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
    return list(_TAKEN)


def in_the_background() -> list[str]:
    """Asynchronous calls on symmetric arrays, several in flight."""
    _watch()
    group, rank, size = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
    arrays = [group.symmetric_empty(100_000 + i) for i in range(5)]
    _TAKEN.clear()
    for _ in range(3):
        for i, array in enumerate(arrays):
            array[:] = rank + i
        works = [dist.all_reduce(array, async_op=True) for array in arrays]
        for i, (work, array) in enumerate(zip(works, arrays, strict=True)):
            work.wait()
            assert (array == sum(range(size)) + size * i).all()
    return list(_TAKEN)


def allocation_beside_callbacks() -> int:
    """A callback calls collectives on large arrays while the main thread allocates."""
    group, rank, size = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
    done = []

    def again(work: Any) -> None:
        array = np.full(50_000, rank + 1.0)
        dist.all_reduce(array)
        done.append(float(array[0]))

    for _ in range(20):
        work = dist.all_reduce(np.ones(4), async_op=True)
        work.get_future().then(again)
        group.symmetric_empty(1000)
    dist.barrier()
    deadline = time.monotonic() + 30
    while len(done) < 20 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert set(done) == {size * (size + 1) / 2}
    return len(done)


def mismatch(how: str) -> str:
    """One rank makes another call on its symmetric array."""
    group, rank = dist.group.WORLD, dist.get_rank()
    array = group.symmetric_empty(200_000)
    try:
        if rank != 1:
            dist.all_reduce(array)
        elif how == "operation":
            dist.broadcast(array, src=0)
        elif how == "size":
            dist.all_reduce(array[:-1])
        else:
            group.symmetric_empty(3)
        return "none"
    except dist.CollectiveMismatchError as e:
        return str(e)


def loop(name: str, timeout: float, reads: bool = False) -> str:
    """One operation on large arrays again and again, until it fails; returns the error.

    ``reads`` as for :func:`equal_results`.
    """
    group, size = dist.group.WORLD, dist.get_world_size()
    if reads:
        read_from(1)
    allocate: Allocate = np.zeros if reads else group.symmetric_empty
    array, whole, group_input = allocate(1 << 20), allocate(size << 20), allocate(size << 20)
    calls: dict[str, Callable[[float], Any]] = {
        "all_reduce": lambda limit: group.all_reduce(array, timeout=limit),
        "all_gather_into_tensor": lambda limit: group.all_gather_into_tensor(whole, array, timeout=limit),
        "all_to_all_single": lambda limit: group.all_to_all_single(
            whole, group_input, None, None, timeout=limit
        ),
    }
    calls[name](60.0)  # the first call takes longer
    send_note("looping")
    try:
        while True:
            calls[name](timeout)
    except dist.DistError as e:
        return f"{type(e).__name__}: {e}"


def other_transports() -> Sequence[str]:
    """Symmetric arrays over a transport without shared memory, or with it within hosts only, give the same results."""
    group, rank, size = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
    for count in (10, 300_000):
        array = group.symmetric_empty(count, "float64")
        array[:] = rank + 1
        dist.all_reduce(array)
        assert (array == size * (size + 1) / 2).all()
        whole = group.symmetric_empty(size * count, "float64")
        array[:] = rank
        dist.all_gather_into_tensor(whole, array)
        assert (whole == np.repeat(np.arange(0.0, size), count)).all()
    try:
        group.peer_view(array, (rank + 1) % size)
        return ["view"]
    except dist.DistError as e:
        return [type(e).__name__, str(e)]
