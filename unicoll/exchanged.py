"""What the members tell each other about a call whose sizes not every rank knows, in small calls in its place.

In an all_to_all sizes may differ between any two ranks; in a gather or scatter the root alone knows all of them. The
small calls are on the host's memory, in the place of the user's call in the group's order. Each has a signature of its
own, made of the user's call's: a rank that is in another call is found out as ever, and errors tell of the user's call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import numpy as np

from .buffers import Buffer
from .call import Call, ProxyCall
from .errors import CollectiveMismatchError, DistArgumentError, DistError
from .ops import OPS, Sizes
from .types import BY_NAME, ReduceOp

__all__ = ["UNLIKE", "alike", "check_sizes", "exchange_sizes", "largest_part"]

UNLIKE = -1
"""What :func:`alike` gives where this rank knows that sizes differ."""
_INT64 = BY_NAME["int64"]
_MISFIT, _COUNTS, _LARGEST, _NUMBERS, _SIZES, _REASON = -2, -3, -4, -6, -7, -8
"""What the small calls are for, as it stands in their signatures: not -1, which hashes as -2 does, nor -5, which
:mod:`unicoll.direct` has. Pieces have numbers from 0 on."""
_NO_END = 1 << 62
"""More elements than any part has: so large is the largest where the root has refused its list."""
_WORDS = 800
"""Bytes of the root's reason that the others are told."""

Execute = Callable[[Call], None]
Ints = Any
"""A NumPy array of int64."""


class _Aside(ProxyCall):
    """A small call on the host's memory; what it takes is one array, or one for each rank."""

    __slots__ = ()

    def __init__(
        self, of: Call, op: str, purpose: int, given: Ints, taken: Sequence[Ints], reduce: Any = None
    ) -> None:
        inputs = (Buffer(given, _INT64, given.shape, given),)
        outputs = inputs if taken[0] is given else tuple(Buffer(x, _INT64, x.shape, x) for x in taken)
        super().__init__(of, OPS[op], inputs, outputs, of.timeout, reduce)
        self.signature = hash((of.signature, purpose))


def _do(execute: Execute, aside: _Aside) -> None:
    try:
        execute(aside)
    except DistError as e:
        e.op = aside.of.op.name
        raise


def _mismatch(call: Call, group: str, message: str) -> CollectiveMismatchError:
    return CollectiveMismatchError(
        f"{call.op.name} #{call.seq} on group {group!r}: {message}", group=group, op=call.op.name, seq=call.seq
    )


# --- gather and scatter ---------------------------------------------------------------------------------------------


def _own_and_list(call: Call) -> tuple[Buffer, tuple[Buffer, ...]]:
    """The array that every rank has, and the list that the root has."""
    if call.op.sizes is Sizes.GATHERED:
        return call.inputs[0], call.outputs
    return call.outputs[0], call.inputs


def alike(call: Call) -> int:
    """A number from 0 on that all ranks of a gather or scatter have in common if all arrays are of one shape.

    It is :data:`UNLIKE` on a root whose list has arrays of several sizes, or that has refused its list. Where it is not
    the same on all ranks, :func:`exchange_sizes` comes before data moves.
    """
    own, several = _own_and_list(call)
    if call.refused:
        return UNLIKE
    count = own.count
    for buffer in several:
        if buffer.count != count:
            return UNLIKE
    return hash(own.shape) & ((1 << 62) - 1)


