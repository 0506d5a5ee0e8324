"""Collectives of thousands of ranks without processes, to hold docs/scaling.md to the code.

What an algorithm does depends on sizes only, never on data, so one rank can be run alone: the real functions of
:mod:`gloo_fallback` work on links that note down what would be sent and received and give nothing back, on a board
whose slots are all the same memory, and with a kernel that counts what it would fold (:func:`run`). Put together, the
ranks' notes show whether every message finds its receiver, whether anybody waits for ever, and how long the longest
chain of messages is (:func:`replay`). ``formulas.py`` says the same in closed form.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, NoReturn, cast
from unittest import mock

import numpy as np
from calls import invoke
from formulas import ROOTED, Case

import unicoll as dist
from gloo_fallback import algorithms, hierarchy, shared, ways
from gloo_fallback.board import SLOT, Board
from gloo_fallback.cluster import Cluster
from gloo_fallback.links import HEADER_SIZE, Links, Plan
from gloo_fallback.team import Team
from unicoll.buffers import Buffer
from unicoll.call import Call
from unicoll.errors import DistError
from unicoll.kernels import Flat, Kernel
from unicoll.ops import OPS
from unicoll.types import ReduceOp

__all__ = ["BUFFER", "Deadlock", "Trace", "Turn", "replay", "run", "tallying", "watch"]

BUFFER = 1 << 14
"""Bytes that a connection is trusted to hold between a sender and a receiver that is elsewhere."""

_MEMORY = np.zeros(160 << 20, np.uint8)  # every array of every rank; nobody writes to it, so it takes no room


# --- one rank --------------------------------------------------------------------------------------------------------


class Turn(NamedTuple):
    """What a rank does next: it sends, receives, does both at once, or (neither) meets its neighbours at the board."""

    to: int = -1
    sent: int = 0
    frm: int = -1
    got: int = 0


def _turn(to: int, sent: int, frm: int, got: int) -> Turn | None:
    """No bytes are no message."""
    return Turn(to if sent else -1, sent, frm if got else -1, got) if sent or got else None


def _swapped(to: int, sent: int, frm: int, got: int) -> list[Turn]:
    """A message each way, behind the headers; what no connection is trusted to hold goes while the other comes."""
    got += HEADER_SIZE
    if max(sent, got) > BUFFER:
        return [Turn(to, sent, frm, got)]
    return [Turn(to, sent), Turn(-1, 0, frm, got)]


class Trace:
    """What one rank did.

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
        """Steps of the board."""
        return sum(turn.to < 0 and turn.frm < 0 for turn in self.turns)

    @property
    def peers(self) -> set[int]:
        """Ranks that a connection is needed to."""
        return {peer for turn in self.turns for peer in (turn.to, turn.frm) if peer >= 0}


class _Counted(np.ndarray[Any, Any]):
    """An array that counts what is assigned to its parts, and keeps nothing of it."""

    notes: Trace | None = None

    def __array_finalize__(self, source: Any) -> None:
        self.notes = getattr(source, "notes", None)

    def __setitem__(self, key: Any, value: Any) -> None:
        target = self[key]
        assert target.shape == np.shape(value)
        assert self.notes is not None
        self.notes.copied += target.nbytes


def _array(count: int, dtype: np.dtype[Any], trace: Trace) -> Flat:
    assert count * dtype.itemsize <= _MEMORY.size
    counted = _MEMORY[: count * dtype.itemsize].view(dtype).view(_Counted)
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

    def fold(self, acc: Flat, values: Flat) -> None:
        self._add(acc, values, acc)

    def finish(self, acc: Flat, out: Flat, ranks: int) -> None:
        assert acc.size == out.size
        self._trace.copied += out.nbytes

    def combine(self, pieces: Sequence[Flat], out: Flat, apart: bool = False) -> None:
        assert {piece.size for piece in pieces} == {out.size}
        self._trace.reduced += (len(pieces) - 1) * out.size * self.acc.itemsize


@contextmanager
def tallying() -> Iterator[None]:
    """Within it the algorithms' kernels count and do not compute; :func:`run` needs that."""
    with ExitStack() as stack:
        for module in (algorithms, shared, hierarchy):
            stack.enter_context(mock.patch.object(module, "kernel_of", _Tally))
        yield


class _Recorder(Links):
    """Links of one rank that note down what goes over them.

    What comes in is nothing, but for the headers, and in all_to_all every rank's sizes: the only contents that a
    rank's way depends on.
    """

    def __init__(self, case: Case, rank: int, call: Call, trace: Trace) -> None:
        super().__init__()
        self.rank = rank
        self.size = case.ranks
        self.context = cast(Any, None)
        self.call = call
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
        self, to: int, outgoing: memoryview, frm: int, incoming: memoryview, header: bytes | None = None
    ) -> None:
        self._note(to, len(outgoing), frm, len(incoming))
        if header is not None:
            incoming[:HEADER_SIZE] = header

    def swap(
        self,
        to: int,
        outgoing: memoryview,
        frm: int,
        incoming: memoryview,
        header: bytes,
        room: Callable[[bytes], memoryview],
    ) -> bool:
        self._trace.turns += _swapped(to, len(outgoing), frm, len(incoming))
        return True

    def _note(self, to: int, sent: int, frm: int, got: int) -> None:
        assert self.rank not in (to, frm)
        assert to < self.size
        assert frm < self.size
        if (turn := _turn(to, sent, frm, got)) is not None:
            self._trace.turns.append(turn)

    def exchange(self, plan: Plan) -> list[Flat]:
        views = super().exchange(plan)
        if self._told is not None:
            for view, row in zip(views, self._told, strict=True):
                view[:] = row
        return views

    def fail(self, error: DistError) -> NoReturn:
        raise error

    def _misfit(self, peer: int, header: bytes) -> NoReturn:
        raise AssertionError(f"rank {self.rank} misreads a header from {peer}")


