"""The table of operations: one row per operation, with its names in nccl-tests and OSU.

A row defines how the size is divided among the ranks, the factor from algorithm to bus bandwidth
(https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md), and the data that each rank sends and
receives. Data is described as *source ranges*: elements of one rank's source data, or of the reduction
of all ranks' source data.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from unicoll.backend.ops import OPS

__all__ = [
    "IN",
    "OPERATIONS",
    "OUT",
    "REDUCED",
    "Counts",
    "Operation",
    "SourceRange",
    "find_operation",
    "reduced_up_to",
]

IN, OUT = "in_place", "out_of_place"
REDUCED = -1
"""Value of ``SourceRange.rank`` for the reduction of all ranks' source data."""


def reduced_up_to(ranks: int) -> int:
    """In the place of a segment's rank: the reduction of the source data of the first so many ranks."""
    return REDUCED - ranks


class SourceRange(NamedTuple):
    """``length`` elements from index ``offset`` of the source data of ``rank`` (or :data:`REDUCED`)."""

    rank: int
    offset: int
    length: int


class Counts(NamedTuple):
    """Numbers of elements of one call: nccl-tests' count column, the send array, the receive array."""

    shown: int
    send: int
    recv: int


class CallRank(NamedTuple):
    """The calling rank, the number of ranks and the root."""

    rank: int
    size: int
    root: int


Divide = Callable[[int, int], Counts]
Describe = Callable[[CallRank, int], list[SourceRange]]
"""Source ranges of a rank's array, from its CallRank and the count column."""


def _whole(count: int, ranks: int) -> Counts:
    return Counts(count, count, count)


