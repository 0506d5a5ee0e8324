"""Safeguards of the NCCL backend: default streams, deadlines, deaths, threads, teardown, the watchdog."""

from __future__ import annotations

import gc
import logging
import re
import signal
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock, patch

import numpy as np
import pytest

import unicoll as dist
from nccl_comm.backend import NCCLBackend
from tests.nccl.nccl_jobs import backend_of, busy, calling, connect, error_of, new_group
from tests.nccl.test_interrupts import STARTS
from tests.simulated_nccl import arrays, ranks
from tests.simulated_nccl.communicators import Result
from tests.simulated_nccl.ranks import SimulatedJob, run
from tests.support import worker
from tests.support.on_ranks import on_ranks
from tests.support.order import await_true
from tests.support.ranks import Pool, joined, pools
from tests.support.worker import end
from unicoll.api import world
from unicoll.backend import Call
from unicoll.backend.group_state import GroupState
from unicoll.calls.ops import OPS
from unicoll.device_collectives import failure_detection
from unicoll.device_collectives.communicators import agreement, communicator
from unicoll.device_collectives.in_flight import InFlight, PendingWork
from unicoll.device_collectives.watchdog_thread import WatchdogThread
from unicoll.devices.device_runtime import PER_THREAD_STREAM, DeviceRuntime


@pytest.fixture(scope="module")
def pool() -> Iterator[Callable[[int], Pool]]:
    with pools(partial(SimulatedJob, policy="newest")) as made:
        yield made


@contextmanager
def recorded_log() -> Iterator[list[str]]:
    """The messages of unicoll's log."""
    messages: list[str] = []
    recorder, log = logging.Handler(), logging.getLogger("unicoll")
    recorder.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    log.addHandler(recorder)
    log.propagate = False
    try:
        yield messages
    finally:
        log.removeHandler(recorder)
        log.propagate = True


# --- streams ---------------------------------------------------------------------------------------------------------


@on_ranks(2)
def test_the_default_stream_of_another_thread_is_another_stream() -> None:
    """``wait()`` on it keeps the arrays until the device is done."""
    connect()
    kept = []
    with arrays.Stream(handle=2):
        x = arrays.full(2, 1.0)
        finish = busy(2)
        work = dist.all_reduce(x, async_op=True)
        pending = backend_of().resources.in_flight.operations[-1]

        def wait() -> None:
            with arrays.device(x.device), arrays.Stream(handle=2):
                work.wait()
                kept.append(bool(pending.calls))

        thread = threading.Thread(target=wait)
        thread.start()
        thread.join()
        finish()
        work.synchronize()
    assert kept == [True]


def _await_release(backend: NCCLBackend) -> None:
    """Wait until the watchdog has removed the operations that have ended, and their arrays have been dropped."""
    await_true(lambda: not backend.resources.in_flight.operations)
    watchdog, marker = backend.detection.watchdog, [""]
    assert watchdog is not None
    watchdog.unwatch(backend.detection)  # it waits for the end of a sweep
    watchdog.watch(backend.detection)
    watchdog.drop(marker)
    await_true(lambda: not marker)


@pytest.mark.parametrize("backend", ["cpu:gloo,cuda:nccl", "cpu:gloo,cuda:gloo"])
@on_ranks(2, start=partial(run, policy="oldest"), options=["backend"])
def test_packed_memory_is_kept_until_it_is_copied(backend: str) -> None:
    """A strided result is copied from packed memory on another stream, which is late, when that memory is reused."""
    connect()
    elsewhere, base = arrays.Stream(), arrays.full(2000, 1.0)
    ranks.simulation().synchronize()
    work = dist.all_reduce(base[::2], async_op=True)
    with elsewhere:
        finish = busy(elsewhere.ptr)
        work.wait()
    await_true(work.is_completed)
    for found in dist.group.WORLD.backends:  # type: ignore[union-attr]
        if isinstance(found, NCCLBackend):
            _await_release(found)
    del work
    dist.all_reduce(arrays.full(1, 1.0))  # the group forgets its last operation
    reused = arrays.full(1000, 99.0)
    ranks.simulation().synchronize_stream(0)
    finish()
    with elsewhere:
        assert (base[::2].numpy() == 2.0).all()
    del reused


