"""All-reduce of compressed data over connections.

A direct reduce-scatter, then a direct all-gather: each rank sends every other rank its contribution
to that rank's block, and the result of its own block to all. So each value is rounded once in each
contribution that is sent, and once in the result, for any number of ranks; a ring would round at
every hop. Sums are computed in the element type in one order, by the block's owner, which takes its
own contribution unrounded, and its own result as the others get it. So all ranks have the same
bits.

The blocks are sent in chunks. Message k to a rank is chunk k of the contribution to its block and
chunk k-2 of the result of this rank's block. While message k is on its way, message k-1 of the
others is decompressed and reduced, and message k+1 is compressed. It is sent, as far as the sockets
take it, before message k of the others is waited for, so that the link is never idle.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from gloo_fallback.algorithms.operands import ReductionKernel
from gloo_fallback.transport.exchange import Connections
from gloo_fallback.transport.striping import Stripe
from unicoll.arrays.compression import BLOCK, Codec
from unicoll.arrays.kernels import Flat

LAG = 3
"""Number of steps between sending a chunk and having its result."""

_MIN_CHUNK = 1 << 15
"""Elements of a chunk, unless the whole block is smaller: shorter messages cost more time than they
save."""
_MAX_CHUNK = 1 << 17
_MAX_ALL_CHUNKS = 1 << 19
"""Maximum elements of the chunks to all ranks together."""
_CHUNKS = 8
"""Number of chunks of a block, unless chunks would be smaller than :data:`_MIN_CHUNK`."""
_PIECE = 1 << 15
"""Elements that are compressed, decompressed and reduced at a time: they stay in the cache."""


def _round_up(count: int) -> int:
    """A number of elements rounded up to whole blocks of the codecs."""
    return -(-count // BLOCK) * BLOCK


def _bounds(count: int, ranks: int) -> list[int]:
    """The bounds of the ranks' blocks, at multiples of the codecs' blocks: ``ranks + 1``
    offsets."""
    units = -(-count // BLOCK)
    return [min(units * r // ranks * BLOCK, count) for r in range(ranks + 1)]


def _limit(ranks: int) -> int:
    """Maximum elements of a chunk."""
    return max(BLOCK, min(_MAX_CHUNK, _MAX_ALL_CHUNKS // (ranks - 1) // BLOCK * BLOCK))


def _chunk(longest: int, ranks: int) -> int:
    """Elements of a chunk where the longest block has ``longest``."""
    return min(
        _round_up(longest), _limit(ranks), max(_MIN_CHUNK, _round_up(-(-longest // _CHUNKS)))
    )


def working_memory(ranks: int) -> int:
    """Maximum bytes that :func:`all_reduce` allocates."""
    chunk = _limit(ranks)
    return _messages(ranks, chunk) + 2 * min(chunk, _PIECE) * 8


def streaming_memory(ranks: int, nbytes: int) -> int:
    """Maximum bytes that a :class:`ChunkedAllReduce` of chunks of ``nbytes`` allocates."""
    own = _round_up(-(-nbytes // 4 // ranks))
    return _messages(ranks, own) + 2 * min(own, _PIECE) * 8 + 5 * 4 * own


def _messages(ranks: int, chunk: int) -> int:
    """Bytes of three messages to each other rank, of two chunks, of at most two bytes an
    element."""
    return 3 * (ranks - 1) * 2 * 2 * chunk


def all_reduce(
    connections: Connections, kernel: ReductionKernel, codec: Codec, source: Flat, out: Flat
) -> None:
    """The reduction of all ranks' ``source`` to all ranks' ``out``, which may be the same array.

    The ranks have agreed on the call.
    """
    _ArrayAllReduce(connections, kernel, codec, source, out).run()


class _CompressedAllReduce(ABC):
    """The messages of an all-reduce. A message holds pieces, each of which is compressed by itself.

    Args:
        longest: maximum elements of a chunk.
    """

    def __init__(
        self,
        connections: Connections,
        kernel: ReductionKernel,
        codec: Codec,
        longest: int,
        dtype: np.dtype[Any],
    ) -> None:
        self._connections = connections
        self._kernel = kernel
        self._codec = codec
        self._rank, self._ranks = connections.rank, connections.size
        self._peers = [r for r in range(self._ranks) if r != self._rank]
        memory = np.empty((3, len(self._peers), 2 * self._size(longest)), np.uint8)
        # There are two sets of outgoing messages: the next one is compressed while the sockets have
        # not yet taken all of the last one. One set of incoming messages suffices, because each is
        # decompressed before the next one is received.
        self._outgoing = [dict(zip(self._peers, part, strict=True)) for part in memory[:2]]
        self._incoming = dict(zip(self._peers, memory[2], strict=True))
        self._unsent: dict[int, list[Stripe]] = {}
        self._sum, self._loaded = np.empty((2, min(longest, _PIECE)), dtype)

    @abstractmethod
    def _range(self, rank: int, k: int) -> slice:
        """Where chunk ``k`` of a rank's block is; empty if there is none."""

    def _count(self, rank: int, k: int) -> int:
        """Elements of that chunk."""
        chunk = self._range(rank, k)
        return int(chunk.stop - chunk.start)

    @abstractmethod
    def _contribution(self, rank: int, k: int) -> Flat:
        """This rank's contribution to that chunk; read in step ``k``, for this rank's block also in
        step ``k + 1``."""

    @abstractmethod
    def _result(self, rank: int, k: int) -> Flat:
        """Where the result of that chunk is written: in step ``k + 3``, for this rank's block in
        step ``k + 1``."""

    def _step(self, k: int) -> None:
        """Send messages ``k``, receive messages ``k - 1``. Afterwards the results of the chunks ``k
        - 3`` are there."""
        # The order decides. Message k is compressed into the memory of message k - 2, which has
        # left completely in the step before. It may be sent to a rank at once only if message k - 1
        # to that rank has left completely, as both use the same connections. Then message k - 1 of
        # the others is received, while what is left of the own ones is sent. At the end the sockets
        # get as much of message k as they take, so that they have something to send while this rank
        # decompresses and reduces.
        ranks, rank, connections = self._ranks, self._rank, self._connections
        for to in self._peers:
            self._compress(self._contribution(to, k), self._outgoing[k % 2][to])
        messages = {to: connections.begin(to, self._message(k, to)) for to in self._peers}
        if k:
            for to in self._peers:
                if not self._unsent[to]:
                    connections.send_some(messages[to])
            for distance in range(1, ranks):
                # All ranks go through the distances in the same order, so the rank from which this
                # one receives sends to it at the same time.
                to, frm = (rank + distance) % ranks, (rank - distance) % ranks
                length = self._nbytes(rank, k - 1) + self._nbytes(frm, k - 3)
                connections.finish(
                    to, self._unsent[to], frm, memoryview(self._incoming[frm])[:length]
                )
        self._unsent = messages
        for parts in messages.values():
            connections.send_some(parts)
        if k:
            self._decompress(k - 1)

    def _message(self, k: int, to: int) -> memoryview:
        length = self._nbytes(to, k) + self._nbytes(self._rank, k - 2)
        return memoryview(self._outgoing[k % 2][to])[:length]

    def _nbytes(self, rank: int, k: int) -> int:
        return self._size(self._count(rank, k))

    def _size(self, count: int) -> int:
        whole, rest = divmod(count, _PIECE)
        return whole * self._codec.nbytes(_PIECE) + self._codec.nbytes(rest)

    def _pieces(self, count: int) -> Iterator[tuple[slice, slice]]:
        """The pieces of ``count`` elements, and of their compressed data."""
        at = 0
        for start in range(0, count, _PIECE):
            piece = slice(start, min(start + _PIECE, count))
            end = at + self._codec.nbytes(piece.stop - start)
            yield piece, slice(at, end)
            at = end

    def _compress(self, values: Flat, data: Flat) -> None:
        for piece, compressed in self._pieces(values.size):
            self._codec.encode(values[piece], data[compressed])

    def _decompress(self, k: int) -> None:
        """Decompress messages ``k``: contributions to a chunk of this rank's block, and the other
        ranks' results."""
        at = self._nbytes(self._rank, k)
        if at:
            self._reduce(k)
        for frm in self._peers:
            if self._count(frm, k - 2):
                values, data = self._result(frm, k - 2), self._incoming[frm][at:]
                for piece, compressed in self._pieces(values.size):
                    self._codec.decode(data[compressed], values[piece])

    def _reduce(self, k: int) -> None:
        """The result of chunk ``k`` of this rank's block, also into message ``k + 2``."""
        codec, kernel = self._codec, self._kernel
        own, out = self._contribution(self._rank, k), self._result(self._rank, k)
        first, *others = (self._incoming[frm] for frm in self._peers)
        # Message k has left completely, so its memory may be used for message k + 2. There the
        # result is behind the contribution, which is compressed in the next step.
        result, *copies = (
            self._outgoing[k % 2][to][self._nbytes(to, k + 2) :] for to in self._peers
        )
        for piece, compressed in self._pieces(own.size):
            part = own[piece]
            total, loaded = self._sum[: part.size], self._loaded[: part.size]
            codec.decode(first[compressed], total)
            for data in others:
                codec.decode(data[compressed], loaded)
                kernel.reduce_into(total, loaded)
            # The own contribution is added last, and is not rounded. Only this rank adds up the
            # block, so all ranks get the same bits whatever the order is.
            kernel.reduce_into(total, part)
            kernel.finish(total, total, self._ranks)
            codec.encode(total, result[compressed])
            # This rank takes the compressed result as well: the others get no better one, and all
            # have to have the same bits.
            codec.decode(result[compressed], out[piece])
        length = self._nbytes(self._rank, k)
        for copy in copies:
            copy[:length] = result[:length]


