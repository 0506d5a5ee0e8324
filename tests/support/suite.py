"""The conformance suite as the tests of this repository run it."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence

import pytest

from tests.support import selection, worker
from tests.support.ranks import Pool, ProcessJob, pools
from unicoll.testing.cases import Case
from unicoll.testing.conformance import Conformance
from unicoll.testing.ranks import Runner


class Suite(Conformance):
    """Its ranks are forks. The short run has a third of the cases, the same ones each time."""

    env: Mapping[str, str] = {}
    """Additional environment variables of its ranks."""

    @classmethod
    def start(cls, size: int) -> ProcessJob:
        return ProcessJob(size, prepare=(worker.use, cls.backend, cls.imports), env=dict(cls.env))

    @pytest.fixture(scope="class")
    @classmethod
    def pool(cls) -> Iterator[Callable[[int], Pool]]:
        with pools(cls.start) as made:
            yield made

    @classmethod
    def table_seed(cls) -> int:
        return selection.table_seed()

    def check_cases(self, pool: Runner, cases: Sequence[Case], timeout: float = 120.0) -> None:
        if selection.is_short():
            cases = random.Random(len(cases)).sample(cases, -(-len(cases) // 3))
        super().check_cases(pool, cases, timeout)