class _Foreign:
    """An array of a library without adapter, which orders it on a stream of its own."""

    def __init__(self, array: arrays.Array, stream: arrays.Stream, **more: Any) -> None:
        self.array = array
        self.__cuda_array_interface__ = {
            "shape": array.shape,
            "strides": array.strides,
            "typestr": array.dtype.str,
            "data": (array.ptr, False),
            "version": 3,
            "stream": stream.ptr,
            **more,
        }


@pytest.mark.parametrize("backend", ["cpu:gloo,cuda:nccl", "cpu:gloo,cuda:gloo"])
@on_ranks(2, start=partial(run, policy="oldest"), options=["backend"])
def test_a_strided_array_of_another_library_is_packed_by_cupy(backend: str) -> None:
    """In the order of the array's stream, on which it is written late."""
    cupy: Any = ModuleType("cupy")
    cupy.ndarray = type("ndarray", (), {})
    cupy.asarray = lambda foreign: foreign.array
    cupy.cuda = SimpleNamespace(Device=arrays.device, ExternalStream=arrays.Stream)
    me, own = dist.get_rank(), arrays.Stream()
    for take in (lambda x: x[::2], lambda x: x.T):
        base = arrays.full((6, 4), -1.0)
        ranks.simulation().synchronize()
        foreign = _Foreign(take(base), own)
        with own:
            finish = busy(own.ptr)
            foreign.array[...] = np.arange(foreign.array.size).reshape(foreign.array.shape) + me
        with patch.dict(sys.modules, {"cupy": cupy}):
            work = dist.all_reduce(foreign, async_op=True)
            assert work is not None
            finish()
            work.wait()
        expected = np.full((6, 4), -1.0)
        take(expected)[...] = 2 * np.arange(foreign.array.size).reshape(foreign.array.shape) + 1
        with own:
            assert (base.numpy() == expected).all()
    with pytest.raises(dist.DistTypeError, match=r"all_reduce.*: masked arrays cannot"):
        dist.all_reduce(_Foreign(base, own, mask=_Foreign(base, own)))


# --- deadlines and deaths ---------------------------------------------------------------------------------------------


@on_ranks(2)
def test_an_operation_that_has_ended_is_never_late() -> None:
    """A sweep after its deadline, behind one that has not ended, does not fail the group."""
    connect()
    detection = backend_of().detection
    first, second = arrays.Stream(), arrays.Stream()
    with first:
        finish = busy(first.ptr)
        dist.all_reduce(arrays.empty(0), timeout=60)
    with second:
        dist.all_reduce(arrays.empty(0), timeout=30)
        second.synchronize()
    assert detection.watchdog is not None
    detection.watchdog.unwatch(detection)  # this thread sweeps in its place
    detection.sweep(time.monotonic() + 31.0)
    detection.watchdog.watch(detection)
    assert backend_of().state.error is None
    finish()
    ranks.simulation().synchronize()


def an_error_before_the_death_notice(victim: int) -> str:
    """NCCL reports an error on rank 0, which notifies the test; then the victim is killed."""
    communicator._DEATH_NOTICE_S = 60.0
    connect()
    dist.barrier()
    if dist.get_rank() == victim:
        worker.send_note("ready")
        threading.Event().wait()
    if dist.get_rank() == 0:
        nccl: Any = ranks.nccl()
        state = nccl.comm_state

        def notifying(comm: int) -> Any:
            found = state(comm)
            if found[1] and nccl.comm_state is notifying:
                del nccl.comm_state
                worker.send_note("seen")
            return found

        nccl.comm_state = notifying
        nccl.inject(6)
    return error_of(lambda: dist.all_reduce(arrays.full(2, 1.0), async_op=True).synchronize())


def test_a_death_is_named_though_nccl_reports_an_error_first() -> None:
    with joined(3, SimulatedJob) as job:
        job.call(an_error_before_the_death_notice, 2)
        job.await_note(2)
        assert job.await_note(0) == "seen"
        job.signal(2, signal.SIGKILL)
        for outcome in job.collect(60, [0, 1]):
            assert outcome.failure is None, outcome.failure
            assert re.match(r"RankLostError: .*rank 2 \(host [^,]*, pid ", outcome.value), outcome.value


