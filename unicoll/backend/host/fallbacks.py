"""Collectives for backends that lack them, over the operations that they have. One small function
per algorithm.

A fallback is a function ``fallback(ops, call)``, found in :data:`FALLBACKS` by the name of the
operation. It moves data by :class:`GroupOps`: either over sends and receives (:class:`MessageOps`),
or over a collective that moves data (:class:`CollectiveOps`). Reductions combine the ranks' arrays
in rank order on the CPU (:mod:`unicoll.arrays.kernels`).

:func:`perform` first compares the calls of all ranks: it raises CollectiveMismatchError on all of
them where operation, dtype, shape, reduction, root or sizes differ. That exchange is a barrier,
too: no rank returns before all have entered.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from unicoll.arrays.conversion import Buffer
from unicoll.arrays.kernels import Flat, Kernel, kernel_for
from unicoll.arrays.types import BY_NAME
from unicoll.backend import operation_errors
from unicoll.backend.host.size_agreement import check_sizes, exchange_sizes, shape_hash
from unicoll.calls.call import INTERNAL_TAGS, Call, ProxyCall
from unicoll.calls.ops import OPS, Arity, Sizes
from unicoll.errors import DistError

if TYPE_CHECKING:
    from unicoll.backend.contract import Caps, Context
    from unicoll.backend.host.host_backend import HostBackend

TAG = INTERNAL_TAGS[0]
"""Tag of the messages of fallbacks."""
_SMALL = 1 << 14
"""Bytes up to which a reduction gathers all arrays on every rank instead of reducing them in
parts."""
_SEGMENT = 1 << 18
"""Bytes of an array that a scan handles at once."""
_ROUND = -9
"""Marks the signatures of the collectives of :class:`GroupOps`; see also
:mod:`unicoll.backend.host.size_agreement`."""
_FAILURE_S = 3.0
"""How long the other ranks wait for the error that rank 0 writes."""
_UINT8 = BY_NAME["uint8"]
_MESSAGES = frozenset(("send", "recv"))
_GATHERS = ("all_gather_into_tensor", "all_gather", "broadcast")
"""Collectives that move data, the best one first; :class:`CollectiveOps` needs one of them."""


# --- moving data ----------------------------------------------------------------------------------


class GroupOps(ABC):
    """The operations that a fallback is made of, for one call.

    Arrays are contiguous, 1-D, of any NumPy dtype. Every call has to be made by all ranks of the
    group.

    Attributes:
        call: the call that the fallback does.
        rank, size: of this process in the group, and of the group.
    """

    def __init__(self, backend: HostBackend, call: Call) -> None:
        self.call = call
        self.rank = backend.context.rank
        self.size = backend.context.size
        self._backend = backend
        self._deadline = time.monotonic() + call.timeout
        self._gather = next((name for name in _GATHERS if name in backend.caps.native), "")
        self._rounds = 0

    @property
    def context(self) -> Context:
        """The group."""
        return self._backend.context

    @abstractmethod
    def exchange(self, sends: Mapping[int, Flat], receives: Mapping[int, Flat]) -> None:
        """One round of messages: ``sends[peer]`` goes to a member, ``receives[peer]`` is filled by
        one.

        Both sides name arrays of the same number of bytes. A rank that sends and receives nothing
        in a round takes part with empty mappings. No rank names itself.
        """

    def all_gather(self, mine: Flat) -> Flat:
        """A new array whose row r is rank r's ``mine``, which has one size and dtype on all ranks.

        By the backend's own collective if it has one: a backend compares its own collectives, so it
        also finds a rank that calls one of them while this rank does a fallback.
        """
        rows = np.empty((self.size, mine.size), mine.dtype)
        given, taken = mine.view(np.uint8), [row.view(np.uint8) for row in rows]
        if not mine.size:
            return rows
        if self._gather == "all_gather_into_tensor":
            self._collective((given,), (rows.reshape(-1).view(np.uint8),))
        elif self._gather == "all_gather":
            self._collective((given,), taken)
        else:
            taken[self.rank][:] = given
            for root, row in enumerate(taken):
                self._collective((row,), () if root == self.rank else (row,), root)
        return rows

    def execute(self, call: Call) -> None:
        """Execute another collective within this one."""
        self._backend.perform(call)

    def _collective(self, inputs: Sequence[Flat], outputs: Sequence[Flat], root: int = -1) -> None:
        made = {id(flat): Buffer(flat, _UINT8, flat.shape, flat) for flat in (*inputs, *outputs)}
        call = ProxyCall(
            self.call,
            OPS[self._gather],
            tuple(made[id(flat)] for flat in inputs),
            tuple(made[id(flat)] for flat in outputs),
            self._remaining(),
            root=root,
        )
        # Each round has a signature of its own, so that a rank in another round, or in another
        # call, is found.
        call.signature = hash((self.call.signature, _ROUND, self._rounds))
        self._rounds += 1
        self._backend.perform(call)

    def _remaining(self) -> float:
        return max(0.001, self._deadline - time.monotonic())


class MessageOps(GroupOps):
    """Over the backend's sends and receives."""

    def exchange(self, sends: Mapping[int, Flat], receives: Mapping[int, Flat]) -> None:
        backend = self._backend
        outgoing = [self._message("send", peer, flat) for peer, flat in sends.items() if flat.size]
        incoming = [
            self._message("recv", peer, flat) for peer, flat in receives.items() if flat.size
        ]
        if not incoming:
            for message in outgoing:
                backend.run(message)
            return
        # The sends are in the background: a send may wait until its receiver receives, and no rank
        # could if all were in a send.
        pending = [backend.post((message,)) for message in outgoing]
        for message in incoming:
            backend.run(message)
        for completion in pending:
            completion.wait(None)

    def all_gather(self, mine: Flat) -> Flat:
        """Dissemination (Bruck et al., 1997): ceil(log2 size) rounds, each of which doubles what a
        rank has."""
        if self._gather:
            return super().all_gather(mine)
        rows = np.empty((self.size, mine.size), mine.dtype)
        rows[0] = mine
        have = 1
        while have < self.size:
            count = min(have, self.size - have)
            arriving = rows[have : have + count].reshape(-1)
            self.exchange(
                {(self.rank - have) % self.size: rows[:count].reshape(-1)},
                {(self.rank + have) % self.size: arriving},
            )
            have += count
        return np.roll(rows, self.rank, axis=0)

    def _message(self, op: str, peer: int, flat: Flat) -> Call:
        buffers = (Buffer(flat, _UINT8, (flat.nbytes,), flat.view(np.uint8)),)
        inputs, outputs = (buffers, ()) if op == "send" else ((), buffers)
        message = ProxyCall(self.call, OPS[op], inputs, outputs, self._remaining())
        message.peer, message.tag = peer, TAG
        return message


