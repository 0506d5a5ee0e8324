"""Messages and ported programs on one host and on two (:mod:`tests.support.hosts`) under one mpirun."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import partial

import pytest

from tests.conformance import group_jobs, matching_jobs, p2p_jobs
from tests.faults import fault_jobs
from tests.mpi import ported_programs
from tests.mpi.mpi_ranks import MpiJob, unavailable_reason
from tests.support.hosts import Hosts
from tests.support.ranks import Pool, pools

if unavailable_reason():
    pytest.skip(unavailable_reason(), allow_module_level=True)


@pytest.fixture(
    scope="module", params=itertools.product(["mpi", "gloo"], [1, 2]), ids="{0[0]}, hosts: {0[1]}".format
)
def pool(request: pytest.FixtureRequest, built_hosts: Hosts) -> Iterator[Callable[[int], Pool]]:
    backend, count = request.param
    where, prepare = built_hosts if count == 2 else None, (ported_programs.warm_up,)
    start = partial(MpiJob, backend=backend, hosts=where, warm_up=True, prepare=prepare)
    with pools(start) as made:
        assert len(set(made(4).run(fault_jobs.hostname))) == count
        yield made


@pytest.mark.parametrize(
    ("size", "job", "arguments"),
    [
        (2, p2p_jobs.farm, (2000,)),
        (4, p2p_jobs.farm, (2000,)),
        (4, p2p_jobs.from_any_source, (100, True)),
        (3, p2p_jobs.objects_in_threads, (3, 30, False)),
        (2, matching_jobs.statuses, (300_000,)),
        (4, group_jobs.splits, ()),
        (4, group_jobs.pickled_objects, ()),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_messages_objects_and_splits(
    size: int, job: Callable[..., object], arguments: tuple[object, ...], pool: Callable[[int], Pool]
) -> None:
    pool(size).run(job, *arguments)


def test_random_messages(pool: Callable[[int], Pool], seed: int) -> None:
    for i in range(20):
        pool(4).run(p2p_jobs.random_messages, f"{seed} {i}", 100)


@pytest.mark.parametrize("name", ported_programs.PROGRAMS)
@pytest.mark.parametrize("size", [2, 4])
def test_a_ported_program_has_the_results_of_its_original(
    size: int, name: str, pool: Callable[[int], Pool]
) -> None:
    pool(size).run(ported_programs.compare, name)
