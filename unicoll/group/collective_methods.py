"""Methods of :class:`~unicoll.group.process_group.ProcessGroup`: the collectives.

A method makes buffers of its arrays and says which of them go in and come out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from unicoll.arrays.conversion import as_buffer
from unicoll.arrays.types import ReduceOp
from unicoll.calls.ops import OPS
from unicoll.group.arguments import buffers_of, pairs_of, same_length, splits_of
from unicoll.process.timeouts import Timeout

if TYPE_CHECKING:
    from unicoll.calls.work import Work
    from unicoll.group.dispatcher import Buffers
    from unicoll.group.process_group import ProcessGroup

_BROADCAST = OPS["broadcast"]
_ALL_REDUCE = OPS["all_reduce"]
_REDUCE = OPS["reduce"]
_ALL_GATHER = OPS["all_gather"]
_ALL_GATHER_INTO_TENSOR = OPS["all_gather_into_tensor"]
_GATHER = OPS["gather"]
_SCATTER = OPS["scatter"]
_REDUCE_SCATTER = OPS["reduce_scatter"]
_REDUCE_SCATTER_TENSOR = OPS["reduce_scatter_tensor"]
_ALL_TO_ALL = OPS["all_to_all"]
_ALL_TO_ALL_SINGLE = OPS["all_to_all_single"]
_SCAN = OPS["scan"]
_EXSCAN = OPS["exscan"]


# All methods end with the same handler, which is in the body of the method itself. A signal's
# handler may raise an exception where a called function begins, before any ``try`` of that
# function. The conversion of the arrays is within the ``try``, too: an exception that an array
# raises leaves this rank one call behind the others, as an interrupt does.
def broadcast(
    self: ProcessGroup,
    tensor: Any,
    src: int,
    *,
    async_op: bool = False,
    timeout: Timeout = None,
) -> Work | None:
    """``tensor`` of member ``src`` to all, in place; same shape and dtype everywhere
    (MPI_Bcast)."""
    try:
        buffers = (as_buffer(tensor, "broadcast: tensor"),)
        # The root's array is only read, so it may be one that cannot be written.
        outputs: Buffers = () if src == self._context.rank else buffers
        return self._dispatcher.start(
            self._settings, _BROADCAST, buffers, outputs, async_op, timeout, root=src
        )
    except BaseException as e:
        self.interrupted(e)
        raise


def all_reduce(
    self: ProcessGroup,
    tensor: Any,
    op: Any = ReduceOp.SUM,
    *,
    async_op: bool = False,
    timeout: Timeout = None,
) -> Work | None:
    """Reduce element by element over all members, in place, the same bits on every rank
    (MPI_Allreduce)."""
    try:
        buffers = (as_buffer(tensor, "all_reduce: tensor"),)
        # One tuple as inputs and outputs marks an operation in place. The dispatcher compares the
        # identity of the two, for its shortest key.
        return self._dispatcher.start(
            self._settings, _ALL_REDUCE, buffers, buffers, async_op, timeout, op
        )
    except BaseException as e:
        self.interrupted(e)
        raise


def reduce(
    self: ProcessGroup,
    tensor: Any,
    dst: int,
    op: Any = ReduceOp.SUM,
    *,
    async_op: bool = False,
    timeout: Timeout = None,
) -> Work | None:
    """Reduce over all members to ``dst``, in place there; elsewhere ``tensor`` is left as it is
    (MPI_Reduce)."""
    try:
        buffers = (as_buffer(tensor, "reduce: tensor"),)
        # Only the array of dst is written; those of the others may be read-only.
        outputs: Buffers = buffers if dst == self._context.rank else ()
        return self._dispatcher.start(
            self._settings, _REDUCE, buffers, outputs, async_op, timeout, op, root=dst
        )
    except BaseException as e:
        self.interrupted(e)
        raise


def all_gather(
    self: ProcessGroup,
    tensor_list: Sequence[Any],
    tensor: Any,
    *,
    async_op: bool = False,
    timeout: Timeout = None,
) -> Work | None:
    """``tensor_list[i]`` becomes member i's ``tensor``, on all; sizes may differ by member
    (MPI_Allgatherv)."""
    try:
        inputs = (as_buffer(tensor, "all_gather: tensor"),)
        outputs = buffers_of("all_gather: tensor_list", tensor_list)
        return self._dispatcher.start(
            self._settings, _ALL_GATHER, inputs, outputs, async_op, timeout
        )
    except BaseException as e:
        self.interrupted(e)
        raise


def all_gather_into_tensor(
    self: ProcessGroup,
    output: Any,
    input: Any,
    *,
    async_op: bool = False,
    timeout: Timeout = None,
) -> Work | None:
    """``output`` becomes all members' ``input``, one after another (MPI_Allgather)."""
    try:
        inputs = (as_buffer(input, "all_gather_into_tensor: input"),)
        outputs = (as_buffer(output, "all_gather_into_tensor: output"),)
        return self._dispatcher.start(
            self._settings, _ALL_GATHER_INTO_TENSOR, inputs, outputs, async_op, timeout
        )
    except BaseException as e:
        self.interrupted(e)
        raise


