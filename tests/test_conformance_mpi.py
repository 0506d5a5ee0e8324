"""The MPI backend passes the conformance suite, its ranks started by mpirun."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import pytest
from conformance import COLLECTIVES, DATA, Conformance, as_reduction
from mpi_ranks import MpiJob, library, why_not
from ranks import Pool, pools

from unicoll import registry
from unicoll.types import BY_NAME

if why_not():
    pytest.skip(why_not(), allow_module_level=True)

SIZES = (1, 2, 3, 4)
_EAGER = 64 << 10
"""Bytes about which both libraries go from sending at once to asking first."""


class TestMPI(Conformance):
    sample = 25
    turn = ("openmpi", "mpich").index(library().name)

    @pytest.fixture(scope="class")
    @classmethod
    def pool(cls) -> Iterator[Callable[[int], Pool]]:
        with pools(partial(MpiJob, backend="mpi", rehearse=True)) as made:
            yield made

    def reduces(self, dtype: str, reduction: str) -> bool:
        return registry.load("mpi").caps.reduces(BY_NAME[dtype], as_reduction(reduction, dtype))

    def boundaries(self, op: str, itemsize: int, size: int) -> Sequence[int]:
        switch = _EAGER // itemsize
        return [0, 1, 7, 1000, switch - 1, switch, switch + 1]

    def large(self, itemsize: int) -> int:
        return ((5 << 20) // itemsize + 11) | 1

    # The suite's sizes go up to more ranks than these libraries take well on two cores.

    @pytest.mark.sampled("op", "size", 1)
    @pytest.mark.parametrize("size", SIZES)
    @pytest.mark.parametrize("op", COLLECTIVES)
    def test_every_type_and_reduction(
        self, op: str, size: int, pool: Callable[[int], Pool], seed: int
    ) -> None:
        super().test_every_type_and_reduction(op, size, pool, seed)

    @pytest.mark.sampled("op", "size", 1)
    @pytest.mark.parametrize("size", SIZES)
    @pytest.mark.parametrize("op", DATA)
    def test_layouts_groups_and_sizes(
        self, op: str, size: int, pool: Callable[[int], Pool], seed: int
    ) -> None:
        super().test_layouts_groups_and_sizes(op, size, pool, seed)

    @pytest.mark.parametrize("size", SIZES)
    def test_nobody_leaves_a_barrier_before_all_have_come(
        self, size: int, pool: Callable[[int], Pool]
    ) -> None:
        super().test_nobody_leaves_a_barrier_before_all_have_come(size, pool)
