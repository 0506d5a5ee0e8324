"""Exchange of the sizes of a call that not every rank knows, by small collectives.

In an all_to_all sizes may differ between any two ranks; in a gather or scatter only the root knows
all of them. The small collectives are on host memory, and run at the position of the user's call in
the group's order. Each has a signature of its own, derived from that of the user's call: the
signature check detects a rank in another call, and errors name the user's call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import numpy as np

from unicoll.arrays.conversion import Buffer
from unicoll.arrays.types import BY_NAME, ReduceOp
from unicoll.calls.call import Call, ProxyCall
from unicoll.calls.ops import OPS, Sizes
from unicoll.errors import CollectiveMismatchError, DistArgumentError, DistError

SIZES_DIFFER = -1
"""The result of :func:`shape_hash` on a rank that knows that sizes differ."""
_INT64 = BY_NAME["int64"]
_MISMATCH, _COUNTS, _LARGEST, _NUMBERS, _SIZES, _REASON = -2, -3, -4, -6, -7, -8
"""Purposes of the small collectives in their signatures: not -1, which hashes as -2 does, nor -5,
which :mod:`unicoll.staging.device_pointers` uses. Chunks have numbers from 0 on."""
_REFUSED = 1 << 62
"""The size reported by a root that has refused its list; larger than that of any part."""
_REASON_BYTES = 800
"""Bytes of the root's reason that are sent to the other ranks."""

Execute = Callable[[Call], None]
Ints = Any
"""A NumPy array of int64."""


class _SizeCall(ProxyCall):
    """A small call on host memory; its output is one array, or one for each rank."""

    __slots__ = ()

    def __init__(
        self,
        of: Call,
        op: str,
        purpose: int,
        source: Ints,
        targets: Sequence[Ints],
        reduce: Any = None,
    ) -> None:
        inputs = (Buffer(source, _INT64, source.shape, source),)
        outputs = (
            inputs
            if targets[0] is source
            else tuple(Buffer(x, _INT64, x.shape, x) for x in targets)
        )
        super().__init__(of, OPS[op], inputs, outputs, of.timeout, reduce)
        self.signature = hash((of.signature, purpose))


def _run(execute: Execute, call: _SizeCall) -> None:
    try:
        execute(call)
    except DistError as e:
        e.op = call.of.op.name
        raise


def _mismatch(call: Call, group: str, message: str) -> CollectiveMismatchError:
    return CollectiveMismatchError(
        f"{call.op.name} #{call.seq} on group {group!r}: {message}",
        group=group,
        op=call.op.name,
        seq=call.seq,
    )


# --- gather and scatter ---------------------------------------------------------------------------


def _own_and_list(call: Call) -> tuple[Buffer, tuple[Buffer, ...]]:
    """The array that every rank passes, and the list that only the root passes."""
    if call.op.sizes is Sizes.GATHERED:
        return call.inputs[0], call.outputs
    return call.outputs[0], call.inputs


def shape_hash(call: Call) -> int:
    """A number from 0 on that is equal on all ranks of a gather or scatter if all arrays are of one
    shape.

    It is :data:`SIZES_DIFFER` on a root whose list has arrays of several sizes, or that has refused
    its list. If ranks have different numbers, :func:`exchange_sizes` runs before data moves.
    """
    own, several = _own_and_list(call)
    if call.refused:
        return SIZES_DIFFER
    count = own.count
    for buffer in several:
        if buffer.count != count:
            return SIZES_DIFFER
    return hash(own.shape) & ((1 << 62) - 1)


