"""The operations of the table as calls of NCCL, all put on one stream.

``OPERATIONS[name](communicator, call, stream)`` answers NCCL's code. Lists of arrays become groups of broadcasts,
reductions or messages, so sizes may differ by rank and nothing is copied. Moved data is bytes to NCCL. How an
operation is done depends on nothing but what is equal on all ranks.

So gather and scatter are messages with every version. NCCL 2.28 has ncclGather and ncclScatter, which want the root's
arrays as one: the root alone knows whether its list lies so in memory, and all ranks have to call the same. Copying to
and from such memory on the root would cost it world size times the array, a pass over that, and an order among all
streams that use it, and gain nothing: NCCL takes the two apart into these very sends and receives.

An all_gather to a list is a group of broadcasts for the same reason: only the rank itself knows whether its list lies
side by side in memory, where one ncclAllGather would do. From 2.29 on NCCL makes one kernel of such a group, a ring
that gathers all of them at once (its scheduler/allgatherv_sched.cc); before, the same bytes go over each link, one
broadcast after another, which for small arrays takes longer. all_gather_into_tensor is one ncclAllGather always.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from unicoll.backend import Call

from .api import AVG, SUM
from .communicator import Communicator
from .one_sided import ONE_SIDED
from .tuning import Tuned
from .types import BYTES, Way, way

__all__ = ["OPERATIONS", "batch", "barrier"]

Ranks = Communicator | Tuned
Operation = Callable[[Ranks, Call, int], int]


def _way(c: Ranks, call: Call) -> tuple[Way, int]:
    """How the call's elements are reduced, and NCCL's operation."""
    assert call.reduce is not None
    dtype = (call.inputs or call.outputs)[0].dtype
    found = way(dtype, call.reduce, c.nccl.version)
    assert found is not None  # the group has refused what has no way
    if c.size == 1 and found.op == AVG:
        found = found._replace(op=SUM)  # alone they are the same, and NCCL refuses the average of float8 there
    return found, c.made_op(call, found.type) if found.made else found.op


def _group(c: Ranks, calls: Iterable[Callable[[], int]]) -> int:
    """Several calls as one; the first code that is none of success."""
    with c.group() as codes:
        if not codes:
            codes.extend(call() for call in calls)
    return next((code for code in codes[:-1] if code), codes[-1])


# --- reductions ---------------------------------------------------------------------------------------------------


def _all_reduce(c: Ranks, call: Call, stream: int) -> int:
    source, out = call.inputs[0], call.outputs[0]
    how, op = _way(c, call)
    if not source.count:
        return 0
    return c.nccl.all_reduce(source.ptr, out.ptr, source.count * how.parts, how.type, op, c.handle, stream)


def _reduce(c: Ranks, call: Call, stream: int) -> int:
    source = call.inputs[0]
    out = call.outputs[0] if call.outputs else source  # elsewhere than at the root it is not written
    how, op = _way(c, call)
    if not source.count:
        return 0
    count = source.count * how.parts
    return c.nccl.reduce(source.ptr, out.ptr, count, how.type, op, call.root, c.handle, stream)


def _reduce_scatter_tensor(c: Ranks, call: Call, stream: int) -> int:
    source, out = call.inputs[0], call.outputs[0]
    how, op = _way(c, call)
    if not out.count:
        return 0
    return c.nccl.reduce_scatter(source.ptr, out.ptr, out.count * how.parts, how.type, op, c.handle, stream)


def _reduce_scatter(c: Ranks, call: Call, stream: int) -> int:
    out = call.outputs[0]
    how, op = _way(c, call)

    def part(root: int) -> Callable[[], int]:
        source = call.inputs[root]
        target = out if root == c.rank else source
        count = source.count * how.parts
        return lambda: c.nccl.reduce(source.ptr, target.ptr, count, how.type, op, root, c.handle, stream)

    return _group(c, [part(root) for root in range(c.size) if call.inputs[root].count])


# --- moving -------------------------------------------------------------------------------------------------------


def _broadcast(c: Ranks, call: Call, stream: int) -> int:
    buffer = call.inputs[0]
    if not buffer.count:
        return 0
    return c.nccl.broadcast(buffer.ptr, buffer.ptr, buffer.nbytes, BYTES, call.root, c.handle, stream)


def _all_gather_into_tensor(c: Ranks, call: Call, stream: int) -> int:
    source, out = call.inputs[0], call.outputs[0]
    if not source.count:
        return 0
    return c.nccl.all_gather(source.ptr, out.ptr, source.nbytes, BYTES, c.handle, stream)


def _all_gather(c: Ranks, call: Call, stream: int) -> int:
    source = call.inputs[0]

    def part(root: int) -> Callable[[], int]:
        out = call.outputs[root]
        given = source.ptr if root == c.rank else out.ptr
        return lambda: c.nccl.broadcast(given, out.ptr, out.nbytes, BYTES, root, c.handle, stream)

    return _group(c, [part(root) for root in range(c.size) if call.outputs[root].count])


def _messages(
    c: Ranks, stream: int, out: Iterable[tuple[int, int, int]], into: Iterable[tuple[int, int, int]]
) -> int:
    """Sends and receives as one; each is an address, bytes and the other rank, which may be this one."""
    n = c.nccl

    def send(ptr: int, size: int, peer: int) -> Callable[[], int]:
        return lambda: n.send(ptr, size, BYTES, peer, c.handle, stream)

    def recv(ptr: int, size: int, peer: int) -> Callable[[], int]:
        return lambda: n.recv(ptr, size, BYTES, peer, c.handle, stream)

    return _group(c, [*(send(*m) for m in out if m[1]), *(recv(*m) for m in into if m[1])])


def _gather(c: Ranks, call: Call, stream: int) -> int:
    source = call.inputs[0]
    into = [(b.ptr, b.nbytes, peer) for peer, b in enumerate(call.outputs)]
    return _messages(c, stream, [(source.ptr, source.nbytes, call.root)], into)


def _scatter(c: Ranks, call: Call, stream: int) -> int:
    target = call.outputs[0]
    out = [(b.ptr, b.nbytes, peer) for peer, b in enumerate(call.inputs)]
    return _messages(c, stream, out, [(target.ptr, target.nbytes, call.root)])


def _all_to_all(c: Ranks, call: Call, stream: int) -> int:
    out = [(b.ptr, b.nbytes, peer) for peer, b in enumerate(call.inputs)]
    into = [(b.ptr, b.nbytes, peer) for peer, b in enumerate(call.outputs)]
    return _messages(c, stream, out, into)


def _all_to_all_single(c: Ranks, call: Call, stream: int) -> int:
    source, target = call.inputs[0], call.outputs[0]
    item = source.dtype.itemsize
    if call.even and c.native_all_to_all:  # then no rank has given sizes
        each = source.nbytes // c.size
        return c.nccl.all_to_all(source.ptr, target.ptr, each, BYTES, c.handle, stream) if each else 0

    def parts(ptr: int, counts: tuple[int, ...]) -> list[tuple[int, int, int]]:
        found, at = [], ptr
        for peer, count in enumerate(counts):
            found.append((at, count * item, peer))
            at += count * item
        return found

    assert call.in_counts is not None
    assert call.out_counts is not None
    return _messages(c, stream, parts(source.ptr, call.in_counts), parts(target.ptr, call.out_counts))


def _send(c: Ranks, call: Call, stream: int) -> int:
    buffer = call.inputs[0]
    if not buffer.count:
        return 0
    return c.nccl.send(buffer.ptr, buffer.nbytes, BYTES, call.peer, c.handle, stream)


def _recv(c: Ranks, call: Call, stream: int) -> int:
    buffer = call.outputs[0]
    call.source = call.peer
    if not buffer.count:
        return 0
    return c.nccl.recv(buffer.ptr, buffer.nbytes, BYTES, call.peer, c.handle, stream)


def barrier(c: Ranks, scratch: int, stream: int) -> int:
    """One byte reduced over all ranks."""
    return c.nccl.all_reduce(scratch, scratch, 1, BYTES, SUM, c.handle, stream)


OPERATIONS: dict[str, Operation] = {
    "all_gather": _all_gather,
    "all_gather_into_tensor": _all_gather_into_tensor,
    "all_reduce": _all_reduce,
    "all_to_all": _all_to_all,
    "all_to_all_single": _all_to_all_single,
    "broadcast": _broadcast,
    "gather": _gather,
    "recv": _recv,
    "reduce": _reduce,
    "reduce_scatter": _reduce_scatter,
    "reduce_scatter_tensor": _reduce_scatter_tensor,
    "scatter": _scatter,
    "send": _send,
    **ONE_SIDED,
}


def batch(c: Ranks, calls: Iterable[Call], stream: int) -> int:
    """Several operations as one group call."""

    def one(call: Call) -> Callable[[], int]:
        return lambda: OPERATIONS[call.op.name](c, call, stream)

    return _group(c, [one(call) for call in calls])
