"""Puts and signals: writes to another rank's memory, refused calls, and a signal that does not arrive."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import unicoll as dist
from tests.nccl import nccl_jobs as jobs
from tests.simulated_nccl.ranks import run


@pytest.mark.parametrize("policy", ["oldest", "newest"])
@pytest.mark.parametrize("blocking", [True, False])
def test_two_ranks_write_to_each_others_memory(blocking: bool, policy: str) -> None:
    first, second = run(2, jobs.ping_pong, 5, blocking, policy=policy)
    assert first == [[0.0, 0.0, 0.0, 9.0, 9.0, 0.0, 0.0, 0.0], [10.0, 10.0]]
    assert second == [[0.0, 0.0, 0.0, 8.0, 8.0, 0.0, 0.0, 0.0], [9.0, 9.0]]


def test_invalid_puts_are_refused_and_a_missing_signal_has_a_deadline() -> None:
    for said in run(2, jobs.not_put):
        assert "put: no ranks of a group of 2: [2]" in said[0]
        assert "is no symmetric window of this group" in said[1]
        assert "is in no symmetric window of this group" in said[2]
        assert "at offset 1 goes beyond the window of 32 bytes" in said[3]
        assert "put: float64[2]" in said[4]
        assert "signals at offset 0: too few" in said[5]
        assert "is not on a GPU" in said[6]
        assert said[7].startswith("OperationTimeoutError")
        assert "wait_signal" in said[7]


@pytest.mark.parametrize("version", [23007, 23203])
def test_ranks_without_one_sided_calls_hold_nobody_up(version: int) -> None:
    """NCCL 2.29 and 2.30 wait for all ranks within the first one-sided call of each."""
    assert run(3, jobs.put_among_three, version=version) == [[7.0] * 4, [7.0] * 4, [2.0] * 4]


@pytest.mark.parametrize("version", [23007, 23203])
def test_signals_need_a_window_on_all_ranks_before(version: int) -> None:
    for said in run(2, jobs.signal_without_a_window, version=version):
        assert said.startswith("DistArgumentError: signal: group")
        assert "symmetric_empty" in said


def test_an_old_nccl_is_refused_with_the_needed_version() -> None:
    for said in run(2, jobs.put_with_an_old_nccl, version=22809):
        expected = "BackendUnavailableError: signal: one-sided operations need NCCL 2.29; this is 2.28.9"
        assert said == expected


def test_a_group_of_host_arrays_has_no_one_sided_operations() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        group: Any = dist.group.WORLD
        for call in (
            lambda: group.put(np.ones(2), 0, None),
            lambda: group.signal(0, np.ones(2)),
            lambda: group.wait_signal(0, np.ones(2)),
        ):
            with pytest.raises(
                dist.BackendUnavailableError, match="backend gloo does not support one-sided operations"
            ):
                call()
    finally:
        dist.destroy_process_group()