def an_error_of_a_peer() -> None:
    """NCCL reports that a peer has ended, though none has died. The call is a message, because a collective that a
    rank has not made before it left fails without NCCL."""
    ranks.nccl().inject(6)
    dist.send(arrays.full(2, 1.0), 1)
    dist.barrier()


def test_nccls_error_names_a_rank_that_has_left() -> None:
    with joined(2, SimulatedJob) as job:
        job.call(connect)
        job.results()
        job.call(end, ranks=[1])
        assert job.wait_for_exit(60, [1]) == [0]
        job.call(an_error_of_a_peer, ranks=[0])
        failure = job.collect(60, [0])[0].failure
        assert failure is not None
        assert (failure.type, failure.fields["rank"]) == ("RankLostError", 1)
        assert "ncclRemoteError of NCCL 2.30.7" in failure.message
        assert f"pid {job.pids[1]}) has left the job" in failure.message


def split_without_a_member(victim: int, blocking: bool) -> None:
    """Ranks notify the test when they split a group; the victim, which is killed, takes no part in that."""
    options = {"blocking": blocking}
    group: Any = dist.new_group(
        backend="cuda:nccl", pg_options=options, device_id=dist.get_rank(), timeout=600
    )
    if dist.get_rank() == victim:
        worker.send_note("ready")
        threading.Event().wait()
    with calling("comm_split", lambda *arguments: worker.send_note("in a split")):
        dist.split_group(group, [[0, 1]], pg_options=options)


@pytest.mark.parametrize("blocking", [True, False])
def test_the_death_of_any_member_ends_a_split(blocking: bool) -> None:
    """Of the other ranks two are in the new group, and one is not."""
    with joined(4, SimulatedJob) as job:
        job.call(split_without_a_member, 3, blocking)
        job.await_notes()
        job.signal(3, signal.SIGKILL)
        for outcome in job.collect(60, range(3)):
            assert outcome.failure is not None
            assert outcome.failure.type == "RankLostError", outcome.failure
            assert outcome.failure.fields["rank"] == 3


def with_an_error_on_rank_1(way: str) -> str:
    """The error on each rank when NCCL makes a communicator and gives rank 1 an error."""
    if way != "init":
        connect()
    nccl: Any = ranks.nccl()
    if dist.get_rank() == 1:
        setattr(nccl, f"comm_{way}", lambda *arguments: (Result.SYSTEM_ERROR, nccl.new_slot()))
    ways: dict[str, Callable[[], Any]] = {
        "init": connect,
        "split": lambda: dist.new_group([0, 1], timeout=600),
        "shrink": lambda: dist.shrink_group([2]) if dist.get_rank() < 2 else None,
    }
    said = error_of(ways[way])
    vars(nccl).pop(f"comm_{way}", None)
    return said


@pytest.mark.every(n=3)
@pytest.mark.parametrize(
    ("way", "doing"), [("init", "connecting"), ("split", "splitting"), ("shrink", "shrinking")]
)
def test_a_rank_that_cannot_connect_is_named_on_all(way: str, doing: str) -> None:
    """At once, and no thread stays in NCCL."""
    first, second, third = run(3, with_an_error_on_rank_1, way, backend="nccl", bound=way != "init")
    assert second.startswith("DistNetworkError: ncclComm")
    said = rf"GroupAbortedError: rank 1 \(.*\) failed while {doing} group '.*': {re.escape(second)}"
    assert re.fullmatch(said, first), first
    assert third == ("nothing" if way == "shrink" else first)


@on_ranks(2, start=run)
def test_a_start_that_is_given_up_before_nccl_has_written_the_handle_is_aborted() -> None:
    """No thread stays in NCCL."""
    given_up = threading.Event()
    abort_start = communicator.Communicator._abort_start

    def late(*arguments: Any) -> None:
        assert given_up.wait(60)
        time.sleep(0.2)  # the abort has begun, or the test shows nothing

    def noting(self: Any, *arguments: Any) -> None:
        given_up.set()
        abort_start(self, *arguments)

    communicator.Communicator._abort_start = noting  # type: ignore[assignment,method-assign]
    with calling("comm_init", late):
        with pytest.raises(dist.DistError):
            dist.new_group(backend="cuda:nccl", device_id=dist.get_rank(), timeout=0.5)
        await_true(lambda: not any("ncclCommInitRankConfig" in t.name for t in threading.enumerate()))
    communicator.Communicator._abort_start = abort_start  # type: ignore[method-assign]


