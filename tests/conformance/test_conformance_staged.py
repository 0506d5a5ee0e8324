"""The CPU backend serves device arrays through the host's memory: conformance, on a simulated device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import pytest

from tests.nccl import staged
from tests.simulated_nccl.ranks import Settings
from tests.support.ranks import Pool, ProcessJob, pools


@pytest.mark.every(6)
class TestGloo(staged.Staged):
    """Named alone, the current stream not the legacy one."""

    backend = "gloo"

    @pytest.fixture(scope="class")
    @classmethod
    def pool(cls, seed: int) -> Iterator[Callable[[int], Pool]]:
        settings = Settings(policy="random", seed=seed, own_stream=True, backend="gloo")
        with pools(partial(ProcessJob, prepare=(staged.prepare, settings))) as made:
            yield made
