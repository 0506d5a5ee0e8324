"""The table of operations, one row each; validation, signatures, fallbacks, benchmark and tests use
it.

A row says how many arrays go in and come out, on which ranks, how their sizes are related, whether
there is a root, and whether elements are reduced. The public function is in
:mod:`unicoll.api.collectives`, the method of the group in :mod:`unicoll.group.collective_methods`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple


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


class Parameter(NamedTuple):
    """One parameter of a collective's method, other than root, reduction, async_op and timeout.

    Attributes:
        name: its name. The public function may have another one, where torch's differs.
        side: "input" or "output" array(s), "both" for an array in place, or "splits" for split
            sizes.
    """

    name: str
    side: str


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
        collective: True if all ranks of the group call it: of rows of the table, without messages.
            One-sided operations, which one rank calls, have no code.
        mpi: the MPI standard's counterpart; "" if none.
        refuses: names of the reductions that the operation does not have, with any element type.
        prefix: True if rank i gets the reduction over the ranks up to i only.
        exclusive: True if a rank's own array is left out of its result.
        parameters: arrays and split sizes, in order.
        aliases: torch's other names of the function.
        fallback: function of :mod:`unicoll.backend.host.fallbacks` for backends without the
            operation; "" if none.
        scattered: True if the shape that ranks agree on is the output's.
        root_has_sizes: True if only the root knows all sizes, and each other rank its own.
        joined: True if the parts of all ranks lie in one array instead of a list.
        in_place: True if one array is input and output.
        separate: True if inputs and outputs are different arrays, which may overlap.
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
    aliases: tuple[str, ...] = ()
    fallback: str = ""
    collective: bool = field(init=False)
    scattered: bool = field(init=False)
    root_has_sizes: bool = field(init=False)
    joined: bool = field(init=False)
    in_place: bool = field(init=False)
    separate: bool = field(init=False)
    moves_data: bool = field(init=False)
    root_name: str = field(init=False)

    def __post_init__(self) -> None:
        sizes, one = self.sizes, self.inputs is Arity.ONE
        root_gives = self.outputs is Arity.ONE_OFF_ROOT or self.inputs is Arity.PER_RANK_AT_ROOT
        derived = {
            "collective": self.code > 0 and not self.message,
            "scattered": sizes in (Sizes.SCATTERED, Sizes.SCATTERED_FLAT),
            "root_has_sizes": self.rooted and self.uneven,
            "joined": (
                sizes in (Sizes.GATHERED_FLAT, Sizes.SCATTERED_FLAT)
                or (sizes is Sizes.EXCHANGED and one)
            ),
            "in_place": sizes is Sizes.SAME,
            "separate": sizes not in (Sizes.SAME, Sizes.NONE),
            "moves_data": self.inputs is not Arity.NONE or self.outputs is not Arity.NONE,
            "root_name": ("src" if root_gives else "dst") if self.rooted else "",
        }
        for name, value in derived.items():
            object.__setattr__(self, name, value)


_NOT_IN_PREFIXES = ("AVG", "PREMUL_SUM", "EXACT_SUM", "EXACT_AVG")

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
        parameters=(Parameter("tensor", "both"),),
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
        parameters=(Parameter("tensor", "both"),),
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
        parameters=(Parameter("tensor", "both"),),
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
        parameters=(Parameter("tensor_list", "output"), Parameter("tensor", "input")),
        fallback="all_gather",
    ),
    Op(
        "all_gather_into_tensor",
        6,
        Arity.ONE,
        Arity.ONE,
        Sizes.GATHERED_FLAT,
        mpi="MPI_Allgather",
        parameters=(Parameter("output", "output"), Parameter("input", "input")),
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
        parameters=(Parameter("tensor", "input"), Parameter("gather_list", "output")),
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
        parameters=(Parameter("tensor", "output"), Parameter("scatter_list", "input")),
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
        parameters=(Parameter("output", "output"), Parameter("input_list", "input")),
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
        parameters=(Parameter("output", "output"), Parameter("input", "input")),
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
        parameters=(Parameter("output_list", "output"), Parameter("input_list", "input")),
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
            Parameter("output", "output"),
            Parameter("input", "input"),
            Parameter("output_split_sizes", "splits"),
            Parameter("input_split_sizes", "splits"),
        ),
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
        parameters=(Parameter("tensor", "both"),),
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
        parameters=(Parameter("tensor", "both"),),
        fallback="scan",
    ),
    Op("send", 20, Arity.ONE, Arity.NONE, Sizes.NONE, message=True, mpi="MPI_Send"),
    Op("recv", 21, Arity.NONE, Arity.ONE, Sizes.NONE, message=True, mpi="MPI_Recv"),
)
OPS: dict[str, Op] = {row.name: row for row in _ROWS}

PROBE = Op("probe", 22, Arity.NONE, Arity.NONE, Sizes.NONE, message=True, mpi="MPI_Probe")
"""Waits for a message and leaves it there. Not a row: it moves no data, and only some backends have
it."""
