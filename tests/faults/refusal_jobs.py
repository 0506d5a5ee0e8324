"""What ranks do in the tests of a gather or scatter whose root refuses its list."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

import unicoll as dist
from tests.support.outcomes import failure_of
from tests.support.worker import Failure

ROOT = 1
Make = Callable[[int], Any]


class Unreadable:
    """An array whose conversion fails with an exception that is not the library's."""

    @property
    def __array_interface__(self) -> Any:
        raise RuntimeError("the array is not there any more")

    __cuda_array_interface__ = __array_interface__


def make_on(device: str) -> Make:
    """What makes arrays of ones."""
    if device == "cpu":
        return lambda count: np.ones(count, np.float32)
    from tests.simulated_nccl import arrays

    return lambda count: arrays.full(count, 1.0, np.float32)


def bad_lists(make: Make, count: int) -> dict[str, Any]:
    """Lists that the root of a gather or scatter refuses."""
    n, me = dist.get_world_size(), dist.get_rank()
    good = [make(count) for _ in range(n)]
    larger = make(count + 1)
    return {
        "none": None,
        "short": good[1:],
        "own size": [larger if i == me else x for i, x in enumerate(good)],
        "element": [*good[1:], "x"],
        "no list": 7,
        "other": [*good[1:], np.zeros(count, np.int16)],
        "unreadable": [*good[1:], Unreadable()],
    }


def refuse(
    name: str, which: str, count: int, async_op: bool, device: str, after: bool
) -> tuple[Failure | None, bool]:
    """The root gives a bad list; how the call ended on this rank, and whether nothing was written.

    Args:
        name: gather or scatter.
        which: of the bad lists.
        count: elements of every rank's array.
        async_op: whether the call is asynchronous.
        device: where the arrays are.
        after: whether all go on in the same group; else what a barrier raises counts where the call raised nothing.
    """
    group = dist.new_group()
    make, n, me = make_on(device), dist.get_world_size(), dist.get_rank()
    own, before = make(count), make(3)
    several = bad_lists(make, count)[which] if me == ROOT else None

    def call() -> None:
        work = getattr(dist, name)(own, several, ROOT, group=group, async_op=async_op, timeout=20)
        if async_op:
            work.wait()
            work.synchronize()

    dist.all_reduce(before, group=group)
    assert (_read(before) == n).all()  # which waits for the device
    here = make(1)
    dist.all_reduce(here)
    assert _read(here)[0] == n  # so the group can fail now without stopping a device that is late
    failure = failure_of(call)
    if not after:
        failure = failure or failure_of(lambda: dist.barrier(group=group, timeout=20))
    else:
        dist.all_reduce(before, group=group)
        assert (_read(before) == n * n).all()
        entries = [make(count + i) for i in range(n)] if me == ROOT else None
        mine = make(count + me)
        mine += me
        getattr(dist, name)(mine, entries, ROOT, group=group, timeout=20)
        if name == "gather" and entries is not None:
            assert [_read(x)[0] for x in entries] == [1 + i for i in range(n)]
        assert name == "gather" or (_read(mine) == 1).all()
        dist.barrier(group=group)
    untouched = bool((_read(own) == 1).all())
    dist.destroy_process_group(group)
    return failure, untouched


def _read(array: Any) -> Any:
    return array if isinstance(array, np.ndarray) else array.numpy()
