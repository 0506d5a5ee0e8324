"""Calls any collective by name, with valid or mismatched arguments: for tests of failures."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

import unicoll as dist
from unicoll.arrays.types import Reduction
from unicoll.calls.ops import OPS, Arity, Op, Sizes

COLLECTIVES = tuple(name for name, row in OPS.items() if not row.message)
COALESCED = (
    "all_reduce_coalesced",
    "broadcast_coalesced",
    "all_gather_coalesced",
    "all_gather_into_tensor_coalesced",
    "reduce_scatter_tensor_coalesced",
)
OBJECTS = ("broadcast_object_list", "all_gather_object", "gather_object", "scatter_object_list")
EVERYTHING = (*COLLECTIVES, *COALESCED, *OBJECTS, "monitored_barrier")
REDUCING = tuple(name for name in COLLECTIVES if OPS[name].reduces)
ROOTED = tuple(name for name in COLLECTIVES if OPS[name].rooted)


def invoke(
    name: str,
    group: Any = None,
    *,
    count: int = 4,
    dtype: str = "float32",
    reduce: str | Reduction = "SUM",
    root: int = 0,
    timeout: float | None = None,
    async_op: bool = False,
    make: Callable[[int, np.dtype[Any]], Any] = np.ones,
) -> Any:
    """Call a collective; ``root`` is a rank in the group, and ``make`` makes an array of a number of elements."""
    n, me = dist.get_world_size(group), dist.get_rank(group)
    more: dict[str, Any] = {"group": group, "timeout": timeout}
    if name == "send and recv":
        _ring(n, me, count, dtype, more)
        return None
    if name == "monitored_barrier":
        dist.monitored_barrier(group, timeout)
        return None
    if name in OBJECTS:
        _objects(name, n, me, root, group)
        return None

    def x(times: int = 1) -> Any:
        return make(count * times, np.dtype(dtype))

    args: dict[str, Any] = {
        "all_reduce_coalesced": lambda: ([x(), x()],),
        "broadcast_coalesced": lambda: ([x(), x()],),
        "all_gather_coalesced": lambda: ([[x(), x()] for _ in range(n)], [x(), x()]),
        "all_gather_into_tensor_coalesced": lambda: ([x(n), x(n)], [x(), x()]),
        "reduce_scatter_tensor_coalesced": lambda: ([x(), x()], [x(n), x(n)]),
    }
    if name in REDUCING:
        more["op"] = getattr(dist.ReduceOp, reduce) if isinstance(reduce, str) else reduce
    if name in ROOTED or name == "broadcast_coalesced":
        more["group_src" if name.startswith(("broadcast", "scatter")) else "group_dst"] = root
    given = args[name]() if name in args else arrays(OPS[name], x, n, me == root)
    return getattr(dist, name)(*given, async_op=async_op, **more)


def arrays(row: Op, x: Callable[[int], Any], n: int, at_root: bool) -> list[Any]:
    """The arrays of a collective's call in a group of n; ``x(times)`` makes one of so many shares."""
    found: list[Any] = []
    for parameter in row.parameters:
        arity = row.outputs if parameter.side == "output" else row.inputs
        larger = "output" if row.sizes is Sizes.GATHERED_FLAT else "input"
        if parameter.side == "splits":
            continue
        if arity is Arity.PER_RANK or (arity is Arity.PER_RANK_AT_ROOT and at_root):
            found.append([x(1) for _ in range(n)])
        elif arity is Arity.PER_RANK_AT_ROOT:
            found.append(None)
        else:
            found.append(
                x(n if row.joined and (parameter.side == larger or row.sizes is Sizes.EXCHANGED) else 1)
            )
    return found


def _ring(n: int, me: int, count: int, dtype: str, more: dict[str, Any]) -> None:
    """Exchange along the ring: send to the next rank, receive from the previous one."""
    work = dist.isend(np.ones(count, dtype), group_dst=(me + 1) % n, **more)
    dist.recv(np.empty(count, dtype), group_src=(me - 1) % n, **more)
    assert work is not None
    work.wait()


def _objects(name: str, n: int, me: int, root: int, group: Any) -> None:
    objects: list[Any] = [{"rank": me}, "x" * 100]
    slots: list[Any] = [None] * n
    if name == "broadcast_object_list":
        dist.broadcast_object_list(objects, group_src=root, group=group)
    elif name == "all_gather_object":
        dist.all_gather_object(slots, objects, group=group)
    elif name == "gather_object":
        dist.gather_object(objects, slots if me == root else None, group_dst=root, group=group)
    else:
        dist.scatter_object_list([None], slots if me == root else None, group_src=root, group=group)


def row_name(name: str) -> str:
    """The name of the operation in errors of the call."""
    return name.replace("_coalesced", "").replace("monitored_", "")
