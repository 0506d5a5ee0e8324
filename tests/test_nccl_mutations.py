"""The simulated device is worth its keep: with one safeguard of the NCCL backend taken out, a program goes wrong.

Every program is first run with the backend as it is, under each policy; it must be right, and the simulation content.
Then, under the policy that brings it to light, with one safeguard taken out, several times: wrong every time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import mutation_jobs as jobs
import pytest
import test_nccl_safety
from simulated_ranks import SimulatedJob

from nccl_comm.watchdog import Watchdog
from unicoll.testing.ranks import Pool, pools
from unicoll.testing.reference import NCCL, STRICT
from unicoll.testing.worker import enter

_RANKS = 2
_AGAIN = 5
_RIGHT: dict[str, list[list[float]]] = {
    "reads_what_was_written": [[3.0, 3.0]] * 2,
    "result_is_read": [[6.0, 6.0]] * 2,
    "memory_is_reused": [[1.0, 2.0]] * 2,
    "unpacked_elsewhere": [[2.0, 2.0]] * 2,
    "neighbours_exchange": [[1.0, 1.0], [0.0, 0.0]],
    "everyone_exchanges": [[0.0, 1.0, 1.0]] * 2,
}
_POLICIES = ("oldest", "newest", "random")


@pytest.fixture(scope="module", params=_POLICIES)
def policed(request: pytest.FixtureRequest) -> Iterator[Callable[[int], Pool]]:
    with pools(partial(SimulatedJob, policy=request.param, seed=11)) as made:
        yield made


@pytest.mark.parametrize("program", _RIGHT)
def test_nothing_is_wrong_with_the_backend_as_it_is(program: str, policed: Callable[[int], Pool]) -> None:
    for _ in range(_AGAIN):
        assert policed(_RANKS).run(jobs.run, program, None) == [(right, []) for right in _RIGHT[program]]


@pytest.mark.parametrize(
    ("mutation", "program", "policy", "fault"),
    [
        ("producers", "reads_what_was_written", "newest", "race"),
        ("end", "result_is_read", "oldest", "race"),
        ("hold", "memory_is_reused", "oldest", "freed too early"),
        ("release", "memory_is_reused", "oldest", "freed too early"),
        ("keep", "unpacked_elsewhere", "oldest", "freed too early"),
        ("staged keep", "unpacked_elsewhere", "oldest", "freed too early"),
    ],
)
def test_without_a_safeguard_results_are_wrong_every_time(
    mutation: str, program: str, policy: str, fault: str
) -> None:
    def is_wrong(got: list[float], rank: int) -> bool:
        if mutation == "end":
            return got == [2.0 * (rank + 1)] * 2  # twice the rank's own
        if program in ("memory_is_reused", "unpacked_elsewhere"):
            return got == [99.0, 99.0]
        return got != _RIGHT[program][rank]

    backend = "cpu:gloo,cuda:gloo" if mutation.startswith("staged") else "cpu:gloo,cuda:nccl"
    with SimulatedJob(_RANKS, policy=policy, backend=backend) as job:
        job.call(enter)
        job.results()
        job.call(jobs.run, program, None)
        assert job.results() == [(right, []) for right in _RIGHT[program]]
        for _ in range(_AGAIN):
            job.call(jobs.run, program, mutation)
            for rank, (got, faults) in enumerate(job.results()):
                assert is_wrong(got, rank), (rank, got)
                assert any(fault in text for text in faults), faults


@pytest.mark.parametrize(
    ("mutation", "job", "args", "wrong", "settings"),
    [
        ("turn", "two_threads_with_a_group_each", (), 2, {}),
        ("idle", "split_under_way", (), [1, 1], {"backend": "nccl", "bound": True}),
        ("revoke", "a_thread_in_nccl", (False,), ["in", "abort", "out", "OperationTimeoutError"], {}),
        ("late", "late_but_landed", (), True, {}),
        ("unused", "symmetric_memory_dropped", ("operation",), [("unicoll-nccl-end", 1)], {}),
        ("unused", "symmetric_memory_dropped", ("kernel",), [("unicoll-nccl-end", 1)], {}),
    ],
)
def test_without_a_safeguard_nccl_is_used_as_it_must_not_be(
    mutation: str, job: str, args: tuple[Any, ...], wrong: Any, settings: dict[str, Any]
) -> None:
    size = 1 if mutation in ("turn", "late") else _RANKS
    with SimulatedJob(size, policy="newest", **settings) as ranks:
        ranks.call(enter)
        ranks.results()
        ranks.call(jobs.safety, mutation, job, *args)
        assert ranks.results() == [wrong] * size


@pytest.mark.parametrize("handle", [1, 2])
def test_without_their_device_default_streams_are_another_devices(handle: int) -> None:
    with SimulatedJob(_RANKS) as ranks:
        ranks.call(enter)
        ranks.results()
        ranks.call(jobs.safety, "default streams", "on_a_default_stream", handle)
        assert all(o.failure is not None and o.failure.type == "CudaError" for o in ranks.collect()), ranks.report()


def test_without_a_wait_for_the_news_of_a_death_nobody_is_named() -> None:
    with SimulatedJob(3) as ranks:
        ranks.call(enter)
        ranks.results()
        ranks.call(jobs.safety, "news", "an_error_before_the_news", 2)
        (outcome,) = ranks.collect(60, [0])
        assert "ncclRemoteError" in outcome.value
        assert "rank 2" not in outcome.value


def test_a_group_that_closes_at_once_is_still_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Watchdog, "unwatch", lambda self, group: self._watched.remove(group))
    with pytest.raises(AssertionError):
        test_nccl_safety.test_a_group_that_closes_waits_for_a_look_at_it_to_end(monkeypatch)


@pytest.mark.parametrize(
    ("program", "error"),
    [
        ("neighbours_exchange", "OperationTimeoutError"),  # all ranks send, and their receives are behind that
        ("everyone_exchanges", "DistBackendError"),  # nobody can send to itself alone
    ],
)
def test_without_the_group_call_exchanges_hang_or_are_refused(program: str, error: str) -> None:
    with SimulatedJob(_RANKS) as job:
        job.call(enter, 2.0)
        job.results()
        job.call(jobs.run, program, "group")
        kinds = [o.failure.type if o.failure is not None else None for o in job.collect()]
        assert kinds == [error] * _RANKS, job.report()


_SOUND = [True] * len(jobs.CASES)


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
def test_the_suite_finds_errors_of_the_arithmetic(error: str | None, right: list[bool]) -> None:
    with SimulatedJob(3) as job:
        job.call(enter)
        job.results()
        job.call(jobs.judged, error, NCCL)
        found = job.results()
    together = [all(each) for each in zip(*found, strict=True)]  # a reduce has one result
    assert together == right


def test_the_strict_arithmetic_is_not_nccls() -> None:
    """Without what its documentation leaves open, NCCL would fail: half types at every hop, and NaN in MIN."""
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
        job.call(jobs.enqueue_everything)
        assert job.results() == [[], []]