class CollectiveOps(GroupOps):
    """Over one of the backend's collectives that move data, which gives every rank the arrays of
    all."""

    def exchange(self, sends: Mapping[int, Flat], receives: Mapping[int, Flat]) -> None:
        lengths = np.zeros(self.size, np.int64)
        for peer, flat in sends.items():
            lengths[peer] = flat.nbytes
        # The element table[i, j] is the number of bytes from rank i to rank j.
        table = self.all_gather(lengths)
        packed = np.zeros(int(table.sum(axis=1).max()), np.uint8)
        start = 0
        for peer in sorted(sends):
            packed[start : start + lengths[peer]] = sends[peer].view(np.uint8)
            start += lengths[peer]
        arrived = self.all_gather(packed)
        for peer, flat in receives.items():
            start = table[peer, : self.rank].sum()
            flat.view(np.uint8)[:] = arrived[peer, start : start + flat.nbytes]


def available(caps: Caps) -> frozenset[str]:
    """Names of the operations of a backend with these capabilities: native ones, and those with a
    fallback."""
    moves_data = caps.native >= _MESSAGES or not caps.native.isdisjoint(_GATHERS)
    if caps.fallbacks and "cpu" in caps.devices and moves_data:
        return caps.native | FALLBACKS.keys()
    return caps.native


def group_ops(backend: HostBackend, call: Call) -> GroupOps:
    """The operations for the fallback of a call."""
    kind = MessageOps if backend.caps.native >= _MESSAGES else CollectiveOps
    return kind(backend, call)


# --- agreement ------------------------------------------------------------------------------------


def perform(ops: GroupOps, call: Call) -> None:
    """Compare the ranks' calls, then do the call by its fallback; writes ``call.outputs``.

    Raises, on all ranks:
        CollectiveMismatchError: the calls differ.
        DistArgumentError: the root has refused its list; the group stays usable.
    """
    if ops.size > 1:
        _agree(ops, call)
    with np.errstate(all="ignore"):
        FALLBACKS[call.op.name](ops, call)


