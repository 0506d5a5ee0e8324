"""What ranks do in the tests of scripts/gpu_check: programs like its own, some of which hang, and mutations."""

from __future__ import annotations

import os
import time
from typing import Any

from tests.support import worker


def goes_well(k: Any) -> int:
    return os.getpid()


def hangs(k: Any) -> None:
    time.sleep(1000.0)


def dies(k: Any) -> None:
    os._exit(7)


def is_wrong(k: Any) -> None:
    raise AssertionError("nonsense")


def first_library_hangs() -> None:
    """For detection: the first library does not answer, the other one works."""
    if worker.rank_and_size()[0] == 0:
        hangs(None)


def fails(program: str, mutation: str | None) -> str | None:
    """The error of a program with a safeguard removed, or None; faults of the simulation are dropped."""
    from tests.gpu.check import rank_jobs, streaming_jobs
    from tests.gpu.check.kits import kit
    from tests.nccl import mutation_jobs
    from tests.simulated_nccl import ranks

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
