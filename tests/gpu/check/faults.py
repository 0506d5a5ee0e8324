"""The stages on faults: no call hangs, errors name the rank that caused them, and the processes end."""

from __future__ import annotations

import platform
import re
import signal
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from tests.gpu.check import fault_jobs as jobs
from tests.gpu.check import rank_jobs
from tests.gpu.check.place import Place, called, joined, leave
from tests.gpu.check.record import Reporter
from unicoll.testing import worker
from unicoll.testing.ranks import ProcessJob

__all__ = ["deadline", "ending", "others"]

_TIMEOUT_S = 3.0
_UNDER_WAY_S = 0.2
_LONG_S = 6.0
_NEEDS_S = 2.0
_WRITTEN = 2000
Tell = Callable[[Any], None]
"""A function that reports a figure, before it is checked."""
Check = Callable[[Place, str, Tell], None]


def deadline(reporter: Reporter, place: Place) -> None:
    """A rank that is missing in an operation, and a smaller group afterwards."""
    _do(
        reporter, place, _a_missing_rank_is_named_at_the_deadline, _others_shrink_the_group_after_the_deadline
    )


def ending(reporter: Reporter, place: Place) -> None:
    """Programs that end without leaving the job, or leave it while operations run."""
    _do(
        reporter,
        place,
        _a_program_may_end_without_leaving,
        _a_program_may_end_with_a_live_graph,
        _who_ends_without_leaving_is_not_lost,
        _a_destroyed_group_waits_for_its_operations,
    )


def others(reporter: Reporter, place: Place) -> None:
    """Every other fault."""
    _do(reporter, place, *_OTHERS)


def _do(reporter: Reporter, place: Place, *checks: Check) -> None:
    """Each fault in a job of its own."""
    for check in checks:
        words = check.__name__.strip("_").replace("_", " ")
        reporter.check(words, check, place, place.kits[0], partial(_tell, reporter, words), needs=_NEEDS_S)


def _tell(reporter: Reporter, words: str, found: Any) -> None:
    reporter.figure(words, found)


def _warm(place: Place, job: ProcessJob, name: str) -> None:
    called(place, job, rank_jobs.warm_up, name)


def _value_of(job: ProcessJob, rank: int, due: float, place: Place) -> dict[str, Any]:
    """The end of a call that must end within some seconds."""
    outcome = job.collect(due + place.patience, ranks=[rank])[0]
    assert outcome.failure is None, outcome.failure
    value: dict[str, Any] = outcome.value
    return value


def _names(value: dict[str, Any], error: str, *words: str) -> None:
    assert value["error"] == error, f"{value['error']} where {error} was due: {value['message']}"
    for word in words:
        assert word in value["message"], f"{word!r} is not in: {value['message']}"


def _leaves(
    place: Place, job: ProcessJob, value: dict[str, Any], tell: Tell, ranks: Sequence[int] | None = None
) -> None:
    began = time.monotonic()
    leave(place, job, ranks)
    tell(value | {"seconds to leave": time.monotonic() - began})


def _a_missing_rank_is_named_at_the_deadline(place: Place, name: str, tell: Tell) -> None:
    timeout = _timeout(place)
    with joined(place, 2, [name]) as job:
        _warm(place, job, name)
        job.call(jobs.call_alone, name, timeout, ranks=[0])
        value = _value_of(job, 0, timeout, place)
        value["seconds after the deadline"] = value["seconds"] - timeout
        tell(value)
        _names(value, "OperationTimeoutError", "rank 1", "all_reduce")
        assert value["seconds"] >= timeout * 0.9, value
        job.call(jobs.call_alone, name, timeout, ranks=[1])
        after = _value_of(job, 1, timeout, place)
        assert after["error"] == "OperationTimeoutError", after
        _leaves(place, job, value, tell)


def _others_shrink_the_group_after_the_deadline(place: Place, name: str, tell: Tell) -> None:
    timeout = _timeout(place)
    with joined(place, 3, [name]) as job:
        _warm(place, job, name)
        job.call(jobs.call_alone, name, timeout, ranks=[0, 1])
        errors = {_value_of(job, rank, timeout, place)["error"] for rank in (0, 1)}
        assert errors == {"OperationTimeoutError"}, errors
        _shrunk(place, job, name, tell)


def _shrunk(place: Place, job: ProcessJob, name: str, tell: Tell) -> None:
    """Two of three ranks continue without the third."""
    began = time.monotonic()
    job.call(jobs.go_on_without, name, [2], ranks=[0, 1])
    sums = [_value_of(job, rank, 0.0, place)["sum"] for rank in (0, 1)]
    value: dict[str, Any] = {"sums": sums, "seconds": time.monotonic() - began}
    tell(value)
    assert sums == [3.0, 3.0], sums
    _leaves(place, job, value, tell, [0, 1])


def _a_killed_rank_is_named(place: Place, name: str, tell: Tell) -> None:
    with joined(place, 2, [name]) as job:
        _warm(place, job, name)
        job.call(jobs.call_alone, name, 60.0, ranks=[0])
        time.sleep(_UNDER_WAY_S)
        killed = job.signal(1, signal.SIGKILL)
        value = _value_of(job, 0, 0.0, place)
        value["seconds after death"] = job.outcomes[0].at - killed
        tell(value)
        _names(value, "RankLostError", "rank 1")
        _leaves(place, job, value, tell, [0])


def _an_abort_ends_what_is_in_flight(place: Place, name: str, tell: Tell) -> None:
    with joined(place, 2, [name]) as job:
        _warm(place, job, name)
        job.call(jobs.call_alone, name, 60.0, ranks=[0])
        time.sleep(_UNDER_WAY_S)
        job.call(jobs.abort, "enough", ranks=[1])
        value = _value_of(job, 0, 0.0, place)
        tell(value)
        _names(value, "GroupAbortedError", "enough")
        job.collect(place.patience)
        _leaves(place, job, value, tell)