def shrunk_after_an_error(failing: int) -> list[Any]:
    """The sum over the ranks that remain after NCCL has reported an error to some of them; the calls of shrink."""
    connect()
    me, calls = dist.get_rank(), []
    if me < failing:
        ranks.nccl().inject(Result.REMOTE_ERROR)
    if failing:
        await_true(lambda: backend_of().state.error is not None)
    if me == 2:
        return []
    with calling("comm_shrink", lambda *arguments: calls.append("shrink")):
        group = dist.shrink_group([2])
    x = arrays.full(2, me + 1.0)
    dist.all_reduce(x, group=group)
    return [x.numpy().tolist(), calls]


@pytest.mark.parametrize(("failing", "calls"), [(0, ["shrink"]), (1, []), (3, [])])
def test_nccl_shrinks_a_communicator_without_an_error(failing: int, calls: list[str]) -> None:
    """With an error on any rank all make a new one."""
    with joined(3, SimulatedJob) as job:
        job.call(shrunk_after_an_error, failing)
        assert job.results() == [[[3.0, 3.0], calls], [[3.0, 3.0], calls], []]


@on_ranks(3, start=run)
def test_a_first_message_warns_of_missing_members() -> None:
    """Ranks 0 and 1 begin with a send and a receive; rank 2 joins once both have logged that they wait for it."""
    agreement.WARNING_S = 0.2
    me, store = dist.get_rank(), dist.group.WORLD.job.store  # type: ignore[union-attr]
    x = arrays.full(2, float(me))
    with recorded_log() as messages:

        def warnings_of_members() -> list[str]:
            return [message for message in messages if "waits for all its members" in message]

        if me < 2:
            thread = threading.Thread(
                target=lambda: (await_true(warnings_of_members), store.set(f"warned/{me}", ""))
            )
            thread.start()
            _ = dist.send(x, 1) if me == 0 else dist.recv(x, 0)
            thread.join()
        else:
            store.wait(["warned/0", "warned/1"], 60)
        dist.all_reduce(x)
    assert x.numpy().tolist() == [2.0, 2.0]
    found = warnings_of_members()
    assert len(found) == (1 if me < 2 else 0)
    for warning in found:
        assert "waits for all its members to start NCCL; missing: rank 2 (" in warning
        assert "with device_id= of init_process_group or new_group" in warning


@pytest.mark.parametrize("blocking", [True, False])
@on_ranks(2, start=run, env={"NCCL_SOCKET_IFNAME": "eth7"})
def test_a_rank_that_waits_in_nccl_warns_of_the_interfaces(blocking: bool) -> None:
    """Rank 1 calls NCCL once rank 0 has logged that it waits there."""
    store = dist.group.WORLD.job.store  # type: ignore[union-attr]
    if dist.get_rank():
        with calling("comm_init", lambda *arguments: store.wait(["warned"], 60)):
            new_group(blocking=blocking)
        return
    agreement.WARNING_S = 0.2

    def warnings_of_nccl() -> list[str]:
        return [message for message in messages if "has not returned" in message]

    with recorded_log() as messages:
        thread = threading.Thread(target=lambda: (await_true(warnings_of_nccl), store.set("warned", "")))
        thread.start()
        new_group(blocking=blocking)
        thread.join()
    (warning,) = warnings_of_nccl()
    assert re.fullmatch(
        r"group '.*': ncclCommInitRankConfig has not returned for 0\.2 s: NCCL has not connected to all ranks\."
        r" NCCL uses sockets on eth7 \(by NCCL_SOCKET_IFNAME\), unicoll lo 127\.0\.0\.1; NCCL_DEBUG=INFO logs .*",
        warning,
    ), warning


@pytest.mark.parametrize(
    ("env", "blocking"), [({"NCCL_COMM_BLOCKING": "0"}, False), ({"NCCL_COMM_BLOCKING": "1"}, True)]
)
@on_ranks(1, start=run)
def test_nccls_variable_decides_whether_a_communicator_is_blocking(
    env: dict[str, str], blocking: bool
) -> None:
    connect()
    (made,) = ranks.nccl().communicators
    assert backend_of()._factory.config.blocking == made.config.blocking == blocking


# --- threads and teardown ---------------------------------------------------------------------------------------------


