"""The operations that can be measured, with their names in nccl-tests and OSU.

An operation defines how the size is divided among the ranks, the factor from algorithm to bus
bandwidth (https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md), and the data that
each rank sends and receives. Data is described as *source ranges*: elements of one rank's source
data, or of the reduction of all ranks' source data. For collectives this follows from their rows of
:data:`unicoll.calls.ops.OPS`, and what they deliver from :mod:`unicoll.testing.reference`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from unicoll.calls.ops import OPS, Arity, Op, Sizes
from unicoll.testing import reference

IN, OUT = "in_place", "out_of_place"
REDUCED = -1
"""Value of ``SourceRange.rank`` for the reduction of all ranks' source data; minus n for that of
the first n ranks."""


class SourceRange(NamedTuple):
    """``length`` elements from index ``offset`` of the source data of ``rank`` (or
    :data:`REDUCED`)."""

    rank: int
    offset: int
    length: int


class Counts(NamedTuple):
    """Numbers of elements of one call: nccl-tests' count column, the send array, the receive
    array."""

    shown: int
    send: int
    recv: int


class CallRank(NamedTuple):
    """The calling rank, the number of ranks and the root."""

    rank: int
    size: int
    root: int


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
_TITLES = {
    "all_to_all": "All-to-All Personalized Exchange",
    "sendrecv": "Ring Exchange",
    "latency": "",
}
"""OSU's titles, where they are not the names."""


@dataclass(frozen=True, slots=True, eq=False)
class Operation:
    """One operation.

    Attributes:
        name: unicoll's name.
        collective: the row of the collective that is measured, which takes single arrays; None for
            messages.
    """

    name: str
    collective: Op | None

    @property
    def reduces(self) -> bool:
        return self.collective is not None and self.collective.reduces

    @property
    def rooted(self) -> bool:
        return self.collective is not None and self.collective.rooted

    @property
    def has_async(self) -> bool:
        """True if its asynchronous form can be measured."""
        return self.collective is not None and self.collective.moves_data

    @property
    def min_ranks(self) -> int:
        return 2 if self.collective is None else 1

    @property
    def placements(self) -> tuple[str, ...]:
        """In place, out of place, or both, as in torch's API; contenders are compared by the
        first."""
        row = self.collective
        if row is not None and row.in_place:
            return (IN,)
        return (
            (OUT, IN)
            if row is not None and row.joined and row.sizes is not Sizes.EXCHANGED
            else (OUT,)
        )

    @property
    def osu_share(self) -> bool:
        """True if OSU's size is the size that one rank sends to one other, not the total."""
        row = self.collective
        return row is not None and row.moves_data and not row.in_place and not row.reduces

    @property
    def program(self) -> str:
        """nccl-tests' program."""
        return "alltoall_perf" if self.name == "all_to_all" else f"{self.name}_perf"

    @property
    def title(self) -> str:
        """Its name in OSU's header."""
        return _TITLES.get(self.name, self.name.replace("all_", "all").capitalize())

    def takes_part(self, rank: int) -> bool:
        """False for ranks without data of their own: a ping-pong is between ranks 0 and 1."""
        return self.name != "latency" or rank < 2

    def divide(self, count: int, ranks: int) -> Counts:
        """The counts of a call, from the total number of elements and the number of ranks."""
        row = self.collective
        if row is None or row.in_place:
            return Counts(count, count, count)
        if row.sizes is Sizes.NONE:
            return Counts(0, 0, 0)
        part = count // ranks
        return Counts(
            part, part if _gathers(row) else part * ranks, part if row.scattered else part * ranks
        )

    def factor(self, ranks: int) -> float:
        """Bus bandwidth divided by algorithm bandwidth; 1 for what nccl-tests lacks, such as prefix
        reductions."""
        row = self.collective
        if row is None:
            return 1.0
        if row.sizes is Sizes.NONE:
            return 0.0
        if row.in_place:
            return (
                2 * (ranks - 1) / ranks
                if row.reduces and not row.rooted and not row.prefix
                else 1.0
            )
        return (ranks - 1) / ranks

    def source(self, call: CallRank, count: int) -> list[SourceRange]:
        """Contents of a rank's send array: an array, its part of the gathered one, or a part for
        each rank."""
        row = self.collective
        if row is None:
            return [SourceRange(call.rank, 0, count)] if self.takes_part(call.rank) else []
        at_root = row.inputs is Arity.PER_RANK_AT_ROOT
        if row.inputs is Arity.NONE or (at_root and call.rank != call.root):
            return []
        if _gathers(row):
            return [SourceRange(call.rank, call.rank * count, count)]
        return [SourceRange(call.rank, 0, count if row.in_place else count * call.size)]

    def expected(self, call: CallRank, count: int) -> list[SourceRange]:
        """Contents of a rank's receive array after the call, in parts of ``count`` elements; [] if
        undefined."""
        return [
            SourceRange(giver, part * count, count) for giver, part in _delivered_parts(self, call)
        ]


def _gathers(row: Op) -> bool:
    return row.sizes in (Sizes.GATHERED, Sizes.GATHERED_FLAT)


# Its time grows with the square of the number of ranks, and every iteration is checked.
@cache
def _delivered_parts(op: Operation, call: CallRank) -> list[tuple[int, int]]:
    """The giver and the part of its source data that each part of a rank's result has.

    They are those of the reference result of source data that has a number for each part.
    """
    rank, size, root = call
    row = op.collective
    if row is None:
        giver = 1 - rank if op.name == "latency" else (rank - 1) % size
        return [(giver, 0)] if op.takes_part(rank) else []
    if row.outputs in (Arity.ONE_AT_ROOT, Arity.PER_RANK_AT_ROOT) and rank != root:
        # The result is undefined on this rank.
        return []

    def given(giver: int) -> list[npt.NDArray[np.int64]]:
        ranges = op.source(CallRank(giver, size, root), 1)
        parts = [np.arange(length) + (giver * size + offset) for _, offset, length in ranges]
        return [*parts[0][:, None]] if parts and row.inputs is Arity.PER_RANK_AT_ROOT else parts

    evenly = np.ones((size, size), np.int64)
    delivered = []
    for terms in reference.contributions(
        row.name, [given(r) for r in range(size)], rank, root, evenly
    ):
        for part in terms[0]:
            giver, i = divmod(int(part), size)
            # The array may be rank 0's own.
            if row.reduces and not (row.exclusive and len(terms) == 1):
                giver = REDUCED if len(terms) == size else REDUCED - len(terms)
            delivered.append((giver, i))
    return delivered


_COLLECTIVES = [
    name for name, row in OPS.items() if not row.message and name not in _SINGLE.values()
]
OPERATIONS = {
    name: Operation(name, OPS.get(_SINGLE.get(name, name)))
    for name in (*_COLLECTIVES, "sendrecv", "latency")
}


def find_operation(text: str) -> Operation:
    """The operation of a name: unicoll's, ``all_reduce_perf``, ``osu_allreduce``, ``alltoall``;
    else ValueError."""
    key = text.lower().replace("-", "_").removeprefix("osu_").removesuffix("_perf")
    key = re.sub("_(into_tensor|tensor|single)$", "", _NAMES.get(key, key)).replace("_", "")
    for op in OPERATIONS.values():
        if key == op.name.replace("_", ""):
            return op
    raise ValueError(f"there is no operation {text!r}; the operations are {', '.join(OPERATIONS)}")
