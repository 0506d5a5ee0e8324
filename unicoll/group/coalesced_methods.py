"""Methods of :class:`~unicoll.group.process_group.ProcessGroup`: a collective of several arrays as one operation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from unicoll.arrays.types import ReduceOp
from unicoll.backend.ops import OPS
from unicoll.group.arguments import buffers_of, pairs_of, same_length
from unicoll.net.timeouts import Timeout

if TYPE_CHECKING:
    from unicoll.backend.work import Work
    from unicoll.group.process_group import ProcessGroup


def all_reduce_coalesced(
    self: ProcessGroup,
    tensors: Sequence[Any],
    op: Any = ReduceOp.SUM,
    *,
    async_op: bool = False,
    timeout: Timeout = None,
) -> Work | None:
    """:meth:`all_reduce` of each array, as one operation."""
    arrays = [(b,) for b in buffers_of("all_reduce_coalesced: tensors", tensors)]
    pairs = [(array, array) for array in arrays]
    return self._dispatcher.start_batch(self._settings, OPS["all_reduce"], pairs, async_op, timeout, op)


def broadcast_coalesced(
    self: ProcessGroup, tensors: Sequence[Any], src: int, *, async_op: bool = False, timeout: Timeout = None
) -> Work | None:
    """:meth:`broadcast` of each array, as one operation."""
    buffers = buffers_of("broadcast_coalesced: tensors", tensors)
    pairs = [((b,), () if src == self._context.rank else (b,)) for b in buffers]
    return self._dispatcher.start_batch(self._settings, OPS["broadcast"], pairs, async_op, timeout, root=src)


def all_gather_coalesced(
    self: ProcessGroup,
    output_lists: Sequence[Sequence[Any]],
    inputs: Sequence[Any],
    *,
    async_op: bool = False,
    timeout: Timeout = None,
) -> Work | None:
    """:meth:`all_gather` of ``inputs[k]`` into ``output_lists[k]`` for each k, as one operation."""
    same_length("all_gather_coalesced: output_lists", output_lists, inputs)
    what = "all_gather_coalesced: output_lists"
    sources = buffers_of("all_gather_coalesced: inputs", inputs)
    pairs = [((x,), buffers_of(what, outs)) for outs, x in zip(output_lists, sources, strict=True)]
    return self._dispatcher.start_batch(self._settings, OPS["all_gather"], pairs, async_op, timeout)


def all_gather_into_tensor_coalesced(
    self: ProcessGroup,
    outputs: Sequence[Any],
    inputs: Sequence[Any],
    *,
    async_op: bool = False,
    timeout: Timeout = None,
) -> Work | None:
    """:meth:`all_gather_into_tensor` of each pair, as one operation."""
    return self._dispatcher.start_batch(
        self._settings,
        OPS["all_gather_into_tensor"],
        pairs_of("all_gather_into_tensor_coalesced", outputs, inputs),
        async_op,
        timeout,
    )


def reduce_scatter_tensor_coalesced(
    self: ProcessGroup,
    outputs: Sequence[Any],
    inputs: Sequence[Any],
    op: Any = ReduceOp.SUM,
    *,
    async_op: bool = False,
    timeout: Timeout = None,
) -> Work | None:
    """:meth:`reduce_scatter_tensor` of each pair, as one operation."""
    return self._dispatcher.start_batch(
        self._settings,
        OPS["reduce_scatter_tensor"],
        pairs_of("reduce_scatter_tensor_coalesced", outputs, inputs),
        async_op,
        timeout,
        op,
    )
