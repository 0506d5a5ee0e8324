"""What ranks do in the tests of options of single calls."""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np

import unicoll as dist
from tests.simulated_nccl import arrays, ranks
from tests.support.calls import COALESCED, COLLECTIVES, OBJECTS, invoke
from tests.support.outcomes import failure_of


def world() -> Any:
    """The default group."""
    return dist.group.WORLD


def same_group() -> dict[str, Any]:
    """What a view says of itself, beside its group."""
    whole = world()
    view = whole.using(max_ctas=4)
    facts = {
        name: (ask(view), ask(whole))
        for name, ask in {
            "rank": dist.get_rank,
            "size": dist.get_world_size,
            "ranks": dist.get_process_group_ranks,
            "backend": dist.get_backend,
            "name": lambda g: g.group_name,
            "timeout": lambda g: g.timeout,
            "description": lambda g: g.describe(),
            "base": lambda g: g.base is whole,
            "is": lambda g: isinstance(g, dist.ProcessGroup),
        }.items()
    }
    return {
        "facts": facts,
        "view": repr(view),
        "whole": repr(whole),
        "more": repr(view.using(timeout=7, min_ctas=2)),
    }


def every_function() -> list[str]:
    """All functions take a view in place of a group; calls of both are one row of operations."""
    view = world().using(max_ctas=4, timeout=60)
    for name in (*COLLECTIVES, *COALESCED, *OBJECTS, "monitored_barrier", "send and recv"):
        invoke(name, view)
        work = (
            None
            if name in (*OBJECTS, "monitored_barrier", "send and recv")
            else invoke(name, view, async_op=True)
        )
        invoke("all_reduce", None)
        if work is not None:
            work.wait()
    x, y = np.full(3, float(dist.get_rank())), np.empty(3)
    peer = 1 - dist.get_rank()
    ops = [dist.P2POp(dist.isend, x, peer, view), dist.P2POp(dist.irecv, y, peer, view)]
    for each in dist.batch_isend_irecv(ops):
        each.wait()
    assert (y == peer).all()
    return [str(dist.new_subgroups(1, group=view)[0].size())]


def for_one_call() -> bool:
    """Whether nothing holds a view that was used, without a collection of garbage."""
    view = world().using(timeout=60)
    view.all_reduce(np.ones(2))
    view.all_reduce(np.ones(2), async_op=True).wait()
    left = weakref.ref(view)
    del view
    return left() is None


def ends() -> dict[str, Any]:
    """Views of groups that are destroyed, by their own name or the group's; views of which groups are made."""
    n = dist.get_world_size()
    found: dict[str, Any] = {}

    def said(view: Any) -> str:
        try:
            view.all_reduce(np.ones(2))
        except dist.DistError as e:
            return f"{type(e).__name__}: {e}"
        return "nothing"

    first: Any = dist.new_group()
    view = first.using(max_ctas=2)
    view.all_reduce(np.ones(2))
    dist.destroy_process_group(first)
    found["after the group"] = said(view)
    second: Any = dist.new_group()
    view = second.using(max_ctas=2)
    half = dist.split_group(view, [[r] for r in range(n)])
    assert half is not None
    again = dist.split_group(second, [[r] for r in range(n)])
    assert again is not None
    found["split"] = [half.size(), half.name, again.name]
    found["groups"] = dist.get_pg_count()
    dist.destroy_process_group(view)
    found["after the view"] = [said(view), said(second), dist.get_pg_count()]
    return found


def timeouts() -> str:
    """A call whose deadline is its view's."""
    group: Any = dist.new_group()
    if dist.get_rank() == 0:
        dist.barrier()
        return ""
    try:
        group.using(timeout=0.2).all_reduce(np.ones(2))
    except dist.OperationTimeoutError as e:
        dist.barrier()
        return str(e)
    return "nothing"


def outside() -> list[Any]:
    """A group that this process may not be in, with options."""
    group: Any = dist.new_group([0])
    view = group.using(max_ctas=2)
    return [dist.get_rank(view), dist.get_world_size(view)]


# --- on NCCL ------------------------------------------------------------------------------------------------------


class _Told:
    """The options with which NCCL's functions are called here, by function."""

    def __init__(self) -> None:
        self.calls: dict[str, list[Any]] = {}
        nccl: Any = ranks.nccl()
        for name in ("all_reduce", "broadcast", "reduce", "all_gather", "reduce_scatter", "all_to_all"):
            setattr(nccl, name, self._recorded(name, getattr(nccl, name)))

    def _recorded(self, name: str, function: Any) -> Any:
        def call(*arguments: Any, options: Any = None) -> Any:
            self.calls.setdefault(name, []).append(None if options is None else str(options))
            return function(*arguments, options=options)

        return call

    def during(self, attempt: Any) -> dict[str, list[Any]]:
        """What was told during something."""
        self.calls.clear()
        attempt()
        return dict(self.calls)