def gather(
    self: ProcessGroup,
    tensor: Any,
    gather_list: Sequence[Any] | None,
    dst: int,
    *,
    async_op: bool = False,
    timeout: Timeout = None,
) -> Work | None:
    """``gather_list[i]`` of ``dst`` becomes member i's ``tensor``, of any size; None elsewhere
    (MPI_Gatherv)."""
    try:
        own = (as_buffer(tensor, "gather: tensor"),)
        return self._dispatcher.start_rooted(
            self._settings, _GATHER, own, "gather: gather_list", gather_list, async_op, timeout, dst
        )
    except BaseException as e:
        self.interrupted(e)
        raise


def scatter(
    self: ProcessGroup,
    tensor: Any,
    scatter_list: Sequence[Any] | None,
    src: int,
    *,
    async_op: bool = False,
    timeout: Timeout = None,
) -> Work | None:
    """``tensor`` of member i becomes ``scatter_list[i]`` of ``src``, of any size; None elsewhere
    (MPI_Scatterv)."""
    try:
        own = (as_buffer(tensor, "scatter: tensor"),)
        return self._dispatcher.start_rooted(
            self._settings,
            _SCATTER,
            own,
            "scatter: scatter_list",
            scatter_list,
            async_op,
            timeout,
            src,
        )
    except BaseException as e:
        self.interrupted(e)
        raise


def reduce_scatter(
    self: ProcessGroup,
    output: Any,
    input_list: Sequence[Any],
    op: Any = ReduceOp.SUM,
    *,
    async_op: bool = False,
    timeout: Timeout = None,
) -> Work | None:
    """``output`` of member i is the reduction of all members' ``input_list[i]``, of any size
    (MPI_Reduce_scatter)."""
    try:
        inputs = buffers_of("reduce_scatter: input_list", input_list)
        outputs = (as_buffer(output, "reduce_scatter: output"),)
        return self._dispatcher.start(
            self._settings, _REDUCE_SCATTER, inputs, outputs, async_op, timeout, op
        )
    except BaseException as e:
        self.interrupted(e)
        raise


def reduce_scatter_tensor(
    self: ProcessGroup,
    output: Any,
    input: Any,
    op: Any = ReduceOp.SUM,
    *,
    async_op: bool = False,
    timeout: Timeout = None,
) -> Work | None:
    """``output`` on member i is the i-th part of the reduction of all members' ``input``
    (MPI_Reduce_scatter_block)."""
    try:
        inputs = (as_buffer(input, "reduce_scatter_tensor: input"),)
        outputs = (as_buffer(output, "reduce_scatter_tensor: output"),)
        return self._dispatcher.start(
            self._settings, _REDUCE_SCATTER_TENSOR, inputs, outputs, async_op, timeout, op
        )
    except BaseException as e:
        self.interrupted(e)
        raise


def all_to_all(
    self: ProcessGroup,
    output_list: Sequence[Any],
    input_list: Sequence[Any],
    *,
    async_op: bool = False,
    timeout: Timeout = None,
) -> Work | None:
    """``output_list[i]`` becomes member i's ``input_list[my rank]``; all sizes may differ
    (MPI_Alltoallw)."""
    try:
        inputs = buffers_of("all_to_all: input_list", input_list)
        outputs = buffers_of("all_to_all: output_list", output_list)
        return self._dispatcher.start(
            self._settings, _ALL_TO_ALL, inputs, outputs, async_op, timeout
        )
    except BaseException as e:
        self.interrupted(e)
        raise


def all_to_all_single(
    self: ProcessGroup,
    output: Any,
    input: Any,
    output_split_sizes: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None,
    *,
    async_op: bool = False,
    timeout: Timeout = None,
) -> Work | None:
    """Part i of ``input`` to member i, cut along dimension 0 evenly or by the split sizes
    (MPI_Alltoallv)."""
    try:
        inputs = (as_buffer(input, "all_to_all_single: input"),)
        outputs = (as_buffer(output, "all_to_all_single: output"),)
        splits = (
            splits_of("input_split_sizes", input_split_sizes),
            splits_of("output_split_sizes", output_split_sizes),
        )
        return self._dispatcher.start(
            self._settings, _ALL_TO_ALL_SINGLE, inputs, outputs, async_op, timeout, splits=splits
        )
    except BaseException as e:
        self.interrupted(e)
        raise


