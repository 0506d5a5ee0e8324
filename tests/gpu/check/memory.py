"""The stage on memory that NCCL knows, one-sided operations, and a group that grows."""

from __future__ import annotations

from collections.abc import Sequence

from tests.gpu.check import memory_jobs as jobs
from tests.gpu.check import rank_jobs
from tests.gpu.check.place import Place, Ranks
from tests.gpu.check.record import Reporter
from tests.gpu.check.streaming import work_through

__all__ = ["both"]


def both(reporter: Reporter, place: Place) -> None:
    """Programs on two ranks of the one GPU, and growth from two ranks to three."""
    one = place.kits[:1]
    warm = [(rank_jobs.warm_up, name) for name in place.kits]
    _run(reporter, Ranks(place, 2, first=warm), place.kits, jobs.PROGRAMS)
    _run(
        reporter,
        Ranks(place, 2, one, warm[:1], env=jobs.COMPARING),
        one,
        [jobs.nccl_compares_symmetric_memory],
    )
    _run(reporter, Ranks(place, 3, one), one, [jobs.a_group_of_two_grows_by_a_third_rank])


def _run(reporter: Reporter, ranks: Ranks, kits: Sequence[str], programs: Sequence[jobs.Program]) -> None:
    try:
        for name in kits:
            for program in programs:
                work_through(reporter, ranks, name, program)
    finally:
        reporter.check(f"{ranks.size} ranks leave", ranks.depart)
