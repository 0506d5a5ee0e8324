"""Memory registered with a group of NCCL, and deregistered before it is freed."""

from __future__ import annotations

import numpy as np
import pytest

import unicoll as dist
from tests.nccl import nccl_jobs as jobs
from tests.simulated_nccl.ranks import run


@pytest.mark.parametrize("blocking", [True, False])
def test_memory_is_registered_until_closed(blocking: bool) -> None:
    for found in run(2, jobs.registered, blocking, policy="newest"):
        assert found == {
            "array": (8000, False, False, (0, 1)),
            "closed": (True, (0, 0), [3.0, 3.0]),
            "pool": (12000, False, (0, 2)),
            "window": (4096, True, (1, 0)),
            "twice": found["twice"],
            "left": (0, 1),
            "after": (True, (0, 0)),
        }
        assert "in a symmetric window of group" in found["twice"]


def test_invalid_memory_is_not_registered() -> None:
    for said in run(2, jobs.not_registered):
        expected = (
            "DistArgumentError: register: float64[4, 4] on cuda:0 is not contiguous",
            "is not on a GPU",
            "DistTypeError: register: CuPy's memory pools do not list",
            "the array or pool is empty",
            "is bound to cuda:",
            "not made by cuMemCreate",
            "DistTypeError: register: expected an array",
        )
        assert len(said) == len(expected)
        for one, words in zip(said, expected, strict=True):
            assert words.replace("cuda:0", "cuda:") in one.replace("cuda:0", "cuda:").replace(
                "cuda:1", "cuda:"
            )


def test_an_nccl_without_windows_registers_buffers() -> None:
    assert run(2, jobs.registered_with_an_old_nccl, version=22105) == [(False, (0, 1))] * 2
    with pytest.raises(Exception, match=r"NCCL 2\.18\.5 registers no memory, which came with 2\.19"):
        run(2, jobs.registered_with_an_old_nccl, version=21805)


def test_registrations_end_when_the_group_fails() -> None:
    for said, closed in run(2, jobs.registered_in_a_failed_group):
        assert said.startswith("GroupAbortedError")
        assert closed


def test_a_group_of_host_arrays_registers_nothing() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(dist.BackendUnavailableError, match="backend gloo registers no memory"):
            dist.group.WORLD.register(np.ones(2))
    finally:
        dist.destroy_process_group()
