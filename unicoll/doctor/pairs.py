"""Data between all pairs of ranks: every byte checked, and the pairs that are slow beside the others of their kind.

The pairs meet in the rounds of a round-robin tournament, disjoint pairs at once. Who looks slow then is measured again
while all others wait, and the better figure counts: what is slow only beside other traffic is not named.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

import numpy as np
from numpy.typing import NDArray

from ..errors import DistError
from ..group import ProcessGroup

__all__ = ["FACTOR", "LARGE", "Pair", "Verdict", "judge", "measure", "merge", "rounds", "suspects"]

LARGE = 4 << 20
"""Bytes of the message that gives the bandwidth."""
FACTOR = 3.0
"""A pair is slow if it takes this many times the median of its kind."""
_SMALL = 8
_TURNS_S, _LEAST, _MOST = 0.2, 4, 200
"""A message is sent there and back so often; the lower rank stops, once it has had its time."""
_QUIET_S = 0.3
"""How long the other ranks sleep while a pair is measured again: some MPI libraries wait by asking all the time."""
_FEWEST = 3
"""Of fewer pairs the median says nothing."""
_SMALL_S, _LARGE_S = 50e-6, 300e-6
"""A pair that takes less than this longer than the median is not slow: another socket, or a busy core."""
_TAG = 7300

Bytes = NDArray[np.uint8]


@dataclass
class Pair:
    """What one pair has shown; times of one way, in seconds, and None where it broke before."""

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
class Verdict:
    """What the pairs amount to.

    Attributes:
        medians: latency and transfer time of each kind of pair.
        slow: pairs well behind the median of their kind, each with the reason.
        broken: pairs that lost data, failed or did not end in time.
        checked: how many pairs there are.
    """

    medians: dict[str, tuple[float, float]]
    slow: list[tuple[Pair, str]]
    broken: list[Pair]
    checked: int


def rounds(size: int) -> Iterator[list[tuple[int, int]]]:
    """Every pair of ``range(size)`` once, in rounds of disjoint pairs: the circle method."""
    places: list[int | None] = [*range(size), *([None] if size % 2 else [])]
    for _ in range(len(places) - 1):
        half = len(places) // 2
        facing = zip(places[:half], reversed(places[half:]), strict=True)
        yield [(min(a, b), max(a, b)) for a, b in facing if a is not None and b is not None]
        places[1:] = [places[-1], *places[1:-1]]


def measure(
    group: ProcessGroup, pairs: Iterable[tuple[int, int]], deadline: float, *, quiet: bool = False
) -> list[Pair]:
    """Move data within those of ``pairs`` that this rank belongs to; all ranks of the group call with the same pairs.

    With ``quiet`` the ranks of no pair sleep first, so that they take no processor from the others.
    Errors of a message are the pair's; those that end the group are raised by the barrier that follows.
    """
    found = []
    for low, high in pairs:
        if group.rank() not in (low, high):
            continue
        pair = Pair(low, high)
        try:
            _exchange(group, pair, time.monotonic() + deadline)
        except DistError as e:
            pair.errors.append(f"{type(e).__name__}: {e}")
        found.append(pair)
    if quiet and not found:
        time.sleep(_QUIET_S)
    group.barrier()
    return found


def _exchange(group: ProcessGroup, pair: Pair, end: float) -> None:
    mine = group.rank()
    other = pair.high if mine == pair.low else pair.low

    def swap(out: Bytes, into: Bytes) -> float:
        """There and back, begun by the lower rank; seconds."""
        begin = time.perf_counter()
        for turn in (mine < other, mine > other):
            left = max(end - time.monotonic(), 0.001)
            if turn:
                group.send(out, dst=other, tag=_TAG, timeout=left)
            else:
                group.recv(into, src=other, tag=_TAG, timeout=left)
        return time.perf_counter() - begin

    pair.latency = _best(pair, mine, other, _SMALL, swap)
    pair.transfer = _best(pair, mine, other, LARGE, swap)


def _best(pair: Pair, mine: int, other: int, nbytes: int, swap: Callable[[Bytes, Bytes], float]) -> float:
    """The shortest time of one way, after a turn that makes the connection; every turn's bytes are checked."""
    out, expected = _pattern(mine, other, nbytes), _pattern(other, mine, nbytes)
    into, told = np.empty(nbytes, np.uint8), np.empty(1, np.uint8)
    times: list[float] = []
    while True:
        into[:] = ~expected
        wanted = len(times) <= _LEAST or (len(times) <= _MOST and sum(times) < _TURNS_S)
        more = np.array([wanted], np.uint8)
        swap(more, told)  # so nobody is still checking when the time begins
        if not (more if mine < other else told)[0]:
            return min(times[1:]) / 2
        times.append(swap(out, into))
        wrong = np.flatnonzero(into != expected)
        if wrong.size:
            text = f"{wrong.size} of {nbytes} bytes from rank {other} to rank {mine} came wrong, first byte {wrong[0]}"
            if text not in pair.errors:
                pair.errors.append(text)