def _two_inside() -> None:
    """Stay in a call until another thread is in NCCL too, or a time has passed."""
    active_calls = ranks.nccl().active_calls
    until = time.monotonic() + 0.3
    while len(active_calls.current) < 2 and time.monotonic() < until:
        time.sleep(0.001)


@on_ranks(2, start=run)
def test_threads_with_their_own_groups_use_nccl_one_at_a_time() -> None:
    """Two threads in NCCL on one device are a fault."""
    connect()
    groups: list[Any] = [dist.group.WORLD, dist.new_group()]
    xs = [arrays.full(2, 1.0) for _ in groups]
    for group, x in zip(groups, xs, strict=True):
        dist.all_reduce(x, group=group)
    ranks.simulation().synchronize()
    ranks.nccl().active_calls.pause = _two_inside

    def work(i: int) -> None:
        with arrays.Stream():
            dist.all_reduce(xs[i], group=groups[i])
            dist.all_reduce(xs[i], group=groups[i], async_op=True).synchronize()

    threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    ranks.nccl().active_calls.pause = lambda: None
    assert [x.numpy().tolist() for x in xs] == [[8.0, 8.0]] * 2


@on_ranks(2, start=partial(run, backend="nccl", bound=True))
def test_a_group_is_split_when_nothing_is_in_flight() -> None:
    """On its members and on the others; NCCL's split with unfinished work is a fault."""
    connect()
    held = threading.Event()

    def hold() -> None:
        with ranks.simulation().hold():
            held.set()
            time.sleep(0.5)

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    x = arrays.full(2, 1.0)
    work = dist.all_reduce(x, async_op=True)
    dist.new_group([0])
    thread.join()
    work.synchronize()
    assert x.numpy().tolist() == [2.0, 2.0]


def a_thread_in_nccl() -> list[str]:
    """A call that does not return from NCCL until the communicator is revoked, or aborted, at its deadline."""
    connect()
    log: list[str] = []
    free = threading.Event()

    def stuck(*arguments: Any) -> int:
        log.append("in")
        assert free.wait(60)
        time.sleep(0.2)
        log.append("out")
        return Result.INTERNAL_ERROR

    def note(name: str) -> Any:
        return calling(name, lambda comm: (log.append(name), free.set()))

    with note("comm_abort"):
        with note("comm_revoke"):
            ranks.nccl().all_reduce = stuck  # type: ignore[method-assign]
            said = error_of(lambda: dist.all_reduce(arrays.full(2, 1.0), timeout=1))
            log.append(said.partition(":")[0])
            del ranks.nccl().all_reduce
            backend_of().detection.await_abort()
        if "comm_revoke" in log:
            dist.destroy_process_group()
    return log


@pytest.mark.parametrize(
    ("version", "expected"),
    [
        (23007, ["in", "comm_revoke", "out", "OperationTimeoutError", "comm_abort"]),
        (22705, ["in", "comm_abort", "out", "OperationTimeoutError"]),
    ],
)
def test_a_thread_leaves_nccl_before_the_communicator_is_aborted(version: int, expected: list[str]) -> None:
    """An old NCCL, which cannot be revoked, is aborted while the thread is in it."""
    with joined(2, SimulatedJob, version=version) as job:
        job.call(a_thread_in_nccl)
        assert job.results() == [expected] * 2


@on_ranks(2, start=run)
def test_a_destroyed_group_waits_for_its_operations() -> None:
    """For one behind a kernel that ends once the group's destruction has warned."""
    connect()
    failure_detection._WARNING_S = 0.05
    x = arrays.full(2, 1.0 + dist.get_rank())
    finish = busy(arrays.current_stream())
    dist.all_reduce(x)
    with recorded_log() as messages:
        thread = threading.Thread(target=lambda: (await_true(lambda: messages), finish()))
        thread.start()
        dist.destroy_process_group()
        thread.join()
    assert x.numpy().tolist() == [3.0, 3.0]
    (warning,) = messages
    assert re.fullmatch(r"destroying group '\w+' waits for all_reduce\(.*\) #\d+", warning), warning


def destroyed_before_a_deadline() -> str:
    """The error of a group that is destroyed before the deadline of an operation that one rank does not call."""
    connect()
    if dist.get_rank() == 0:
        dist.all_reduce(arrays.full(2, 1.0), timeout=0.5)
        return error_of(dist.destroy_process_group)
    return ""


