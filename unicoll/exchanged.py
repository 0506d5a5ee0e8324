"""What the members agree on before an all_to_all goes in pieces: how large its largest part is, and that sizes fit.

Sizes may differ between any two ranks, so no rank knows alone how many pieces there are. They agree in small calls on
the host's memory, in the place of the all_to_all in the group's order. Each has a signature of its own, made of the
user's call's: a rank that is in another call is found out as ever, and errors tell of the user's call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from .buffers import Buffer
from .call import Call, ProxyCall
from .errors import CollectiveMismatchError, DistError
from .ops import OPS
from .types import BY_NAME, ReduceOp

__all__ = ["check_sizes", "largest_part"]

_INT64 = BY_NAME["int64"]
_LARGEST, _COUNTS, _MISFIT, _NUMBERS = range(-4, 0)
"""What the small calls are for, as it stands in their signatures; pieces have numbers from 0 on."""

Execute = Callable[[Call], None]
Ints = Any
"""A NumPy array of int64."""


class _Aside(ProxyCall):
    """A small call on the host's memory."""

    __slots__ = ()

    def __init__(self, of: Call, op: str, purpose: int, given: Ints, taken: Ints, reduce: Any = None) -> None:
        inputs = (Buffer(given, _INT64, given.shape, given),)
        outputs = inputs if taken is given else (Buffer(taken, _INT64, taken.shape, taken),)
        super().__init__(of, OPS[op], inputs, outputs, of.timeout, reduce)
        self.signature = hash((of.signature, purpose))


def _do(execute: Execute, aside: _Aside) -> None:
    try:
        execute(aside)
    except DistError as e:
        e.op = aside.of.op.name
        raise


def _highest(call: Call, execute: Execute, purpose: int, *values: int) -> list[int]:
    """The largest of each value over all ranks."""
    room = np.array(values, np.int64)
    _do(execute, _Aside(call, "all_reduce", purpose, room, room, ReduceOp.MAX))
    return [int(v) for v in room]


def largest_part(call: Call, execute: Execute) -> int:
    """Elements of the largest part that any two ranks exchange in an all_to_all; equal on all of them."""
    assert call.in_counts is not None
    assert call.out_counts is not None
    return _highest(call, execute, _LARGEST, max(*call.in_counts, *call.out_counts))[0]


def check_sizes(call: Call, rank: int, ranks: Sequence[int], group: str, execute: Execute) -> None:
    """Find out whether all parts are as large as their receivers expect: a piece would tell of its own sizes only.

    Args:
        call: the all_to_all.
        rank: in the group.
        ranks: the members' global ranks.
        group: its name.
        execute: does a call on the host's memory.

    Raises:
        CollectiveMismatchError: one is not; the same on all ranks.
    """
    assert call.in_counts is not None
    assert call.out_counts is not None
    size = len(ranks)
    given, awaited = np.array(call.in_counts, np.int64), np.array(call.out_counts, np.int64)
    coming = np.empty(size, np.int64)
    aside = _Aside(call, "all_to_all_single", _COUNTS, given, coming)
    aside.in_counts = aside.out_counts = (1,) * size
    aside.even = True
    _do(execute, aside)
    wrong = np.flatnonzero(coming != awaited)
    found = _highest(call, execute, _MISFIT, 1 + rank * size + int(wrong[0]) if wrong.size else 0)[0]
    if not found:
        return
    receiver, sender = divmod(found - 1, size)
    mine = (int(coming[sender]), int(awaited[sender])) if rank == receiver else (-1, -1)
    sent, room = _highest(call, execute, _NUMBERS, *mine)
    raise CollectiveMismatchError(
        f"{call.op.name} #{call.seq} on group {group!r}: rank {ranks[sender]} sends {sent} elements to rank"
        f" {ranks[receiver]}, which has room for {room}",
        group=group,
        op=call.op.name,
        seq=call.seq,
    )
