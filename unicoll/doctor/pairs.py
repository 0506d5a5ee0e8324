"""Data exchange between all pairs of ranks: checks every byte and finds pairs slower than others of
their kind.

The pairs are measured in rounds of disjoint pairs (a round-robin schedule). Slow pairs are measured
again while all other ranks are idle, and the better result counts, so that a pair that is slow only
because of other traffic is not reported.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

import numpy as np
from numpy.typing import NDArray

from unicoll.errors import DistError
from unicoll.group.process_group import ProcessGroup

LARGE = 4 << 20
"""Bytes of the message that gives the bandwidth."""
FACTOR = 3.0
"""A pair is slow if it takes this many times the median of its kind."""
_SMALL = 8
_TURNS_S, _MIN_TRIPS, _MAX_TRIPS = 0.2, 4, 200
"""Time budget, minimum and maximum of round trips per message size; the lower rank decides when to
stop."""
_QUIET_S = 0.3
"""Sleep of the other ranks while a pair is measured again, because some MPI libraries wait by
polling."""
_MIN_PAIRS = 3
"""Minimum number of pairs for a meaningful median."""
_SMALL_S, _LARGE_S = 50e-6, 300e-6
"""Excess over the median below which a pair is not slow (another socket, a busy core)."""
_TAG = 7300

Bytes = NDArray[np.uint8]


@dataclass
class RankPair:
    """Results of one pair: one-way times in seconds, None if it failed before, and errors."""

    low: int
    high: int
    latency: float | None = None
    transfer: float | None = None
    errors: list[str] = field(default_factory=list)

    @property
    def bandwidth(self) -> float | None:
        """Bytes per second of a large message."""
        return None if self.transfer is None else LARGE / self.transfer


@dataclass
class PairSummary:
    """Summary of all pairs.

    Attributes:
        medians: latency and transfer time of each kind of pair.
        slow: pairs much slower than the median of their kind, each with the reason.
        broken: pairs that corrupted data, failed or timed out.
    """

    medians: dict[str, tuple[float, float]]
    slow: list[tuple[RankPair, str]]
    broken: list[RankPair]
    checked: int


def rounds(size: int) -> Iterator[list[tuple[int, int]]]:
    """Every pair of ``range(size)`` once, in rounds of disjoint pairs: the circle method."""
    places: list[int | None] = [*range(size), *([None] if size % 2 else [])]
    for _ in range(len(places) - 1):
        half = len(places) // 2
        opposite = zip(places[:half], reversed(places[half:]), strict=True)
        yield [(min(a, b), max(a, b)) for a, b in opposite if a is not None and b is not None]
        places[1:] = [places[-1], *places[1:-1]]


def measure(
    group: ProcessGroup, pairs: Iterable[tuple[int, int]], deadline: float, *, quiet: bool = False
) -> list[RankPair]:
    """Exchange data within those of ``pairs`` that contain this rank; all ranks of the group pass
    the same pairs.

    With ``quiet`` the ranks outside all pairs sleep first, so that they use no processor time.
    Errors of a message are recorded in the pair; errors of the group are raised by the barrier at
    the end.
    """
    found = []
    for low, high in pairs:
        if group.rank() not in (low, high):
            continue
        pair = RankPair(low, high)
        try:
            _exchange(group, pair, time.monotonic() + deadline)
        except DistError as e:
            pair.errors.append(f"{type(e).__name__}: {e}")
        found.append(pair)
    if quiet and not found:
        time.sleep(_QUIET_S)
    group.barrier()
    return found


def _exchange(group: ProcessGroup, pair: RankPair, end: float) -> None:
    own = group.rank()
    peer = pair.high if own == pair.low else pair.low

    def swap(out: Bytes, into: Bytes) -> float:
        """One round trip, started by the lower rank; returns seconds."""
        begin = time.perf_counter()
        for turn in (own < peer, own > peer):
            remaining = max(end - time.monotonic(), 0.001)
            if turn:
                group.send(out, dst=peer, tag=_TAG, timeout=remaining)
            else:
                group.recv(into, src=peer, tag=_TAG, timeout=remaining)
        return time.perf_counter() - begin

    pair.latency = _best(pair, own, peer, _SMALL, swap)
    pair.transfer = _best(pair, own, peer, LARGE, swap)


def _best(
    pair: RankPair, own: int, peer: int, nbytes: int, swap: Callable[[Bytes, Bytes], float]
) -> float:
    """The shortest one-way time, without the first round trip, which connects; all bytes are
    checked."""
    out, expected = _pattern(own, peer, nbytes), _pattern(peer, own, nbytes)
    into, peer_continues = np.empty(nbytes, np.uint8), np.empty(1, np.uint8)
    times: list[float] = []
    while True:
        into[:] = ~expected
        unfinished = len(times) <= _MIN_TRIPS or (
            len(times) <= _MAX_TRIPS and sum(times) < _TURNS_S
        )
        continues = np.array([unfinished], np.uint8)
        # Both ranks have finished checking when the timing starts.
        swap(continues, peer_continues)
        if not (continues if own < peer else peer_continues)[0]:
            return min(times[1:]) / 2
        times.append(swap(out, into))
        wrong = np.flatnonzero(into != expected)
        if wrong.size:
            text = (
                f"{wrong.size} of {nbytes} bytes from rank {peer} to rank {own} were wrong, first"
                f" byte {wrong[0]}"
            )
            if text not in pair.errors:
                pair.errors.append(text)


def _pattern(source: int, destination: int, nbytes: int) -> Bytes:
    """Pseudo-random bytes that differ for each pair of ranks and each direction."""
    return np.random.default_rng([source, destination, nbytes]).integers(0, 256, nbytes, np.uint8)


def merge(
    found: Iterable[RankPair], previous: Mapping[tuple[int, int], RankPair]
) -> dict[tuple[int, int], RankPair]:
    """Merge results: one record per pair with the best times and the errors of both ranks."""
    merged = dict(previous)
    for pair in found:
        existing = merged.setdefault((pair.low, pair.high), pair)
        if existing is pair:
            continue
        existing.errors += [e for e in pair.errors if e not in existing.errors]
        existing.latency = _less(existing.latency, pair.latency)
        existing.transfer = _less(existing.transfer, pair.transfer)
    return merged


def _less(a: float | None, b: float | None) -> float | None:
    return min((t for t in (a, b) if t is not None), default=None)


def summarize(pairs: Iterable[RankPair], hosts: Sequence[str]) -> PairSummary:
    """Compare each pair with the median of its kind (within a host, between hosts); ``hosts`` are
    the ranks' keys."""
    kinds: dict[str, list[RankPair]] = {}
    all_pairs = list(pairs)
    for pair in all_pairs:
        kind = "within a host" if hosts[pair.low] == hosts[pair.high] else "between hosts"
        kinds.setdefault(kind, []).append(pair)
    summary = PairSummary({}, [], [p for p in all_pairs if p.errors], len(all_pairs))
    for kind, members in kinds.items():
        complete = [
            (p, p.latency, p.transfer) for p in members if p.latency and p.transfer and not p.errors
        ]
        if not complete:
            continue
        latency, transfer = median(w[1] for w in complete), median(w[2] for w in complete)
        summary.medians[kind] = latency, transfer
        if len(complete) >= _MIN_PAIRS:
            summary.slow += _find_slow(complete, kind, latency, transfer)
    return summary


def _find_slow(
    measured: Iterable[tuple[RankPair, float, float]], kind: str, latency: float, transfer: float
) -> list[tuple[RankPair, str]]:
    """The pairs that are slow compared with these medians, slowest first, each with the reason."""
    found: list[tuple[float, RankPair, str]] = []
    for pair, small, large in measured:
        reasons = []
        if large >= FACTOR * transfer and large - transfer >= _LARGE_S:
            times = large / transfer
            reasons.append(
                f"{rate(large)}, {times:.1f} times less than the median {kind} ({rate(transfer)})"
            )
        if small >= FACTOR * latency and small - latency >= _SMALL_S:
            times = small / latency
            reasons.append(
                f"{small * 1e6:.1f} us for a small message, {times:.1f} times the median {kind}"
                f" ({latency * 1e6:.1f} us)"
            )
        if reasons:
            found.append((max(small / latency, large / transfer), pair, "; ".join(reasons)))
    return [(pair, why) for _, pair, why in sorted(found, key=lambda f: -f[0])]


def rate(transfer: float) -> str:
    return f"{LARGE / transfer / 1e9:.3g} GB/s"