def scan(
    self: ProcessGroup,
    tensor: Any,
    op: Any = ReduceOp.SUM,
    *,
    async_op: bool = False,
    timeout: Timeout = None,
) -> Work | None:
    """Reduce over the members up to this one, in place (MPI_Scan)."""
    try:
        buffers = (as_buffer(tensor, "scan: tensor"),)
        return self._dispatcher.start(
            self._settings, _SCAN, buffers, buffers, async_op, timeout, op
        )
    except BaseException as e:
        self.interrupted(e)
        raise


def exscan(
    self: ProcessGroup,
    tensor: Any,
    op: Any = ReduceOp.SUM,
    *,
    async_op: bool = False,
    timeout: Timeout = None,
) -> Work | None:
    """Reduce over the members before this one, in place; the array of rank 0 is left unchanged
    (MPI_Exscan)."""
    try:
        buffers = (as_buffer(tensor, "exscan: tensor"),)
        return self._dispatcher.start(
            self._settings, _EXSCAN, buffers, buffers, async_op, timeout, op
        )
    except BaseException as e:
        self.interrupted(e)
        raise


# --- several arrays as one operation --------------------------------------------------------------


def all_reduce_coalesced(
    self: ProcessGroup,
    tensors: Sequence[Any],
    op: Any = ReduceOp.SUM,
    *,
    async_op: bool = False,
    timeout: Timeout = None,
) -> Work | None:
    """:meth:`all_reduce` of each array, as one operation."""
    try:
        arrays = [(b,) for b in buffers_of("all_reduce_coalesced: tensors", tensors)]
        pairs = [(array, array) for array in arrays]
        return self._dispatcher.start_batch(
            self._settings, _ALL_REDUCE, pairs, async_op, timeout, op
        )
    except BaseException as e:
        self.interrupted(e)
        raise


def broadcast_coalesced(
    self: ProcessGroup,
    tensors: Sequence[Any],
    src: int,
    *,
    async_op: bool = False,
    timeout: Timeout = None,
) -> Work | None:
    """:meth:`broadcast` of each array, as one operation."""
    try:
        buffers = buffers_of("broadcast_coalesced: tensors", tensors)
        pairs = [((b,), () if src == self._context.rank else (b,)) for b in buffers]
        return self._dispatcher.start_batch(
            self._settings, _BROADCAST, pairs, async_op, timeout, root=src
        )
    except BaseException as e:
        self.interrupted(e)
        raise


def all_gather_coalesced(
    self: ProcessGroup,
    output_lists: Sequence[Sequence[Any]],
    inputs: Sequence[Any],
    *,
    async_op: bool = False,
    timeout: Timeout = None,
) -> Work | None:
    """:meth:`all_gather` of ``inputs[k]`` into ``output_lists[k]`` for each k, as one operation."""
    try:
        same_length("all_gather_coalesced: output_lists", output_lists, inputs)
        what = "all_gather_coalesced: output_lists"
        sources = buffers_of("all_gather_coalesced: inputs", inputs)
        pairs = [
            ((x,), buffers_of(what, outs)) for outs, x in zip(output_lists, sources, strict=True)
        ]
        return self._dispatcher.start_batch(self._settings, _ALL_GATHER, pairs, async_op, timeout)
    except BaseException as e:
        self.interrupted(e)
        raise


def all_gather_into_tensor_coalesced(
    self: ProcessGroup,
    outputs: Sequence[Any],
    inputs: Sequence[Any],
    *,
    async_op: bool = False,
    timeout: Timeout = None,
) -> Work | None:
    """:meth:`all_gather_into_tensor` of each pair, as one operation."""
    try:
        return self._dispatcher.start_batch(
            self._settings,
            _ALL_GATHER_INTO_TENSOR,
            pairs_of("all_gather_into_tensor_coalesced", outputs, inputs),
            async_op,
            timeout,
        )
    except BaseException as e:
        self.interrupted(e)
        raise


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
    try:
        return self._dispatcher.start_batch(
            self._settings,
            _REDUCE_SCATTER_TENSOR,
            pairs_of("reduce_scatter_tensor_coalesced", outputs, inputs),
            async_op,
            timeout,
            op,
        )
    except BaseException as e:
        self.interrupted(e)
        raise