def exchange_sizes(call: Call, rank: int, ranks: Sequence[int], group: str, execute: Execute) -> list[int]:
    """Elements of every rank's array in a gather or scatter, as the rank itself and the root say.

    Args:
        call: the gather or scatter.
        rank: in the group.
        ranks: the members' global ranks.
        group: its name.
        execute: does a call on the host's memory.

    Raises, the same on all ranks:
        CollectiveMismatchError: an array is not as large as the root's entry for it. Arrays of one size have to be of
            one shape, too.
        DistArgumentError: the root has refused its list.
    """
    own, several = _own_and_list(call)
    size = len(ranks)
    told = [np.zeros(2 + (size if r == call.root else 0), np.int64) for r in range(size)]
    entries = [-1] * size if call.refused else [b.count for b in several]
    mine = np.array([own.count, hash(own.shape), *entries], np.int64)
    _do(execute, _Aside(call, "all_gather", _SIZES, mine, told))
    if told[call.root][-1] < 0:
        _raise_refusal(call, ranks[call.root], group, execute)
    counts, entries = [int(t[0]) for t in told], [int(n) for n in told[call.root][2:]]
    for member, (count, entry) in enumerate(zip(counts, entries, strict=True)):
        if count != entry:
            giver, taker, given, room = ranks[member], ranks[call.root], count, entry
            if call.op.sizes is Sizes.SCATTERED:
                giver, taker, given, room = taker, giver, room, given
            raise _mismatch(
                call, group, f"rank {giver} sends {given} elements to rank {taker}, which has room for {room}"
            )
    if len(set(counts)) == 1 and len({int(t[1]) for t in told}) > 1:
        raise _mismatch(call, group, f"the ranks have arrays of {counts[0]} elements in different shapes")
    return counts


def _raise_refusal(call: Call, root: int, group: str, execute: Execute) -> NoReturn:
    """Raise on all ranks what the root, by its global rank, has refused its list for; the others hear of it here."""
    told = _highest(call, execute, _REASON, *call.refused.encode()[:_WORDS].ljust(_WORDS, b"\0"))
    reason = bytes(byte & 0xFF for byte in told)
    raise DistArgumentError(
        f"{call.op.name} #{call.seq} on group {group!r}: rank {root}, the root, refused its call"
        f" {reason.rstrip(bytes(1)).decode(errors='replace')}",
        group=group,
        rank=root,
        op=call.op.name,
        seq=call.seq,
    )


# --- calls that go in pieces ----------------------------------------------------------------------------------------


def _highest(call: Call, execute: Execute, purpose: int, *values: int) -> list[int]:
    """The largest of each value over all ranks."""
    room = np.array(values, np.int64)
    _do(execute, _Aside(call, "all_reduce", purpose, room, [room], ReduceOp.MAX))
    return [int(v) for v in room]


def largest_part(call: Call, execute: Execute) -> int:
    """Elements of the largest part that any two ranks exchange in a call; equal on all of them.

    Where the root has refused its list it is so large that :func:`check_sizes` follows, which raises.
    """
    if call.op.sizes is Sizes.EXCHANGED:
        assert call.in_counts is not None
        assert call.out_counts is not None
        longest = max(*call.in_counts, *call.out_counts)
    elif call.refused:
        longest = _NO_END
    else:
        longest = max(b.count for b in (*call.inputs, *call.outputs))
    return _highest(call, execute, _LARGEST, longest)[0]


def check_sizes(call: Call, rank: int, ranks: Sequence[int], group: str, execute: Execute) -> None:
    """Find out whether all parts are as large as their receivers expect: a piece would tell of its own sizes only.

    Args:
        call: the all_to_all, gather or scatter.
        rank: in the group.
        ranks: the members' global ranks.
        group: its name.
        execute: does a call on the host's memory.

    Raises:
        CollectiveMismatchError: one is not; the same on all ranks.
        DistArgumentError: the root has refused its list.
    """
    if call.op.told_by_root:
        exchange_sizes(call, rank, ranks, group, execute)
        return
    assert call.in_counts is not None
    assert call.out_counts is not None
    size = len(ranks)
    given, awaited = np.array(call.in_counts, np.int64), np.array(call.out_counts, np.int64)
    coming = np.empty(size, np.int64)
    aside = _Aside(call, "all_to_all_single", _COUNTS, given, [coming])
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
    raise _mismatch(
        call,
        group,
        f"rank {ranks[sender]} sends {sent} elements to rank {ranks[receiver]}, which has room for {room}",
    )
