"""The CPU backend serves device arrays through the host's memory: conformance, on a simulated device."""

from __future__ import annotations

import pytest

from tests.nccl import staged
from tests.simulated_nccl.ranks import Settings
from tests.support.ranks import ProcessJob, sample_seed


@pytest.mark.every(n=12)
class TestGloo(staged.Staged):
    """Named alone, the current stream not the legacy one."""

    backend = "gloo"

    @classmethod
    def start(cls, size: int) -> ProcessJob:
        settings = Settings(policy="random", seed=sample_seed(), own_stream=True, backend="gloo")
        return ProcessJob(size, prepare=(staged.prepare, settings))
