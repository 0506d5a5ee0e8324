"""SYCL arrays go through host memory to the CPU backend: conformance, with real queues of a SYCL device, the CPU."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tests.nccl import staged
from tests.support.ranks import ProcessJob
from tests.xccl.sycl_ranks import SyclFamily, SyclJob, unavailable_reason
from unicoll.arrays.types import BY_NAME
from unicoll.testing.cases import Case
from unicoll.testing.ranks import Runner

if unavailable_reason():
    pytest.skip(unavailable_reason(), allow_module_level=True)


class TestGloo(staged.Staged):
    backend = "gloo"
    families = ("sycl",)
    sizes = barrier_sizes = coalesced_sizes = (2,)
    layouts = (*SyclFamily.layouts, "scalar")

    @classmethod
    def start(cls, size: int) -> ProcessJob:
        return SyclJob(size)

    def check_cases(self, pool: Runner, cases: Sequence[Case], timeout: float = 120.0) -> None:
        super().check_cases(pool, [c for c in cases if BY_NAME[c.dtype].native], timeout)

    test_refuses_what_it_does_not_reduce = None  # type: ignore[assignment]  # dpctl has no float8