def _survivors_shrink_the_group_and_go_on(place: Place, name: str, tell: Tell) -> None:
    with joined(place, 3, [name]) as job:
        _warm(place, job, name)
        job.call(jobs.call_alone, name, 60.0, ranks=[0, 1])
        time.sleep(_UNDER_WAY_S)
        job.signal(2, signal.SIGKILL)
        errors = {_value_of(job, rank, 0.0, place)["error"] for rank in (0, 1)}
        assert errors == {"RankLostError"}, errors
        _shrunk(place, job, name, tell)


def _a_group_is_shrunk_without_any_fault(place: Place, name: str, tell: Tell) -> None:
    with joined(place, 2, [name]) as job:
        _warm(place, job, name)
        began = time.monotonic()
        job.call(jobs.go_on_without, name, [1], ranks=[0])
        found = _value_of(job, 0, 0.0, place)
        tell(found | {"seconds": time.monotonic() - began})
        assert found["sum"] == 1.0
        _leaves(place, job, found, tell)


def _a_program_may_end_without_leaving(place: Place, name: str, tell: Tell) -> None:
    _ends_quietly(place, name, tell, jobs.leave_work_behind)


def _a_program_may_end_with_a_live_graph(place: Place, name: str, tell: Tell) -> None:
    _ends_quietly(place, name, tell, jobs.leave_a_graph_behind)


def _ends_quietly(place: Place, name: str, tell: Tell, before: Callable[[str], None]) -> None:
    with joined(place, 2, [name], fresh=True) as job:
        _warm(place, job, name)
        called(place, job, before, name)
        job.call(worker.end)
        began = time.monotonic()
        codes = job.wait_for_exit(place.patience)
        written = [job.stderr(rank) for rank in range(2)]
        tell(
            {
                "python": platform.python_version(),
                "seconds": time.monotonic() - began,
                "codes": codes,
                "standard error": [text[-_WRITTEN:] for text in written],
            }
        )
        assert codes == [0, 0], f"{codes}\n{job.report()}"
        bad = [
            line
            for text in written
            for line in text.splitlines()
            if re.search("Traceback|Error|Exception", line)
        ]
        assert not bad, f"on standard error at exit: {bad[-1]}\n{job.report()}"


def _who_ends_without_leaving_is_not_lost(place: Place, name: str, tell: Tell) -> None:
    timeout = _timeout(place)
    with joined(place, 2, [name], fresh=True) as job:
        _warm(place, job, name)
        job.call(worker.end, ranks=[1])
        assert job.wait_for_exit(place.patience, [1]) == [0], job.report()
        job.call(jobs.call_alone, name, timeout, ranks=[0])
        value = _value_of(job, 0, timeout, place)
        tell(value)
        # NCCL reports a closed socket at once; over shared memory the operation waits until its deadline
        error = value["error"] if value["error"] == "RankLostError" else "OperationTimeoutError"
        _names(value, error, "rank 1")
        _leaves(place, job, value, tell, [0])


def _a_destroyed_group_waits_for_its_operations(place: Place, name: str, tell: Tell) -> None:
    with joined(place, 2, [name]) as job:
        _warm(place, job, name)
        found = called(place, job, jobs.destroy_behind_a_kernel, name, _LONG_S)
        value = {"sums": [f["sum"] for f in found], "seconds": [f["seconds"] for f in found]}
        tell(value)
        assert value["sums"] == [3.0, 3.0], found
        _leaves(place, job, value, tell)


def _an_operation_behind_a_long_kernel_ends_at_its_deadline(place: Place, name: str, tell: Tell) -> None:
    timeout = _timeout(place)
    with joined(place, 2, [name]) as job:
        _warm(place, job, name)
        job.call(jobs.call_behind_a_kernel, name, timeout, 2 * _TIMEOUT_S)
        values = [_value_of(job, rank, timeout, place) for rank in (0, 1)]
        tell(values[0])
        for value in values if not place.simulated else ():  # its kernels are short
            _names(value, "OperationTimeoutError", "all_reduce")
        _leaves(place, job, values[0], tell)


def _two_ranks_on_one_device_are_refused(place: Place, name: str, tell: Tell) -> None:
    with joined(place, 2, [name], env={"UNICOLL_NCCL_SHARE_DEVICE": "0"}) as job:
        found = called(place, job, jobs.first_operation, name)
        tell(found[0])
        for value in found:
            _names(value, "DistArgumentError", "rank 0", "rank 1")
        _leaves(place, job, found[0], tell)


def _ranks_bound_to_their_device_connect_at_once_and_split(place: Place, name: str, tell: Tell) -> None:
    with joined(place, 2, [name], device=0) as job:
        found = called(place, job, jobs.bound, name)
        value = {"sums": [f["sum"] for f in found], "seconds": [f["seconds"] for f in found]}
        tell(value)
        assert value["sums"] == [3.0, 3.0], found
        _leaves(place, job, value, tell)


def _timeout(place: Place) -> float:
    return _TIMEOUT_S / 8 if place.simulated else _TIMEOUT_S


_OTHERS: list[Check] = [
    _a_killed_rank_is_named,
    _an_abort_ends_what_is_in_flight,
    _an_operation_behind_a_long_kernel_ends_at_its_deadline,
    _survivors_shrink_the_group_and_go_on,
    _a_group_is_shrunk_without_any_fault,
    _ranks_bound_to_their_device_connect_at_once_and_split,
    _two_ranks_on_one_device_are_refused,
]