def test_the_deadline_of_an_operation_ends_the_wait_of_a_destroyed_group_with_an_error() -> None:
    with joined(2, SimulatedJob) as job:
        job.call(destroyed_before_a_deadline)
        first, second = job.results()
        assert first.startswith("OperationTimeoutError")
        assert "timed out after 0.5 s; arrived: rank 0; missing: rank 1" in first
        assert second == ""


def lost_last(async_op: bool, raised_by: str) -> tuple[str, str, list[str]]:
    """Rank 0's last operation fails after its call has returned; what a later call and destroy raise, and the log."""
    connect()
    failed: Any = dist.group.WORLD.job.control.group_failure  # type: ignore[union-attr]
    x, error = arrays.full(2, 1.0), ""
    work = None
    with recorded_log() as messages:
        if dist.get_rank() == 0:
            work = dist.all_reduce(x, timeout=0.5, async_op=async_op)
        await_true(lambda: failed("world"))
        if work is not None and raised_by == "work":
            await_true(work.is_completed)
            error = error_of(lambda: raise_(work.exception()))
        elif raised_by == "object":
            error = error_of(lambda: dist.all_gather_object([None, None], 1))
        elif raised_by == "refused":
            error = error_of(lambda: dist.group.WORLD.all_reduce(x, timeout=-1.0))  # type: ignore[union-attr]
        if raised_by == "log":
            await_true(lambda: dist.get_rank() or any("are undefined" in text for text in messages))
        return error, error_of(dist.destroy_process_group), messages


def raise_(error: BaseException | None) -> None:
    if error is not None:
        raise error


_TIMEOUT = r"OperationTimeoutError: all_reduce\(float64\[2\]( on cuda:0)?, SUM\) #2 "
_RAISED = {  # by the last call, and by destroy_process_group
    "destroy": ("$", _TIMEOUT),
    "log": ("$", _TIMEOUT),
    "work": (_TIMEOUT, "nothing"),
    "object": (_TIMEOUT, "nothing"),
    "refused": ("DistArgumentError", _TIMEOUT),
}


@pytest.mark.every(n=8)
@pytest.mark.parametrize("raised_by", _RAISED)
@pytest.mark.parametrize("start", ["nccl", "oneccl", "staged"])
def test_a_failure_of_the_last_operation_is_not_lost(start: str, raised_by: str) -> None:
    if start == "staged" and raised_by == "log":
        pytest.skip("a call returns when its results are there")
    with joined(2, STARTS[start]) as job:
        job.call(lost_last, start == "staged" or raised_by == "work", raised_by)
        (first, second_error, logged), other = job.results()
        job.quiet = False  # in the simulation a kernel of oneCCL does not end
    for wanted, found in zip(_RAISED[raised_by], (first, second_error), strict=True):
        assert re.match(wanted, found)
    assert other[1] == "nothing"
    logged = [text for text in logged if "oneCCL cannot abort a communicator" not in text]
    assert len(logged) == (raised_by == "log"), logged
    for text in logged:
        assert "and the results of all_reduce(float64[2], SUM) #2 are undefined: all_reduce" in text


def stopped_behind_a_kernel(ends_before: bool) -> list[str]:
    """NCCL's calls when a group fails whose operation is behind a kernel that lasts longer than NCCL may take.

    The kernel ends before the group is destroyed, or afterwards.
    """
    connect()
    communicator.END_S = failure_detection.END_S = 0.2
    comm = backend_of().resources.comm
    calls: list[str] = []

    def note(name: str) -> Any:
        return calling(
            name, lambda comm: calls.append(f"{name} begins"), lambda: calls.append(f"{name} ends")
        )

    finish = busy(arrays.current_stream())
    work = dist.all_reduce(arrays.full(2, 1.0), async_op=True, timeout=0.2)
    with recorded_log() as messages, note("comm_revoke"), note("comm_abort"):
        calls.append(error_of(work.synchronize).partition(":")[0])
        await_true(lambda: any("stopping NCCL's communicator" in message for message in messages))
        if not ends_before:
            dist.destroy_process_group()
        finish()
        await_true(lambda: "comm_revoke ends" in calls)
        await_true(comm._returned.is_set)
        communicator.END_S = failure_detection.END_S = 120.0
        if ends_before:
            dist.destroy_process_group()
    return sorted(calls)


