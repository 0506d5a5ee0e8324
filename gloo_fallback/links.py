"""The members of a group, or some of them, and the bytes that go between them; the exchange that begins everything.

Every collective over sockets begins with :meth:`Links.exchange`: ranks pass each other a header with sequence number
and signature (and, for small operations, the data itself) in ceil(log2 n) rounds. A rank that comes out of it has
heard, directly or through others, from every member, and every hop compared headers; so a call that differs anywhere
is noticed before bulk data moves, at no extra round for small operations.
"""

from __future__ import annotations

import struct
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, Protocol

import numpy as np

from unicoll.backend import Call, Context
from unicoll.errors import DistError
from unicoll.kernels import Flat

__all__ = ["HEADER_SIZE", "MAGIC", "Folding", "Links", "Plan", "bytes_of", "read_header"]

_HEADER = struct.Struct("<QQqQ")
HEADER_SIZE = _HEADER.size
MAGIC = 0x316C6C6F63696E75  # "unicoll1" as it lies in memory
_CROSSING = 1 << 14
"""Messages up to this size are sent whole before the answer is read: the kernel's buffers hold them."""
_BLOCK_BITS = 17
_BLOCK = (1 << _BLOCK_BITS) - 1
_MASK = (1 << 64) - 1
_UNLIKE = _MASK ^ _BLOCK
"""What :meth:`Links.exchange_alike` has in the last word of a header: a number, and the bytes of a block; or this."""


def read_header(header: bytes) -> tuple[int, int]:
    """Magic and sequence number."""
    magic, seq, _, _ = _HEADER.unpack(header)
    return magic, seq


class Folding(Protocol):
    """What the algorithms need of a reduction: :class:`~unicoll.kernels.Kernel` has it."""

    acc: np.dtype[Any]
    storage: np.dtype[Any]
    plain: bool
    ufunc: Any

    def begin(self, acc: Flat, values: Flat) -> None: ...
    def widen(self, values: Flat) -> Flat: ...
    def fold(self, acc: Flat, values: Flat) -> None: ...
    def finish(self, acc: Flat, out: Flat, ranks: int) -> None: ...
    def combine(self, pieces: Sequence[Flat], out: Flat, apart: bool = False) -> None: ...


def bytes_of(flat: Flat) -> memoryview:
    """An array's memory."""
    return flat.view(np.uint8).data


class Plan:
    """The rounds of an exchange in which rank i contributes ``lengths[i]`` bytes.

    Blocks lie in the scratch memory in the order rank, rank+1, ...: round k sends the first 2^k of them to
    rank - 2^k and appends those of rank + 2^k (Bruck et al., "Efficient Algorithms for All-to-All Communications in
    Multiport Message-Passing Systems", 1997).
    """

    __slots__ = ("head", "mine", "rounds", "views")

    def __init__(self, scratch: Flat, lengths: tuple[int, ...], rank: int, storage: np.dtype[Any]) -> None:
        size = len(lengths)
        order = [(rank + i) % size for i in range(size)]
        offsets = [0]
        for r in order:
            offsets.append(offsets[-1] + lengths[r])
        data = scratch.data
        self.head = data[:HEADER_SIZE]
        self.rounds: list[tuple[int, int, memoryview, memoryview, int, memoryview]] = []
        distance = 1
        while distance < size:
            count = min(distance, size - distance)
            start, stop = offsets[distance], offsets[distance + count]
            # the incoming header lands on the 32 bytes before the incoming blocks, which are put back afterwards
            self.rounds.append(
                (
                    (rank - distance) % size,
                    (rank + distance) % size,
                    data[: HEADER_SIZE + offsets[count]],
                    data[start : HEADER_SIZE + stop],
                    HEADER_SIZE + stop - start,
                    data[start : start + HEADER_SIZE],
                )
            )
            distance *= 2
        blocks: list[Flat] = [scratch[:0].view(storage)] * size
        for i, r in enumerate(order):
            block = scratch[HEADER_SIZE + offsets[i] : HEADER_SIZE + offsets[i + 1]]
            blocks[r] = block.view(storage)
        self.views = blocks
        self.mine = blocks[rank]