def _pattern(source: int, destination: int, nbytes: int) -> Bytes:
    """Bytes that are another sequence for every two ranks and either direction."""
    return np.random.default_rng([source, destination, nbytes]).integers(0, 256, nbytes, np.uint8)


def merge(found: Iterable[Pair], known: Mapping[tuple[int, int], Pair]) -> dict[tuple[int, int], Pair]:
    """One record for each pair: the lower rank's times, the best of several, and the errors of both ranks."""
    merged = dict(known)
    for pair in found:
        before = merged.setdefault((pair.low, pair.high), pair)
        if before is pair:
            continue
        before.errors += [e for e in pair.errors if e not in before.errors]
        before.latency = _less(before.latency, pair.latency)
        before.transfer = _less(before.transfer, pair.transfer)
    return merged


def _less(a: float | None, b: float | None) -> float | None:
    return min((t for t in (a, b) if t is not None), default=None)


def suspects(verdict: Verdict, most: int = 64) -> list[tuple[int, int]]:
    """The pairs to be measured again, alone."""
    return [(pair.low, pair.high) for pair, _ in verdict.slow[:most]]


def judge(pairs: Iterable[Pair], hosts: Sequence[str]) -> Verdict:
    """Compare the pairs with those of their kind.

    Args:
        pairs: all of them.
        hosts: what tells hosts apart, by rank.
    """
    kinds: dict[str, list[Pair]] = {}
    everything = list(pairs)
    for pair in everything:
        kind = "within a host" if hosts[pair.low] == hosts[pair.high] else "between hosts"
        kinds.setdefault(kind, []).append(pair)
    verdict = Verdict({}, [], [p for p in everything if p.errors], len(everything))
    for kind, members in kinds.items():
        whole = [(p, p.latency, p.transfer) for p in members if p.latency and p.transfer and not p.errors]
        if not whole:
            continue
        latency, transfer = median(w[1] for w in whole), median(w[2] for w in whole)
        verdict.medians[kind] = latency, transfer
        if len(whole) >= _FEWEST:
            verdict.slow += _behind(whole, kind, latency, transfer)
    return verdict


def _behind(
    measured: Iterable[tuple[Pair, float, float]], kind: str, latency: float, transfer: float
) -> list[tuple[Pair, str]]:
    """The pairs that are slow beside these medians, the slowest first, each with the reason."""
    found: list[tuple[float, Pair, str]] = []
    for pair, small, large in measured:
        words = []
        if large >= FACTOR * transfer and large - transfer >= _LARGE_S:
            times = large / transfer
            words.append(f"{rate(large)}, {times:.1f} times less than the median {kind} ({rate(transfer)})")
        if small >= FACTOR * latency and small - latency >= _SMALL_S:
            times = small / latency
            words.append(
                f"{small * 1e6:.1f} us for a small message, {times:.1f} times the median {kind}"
                f" ({latency * 1e6:.1f} us)"
            )
        if words:
            found.append((max(small / latency, large / transfer), pair, "; ".join(words)))
    return [(pair, why) for _, pair, why in sorted(found, key=lambda f: -f[0])]


def rate(transfer: float) -> str:
    """The bandwidth of a large message, for people."""
    return f"{LARGE / transfer / 1e9:.3g} GB/s"
