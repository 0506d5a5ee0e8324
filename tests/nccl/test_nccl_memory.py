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
    with pytest.raises(Exception, match=r"memory registration needs NCCL 2\.19; this is 2\.18\.5"):
        run(2, jobs.registered_with_an_old_nccl, version=21805)


def test_registrations_end_when_the_group_fails() -> None:
    for said, closed in run(2, jobs.registered_in_a_failed_group):
        assert said.startswith("GroupAbortedError")
        assert closed


def test_a_group_of_host_arrays_registers_nothing() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(
            dist.BackendUnavailableError, match="backend gloo does not support memory registration"
        ):
            dist.group.WORLD.register(np.ones(2))
    finally:
        dist.destroy_process_group()


# --- symmetric windows are the same on all ranks ------------------------------------------------------------------


def test_symmetric_memory_is_freed_when_all_ranks_have_dropped_it() -> None:
    """A window has the same offset on all ranks, else the job leaves a mismatch behind."""
    assert run(2, jobs.dropped_at_different_times) == [[2, 1, 1]] * 2


@pytest.mark.every(2)
@pytest.mark.parametrize("missing", [0, 1])
def test_a_rank_that_allocates_no_symmetric_memory_is_named_at_the_deadline(missing: int) -> None:
    found = run(2, jobs.alone_in_symmetric_memory, missing)
    said, after = found[1 - missing]
    assert said.startswith("OperationTimeoutError: registering memory (symmetric_empty) for group")
    assert f"missing: rank {missing} (" in said
    assert after.startswith("OperationTimeoutError")
    assert found[missing][1].startswith("OperationTimeoutError")


def test_a_registration_that_hangs_fails_the_group_at_its_deadline() -> None:
    for said in run(2, jobs.registration_that_hangs):
        assert said[0].startswith("OperationTimeoutError: ncclCommWindowRegister of 16 bytes on group")
        assert said[1].startswith("OperationTimeoutError")


def test_windows_that_differ_between_ranks_are_refused_on_all() -> None:
    for said in run(2, jobs.different_symmetric_memory):
        assert said[0].startswith("DistArgumentError: symmetric_empty: ")
        assert "rank 0" in said[0]
        assert "rank 1" in said[0]
        assert "at 4096" in said[1]
        assert "rank 1" in said[2]
        assert "512 bytes too far" in said[2]
        assert "register" in said[3]
        assert "symmetric_empty" in said[3]
        assert said[4].startswith(("CudaError: ", "DistBackendError: "))
        assert "rank 1" in said[4]
        assert said[5] == "True (1, 0)"


def test_memory_that_all_have_dropped_is_freed_for_an_allocation_that_needs_it() -> None:
    assert run(2, jobs.memory_for_a_second_attempt) == [1, 1]
