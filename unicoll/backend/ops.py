"""The table of operations, one row each; validation, signatures, methods, functions, benchmark and tests use it.

A row says how many arrays go in and come out, on which ranks, how their sizes are related, whether there is a root,
whether elements are reduced, and how the public function and the method of the group are documented.
``scripts/generate_collectives.py`` writes functions and methods from the rows.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum


class Arity(Enum):
    """How many arrays, and on which ranks."""

    NONE = "none"
    ONE = "one"
    ONE_AT_ROOT = "one, at the root"
    ONE_OFF_ROOT = "one, on ranks that are not the root"
    PER_RANK = "one per rank"
    PER_RANK_AT_ROOT = "one per rank, at the root"


class Sizes(Enum):
    """How the element counts of inputs and outputs are related."""

    NONE = "no data"
    SAME = "outputs are as large as inputs"
    GATHERED = "output i is as large as rank i's input"
    GATHERED_FLAT = "the output is world size times the input"
    SCATTERED = "the output is as large as input i on rank i"
    SCATTERED_FLAT = "the input is world size times the output"
    EXCHANGED = "output i on rank j is as large as input j on rank i"


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter of a collective, other than root, reduction, group, async_op and timeout.

    Attributes:
        name: in the method of the group.
        text: its documentation in the public function.
        side: "input" or "output" array(s), "both" for an array in place, or "splits" for split sizes.
        public: name in the public function, where torch's name differs.
    """

    name: str
    text: str
    side: str
    public: str = ""

    @property
    def public_name(self) -> str:
        """Name in the public function."""
        return self.public or self.name


@dataclass(frozen=True, slots=True, eq=False)
class Op:
    """One row.

    Attributes:
        name: public name.
        code: number in signatures; never reused.
        inputs, outputs: how many arrays on which ranks.
        sizes: relation of their element counts.
        reduces: True if a ReduceOp applies.
        rooted: True if one rank is special (src or dst).
        uneven: True if per-rank arrays may differ in size.
        message: True for send and receive, which two ranks call.
        mpi: the MPI standard's counterpart; "" if none.
        refuses: names of the reductions that the operation does not have, with any element type.
        prefix: True if rank i gets the reduction over the ranks up to i only.
        exclusive: True if a rank's own array is left out of its result.
        parameters: those of the function and the method, in order; empty where both are written by hand.
        summary: first paragraph of the function's docstring.
        method: docstring of the method, without MPI's counterpart.
        reduction: sentence that follows the documentation of ``op``.
        root_is_optional: True if the function's root defaults to global rank 0, as torch has it.
        aliases: torch's other names of the function.
        fallback: function of :mod:`unicoll.backend.fallbacks` for backends without the operation; "" if none.
        scattered: True if the shape that ranks agree on is the output's.
        root_has_sizes: True if only the root knows all sizes, and each other rank its own.
        joined: True if the parts of all ranks lie in one array instead of a list.
        in_place: True if one array is input and output.
        moves_data: False for an operation that only synchronizes.
        root_name: "src" or "dst", or "" without a root.
    """

    name: str
    code: int
    inputs: Arity
    outputs: Arity
    sizes: Sizes
    reduces: bool = False
    rooted: bool = False
    uneven: bool = False
    message: bool = False
    mpi: str = ""
    refuses: tuple[str, ...] = ()
    prefix: bool = False
    exclusive: bool = False
    parameters: tuple[Parameter, ...] = ()
    summary: str = ""
    method: str = ""
    reduction: str = ""
    root_is_optional: bool = False
    aliases: tuple[str, ...] = ()
    fallback: str = ""
    scattered: bool = field(init=False)
    root_has_sizes: bool = field(init=False)
    joined: bool = field(init=False)
    in_place: bool = field(init=False)
    moves_data: bool = field(init=False)
    root_name: str = field(init=False)

    def __post_init__(self) -> None:
        sizes, one = self.sizes, self.inputs is Arity.ONE
        root_gives = self.outputs is Arity.ONE_OFF_ROOT or self.inputs is Arity.PER_RANK_AT_ROOT
        derived = {
            "scattered": sizes in (Sizes.SCATTERED, Sizes.SCATTERED_FLAT),
            "root_has_sizes": self.rooted and self.uneven,
            "joined": sizes in (Sizes.GATHERED_FLAT, Sizes.SCATTERED_FLAT)
            or (sizes is Sizes.EXCHANGED and one),
            "in_place": sizes is Sizes.SAME,
            "moves_data": self.inputs is not Arity.NONE or self.outputs is not Arity.NONE,
            "root_name": ("src" if root_gives else "dst") if self.rooted else "",
        }
        for name, value in derived.items():
            object.__setattr__(self, name, value)


_NOT_IN_PREFIXES = ("AVG", "PREMUL_SUM")
_IN_PLACE = "array of any shape, equal on all ranks; input and output."