class Links(ABC):
    """The connections between the members of a group, or of a part of it, as one of them sees them.

    Attributes:
        rank, size: of this process among the members.
        context: the group.
        call: the operation in progress.
        deterministic: whether reductions must give the same bits as through any other transport.
    """

    rank: int
    size: int
    context: Context
    call: Call | None
    deterministic: bool = False

    def __init__(self) -> None:
        self._scratch = np.zeros(HEADER_SIZE, np.uint8)
        self._theirs = memoryview(bytearray(HEADER_SIZE))
        self._plans: dict[Any, Plan] = {}

    @abstractmethod
    def send(self, peer: int, view: memoryview) -> None:
        """Send all of ``view`` (bytes) to a member."""

    @abstractmethod
    def receive(self, peer: int, view: memoryview, length: int, header: bytes | None = None) -> None:
        """Fill ``view`` (``length`` bytes) from a member.

        ``header`` is what has to come first. It is compared as soon as it is there, because a member that is in
        another call may send less than is awaited; comparing the whole is left to the caller.
        """

    @abstractmethod
    def duplex(
        self, to: int, outgoing: memoryview, frm: int, incoming: memoryview, header: bytes | None = None
    ) -> None:
        """Send ``outgoing`` to one member while ``incoming`` is filled from another (or the same).

        ``header`` is as for :meth:`receive`.
        """

    @abstractmethod
    def fail(self, error: DistError) -> NoReturn:
        """The operation cannot succeed: agree on the error with the others, and raise it."""

    @abstractmethod
    def _misfit(self, peer: int, header: bytes) -> NoReturn:
        """What a member sent is not the header of this call."""

    def begun(self, call: Call) -> bool:
        """Whether an exchange of a call has begun: then members may have heard of it."""
        return read_header(self._scratch[:HEADER_SIZE].tobytes()) == (MAGIC, call.seq)

    def agree(self) -> None:
        """All members are in this call, with equal signatures."""
        self.exchange(self.plan((0,) * self.size, np.dtype(np.uint8)))

    def plan(self, lengths: tuple[int, ...], storage: np.dtype[Any]) -> Plan:
        """The (remembered) plan of an exchange."""
        key = (lengths, storage)
        found = self._plans.get(key)
        if found is None:
            need = HEADER_SIZE + sum(lengths)
            if need > self._scratch.size or len(self._plans) >= 256:
                self._plans.clear()
                if need > self._scratch.size:
                    last = self._scratch[:HEADER_SIZE]
                    self._scratch = np.zeros(max(need, 2 * self._scratch.size), np.uint8)
                    self._scratch[:HEADER_SIZE] = last
            found = self._plans[key] = Plan(self._scratch, lengths, self.rank, storage)
        return found

    def exchange(self, plan: Plan) -> list[Flat]:
        """Give everyone ``plan.mine``; returns every rank's block.

        Raises:
            CollectiveMismatchError: another rank is in another call.
        """
        call = self.call
        assert call is not None
        header = _HEADER.pack(MAGIC, call.seq, call.signature, 0)
        plan.head[:] = header
        for to, frm, outgoing, incoming, length, overlap in plan.rounds:
            if length > _CROSSING:
                self._exchange_long(to, frm, outgoing, incoming, header)
                continue
            self.send(to, outgoing)
            saved = bytes(overlap)
            self.receive(frm, incoming, length, header)
            if overlap != header:
                self._misfit(frm, bytes(overlap))
            overlap[:] = saved
        return plan.views

    def exchange_alike(
        self,
        number: int,
        block: int,
        lengths: Callable[[int], tuple[int, ...]],
        storage: np.dtype[Any],
        mine: Sequence[Flat] = (),
    ) -> list[Flat] | None:
        """:meth:`exchange` of a call whose sizes may differ: None, on all ranks, unless all have the same ``number``.

        A rank that hears of another number says so in the headers that it sends from then on, so the argument for
        :meth:`exchange` holds here, too: whoever differs, all come to know.

        Args:
            number: negative on a rank that knows that sizes differ.
            block: bytes that determine what all contribute, as this rank takes it, up to 128 KiB.
            lengths: from that the bytes of every rank's contribution.
            storage: of the data.
            mine: this rank's contribution.
        """
        call = self.call
        assert call is not None
        mark = number << _BLOCK_BITS & _MASK | block if number >= 0 else _UNLIKE
        plan = self.plan(lengths(mark & _BLOCK), storage)
        if plan.mine.size:
            plan.mine[:] = mine[0] if len(mine) == 1 else np.concatenate(mine)
        plan.head[:] = header = _HEADER.pack(MAGIC, call.seq, call.signature, mark)
        for k in range(len(plan.rounds)):
            to, frm, outgoing, incoming, _, _ = plan.rounds[k]

            def room(theirs: bytes, k: int = k) -> memoryview:
                other = self.plan(lengths(_HEADER.unpack(theirs)[3] & _BLOCK), np.dtype(np.uint8))
                return memoryview(bytearray(other.rounds[k][4] - HEADER_SIZE))

            if not self.swap(to, outgoing, frm, incoming[HEADER_SIZE:], header, room):
                mark = _UNLIKE
                plan = self.plan(lengths(0), storage)
                plan.head[:] = header = _HEADER.pack(MAGIC, call.seq, call.signature, mark)
        return plan.views if mark != _UNLIKE else None

    def swap(
        self,
        to: int,
        outgoing: memoryview,
        frm: int,
        incoming: memoryview,
        header: bytes,
        room: Callable[[bytes], memoryview],
    ) -> bool:
        """Send a message; fill ``incoming`` with what comes behind the header of another; whether that is ``header``.

        Where the headers differ in their last word only, what comes goes to ``room(theirs)`` instead, and is dropped.
        """
        theirs = self._theirs
        long = len(outgoing) > _CROSSING
        self.send(to, outgoing[:_CROSSING] if long else outgoing)
        self.receive(frm, theirs, HEADER_SIZE)
        same = theirs == header
        if not same:
            if theirs[:-8] != header[:-8]:
                self._misfit(frm, bytes(theirs))
            incoming = room(bytes(theirs))
        if long:
            self.duplex(to, outgoing[_CROSSING:], frm, incoming)
        elif len(incoming):
            self.receive(frm, incoming, len(incoming))
        return same

    def _exchange_long(
        self, to: int, frm: int, outgoing: memoryview, incoming: memoryview, header: bytes
    ) -> None:
        """A round whose bytes might fill both sockets' buffers: sent and received at once."""
        staging = memoryview(bytearray(len(incoming)))
        self.duplex(to, outgoing, frm, staging, header)
        self._compare(frm, staging, header)
        incoming[HEADER_SIZE:] = staging[HEADER_SIZE:]

    def _compare(self, peer: int, view: memoryview, header: bytes) -> None:
        if view[:HEADER_SIZE] != header:
            self._misfit(peer, bytes(view[:HEADER_SIZE]))
