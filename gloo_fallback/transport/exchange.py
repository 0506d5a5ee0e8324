"""Connections between the members of a group or subset, and the exchange that begins each
collective.

Every collective over sockets begins with :meth:`Connections.exchange`: in ceil(log2 n) rounds the
ranks send each other a header with sequence number and signature, and for small operations the
data. After it a rank has received the blocks of all members, directly or through others, and each
hop has compared headers. So a call that differs on any rank is detected before bulk data moves,
without an extra round for small operations.
"""

from __future__ import annotations

import struct
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import numpy as np

from gloo_fallback.transport.striping import Stripe
from unicoll.arrays.kernels import Flat
from unicoll.backend import Call
from unicoll.backend.group_state import GroupState

_HEADER = struct.Struct("<QQqQ")
HEADER_SIZE = _HEADER.size
# These are the bytes of "unicoll1", as the little-endian header has them.
MAGIC = 0x316C6C6F63696E75
# Two ranks that send each other more than that, each before it receives, could both wait for room
# in the buffers.
_EAGER_LIMIT = 1 << 14
"""Messages up to this size are sent whole before the next receive: they fit the kernel's
buffers."""
_BLOCK_BITS = 17
_BLOCK = (1 << _BLOCK_BITS) - 1
_MASK = (1 << 64) - 1
_DIFFERENT = _MASK ^ _BLOCK
"""The last word of :meth:`Connections.exchange_checked`'s header: a value and the bytes of a block,
or this."""


def read_header(header: bytes) -> tuple[int, int]:
    """Magic and sequence number of a header."""
    magic, seq, _, _ = _HEADER.unpack(header)
    return magic, seq


def bytes_of(flat: Flat) -> memoryview:
    """The memory of an array."""
    return flat.view(np.uint8).data


class ExchangePlan:
    """The rounds of an exchange in which rank i contributes ``lengths[i]`` bytes.

    Blocks are stored in the scratch memory in the order rank, rank+1, ...: round k sends the first
    2^k of them to rank - 2^k and appends those of rank + 2^k (Bruck et al., "Efficient Algorithms
    for All-to-All Communications in Multiport Message-Passing Systems", 1997).
    """

    __slots__ = ("head", "mine", "rounds", "views")

    def __init__(
        self, scratch: Flat, lengths: tuple[int, ...], rank: int, storage: np.dtype[Any]
    ) -> None:
        size = len(lengths)
        order = [(rank + i) % size for i in range(size)]
        offsets = [0]
        for r in order:
            offsets.append(offsets[-1] + lengths[r])
        # The views refer to the scratch memory that the connections have now, and keep it alive.
        data = scratch.data
        self.head = data[:HEADER_SIZE]
        self.rounds: list[tuple[int, int, memoryview, memoryview, int, memoryview]] = []
        distance = 1
        while distance < size:
            count = min(distance, size - distance)
            start, stop = offsets[distance], offsets[distance + count]
            # A message is one header and its blocks, so that one call of the system receives both
            # without a copy. The incoming header therefore overwrites the 32 bytes before the
            # incoming blocks, which are restored afterwards. Without blocks these are the bytes of
            # the own header.
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


