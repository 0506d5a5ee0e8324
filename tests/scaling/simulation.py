"""Simulates collectives of thousands of ranks without processes, to count their messages, bytes and rounds.

The behaviour of an algorithm depends only on sizes, never on data, so one rank can run alone: the real functions of
:mod:`gloo_fallback` run on connections that record sends and receives and return no data, on slots that all share the
same memory, and with a kernel that counts reduced bytes (:func:`run`). The combined traces of all ranks show that
every message is received and that no rank waits forever, and the length of the longest chain of messages
(:func:`replay`).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from types import SimpleNamespace
from typing import Any, NamedTuple, NoReturn, cast
from unittest import mock

import numpy as np

import unicoll as dist
from gloo_fallback.algorithms import hierarchical, over_sockets, shared_memory
from gloo_fallback.algorithms.hierarchy_context import HierarchyContext
from gloo_fallback.shm.slots import SLOT, Slots
from gloo_fallback.transport import selection
from gloo_fallback.transport.connections import GroupConnections
from gloo_fallback.transport.exchange import HEADER_SIZE, Connections, ExchangePlan
from gloo_fallback.transport.striping import Stripe
from tests.support.calls import invoke
from unicoll.arrays.compression import Codec
from unicoll.arrays.conversion import Buffer
from unicoll.arrays.kernels import Flat, Kernel
from unicoll.arrays.types import BY_NAME, DType, ReduceOp
from unicoll.backend import Context
from unicoll.backend.group_state import GroupState
from unicoll.calls.call import Call
from unicoll.calls.ops import OPS, Arity, Sizes

__all__ = [
    "BUFFER",
    "ROOTED",
    "WHOLE",
    "Case",
    "Deadlock",
    "Trace",
    "Turn",
    "replay",
    "run",
    "tallying",
    "watch",
]

BUFFER = 1 << 14
"""Bytes that a connection is assumed to buffer while the receiver is not receiving."""

_MEMORY = np.zeros((2, 160 << 20), np.uint8)
"""Shared by all inputs, and by all outputs, of all ranks; it is never written, so it uses no memory."""


WHOLE = tuple(name for name, row in OPS.items() if row.in_place)
"""Operations on one array; all others but the barrier have a block for each rank."""
ROOTED = tuple(name for name, row in OPS.items() if row.rooted)


# --- what is run ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """One collective.

    Attributes:
        op: its name.
        ranks: how many there are.
        count: elements of the array (``WHOLE``), otherwise of the block that goes between two ranks.
        per_host: ranks of each host; 1 is sockets only.
        cyclic: ranks are dealt to the hosts in turn, and not host by host.
        compression: of an all_reduce, or "".
        uneven: blocks have different sizes, some of them none; ``count`` is the largest, or nearly.
    """

    op: str
    ranks: int
    count: int = 1
    root: int = 0
    dtype: str = "float32"
    per_host: int = 1
    cyclic: bool = False
    uneven: bool = False
    deterministic: bool = False
    compression: str = ""

    @property
    def type(self) -> DType:
        """The element type."""
        return BY_NAME[self.dtype]

    @cached_property
    def nodes(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of each host."""
        hosts = -(-self.ranks // self.per_host)
        if self.cyclic:
            return tuple(tuple(range(i, self.ranks, hosts)) for i in range(hosts))
        return tuple(
            tuple(range(i, min(i + self.per_host, self.ranks))) for i in range(0, self.ranks, self.per_host)
        )

    def block(self, giver: int, taker: int = 0) -> int:
        """Elements of a block."""
        if not self.uneven:
            return self.count
        return self.count * ((giver + 2 * taker) % 3) // 2 + (giver + taker) % 2

    def given(self, rank: int) -> list[int]:
        """Elements that a rank has for each in an all_to_all; otherwise nothing."""
        return [self.block(rank, j) for j in range(self.ranks)] if self._personal else []

    def taken(self, rank: int) -> list[int]:
        """Elements that a rank gets from each in an all_to_all; otherwise nothing."""
        return [self.block(j, rank) for j in range(self.ranks)] if self._personal else []

    @property
    def _personal(self) -> bool:
        return self.op.startswith("all_to_all")

    def arrays(self, rank: int) -> tuple[list[int], list[int]]:
        """Elements of a rank's inputs and outputs."""
        row, blocks = OPS[self.op], [self.block(i) for i in range(self.ranks)]
        here = {
            Arity.NONE: False,
            Arity.ONE_AT_ROOT: rank == self.root,
            Arity.PER_RANK_AT_ROOT: rank == self.root,
            Arity.ONE_OFF_ROOT: rank != self.root,
        }
        found = []
        for arity, several, parts in (
            (row.inputs, row.scattered, self.given(rank)),
            (row.outputs, row.sizes in (Sizes.GATHERED, Sizes.GATHERED_FLAT), self.taken(rank)),
        ):
            sizes = parts or (blocks if several else [self.count if row.in_place else blocks[rank]])
            found.append(([sum(sizes)] if row.joined else sizes) if here.get(arity, True) else [])
        return found[0], found[1]

    @cached_property
    def table(self) -> Flat:
        """The sizes that every rank sends before an all_to_all: elements for each rank, elements from each rank."""
        if not self.uneven:
            return np.broadcast_to(np.int64(self.count), (self.ranks, 2 * self.ranks))
        given = [self.given(i) for i in range(self.ranks)]
        return np.hstack([np.array(given, np.int64), np.array(given, np.int64).T])


# --- one rank --------------------------------------------------------------------------------------------------------


class Turn(NamedTuple):
    """One action of a rank: a send, a receive, both at once, or (neither) a step of the slots."""

    to: int = -1
    sent: int = 0
    frm: int = -1
    got: int = 0


def _turn(to: int, sent: int, frm: int, got: int) -> Turn | None:
    """The action for these bytes; None without bytes, because they are not sent."""
    return Turn(to if sent else -1, sent, frm if got else -1, got) if sent or got else None


def _swapped(to: int, sent: int, frm: int, got: int) -> list[Turn]:
    """A message each way, behind the headers; what no connection is trusted to hold goes while the other comes."""
    got += HEADER_SIZE
    if max(sent, got) > BUFFER:
        return [Turn(to, sent, frm, got)]
    return [Turn(to, sent), Turn(-1, 0, frm, got)]


class Trace:
    """The actions of one rank.

    Attributes:
        turns: in order.
        copied: bytes copied from one array to another, not counting what exchanges and sockets copy.
        reduced: bytes of accumulators that a contribution was folded into.
    """

    def __init__(self) -> None:
        self.turns: list[Turn] = []
        self.copied = 0
        self.reduced = 0

    @property
    def messages(self) -> int:
        """Messages sent."""
        return sum(turn.to >= 0 for turn in self.turns)

    @property
    def bytes(self) -> int:
        """Bytes sent."""
        return sum(turn.sent for turn in self.turns)

    @property
    def steps(self) -> int:
        """Steps of the slots."""
        return sum(turn.to < 0 and turn.frm < 0 for turn in self.turns)

    @property
    def peers(self) -> set[int]:
        """Ranks that a connection is needed to."""
        return {peer for turn in self.turns for peer in (turn.to, turn.frm) if peer >= 0}


class _Counted(np.ndarray[Any, Any]):
    """An array that counts the elements assigned to its parts and does not store them."""

    notes: Trace | None = None

    def __array_finalize__(self, source: Any) -> None:
        self.notes = getattr(source, "notes", None)

    def __setitem__(self, key: Any, value: Any) -> None:
        target = self[key]
        assert target.shape == np.shape(value)
        assert self.notes is not None
        self.notes.copied += target.nbytes


def _array(count: int, dtype: np.dtype[Any], trace: Trace, side: int = 0) -> Flat:
    assert count * dtype.itemsize <= _MEMORY.shape[1]
    counted = _MEMORY[side, : count * dtype.itemsize].view(dtype).view(_Counted)
    counted.notes = trace
    return counted


class _Call(Call):
    """A call with the trace that its reductions are counted in."""

    trace: Trace


class _Tally(Kernel):
    """A kernel that only counts."""

    def __init__(self, call: Call) -> None:
        assert call.dtype is not None
        assert call.reduce is not None
        super().__init__(call.dtype, call.reduce)
        self._trace = cast(_Call, call).trace
        self.ufunc = self._add

    def _add(self, first: Flat, second: Flat, out: Flat | None = None) -> Flat:
        out = np.empty(first.size, self.acc) if out is None else out
        assert first.size == second.size == out.size
        self._trace.reduced += out.size * self.acc.itemsize
        return out

    def begin(self, acc: Flat, values: Flat) -> None:
        assert acc.size == values.size

    def reduce_into(self, acc: Flat, values: Flat) -> None:
        self._add(acc, values, acc)

    def finish(self, acc: Flat, out: Flat, ranks: int) -> None:
        assert acc.size == out.size
        self._trace.copied += out.nbytes

    def combine(self, pieces: Sequence[Flat], out: Flat, disjoint: bool = False) -> None:
        assert {piece.size for piece in pieces} == {out.size}
        self._trace.reduced += (len(pieces) - 1) * out.size * self.acc.itemsize


class _IdleCodec(Codec):
    """A codec that only checks sizes."""

    def __init__(self, codec: Codec) -> None:
        self._codec = codec

    def nbytes(self, count: int) -> int:
        return self._codec.nbytes(count)

    def encode(self, values: Flat, data: Flat) -> None:
        assert data.size >= self.nbytes(values.size)

    def decode(self, data: Flat, values: Flat) -> None:
        assert data.size >= self.nbytes(values.size)


_real_codec_of = over_sockets.codec_of


def _codec_of(call: Call, source: Flat) -> Codec | None:
    codec = _real_codec_of(call, source)
    return _IdleCodec(codec) if codec is not None else None


@contextmanager
def tallying() -> Iterator[None]:
    """Context in which the algorithms' kernels only count; :func:`run` needs it."""
    with ExitStack() as stack:
        for module in (over_sockets, shared_memory, hierarchical):
            stack.enter_context(mock.patch.object(module, "kernel_of", _Tally))
        for module in (over_sockets, hierarchical):
            stack.enter_context(mock.patch.object(module, "codec_of", _codec_of))
        yield


class _Recorder(Connections):
    """Connections of one rank that record their traffic.

    Received data is empty except for the headers, and in all_to_all the sizes of all ranks: the only contents on
    which an algorithm depends.
    """

    def __init__(self, case: Case, rank: int, call: Call, trace: Trace) -> None:
        ranks = tuple(range(case.ranks))
        job: Any = SimpleNamespace(rank=rank, control=None)
        super().__init__(GroupState(Context(job, "simulated", ranks, 60.0)))
        self.state.call = call
        self.rank = rank
        self.size = case.ranks
        self.deterministic = case.deterministic
        self._trace = trace
        self._told = case.table if case.op.startswith("all_to_all") else None

    def send(self, peer: int, view: memoryview) -> None:
        self._note(peer, len(view), -1, 0)

    def receive(self, peer: int, view: memoryview, length: int, header: bytes | None = None) -> None:
        assert len(view) == length
        self._note(-1, 0, peer, length)
        if header is not None:
            view[:HEADER_SIZE] = header

    def duplex(
        self, to: int, outgoing: memoryview, frm: int, incoming: memoryview, *, whole: bool = True
    ) -> None:
        self._note(to, len(outgoing), frm, len(incoming))

    def begin(self, to: int, outgoing: memoryview) -> list[Stripe]:
        return [Stripe(cast(Any, None), to, outgoing, True)]

    def send_some(self, parts: list[Stripe]) -> None:
        pass

    def finish(self, to: int, parts: list[Stripe], frm: int, incoming: memoryview) -> None:
        self._note(to, sum(len(part.view) for part in parts), frm, len(incoming))

    def swap(
        self,
        to: int,
        outgoing: memoryview,
        frm: int,
        incoming: memoryview,
        header: bytes,
        discard: Callable[[bytes], memoryview] | None = None,
    ) -> bool:
        self._trace.turns += _swapped(to, len(outgoing), frm, len(incoming))
        return True

    def _note(self, to: int, sent: int, frm: int, got: int) -> None:
        assert self.rank not in (to, frm)
        assert to < self.size
        assert frm < self.size
        if (turn := _turn(to, sent, frm, got)) is not None:
            self._trace.turns.append(turn)

    def exchange(self, plan: ExchangePlan) -> list[Flat]:
        views = super().exchange(plan)
        if self._told is not None:
            for view, row in zip(views, self._told, strict=True):
                view[:] = row
        return views

    def _bad_header(self, peer: int, header: bytes) -> NoReturn:
        raise AssertionError(f"rank {self.rank} misreads a header from {peer}")


class _Slots:
    """Replaces :class:`gloo_fallback.shm.slots.Slots`; all share the same memory, and large arrays use them, too."""

    def __init__(self, connections: _Recorder, members: tuple[int, ...], case: Case, trace: Trace) -> None:
        self.state = connections.state
        self.symmetric = None
        self.members = members
        self.rank = members.index(connections.rank)
        self.size = len(members)
        self.step = 0
        self.plans: dict[Any, Any] = {}
        self._trace = trace
        self._told = case.table if case.op.startswith("all_to_all") else None

    def next_slot(self, rank: int, start: int, count: int, dtype: np.dtype[Any]) -> Flat:
        assert 0 <= rank < self.size
        assert 0 <= start <= start + count * dtype.itemsize <= SLOT, "does not fit the slot"
        assert start % dtype.itemsize == 0
        if self._told is not None and dtype == np.int64 and rank != self.rank:
            return cast(Flat, self._told[rank])
        return _array(count, dtype, self._trace)

    last_slot = later_slot = next_slot

    def rows(self, count: int, dtype: np.dtype[Any]) -> tuple[Flat, list[Flat]]:
        rows = [self.next_slot(r, 0, count, dtype) for r in range(self.size)]
        return rows[self.rank], rows

    def may_be_direct(self, nbytes: int, *, scatter: bool = False) -> bool:
        return False

    def sync_step(self, call: Call | None = None) -> None:
        self._trace.turns.append(Turn())

    def sync_step_checked(self, call: Call, number: int) -> bool:
        self.sync_step(call)
        return True

    def publish_value(self, value: int) -> None:
        """Only what is the same on all ranks is simulated."""

    def published_value(self, rank: int) -> int:
        return 1


def _make_call(case: Case, rank: int, trace: Trace) -> Call:
    dtype = case.type

    def several(side: int, counts: Sequence[int]) -> tuple[Buffer, ...]:
        return tuple(
            Buffer(None, dtype, (count,), _array(count, dtype.storage, trace, side)) for count in counts
        )

    inputs, outputs = map(several, (0, 1), case.arrays(rank))
    reduce = ReduceOp.SUM if OPS[case.op].reduces else None
    root = case.root if case.op in ROOTED else -1
    call = _Call(OPS[case.op], inputs, outputs, 60.0, reduce, root)
    call.in_counts, call.out_counts = tuple(case.given(rank)), tuple(case.taken(rank))
    call.compression = case.compression
    call.trace = trace
    return call


def run(case: Case, rank: int, trace: Trace | None = None) -> Trace:
    """The actions of one rank; ``trace`` continues the trace of an earlier collective.

    Of a gather or scatter of uneven sizes it is what comes after their exchange.
    """
    trace = trace or Trace()
    call = _make_call(case, rank, trace)
    connections = _Recorder(case, rank, call, trace)
    members = next(m for m in case.nodes if rank in m)
    where: Any = connections
    module = over_sockets
    if case.per_host > 1:
        slots: Any = _Slots(connections, members, case, trace)
        alone = len(case.nodes) == 1
        module = shared_memory if alone else hierarchical
        where = slots if alone else HierarchyContext(cast(Any, connections), slots, case.nodes)
    sizes = (
        ([case.block(i) for i in range(case.ranks)],) if case.uneven and OPS[case.op].root_has_sizes else ()
    )
    getattr(module, selection.OPERATIONS[case.op])(where, call, *sizes)
    return trace


def watch(cases: Sequence[Case]) -> list[list[Turn]]:
    """The actions of this process, a rank of a real job, in the same collectives (called in the ranks)."""
    turns: list[Turn] = []
    within = False  # what a duplex leaves over goes through send or receive

    def noting(cls: type, name: str, turn: Callable[..., Sequence[Turn | None]]) -> Any:
        plain = getattr(cls, name)

        def noted(self: Any, *args: Any, **named: Any) -> Any:
            nonlocal within
            if not within:
                turns.extend(one for one in turn(*args) if one is not None)
            before, within = within, True
            try:
                return plain(self, *args, **named)
            finally:
                within = before

        return mock.patch.object(cls, name, noted)

    found = []
    options = {"deterministic": any(case.deterministic for case in cases)}
    group = dist.new_group(pg_options=options)
    dist.barrier(group=group)
    with (
        noting(GroupConnections, "send", lambda to, view: (_turn(to, len(view), -1, 0),)),
        noting(
            GroupConnections, "receive", lambda frm, view, length, header=None: (_turn(-1, 0, frm, length),)
        ),
        noting(
            GroupConnections,
            "duplex",
            lambda to, out, frm, into: (_turn(to, len(out), frm, len(into)),),
        ),
        noting(
            Connections,
            "swap",
            lambda to, out, frm, into, header, discard=None: _swapped(to, len(out), frm, len(into)),
        ),
        noting(Slots, "sync_step", lambda call=None: (Turn(),)),
    ):
        for case in cases:
            turns = []
            invoke(case.op, group, count=case.count, root=case.root)
            found.append(turns)
    return found


# --- all ranks together ---------------------------------------------------------------------------------------------


class Deadlock(AssertionError):
    """Ranks wait for each other, or for messages that are never sent."""


@dataclass
class _Channel:
    """Messages from one rank to another: their ends in the stream of bytes, when they left and when they were had."""

    ends: list[int] = field(default_factory=lambda: [0])
    left: list[int] = field(default_factory=list)
    had: list[int] = field(default_factory=list)

    def room(self, end: int, buffer: float) -> int:
        """How many messages must have been received before a message that ends at ``end`` is out of its sender."""
        return bisect_left(self.ends, end - buffer)


class _Job:
    """Executes the actions of all ranks as far as possible."""

    def __init__(
        self, turns: Sequence[Sequence[Turn]], nodes: Sequence[tuple[int, ...]], buffer: float
    ) -> None:
        self.turns = turns
        self.buffer = buffer
        self.channels: dict[tuple[int, int], _Channel] = {}
        self.clock = [0] * len(turns)
        self.at = [0] * len(turns)
        self._node = {rank: members for members in nodes for rank in members}
        self._arrived: dict[tuple[int, ...], list[list[int]]] = {members: [] for members in nodes}

    def channel(self, frm: int, to: int) -> _Channel:
        return self.channels.setdefault((frm, to), _Channel())

    def play(self, rank: int) -> Generator[None, None, None]:
        """Yields when the rank cannot proceed."""
        port, met = 0, 0  # when the sending side is free again
        for turn in self.turns[rank]:
            done = self.clock[rank]
            if turn.to >= 0:
                out = self.channel(rank, turn.to)
                out.left.append(max(self.clock[rank], port))
                out.ends.append(out.ends[-1] + turn.sent)
                port = out.left[-1] + 1
                first = out.room(out.ends[-1], self.buffer)
            if turn.frm >= 0:
                done = yield from self._take(rank, turn)
            if turn.to >= 0 and first:
                while len(out.had) < first:
                    yield
                done = max(done, out.had[first - 1])
            if turn.to < 0 and turn.frm < 0:
                done = yield from self._meet(rank, met)
                met += 1
            self.clock[rank] = done
            self.at[rank] += 1

    def _take(self, rank: int, turn: Turn) -> Generator[None, None, int]:
        into = self.channel(turn.frm, rank)
        number = len(into.had)
        while len(into.left) <= number:
            yield
        length = into.ends[number + 1] - into.ends[number]
        assert length == turn.got, f"rank {turn.frm} sends {length} bytes to {rank}, which awaits {turn.got}"
        into.had.append(max(self.clock[rank], into.left[number]) + 1)
        return into.had[-1]

    def _meet(self, rank: int, number: int) -> Generator[None, None, int]:
        members = self._node[rank]
        steps = self._arrived[members]
        if len(steps) <= number:
            steps.append([])
        steps[number].append(self.clock[rank])
        while len(steps[number]) < len(members):
            yield
        return max(steps[number])


def replay(
    turns: Sequence[Sequence[Turn]], nodes: Sequence[tuple[int, ...]] = (), buffer: float = float("inf")
) -> int:
    """Length of the longest chain of messages.

    A message takes a unit of time, however long it is, and both ends' time: a rank sends one message at a time and
    receives one at a time, but does both at once. A send is over when no more than ``buffer`` bytes of its connection
    are unreceived. Steps of the slots take no time.

    Raises:
        Deadlock: not everybody comes to an end, or messages are left over.
        AssertionError: a message is longer or shorter than its receiver awaits.
    """
    job = _Job(turns, nodes, buffer)
    waiting = {rank: job.play(rank) for rank in range(len(turns))}
    while waiting:
        before = sum(job.at), sum(len(c.left) + len(c.had) for c in job.channels.values())
        waiting = {rank: one for rank, one in waiting.items() if next(one, "over") != "over"}
        after = sum(job.at), sum(len(c.left) + len(c.had) for c in job.channels.values())
        if waiting and before == after:
            stuck = [f"rank {rank} in {turns[rank][job.at[rank]]}" for rank in list(waiting)[:8]]
            raise Deadlock(f"{len(waiting)} ranks wait for ever: {'; '.join(stuck)}")
    for (frm, to), channel in job.channels.items():
        if len(channel.left) != len(channel.had):
            raise Deadlock(f"rank {to} leaves messages of rank {frm} unread")
    return max(job.clock)