class _ArrayAllReduce(_CompressedAllReduce):
    """The all-reduce of one array."""

    def __init__(
        self,
        connections: Connections,
        kernel: ReductionKernel,
        codec: Codec,
        source: Flat,
        out: Flat,
    ) -> None:
        self._source = source
        self._out = out
        self._bounds = _bounds(source.size, connections.size)
        longest = max(high - low for low, high in pairwise(self._bounds))
        self._length = _chunk(longest, connections.size)
        self._chunks = -(-longest // self._length)
        super().__init__(connections, kernel, codec, self._length, source.dtype)

    def run(self) -> None:
        for k in range(self._chunks + LAG):
            self._step(k)

    def _range(self, rank: int, k: int) -> slice:
        low, high = self._bounds[rank], self._bounds[rank + 1]
        start = min(low + k * self._length, high) if k >= 0 else high
        return slice(start, min(start + self._length, high))

    def _contribution(self, rank: int, k: int) -> Flat:
        return self._source[self._range(rank, k)]

    def _result(self, rank: int, k: int) -> Flat:
        return self._out[self._range(rank, k)]


class ChunkedAllReduce(_CompressedAllReduce):
    """The all-reduce of an array that is passed in, and returned, chunk by chunk; each rank owns a
    part of every chunk.

    Args:
        sizes: elements of the chunks; the first is not exceeded by the others.
    """

    def __init__(
        self,
        connections: Connections,
        kernel: ReductionKernel,
        codec: Codec,
        sizes: Sequence[int],
        dtype: np.dtype[Any],
    ) -> None:
        self._bounds = [_bounds(size, connections.size) for size in sizes]
        self._next = 0
        longest = max(high - low for low, high in pairwise(self._bounds[0]))
        # The contributions to this rank's part of a chunk are needed for one step more than the
        # chunk, until those of the others have arrived. The results are kept until the others'
        # results for the same chunk have arrived, two steps after they were computed.
        self._own, self._own_results = np.empty((2, longest), dtype), np.empty((3, longest), dtype)
        super().__init__(connections, kernel, codec, longest, dtype)

    def step(self, chunk: Flat, result: Flat) -> None:
        """Take the next chunk, and write the result of the one that was taken ``LAG`` steps before.

        Args:
            chunk: empty after the last.
            result: empty in the first ``LAG`` steps.
        """
        k, self._next = self._next, self._next + 1
        self._chunk, self._into = chunk, result
        # The caller overwrites the chunk in its next step, when this part of it is reduced.
        mine = self._contribution(self._rank, k)
        mine[:] = chunk[self._range(self._rank, k)]
        self._step(k)
        done = self._range(self._rank, k - LAG)
        result[done] = self._own_results[k % 3][: done.stop - done.start]

    def _range(self, rank: int, k: int) -> slice:
        if not 0 <= k < len(self._bounds):
            return slice(0, 0)
        return slice(*self._bounds[k][rank : rank + 2])

    def _contribution(self, rank: int, k: int) -> Flat:
        mine: Flat = self._own[k % 2]
        return (
            mine[: self._count(rank, k)]
            if rank == self._rank
            else self._chunk[self._range(rank, k)]
        )

    def _result(self, rank: int, k: int) -> Flat:
        mine: Flat = self._own_results[k % 3]
        return (
            mine[: self._count(rank, k)] if rank == self._rank else self._into[self._range(rank, k)]
        )
