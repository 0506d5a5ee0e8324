"""The operations of the table as calls of a library with NCCL's API, all on one stream.

``OPERATIONS[name](communicator, call, stream)`` returns the library's code. Lists of arrays become
groups of broadcasts, reductions or sends and receives, so sizes may differ by rank and nothing is
copied. Operations that do not reduce pass their data as bytes. The choice of functions depends only
on what is equal on all ranks.

Therefore gather and scatter are sends and receives with every version. NCCL 2.28 has ncclGather and
ncclScatter, which need the root's arrays in one block of memory: only the root knows whether the
arrays of its list are contiguous, and all ranks have to call the same function. Copies to and from
such a block on the root would cost world size times the array in memory, one more pass over it, and
an order among all streams that use it, without a gain: NCCL itself divides the two functions into
these sends and receives.

An all_gather to a list is a group of broadcasts for the same reason: only the rank itself knows
whether its list is contiguous in memory, where one ncclAllGather would do. From 2.29 on NCCL makes
one kernel of such a group, a ring that gathers all of them at once (its
scheduler/allgatherv_sched.cc); older versions do one broadcast after another, which move the same
bytes over each link and take longer for small arrays. all_gather_into_tensor is always one
ncclAllGather.

Options of a single call are passed to each of the library's collectives that the call consists of.
Sends and receives have no options: hints have no effect there, and a required choice of algorithms
is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

from unicoll.backend import Call
from unicoll.calls.options import CallOptions
from unicoll.device_collectives.communicators.communicator import AnyCommunicator
from unicoll.device_collectives.interface import AVG, SUM, CollectiveLibrary, NativeReduction
from unicoll.device_collectives.memory.one_sided import ONE_SIDED
from unicoll.device_collectives.reductions import BYTES
from unicoll.errors import DistArgumentError

Operation = Callable[[AnyCommunicator, Call, int], int]
_P2P_OPERATIONS = frozenset(("send", "recv", "gather", "scatter", "all_to_all"))
"""Operations that are sends and receives in the library; an all_to_all_single is too, unless the
library has one."""


def _reduction(c: AnyCommunicator, call: Call) -> tuple[NativeReduction, int]:
    """The call's reduction in the library, and the operation to pass, with the call's factor."""
    assert call.reduce is not None
    dtype = (call.inputs or call.outputs)[0].dtype
    found = c.reduction(dtype, call.reduce)
    # A reduction that the library lacks was refused before: by the backend's Caps, or because of
    # the devices of the group.
    assert found is not None
    if c.size == 1 and found.op == AVG:
        # Sum and average are the same on one rank, where NCCL refuses the average of float8.
        found = found._replace(op=SUM)
    return found, c.premul_op(call, found.type) if found.has_factor else found.op


# --- reductions -----------------------------------------------------------------------------------


def _scale_on_one_rank(
    c: AnyCommunicator,
    call: Call,
    function: Callable[..., int],
    reduction: NativeReduction,
    stream: int,
    *rest: int,
) -> int:
    """A sum with a factor in a group of one rank.

    Before 2.29.7 NCCL's kernel omits the last elements of some sizes (src/device/onerank.cu: it
    divides the elements by the number of blocks and rounds down); they are a second call.
    """
    source, out = call.inputs[0], call.outputs[0]
    count = out.count * reduction.parts
    if not count:
        return 0
    item = out.nbytes // count
    first = count
    if not c.scales_one_rank:
        blocks = min(32, -(-out.nbytes // (16 << 10)))
        pack = 16 // item
        first = min(count, blocks * (-(-(count // blocks) // pack) * pack))

    def part(start: int, stop: int) -> Callable[[], int]:
        offset = start * item
        return lambda: function(
            source.ptr + offset,
            out.ptr + offset,
            stop - start,
            reduction.type,
            *rest,
            c.handle,
            stream,
        )

    return c.grouped([part(0, first), *([part(first, count)] if first < count else [])])


def _all_reduce(c: AnyCommunicator, call: Call, stream: int) -> int:
    source, out = call.inputs[0], call.outputs[0]
    reduction, op = _reduction(c, call)
    # All ranks have the same size, so all of them leave out an empty call.
    if not source.count:
        return 0
    if c.size == 1 and reduction.has_factor:
        return _scale_on_one_rank(c, call, c.library.all_reduce, reduction, stream, op)
    return c.library.all_reduce(
        source.ptr, out.ptr, source.count * reduction.parts, reduction.type, op, c.handle, stream
    )


def _reduce(c: AnyCommunicator, call: Call, stream: int) -> int:
    source = call.inputs[0]
    # The library writes the output on the root only, so the other ranks pass any address.
    out = call.outputs[0] if call.outputs else source
    reduction, op = _reduction(c, call)
    if not source.count:
        return 0
    if c.size == 1 and reduction.has_factor:
        return _scale_on_one_rank(c, call, c.library.reduce, reduction, stream, op, call.root)
    count = source.count * reduction.parts
    return c.library.reduce(
        source.ptr, out.ptr, count, reduction.type, op, call.root, c.handle, stream
    )


def _reduce_scatter_tensor(c: AnyCommunicator, call: Call, stream: int) -> int:
    source, out = call.inputs[0], call.outputs[0]
    reduction, op = _reduction(c, call)
    if not out.count:
        return 0
    if c.size == 1 and reduction.has_factor:
        return _scale_on_one_rank(c, call, c.library.reduce_scatter, reduction, stream, op)
    return c.library.reduce_scatter(
        source.ptr, out.ptr, out.count * reduction.parts, reduction.type, op, c.handle, stream
    )


def _reduce_scatter(c: AnyCommunicator, call: Call, stream: int) -> int:
    out = call.outputs[0]
    reduction, op = _reduction(c, call)
    if c.size == 1 and reduction.has_factor:
        return _scale_on_one_rank(c, call, c.library.reduce, reduction, stream, op, 0)

    def part(root: int) -> Callable[[], int]:
        source = call.inputs[root]
        # The library writes the target on the root of each part only.
        target = out if root == c.rank else source
        count = source.count * reduction.parts
        return lambda: c.library.reduce(
            source.ptr, target.ptr, count, reduction.type, op, root, c.handle, stream
        )

    return c.grouped([part(root) for root in range(c.size) if call.inputs[root].count])


# --- data movement --------------------------------------------------------------------------------


def _broadcast(c: AnyCommunicator, call: Call, stream: int) -> int:
    buffer = call.inputs[0]
    if not buffer.count:
        return 0
    return c.library.broadcast(
        buffer.ptr, buffer.ptr, buffer.nbytes, BYTES, call.root, c.handle, stream
    )


def _all_gather_into_tensor(c: AnyCommunicator, call: Call, stream: int) -> int:
    source, out = call.inputs[0], call.outputs[0]
    if not source.count:
        return 0
    return c.library.all_gather(source.ptr, out.ptr, source.nbytes, BYTES, c.handle, stream)


def _all_gather(c: AnyCommunicator, call: Call, stream: int) -> int:
    source = call.inputs[0]

    def part(root: int) -> Callable[[], int]:
        out = call.outputs[root]
        send = source.ptr if root == c.rank else out.ptr
        return lambda: c.library.broadcast(send, out.ptr, out.nbytes, BYTES, root, c.handle, stream)

    return c.grouped([part(root) for root in range(c.size) if call.outputs[root].count])


def _exchange(
    c: AnyCommunicator,
    stream: int,
    sends: Iterable[tuple[int, int, int]],
    receives: Iterable[tuple[int, int, int]],
) -> int:
    """Sends and receives as one group call; each is an address, bytes and the peer, which may be
    this rank."""
    n = c.library

    def send(ptr: int, size: int, peer: int) -> Callable[[], int]:
        return lambda: n.send(ptr, size, BYTES, peer, c.handle, stream)

    def recv(ptr: int, size: int, peer: int) -> Callable[[], int]:
        return lambda: n.recv(ptr, size, BYTES, peer, c.handle, stream)

    # Both sides leave out empty messages, whose sizes they know. Sends and receives are one group
    # call, so that no order between sends and receives can deadlock.
    return c.grouped([*(send(*m) for m in sends if m[1]), *(recv(*m) for m in receives if m[1])])


def _gather(c: AnyCommunicator, call: Call, stream: int) -> int:
    source = call.inputs[0]
    receives = [(b.ptr, b.nbytes, peer) for peer, b in enumerate(call.outputs)]
    return _exchange(c, stream, [(source.ptr, source.nbytes, call.root)], receives)


def _scatter(c: AnyCommunicator, call: Call, stream: int) -> int:
    target = call.outputs[0]
    sends = [(b.ptr, b.nbytes, peer) for peer, b in enumerate(call.inputs)]
    return _exchange(c, stream, sends, [(target.ptr, target.nbytes, call.root)])


def _all_to_all(c: AnyCommunicator, call: Call, stream: int) -> int:
    sends = [(b.ptr, b.nbytes, peer) for peer, b in enumerate(call.inputs)]
    receives = [(b.ptr, b.nbytes, peer) for peer, b in enumerate(call.outputs)]
    return _exchange(c, stream, sends, receives)


def _all_to_all_single(c: AnyCommunicator, call: Call, stream: int) -> int:
    source, target = call.inputs[0], call.outputs[0]
    item = source.dtype.itemsize
    # `even` means that no rank has passed split sizes, so all ranks choose the same function.
    if call.even and c.native_all_to_all:
        each = source.nbytes // c.size
        return (
            c.library.all_to_all(source.ptr, target.ptr, each, BYTES, c.handle, stream)
            if each
            else 0
        )

    def parts(ptr: int, counts: tuple[int, ...]) -> list[tuple[int, int, int]]:
        found, start = [], ptr
        for peer, count in enumerate(counts):
            found.append((start, count * item, peer))
            start += count * item
        return found

    assert call.in_counts is not None
    assert call.out_counts is not None
    return _exchange(
        c, stream, parts(source.ptr, call.in_counts), parts(target.ptr, call.out_counts)
    )


def _send(c: AnyCommunicator, call: Call, stream: int) -> int:
    buffer = call.inputs[0]
    if not buffer.count:
        return 0
    return c.library.send(buffer.ptr, buffer.nbytes, BYTES, call.peer, c.handle, stream)


def _recv(c: AnyCommunicator, call: Call, stream: int) -> int:
    buffer = call.outputs[0]
    call.source = call.peer
    if not buffer.count:
        return 0
    return c.library.recv(buffer.ptr, buffer.nbytes, BYTES, call.peer, c.handle, stream)


def _barrier(c: AnyCommunicator, call: Call, stream: int) -> int:
    """One byte reduced over all ranks."""
    return c.library.all_reduce(c.scratch, c.scratch, 1, BYTES, SUM, c.handle, stream)


OPERATIONS: dict[str, Operation] = {
    "all_gather": _all_gather,
    "all_gather_into_tensor": _all_gather_into_tensor,
    "all_reduce": _all_reduce,
    "all_to_all": _all_to_all,
    "all_to_all_single": _all_to_all_single,
    "barrier": _barrier,
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


def batch(c: AnyCommunicator, calls: Iterable[Call], stream: int) -> int:
    """Several operations as one group call."""
    # Calls that are groups themselves are nested: the library begins all of them when the outermost
    # group ends.
    return c.grouped(partial(OPERATIONS[call.op.name], c, call, stream) for call in calls)


def check_options(options: CallOptions, library: CollectiveLibrary) -> None:
    """Raise DistArgumentError if the library is too old for options of a call."""
    if not library.has("with_options"):
        raise DistArgumentError(
            f"using({options}): options of single calls need {library.needed('with_options')}"
        )


def check_algorithm(call: Call, options: CallOptions, native_all_to_all: bool) -> None:
    """Raise DistArgumentError if a call requires an algorithm but has none to choose from."""
    name = call.op.name
    if options.algorithm is None or options.force_algorithm is False:
        return
    if name in _P2P_OPERATIONS or (
        name == "all_to_all_single" and not (call.even and native_all_to_all)
    ):
        raise DistArgumentError(
            f"{name}: it consists of sends and receives, to which algorithm={options.algorithm!r}"
            " does not apply: omit it, or pass force_algorithm=False",
            op=name,
        )