def _gathered(count: int, ranks: int) -> Counts:
    return Counts(count // ranks, count // ranks, count // ranks * ranks)


def _scattered(count: int, ranks: int) -> Counts:
    return Counts(count // ranks, count // ranks * ranks, count // ranks)


def _exchanged(count: int, ranks: int) -> Counts:
    return Counts(count // ranks, count // ranks * ranks, count // ranks * ranks)


def _own(call: CallRank, count: int) -> list[SourceRange]:
    return [SourceRange(call.rank, 0, count)]


def _own_for_all(call: CallRank, count: int) -> list[SourceRange]:
    return [SourceRange(call.rank, 0, count * call.size)]


def _own_part(call: CallRank, count: int) -> list[SourceRange]:
    return [SourceRange(call.rank, call.rank * count, count)]


def _from_root(call: CallRank, count: int) -> list[SourceRange]:
    return [SourceRange(call.root, 0, count)]


def _all_parts(call: CallRank, count: int) -> list[SourceRange]:
    return [SourceRange(r, r * count, count) for r in range(call.size)]


def _reduced(call: CallRank, count: int) -> list[SourceRange]:
    return [SourceRange(REDUCED, 0, count)]


def _prefix(call: CallRank, count: int) -> list[SourceRange]:
    return [SourceRange(reduced_up_to(call.rank + 1), 0, count)]


def _prefix_before(call: CallRank, count: int) -> list[SourceRange]:
    return [SourceRange(reduced_up_to(call.rank), 0, count)] if call.rank else _own(call, count)


def _none(call: CallRank, count: int) -> list[SourceRange]:
    return []


def _at_root(describe: Describe) -> Describe:
    return lambda call, count: describe(call, count) if call.rank == call.root else []


def _in_pair(describe: Describe) -> Describe:
    """For ping-pong, in which only ranks 0 and 1 take part."""
    return lambda call, count: describe(call, count) if call.rank < 2 else []


def _one(ranks: int) -> float:
    return 1.0


def _share(ranks: int) -> float:
    return (ranks - 1) / ranks


@dataclass(frozen=True, slots=True, eq=False)
class Operation:
    """One row.

    Attributes:
        name: unicoll's name.
        program: nccl-tests' program.
        title: its name in OSU's header.
        aliases: other names that the command line accepts.
        divide: the counts of a call, from the total number of elements and the number of ranks.
        source: contents of a rank's send array before the call.
        expected: contents of its receive array after the call; [] if undefined.
        factor: bus bandwidth divided by algorithm bandwidth, by number of ranks.
        placements: in place, out of place, or both, as in torch's API; contenders are compared by the first.
        reduces, rooted: True if it has a reduction, and a root.
        osu_share: True if OSU's size is the size that one rank sends to one other, not the total.
        min_ranks: smallest number of ranks.
        has_async: True if the API has it with ``async_op=True``.
    """

    name: str
    program: str
    title: str
    aliases: tuple[str, ...]
    divide: Divide
    source: Describe
    expected: Describe
    factor: Callable[[int], float]
    placements: tuple[str, ...]
    reduces: bool = False
    rooted: bool = False
    osu_share: bool = False
    min_ranks: int = 1
    has_async: bool = True


_ROWS = (
    Operation(
        "all_reduce",
        "all_reduce_perf",
        "Allreduce",
        ("allreduce",),
        _whole,
        _own,
        _reduced,
        lambda n: 2 * (n - 1) / n,
        (IN,),
        reduces=True,
    ),
    Operation(
        "broadcast",
        "broadcast_perf",
        "Broadcast",
        ("bcast",),
        _whole,
        _from_root,
        _from_root,
        _one,
        (IN,),
        rooted=True,
    ),
    Operation(
        "reduce",
        "reduce_perf",
        "Reduce",
        (),
        _whole,
        _own,
        _at_root(_reduced),
        _one,
        (IN,),
        reduces=True,
        rooted=True,
    ),
    Operation(
        "all_gather",
        "all_gather_perf",
        "Allgather",
        ("allgather", "all_gather_into_tensor", "all_gather_single"),
        _gathered,
        _own_part,
        _all_parts,
        _share,
        (OUT, IN),
        osu_share=True,
    ),
    Operation(
        "reduce_scatter",
        "reduce_scatter_perf",
        "Reduce_scatter",
        ("reducescatter", "reduce_scatter_tensor", "reduce_scatter_single", "reduce_scatter_block"),
        _scattered,
        _own_for_all,
        lambda call, count: [SourceRange(REDUCED, call.rank * count, count)],
        _share,
        (OUT, IN),
        reduces=True,
    ),
    Operation(
        "all_to_all",
        "alltoall_perf",
        "All-to-All Personalized Exchange",
        ("alltoall", "all_to_all_single"),
        _exchanged,
        _own_for_all,
        lambda call, count: [SourceRange(r, call.rank * count, count) for r in range(call.size)],
        _share,
        (OUT,),
        osu_share=True,
    ),
    Operation(
        "gather",
        "gather_perf",
        "Gather",
        (),
        _gathered,
        _own_part,
        _at_root(_all_parts),
        _share,
        (OUT,),
        rooted=True,
        osu_share=True,
    ),
    Operation(
        "scatter",
        "scatter_perf",
        "Scatter",
        (),
        _scattered,
        _at_root(_own_for_all),
        lambda call, count: [SourceRange(call.root, call.rank * count, count)],
        _share,
        (OUT,),
        rooted=True,
        osu_share=True,
    ),
    Operation(
        "sendrecv",
        "sendrecv_perf",
        "Ring Exchange",
        ("send_recv", "ring"),
        _whole,
        _own,
        lambda call, count: [SourceRange((call.rank - 1) % call.size, 0, count)],
        _one,
        (OUT,),
        min_ranks=2,
        has_async=False,
    ),
    Operation(
        "latency",
        "latency_perf",
        "",
        ("pingpong", "p2p"),
        _whole,
        _in_pair(_own),
        _in_pair(lambda call, count: [SourceRange(1 - call.rank, 0, count)]),
        _one,
        (OUT,),
        min_ranks=2,
        has_async=False,
    ),
    Operation(
        "barrier",
        "barrier_perf",
        "Barrier",
        (),
        lambda count, ranks: Counts(0, 0, 0),
        _none,
        _none,
        lambda n: 0.0,
        (OUT,),
        has_async=False,
    ),
)
_PREFIXES = tuple(
    Operation(
        row.name,
        f"{row.name}_perf",
        row.mpi.removeprefix("MPI_"),
        (),
        _whole,
        _own,
        _prefix_before if row.exclusive else _prefix,
        _one,
        (IN,),
        reduces=True,
    )
    for row in OPS.values()
    if row.prefix
)
"""Prefix reductions; nccl-tests has none. Bus bandwidth is algorithm bandwidth: a chain sends each byte once."""
OPERATIONS: dict[str, Operation] = {row.name: row for row in (*_ROWS, *_PREFIXES)}


def find_operation(text: str) -> Operation:
    """The operation of a name: unicoll's, ``all_reduce_perf``, ``osu_allreduce``, ``alltoall``...

    Raises:
        ValueError: there is no such operation; the message lists all operations.
    """
    key = text.lower().replace("-", "_").removeprefix("osu_").removesuffix("_perf")
    for row in OPERATIONS.values():
        if key == row.name or key in row.aliases:
            return row
    raise ValueError(f"there is no operation {text!r}; the operations are {', '.join(OPERATIONS)}")