@pytest.mark.parametrize("ends_before", [False, True])
def test_nothing_is_called_while_nccl_has_not_stopped(ends_before: bool) -> None:
    """A communicator that is aborted meanwhile would be freed; it is aborted when NCCL has stopped late."""
    expected = ["OperationTimeoutError", "comm_revoke begins", "comm_revoke ends"]
    if ends_before:
        expected[1:1] = ["comm_abort begins", "comm_abort ends"]
    with joined(2, SimulatedJob) as job:
        job.call(stopped_behind_a_kernel, ends_before)
        assert job.results() == [expected] * 2
        if ends_before:
            job.call(worker.leave)
            assert job.results() == [[]] * 2


def ended_with_a_graph(exiting: bool) -> list[str]:
    """The log when a job ends while a graph that has recorded an operation exists."""
    connect()
    communicator.END_S = failure_detection.END_S = 0.2
    sim = ranks.simulation()
    stream = arrays.Stream()
    with stream, sim.capture(stream.ptr) as graphs:
        dist.all_reduce(arrays.full(2, 1.0))
    with recorded_log() as messages:
        world.leave(SystemExit() if exiting else None)
        found = list(messages)
    graphs[0].destroy()
    return found


@pytest.mark.parametrize("exiting", [True, False])
def test_a_live_graph_does_not_delay_the_exit(exiting: bool) -> None:
    with joined(2, SimulatedJob) as job:
        job.call(ended_with_a_graph, exiting)
        for messages in job.results():
            hint = [m for m in messages if m.startswith("CUDA graphs with operations of group")]
            assert (len(hint), len(messages)) == ((0, 0) if exiting else (1, 2)), messages