def _agree(ops: GroupOps, call: Call) -> None:
    context, sizes = ops.context, _sizes_number(call)
    mine = np.array([call.seq, call.signature, sizes], np.int64)
    told = ops.all_gather(mine)
    differing = np.flatnonzero((told[:, :2] != mine[:2]).any(axis=1))
    if differing.size:
        raise _mismatch(ops, call, int(differing[0]), int(told[differing[0], 0]))
    if sizes >= 0 and (told[:, 2] == sizes).all():
        return
    if call.op.root_has_sizes:
        exchange_sizes(call, ops.rank, context.ranks, context.name, ops.execute)
    else:
        check_sizes(call, ops.rank, context.ranks, context.name, ops.execute)


def _sizes_number(call: Call) -> int:
    """A number that is equal on all ranks and not negative if the sizes that signatures do not
    cover fit together."""
    if call.op.root_has_sizes:
        return shape_hash(call)
    if call.op.sizes is not Sizes.EXCHANGED:
        return 0
    counts = {*(call.in_counts or ()), *(call.out_counts or ())}
    return counts.pop() if len(counts) == 1 else -1


def _mismatch(ops: GroupOps, call: Call, peer: int, seq: int) -> DistError:
    """The error of calls that differ: all ranks know, the first one writes it, and the others wait
    for that."""
    control = ops.context.job.control
    if ops.rank and control is not None:
        failure = control.group_failure(ops.context.name, _FAILURE_S)
        if failure is not None:
            return failure
    return operation_errors.mismatch_error(ops.context, call, peer, seq)


# --- building blocks ------------------------------------------------------------------------------


def flat_of(buffer: Buffer) -> Flat:
    """A buffer's memory as a 1-D array."""
    assert buffer.flat is not None
    return buffer.flat


def kernel_of(call: Call) -> Kernel:
    """The reduction of a call that reduces."""
    assert call.dtype is not None
    assert call.reduce is not None
    return kernel_for(call.dtype, call.reduce)


def split(flat: Flat, counts: Iterable[int]) -> list[Flat]:
    """An array cut into parts of these sizes."""
    parts, start = [], 0
    for count in counts:
        parts.append(flat[start : start + count])
        start += count
    return parts


