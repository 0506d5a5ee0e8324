"""The backend xccl passes the conformance suite on host memory, with the real oneCCL."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support import one_program
from tests.support.programs import python
from tests.support.ranks import ProcessJob
from tests.support.suite import Suite
from tests.xccl.xccl_ranks import XcclJob, unavailable_reason
from unicoll.testing.cases import Case
from unicoll.testing.conformance import Pools
from unicoll.testing.ranks import Runner
from unicoll.testing.reference import NCCL

if unavailable_reason():
    pytest.skip(unavailable_reason(), allow_module_level=True)


class TestXCCL(Suite):
    backend = "xccl"
    arithmetic = replace(NCCL, truncates="avx512f" not in Path("/proc/cpuinfo").read_text())  # docs/xccl.md
    sample = 25
    sizes = barrier_sizes = coalesced_sizes = (2, 4)
    switch_sizes = large_sizes = (2,)

    @classmethod
    def start(cls, size: int) -> ProcessJob:
        return XcclJob(size)

    def test_the_same_data_gives_the_same_bits_again(self, pool: Pools) -> None:
        # More than two ranks' arrays are added in the order in which they come (docs/xccl.md).
        super().test_the_same_data_gives_the_same_bits_again(lambda size: pool(2))

    def boundaries(self, op: str, itemsize: int, size: int) -> Sequence[int]:
        return [0, 1, 7, 1000]

    def check_cases(self, pool: Runner, cases: Sequence[Case], timeout: float = 120.0) -> None:
        # MIN and MAX of a NaN and a number depend on the order, which is not the same on all ranks (docs/xccl.md).
        cases = [replace(c, special=False) if c.reduce in ("MIN", "MAX") else c for c in cases]
        super().check_cases(pool, cases, timeout)


@pytest.mark.parametrize("size", [2, 4])
def test_the_program_of_all_backends(size: int) -> None:
    done = python("-m", "unicoll.run", "-n", str(size), "--no-prefix", "-m", one_program.__name__, "xccl")
    assert done.returncode == 0, done.stderr
    one_program.check(done.stdout, size)
