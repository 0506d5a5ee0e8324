"""The cost of collectives in closed form: the formulas of docs/scaling.md.

They are compared with what the real algorithms do in ``simulation.py``.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from gloo_fallback.algorithms import circulant, compressed, operands, over_sockets, rings, shared_memory_plans
from gloo_fallback.shm.slots import SLOT
from gloo_fallback.transport.exchange import HEADER_SIZE
from unicoll.arrays.compression import codec_for
from unicoll.arrays.kernels import Flat
from unicoll.arrays.types import BY_NAME, DType
from unicoll.backend.ops import OPS, Arity, Sizes

__all__ = ["ROOTED", "WHOLE", "Case", "Cost", "cost", "log2"]

WHOLE = tuple(name for name, row in OPS.items() if row.in_place)
"""Operations on one array; all others but the barrier have a block for each rank."""
ROOTED = tuple(name for name, row in OPS.items() if row.rooted)


# --- what is run ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """One collective.

    Attributes:
        op: its name.
        ranks: how many there are (n in the formulas).
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


# --- in closed form -------------------------------------------------------------------------------------------------


class Cost(NamedTuple):
    """The cost of a collective, by the formulas of docs/scaling.md. Bytes are integers.

    Attributes:
        rounds: messages in the longest chain of messages.
        messages, total_messages: sent by the rank that sends most, and by all.
        sent, total_sent: bytes, likewise.
        steps: in shared memory.
        copied, total_copied: bytes copied; for shared memory alone.
        reduced: bytes reduced by the rank that reduces most; not for several hosts.
    """

    rounds: int = 0
    messages: int = 0
    total_messages: int = 0
    sent: int = 0
    total_sent: int = 0
    steps: int = 0
    copied: int = 0
    total_copied: int = 0
    reduced: int = 0


H = HEADER_SIZE
S = rings.SEGMENT


