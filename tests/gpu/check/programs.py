"""The stages that run programs on ranks: streams and lifetimes, memory that NCCL knows, and torch.distributed."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from typing import Any

from tests.gpu.check import memory_jobs, plugin_jobs, rank_jobs, streaming_jobs
from tests.gpu.check.place import Place, Ranks
from tests.gpu.check.record import Reporter, Skip

_NEEDS_S = 1.0
_TIMEOUT_S = 20.0
"""Timeout of torch's group, seconds."""
_MODULES = (
    "torch.distributed.fsdp",
    "torch.distributed.algorithms.ddp_comm_hooks.default_hooks",
    "torch.distributed._functional_collectives",
)
"""Modules that the programs with torch.distributed import, which takes longer than the programs."""
Program = Callable[[Any], Any]


def streams(reporter: Reporter, place: Place, size: int) -> None:
    """Results that races would make wrong, and calls that wait for the device; with two ranks one can be late."""
    for name in place.kits:
        ranks = Ranks(place, size, [name], [(rank_jobs.warm_up, name)], counting=True, timeout=40.0)
        try:
            run_programs(reporter, ranks, name, streaming_jobs.PROGRAMS)
            if name == "torch":
                found = reporter.check("torch: trace of the runtime's calls", _trace, ranks, needs=_NEEDS_S)
                reporter.figure("torch: runtime's calls in an asynchronous stretch", found)
        finally:
            reporter.check(f"{name}: the ranks leave", ranks.depart)


def _trace(ranks: Ranks) -> list[Any]:
    found = ranks.run(streaming_jobs.trace, timeout=2 * ranks.place.patience)  # the profiler starts, too
    for each in found:
        if isinstance(each, str):
            raise Skip(each)
        assert not each["waiting"], f"calls that wait for the device: {each['waiting']}"
    return found


def memory(reporter: Reporter, place: Place) -> None:
    """Registered memory and one-sided operations on two ranks of the one GPU, and growth from two ranks to three."""
    one, comparing = place.kits[:1], memory_jobs.COMPARING
    warm = [(rank_jobs.warm_up, name) for name in place.kits]
    for ranks, kits, programs in (
        (Ranks(place, 2, first=warm), place.kits, memory_jobs.PROGRAMS),
        (Ranks(place, 2, one, warm[:1], env=comparing), one, [memory_jobs.nccl_compares_symmetric_memory]),
        (Ranks(place, 3, one), one, [memory_jobs.a_group_of_two_grows_by_a_third_rank]),
    ):
        try:
            for name in kits:
                run_programs(reporter, ranks, name, programs)
        finally:
            reporter.check(f"{ranks.size} ranks leave", ranks.depart)


def plugin(reporter: Reporter, place: Place) -> None:
    """torch.distributed on two ranks of the one GPU, with unicoll's torch plug-in as the backend."""
    if importlib.util.find_spec("torch") is None or not {"torch", "simulated"} & {*place.kits}:
        reporter.check("torch.distributed on CUDA tensors", _without_torch)
        return
    run_torch(reporter, place, 2, plugin_jobs.PROGRAMS)


def run_torch(reporter: Reporter, place: Place, size: int, programs: Sequence[Program]) -> None:
    """Run programs with torch.distributed."""
    enter = (plugin_jobs.enter, place.simulated, _TIMEOUT_S)
    needed: dict[str, Any] = {"kits": []} if place.simulated else {"kits": ["torch"], "modules": _MODULES}
    ranks = Ranks(place, size, **needed, leave=plugin_jobs.leave, enter=enter)
    try:
        run_programs(reporter, ranks, "", programs)
    finally:
        reporter.check("the ranks leave", ranks.depart)


def _without_torch() -> None:
    raise Skip("torch is not here, or has no CUDA")


def run_programs(reporter: Reporter, ranks: Ranks, name: str, programs: Sequence[Program]) -> None:
    """Run programs with an array library on all ranks, each as a check; "" is the library of :mod:`plugin_jobs`."""
    for program in programs:
        words = f"{name}: " * bool(name) + program.__name__.replace("_", " ")
        found = reporter.check(words, _run, ranks, name, program, needs=_NEEDS_S)
        if found is not None and found[0] is not None:
            reporter.figure(words, found)


def _run(ranks: Ranks, name: str, program: Program) -> list[Any]:
    """The program's result on each rank; Skip if one of them cannot run it."""
    found = ranks.run(rank_jobs.run, name, program.__module__, program.__name__)
    reasons = [value for outcome, value in found if outcome == "skip"]
    if reasons:
        raise Skip(reasons[0])
    return [value for _, value in found]
