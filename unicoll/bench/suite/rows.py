"""The table of the suite: the ratios, the timings that they consist of, and the jobs in which those are measured.

A new measurement is one row of :data:`ROWS`. Timings of one job and one size are measured in alternation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from unicoll.bench.operations import OPERATIONS
from unicoll.bench.sizes import short


@dataclass(frozen=True, eq=False)
class SuiteJob:
    """A job of the suite, whose ranks are on this host, with environment variables; mpirun starts it if ``mpi``.

    ``factor`` is that of the number of calls.
    """

    name: str
    ranks: int
    variables: Mapping[str, str] = field(default_factory=dict)
    mpi: bool = False
    factor: int = 1


_MEMORY = SuiteJob("shared memory", 2)
_TCP = SuiteJob("tcp", 2, {"UNICOLL_TRANSPORT": "tcp"})
_MPI = SuiteJob("mpirun", 2, mpi=True)
_ALONE = SuiteJob("one rank", 1, factor=20)
JOBS = (_MEMORY, _TCP, _MPI, _ALONE)
"""The jobs, in the order in which each repetition starts them."""


@dataclass(frozen=True)
class Timing:
    """The median time of one call of ``size`` bytes, float32, sum, root 0.

    ``asynchronous``: of the asynchronous form and its wait. ``recorded``: False if the flight recorder is off.
    """

    contender: str
    op: str
    size: int
    job: SuiteJob = _MEMORY
    asynchronous: bool = False
    recorded: bool = True

    def __str__(self) -> str:
        form = (" async" if self.asynchronous else "") + ("" if self.recorded else " unrecorded")
        return f"{self.contender} {self.op} {short(self.size)}{form} ({self.job.name})"


@dataclass(frozen=True)
class RatioRow:
    """One ratio of two times; ``name`` is in the committed runs, so it stays."""

    name: str
    over: Timing
    under: Timing
    larger_is_better: bool = False

    @property
    def timings(self) -> tuple[Timing, Timing]:
        return self.over, self.under


def _all_reduce(size: int, contender: str = "gloo", job: SuiteJob = _MEMORY) -> Timing:
    return Timing(contender, "all_reduce", size, job)


def _compared(
    over: str, under: str, sizes: Sequence[int], job: SuiteJob = _MEMORY, larger_is_better: bool = False
) -> list[RatioRow]:
    """A row for each size of an all_reduce of two contenders."""
    return [
        RatioRow(
            f"all_reduce {short(n)}: {over} / {under}",
            _all_reduce(n, over, job),
            _all_reduce(n, under, job),
            larger_is_better,
        )
        for n in sizes
    ]


_SIZES = (8, 16 << 10, 256 << 10, 4 << 20, 64 << 20)
_SMALL = (8, 16 << 10)
_OTHERS = [name for name in OPERATIONS if name not in ("all_reduce", "latency", "barrier")]

ROWS: tuple[RatioRow, ...] = (
    *_compared("torch-gloo", "gloo", _SIZES, larger_is_better=True),
    *_compared("gloo", "floor", _SIZES),
    *_compared("gloo-symmetric", "floor", (4 << 20, 64 << 20)),
    *(
        RatioRow(f"{op} {short(n)} / all_reduce", Timing("gloo", op, n), _all_reduce(n))
        for n in _SMALL
        for op in _OTHERS
    ),
    RatioRow("barrier / all_reduce 8", Timing("gloo", "barrier", 8), _all_reduce(8)),
    RatioRow("send 8 / all_reduce", Timing("gloo", "latency", 8), _all_reduce(8)),
    RatioRow(
        "all_reduce 8: async / blocking", Timing("gloo", "all_reduce", 8, asynchronous=True), _all_reduce(8)
    ),
    RatioRow(
        "tcp all_reduce 64M: gloo / floor",
        _all_reduce(64 << 20, job=_TCP),
        _all_reduce(64 << 20, "floor", _TCP),
    ),
    RatioRow(
        "one rank all_reduce 8: with / without flight recorder",
        _all_reduce(8, job=_ALONE),
        Timing("gloo", "all_reduce", 8, _ALONE, recorded=False),
    ),
    *_compared("mpi", "mpi4py", (8, 1 << 20), _MPI),
)
"""The ratios."""
