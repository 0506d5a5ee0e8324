"""What ranks do in the tests of arrays that the MPI backend's agreement or shared memory carries."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from typing import Any

import numpy as np

import unicoll as dist
from mpi_comm.group_communicator import GroupCommunicator
from tests.support.outcomes import failure_of
from tests.support.worker import Failure, send_note

_FLOATS = np.float64


def _data(rank: int, count: int) -> Any:
    return np.arange(count, dtype=_FLOATS) + 100 * rank


def _operations(count: int) -> dict[str, tuple[Callable[[], Any], Any]]:
    """By name: an operation in which each rank contributes ``count`` elements, and its result on this rank."""
    me, n = dist.get_rank(), dist.get_world_size()
    part, root = count // n, n - 1
    own, everything = _data(me, count), [_data(r, count) for r in range(n)]
    total = sum(everything[1:], everything[0])
    mine = slice(me * part, (me + 1) * part)
    exchanged = np.concatenate([x[mine] for x in everything])

    def result(of: Any, call: Callable[[Any], Any]) -> Callable[[], Any]:
        def made() -> Any:
            out = of.copy()
            call(out)
            return out

        return made

    def listed(size: int, call: Callable[[list[Any]], Any]) -> Callable[[], Any]:
        def made() -> Any:
            out = [np.zeros(size) for _ in range(n)]
            call(out)
            return np.concatenate(out)

        return made

    even = own[: part * n]
    pieces = np.split(even, n)
    rooted = me == root
    return {
        "all_reduce": (result(own, dist.all_reduce), total),
        "average": (result(own, lambda x: dist.all_reduce(x, dist.ReduceOp.AVG)), total / n),
        "maximum": (result(own, lambda x: dist.all_reduce(x, dist.ReduceOp.MAX)), everything[-1]),
        "reduce": (result(own, lambda x: dist.reduce(x, root)), total if rooted else own),
        "broadcast": (result(own, lambda x: dist.broadcast(x, root)), everything[root]),
        "scan": (result(own, dist.scan), sum(everything[1 : me + 1], everything[0])),
        "exscan": (result(own, dist.exscan), sum(everything[1:me], everything[0]) if me else own),
        "all_gather": (listed(count, lambda out: dist.all_gather(out, own)), np.concatenate(everything)),
        "all_gather_into_tensor": (
            result(np.zeros(n * count), lambda x: dist.all_gather_into_tensor(x, own)),
            np.concatenate(everything),
        ),
        "gather": (
            listed(count, lambda out: dist.gather(own, out if rooted else None, root)),
            np.concatenate(everything) if rooted else np.zeros(n * count),
        ),
        "scatter": (
            result(np.zeros(part), lambda x: dist.scatter(x, pieces if rooted else None, root)),
            everything[root][mine],
        ),
        "reduce_scatter": (result(np.zeros(part), lambda x: dist.reduce_scatter(x, pieces)), total[mine]),
        "reduce_scatter_tensor": (
            result(np.zeros(part), lambda x: dist.reduce_scatter_tensor(x, even)),
            total[mine],
        ),
        "all_to_all": (listed(part, lambda out: dist.all_to_all(out, pieces)), exchanged),
        "all_to_all_single": (
            result(np.zeros(part * n), lambda x: dist.all_to_all_single(x, even)),
            exchanged,
        ),
    }


def at_the_limit(fits: bool) -> dict[str, int]:
    """:func:`mpi_calls` with arrays that just fit into the agreement, or just do not."""
    n = dist.get_world_size()
    room = min(24 + 256, 2304 // n & ~7) - 24
    return mpi_calls(room // 8 // n * n if fits else room // 8 // n * n + n)


def mpi_calls(count: int) -> dict[str, int]:
    """Calls of MPI's collectives, besides the agreement, by operations on ``count`` elements per rank."""
    made: list[str] = []
    execute = GroupCommunicator.execute

    def counting(self: GroupCommunicator, name: str, *args: Any) -> None:
        made.append(name)
        execute(self, name, *args)

    GroupCommunicator.execute = counting  # type: ignore[method-assign]
    found = {}
    try:
        for name, (call, expected) in _operations(count).items():
            for _ in range(2):  # the second call may use what is kept of the first
                made.clear()
                np.testing.assert_array_equal(call(), expected, err_msg=name)
                found[name] = len(made)
        arrays = [_data(dist.get_rank(), (1, count)[i % 2]) for i in range(8)]
        works: list[Any] = [dist.broadcast(x, 0, async_op=True) for x in arrays]
        dist.all_reduce(arrays[0].copy())
        for work in works:
            work.wait()
        assert all(np.array_equal(x, _data(0, x.size)) for x in arrays)
    finally:
        GroupCommunicator.execute = execute  # type: ignore[method-assign]
    return found


