"""A table that maps each collective of torch's process group to a unicoll method and its arguments.

Roots and ranks are ranks in the group, both in torch and in unicoll. The old names of renamed methods of torch are in
:data:`unicoll.torch_plugin.compat.OLD_NAMES`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from unicoll.arrays.types import ReduceOp, Reduction
from unicoll.errors import DistArgumentError, DistTypeError

Tensors = Sequence[Any]

_REDUCTIONS: dict[Any, Reduction] = {
    getattr(dist.ReduceOp, name): getattr(ReduceOp, name)
    for name in ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")
}


def reduction(op: Any) -> Reduction:
    """The unicoll reduction for torch's ``ReduceOp``.

    Raises:
        DistTypeError: the reduction is not supported.
    """
    kind = getattr(op, "op", op)
    found = _REDUCTIONS.get(kind)
    if found is not None:
        return found
    if kind == dist.ReduceOp.PREMUL_SUM:
        factor = op.__getstate__()[1]
        return ReduceOp.PREMUL_SUM(factor)
    raise DistTypeError(f"op: {op!r} is not a reduction that unicoll supports")


def one(tensors: Any) -> Any:
    """The single tensor of a list of length 1, or the tensor itself.

    Raises:
        DistArgumentError: the list has another length.
    """
    if isinstance(tensors, list | tuple):
        if len(tensors) != 1:
            raise DistArgumentError(
                f"expected one tensor, or a list of one tensor, got a list of {len(tensors)}"
            )
        return tensors[0]
    return tensors


def _tensor_and_op(opts: Any, tensors: Any) -> tuple[Any, ...]:
    return (one(tensors), reduction(opts.reduceOp))


class TorchCollective(NamedTuple):
    """One collective.

    Attributes:
        method: name of the unicoll method.
        arity: number of torch's arguments before the options.
        options: makes the default options.
        convert: converts (options, torch's arguments) to the arguments of the unicoll method.
        outputs: takes torch's arguments, returns the output tensors.
    """

    method: str
    arity: int
    options: Callable[[], Any]
    convert: Callable[..., tuple[Any, ...]]
    outputs: Callable[..., Tensors]


def _first(*arguments: Any) -> Tensors:
    return arguments[0] if isinstance(arguments[0], list | tuple) else [arguments[0]]


def _flat(*arguments: Any) -> Tensors:
    return [tensor for tensors in arguments[0] for tensor in tensors]


def _no_outputs(*arguments: Any) -> Tensors:
    return []


def _by_input(outputs: Sequence[Tensors], inputs: Tensors) -> list[list[Any]]:
    """Outputs of several gathers by input, as unicoll takes them; torch orders them by rank."""
    return [[by_rank[k] for by_rank in outputs] for k in range(len(inputs))]


ROWS: dict[str, TorchCollective] = {
    "barrier": TorchCollective("barrier", 0, c10d.BarrierOptions, lambda o: (), _no_outputs),
    "broadcast": TorchCollective(
        "broadcast", 1, c10d.BroadcastOptions, lambda o, x: (one(x), o.rootRank), _first
    ),
    "allreduce": TorchCollective("all_reduce", 1, c10d.AllreduceOptions, _tensor_and_op, _first),
    "allreduce_coalesced": TorchCollective(
        "all_reduce_coalesced",
        1,
        c10d.AllreduceCoalescedOptions,
        lambda o, xs: (xs, reduction(o.reduceOp)),
        _first,
    ),
    "reduce": TorchCollective(
        "reduce",
        1,
        c10d.ReduceOptions,
        lambda o, x: (one(x), o.rootRank, reduction(o.reduceOp)),
        _first,
    ),
    "allgather": TorchCollective(
        "all_gather",
        2,
        c10d.AllgatherOptions,
        lambda o, outs, x: (one(outs), one(x)),
        _flat,
    ),
    "allgather_coalesced": TorchCollective(
        "all_gather_coalesced",
        2,
        c10d.AllgatherOptions,
        lambda o, outs, xs: (_by_input(outs, xs), xs),
        _flat,
    ),
    "all_gather_single": TorchCollective(
        "all_gather_into_tensor",
        2,
        c10d.AllgatherOptions,
        lambda o, out, x: (out, x),
        _first,
    ),
    "all_gather_single_coalesced": TorchCollective(
        "all_gather_into_tensor_coalesced",
        2,
        c10d.AllgatherOptions,
        lambda o, outs, xs: (outs, xs),
        _first,
    ),
    "gather": TorchCollective(
        "gather",
        2,
        c10d.GatherOptions,
        lambda o, outs, x: (one(x), outs[0] if outs else None, o.rootRank),
        _flat,
    ),
    "scatter": TorchCollective(
        "scatter",
        2,
        c10d.ScatterOptions,
        lambda o, out, xs: (one(out), xs[0] if xs else None, o.rootRank),
        _first,
    ),
    "reduce_scatter": TorchCollective(
        "reduce_scatter",
        2,
        c10d.ReduceScatterOptions,
        lambda o, out, xs: (one(out), one(xs), reduction(o.reduceOp)),
        _first,
    ),
    "reduce_scatter_single": TorchCollective(
        "reduce_scatter_tensor",
        2,
        c10d.ReduceScatterOptions,
        lambda o, out, x: (out, x, reduction(o.reduceOp)),
        _first,
    ),
    "reduce_scatter_single_coalesced": TorchCollective(
        "reduce_scatter_tensor_coalesced",
        2,
        c10d.ReduceScatterOptions,
        lambda o, outs, xs: (outs, xs, reduction(o.reduceOp)),
        _first,
    ),
    "alltoall": TorchCollective(
        "all_to_all", 2, c10d.AllToAllOptions, lambda o, outs, xs: (outs, xs), _first
    ),
    "all_to_all_single": TorchCollective(
        "all_to_all_single",
        4,
        c10d.AllToAllOptions,
        lambda o, out, x, outs, ins: (out, x, outs, ins),
        _first,
    ),
}
