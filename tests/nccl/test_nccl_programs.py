"""Random programs over streams, arrays and groups give right results on the simulated device, without races."""

from __future__ import annotations

import random

import pytest

from tests.nccl import stream_programs
from tests.simulated_nccl.ranks import SimulatedJob
from tests.support.worker import enter, leave

_PROGRAMS, _STEPS = 40, 60


@pytest.mark.every(6)
@pytest.mark.parametrize("policy", ["oldest", "newest", "random"])
@pytest.mark.parametrize("size", [2, 3])
def test_random_programs(policy: str, size: int, seed: int) -> None:
    rng = random.Random(f"{seed} {policy} {size}")
    seeds = [rng.randrange(1 << 30) for _ in range(_PROGRAMS)]
    with SimulatedJob(size, policy=policy, seed=seed) as job:
        job.call(enter)
        job.results()
        job.call(stream_programs.run, seeds, _STEPS)
        for rank, wrong in enumerate(job.results()):
            assert wrong == [], f"rank {rank}"


@pytest.mark.every(3)
@pytest.mark.parametrize("policy", ["oldest", "newest", "random"])
def test_every_call_ends_where_a_rank_fails(policy: str, seed: int) -> None:
    """Without a race, and the next group works."""
    rng = random.Random(f"{seed} {policy}")
    seeds = [rng.randrange(1 << 30) for _ in range(_PROGRAMS)]
    with SimulatedJob(3, policy=policy, seed=seed, quiet=False) as job:
        job.call(enter)
        job.results()
        job.call(stream_programs.run_with_failures, seeds, _STEPS // 2)
        for rank, wrong in enumerate(job.results(300)):
            assert wrong == [], f"rank {rank}"
        job.call(leave)
        assert job.results() == [[]] * 3
