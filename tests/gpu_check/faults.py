"""The stage on what goes wrong: nothing hangs, whoever is to blame is named, and the processes end."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from typing import Any

from unicoll.testing import worker
from unicoll.testing.ranks import Job

from . import fault_jobs as jobs
from . import rank_jobs
from .place import Place, joined, leave
from .record import Reporter

__all__ = ["all_kinds"]

_SOON_S = 15.0
"""How long after its cause an error may come: NCCL's own ends are bounded by 10 s."""
_TIMEOUT_S = 3.0


def all_kinds(reporter: Reporter, place: Place) -> None:
    """Every fault in a job of its own."""
    name = place.kits[0]
    for check in _CHECKS:
        words = check.__name__.strip("_").replace("_", " ")
        found = reporter.check(words, check, place, name, needs=3.0 if place.simulated else 14.0)
        if found is not None:
            reporter.figure(words, found)


def _warm(job: Job, name: str) -> None:
    job.call(rank_jobs.warm_up, name)
    job.results(90.0)


def _story(job: Job, rank: int, timeout: float = 60.0) -> dict[str, Any]:
    outcome = job.collect(timeout, ranks=[rank])[0]
    assert outcome.failure is None, outcome.failure
    story: dict[str, Any] = outcome.value
    return story


def _a_missing_rank_is_named_at_the_deadline(place: Place, name: str) -> dict[str, Any]:
    with joined(place, 2, [name], end=False) as job:
        _warm(job, name)
        job.call(jobs.call_alone, name, _TIMEOUT_S, ranks=[0])
        story = _story(job, 0)
        assert story["error"] == "OperationTimeoutError", story
        assert "rank 1" in story["message"], story
        assert "all_reduce" in story["message"], story
        assert _TIMEOUT_S * 0.9 <= story["seconds"] <= _TIMEOUT_S + _SOON_S, story
        job.call(jobs.call_alone, name, _TIMEOUT_S, ranks=[1])
        after = _story(job, 1)
        assert after["error"] == "OperationTimeoutError", after
        story["seconds to leave"] = _seconds(leave, place, job)
    return story


def _a_killed_rank_is_named(place: Place, name: str) -> dict[str, Any]:
    with joined(place, 2, [name], end=False) as job:
        _warm(job, name)
        job.call(jobs.call_alone, name, 60.0, ranks=[0])
        time.sleep(0.3)
        killed = job.signal(1, signal.SIGKILL)
        story = _story(job, 0)
        story["seconds after death"] = job.outcomes[0].at - killed
        assert story["error"] == "RankLostError", story
        assert "rank 1" in story["message"], story
        assert story["seconds after death"] < _SOON_S, story
        story["seconds to leave"] = _seconds(leave, place, job, [0])
    return story


def _an_abort_ends_what_is_in_flight(place: Place, name: str) -> dict[str, Any]:
    with joined(place, 2, [name], end=False) as job:
        _warm(job, name)
        job.call(jobs.call_alone, name, 60.0, ranks=[0])
        time.sleep(0.3)
        job.call(jobs.abort, "enough", ranks=[1])
        story = _story(job, 0)
        assert story["error"] == "GroupAbortedError", story
        assert "enough" in story["message"], story
        assert story["seconds"] < _SOON_S, story
        job.collect(30.0)
        story["seconds to leave"] = _seconds(leave, place, job)
    return story


def _survivors_shrink_the_group_and_go_on(place: Place, name: str) -> dict[str, Any]:
    with joined(place, 3, [name], end=False) as job:
        _warm(job, name)
        job.call(jobs.call_alone, name, 60.0, ranks=[0, 1])
        time.sleep(0.3)
        job.signal(2, signal.SIGKILL)
        errors = {_story(job, rank)["error"] for rank in (0, 1)}
        assert errors == {"RankLostError"}, errors
        began = time.monotonic()
        job.call(jobs.go_on_without, name, [2], ranks=[0, 1])
        sums = [_story(job, rank) for rank in (0, 1)]
        took = time.monotonic() - began
        assert [s["sum"] for s in sums] == [3.0, 3.0], sums
        return {"seconds": took, "seconds to leave": _seconds(leave, place, job, [0, 1])}


def _a_group_is_shrunk_without_any_fault(place: Place, name: str) -> dict[str, Any]:
    with joined(place, 2, [name], end=False) as job:
        _warm(job, name)
        began = time.monotonic()
        job.call(jobs.go_on_without, name, [1], ranks=[0])
        assert _story(job, 0)["sum"] == 1.0
        took = time.monotonic() - began
        return {"seconds": took, "seconds to leave": _seconds(leave, place, job)}


def _a_program_may_end_without_leaving(place: Place, name: str) -> dict[str, Any]:
    with joined(place, 2, [name], end=False) as job:
        _warm(job, name)
        job.call(jobs.leave_work_behind, name)
        job.results(60.0)
        job.call(worker.end)
        began = time.monotonic()
        codes = job.wait_for_exit(40.0)
        assert codes == [0, 0], f"{codes}\n{job.report()}"
        return {"seconds": time.monotonic() - began}


def _two_ranks_on_one_device_are_refused(place: Place, name: str) -> dict[str, Any]:
    with joined(place, 2, [name], end=False, env={"UNICOLL_NCCL_SHARE_DEVICE": "0"}) as job:
        job.call(jobs.first_operation, name)
        outcomes = job.collect(60.0)
        stories = [o.value for o in outcomes]
        for story in stories:
            assert story["error"] == "DistArgumentError", stories
            assert "rank 0" in story["message"], stories
            assert "rank 1" in story["message"], stories
        leave(place, job)
        return dict(stories[0])


def _ranks_bound_to_their_device_connect_at_once_and_split(place: Place, name: str) -> dict[str, Any]:
    with joined(place, 2, [name], device=0) as job:
        job.call(jobs.bound, name)
        found = job.results(60.0)
        assert [f["sum"] for f in found] == [3.0, 3.0], found
        return {"seconds": [f["seconds"] for f in found]}


def _seconds(function: Callable[..., None], *args: Any) -> float:
    began = time.monotonic()
    function(*args)
    return time.monotonic() - began


_CHECKS: list[Callable[[Place, str], dict[str, Any]]] = [
    _a_missing_rank_is_named_at_the_deadline,
    _a_killed_rank_is_named,
    _an_abort_ends_what_is_in_flight,
    _survivors_shrink_the_group_and_go_on,
    _a_program_may_end_without_leaving,
    _a_group_is_shrunk_without_any_fault,
    _ranks_bound_to_their_device_connect_at_once_and_split,
    _two_ranks_on_one_device_are_refused,
]