def told() -> dict[str, Any]:
    """What each operation of device arrays tells NCCL."""
    me, n = dist.get_rank(), dist.get_world_size()
    record = _Told()
    view = world().using(max_ctas=2, profiler_tag=7)

    def x(times: int = 1) -> Any:
        return arrays.full(4 * times, 1.0, np.float32)

    def several() -> list[Any]:
        return [x() for _ in range(n)]

    calls: dict[str, Any] = {
        "all_reduce": lambda g: dist.all_reduce(x(), group=g),
        "broadcast": lambda g: dist.broadcast(x(), 0, group=g),
        "reduce": lambda g: dist.reduce(x(), 0, group=g),
        "all_gather": lambda g: dist.all_gather(several(), x(), group=g),
        "all_gather_into_tensor": lambda g: dist.all_gather_into_tensor(x(n), x(), group=g),
        "reduce_scatter": lambda g: dist.reduce_scatter(x(), several(), group=g),
        "reduce_scatter_tensor": lambda g: dist.reduce_scatter_tensor(x(), x(n), group=g),
        "all_to_all": lambda g: dist.all_to_all(several(), several(), group=g),
        "all_to_all_single": lambda g: dist.all_to_all_single(x(n), x(n), group=g),
        "uneven": lambda g: dist.all_to_all_single(x(n), x(n), [4] * n, [4] * n, group=g),
        "gather": lambda g: dist.gather(x(), several() if me == 0 else None, 0, group=g),
        "scatter": lambda g: dist.scatter(x(), several() if me == 0 else None, 0, group=g),
        "coalesced": lambda g: dist.all_reduce_coalesced([x(), x()], group=g),
        "asynchronous": lambda g: dist.all_reduce(x(), group=g, async_op=True).wait(),
    }
    found = {
        name: (record.during(lambda c=call: c(view)), record.during(lambda c=call: c(None)))
        for name, call in calls.items()
    }
    alone: Any = dist.new_group(backend="cuda:nccl", device_id=me)
    found["barrier"] = (
        record.during(lambda: alone.using(max_ctas=2, profiler_tag=7).barrier()),
        record.during(alone.barrier),
    )
    return found


def algorithms() -> dict[str, str]:
    """What is said where an algorithm is wanted, and that the group is as good as before."""
    n = dist.get_world_size()
    whole = world()

    def said(attempt: Any) -> str:
        try:
            attempt()
        except dist.DistError as e:
            return f"{type(e).__name__}: {e}"
        return "done"

    def x(times: int = 1) -> Any:
        return arrays.full(2 * times, 1.0)

    ring, nvls = whole.using(algorithm="ring"), whole.using(algorithm="NVLS")
    unforced = ring.using(force_algorithm=False)
    found = {
        "ring": said(lambda: ring.all_reduce(x())),
        "nvls": said(lambda: nvls.all_reduce(x())),
        "messages": said(lambda: ring.all_to_all([x() for _ in range(n)], [x() for _ in range(n)])),
        "native": said(lambda: ring.all_to_all_single(x(n), x(n))),
        "uneven": said(lambda: ring.all_to_all_single(x(n), x(n), [2] * n, [2] * n)),
        "unforced": said(lambda: unforced.all_to_all_single(x(n), x(n), [2] * n, [2] * n)),
        "unforced native": said(lambda: unforced.all_to_all_single(x(n), x(n))),
    }
    y = x()
    whole.all_reduce(y)
    found["after"] = str(y.numpy().tolist())
    return found


def too_old() -> list[Any]:
    """What an NCCL without options for calls says, and what of a view is left."""
    whole = world()
    try:
        whole.using(max_ctas=4)
    except dist.DistArgumentError as e:
        said = str(e)
    x = arrays.full(2, 1.0)
    whole.using(timeout=20).all_reduce(x)
    return [said, x.numpy().tolist()]


# --- compression --------------------------------------------------------------------------------------------------


def _third(on_device: bool) -> Any:
    return arrays.full(100_000, 1 / 3, np.float32) if on_device else np.full(100_000, 1 / 3, np.float32)


def _average(group: Any, on_device: bool) -> float:
    x = _third(on_device)
    dist.all_reduce(x, op="AVG", group=group)
    return float((x.numpy() if on_device else x)[0])


def compression_with_nccl() -> dict[str, Any]:
    """Averages of 1/3 in a group that has gloo for host arrays and NCCL for device arrays; and refusals."""
    group: Any = dist.new_group(pg_options={"compression": "bfloat16"})
    view = world().using(compression="bfloat16")
    return {
        "group": [_average(group, False), _average(group, True)],
        "call": _average(view, False),
        "none": [_average(group.using(compression="none"), on) for on in (False, True)],
        "refused call": failure_of(lambda: _average(view, True)),
        "refused group": failure_of(
            lambda: dist.new_group(backend="cuda:nccl", pg_options={"compression": "int8"})
        ),
        "refused view": failure_of(lambda: _only_nccl().using(compression="int8")),
        "after": _average(None, True),
    }


def _only_nccl() -> Any:
    return dist.new_group(backend="cuda:nccl")


def compression_of_staged_arrays() -> list[float]:
    """Averages of 1/3 on the device, which go through host memory to gloo."""
    view = world().using(compression="bfloat16")
    return [_average(view, True), _average(None, True)]