_ROWS = (
    Op("barrier", 1, Arity.NONE, Arity.NONE, Sizes.NONE, mpi="MPI_Barrier", fallback="barrier"),
    Op(
        "broadcast",
        2,
        Arity.ONE,
        Arity.ONE_OFF_ROOT,
        Sizes.SAME,
        rooted=True,
        mpi="MPI_Bcast",
        parameters=(
            Parameter(
                "tensor",
                "array of any shape, equal on all ranks; input on the source, output elsewhere.",
                "both",
            ),
        ),
        summary="Copy ``tensor`` from one rank to all others.",
        method="``tensor`` of member ``src`` to all, in place; same shape and dtype everywhere",
        fallback="broadcast",
    ),
    Op(
        "all_reduce",
        3,
        Arity.ONE,
        Arity.ONE,
        Sizes.SAME,
        reduces=True,
        mpi="MPI_Allreduce",
        parameters=(Parameter("tensor", _IN_PLACE, "both"),),
        summary="Reduce ``tensor`` element by element over all ranks, in place; every rank gets the same bits.",
        method="Reduce element by element over all members, in place, the same bits on every rank",
        reduction="Half-precision floats are accumulated in float32.",
        fallback="all_reduce",
    ),
    Op(
        "reduce",
        4,
        Arity.ONE,
        Arity.ONE_AT_ROOT,
        Sizes.SAME,
        reduces=True,
        rooted=True,
        mpi="MPI_Reduce",
        parameters=(
            Parameter(
                "tensor",
                "array of any shape, equal on all ranks; input everywhere, output on the destination.",
                "both",
            ),
        ),
        summary="Reduce ``tensor`` element by element over all ranks into the ``tensor`` of one of them.",
        method="Reduce over all members to ``dst``, in place there; elsewhere ``tensor`` is left as it is",
        fallback="reduce",
    ),
    Op(
        "all_gather",
        5,
        Arity.ONE,
        Arity.PER_RANK,
        Sizes.GATHERED,
        uneven=True,
        mpi="MPI_Allgatherv",
        parameters=(
            Parameter(
                "tensor_list",
                "outputs, one array per rank in group order. They may differ in size from rank to rank, as long as"
                " entry i has as many elements as rank i's ``tensor``, on all ranks alike.",
                "output",
            ),
            Parameter("tensor", "this rank's input, of any shape.", "input"),
        ),
        summary="Collect every rank's ``tensor`` on all ranks.",
        method="``tensor_list[i]`` becomes member i's ``tensor``, on all; sizes may differ by member",
        fallback="all_gather",
    ),
    Op(
        "all_gather_into_tensor",
        6,
        Arity.ONE,
        Arity.ONE,
        Sizes.GATHERED_FLAT,
        mpi="MPI_Allgather",
        parameters=(
            Parameter(
                "output",
                "output of n (ranks) times the input's elements: concatenated (``(n * d0, d1, ...)``) or stacked"
                " (``(n, d0, d1, ...)``), which have the same layout in memory.",
                "output",
                "output_tensor",
            ),
            Parameter(
                "input",
                "this rank's input ``(d0, d1, ...)``, of equal shape on all ranks.",
                "input",
                "input_tensor",
            ),
        ),
        summary="Collect every rank's ``input_tensor`` in one array on all ranks, in group order.",
        method="``output`` becomes all members' ``input``, one after another",
        aliases=("all_gather_single", "_all_gather_base"),
        fallback="all_gather",
    ),
    Op(
        "gather",
        7,
        Arity.ONE,
        Arity.PER_RANK_AT_ROOT,
        Sizes.GATHERED,
        rooted=True,
        uneven=True,
        mpi="MPI_Gatherv",
        parameters=(
            Parameter("tensor", "this rank's input; sizes may differ between ranks.", "input"),
            Parameter(
                "gather_list",
                "on the destination, outputs in group order, of which output i has as many elements as rank i's"
                " ``tensor``; elsewhere None.",
                "output",
            ),
        ),
        summary="Collect every rank's ``tensor`` on one rank.",
        method="``gather_list[i]`` of ``dst`` becomes member i's ``tensor``, of any size; None elsewhere",
        root_is_optional=True,
        fallback="gather",
    ),
    Op(
        "scatter",
        8,
        Arity.PER_RANK_AT_ROOT,
        Arity.ONE,
        Sizes.SCATTERED,
        rooted=True,
        uneven=True,
        mpi="MPI_Scatterv",
        parameters=(
            Parameter("tensor", "this rank's output; sizes may differ between ranks.", "output"),
            Parameter(
                "scatter_list",
                "on the source, inputs in group order, of which input i has as many elements as rank i's"
                " ``tensor``; elsewhere None.",
                "input",
            ),
        ),
        summary="Give each rank its entry of one rank's list.",
        method="``tensor`` of member i becomes ``scatter_list[i]`` of ``src``, of any size; None elsewhere",
        root_is_optional=True,
        fallback="scatter",
    ),
    Op(
        "reduce_scatter",
        9,
        Arity.PER_RANK,
        Arity.ONE,
        Sizes.SCATTERED,
        reduces=True,
        uneven=True,
        mpi="MPI_Reduce_scatter",
        parameters=(
            Parameter("output", "this rank's output, as large as its entry of ``input_list``.", "output"),
            Parameter(
                "input_list",
                "one input per rank in group order. They may differ in size from rank to rank, as long as entry i"
                " has the same size on all ranks.",
                "input",
            ),
        ),
        summary="Reduce every entry of a list over all ranks; rank i gets entry i.",
        method="``output`` of member i is the reduction of all members' ``input_list[i]``, of any size",
        fallback="reduce_scatter",
    ),
    Op(
        "reduce_scatter_tensor",
        10,
        Arity.ONE,
        Arity.ONE,
        Sizes.SCATTERED_FLAT,
        reduces=True,
        mpi="MPI_Reduce_scatter_block",
        parameters=(
            Parameter("output", "this rank's output, of equal shape on all ranks.", "output"),
            Parameter(
                "input",
                "world size times the output's elements: the parts concatenated or stacked, in group order.",
                "input",
            ),
        ),
        summary="Reduce ``input`` over all ranks; rank i gets its i-th part.",
        method="``output`` on member i is the i-th part of the reduction of all members' ``input``",
        aliases=("reduce_scatter_single", "_reduce_scatter_base"),
        fallback="reduce_scatter",
    ),
    Op(
        "all_to_all",
        11,
        Arity.PER_RANK,
        Arity.PER_RANK,
        Sizes.EXCHANGED,
        uneven=True,
        mpi="MPI_Alltoallw",
        parameters=(
            Parameter(
                "output_list",
                "outputs, one per rank in group order; entry i is as large as what rank i sends here.",
                "output",
                "output_tensor_list",
            ),
            Parameter(
                "input_list",
                "inputs, one per rank in group order, of any sizes.",
                "input",
                "input_tensor_list",
            ),
        ),
        summary="Send entry j of the inputs to rank j; entry i of the outputs comes from rank i.",
        method="``output_list[i]`` becomes member i's ``input_list[my rank]``; all sizes may differ",
        fallback="all_to_all",
    ),
    Op(
        "all_to_all_single",
        12,
        Arity.ONE,
        Arity.ONE,
        Sizes.EXCHANGED,
        uneven=True,
        mpi="MPI_Alltoallv",
        parameters=(
            Parameter(
                "output",
                "output; the part from rank i follows that from rank i - 1 along dimension 0.",
                "output",
            ),
            Parameter("input", "input.", "input"),
            Parameter(
                "output_split_sizes",
                "rows that come from each rank; their sum is the output's dimension 0. None for equal parts.",
                "splits",
            ),
            Parameter(
                "input_split_sizes",
                "rows that go to each rank; their sum is the input's dimension 0. None for equal parts. On NCCL, which"
                " compares nothing, all ranks give sizes or none does.",
                "splits",
            ),
        ),
        summary="Cut ``input`` along dimension 0, send part j to rank j, and join what arrives in ``output``.",
        method="Part i of ``input`` to member i, cut along dimension 0 evenly or by the split sizes",
        fallback="all_to_all",
    ),
    Op(
        "scan",
        13,
        Arity.ONE,
        Arity.ONE,
        Sizes.SAME,
        reduces=True,
        mpi="MPI_Scan",
        refuses=_NOT_IN_PREFIXES,
        prefix=True,
        parameters=(Parameter("tensor", _IN_PLACE, "both"),),
        summary="Reduce ``tensor`` element by element over this rank and all ranks before it, in place.",
        method="Reduce over the members up to this one, in place",
        reduction="Not AVG and PREMUL_SUM, which MPI_Scan lacks: DistTypeError.",
        fallback="scan",
    ),
    Op(
        "exscan",
        14,
        Arity.ONE,
        Arity.ONE,
        Sizes.SAME,
        reduces=True,
        mpi="MPI_Exscan",
        refuses=_NOT_IN_PREFIXES,
        prefix=True,
        exclusive=True,
        parameters=(Parameter("tensor", _IN_PLACE, "both"),),
        summary="Reduce ``tensor`` element by element over the ranks before this one, in place; rank 0 keeps its own.",
        method="Reduce over the members before this one, in place; the array of rank 0 is left unchanged",
        reduction="Not AVG and PREMUL_SUM, which MPI_Exscan lacks: DistTypeError.",
        fallback="scan",
    ),
    Op("send", 20, Arity.ONE, Arity.NONE, Sizes.NONE, message=True, mpi="MPI_Send"),
    Op("recv", 21, Arity.NONE, Arity.ONE, Sizes.NONE, message=True, mpi="MPI_Recv"),
)
OPS: dict[str, Op] = {row.name: row for row in _ROWS}

PROBE = Op("probe", 22, Arity.NONE, Arity.NONE, Sizes.NONE, message=True, mpi="MPI_Probe")
"""Waits for a message and leaves it there. Not a row: it moves no data, and only some backends have it."""
