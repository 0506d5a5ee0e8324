"""THE TABLE of what can be measured: one row per operation, with the names that nccl-tests and OSU give it.

A row knows how the size of a line is divided among the ranks, which part of it moves over the wires (nccl-tests' bus
bandwidth, https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md), and what every rank must have at the
end. Data is described as *segments*: elements of one rank's numbered source data, or of the reduction of all ranks'.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

__all__ = ["IN", "OPERATIONS", "OUT", "REDUCED", "Counts", "Operation", "Segment", "named"]

IN, OUT = "in_place", "out_of_place"
REDUCED = -1
"""In the place of a segment's rank: the reduction of all ranks' source data."""


class Segment(NamedTuple):
    """``length`` elements from number ``offset`` of the source data of ``rank`` (or :data:`REDUCED`)."""

    rank: int
    offset: int
    length: int


class Counts(NamedTuple):
    """Elements of one call: what nccl-tests prints as count, of the send array, of the receive array."""

    shown: int
    send: int
    recv: int


class Place(NamedTuple):
    """Who we are in a call."""

    rank: int
    size: int
    root: int


Divide = Callable[[int, int], Counts]
Describe = Callable[[Place, int], list[Segment]]
"""Segments of a rank's array, from its place and the count shown."""


def _whole(count: int, ranks: int) -> Counts:
    return Counts(count, count, count)


def _gathered(count: int, ranks: int) -> Counts:
    return Counts(count // ranks, count // ranks, count // ranks * ranks)


def _scattered(count: int, ranks: int) -> Counts:
    return Counts(count // ranks, count // ranks * ranks, count // ranks)


def _exchanged(count: int, ranks: int) -> Counts:
    return Counts(count // ranks, count // ranks * ranks, count // ranks * ranks)


def _mine(place: Place, count: int) -> list[Segment]:
    return [Segment(place.rank, 0, count)]


def _mine_for_all(place: Place, count: int) -> list[Segment]:
    return [Segment(place.rank, 0, count * place.size)]


def _my_share(place: Place, count: int) -> list[Segment]:
    return [Segment(place.rank, place.rank * count, count)]


def _roots(place: Place, count: int) -> list[Segment]:
    return [Segment(place.root, 0, count)]


def _all_shares(place: Place, count: int) -> list[Segment]:
    return [Segment(r, r * count, count) for r in range(place.size)]


def _reduced(place: Place, count: int) -> list[Segment]:
    return [Segment(REDUCED, 0, count)]


def _none(place: Place, count: int) -> list[Segment]:
    return []


def _at_root(describe: Describe) -> Describe:
    return lambda place, count: describe(place, count) if place.rank == place.root else []


def _in_pair(describe: Describe) -> Describe:
    """For ping-pong, which ranks 0 and 1 play alone."""
    return lambda place, count: describe(place, count) if place.rank < 2 else []


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
        title: how OSU's header calls it.
        aliases: other spellings that the command line takes.
        divide: counts of a call whose line has so many elements, by number of ranks.
        given: what a rank's send array holds before the call.
        due: what its receive array holds after it; [] where nothing is promised.
        factor: bus bandwidth divided by algorithm bandwidth, by number of ranks.
        halves: of nccl-tests' two halves of a line those that torch's API has; the first is the one compared.
        reduces, rooted: whether a reduction, and a root, apply.
        osu_share: whether OSU's size is what one rank gives to one other, not the total.
        least: fewest ranks that it makes sense with.
        can_start: whether the API has it with ``async_op=True``.
    """

    name: str
    program: str
    title: str
    aliases: tuple[str, ...]
    divide: Divide
    given: Describe
    due: Describe
    factor: Callable[[int], float]
    halves: tuple[str, ...]
    reduces: bool = False
    rooted: bool = False
    osu_share: bool = False
    least: int = 1
    can_start: bool = True


_ROWS = (
    Operation(
        "all_reduce", "all_reduce_perf", "Allreduce", ("allreduce",),
        _whole, _mine, _reduced, lambda n: 2 * (n - 1) / n, (IN,), reduces=True,
    ),
    Operation(
        "broadcast", "broadcast_perf", "Broadcast", ("bcast",), _whole, _roots, _roots, _one, (IN,), rooted=True,
    ),
    Operation(
        "reduce", "reduce_perf", "Reduce", (), _whole, _mine, _at_root(_reduced), _one, (IN,),
        reduces=True, rooted=True,
    ),
    Operation(
        "all_gather", "all_gather_perf", "Allgather",
        ("allgather", "all_gather_into_tensor", "all_gather_single"),
        _gathered, _my_share, _all_shares, _share, (OUT, IN), osu_share=True,
    ),
    Operation(
        "reduce_scatter", "reduce_scatter_perf", "Reduce_scatter",
        ("reducescatter", "reduce_scatter_tensor", "reduce_scatter_single", "reduce_scatter_block"),
        _scattered, _mine_for_all,
        lambda place, count: [Segment(REDUCED, place.rank * count, count)], _share, (OUT, IN), reduces=True,
    ),
    Operation(
        "all_to_all", "alltoall_perf", "All-to-All Personalized Exchange", ("alltoall", "all_to_all_single"),
        _exchanged, _mine_for_all,
        lambda place, count: [Segment(r, place.rank * count, count) for r in range(place.size)],
        _share, (OUT,), osu_share=True,
    ),
    Operation(
        "gather", "gather_perf", "Gather", (), _gathered, _my_share, _at_root(_all_shares), _share, (OUT,),
        rooted=True, osu_share=True,
    ),
    Operation(
        "scatter", "scatter_perf", "Scatter", (), _scattered, _at_root(_mine_for_all),
        lambda place, count: [Segment(place.root, place.rank * count, count)], _share, (OUT,),
        rooted=True, osu_share=True,
    ),
    Operation(
        "sendrecv", "sendrecv_perf", "Ring Exchange", ("send_recv", "ring"), _whole, _mine,
        lambda place, count: [Segment((place.rank - 1) % place.size, 0, count)], _one, (OUT,),
        least=2, can_start=False,
    ),
    Operation(
        "latency", "latency_perf", "", ("pingpong", "p2p"), _whole, _in_pair(_mine),
        _in_pair(lambda place, count: [Segment(1 - place.rank, 0, count)]), _one, (OUT,),
        least=2, can_start=False,
    ),
    Operation(
        "barrier", "barrier_perf", "Barrier", (), lambda count, ranks: Counts(0, 0, 0), _none, _none,
        lambda n: 0.0, (OUT,), can_start=False,
    ),
)  # fmt: skip
OPERATIONS: dict[str, Operation] = {row.name: row for row in _ROWS}


def named(text: str) -> Operation:
    """The operation that a spelling means: unicoll's, ``all_reduce_perf``, ``osu_allreduce``, ``alltoall``...

    Raises:
        ValueError: there is none; the message lists what there is.
    """
    key = text.lower().replace("-", "_").removeprefix("osu_").removesuffix("_perf")
    for row in _ROWS:
        if key == row.name or key in row.aliases:
            return row
    raise ValueError(f"there is no operation {text!r}; known are {', '.join(OPERATIONS)}")
