"""The collectives, with torch.distributed's names, argument names, order and defaults.

Each function resolves its group and calls the group's method of the same name; roots given as
global ranks become ranks in the group. "Array" is a NumPy, CuPy or torch array. All ranks of the
group make the same call, in the same order as their other calls on this group, with arrays of the
same element type.

Reductions take bool, integers of 8 to 64 bits, float16, bfloat16, float32, float64, complex64 and
complex128 (which operation takes which, its error says), and over NCCL float8_e4m3fn and
float8_e5m2. All other operations take these and any type of torch and ml_dtypes whose elements have
a byte or more for themselves: other float8 and smaller numbers, integers of 1 to 7 bits, torch's
bits, quantized types and complex32. Their bytes are moved.

Inputs that overlap outputs are read first: they are copied, unless a rank's own part of the data is
where the result has it. (The input of an all_gather may be the rank's own output, or its part of
``output_tensor``; the output of a reduce_scatter or scatter its own input; and so on.) Outputs that
overlap each other are refused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from unicoll.api import world
from unicoll.api.ranks import rank_in_group, refuse, root_or_zero
from unicoll.arrays.types import ReduceOp
from unicoll.calls.ops import OPS
from unicoll.process.timeouts import Timeout

if TYPE_CHECKING:
    from unicoll.calls.work import Work
    from unicoll.group.process_group import ProcessGroup

Array = Any
Function = TypeVar("Function", bound=Callable[..., Any])

_COMMON = """
    Common to all collectives:
        group: the process group; None means the default one. A process outside the group gets a warning and
            None, and no data moves.
        async_op: return at once with a :class:`~unicoll.calls.work.Work`; its arrays must not be used until
            ``work.wait()`` has returned.
        timeout: how long the operation may take (timedelta, or seconds); None takes the group's.

    Returns:
        The Work if ``async_op``, else None.

    Raises:
        DistArgumentError, DistTypeError: a bad argument; no data has moved and the group stays usable. An error in the
            list of a gather or scatter, which only the root passes, is raised on the other ranks, too.
        CollectiveMismatchError: the ranks called different operations, or one with other shapes, element
            types, reductions or roots; raised on all of them.
        OperationTimeoutError: time is up; says which ranks arrived and which did not.
        RankLostError: a member of the group died; names rank, host and pid.
        NotInitializedError: there is no default group.