@on_ranks(2)
def test_the_watchdog_does_not_free_memory() -> None:
    """Another thread drops the arrays of an operation that ends after its Work: cudaFree waits for the device."""
    connect()
    names: list[str] = []
    x = arrays.full(8, 1.0)
    weakref.finalize(x, lambda: names.append(threading.current_thread().name))
    finish = busy(arrays.current_stream())
    work = dist.all_reduce(x, async_op=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # wait() would drop the arrays
        del work, x
    assert not names
    finish()
    await_true(lambda: names)
    assert names == ["unicoll-nccl-release"]


@on_ranks(2, start=run)
def test_a_call_that_the_watchdog_has_seen_in_nccl_is_not_kept() -> None:
    """Its arrays are freed, with no later sweep."""
    connect()
    detection = backend_of().detection
    assert detection.watchdog is not None
    detection.watchdog.unwatch(detection)
    x = arrays.full(8, 1.0)
    reference = weakref.ref(x)
    with calling("all_reduce", lambda *arguments: detection.sweep(time.monotonic())):
        dist.all_reduce(x)
    ranks.simulation().synchronize()
    del x
    gc.collect()
    assert reference() is None
    detection.watchdog.watch(detection)


# --- the watchdog and finished operations ----------------------------------------------------------------------------


class _Slow:
    """A group whose sweep takes long, or raises."""

    def __init__(self, broken: bool = False) -> None:
        self.sweeping = threading.Event()
        self.failed = threading.Event()
        self.broken = broken
        self.log: list[str] = []

    def sweep_failed(self, cause: BaseException) -> None:
        self.log.append(f"{type(cause).__name__}: {cause}")
        self.failed.set()

    def sweep(self, now: float) -> bool:
        if self.broken:
            raise OSError("injected")
        self.sweeping.set()
        time.sleep(0.3)
        self.log.append("swept")
        return False


def _watchdog(ignore_captures: Callable[[], None]) -> WatchdogThread:
    return WatchdogThread("nccl", cast(DeviceRuntime, SimpleNamespace(ignore_captures=ignore_captures)))


@pytest.mark.parametrize("where", ["a group", "the thread"])
def test_a_watchdog_that_fails_fails_its_groups(where: str) -> None:
    def ignore_captures() -> None:
        if where == "the thread":
            raise OSError("injected")

    watchdog, group = _watchdog(ignore_captures), _Slow(broken=True)
    watchdog.watch(group)
    try:
        assert group.failed.wait(60)
        assert group.log[0] == "OSError: injected"
    finally:
        watchdog.close()


def watchdog_fails() -> str:
    """The watchdog of rank 0 raises when it looks at a group: how an operation that never ends ends."""
    connect()
    backend = backend_of()
    if dist.get_rank() == 0:

        def fail(resources: Any, now: float) -> None:
            raise OSError("injected")

        backend.detection._check_communicator = fail  # type: ignore[method-assign]
    await_true(lambda: backend.state.error is not None)
    return error_of(lambda: dist.all_reduce(arrays.full(2, 1.0)))


def test_works_end_when_the_watchdog_fails() -> None:
    with joined(2, SimulatedJob, quiet=False) as job:
        job.call(watchdog_fails)
        for text in job.results():
            for words in ("rank 0 ", "'unicoll-nccl-watchdog'", "OSError: injected"):
                assert words in text


def test_a_group_that_closes_waits_for_a_sweep_of_it() -> None:
    watchdog, group = _watchdog(lambda: None), _Slow()
    watchdog.watch(group)
    try:
        assert group.sweeping.wait(60)
        watchdog.unwatch(group)
        group.log.append("closed")
        assert group.log[-2:] == ["swept", "closed"]
    finally:
        watchdog.close()


class _Contested(list[Callable[[], None]]):
    """Callbacks that another thread takes right after their number was read."""

    def __len__(self) -> int:
        count = super().__len__()
        self.clear()
        return count


def test_two_threads_may_finish_one_operation() -> None:
    work = PendingWork((Call(OPS["barrier"], (), (), 1.0),), 1, 1, 1, False)
    called: list[bool] = []
    work.callbacks = _Contested([lambda: called.append(True)])
    for _ in range(2):
        work.finish()
        work.run_callbacks()
    assert called == [True]


class _Events:
    """The driver's events: those in ``done`` have occurred; ``queries`` counts."""

    def __init__(self) -> None:
        self.done: set[int] = set()
        self.queries = self._made = 0

    def create_event(self, device: int, timing: bool = False) -> int:
        self._made += 1
        return self._made

    def record(self, event: int, stream: int) -> None:
        pass

    def event_done(self, event: int) -> bool:
        self.queries += 1
        return event in self.done


def _in_flight(streams: list[int]) -> tuple[InFlight, _Events, list[int]]:
    """An operation on each of the streams, and their events."""
    events: Any = _Events()
    in_flight = InFlight(events, 0, 7, GroupState(Mock()), Mock(), Mock())
    barrier = (Call(OPS["barrier"], (), (), 1.0),)
    return in_flight, events, [in_flight.add(barrier, stream, stream, False).event for stream in streams]


def test_the_watchdog_queries_few_events_of_operations_on_one_stream() -> None:
    in_flight, events, made = _in_flight([7] * 300)
    events.done.update(made[:200])
    in_flight.reap()
    assert [work.event for work in in_flight.operations] == made[200:]
    assert events.queries < 50


@pytest.mark.parametrize("ended", [{0, 2}, {0, 1, 3}, {1}])
@pytest.mark.parametrize("streams", [[7, 8, 7, 8], [PER_THREAD_STREAM] * 4])
def test_the_watchdog_takes_no_operation_for_ended_that_has_not(streams: list[int], ended: set[int]) -> None:
    """Operations on different streams end in any order, also those on the default streams of several threads."""
    in_flight, events, made = _in_flight(streams)
    events.done.update(made[i] for i in ended)
    in_flight.reap()
    first_left = next(i for i in range(4) if i not in ended)
    assert [work.event for work in in_flight.operations] == made[first_left:]
    assert not any(work.done for work in in_flight.operations)


def test_callbacks_run_on_the_watchdogs_thread() -> None:
    """Not on that of the program, where an exception of a signal's handler could end them."""
    in_flight, events, made = _in_flight([7])
    events.done.update(made)
    (work,) = in_flight.operations
    called: list[int] = []
    assert work.add_callback(lambda: called.append(threading.get_ident()))
    assert in_flight.is_done(work)
    assert in_flight.has_callbacks
    assert not called
    watchdog = threading.Thread(target=in_flight.reap)
    watchdog.start()
    ident = watchdog.ident
    watchdog.join()
    assert called == [ident]
    assert not in_flight.has_callbacks