def _ceil(a: int, b: int) -> int:
    return -(-a // b)


def log2(n: int) -> int:
    """Rounds of an exchange: the binary logarithm, rounded up."""
    return (n - 1).bit_length()


def cost(case: Case) -> Cost:
    """The formulas: equal blocks, arrays that all ranks' parts divide evenly, and for reductions SUM."""
    if case.per_host == 1:
        return _sockets(case)
    return _shared(case) if case.per_host >= case.ranks else _hosts(case)


def _base(case: Case) -> str:
    row = OPS[case.op]
    return row.fallback if row.joined else row.name


def _even(n: int, rounds: int, messages: int, sent: int, reduced: int = 0) -> Cost:
    """The cost if all ranks do the same."""
    return Cost(rounds, messages, n * messages, sent, n * sent, reduced=reduced)


def _sockets(case: Case) -> Cost:
    n, k, size, wide = case.ranks, log2(case.ranks), case.type.itemsize, _wide(case)
    one = case.count * size  # N of an array, B of a block
    everything = {"all_reduce": (n - 1) * one, "reduce": (n - 1) * one, "broadcast": one, "barrier": 0}
    everything |= {"all_gather": n * one, "gather": n * one, "scatter": n * one}
    everything |= {"reduce_scatter": (n - 1) * n * one, "scan": (n - 1) * one, "exscan": (n - 1) * one}
    op = _base(case)
    if op == "all_to_all":
        return _even(n, k + n - 1, k + n - 1, k * H + 16 * n * (n - 1) + (n - 1) * one)
    if everything[op] <= over_sockets.SMALL:
        return _exchanged(op, n, k, one, wide)
    agreed = Cost(k, k, n * k, k * H, n * k * H)
    return _plus(agreed, _bulk(case, op, n, one, wide))


def _wide(case: Case) -> int:
    """Bytes of a partial sum for each byte of an element."""
    return 2 if case.type.half else 1


def _exchanged(op: str, n: int, k: int, one: int, wide: int) -> Cost:
    """The cost of an operation within the exchange; ``one``: bytes of an array or a block."""
    if op in ("broadcast", "scatter"):
        whole = one if op == "broadcast" else n * one
        return Cost(k, k, n * k, k * (H + whole), n * k * H + (n - 1) * whole)
    whole = {"barrier": 0, "reduce_scatter": n * one}.get(op, one)
    folded = {"all_reduce": n - 1, "reduce": n - 1, "reduce_scatter": n - 1, "scan": n - 1, "exscan": n - 2}
    reduced = folded.get(op, 0) * one * wide
    return _even(n, k, k, k * H + (n - 1) * whole, reduced)


def _plus(agreed: Cost, bulk: Cost) -> Cost:
    return Cost(*(a + b for a, b in zip(agreed, bulk, strict=True)))


def _times(count: int, one: Cost) -> Cost:
    return Cost(*(count * each for each in one))


def _bulk(case: Case, op: str, n: int, one: int, wide: int) -> Cost:
    """The cost after the agreement."""
    if case.deterministic and op in ("all_reduce", "reduce", "reduce_scatter"):
        return _in_order(case, op, n, one)
    if op == "broadcast":
        if n > 2 and one < (n - 1) << 16:
            return Cost(log2(n), log2(n), n - 1, log2(n) * one, (n - 1) * one)  # a tree
        segments = _ceil(one, S)
        return Cost(n - 2 + segments, segments, (n - 1) * segments, one, (n - 1) * one)
    if op in ("reduce", "scan", "exscan"):
        segments = _ceil(one * wide, S)
        return Cost(
            n - 2 + segments,
            segments,
            (n - 1) * segments,
            one * wide,
            (n - 1) * one * wide,
            reduced=0 if op == "exscan" and n == 2 else one * wide,
        )
    if op in ("gather", "scatter"):
        sent, messages = (one, 1) if op == "gather" else ((n - 1) * one, n - 1)
        return Cost(n - 1, messages, n - 1, sent, (n - 1) * one)
    if op == "all_gather":
        return _gathered(n, one)
    block = one // n if op == "all_reduce" else one
    if case.compression and one > over_sockets.SMALL:
        return _compressed(case, n, block)
    scattered = _scattered(n, block, wide)
    return _plus(scattered, _gathered(n, block)) if op == "all_reduce" else scattered


def _in_rounds(n: int, nbytes: int) -> bool:
    """True if this number of bytes, the sum over all blocks, uses the circulant graph."""
    return n > 2 and nbytes <= min(circulant.LIMIT, n * circulant.BLOCK)


def _scattered(n: int, block: int, wide: int) -> Cost:
    """Each rank gets a block of the sum."""
    reduced = (n - 1) * block * wide
    if _in_rounds(n, n * block * wide):
        return _even(n, log2(n), log2(n), reduced, reduced)  # sums from the first round on
    turns = (n - 1) * _ceil(block * (wide if n > 2 else 1), S)
    sent = block * (1 + (n - 2) * wide)  # the first hop carries elements, the later ones sums
    return _even(n, turns, turns, sent, reduced)


def _gathered(n: int, block: int) -> Cost:
    """Each rank gets all blocks."""
    turns = log2(n) if _in_rounds(n, n * block) else n - 1
    return _even(n, turns, turns, (n - 1) * block)


def _in_order(case: Case, op: str, n: int, one: int) -> Cost:
    """Deterministic: all contributions to a part are sent to the rank that reduces it."""
    size, wide, hold = case.type.itemsize, _wide(case), over_sockets._DETERMINISTIC_BYTES
    if op == "reduce":
        segments = _ceil(one, max(1, hold // n // size) * n * size)
        sent = (n - 1) * one // n
        part = one // n  # all but the root pass it on
        return Cost(
            segments * 2 * (n - 1),
            segments * n,
            segments * (n - 1) * (n + 1),
            sent + part,
            n * sent + (n - 1) * part,
            reduced=sent * wide,
        )
    block = one // n if op == "all_reduce" else one
    messages = (n - 1) * _ceil(block // size, max(1, min(block // size, hold // n // size)))
    direct = _even(n, messages, messages, (n - 1) * block, (n - 1) * block * wide)
    return _plus(direct, _gathered(n, block)) if op == "all_reduce" else direct


def _compressed(case: Case, n: int, block: int) -> Cost:
    """Each rank sends its part of each block to the rank that reduces it, and its block of the result to all.

    For parts of whole blocks of the codec.
    """
    elements = block // case.type.itemsize
    chunk, nbytes = compressed._chunk(elements, n), codec_for(case.compression, case.type.storage).nbytes
    chunks = _ceil(elements, chunk)
    turns = (n - 1) * (chunks + 2 if chunks > 1 else 2)
    sent = (elements // chunk) * nbytes(chunk) + nbytes(elements % chunk)  # each chunk is padded to 8 bytes
    return _even(n, turns, turns, 2 * (n - 1) * sent, (n - 1) * block)


def _shared(case: Case) -> Cost:
    n, size, wide = case.ranks, case.type.itemsize, _wide(case)
    one = case.count * size
    lane = SLOT // n // size * size
    op = _base(case)
    reduced = (n - 1) * one * wide
    if op == "barrier":
        return Cost(steps=1)
    if op == "broadcast":
        return Cost(steps=max(1, _ceil(one, SLOT)), copied=one, total_copied=n * one)
    if op in ("all_reduce", "reduce"):
        if (n - 1) * one <= shared_memory_plans.WHOLE:
            return Cost(steps=1, copied=one, total_copied=n * one, reduced=reduced)
        own = [0] * n  # the part that a rank reduces
        for length, times in _chunks(case.count, SLOT // 2 // size):
            own = [a + times * size * b for a, b in zip(own, _parts(length, n), strict=True)]
        collecting = range(n) if op == "all_reduce" else [case.root]
        return Cost(
            steps=_ceil(one, SLOT // 2) + 1,
            copied=2 * one - min(own[r] for r in collecting),
            total_copied=(n - 1 + len(collecting)) * one,
            reduced=(n - 1) * max(own) * wide,
        )
    if op in ("scan", "exscan"):
        folded = reduced if op == "scan" else reduced - one * wide
        return Cost(steps=max(1, _ceil(one, SLOT)), copied=one, total_copied=n * one, reduced=folded)
    if op == "reduce_scatter":
        if n * one <= shared_memory_plans.WHOLE:
            return Cost(steps=1, copied=n * one, total_copied=n * n * one, reduced=reduced)
        steps = max(1, _ceil(one, lane))
        return Cost(steps=steps, copied=(n - 1) * one, total_copied=n * (n - 1) * one, reduced=reduced)
    if op in ("all_gather", "gather"):
        most = (n + 1) * one
        total = n * most if op == "all_gather" else 2 * n * one
        return Cost(steps=max(1, _ceil(one, SLOT)), copied=most, total_copied=total)
    if op == "scatter":
        return Cost(steps=max(1, _ceil(one, lane)), copied=(n + 1) * one, total_copied=2 * n * one)
    most = 16 * n + (2 * n - 1) * one
    lane = (SLOT - _ceil(16 * n, 64) * 64) // n // size * size  # sizes and parts share the slot
    return Cost(steps=max(1, _ceil(one, lane)), copied=most, total_copied=n * most)


def _hosts(case: Case) -> Cost:
    """Several hosts of equally many ranks; sums of elements that are as wide as elements."""
    n, m, size = case.ranks, case.per_host, case.type.itemsize
    hosts, one = n // m, case.count * size
    k = log2(hosts)
    op = _base(case)
    agreed = Cost(k, k, hosts * k, k * H, hosts * k * H)
    leaders = {members[0] for members in case.nodes}
    root_follows = op in ROOTED and case.root not in leaders  # then the root takes no part in the agreement
    if op == "barrier":
        return agreed._replace(steps=2)
    if op == "broadcast":
        if one <= over_sockets.SMALL:
            return _exchanged(op, hosts, k, one, 1)._replace(steps=2)
        chain = _chain(hosts, one, _ceil(one, S))
        found = _plus(agreed, chain)._replace(steps=1 + _ceil(one, S) + root_follows)
        return found._replace(messages=chain.messages, sent=one) if root_follows and hosts == 2 else found
    if op in ("all_reduce", "reduce"):
        found = _reduced_by_hosts(op, hosts, one, size, agreed)
        return found._replace(steps=found.steps + 2 * (root_follows and found.steps > 2))
    if op in ("scan", "exscan"):
        return _plus(agreed, _chain(n, one, _ceil(one, S)))._replace(steps=2)
    if op == "all_to_all":
        everywhere = log2(n)
        steps = 1 + _ceil(one, SLOT // m // size * size)
        sent = everywhere * H + 16 * n * (n - 1) + (n - m) * one
        return _plus(agreed, _even(n, everywhere + n - 1, everywhere + n - m, sent))._replace(steps=steps)
    if op in ("reduce_scatter", "all_gather"):
        capacity = (SLOT - 64) // size
        chunk = max(1, capacity // 2 // n if op == "reduce_scatter" else capacity // (n + 1))
        total, chunks = agreed, 0
        for length, times in _chunks(case.count, chunk):
            block = m * length * size  # a host's, all that a rank of it gives or gets at a time
            crossing = _scattered(hosts, block, 1) if op == "reduce_scatter" else _gathered(hosts, block)
            total, chunks = _plus(total, _times(times, crossing)), chunks + times
        return total._replace(steps=chunks + (2 if op == "reduce_scatter" else 1), reduced=0)
    chunks = _ceil(one, SLOT if op == "gather" else SLOT // m // size * size)
    most = m if op == "gather" else n - m  # blocks that one leader sends
    crossing = Cost(chunks * (n - m), chunks * most, chunks * (n - m), most * one, (n - m) * one)
    found = _plus(agreed, crossing)._replace(steps=chunks + 1 + (1 + (op == "gather")) * root_follows)
    if root_follows and op == "scatter":  # the root sends most
        return found._replace(messages=crossing.messages, sent=max(k * H, crossing.sent))
    return found


def _chain(hosts: int, one: int, segments: int) -> Cost:
    return Cost(hosts - 2 + segments, segments, (hosts - 1) * segments, one, (hosts - 1) * one)


def _reduced_by_hosts(op: str, hosts: int, one: int, size: int, agreed: Cost) -> Cost:
    k = agreed.messages
    if one * hosts <= over_sockets.SMALL:
        return _exchanged(op, hosts, k, one, 1)._replace(steps=2, reduced=0)
    chunks = _chunks(one // size, (SLOT - 64) // (2 * size))
    steps = sum(times for _, times in chunks) + 2
    if op == "reduce":
        segments = sum(times * _ceil(length * size, S) for length, times in chunks)
        return _plus(agreed, _chain(hosts, one, segments))._replace(steps=steps)
    rounds, messages, sent = 0, [0] * hosts, [0] * hosts
    for length, times in chunks:
        parts = [part * size for part in _parts(length, hosts)]
        longest, lengths = _crossed(hosts, parts)
        rounds += times * longest
        for r, each in enumerate(lengths):
            messages[r] += times * len(each)
            sent[r] += times * sum(each)
    crossing = Cost(rounds, max(messages), sum(messages), max(sent), 2 * (hosts - 1) * one)
    return _plus(agreed, crossing)._replace(steps=steps)


def _crossed(hosts: int, parts: list[int]) -> tuple[int, list[list[int]]]:
    """Rounds, and the lengths of each leader's messages, of a reduce-scatter and an all-gather of unequal parts."""
    k = log2(hosts)
    ahead = [[parts[(r + i) % hosts] for i in range(hosts)] for r in range(hosts)]
    if _in_rounds(hosts, sum(parts)):
        halves = [_ceil(hosts, 1 << i) for i in range(k + 1)]
        given = [sum(own[s:before]) for own in ahead for before, s in pairwise(halves)]
        more = [sum(own[: before - s]) for own in ahead for before, s in pairwise(halves)]
        each = [given[r * k : r * k + k] + more[r * k : r * k + k] for r in range(hosts)]
        rounds = 2 * k
    else:  # all parts but a rank's own in segments, then all but its successor's
        each = [_segments(own[1:]) + [own[0], *own[2:]] for own in ahead]
        rounds = (hosts - 1) * (_ceil(max(parts), S) + 1)
    return rounds, [[length for length in lengths if length] for lengths in each]


def _segments(parts: list[int]) -> list[int]:
    return [min(S, part - start) for part in parts for start in range(0, part, S)]


def _chunks(count: int, step: int) -> list[tuple[int, int]]:
    """Lengths of the chunks of an array, and how many there are of each."""
    full, rest = divmod(count, step)
    return [(length, times) for length, times in ((step, full), (rest, 1)) if length and times]


def _parts(count: int, parts: int) -> list[int]:
    """Lengths of the nearly equal parts."""
    bounds = operands.bounds_of(count, parts)
    return [b - a for a, b in pairwise(bounds)]