"""


def documented(row: str) -> Callable[[Function], Function]:
    """Decorator: append what all collectives share, and MPI's counterpart of a row of the table, to
    the docstring."""
    more = f"{_COMMON}\n    MPI's counterpart: {OPS[row].mpi}.\n"

    def complete(function: Function) -> Function:
        if function.__doc__:
            function.__doc__ = function.__doc__.rstrip() + "\n" + more
        return function

    return complete


@documented("broadcast")
def broadcast(
    tensor: Array,
    src: int | None = None,
    group: ProcessGroup | None = None,
    async_op: bool = False,
    group_src: int | None = None,
    *,
    timeout: Timeout = None,
) -> Work | None:
    """Copy ``tensor`` from one rank to all others.

    Args:
        tensor: array of any shape, equal on all ranks; input on the source, output elsewhere.
        src: the source's global rank.
        group_src: the source's rank in the group; give this or ``src``.
    """
    # Each function has this handler in its own body (world.interrupted has the reasons). True gives
    # the group's view whose calls have the caller of this function as call site.
    try:
        pg = world.resolve(group, True)
        if pg is None:
            return None
        root = rank_in_group(pg, "broadcast", "src", src, group_src)
        return pg.broadcast(tensor, src=root, async_op=async_op, timeout=timeout)
    except BaseException as e:
        world.interrupted(group, e)
        raise


@documented("all_reduce")
def all_reduce(
    tensor: Array,
    op: Any = ReduceOp.SUM,
    group: ProcessGroup | None = None,
    async_op: bool = False,
    *,
    timeout: Timeout = None,
) -> Work | None:
    """Reduce ``tensor`` element by element over all ranks, in place; every rank gets the same bits.

    Args:
        tensor: array of any shape, equal on all ranks; input and output.
        op: a :class:`~unicoll.arrays.types.ReduceOp`. Half-precision floats are accumulated in
            float32.
    """
    try:
        pg = world.resolve(group, True)
        if pg is None:
            return None
        return pg.all_reduce(tensor, op=op, async_op=async_op, timeout=timeout)
    except BaseException as e:
        world.interrupted(group, e)
        raise


@documented("reduce")
def reduce(
    tensor: Array,
    dst: int | None = None,
    op: Any = ReduceOp.SUM,
    group: ProcessGroup | None = None,
    async_op: bool = False,
    group_dst: int | None = None,
    *,
    timeout: Timeout = None,
) -> Work | None:
    """Reduce ``tensor`` element by element over all ranks into the ``tensor`` of one of them.

    Args:
        tensor: array of any shape, equal on all ranks; input everywhere, output on the destination.
        dst: the destination's global rank.
        op: a :class:`~unicoll.arrays.types.ReduceOp`.
        group_dst: the destination's rank in the group; give this or ``dst``.
    """
    try:
        pg = world.resolve(group, True)
        if pg is None:
            return None
        root = rank_in_group(pg, "reduce", "dst", dst, group_dst)
        return pg.reduce(tensor, dst=root, op=op, async_op=async_op, timeout=timeout)
    except BaseException as e:
        world.interrupted(group, e)
        raise


@documented("all_gather")
def all_gather(
    tensor_list: Sequence[Array],
    tensor: Array,
    group: ProcessGroup | None = None,
    async_op: bool = False,
    *,
    timeout: Timeout = None,
) -> Work | None:
    """Collect every rank's ``tensor`` on all ranks.

    Args:
        tensor_list: outputs, one array per rank in group order. They may differ in size from rank
            to rank, as long as entry i has as many elements as rank i's ``tensor``, on all ranks
            alike.
        tensor: this rank's input, of any shape.
    """
    try:
        pg = world.resolve(group, True)
        if pg is None:
            return None
        return pg.all_gather(tensor_list, tensor, async_op=async_op, timeout=timeout)
    except BaseException as e:
        world.interrupted(group, e)
        raise


@documented("all_gather_into_tensor")
def all_gather_into_tensor(
    output_tensor: Array,
    input_tensor: Array,
    group: ProcessGroup | None = None,
    async_op: bool = False,
    *,
    timeout: Timeout = None,
) -> Work | None:
    """Collect every rank's ``input_tensor`` in one array on all ranks, in group order.

    Args:
        output_tensor: output of n (ranks) times the input's elements: concatenated (``(n * d0, d1,
            ...)``) or stacked (``(n, d0, d1, ...)``), which have the same layout in memory.
        input_tensor: this rank's input ``(d0, d1, ...)``, of equal shape on all ranks.
    """
    try:
        pg = world.resolve(group, True)
        if pg is None:
            return None
        return pg.all_gather_into_tensor(
            output_tensor, input_tensor, async_op=async_op, timeout=timeout
        )
    except BaseException as e:
        world.interrupted(group, e)
        raise


@documented("gather")
def gather(
    tensor: Array,
    gather_list: Sequence[Array] | None = None,
    dst: int | None = None,
    group: ProcessGroup | None = None,
    async_op: bool = False,
    group_dst: int | None = None,
    *,
    timeout: Timeout = None,
) -> Work | None:
    """Collect every rank's ``tensor`` on one rank.

    Args:
        tensor: this rank's input; sizes may differ between ranks.
        gather_list: on the destination, outputs in group order, of which output i has as many
            elements as rank i's ``tensor``; elsewhere None.
        dst: the destination's global rank; 0 when neither it nor ``group_dst`` is given.
        group_dst: the destination's rank in the group.
    """
    try:
        pg = world.resolve(group, True)
        if pg is None:
            return None
        root = rank_in_group(pg, "gather", "dst", *root_or_zero(dst, group_dst))
        return pg.gather(tensor, gather_list, dst=root, async_op=async_op, timeout=timeout)
    except BaseException as e:
        world.interrupted(group, e)
        raise


@documented("scatter")
def scatter(
    tensor: Array,
    scatter_list: Sequence[Array] | None = None,
    src: int | None = None,
    group: ProcessGroup | None = None,
    async_op: bool = False,
    group_src: int | None = None,
    *,
    timeout: Timeout = None,
) -> Work | None:
    """Give each rank its entry of one rank's list.

    Args:
        tensor: this rank's output; sizes may differ between ranks.
        scatter_list: on the source, inputs in group order, of which input i has as many elements as
            rank i's ``tensor``; elsewhere None.
        src: the source's global rank; 0 when neither it nor ``group_src`` is given.
        group_src: the source's rank in the group.
    """
    try:
        pg = world.resolve(group, True)
        if pg is None:
            return None
        root = rank_in_group(pg, "scatter", "src", *root_or_zero(src, group_src))
        return pg.scatter(tensor, scatter_list, src=root, async_op=async_op, timeout=timeout)
    except BaseException as e:
        world.interrupted(group, e)
        raise


@documented("reduce_scatter")
def reduce_scatter(
    output: Array,
    input_list: Sequence[Array],
    op: Any = ReduceOp.SUM,
    group: ProcessGroup | None = None,
    async_op: bool = False,
    *,
    timeout: Timeout = None,
) -> Work | None:
    """Reduce every entry of a list over all ranks; rank i gets entry i.

    Args:
        output: this rank's output, as large as its entry of ``input_list``.
        input_list: one input per rank in group order. They may differ in size from rank to rank, as
            long as entry i has the same size on all ranks.
        op: a :class:`~unicoll.arrays.types.ReduceOp`.
    """
    try:
        pg = world.resolve(group, True)
        if pg is None:
            return None
        return pg.reduce_scatter(output, input_list, op=op, async_op=async_op, timeout=timeout)
    except BaseException as e:
        world.interrupted(group, e)
        raise


@documented("reduce_scatter_tensor")
def reduce_scatter_tensor(
    output: Array,
    input: Array,
    op: Any = ReduceOp.SUM,
    group: ProcessGroup | None = None,
    async_op: bool = False,
    *,
    timeout: Timeout = None,
) -> Work | None:
    """Reduce ``input`` over all ranks; rank i gets its i-th part.

    Args:
        output: this rank's output, of equal shape on all ranks.
        input: world size times the output's elements: the parts concatenated or stacked, in group
            order.
        op: a :class:`~unicoll.arrays.types.ReduceOp`.
    """
    try:
        pg = world.resolve(group, True)
        if pg is None:
            return None
        return pg.reduce_scatter_tensor(output, input, op=op, async_op=async_op, timeout=timeout)
    except BaseException as e:
        world.interrupted(group, e)
        raise


@documented("all_to_all")
def all_to_all(
    output_tensor_list: Sequence[Array],
    input_tensor_list: Sequence[Array],
    group: ProcessGroup | None = None,
    async_op: bool = False,
    *,
    timeout: Timeout = None,
) -> Work | None:
    """Send entry j of the inputs to rank j; entry i of the outputs comes from rank i.

    Args:
        output_tensor_list: outputs, one per rank in group order; entry i is as large as what rank i
            sends here.
        input_tensor_list: inputs, one per rank in group order, of any sizes.
    """
    try:
        pg = world.resolve(group, True)
        if pg is None:
            return None
        return pg.all_to_all(
            output_tensor_list, input_tensor_list, async_op=async_op, timeout=timeout
        )
    except BaseException as e:
        world.interrupted(group, e)
        raise


@documented("all_to_all_single")
def all_to_all_single(
    output: Array,
    input: Array,
    output_split_sizes: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None,
    group: ProcessGroup | None = None,
    async_op: bool = False,
    *,
    timeout: Timeout = None,
) -> Work | None:
    """Cut ``input`` along dimension 0, send part j to rank j, and join what arrives in ``output``.

    Args:
        output: output; the part from rank i follows that from rank i - 1 along dimension 0.
        input: input.
        output_split_sizes: rows that come from each rank; their sum is the output's dimension 0.
            None for equal parts.
        input_split_sizes: rows that go to each rank; their sum is the input's dimension 0. None for
            equal parts. On NCCL, which compares nothing, all ranks give sizes or none does.
    """
    try:
        pg = world.resolve(group, True)
        if pg is None:
            return None
        return pg.all_to_all_single(
            output,
            input,
            output_split_sizes=output_split_sizes,
            input_split_sizes=input_split_sizes,
            async_op=async_op,
            timeout=timeout,
        )
    except BaseException as e:
        world.interrupted(group, e)
        raise


@documented("scan")
def scan(
    tensor: Array,
    op: Any = ReduceOp.SUM,
    group: ProcessGroup | None = None,
    async_op: bool = False,
    *,
    timeout: Timeout = None,
) -> Work | None:
    """Reduce ``tensor`` element by element over this rank and all ranks before it, in place.

    Args:
        tensor: array of any shape, equal on all ranks; input and output.
        op: a :class:`~unicoll.arrays.types.ReduceOp`. Not AVG and PREMUL_SUM, which MPI_Scan lacks:
            DistTypeError.
    """
    try:
        pg = world.resolve(group, True)
        if pg is None:
            return None
        return pg.scan(tensor, op=op, async_op=async_op, timeout=timeout)
    except BaseException as e:
        world.interrupted(group, e)
        raise


@documented("exscan")
def exscan(
    tensor: Array,
    op: Any = ReduceOp.SUM,
    group: ProcessGroup | None = None,
    async_op: bool = False,
    *,
    timeout: Timeout = None,
) -> Work | None:
    """Reduce ``tensor`` element by element over the ranks before this one, in place; rank 0 keeps
    its own.

    Args:
        tensor: array of any shape, equal on all ranks; input and output.
        op: a :class:`~unicoll.arrays.types.ReduceOp`. Not AVG and PREMUL_SUM, which MPI_Exscan
            lacks: DistTypeError.
    """
    try:
        pg = world.resolve(group, True)
        if pg is None:
            return None
        return pg.exscan(tensor, op=op, async_op=async_op, timeout=timeout)
    except BaseException as e:
        world.interrupted(group, e)
        raise


@documented("barrier")
def barrier(
    group: ProcessGroup | None = None,
    async_op: bool = False,
    device_ids: Sequence[int] | None = None,
    timeout: Timeout = None,
) -> Work | None:
    """Return when every rank has called it.

    Args:
        device_ids: accepted because torch.distributed has it; the group knows its devices.
    """
    try:
        pg = world.resolve(group)
        if pg is None:
            return None
        return pg.barrier(async_op=async_op, timeout=timeout)
    except BaseException as e:
        world.interrupted(group, e)
        raise


def monitored_barrier(
    group: ProcessGroup | None = None, timeout: Timeout = None, wait_all_ranks: bool = False
) -> None:
    """A blocking barrier whose timeout error names the missing ranks.

    Args:
        group: the process group; None means the default one.
        timeout: how long to wait (timedelta, or seconds); None takes the group's.
        wait_all_ranks: wait the whole time and name all missing ranks, not the first one only.

    Raises:
        OperationTimeoutError: on every rank that arrived; names the missing ranks.
        RankLostError: a member of the group died.
        NotInitializedError: there is no default group.
    """
    try:
        pg = world.resolve(group)
        if pg is not None:
            pg.monitored_barrier(timeout=timeout, wait_all_ranks=wait_all_ranks)
    except BaseException as e:
        world.interrupted(group, e)
        raise


# --- several arrays as one operation --------------------------------------------------------------


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
    try:
        pg = world.resolve(group)
        if pg is None:
            return None
        return pg.all_reduce_coalesced(tensors, op=op, async_op=async_op, timeout=timeout)
    except BaseException as e:
        world.interrupted(group, e)
        raise


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
    try:
        pg = world.resolve(group)
        if pg is None:
            return None
        root = rank_in_group(pg, "broadcast_coalesced", "src", src, group_src)
        return pg.broadcast_coalesced(tensors, src=root, async_op=async_op, timeout=timeout)
    except BaseException as e:
        world.interrupted(group, e)
        raise


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
        output_tensor_lists: for each rank in group order a list of outputs, shaped as that rank's
            inputs.
        input_tensor_list: this rank's inputs; their number is equal on all ranks.
    """
    try:
        pg = world.resolve(group)
        if pg is None:
            return None
        by_input = _by_input(pg, output_tensor_lists, input_tensor_list)
        return pg.all_gather_coalesced(
            by_input, input_tensor_list, async_op=async_op, timeout=timeout
        )
    except BaseException as e:
        world.interrupted(group, e)
        raise


