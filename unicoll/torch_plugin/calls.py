"""The table: for each collective of torch's process group the method of ours, and how its arguments get there.

Roots and ranks that torch passes are ranks in the group, as ours. Methods that torch has renamed have their old names
in :data:`unicoll.torch_plugin.compat.OLD_NAMES`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from unicoll.errors import DistArgumentError, DistTypeError
from unicoll.types import ReduceOp, Reduction

__all__ = ["ROWS", "Row", "one", "reduction"]

Tensors = Sequence[Any]

_REDUCTIONS: dict[Any, Reduction] = {
    getattr(dist.ReduceOp, name): getattr(ReduceOp, name)
    for name in ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")
}


def reduction(op: Any) -> Reduction:
    """Our reduction for torch's ``ReduceOp``.

    Raises:
        DistTypeError: there is none.
    """
    kind = getattr(op, "op", op)
    found = _REDUCTIONS.get(kind)
    if found is not None:
        return found
    if kind == dist.ReduceOp.PREMUL_SUM:
        factor = op.__getstate__()[1]
        return ReduceOp.PREMUL_SUM(factor)
    raise DistTypeError(f"op: {op!r} is no reduction that unicoll knows")


def one(tensors: Any) -> Any:
    """The tensor of a list of one, which is how torch passes it."""
    if isinstance(tensors, list | tuple):
        if len(tensors) != 1:
            raise DistArgumentError(f"expected one tensor, or a list of one, got a list of {len(tensors)}")
        return tensors[0]
    return tensors


def _listed(opts: Any, tensors: Any) -> tuple[Any, ...]:
    return (one(tensors), reduction(opts.reduceOp))


class Row(NamedTuple):
    """One collective.

    Attributes:
        ours: name of our method.
        arity: number of torch's arguments before the options.
        options: what stands for options that were not given.
        take: (options, torch's arguments) to the arguments of ours.
        outputs: torch's arguments to the tensors that are written.
    """

    ours: str
    arity: int
    options: Callable[[], Any]
    take: Callable[..., tuple[Any, ...]]
    outputs: Callable[..., Tensors]


def _first(*arguments: Any) -> Tensors:
    return arguments[0] if isinstance(arguments[0], list | tuple) else [arguments[0]]


def _flat(*arguments: Any) -> Tensors:
    return [tensor for tensors in arguments[0] for tensor in tensors]


def _nothing(*arguments: Any) -> Tensors:
    return []


def _by_input(outputs: Sequence[Tensors], inputs: Tensors) -> list[list[Any]]:
    """torch lists the outputs of several gathers by rank, ours by input."""
    return [[of_rank[k] for of_rank in outputs] for k in range(len(inputs))]


ROWS: dict[str, Row] = {
    "barrier": Row("barrier", 0, c10d.BarrierOptions, lambda o: (), _nothing),
    "broadcast": Row("broadcast", 1, c10d.BroadcastOptions, lambda o, x: (one(x), o.rootRank), _first),
    "allreduce": Row("all_reduce", 1, c10d.AllreduceOptions, _listed, _first),
    "allreduce_coalesced": Row(
        "all_reduce_coalesced", 1, c10d.AllreduceCoalescedOptions,
        lambda o, xs: (xs, reduction(o.reduceOp)), _first,
    ),
    "reduce": Row(
        "reduce", 1, c10d.ReduceOptions, lambda o, x: (one(x), o.rootRank, reduction(o.reduceOp)), _first,
    ),
    "allgather": Row(
        "all_gather", 2, c10d.AllgatherOptions, lambda o, outs, x: (one(outs), one(x)), _flat,
    ),
    "allgather_coalesced": Row(
        "all_gather_coalesced", 2, c10d.AllgatherOptions, lambda o, outs, xs: (_by_input(outs, xs), xs), _flat,
    ),
    "all_gather_single": Row(
        "all_gather_into_tensor", 2, c10d.AllgatherOptions, lambda o, out, x: (out, x), _first,
    ),
    "all_gather_single_coalesced": Row(
        "all_gather_into_tensor_coalesced", 2, c10d.AllgatherOptions, lambda o, outs, xs: (outs, xs), _first,
    ),
    "gather": Row(
        "gather", 2, c10d.GatherOptions,
        lambda o, outs, x: (one(x), outs[0] if outs else None, o.rootRank), _flat,
    ),
    "scatter": Row(
        "scatter", 2, c10d.ScatterOptions,
        lambda o, out, xs: (one(out), xs[0] if xs else None, o.rootRank), _first,
    ),
    "reduce_scatter": Row(
        "reduce_scatter", 2, c10d.ReduceScatterOptions,
        lambda o, out, xs: (one(out), one(xs), reduction(o.reduceOp)), _first,
    ),
    "reduce_scatter_single": Row(
        "reduce_scatter_tensor", 2, c10d.ReduceScatterOptions,
        lambda o, out, x: (out, x, reduction(o.reduceOp)), _first,
    ),
    "reduce_scatter_single_coalesced": Row(
        "reduce_scatter_tensor_coalesced", 2, c10d.ReduceScatterOptions,
        lambda o, outs, xs: (outs, xs, reduction(o.reduceOp)), _first,
    ),
    "alltoall": Row("all_to_all", 2, c10d.AllToAllOptions, lambda o, outs, xs: (outs, xs), _first),
    "all_to_all_single": Row(
        "all_to_all_single", 4, c10d.AllToAllOptions,
        lambda o, out, x, outs, ins: (out, x, outs, ins), _first,
    ),
}  # fmt: skip
