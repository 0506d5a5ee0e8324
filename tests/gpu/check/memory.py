"""The stage on memory that NCCL knows, one-sided operations, and a group that grows."""

from __future__ import annotations

from tests.gpu.check import memory_jobs, rank_jobs
from tests.gpu.check.place import Place, Ranks
from tests.gpu.check.record import Reporter
from tests.gpu.check.streaming import work_through

__all__ = ["both"]


def both(reporter: Reporter, place: Place) -> None:
    """Every program on two ranks of the one GPU, and growth from two ranks to three."""
    ranks = Ranks(place, 2, first=[(rank_jobs.warm_up, name) for name in place.kits])
    try:
        for name in place.kits:
            for program in memory_jobs.PROGRAMS:
                work_through(reporter, ranks, name, program)
    finally:
        reporter.check("2 ranks leave", ranks.depart)
    ranks, name = Ranks(place, 3, place.kits[:1]), place.kits[0]
    try:
        work_through(reporter, ranks, name, memory_jobs.a_group_of_two_grows_by_a_third_rank)
    finally:
        reporter.check("3 ranks leave", ranks.depart)
