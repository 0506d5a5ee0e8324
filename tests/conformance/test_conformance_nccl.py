"""The NCCL backend passes the conformance suite on a simulated device, whose streams run late and in a bad order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from nccl_comm.backend import NCCLBackend
from nccl_comm.library.nccl import nccl_reduction
from tests.simulated_nccl.family import SimulatedFamily
from tests.simulated_nccl.ranks import SimulatedJob
from tests.support.ranks import ProcessJob, sample_seed
from tests.support.suite import Suite
from unicoll.arrays.types import BY_NAME
from unicoll.calls.ops import OPS
from unicoll.calls.reduce_ops import only_on_host
from unicoll.testing.reference import NCCL, reduction_of


class _Simulated(Suite):
    """Every rank has a device of its own."""

    families = ("simulated",)
    arithmetic = NCCL
    sample = 15
    whole = ("test_every_type_and_reduction", "test_layouts_groups_and_sizes", "test_every_layout")
    sizes = barrier_sizes = (1, 2, 4)  # how algorithms cope with odd numbers of ranks is NCCL's business
    layouts = (*SimulatedFamily.layouts, "scalar")
    version = 23007
    settings: dict[str, Any] = {}

    @classmethod
    def start(cls, size: int) -> ProcessJob:
        return SimulatedJob(size, version=cls.version, **cls.settings)

    def reduces(self, dtype: str, reduction: str) -> bool:
        if only_on_host(BY_NAME[dtype], reduction_of(reduction, dtype)):
            return True  # by the CPU backend
        return nccl_reduction(BY_NAME[dtype], reduction_of(reduction, dtype), self.version) is not None

    @classmethod
    def axes(cls, test: str) -> dict[str, Sequence[Any]]:
        found = super().axes(test)
        if test == "test_refuses_what_it_does_not_reduce":  # the CPU backend, which does the others, has more
            found["op"] = [op for op in found["op"] if op in NCCLBackend.caps.native]
        return found

    def pairs(self, op: str) -> list[tuple[str, str | None]]:
        found = super().pairs(op)
        # what NCCL lacks goes through host memory to the CPU backend, which does not reduce float8
        if OPS[op].reduces and op not in NCCLBackend.caps.native:
            found = [(d, r) for d, r in found if not d.startswith("float8")]
        return found

    def boundaries(self, op: str, itemsize: int, size: int) -> Sequence[int]:
        return [0, 1, 7, 1000]

    def large(self, itemsize: int) -> int:
        return 100_003

    test_torch_tensors = None  # type: ignore[assignment]  # CPU tensors are another backend's


@pytest.mark.every(n=12)
class TestOldestFirst(_Simulated):
    """The caller's stream always runs ahead of the group's."""

    settings = {"policy": "oldest"}


@pytest.mark.every(n=12)
class TestNewestFirst(_Simulated):
    """The group's stream always runs ahead of the caller's; and an NCCL that lacks what came after 2.18."""

    version = 21805
    turn = 1
    settings = {"policy": "newest"}


@pytest.mark.every(n=12)
class TestAnyOrder(_Simulated):
    """The caller's stream is not the legacy one, and NCCL launches at once."""

    turn = 2
    settings = {"policy": "random", "seed": sample_seed(), "prompt": True, "own_stream": True}


@pytest.mark.every(n=12)
class TestWithOptions(_Simulated):
    """Every call has options of its own, which all ranks have to give alike; with the newest NCCL."""

    version = 23203
    sample = 5
    turn = 3
    settings = {"using": (("max_ctas", 4), ("algorithm", "ring"), ("force_algorithm", False))}


@pytest.mark.every(n=12)
class TestOnAMD(_Simulated):
    """RCCL, which does not reduce float8, with HIP's devices."""

    version = 22703
    sample = 5
    turn = 4
    settings = {"kind": "hip", "policy": "random", "seed": sample_seed()}

    def reduces(self, dtype: str, reduction: str) -> bool:
        return not dtype.startswith("float8") and super().reduces(dtype, reduction)
