"""The NCCL backend passes the conformance suite on a simulated device, whose streams run late and in a bad order."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import pytest
from simulated_family import SimulatedFamily
from simulated_ranks import SimulatedJob

from nccl_comm.types import way
from unicoll.testing.conformance import Conformance, as_reduction
from unicoll.testing.ranks import Pool, pools
from unicoll.testing.reference import NCCL
from unicoll.types import BY_NAME


class _Simulated(Conformance):
    """Every rank has a device of its own."""

    families = ("simulated",)
    arithmetic = NCCL
    sample = 15
    whole = ("test_every_type_and_reduction", "test_layouts_groups_and_sizes", "test_every_layout")
    sizes = barrier_sizes = (1, 2, 4)  # how algorithms cope with odd numbers of ranks is NCCL's business
    layouts = (*SimulatedFamily.layouts, "scalar")
    version = 23007

    def reduces(self, dtype: str, reduction: str) -> bool:
        return way(BY_NAME[dtype], as_reduction(reduction, dtype), self.version) is not None

    def boundaries(self, op: str, itemsize: int, size: int) -> Sequence[int]:
        return [0, 1, 7, 1000]

    def large(self, itemsize: int) -> int:
        return 100_003

    test_torch_tensors = None  # type: ignore[assignment]  # CPU tensors are another backend's


class TestOldestFirst(_Simulated):
    """The caller's stream always runs ahead of the group's."""

    @pytest.fixture(scope="class")
    @classmethod
    def pool(cls) -> Iterator[Callable[[int], Pool]]:
        with pools(partial(SimulatedJob, policy="oldest", version=cls.version)) as made:
            yield made


class TestNewestFirst(_Simulated):
    """The group's stream always runs ahead of the caller's; and an NCCL that lacks what came after 2.18."""

    version = 21805
    turn = 1

    @pytest.fixture(scope="class")
    @classmethod
    def pool(cls) -> Iterator[Callable[[int], Pool]]:
        with pools(partial(SimulatedJob, policy="newest", version=cls.version)) as made:
            yield made


class TestAnyOrder(_Simulated):
    """The caller's stream is not the legacy one, and NCCL launches at once."""

    turn = 2

    @pytest.fixture(scope="class")
    @classmethod
    def pool(cls, seed: int) -> Iterator[Callable[[int], Pool]]:
        settings = {"policy": "random", "seed": seed, "prompt": True, "own_stream": True}
        with pools(partial(SimulatedJob, version=cls.version, **settings)) as made:
            yield made


class TestWithOptions(_Simulated):
    """Every call has options of its own, which all ranks have to give alike; with the newest NCCL."""

    version = 23203
    sample = 5
    turn = 3

    @pytest.fixture(scope="class")
    @classmethod
    def pool(cls) -> Iterator[Callable[[int], Pool]]:
        using = (("max_ctas", 4), ("algorithm", "ring"), ("force_algorithm", False))
        with pools(partial(SimulatedJob, version=cls.version, using=using)) as made:
            yield made
