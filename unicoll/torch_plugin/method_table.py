"""A table that maps each collective of torch's process group to a unicoll method and its arguments.

Roots and ranks are ranks in the group, both in torch and in unicoll. The old names of renamed
methods of torch are in :data:`unicoll.torch_plugin.compat.OLD_NAMES`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from inspect import signature
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
    """The unicoll reduction for torch's ``ReduceOp``; DistTypeError if it is not supported."""
    kind = getattr(op, "op", op)
    found = _REDUCTIONS.get(kind)
    if found is not None:
        return found
    if kind == dist.ReduceOp.PREMUL_SUM:
        factor = op.__getstate__()[1]
        return ReduceOp.PREMUL_SUM(factor)
    raise DistTypeError(f"op: {op!r} is not a reduction that unicoll supports")


def one(tensors: Any) -> Any:
    """The single tensor of a list of length 1, or the tensor itself; DistArgumentError for another
    length."""
    if isinstance(tensors, list | tuple):
        if len(tensors) != 1:
            raise DistArgumentError(
                f"expected one tensor, or a list of one tensor, got a list of {len(tensors)}"
            )
        return tensors[0]
    return tensors


def _tensor_and_op(opts: Any, tensors: Any) -> tuple[Any, ...]:
    return one(tensors), reduction(opts.reduceOp)


def _output_input(opts: Any, output: Any, input: Any) -> tuple[Any, ...]:
    return output, input


def _output_input_op(opts: Any, output: Any, input: Any) -> tuple[Any, ...]:
    return output, input, reduction(opts.reduceOp)


class Row(NamedTuple):
    """One collective: the unicoll method, and functions that make torch's default options and take
    its arguments.

    ``convert`` returns the arguments of the unicoll method for torch's options and arguments,
    ``outputs`` the output tensors.
    """

    method: str
    options: Callable[[], Any]
    convert: Callable[..., tuple[Any, ...]]
    outputs: Callable[..., Tensors]

    @property
    def arity(self) -> int:
        """Number of torch's arguments before the options."""
        return len(signature(self.convert).parameters) - 1


def _first(*arguments: Any) -> Tensors:
    return arguments[0] if isinstance(arguments[0], list | tuple) else [arguments[0]]


def _flat(*arguments: Any) -> Tensors:
    return [tensor for tensors in arguments[0] for tensor in tensors]


def _no_outputs(*arguments: Any) -> Tensors:
    return []


def _by_input(outputs: Sequence[Tensors], inputs: Tensors) -> list[list[Any]]:
    """Outputs of several gathers by input, as unicoll takes them; torch orders them by rank."""
    return [[by_rank[k] for by_rank in outputs] for k in range(len(inputs))]


ROWS: dict[str, Row] = {
    "barrier": Row("barrier", c10d.BarrierOptions, lambda o: (), _no_outputs),
    "broadcast": Row("broadcast", c10d.BroadcastOptions, lambda o, x: (one(x), o.rootRank), _first),
    "allreduce": Row("all_reduce", c10d.AllreduceOptions, _tensor_and_op, _first),
    "allreduce_coalesced": Row(
        "all_reduce_coalesced",
        c10d.AllreduceCoalescedOptions,
        lambda o, xs: (xs, reduction(o.reduceOp)),
        _first,
    ),
    "reduce": Row(
        "reduce",
        c10d.ReduceOptions,
        lambda o, x: (one(x), o.rootRank, reduction(o.reduceOp)),
        _first,
    ),
    "allgather": Row(
        "all_gather", c10d.AllgatherOptions, lambda o, outs, x: (one(outs), one(x)), _flat
    ),
    "allgather_coalesced": Row(
        "all_gather_coalesced",
        c10d.AllgatherOptions,
        lambda o, outs, xs: (_by_input(outs, xs), xs),
        _flat,
    ),
    "all_gather_single": Row(
        "all_gather_into_tensor", c10d.AllgatherOptions, _output_input, _first
    ),
    "all_gather_single_coalesced": Row(
        "all_gather_into_tensor_coalesced", c10d.AllgatherOptions, _output_input, _first
    ),
    "gather": Row(
        "gather",
        c10d.GatherOptions,
        lambda o, outs, x: (one(x), outs[0] if outs else None, o.rootRank),
        _flat,
    ),
    "scatter": Row(
        "scatter",
        c10d.ScatterOptions,
        lambda o, out, xs: (one(out), xs[0] if xs else None, o.rootRank),
        _first,
    ),
    "reduce_scatter": Row(
        "reduce_scatter",
        c10d.ReduceScatterOptions,
        lambda o, out, xs: (one(out), one(xs), reduction(o.reduceOp)),
        _first,
    ),
    "reduce_scatter_single": Row(
        "reduce_scatter_tensor", c10d.ReduceScatterOptions, _output_input_op, _first
    ),
    "reduce_scatter_single_coalesced": Row(
        "reduce_scatter_tensor_coalesced", c10d.ReduceScatterOptions, _output_input_op, _first
    ),
    "alltoall": Row("all_to_all", c10d.AllToAllOptions, _output_input, _first),
    "all_to_all_single": Row(
        "all_to_all_single",
        c10d.AllToAllOptions,
        lambda o, out, x, outs, ins: (out, x, outs, ins),
        _first,
    ),
}
