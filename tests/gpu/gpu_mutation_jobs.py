"""Functions that ranks run in the mutation tests of scripts/gpu_check's programs."""

from __future__ import annotations

from tests.gpu.check import rank_jobs, streaming_jobs
from tests.gpu.check.kits import kit
from tests.nccl import mutation_jobs
from tests.simulated_nccl import ranks


def fails(program: str, mutation: str | None) -> str | None:
    """The error of a program with a safeguard removed, or None; faults of the simulation are dropped."""
    rank_jobs.warm_up("simulated")
    error = None
    with mutation_jobs.mutated(mutation):
        try:
            getattr(streaming_jobs, program)(kit("simulated"))
        except AssertionError as e:
            error = type(e).__name__
    sim = ranks.simulation()
    sim.synchronize()
    if mutation is not None:
        sim.faults.clear()
    return error
