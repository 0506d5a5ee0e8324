"""The CPU backend serves device arrays through the host's memory: conformance, on a simulated device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import pytest
import staged
from conformance import as_reduction
from ranks import Job, Pool, pools
from simulated_ranks import Settings

from gloo_fallback.backend import GlooBackend
from unicoll.types import BY_NAME


class TestGloo(staged.Staged):
    """Named alone, the current stream not the legacy one."""

    @pytest.fixture(scope="class")
    @classmethod
    def pool(cls, seed: int) -> Iterator[Callable[[int], Pool]]:
        settings = Settings(policy="random", seed=seed, own_stream=True, backend="gloo")
        with pools(partial(Job, prepare=(staged.prepare, settings))) as made:
            yield made

    def reduces(self, dtype: str, reduction: str) -> bool:
        return GlooBackend.caps.reduces(BY_NAME[dtype], as_reduction(reduction, dtype))
