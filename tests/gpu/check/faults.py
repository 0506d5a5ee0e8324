"""The stages on faults: no call hangs, errors name the rank that caused them, and the processes end."""

from __future__ import annotations

import platform
import re
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from tests.gpu.check import fault_jobs as jobs
from tests.gpu.check import rank_jobs
from tests.gpu.check.place import Place, called, joined, leave
from tests.gpu.check.record import Reporter
from tests.support import worker
from tests.support.ranks import ProcessJob
from unicoll.device_collectives.communicators.teardown import END_S

_TIMEOUT_S = 3.0
_UNDER_WAY_S = 0.2
_LONG_S = 6.0
_NEEDS_S = 2.0
_WRITTEN = 2000


def deadline(reporter: Reporter, place: Place) -> None:
    """A rank that is missing in an operation, and a smaller group afterwards."""
    check = partial(_check, reporter, place)
    check(_a_missing_rank_is_named_at_the_deadline)
    check(_others_shrink_the_group_after_the_deadline, 3)


def ending(reporter: Reporter, place: Place) -> None:
    """Programs that end without leaving the job, or leave it while operations run."""
    check = partial(_check, reporter, place)
    check(_a_program_may_end_without_leaving)
    check(_a_program_may_end_with_a_live_graph)
    check(_who_ends_without_leaving_is_not_lost)
    check(_a_destroyed_group_waits_for_its_operations)


def others(reporter: Reporter, place: Place) -> None:
    """Every other fault."""
    check = partial(_check, reporter, place)
    check(_a_killed_rank_is_named)
    check(_an_abort_ends_what_is_in_flight)
    check(_an_operation_behind_a_long_kernel_ends_at_its_deadline)
    check(_survivors_shrink_the_group_and_go_on, 3)
    check(_a_group_is_shrunk_without_any_fault)
    check(_ranks_bound_to_their_device_connect_at_once_and_split, connected=False, device=0)
    check(_two_ranks_on_one_device_are_refused, connected=False, env={"UNICOLL_NCCL_SHARE_DEVICE": "0"})


