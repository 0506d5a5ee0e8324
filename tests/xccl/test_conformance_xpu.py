"""The backend xccl passes the conformance suite on a simulated XPU, whose streams run late, with a simulated oneCCL."""

from __future__ import annotations

from typing import Any

import pytest

from tests.conformance.test_conformance_nccl import _Simulated
from tests.simulated_nccl.oneccl import SimulatedOneCCL
from tests.support.ranks import sample_seed
from unicoll.arrays.types import BY_NAME
from unicoll.calls.reduce_ops import only_on_host
from unicoll.testing.reference import reduction_of


@pytest.mark.every(n=6)
class TestSimulatedXPU(_Simulated):
    sample = 10
    sizes = barrier_sizes = (2, 4)
    settings: dict[str, Any] = {
        "kind": "xpu",
        "backend": "cpu:gloo,xpu:xccl",
        "policy": "random",
        "seed": sample_seed(),
    }

    def reduces(self, dtype: str, reduction: str) -> bool:
        if only_on_host(BY_NAME[dtype], reduction_of(reduction, dtype)):
            return True  # by the CPU backend
        return SimulatedOneCCL.reduction(None, BY_NAME[dtype], reduction_of(reduction, dtype)) is not None  # type: ignore[arg-type]
