"""What ranks do in the checks of scripts/gpu_check's programs: with a safeguard taken out, a program must fail."""

from __future__ import annotations

import mutation_jobs
import simulated_ranks
from gpu_check import rank_jobs, streaming_jobs
from gpu_check.kits import kit


def fails(program: str, mutation: str | None) -> str | None:
    """The error that a program ends with when a safeguard is out, or None; what the simulation says is dropped."""
    rank_jobs.warm_up("simulated")
    error = None
    with mutation_jobs.mutated(mutation):
        try:
            getattr(streaming_jobs, program)(kit("simulated"))
        except AssertionError as e:
            error = type(e).__name__
    sim = simulated_ranks.here()
    sim.synchronize()
    if mutation is not None:
        sim.faults.clear()
    return error
