"""Any collective by name, in its simplest form or slightly wrong: for tests that are about what goes wrong."""

from __future__ import annotations

from typing import Any

import numpy as np

import unicoll as dist

COLLECTIVES = (
    "barrier", "broadcast", "all_reduce", "reduce", "all_gather", "all_gather_into_tensor", "gather", "scatter",
    "reduce_scatter", "reduce_scatter_tensor", "all_to_all", "all_to_all_single",
)  # fmt: skip
COALESCED = (
    "all_reduce_coalesced", "broadcast_coalesced", "all_gather_coalesced", "all_gather_into_tensor_coalesced",
    "reduce_scatter_tensor_coalesced",
)  # fmt: skip
OBJECTS = ("broadcast_object_list", "all_gather_object", "gather_object", "scatter_object_list")
EVERYTHING = (*COLLECTIVES, *COALESCED, *OBJECTS, "monitored_barrier")
REDUCING = ("all_reduce", "reduce", "reduce_scatter", "reduce_scatter_tensor")
ROOTED = ("broadcast", "reduce", "gather", "scatter")


def invoke(
    name: str,
    group: Any = None,
    *,
    count: int = 4,
    dtype: str = "float32",
    reduce: str = "SUM",
    root: int = 0,
    timeout: float | None = None,
    async_op: bool = False,
) -> Any:
    """Make a call; ``root`` is a rank in the group."""
    n, me = dist.get_world_size(group), dist.get_rank(group)
    more: dict[str, Any] = {"group": group, "timeout": timeout}
    if name == "send and recv":
        _pass_on(n, me, count, dtype, more)
        return None
    if name == "monitored_barrier":
        dist.monitored_barrier(group, timeout)
        return None
    if name in OBJECTS:
        _objects(name, n, me, root, group)
        return None

    def x(times: int = 1) -> Any:
        return np.ones(count * times, dtype)

    def several() -> list[Any]:
        return [x() for _ in range(n)]

    args: dict[str, Any] = {
        "barrier": lambda: (),
        "broadcast": lambda: (x(),),
        "all_reduce": lambda: (x(),),
        "reduce": lambda: (x(),),
        "all_gather": lambda: (several(), x()),
        "all_gather_into_tensor": lambda: (x(n), x()),
        "gather": lambda: (x(), several() if me == root else None),
        "scatter": lambda: (x(), several() if me == root else None),
        "reduce_scatter": lambda: (x(), several()),
        "reduce_scatter_tensor": lambda: (x(), x(n)),
        "all_to_all": lambda: (several(), several()),
        "all_to_all_single": lambda: (x(n), x(n)),
        "all_reduce_coalesced": lambda: ([x(), x()],),
        "broadcast_coalesced": lambda: ([x(), x()],),
        "all_gather_coalesced": lambda: ([[x(), x()] for _ in range(n)], [x(), x()]),
        "all_gather_into_tensor_coalesced": lambda: ([x(n), x(n)], [x(), x()]),
        "reduce_scatter_tensor_coalesced": lambda: ([x(), x()], [x(n), x(n)]),
    }
    if name in REDUCING:
        more["op"] = getattr(dist.ReduceOp, reduce)
    if name in ROOTED or name == "broadcast_coalesced":
        more["group_src" if name.startswith(("broadcast", "scatter")) else "group_dst"] = root
    return getattr(dist, name)(*args[name](), async_op=async_op, **more)


def _pass_on(n: int, me: int, count: int, dtype: str, more: dict[str, Any]) -> None:
    """Round the ring: send to the next, receive from the one before."""
    work = dist.isend(np.ones(count, dtype), group_dst=(me + 1) % n, **more)
    dist.recv(np.empty(count, dtype), group_src=(me - 1) % n, **more)
    assert work is not None
    work.wait()


def _objects(name: str, n: int, me: int, root: int, group: Any) -> None:
    objects: list[Any] = [{"rank": me}, "x" * 100]
    room: list[Any] = [None] * n
    if name == "broadcast_object_list":
        dist.broadcast_object_list(objects, group_src=root, group=group)
    elif name == "all_gather_object":
        dist.all_gather_object(room, objects, group=group)
    elif name == "gather_object":
        dist.gather_object(objects, room if me == root else None, group_dst=root, group=group)
    else:
        dist.scatter_object_list([None], room if me == root else None, group_src=root, group=group)


def row_name(name: str) -> str:
    """The operation that an error of the call names."""
    return name.replace("_coalesced", "").replace("monitored_", "")
