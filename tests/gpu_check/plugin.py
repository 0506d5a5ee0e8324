"""The stage on the plug-in: programs of torch.distributed over unicoll, on CUDA tensors, on two ranks."""

from __future__ import annotations

from . import plugin_jobs
from .place import Place, Ranks
from .record import Reporter, Skip
from .streaming import work_through

__all__ = ["two"]


def two(reporter: Reporter, place: Place) -> None:
    """Every program of :mod:`plugin_jobs`."""
    if "torch" not in place.kits:
        reporter.check("torch.distributed on CUDA tensors", _no_torch, place)
        return
    ranks = Ranks(place, 2, ["torch"], enter=plugin_jobs.enter, leave=plugin_jobs.leave, join="env")
    try:
        for program in plugin_jobs.PROGRAMS:
            work_through(reporter, ranks, "torch", program)
    finally:
        reporter.check("torch: the ranks leave", ranks.close)


def _no_torch(place: Place) -> None:
    raise Skip("the simulated device has no tensors of torch" if place.simulated else "torch is not installed")
