"""The stage on torch.distributed: two ranks on the one GPU with unicoll's torch plug-in as the backend."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

from tests.gpu.check import plugin_jobs
from tests.gpu.check.place import Place, Ranks
from tests.gpu.check.record import Reporter, Skip
from tests.gpu.check.streaming import done

__all__ = ["two"]

_TIMEOUT_S = 20.0
"""Timeout of the group, seconds."""
_NEEDS_S = 2.0
_MODULES = (
    "torch.distributed.fsdp",
    "torch.distributed.algorithms.ddp_comm_hooks.default_hooks",
    "torch.distributed._functional_collectives",
)
"""Modules that the programs import, which takes longer than the programs."""


def two(reporter: Reporter, place: Place) -> None:
    """Every program of :mod:`plugin_jobs`."""
    if importlib.util.find_spec("torch") is None or not {"torch", "simulated"} & {*place.kits}:
        reporter.check("torch.distributed on CUDA tensors", _without_torch)
        return
    enter = (plugin_jobs.enter, place.simulated, _TIMEOUT_S)
    needed: dict[str, Any] = {"kits": []} if place.simulated else {"kits": ["torch"], "modules": _MODULES}
    ranks = Ranks(place, 2, **needed, leave=plugin_jobs.leave, enter=enter)
    try:
        for program in plugin_jobs.PROGRAMS:
            words = program.__name__.replace("_", " ")
            found = reporter.check(words, _call, ranks, program, needs=_NEEDS_S)
            if found is not None and found[0] is not None:
                reporter.figure(words, found)
    finally:
        reporter.check("the ranks leave", ranks.depart)


def _call(ranks: Ranks, program: Callable[..., Any]) -> list[object]:
    return done(ranks.run(plugin_jobs.run, program.__name__))


def _without_torch() -> None:
    raise Skip("torch is not here, or has no CUDA")