class Connections(ABC):
    """The connections of one member of a group, or of a subset of it, to the other members.

    Attributes:
        rank, size: this process's rank among the members, and their number.
        state: of the group.
        context: the group.
        deterministic: True if reductions must give the same bits over every transport.
    """

    rank: int
    size: int
    deterministic: bool = False

    def __init__(self, state: GroupState) -> None:
        self.state = state
        self.context = state.context
        self._scratch = np.zeros(HEADER_SIZE, np.uint8)
        self._theirs = memoryview(bytearray(HEADER_SIZE))
        self._plans: dict[Any, ExchangePlan] = {}

    @abstractmethod
    def send(self, peer: int, view: memoryview) -> None:
        """Send all of ``view`` (bytes) to a member."""

    @abstractmethod
    def begin(self, to: int, outgoing: memoryview) -> list[Stripe]:
        """The parts of a message of compressed data, which the caller sends before the next message
        to that member."""

    @abstractmethod
    def send_some(self, parts: list[Stripe]) -> None:
        """Send what is possible without waiting, and drop it from ``parts``."""

    @abstractmethod
    def finish(self, to: int, parts: list[Stripe], frm: int, incoming: memoryview) -> None:
        """Send the parts left of a message while one that another member has begun is received."""

    @abstractmethod
    def receive(
        self, peer: int, view: memoryview, length: int, header: bytes | None = None
    ) -> None:
        """Fill ``view`` (``length`` bytes) from a member.

        ``header`` is the expected beginning. It is compared once enough bytes have arrived, because
        a member in another call may send less than ``length``; if all bytes arrive at once, the
        caller compares.
        """

    @abstractmethod
    def duplex(
        self, to: int, outgoing: memoryview, frm: int, incoming: memoryview, *, whole: bool = True
    ) -> None:
        """Send ``outgoing`` to one member while ``incoming`` is filled from another (or the same).

        ``whole`` is False if the other members send and receive the messages in other parts than
        these.
        """

    @abstractmethod
    def _bad_header(self, peer: int, header: bytes) -> NoReturn:
        """Raise the error for a member that sent another header than that of this call."""

    def begun(self, call: Call) -> bool:
        """True if an exchange of a call has begun: other members may have received its header."""
        # The header of the last exchange is at the beginning of the scratch memory, and is written
        # before anything is sent.
        return read_header(self._scratch[:HEADER_SIZE].tobytes()) == (MAGIC, call.seq)

    def agree(self) -> None:
        """Return once all members are in this call with equal signatures."""
        self.exchange(self.plan((0,) * self.size, np.dtype(np.uint8)))

    def plan(self, lengths: tuple[int, ...], storage: np.dtype[Any]) -> ExchangePlan:
        """The plan of an exchange, cached by lengths and dtype."""
        key = (lengths, storage)
        found = self._plans.get(key)
        if found is None:
            need = HEADER_SIZE + sum(lengths)
            # Plans refer to the memory that is replaced here, and there may be many sizes of calls.
            # A plan that a caller still uses keeps its own memory.
            if need > self._scratch.size or len(self._plans) >= 256:
                self._plans.clear()
                if need > self._scratch.size:
                    # The header is kept for :meth:`begun`: the last exchange may be one of the call
                    # that is being executed.
                    last = self._scratch[:HEADER_SIZE]
                    self._scratch = np.zeros(max(need, 2 * self._scratch.size), np.uint8)
                    self._scratch[:HEADER_SIZE] = last
            found = self._plans[key] = ExchangePlan(self._scratch, lengths, self.rank, storage)
        return found

    def exchange(self, plan: ExchangePlan) -> list[Flat]:
        """Send ``plan.mine`` to all members; returns every rank's block.

        Raises:
            CollectiveMismatchError: another rank is in another call.
        """
        call = self.state.call
        assert call is not None
        header = _HEADER.pack(MAGIC, call.seq, call.signature, 0)
        plan.head[:] = header
        for to, frm, outgoing, incoming, length, overlap in plan.rounds:
            # A rank chooses by the length that it receives, and its peer may choose otherwise: both
            # ways put the same bytes on the connection. A rank that sends a long message before it
            # receives does not wait forever, because the receiver of a long message takes the other
            # way, and does not send much first.
            if length > _EAGER_LIMIT:
                self.swap(to, outgoing, frm, incoming[HEADER_SIZE:], header)
                continue
            self.send(to, outgoing)
            # The message has left completely, so its memory may be overwritten from here on.
            saved = bytes(overlap)
            self.receive(frm, incoming, length, header)
            # This comes before anything is forwarded: a rank that finds a difference stops here, so
            # no rank that it is to reach completes the exchange.
            if overlap != header:
                self._bad_header(frm, bytes(overlap))
            overlap[:] = saved
        return plan.views

    def exchange_checked(
        self,
        value: int,
        block: int,
        lengths: Callable[[int], tuple[int, ...]],
        storage: np.dtype[Any],
        mine: Sequence[Flat] = (),
    ) -> list[Flat] | None:
        """:meth:`exchange` of a call whose sizes may differ; None on all ranks unless ``value`` is
        equal on all.

        A rank that receives another value marks the headers that it sends from then on, so, as in
        :meth:`exchange`, a difference on any rank reaches all ranks.

        Args:
            value: the number to compare; negative on a rank that knows that sizes differ.
            block: block size in bytes according to this rank, up to 128 KiB.
            lengths: maps a block size to the bytes of every rank's contribution.
            storage: dtype of the data.
            mine: this rank's contribution.
        """
        call = self.state.call
        assert call is not None
        # The last word of the header has the low 47 bits of the value and the size of a block. The
        # size tells a receiver with other sizes how many bytes follow.
        mark = value << _BLOCK_BITS & _MASK | block if value >= 0 else _DIFFERENT
        plan = self.plan(lengths(mark & _BLOCK), storage)
        if plan.mine.size:
            plan.mine[:] = mine[0] if len(mine) == 1 else np.concatenate(mine)
        plan.head[:] = header = _HEADER.pack(MAGIC, call.seq, call.signature, mark)
        for k in range(len(plan.rounds)):
            to, frm, outgoing, incoming, _, _ = plan.rounds[k]

            # The data of a rank with another value have to be received, or the next header would
            # not be found. Their length follows from that rank's size of a block.
            def discard(theirs: bytes, k: int = k) -> memoryview:
                other = self.plan(lengths(_HEADER.unpack(theirs)[3] & _BLOCK), np.dtype(np.uint8))
                return memoryview(bytearray(other.rounds[k][4] - HEADER_SIZE))

            if not self.swap(to, outgoing, frm, incoming[HEADER_SIZE:], header, discard):
                # From now on this rank sends headers without data that say so. A rank that receives
                # one does the same, and the number of messages stays as it was, so no rank waits in
                # vain.
                mark = _DIFFERENT
                plan = self.plan(lengths(0), storage)
                plan.head[:] = header = _HEADER.pack(MAGIC, call.seq, call.signature, mark)
        return plan.views if mark != _DIFFERENT else None

    def swap(
        self,
        to: int,
        outgoing: memoryview,
        frm: int,
        incoming: memoryview,
        header: bytes,
        discard: Callable[[bytes], memoryview] | None = None,
    ) -> bool:
        """Send a message and receive one into ``incoming``, without its header; True if that equals
        ``header``.

        Messages that might fill both sockets' buffers are sent and received concurrently. If the
        headers differ only in their last word, the data is received into ``discard(theirs)``, if
        that is given, and dropped.
        """
        theirs = self._theirs
        long = len(outgoing) > _EAGER_LIMIT
        self.send(to, outgoing[:_EAGER_LIMIT] if long else outgoing)
        self.receive(frm, theirs, HEADER_SIZE)
        same = theirs == header
        if not same:
            # Everything but the last word is the call itself: a difference there is an error.
            if discard is None or theirs[:-8] != header[:-8]:
                self._bad_header(frm, bytes(theirs))
            incoming = discard(bytes(theirs))
        if long:
            # The rest is not sent as a whole message: a part of it has left, and the peer may
            # receive the rest in another way. Stripes would be cut differently on both sides.
            self.duplex(to, outgoing[_EAGER_LIMIT:], frm, incoming, whole=False)
        elif len(incoming):
            self.receive(frm, incoming, len(incoming))
        return same