def exchange_sizes(
    call: Call, rank: int, ranks: Sequence[int], group: str, execute: Execute
) -> list[int]:
    """Elements of every rank's array in a gather or scatter, agreed on between the rank and the
    root.

    Args:
        execute: runs a call on host memory.

    Raises, the same on all ranks:
        CollectiveMismatchError: an array differs in size from the root's entry for it, or all are
            of one size and of different shapes.
        DistArgumentError: the root has refused its list.
    """
    own, several = _own_and_list(call)
    size = len(ranks)
    received = [np.zeros(2 + (size if r == call.root else 0), np.int64) for r in range(size)]
    entries = [-1] * size if call.refused else [b.count for b in several]
    mine = np.array([own.count, hash(own.shape), *entries], np.int64)
    _run(execute, _SizeCall(call, "all_gather", _SIZES, mine, received))
    # The last entry of the root is -1 on all ranks if it has refused its list, so all go the same
    # way.
    if received[call.root][-1] < 0:
        _raise_refusal(call, ranks[call.root], group, execute)
    counts, entries = [int(r[0]) for r in received], [int(n) for n in received[call.root][2:]]
    for member, (count, entry) in enumerate(zip(counts, entries, strict=True)):
        if count != entry:
            sender, receiver, sent, expected = ranks[member], ranks[call.root], count, entry
            if call.op.sizes is Sizes.SCATTERED:
                sender, receiver, sent, expected = receiver, sender, expected, sent
            raise _mismatch(
                call,
                group,
                f"rank {sender} sends {sent} elements to rank {receiver}, which has room for"
                f" {expected}",
            )
    if len(set(counts)) == 1 and len({int(r[1]) for r in received}) > 1:
        raise _mismatch(
            call, group, f"the ranks have arrays of {counts[0]} elements in different shapes"
        )
    return counts


def _raise_refusal(call: Call, root: int, group: str, execute: Execute) -> NoReturn:
    """Send the reason for which the root, a global rank, has refused its list to all ranks, and
    raise it on all."""
    # Only the root has a reason. The bytes of the others are 0, so the largest of each byte is the
    # root's.
    received = _highest(
        call, execute, _REASON, *call.refused.encode()[:_REASON_BYTES].ljust(_REASON_BYTES, b"\0")
    )
    reason = bytes(byte & 0xFF for byte in received)
    raise DistArgumentError(
        f"{call.op.name} #{call.seq} on group {group!r}: rank {root}, the root, refused its call"
        f" {reason.rstrip(bytes(1)).decode(errors='replace')}",
        group=group,
        rank=root,
        op=call.op.name,
        seq=call.seq,
    )


# --- calls in chunks ------------------------------------------------------------------------------


def _highest(call: Call, execute: Execute, purpose: int, *values: int) -> list[int]:
    """The largest of each value over all ranks."""
    highest = np.array(values, np.int64)
    _run(execute, _SizeCall(call, "all_reduce", purpose, highest, [highest], ReduceOp.MAX))
    return [int(v) for v in highest]


def largest_part(call: Call, execute: Execute) -> int:
    """Elements of the largest part that any two ranks exchange in a call; equal on all of them.

    If the root has refused its list it is so large that :func:`check_sizes` follows, which raises.
    """
    if call.op.sizes is Sizes.EXCHANGED:
        assert call.in_counts is not None
        assert call.out_counts is not None
        longest = max(*call.in_counts, *call.out_counts)
    elif call.refused:
        longest = _REFUSED
    else:
        longest = max(b.count for b in (*call.inputs, *call.outputs))
    return _highest(call, execute, _LARGEST, longest)[0]


def check_sizes(call: Call, rank: int, ranks: Sequence[int], group: str, execute: Execute) -> None:
    """Check that all parts are as large as their receivers expect, before a call is split into
    chunks.

    Args:
        execute: runs a call on host memory.

    Raises:
        CollectiveMismatchError: a part differs; the same error on all ranks.
        DistArgumentError: the root has refused its list.
    """
    if call.op.root_has_sizes:
        exchange_sizes(call, rank, ranks, group, execute)
        return
    assert call.in_counts is not None
    assert call.out_counts is not None
    size = len(ranks)
    sending, expected = np.array(call.in_counts, np.int64), np.array(call.out_counts, np.int64)
    arriving = np.empty(size, np.int64)
    exchange = _SizeCall(call, "all_to_all_single", _COUNTS, sending, [arriving])
    exchange.in_counts = exchange.out_counts = (1,) * size
    exchange.even = True
    _run(execute, exchange)
    wrong = np.flatnonzero(arriving != expected)
    # The largest number names one pair of ranks, the same on all of them; 0 means that all sizes
    # fit.
    found = _highest(
        call, execute, _MISMATCH, 1 + rank * size + int(wrong[0]) if wrong.size else 0
    )[0]
    if not found:
        return
    receiver, sender = divmod(found - 1, size)
    # Only the receiver knows both numbers.
    mine = (int(arriving[sender]), int(expected[sender])) if rank == receiver else (-1, -1)
    sent, space = _highest(call, execute, _NUMBERS, *mine)
    raise _mismatch(
        call,
        group,
        f"rank {ranks[sender]} sends {sent} elements to rank {ranks[receiver]}, which has room for"
        f" {space}",
    )