class _Slots:
    """A board whose slots are all the same memory; takes the place of :class:`gloo_fallback.board.Board`."""

    def __init__(self, team: _Recorder, members: tuple[int, ...], case: Case, trace: Trace) -> None:
        self.team = team
        self.members = members
        self.rank = members.index(team.rank)
        self.size = len(members)
        self.counts = (b"", 0)
        self.step = 0
        self.plans: dict[Any, Any] = {}
        self._trace = trace
        self._told = case.table if case.op.startswith("all_to_all") else None

    def slot(self, rank: int, start: int, count: int, dtype: np.dtype[Any], steps: int = 1) -> Flat:
        assert 0 <= rank < self.size
        assert 0 <= start <= start + count * dtype.itemsize <= SLOT, "does not fit the slot"
        assert start % dtype.itemsize == 0
        if self._told is not None and dtype == np.int64 and steps == 0:
            return cast(Flat, self._told[rank])
        return _array(count, dtype, self._trace)

    def rows(self, count: int, dtype: np.dtype[Any]) -> tuple[Flat, list[Flat]]:
        rows = [self.slot(r, 0, count, dtype) for r in range(self.size)]
        return rows[self.rank], rows

    def meet(self, call: Call | None = None) -> None:
        self._trace.turns.append(Turn())

    def meet_alike(self, call: Call, number: int) -> bool:
        self.meet(call)
        return True

    def note(self, value: int) -> None:
        """Only what is the same on all ranks is simulated."""

    def noted(self, rank: int) -> int:
        return 1


def _make_call(case: Case, rank: int, trace: Trace) -> Call:
    dtype = case.type

    def one(count: int) -> Buffer:
        return Buffer(None, dtype, (count,), _array(count, dtype.storage, trace))

    inputs, outputs = case.arrays(rank)
    reduce = ReduceOp.SUM if OPS[case.op].reduces else None
    root = case.root if case.op in ROOTED else -1
    call = _Call(OPS[case.op], tuple(map(one, inputs)), tuple(map(one, outputs)), 60.0, reduce, root)
    call.in_counts, call.out_counts = tuple(case.given(rank)), tuple(case.taken(rank))
    call.trace = trace
    return call


def run(case: Case, rank: int, trace: Trace | None = None) -> Trace:
    """What one rank does; ``trace`` goes on with that of an earlier collective.

    Of a gather or scatter of uneven sizes it is what comes after their exchange.
    """
    trace = trace or Trace()
    call = _make_call(case, rank, trace)
    team = _Recorder(case, rank, call, trace)
    members = next(m for m in case.nodes if rank in m)
    where: Any = team
    module = algorithms
    if case.per_host > 1:
        board: Any = _Slots(team, members, case, trace)
        alone = len(case.nodes) == 1
        module = shared if alone else hierarchy
        where = board if alone else Cluster(cast(Any, team), board, case.nodes)
    sizes = ([case.block(i) for i in range(case.ranks)],) if case.uneven and OPS[case.op].told_by_root else ()
    getattr(module, ways._OPERATIONS[case.op])(where, call, *sizes)
    return trace


def watch(cases: Sequence[Case]) -> list[list[Turn]]:
    """What this process, a rank of a real job, does in the same collectives (called in the ranks)."""
    turns: list[Turn] = []
    within = False  # what a duplex leaves over goes through send or receive

    def noting(cls: type, name: str, turn: Callable[..., Sequence[Turn | None]]) -> Any:
        plain = getattr(cls, name)

        def noted(self: Any, *args: Any) -> Any:
            nonlocal within
            if not within:
                turns.extend(one for one in turn(*args) if one is not None)
            before, within = within, True
            try:
                return plain(self, *args)
            finally:
                within = before

        return mock.patch.object(cls, name, noted)

    found = []
    options = {"deterministic": any(case.deterministic for case in cases)}
    group = dist.new_group(pg_options=options)
    dist.barrier(group=group)
    with (
        noting(Team, "send", lambda to, view: (_turn(to, len(view), -1, 0),)),
        noting(Team, "receive", lambda frm, view, length, header=None: (_turn(-1, 0, frm, length),)),
        noting(Team, "duplex", lambda to, out, frm, into, header=None: (_turn(to, len(out), frm, len(into)),)),
        noting(Links, "swap", lambda to, out, frm, into, header, room: _swapped(to, len(out), frm, len(into))),
        noting(Board, "meet", lambda call=None: (Turn(),)),
    ):
        for case in cases:
            turns = []
            invoke(case.op, group, count=case.count, root=case.root)
            found.append(turns)
    return found


# --- all ranks together ---------------------------------------------------------------------------------------------


class Deadlock(AssertionError):
    """Ranks wait for each other for ever, or for messages that nobody sends."""


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
    """All ranks' turns, played as far as they go."""

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
        """Yields whenever the rank can do nothing yet."""
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
    are unreceived. Steps of a board take no time.

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