def even_parts(flat: Flat, size: int) -> list[Flat]:
    """An array cut into ``size`` nearly equal parts."""
    bounds = [flat.size * i // size for i in range(size + 1)]
    return [flat[start:stop] for start, stop in pairwise(bounds)]


def exchange_parts(ops: GroupOps, sources: Sequence[Flat], targets: Sequence[Flat]) -> None:
    """Pairwise exchange: the j-th source of rank i becomes the i-th target of rank j."""
    peers = [(ops.rank + distance) % ops.size for distance in range(1, ops.size)]
    ops.exchange({p: sources[p] for p in peers}, {p: targets[p] for p in peers})
    # If both are the same array, it is an input, which may be read-only.
    if targets[ops.rank] is not sources[ops.rank]:
        targets[ops.rank][:] = sources[ops.rank]


def ring_all_gather(ops: GroupOps, parts: Sequence[Flat]) -> None:
    """Ring: ``parts[r]`` of rank r to all ranks, in size - 1 rounds between neighbours."""
    left, right = (ops.rank - 1) % ops.size, (ops.rank + 1) % ops.size
    for distance in range(ops.size - 1):
        giving, taking = (ops.rank - distance) % ops.size, (ops.rank - distance - 1) % ops.size
        ops.exchange({right: parts[giving]}, {left: parts[taking]})


def reduce_parts(ops: GroupOps, kernel: Kernel, parts: Sequence[Flat], out: Flat) -> None:
    """Every rank reduces one part: ``out`` becomes the reduction of all ranks' ``parts[rank]``, in
    rank order."""
    own = parts[ops.rank]
    arrived = [own if r == ops.rank else np.empty_like(own) for r in range(ops.size)]
    exchange_parts(ops, parts, arrived)
    kernel.combine(arrived, out)


# --- the collectives ------------------------------------------------------------------------------


def barrier(ops: GroupOps, call: Call) -> None:
    """The comparison of the calls is a barrier."""


def broadcast(ops: GroupOps, call: Call) -> None:
    """Binomial tree."""
    flat, place, reach = flat_of(call.inputs[0]), (ops.rank - call.root) % ops.size, 1
    while reach < ops.size:
        child, parent = place + reach, place - reach
        sends = {(child + call.root) % ops.size: flat} if place < reach and child < ops.size else {}
        receives = {(parent + call.root) % ops.size: flat} if reach <= place < 2 * reach else {}
        ops.exchange(sends, receives)
        reach *= 2


def all_reduce(ops: GroupOps, call: Call) -> None:
    """Small arrays: every rank reduces all. Larger ones: every rank reduces one part, then a ring
    gathers the parts."""
    kernel, source, out = kernel_of(call), flat_of(call.inputs[0]), flat_of(call.outputs[0])
    if source.nbytes <= _SMALL:
        kernel.combine([*ops.all_gather(source)], out)
        return
    parts = even_parts(out, ops.size)
    reduce_parts(ops, kernel, even_parts(source, ops.size), parts[ops.rank])
    ring_all_gather(ops, parts)


def reduce(ops: GroupOps, call: Call) -> None:
    """Every rank reduces one part, then the root gathers the parts."""
    source = flat_of(call.inputs[0])
    parts = even_parts(source, ops.size)
    result = np.empty_like(parts[ops.rank])
    reduce_parts(ops, kernel_of(call), parts, result)
    _gather(
        ops,
        call.root,
        result,
        even_parts(flat_of(call.outputs[0]), ops.size) if call.outputs else (),
    )


def reduce_scatter(ops: GroupOps, call: Call) -> None:
    """Every rank reduces its part."""
    out = flat_of(call.outputs[0])
    sources = [flat_of(b) for b in call.inputs]
    parts = sources if call.op.inputs is Arity.PER_RANK else even_parts(sources[0], ops.size)
    reduce_parts(ops, kernel_of(call), parts, out)


def all_gather(ops: GroupOps, call: Call) -> None:
    """Ring."""
    targets = [flat_of(b) for b in call.outputs]
    parts = targets if call.op.outputs is Arity.PER_RANK else even_parts(targets[0], ops.size)
    parts[ops.rank][:] = flat_of(call.inputs[0])
    ring_all_gather(ops, parts)


def gather(ops: GroupOps, call: Call) -> None:
    """Every rank sends to the root."""
    _gather(ops, call.root, flat_of(call.inputs[0]), [flat_of(b) for b in call.outputs])


def _gather(ops: GroupOps, root: int, mine: Flat, parts: Sequence[Flat]) -> None:
    if ops.rank != root:
        ops.exchange({root: mine}, {})
        return
    ops.exchange({}, {r: part for r, part in enumerate(parts) if r != root})
    parts[root][:] = mine


def scatter(ops: GroupOps, call: Call) -> None:
    """The root sends to every rank."""
    out, parts, root = flat_of(call.outputs[0]), [flat_of(b) for b in call.inputs], call.root
    if ops.rank != root:
        ops.exchange({}, {root: out})
        return
    ops.exchange({r: part for r, part in enumerate(parts) if r != root}, {})
    out[:] = parts[root]


def all_to_all(ops: GroupOps, call: Call) -> None:
    """Pairwise exchange."""
    sources, targets = [flat_of(b) for b in call.inputs], [flat_of(b) for b in call.outputs]
    if call.op.inputs is Arity.ONE:
        assert call.in_counts is not None
        assert call.out_counts is not None
        sources, targets = split(sources[0], call.in_counts), split(targets[0], call.out_counts)
    exchange_parts(ops, sources, targets)


def scan(ops: GroupOps, call: Call) -> None:
    """Every rank sends its array to the ranks after it, which reduce in rank order, segment by
    segment."""
    flat, kernel = flat_of(call.outputs[0]), kernel_of(call)
    step = max(1, _SEGMENT // flat.itemsize)
    for start in range(0, flat.size, step):
        own = flat[start : start + step]
        before = [np.empty_like(own) for _ in range(ops.rank)]
        ops.exchange(dict.fromkeys(range(ops.rank + 1, ops.size), own), dict(enumerate(before)))
        parts = before if call.op.exclusive else [*before, own]
        if parts:
            kernel.combine(parts, own)


def one_rank(call: Call) -> None:
    """Any collective in a group of one: outputs are copies of inputs, reduced over one rank."""
    if call.op.exclusive:
        return
    if call.reduce is not None:
        kernel_of(call).combine([flat_of(call.inputs[0])], flat_of(call.outputs[0]))
        return
    for source, target in zip(call.inputs, call.outputs, strict=False):
        if source is not target:
            flat_of(target)[:] = flat_of(source)


Fallback = Callable[[GroupOps, Call], None]
FALLBACKS: dict[str, Fallback] = {
    row.name: globals()[row.fallback] for row in OPS.values() if row.fallback
}
"""The fallback of each collective, as its row of the table names it."""
