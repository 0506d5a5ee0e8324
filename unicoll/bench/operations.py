"""The table of operations: one row per operation, with its names in nccl-tests and OSU.

A row defines how the size is divided among the ranks, the factor from algorithm to bus bandwidth
(https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md), and the data that each rank sends and
receives. Data is described as *source ranges*: elements of one rank's source data, or of the reduction
of all ranks' source data.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from unicoll.backend.ops import OPS, Op

IN, OUT = "in_place", "out_of_place"
REDUCED = -1
"""Value of ``SourceRange.rank`` for the reduction of all ranks' source data; minus n for that of the first n ranks."""


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
    return [SourceRange(REDUCED - call.rank - 1, 0, count)]


def _prefix_before(call: CallRank, count: int) -> list[SourceRange]:
    return [SourceRange(REDUCED - call.rank, 0, count)] if call.rank else _own(call, count)


def _reduced_part(call: CallRank, count: int) -> list[SourceRange]:
    return [SourceRange(REDUCED, call.rank * count, count)]


def _part_of_each(call: CallRank, count: int) -> list[SourceRange]:
    return [SourceRange(r, call.rank * count, count) for r in range(call.size)]


def _part_of_root(call: CallRank, count: int) -> list[SourceRange]:
    return [SourceRange(call.root, call.rank * count, count)]


def _from_predecessor(call: CallRank, count: int) -> list[SourceRange]:
    return [SourceRange((call.rank - 1) % call.size, 0, count)]


def _from_peer(call: CallRank, count: int) -> list[SourceRange]:
    return [SourceRange(1 - call.rank, 0, count)]


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


_NAMES = {
    "bcast": "broadcast",
    "reduce_scatter_block": "reduce_scatter",
    "ring": "sendrecv",
    "pingpong": "latency",
    "p2p": "latency",
}
"""Other names that the command line accepts, beside those of torch, of nccl-tests and of OSU."""
_SINGLE = {
    "all_gather": "all_gather_into_tensor",
    "reduce_scatter": "reduce_scatter_tensor",
    "all_to_all": "all_to_all_single",
}
"""The collectives that are measured in their forms with single arrays."""
_TITLES = {"all_to_all": "All-to-All Personalized Exchange", "sendrecv": "Ring Exchange", "latency": ""}
"""OSU's titles, where they are not the names."""


@dataclass(frozen=True, slots=True, eq=False)
class Operation:
    """One row; more about a collective is in its row of :data:`unicoll.backend.ops.OPS`.

    Attributes:
        name: unicoll's name.
        divide: the counts of a call, from the total number of elements and the number of ranks.
        source: contents of a rank's send array before the call.
        expected: contents of its receive array after the call; [] if undefined.
        factor: bus bandwidth divided by algorithm bandwidth, by number of ranks.
        placements: in place, out of place, or both, as in torch's API; contenders are compared by the first.
        osu_share: True if OSU's size is the size that one rank sends to one other, not the total.
    """

    name: str
    divide: Divide
    source: Describe
    expected: Describe
    factor: Callable[[int], float]
    placements: tuple[str, ...]
    osu_share: bool = False

    @property
    def collective(self) -> Op | None:
        """The row of the collective that is measured, which takes single arrays; None for messages."""
        return OPS.get(_SINGLE.get(self.name, self.name))

    @property
    def reduces(self) -> bool:
        """True if it has a reduction."""
        return self.collective is not None and self.collective.reduces

    @property
    def rooted(self) -> bool:
        """True if it has a root."""
        return self.collective is not None and self.collective.rooted

    @property
    def has_async(self) -> bool:
        """True if its asynchronous form can be measured."""
        return self.collective is not None and self.collective.moves_data

    @property
    def min_ranks(self) -> int:
        """Smallest number of ranks."""
        return 2 if self.collective is None else 1

    @property
    def program(self) -> str:
        """nccl-tests' program."""
        return "alltoall_perf" if self.name == "all_to_all" else f"{self.name}_perf"

    @property
    def title(self) -> str:
        """Its name in OSU's header."""
        return _TITLES.get(self.name, self.name.replace("all_", "all").capitalize())


_ROWS = (
    Operation("all_reduce", _whole, _own, _reduced, lambda n: 2 * (n - 1) / n, (IN,)),
    Operation("broadcast", _whole, _from_root, _from_root, _one, (IN,)),
    Operation("reduce", _whole, _own, _at_root(_reduced), _one, (IN,)),
    Operation("all_gather", _gathered, _own_part, _all_parts, _share, (OUT, IN), osu_share=True),
    Operation("reduce_scatter", _scattered, _own_for_all, _reduced_part, _share, (OUT, IN)),
    Operation("all_to_all", _exchanged, _own_for_all, _part_of_each, _share, (OUT,), osu_share=True),
    Operation("gather", _gathered, _own_part, _at_root(_all_parts), _share, (OUT,), osu_share=True),
    Operation("scatter", _scattered, _at_root(_own_for_all), _part_of_root, _share, (OUT,), osu_share=True),
    Operation("sendrecv", _whole, _own, _from_predecessor, _one, (OUT,)),
    Operation("latency", _whole, _in_pair(_own), _in_pair(_from_peer), _one, (OUT,)),
    Operation("barrier", lambda count, ranks: Counts(0, 0, 0), _none, _none, lambda n: 0.0, (OUT,)),
    # Prefix reductions: nccl-tests has none. Bus bandwidth is algorithm bandwidth: a chain sends each byte once.
    Operation("scan", _whole, _own, _prefix, _one, (IN,)),
    Operation("exscan", _whole, _own, _prefix_before, _one, (IN,)),
)
OPERATIONS: dict[str, Operation] = {row.name: row for row in _ROWS}


def find_operation(text: str) -> Operation:
    """The operation of a name: unicoll's, ``all_reduce_perf``, ``osu_allreduce``, ``alltoall``...

    Raises:
        ValueError: there is no such operation; the message lists all operations.
    """
    key = text.lower().replace("-", "_").removeprefix("osu_").removesuffix("_perf")
    key = re.sub("_(into_tensor|tensor|single)$", "", _NAMES.get(key, key)).replace("_", "")
    for row in _ROWS:
        if key == row.name.replace("_", ""):
            return row
    raise ValueError(f"there is no operation {text!r}; the operations are {', '.join(OPERATIONS)}")
