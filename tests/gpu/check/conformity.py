"""The stages with the conformance suite's cases: every type and reduction, then random ones as time allows."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import cycle, islice
from typing import Any

from nccl_comm.backend import NCCLBackend
from nccl_comm.library.nccl import nccl_reduction
from tests.gpu.check import rank_jobs
from tests.gpu.check.place import HOST_BACKENDS, Place, Ranks, host_backend
from tests.gpu.check.record import NoTime, Reporter, Skip
from tests.support.ranks import sample_seed
from tests.support.suite import Suite
from unicoll.arrays.types import BY_NAME, DType, Reduction
from unicoll.testing import conformance_jobs
from unicoll.testing.cases import Case
from unicoll.testing.conformance import COLLECTIVES
from unicoll.testing.reference import NCCL, STRICT, Arithmetic, reduction_of

_BATCH = 40
_RESERVE_S = 3.0
_NEEDS_S = 2.0
_MOST_HANGS = 3
_NATIVE = [op for op in COLLECTIVES if op in NCCLBackend.caps.native]
"""Operations that NCCL does itself."""
_REHEARSED = 8
"""A simulated run does one of so many systematic cases; the backend's tests do all on the simulated device."""


class Drawn(Suite):
    """The suite's cases for the available arrays and the backend's reductions."""

    def __init__(
        self,
        families: Sequence[str],
        reduces: Callable[[DType, Reduction], bool],
        arithmetic: Arithmetic = STRICT,
    ) -> None:
        self.families = tuple(families)
        self.arithmetic = arithmetic
        self._reduces = reduces

    def reduces(self, dtype: str, reduction: str) -> bool:
        return self._reduces(BY_NAME[dtype], reduction_of(reduction, dtype))

    def boundaries(self, op: str, itemsize: int, size: int) -> Sequence[int]:
        return [0, 1, 7, 1000, 16384 // itemsize + 1, 262144 // itemsize + 3]

    def large(self, itemsize: int) -> int:
        return 4_000_037 // itemsize

    def has(self, family: str, dtype: str) -> bool:
        """True if a family has arrays of a type: CuPy lacks those that NumPy lacks."""
        return BY_NAME[dtype].native or family in ("torch_cuda", "torch", "simulated")

    def systematic(self) -> Iterator[Case]:
        """Every operation with every type and reduction, alternating families, blocking and not."""
        counts, families = cycle([5, 1, 0, 12, 1000]), cycle(self.families)
        for op in _NATIVE:
            for i, (dtype, reduction) in enumerate(self.pairs(op)):
                family = next((f for f in islice(families, len(self.families)) if self.has(f, dtype)), None)
                if family is not None:
                    count, special = next(counts), reduction in ("MIN", "MAX")
                    more: Any = {"async_op": i % 2 == 1, "special": special, "family": family, "seed": i}
                    yield Case(op, dtype, reduction, count, **more)

    def drawn(self, size: int, rng: random.Random) -> Iterator[Case]:
        """Random cases without end, a large one from time to time."""
        while True:
            case = self.draw(rng.choice([op for op in _NATIVE if op != "barrier"]), size, rng)
            if not self.has(case.family, case.dtype):
                continue
            if rng.random() < 0.05 and case.layout != "scalar":
                case = replace(case, count=self.large(BY_NAME[case.dtype].itemsize) // size)
            yield case


def conformance(reporter: Reporter, place: Place, size: int) -> None:
    """Ranks on the one GPU."""
    seed = sample_seed()
    rng = random.Random(f"{seed} {size}")
    reporter.figure("seed", seed)
    ranks = Ranks(place, size, first=[(rank_jobs.warm_up, name) for name in place.kits])
    try:
        facts = reporter.check(f"{size} ranks join and find NCCL", ranks.run, rank_jobs.device_facts)
        if facts is None:
            return
        version, capability = facts[0]["nccl"], min(tuple(fact["capability"]) for fact in facts)
        lacks = ("float8",) if facts[0]["runtime"] == "HIP" else ()
        suite = Drawn(
            place.families,
            lambda dtype, reduction: (
                not dtype.name.startswith(lacks)
                and nccl_reduction(dtype, reduction, version, capability) is not None
            ),
            NCCL,
        )
        for name, family in zip(place.kits, place.families, strict=True):
            words = f"{name}: coalesced calls, batches, messages"
            reporter.check(words, _messages, ranks, name, family)
        step = _REHEARSED if place.simulated else 1
        systematic = islice(suite.systematic(), seed % step, None, step)
        _work_through(reporter, suite, ranks, systematic, "every type and reduction", whole=True)
        count = _BATCH // 2 if place.simulated else None
        _work_through(reporter, suite, ranks, islice(suite.drawn(size, rng), count), "drawn at random")
    finally:
        reporter.check(f"{size} ranks leave", ranks.depart)


def _messages(ranks: Ranks, name: str, family: str) -> None:
    """The suite's coalesced calls and messages, and a message of each rank to itself."""
    for async_op in (False, True):
        ranks.run(conformance_jobs.coalesced, async_op, family)
    if ranks.size > 1:
        wrong = [text for each in ranks.run(conformance_jobs.messages, family) for text in each]
        assert not wrong, wrong
    ranks.run(rank_jobs.sent_to_itself, name)


def _work_through(
    reporter: Reporter, suite: Drawn, ranks: Ranks, cases: Iterator[Case], what: str, whole: bool = False
) -> None:
    """Run cases in batches until there are none, or no time, or too many batches have hung.

    ``whole`` says that all of them are due.
    """
    done, failed, hung, batch = 0, 0, 0, list(islice(cases, _BATCH))
    while batch and reporter.left() > _RESERVE_S and hung < _MOST_HANGS:
        words = f"{what}: cases {done} to {done + len(batch) - 1}"
        try:
            suite.check_cases(ranks, batch, ranks.place.patience)
        except Exception as error:
            failed += 1
            hung += not ranks.running
            reporter.check(words, _raise, error)
        done += len(batch)
        reporter.say(words)
        batch = list(islice(cases, _BATCH))
        reporter.figure(f"cases, {what}", {"run": done, "batches failed": failed, "all": not batch})
    reporter.check(what, _some, done, failed, whole and bool(batch))


def _raise(error: Exception) -> None:
    raise error


def _some(done: int, failed: int, more: bool) -> None:
    assert not failed, f"{failed} batches failed"
    if more:
        raise NoTime(f"there was no time for more than {done}")
    if not done:
        raise Skip("there was no time for any")


def mixed(reporter: Reporter, place: Place) -> None:
    """Arrays of the host and of the device in one group of two ranks."""
    ranks = Ranks(place, 2)
    try:
        for name in place.kits:
            reporter.check(f"{name}: CPU and CUDA arrays in one group", ranks.run, rank_jobs.mixed, name)
    finally:
        reporter.check("2 ranks leave", ranks.depart)


def staged(reporter: Reporter, place: Place) -> None:
    """Two ranks whose arrays on the GPU go through backends of the host."""
    rng = random.Random(f"{sample_seed()} staged")
    for name in HOST_BACKENDS:
        reporter.check(
            f"the backend {name} on CUDA arrays", _staged, reporter, place, name, rng, needs=_NEEDS_S
        )


def _staged(reporter: Reporter, place: Place, name: str, rng: random.Random) -> None:
    caps = host_backend(name).caps
    suite = Drawn(place.families, lambda dtype, reduction: caps.reduces(dtype, reduction))
    ranks = Ranks(place, 2, backend=f"cpu:{name},cuda:{name}")
    try:
        explained = ranks.run(rank_jobs.explained, place.kits[0])
        cases = suite.drawn(2, rng)
        for batch in (1,) if place.simulated else (1, 2):
            suite.check_cases(ranks, list(islice(cases, _BATCH)), place.patience)
            reporter.figure(f"cases, {name}", {"run": batch * _BATCH, "explained": explained[0]})
    finally:
        ranks.close()
