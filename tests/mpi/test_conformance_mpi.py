"""The MPI backend passes the conformance suite, its ranks started by mpirun."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import pytest

from tests.mpi.mpi_ranks import MpiJob, library, unavailable_reason
from tests.support.ranks import Pool, pools
from tests.support.suite import Suite

if unavailable_reason():
    pytest.skip(unavailable_reason(), allow_module_level=True)

_EAGER = 64 << 10
"""Bytes at which both libraries switch from the eager to the rendezvous protocol."""


class TestMPI(Suite):
    backend = "mpi"
    sample = 25
    sizes = barrier_sizes = (1, 2, 3, 4)  # with more ranks these libraries are slow on two cores
    turn = library().turn

    @pytest.fixture(scope="class")
    @classmethod
    def pool(cls) -> Iterator[Callable[[int], Pool]]:
        with pools(partial(MpiJob, backend="mpi", warm_up=True)) as made:
            yield made

    def boundaries(self, op: str, itemsize: int, size: int) -> Sequence[int]:
        switch = _EAGER // itemsize
        return [0, 1, 7, 1000, switch - 1, switch, switch + 1]

    def large(self, itemsize: int) -> int:
        return ((5 << 20) // itemsize + 11) | 1


@pytest.mark.every(n=0)
class TestBetweenHosts(TestMPI):
    """The ranks use MPI's transport for other hosts."""

    sizes = barrier_sizes = (2, 4)

    @pytest.fixture(scope="class")
    @classmethod
    def pool(cls) -> Iterator[Callable[[int], Pool]]:
        env = library().between_hosts
        with pools(partial(MpiJob, backend="mpi", env=env, warm_up=True)) as made:
            yield made
