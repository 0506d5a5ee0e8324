"""Collectives of several arrays as one operation, with torch.distributed's names and arguments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from unicoll.api import world
from unicoll.api.arguments import Array, documented, rank_in_group, refuse
from unicoll.arrays.types import ReduceOp
from unicoll.net.timeouts import Timeout

if TYPE_CHECKING:
    from unicoll.backend.work import Work
    from unicoll.group.process_group import ProcessGroup


@documented("all_reduce")
def all_reduce_coalesced(
    tensors: Sequence[Array],
    op: Any = ReduceOp.SUM,
    group: ProcessGroup | None = None,
    async_op: bool = False,
    *,
    timeout: Timeout = None,
) -> Work | None:
    """:func:`all_reduce` of several arrays as one operation, in place.

    Args:
        tensors: arrays of one element type; their number and shapes are equal on all ranks.
        op: a :class:`~unicoll.arrays.types.ReduceOp`.
    """
    pg = world.resolve(group)
    if pg is None:
        return None
    return pg.all_reduce_coalesced(tensors, op=op, async_op=async_op, timeout=timeout)


@documented("broadcast")
def broadcast_coalesced(
    tensors: Sequence[Array],
    src: int | None = None,
    group: ProcessGroup | None = None,
    async_op: bool = False,
    group_src: int | None = None,
    *,
    timeout: Timeout = None,
) -> Work | None:
    """:func:`broadcast` of several arrays as one operation.

    Args:
        tensors: arrays of one element type; their number and shapes are equal on all ranks.
        src: the source's global rank.
        group_src: the source's rank in the group; give this or ``src``.
    """
    pg = world.resolve(group)
    if pg is None:
        return None
    root = rank_in_group(pg, "broadcast_coalesced", "src", src, group_src)
    return pg.broadcast_coalesced(tensors, src=root, async_op=async_op, timeout=timeout)


@documented("all_gather")
def all_gather_coalesced(
    output_tensor_lists: Sequence[Sequence[Array]],
    input_tensor_list: Sequence[Array],
    group: ProcessGroup | None = None,
    async_op: bool = False,
    *,
    timeout: Timeout = None,
) -> Work | None:
    """:func:`all_gather` of several arrays as one operation.

    Args:
        output_tensor_lists: for each rank in group order a list of outputs, shaped as that rank's inputs.
        input_tensor_list: this rank's inputs; their number is equal on all ranks.
    """
    pg = world.resolve(group)
    if pg is None:
        return None
    by_input = _by_input(pg, output_tensor_lists, input_tensor_list)
    return pg.all_gather_coalesced(by_input, input_tensor_list, async_op=async_op, timeout=timeout)


def _by_input(
    pg: ProcessGroup, output_lists: Sequence[Sequence[Array]], inputs: Sequence[Array]
) -> list[list[Array]]:
    """torch's lists, one per rank, as the group's method takes them: one per input."""
    if len(output_lists) != len(pg.ranks) or any(len(outputs) != len(inputs) for outputs in output_lists):
        refuse(
            pg,
            "all_gather_coalesced",
            f"output_tensor_lists must be {len(pg.ranks)} lists (one per rank) of {len(inputs)} arrays "
            f"(one per input), got lists of {[len(each) for each in output_lists]}",
        )
    return [list(outputs) for outputs in zip(*output_lists, strict=True)]


@documented("all_gather_into_tensor")
def all_gather_into_tensor_coalesced(
    output_tensors: Sequence[Array],
    input_tensors: Sequence[Array],
    group: ProcessGroup | None = None,
    async_op: bool = False,
    *,
    timeout: Timeout = None,
) -> Work | None:
    """:func:`all_gather_into_tensor` of several arrays as one operation.

    Args:
        output_tensors: outputs, each of world size times the elements of its input.
        input_tensors: this rank's inputs; their number and shapes are equal on all ranks.
    """
    pg = world.resolve(group)
    if pg is None:
        return None
    return pg.all_gather_into_tensor_coalesced(
        output_tensors, input_tensors, async_op=async_op, timeout=timeout
    )


@documented("reduce_scatter_tensor")
def reduce_scatter_tensor_coalesced(
    outputs: Sequence[Array],
    inputs: Sequence[Array],
    op: Any = ReduceOp.SUM,
    group: ProcessGroup | None = None,
    async_op: bool = False,
    *,
    timeout: Timeout = None,
) -> Work | None:
    """:func:`reduce_scatter_tensor` of several arrays as one operation.

    Args:
        outputs: this rank's outputs; their number and shapes are equal on all ranks.
        inputs: inputs, each of world size times the elements of its output.
        op: a :class:`~unicoll.arrays.types.ReduceOp`.
    """
    pg = world.resolve(group)
    if pg is None:
        return None
    return pg.reduce_scatter_tensor_coalesced(outputs, inputs, op=op, async_op=async_op, timeout=timeout)