def of_several_sizes(large: int) -> bool:
    """A gather and an all_to_all of one element from rank 0, and ``large`` ones from each of the others."""
    me, n = dist.get_rank(), dist.get_world_size()
    sizes = [1 if r == 0 else large for r in range(n)]
    out = [np.zeros(size) for size in sizes] if me == 0 else None
    for _ in range(2):
        dist.gather(np.full(sizes[me], float(me)), out, 0)
        if out is not None:
            assert [x.tolist() for x in out] == [[float(r)] * sizes[r] for r in range(n)]
        received = np.zeros(sum(sizes))
        dist.all_to_all_single(received, np.full(n * sizes[me], float(me)), sizes, [sizes[me]] * n)
        assert received.tolist() == [float(r) for r in range(n) for _ in range(sizes[r])]
    return True


def differ(large: int) -> Failure | None:
    """An all_reduce of one element on rank 0 and of ``large`` ones on the others, in a group of its own: its error."""
    group: Any = dist.new_group()
    dist.all_reduce(np.ones(large), group=group)
    found = failure_of(lambda: dist.all_reduce(np.ones(1 if dist.get_rank() == 0 else large), group=group))
    dist.destroy_process_group(group)
    return found


def explained() -> str:
    """The text of explain() after a large call, and before one."""
    dist.all_reduce(np.ones(100_000))
    dist.new_group()
    return dist.explain()


def shared_memory_fails() -> list[Failure | None]:
    """The shared memory raises on rank 1 in a large call: the errors of this call, and of a later, small one."""
    group: Any = dist.new_group()
    x = np.ones(100_000)
    dist.all_reduce(x, group=group)
    if dist.get_rank() == 1:

        def raising(*args: Any) -> Any:
            raise OSError("injected")

        slots_type = type(group._dispatcher._backends.host._large_host_arrays.backend._transport.slots)
        original, slots_type.sync_step = slots_type.sync_step, raising
    try:
        errors = [failure_of(lambda: dist.all_reduce(x, group=group))]
    finally:
        if dist.get_rank() == 1:
            slots_type.sync_step = original
    errors.append(failure_of(lambda: dist.all_reduce(np.ones(1), group=group)))
    dist.all_reduce(x)  # other groups are not affected
    dist.destroy_process_group(group)
    return errors


def pretend_own_host(variable: str) -> None:
    """Let each rank be on a host of its own; ``variable`` is the launcher's variable with its rank."""
    name = f"node{os.environ[variable]}"
    socket.gethostname = lambda: name


def no_symmetric_memory() -> list[str]:
    """The errors of an allocation and of a view, in a group that stays usable."""
    group, texts = dist.group.WORLD, []
    calls: list[Callable[[], Any]] = [
        lambda: group.symmetric_empty(10),
        lambda: group.peer_view(np.zeros(3), 1 - dist.get_rank()),
    ]
    for call in calls:
        failure = failure_of(call)
        assert failure is not None
        texts.append(f"{failure.type}: {failure.message}")
        dist.barrier()
    return texts


def overflow() -> bool:
    """No NumPy warning for results that are infinite or NaN, in arrays that the agreement carries."""
    with np.errstate(all="raise"):
        x, y = np.full(2, 1e308), np.array([np.inf if dist.get_rank() else -np.inf])
        dist.all_reduce(x)
        dist.all_reduce(y)
    return bool(np.isinf(x).all() and np.isnan(y).all())


def another_symmetric_call(how: str) -> str:
    """Rank 1 makes another call than an all_reduce on its symmetric array: the error."""
    group: Any = dist.group.WORLD
    array = group.symmetric_empty(200_000)
    try:
        if dist.get_rank() != 1:
            dist.all_reduce(array)
        elif how == "operation":
            dist.broadcast(array, src=0)
        else:
            group.symmetric_empty(3)
        return "none"
    except dist.CollectiveMismatchError as e:
        return str(e)


def symmetric_loop(timeout: float) -> str:
    """An all_reduce of a large symmetric array again and again, until it fails; the error."""
    group: Any = dist.group.WORLD
    array = group.symmetric_empty(1 << 20)
    group.all_reduce(array, timeout=60.0)  # the first call takes longer
    send_note("looping")
    try:
        while True:
            group.all_reduce(array, timeout=timeout)
    except dist.DistError as e:
        return f"{type(e).__name__}: {e}"