def _by_input(
    pg: ProcessGroup, output_lists: Sequence[Sequence[Array]], inputs: Sequence[Array]
) -> list[list[Array]]:
    """torch's lists, one per rank, as the group's method takes them: one per input."""
    if len(output_lists) != len(pg.ranks) or any(
        len(outputs) != len(inputs) for outputs in output_lists
    ):
        refuse(
            pg,
            "all_gather_coalesced",
            f"output_tensor_lists must be {len(pg.ranks)} lists (one per rank) of {len(inputs)}"
            f" arrays (one per input), got lists of {[len(each) for each in output_lists]}",
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
    try:
        pg = world.resolve(group)
        if pg is None:
            return None
        return pg.all_gather_into_tensor_coalesced(
            output_tensors, input_tensors, async_op=async_op, timeout=timeout
        )
    except BaseException as e:
        world.interrupted(group, e)
        raise


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
    try:
        pg = world.resolve(group)
        if pg is None:
            return None
        return pg.reduce_scatter_tensor_coalesced(
            outputs, inputs, op=op, async_op=async_op, timeout=timeout
        )
    except BaseException as e:
        world.interrupted(group, e)
        raise


# Torch has these names, too.
all_gather_single = _all_gather_base = all_gather_into_tensor
reduce_scatter_single = _reduce_scatter_base = reduce_scatter_tensor