@dataclass
class _Fault:
    """A fault in a job of its own.

    Attributes:
        place, job: the ranks.
        name: of the array library.
        tell: reports the check's figure, before it is checked.
        timeout: seconds of operations that are to reach their deadline.
    """

    place: Place
    job: ProcessJob
    name: str
    tell: Callable[[Any], None]
    timeout: float

    def all(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """The results of a function on all ranks."""
        return called(self.place, self.job, function, self.name, *args)

    def begin(self, *ranks: int, function: Callable[..., Any] = jobs.call_alone, args: Any = (60.0,)) -> None:
        """Call a function on some ranks, by default an operation in which not all take part, and leave it going."""
        self.job.call(function, self.name, *args, ranks=ranks)

    def end(self, rank: int, due: float = 0.0) -> dict[str, Any]:
        """The end of a call that must end within some seconds."""
        outcome = self.job.collect(due + self.place.patience, ranks=[rank])[0]
        assert outcome.failure is None, outcome.failure
        value: dict[str, Any] = outcome.value
        return value

    def leave(self, value: dict[str, Any], ranks: Sequence[int] | None = None) -> None:
        """Leave the job on all ranks or some; reports the figure again, with the time that this takes."""
        began = time.monotonic()
        leave(self.place, self.job, ranks)
        self.tell(value | {"seconds to leave": time.monotonic() - began})

    def go_on_without(self, lost: int, *ranks: int) -> dict[str, Any]:
        """A smaller group of the other ranks works; the figure."""
        began = time.monotonic()
        self.begin(*ranks, function=jobs.go_on_without, args=([lost],))
        sums = [self.end(rank)["sum"] for rank in ranks]
        value = {"sums": sums, "seconds": time.monotonic() - began}
        self.tell(value)
        assert sums == [float(sum(rank + 1 for rank in ranks))] * len(ranks), sums
        return value


def _check(
    reporter: Reporter,
    place: Place,
    function: Callable[[_Fault], None],
    size: int = 2,
    connected: bool = True,
    **options: Any,
) -> None:
    words = function.__name__.strip("_").replace("_", " ")
    name = place.kits[0]

    def run() -> None:
        timeout = _TIMEOUT_S / 8 if place.simulated else _TIMEOUT_S
        with joined(place, size, [name], **options) as job:
            fault = _Fault(place, job, name, partial(reporter.figure, words), timeout)
            if connected:
                fault.all(rank_jobs.warm_up)
            function(fault)

    reporter.check(words, run, needs=_NEEDS_S)


def _names(value: dict[str, Any], error: str, *words: str) -> None:
    assert value["error"] == error, f"{value['error']} where {error} was due: {value['message']}"
    for word in words:
        assert word in value["message"], f"{word!r} is not in: {value['message']}"


def _a_missing_rank_is_named_at_the_deadline(fault: _Fault) -> None:
    timeout = fault.timeout
    fault.begin(0, args=(timeout,))
    value = fault.end(0, timeout)
    value["seconds after the deadline"] = value["seconds"] - timeout
    fault.tell(value)
    _names(value, "OperationTimeoutError", "rank 1", "all_reduce")
    assert value["seconds"] >= timeout * 0.9, value
    fault.begin(1, args=(timeout,))
    after = fault.end(1, timeout)
    assert after["error"] == "OperationTimeoutError", after
    fault.leave(value)


def _others_shrink_the_group_after_the_deadline(fault: _Fault) -> None:
    fault.begin(0, 1, args=(fault.timeout,))
    errors = {fault.end(rank, fault.timeout)["error"] for rank in (0, 1)}
    assert errors == {"OperationTimeoutError"}, errors
    fault.leave(fault.go_on_without(2, 0, 1), [0, 1])


def _a_killed_rank_is_named(fault: _Fault) -> None:
    fault.begin(0)
    time.sleep(_UNDER_WAY_S)
    killed = fault.job.signal(1, signal.SIGKILL)
    value = fault.end(0)
    value["seconds after death"] = fault.job.outcomes[0].at - killed
    fault.tell(value)
    _names(value, "RankLostError", "rank 1")
    fault.leave(value, [0])


def _an_abort_ends_what_is_in_flight(fault: _Fault) -> None:
    fault.begin(0)
    time.sleep(_UNDER_WAY_S)
    fault.job.call(jobs.abort, "enough", ranks=[1])
    value = fault.end(0)
    fault.tell(value)
    _names(value, "GroupAbortedError", "enough")
    fault.job.collect(fault.place.patience)
    fault.leave(value)


def _survivors_shrink_the_group_and_go_on(fault: _Fault) -> None:
    fault.begin(0, 1)
    time.sleep(_UNDER_WAY_S)
    fault.job.signal(2, signal.SIGKILL)
    errors = {fault.end(rank)["error"] for rank in (0, 1)}
    assert errors == {"RankLostError"}, errors
    fault.leave(fault.go_on_without(2, 0, 1), [0, 1])


def _a_group_is_shrunk_without_any_fault(fault: _Fault) -> None:
    fault.leave(fault.go_on_without(1, 0))


def _a_program_may_end_without_leaving(fault: _Fault) -> None:
    _ends_quietly(fault, jobs.leave_work_behind)


def _a_program_may_end_with_a_live_graph(fault: _Fault) -> None:
    _ends_quietly(fault, jobs.leave_a_graph_behind)


def _ends_quietly(fault: _Fault, before: Callable[[str], None]) -> None:
    fault.all(before)
    job = fault.job
    job.call(worker.end)
    began = time.monotonic()
    codes = job.wait_for_exit(fault.place.patience)
    written = [job.stderr(rank) for rank in range(2)]
    fault.tell(
        {
            "python": platform.python_version(),
            "seconds": time.monotonic() - began,
            "codes": codes,
            "standard error": [text[-_WRITTEN:] for text in written],
        }
    )
    assert codes == [0, 0], f"{codes}\n{job.report()}"
    bad = re.findall("^.*(?:Traceback|Error|Exception).*$", "\n".join(written), re.MULTILINE)
    assert not bad, f"on standard error at exit: {bad[-1]}\n{job.report()}"


def _who_ends_without_leaving_is_not_lost(fault: _Fault) -> None:
    fault.job.call(worker.end, ranks=[1])
    # ranks that NCCL takes to be on one host wait for each other at their ends
    assert fault.job.wait_for_exit(fault.place.patience + END_S, [1]) == [0], fault.job.report()
    fault.begin(0, args=(fault.timeout,))
    value = fault.end(0, fault.timeout)
    fault.tell(value)
    # NCCL reports a closed socket at once; over shared memory the operation waits until its deadline
    error = value["error"] if value["error"] == "RankLostError" else "OperationTimeoutError"
    _names(value, error, "rank 1")
    fault.leave(value, [0])


def _a_destroyed_group_waits_for_its_operations(fault: _Fault) -> None:
    _sums_to_three(fault, fault.all(jobs.destroy_behind_a_kernel, _LONG_S))


def _ranks_bound_to_their_device_connect_at_once_and_split(fault: _Fault) -> None:
    _sums_to_three(fault, fault.all(jobs.bound))


def _sums_to_three(fault: _Fault, found: list[dict[str, Any]]) -> None:
    value = {"sums": [f["sum"] for f in found], "seconds": [f["seconds"] for f in found]}
    fault.tell(value)
    assert value["sums"] == [3.0, 3.0], found
    fault.leave(value)


def _an_operation_behind_a_long_kernel_ends_at_its_deadline(fault: _Fault) -> None:
    fault.begin(0, 1, function=jobs.call_behind_a_kernel, args=(fault.timeout, 2 * _TIMEOUT_S))
    values = [fault.end(rank, fault.timeout) for rank in (0, 1)]
    fault.tell(values[0])
    for value in values if not fault.place.simulated else ():  # its kernels are short
        _names(value, "OperationTimeoutError", "all_reduce")
    fault.leave(values[0])


def _two_ranks_on_one_device_are_refused(fault: _Fault) -> None:
    found = fault.all(jobs.first_operation)
    fault.tell(found[0])
    for value in found:
        _names(value, "DistArgumentError", "rank 0", "rank 1")
    fault.leave(found[0])
