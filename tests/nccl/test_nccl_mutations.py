"""Mutation tests: with one safeguard of the NCCL backend removed, a program on the simulated device gives wrong
results.

Every program first runs with the unmodified backend, under each policy; its results must be right, without faults. Then
it runs several times with one safeguard removed, under the policy that shows it; it must be wrong every time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest

from nccl_comm.watchdog import Watchdog
from tests.nccl import mutation_jobs as jobs
from tests.nccl import test_nccl_safety
from tests.simulated_nccl.ranks import SimulatedJob
from tests.support.ranks import Pool, pools
from tests.support.worker import enter
from unicoll.testing.reference import NCCL, STRICT

_RANKS = 2
_REPEATS = 5
_RIGHT: dict[str, list[list[float]]] = {
    "reads_what_was_written": [[3.0, 3.0]] * 2,
    "result_is_read": [[6.0, 6.0]] * 2,
    "memory_is_reused": [[1.0, 2.0]] * 2,
    "unpacked_on_another_stream": [[2.0, 2.0]] * 2,
    "exchange_with_neighbours": [[1.0, 1.0], [0.0, 0.0]],
    "exchange_with_all": [[0.0, 1.0, 1.0]] * 2,
}
_POLICIES = ("oldest", "newest", "random")


@pytest.fixture(scope="module", params=_POLICIES)
def with_policy(request: pytest.FixtureRequest) -> Iterator[Callable[[int], Pool]]:
    with pools(partial(SimulatedJob, policy=request.param, seed=11)) as made:
        yield made


@pytest.mark.every(2)
@pytest.mark.parametrize("program", _RIGHT)
def test_the_unmodified_backend_is_right(program: str, with_policy: Callable[[int], Pool]) -> None:
    for _ in range(_REPEATS):
        assert with_policy(_RANKS).run(jobs.run, program, None) == [(right, []) for right in _RIGHT[program]]


@pytest.mark.every(2)
@pytest.mark.parametrize(
    ("mutation", "program", "policy", "fault"),
    [
        ("producers", "reads_what_was_written", "newest", "race"),
        ("end", "result_is_read", "oldest", "race"),
        ("hold", "memory_is_reused", "oldest", "freed too early"),
        ("release", "memory_is_reused", "oldest", "freed too early"),
        ("retain", "unpacked_on_another_stream", "oldest", "freed too early"),
        ("staged retain", "unpacked_on_another_stream", "oldest", "freed too early"),
    ],
)
def test_without_a_safeguard_results_are_wrong_every_time(
    mutation: str, program: str, policy: str, fault: str
) -> None:
    def is_wrong(got: list[float], rank: int) -> bool:
        if mutation == "end":
            return got == [2.0 * (rank + 1)] * 2  # twice the rank's own
        if program in ("memory_is_reused", "unpacked_on_another_stream"):
            return got == [99.0, 99.0]
        return got != _RIGHT[program][rank]

    backend = "cpu:gloo,cuda:gloo" if mutation.startswith("staged") else "cpu:gloo,cuda:nccl"
    with SimulatedJob(_RANKS, policy=policy, backend=backend) as job:
        job.call(enter)
        job.results()
        job.call(jobs.run, program, None)
        assert job.results() == [(right, []) for right in _RIGHT[program]]
        for _ in range(_REPEATS):
            job.call(jobs.run, program, mutation)
            for rank, (got, faults) in enumerate(job.results()):
                assert is_wrong(got, rank), (rank, got)
                assert any(fault in text for text in faults), faults


@pytest.mark.every(2)
@pytest.mark.parametrize(
    ("mutation", "job", "args", "wrong", "settings"),
    [
        ("device lock", "two_threads_with_a_group_each", (), 2, {}),
        ("idle", "split_with_work_in_flight", (), [1, 1], {"backend": "nccl", "bound": True}),
        ("revoke", "a_thread_in_nccl", (False,), ["in", "abort", "out", "OperationTimeoutError"], {}),
        ("overdue", "late_but_ended", (), True, {}),
        ("unused", "symmetric_memory_dropped", ("operation",), [("MainThread", 1)], {}),
        ("unused", "symmetric_memory_dropped", ("kernel",), [("MainThread", 1)], {}),
    ],
)
def test_without_a_safeguard_rules_of_nccl_are_broken(
    mutation: str, job: str, args: tuple[Any, ...], wrong: Any, settings: dict[str, Any]
) -> None:
    size = 1 if mutation in ("device lock", "overdue") else _RANKS
    with SimulatedJob(size, policy="newest", **settings) as ranks:
        ranks.call(enter)
        ranks.results()
        ranks.call(jobs.safety, mutation, job, *args)
        assert ranks.results() == [wrong] * size


@pytest.mark.parametrize("handle", [1, 2])
def test_without_a_device_context_default_streams_belong_to_another_device(handle: int) -> None:
    with SimulatedJob(_RANKS) as ranks:
        ranks.call(enter)
        ranks.results()
        ranks.call(jobs.safety, "default streams", "on_a_default_stream", handle)
        assert all(o.failure is not None and o.failure.type == "CudaError" for o in ranks.collect()), (
            ranks.report()
        )


def test_without_a_wait_for_the_death_notice_no_rank_is_named() -> None:
    with SimulatedJob(3) as ranks:
        ranks.call(enter)
        ranks.results()
        ranks.call(jobs.safety, "death notice", "an_error_before_the_death_notice", 2)
        (outcome,) = ranks.collect(60, [0])
        assert "ncclRemoteError" in outcome.value
        assert "rank 2" not in outcome.value


def test_without_a_wait_a_group_that_closes_is_still_swept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Watchdog, "unwatch", lambda self, group: self._watched.remove(group))
    with pytest.raises(AssertionError):
        test_nccl_safety.test_a_group_that_closes_waits_for_a_sweep_of_it(monkeypatch)


@pytest.mark.every(2)
@pytest.mark.parametrize("program", ["exchange_with_neighbours", "exchange_with_all"])
def test_without_a_group_call_exchanges_hang(program: str) -> None:
    """All ranks send, and the first send to a peer waits for its receive."""
    with SimulatedJob(_RANKS) as job:
        job.call(enter, 2.0)
        job.results()
        job.call(jobs.run, program, "group")
        kinds = [o.failure.type if o.failure is not None else None for o in job.collect()]
        assert kinds == ["OperationTimeoutError"] * _RANKS, job.report()


_SOUND = [True] * len(jobs.CASES)


@pytest.mark.every(2)
@pytest.mark.parametrize(
    ("error", "right"),
    [
        (None, _SOUND),
        ("element", [False] * len(_SOUND)),
        ("contribution", [False] * len(_SOUND)),
        ("division", [True, False, True, True, True, False]),
        ("precision", [False, True, False, True, False, True]),
    ],
)
def test_the_suite_finds_wrong_arithmetic(error: str | None, right: list[bool]) -> None:
    with SimulatedJob(3) as job:
        job.call(enter)
        job.results()
        job.call(jobs.judged, error, NCCL)
        found = job.results()
    together = [all(each) for each in zip(*found, strict=True)]  # a reduce has one result
    assert together == right


def test_nccl_fails_the_strict_arithmetic() -> None:
    """NCCL's arithmetic differs from the strict one: half types are rounded at every hop, and MIN drops NaN."""
    with SimulatedJob(3) as job:
        job.call(enter)
        job.results()
        job.call(jobs.judged, None, STRICT)
        together = [all(each) for each in zip(*job.results(), strict=True)]
    assert together == [True, False, True, False, False, True]


def test_no_call_blocks_the_host() -> None:
    with SimulatedJob(_RANKS) as job:
        job.call(enter)
        job.results()
        job.call(jobs.enqueue_all_operations)
        assert job.results() == [[], []]
