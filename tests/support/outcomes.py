"""The outcomes of calls that may fail: in a rank, exception and duration; of the ranks of a job, what they raised."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from tests.support.worker import Failure, leave

if TYPE_CHECKING:
    from tests.support.ranks import ProcessJob

CallOutcome = tuple[Failure | None, float]
"""The exception of a call, or None, and its duration in seconds."""


def outcome_of(call: Callable[[], Any]) -> CallOutcome:
    """Make a call and return its outcome."""
    start = time.monotonic()
    try:
        call()
    except Exception as error:
        return Failure.of(error), time.monotonic() - start
    return None, time.monotonic() - start


def failure_of(call: Callable[[], Any]) -> Failure | None:
    """Make a call; returns its exception, or None."""
    return outcome_of(call)[0]


def values_of(job: ProcessJob, ranks: Sequence[int], timeout: float = 30) -> list[Any]:
    """What a call has returned on some ranks, of which none failed."""
    outcomes = job.collect(timeout, ranks)
    assert not any(outcome.failure for outcome in outcomes), job.report()
    return [outcome.value for outcome in outcomes]


def failures_of(job: ProcessJob, ranks: Sequence[int], kind: str, *words: str) -> list[Failure]:
    """The exceptions of a call on some ranks; all are of a type, and their messages have some words."""
    failures = [outcome.failure for outcome in job.collect(60, ranks)]
    for failure in failures:
        assert failure is not None, job.report()
        assert failure.type == kind, failure.traceback
        assert all(word in failure.message for word in words), failure.message
    return [failure for failure in failures if failure is not None]


def leave_cleanly(job: ProcessJob, ranks: Sequence[int]) -> None:
    """The ranks that are left leave the job; nothing leaks."""
    job.call(leave, ranks=ranks)
    assert values_of(job, ranks) == [[]] * len(ranks)
