"""Ranks that die, stop, are late, raise or get invalid connections: all other ranks raise errors with the cause."""

from __future__ import annotations

import ctypes
import os
import random
import re
import signal
import socket
import sys
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import unicoll as dist
from tests.faults import fault_jobs as jobs
from tests.support import worker
from tests.support.calls import COALESCED, COLLECTIVES, EVERYTHING, OBJECTS, invoke, row_name
from tests.support.on_ranks import on_ranks
from tests.support.order import await_true, await_word, named_pipe, reading, send_word, send_word_in_call
from tests.support.outcomes import failures_of, leave_cleanly, values_of
from tests.support.ports import listening_ports
from tests.support.ranks import Outcome, ProcessJob, end_cleanly, joined
from tests.support.worker import end
from unicoll.backend.connections.endpoint import Endpoint
from unicoll.errors import DistError
from unicoll.net.wire import handshake

turn = 1 if os.environ.get("UNICOLL_TRANSPORT") else 0  # see :mod:`sampling`
OURS = socket.gethostname()


def check_lost(outcomes: Sequence[Outcome], victim: int, pid: int, name: str, killed: float) -> None:
    """All survivors raised RankLostError with rank, host, pid and operation."""
    for o in outcomes:
        failure = o.failure
        assert failure is not None, f"rank {o.rank} did not fail: {o}"
        assert failure.type == "RankLostError", failure.traceback
        assert failure.fields["rank"] == victim, failure
        assert failure.fields["host"] == OURS
        assert failure.fields["pid"] == pid
        for word in (f"rank {victim} ", f"host {OURS}", f"pid {pid}"):
            assert word in failure.message
        if name not in OBJECTS:
            assert failure.fields["op"] == row_name(name), failure
            assert row_name(name) in failure.message
        print(f"{name}: rank {o.rank} raised {1000 * (o.at - killed):.0f} ms after the kill")


@pytest.mark.every(n=8)
@pytest.mark.sampled("name", "victim", 1)
@pytest.mark.parametrize("victim", [0, 2])
@pytest.mark.parametrize("name", EVERYTHING)
def test_a_killed_rank_is_named_by_all_others(name: str, victim: int) -> None:
    count = 200_000 if (len(name) + victim) % 2 else 100
    with joined(3) as job:
        job.call(jobs.loop, name, count)
        job.await_notes()
        time.sleep(random.random() / 20)
        killed = job.signal(victim, signal.SIGKILL)
        survivors = [r for r in range(3) if r != victim]
        check_lost(job.collect(30, survivors), victim, job.pids[victim], name, killed)
        leave_cleanly(job, survivors)


@pytest.mark.every(n=2)
@pytest.mark.parametrize("count", [5, 300_000])
@pytest.mark.parametrize("victim", [0, 2])
def test_a_killed_rank_is_named_by_those_it_exchanges_messages_with(victim: int, count: int) -> None:
    with joined(3) as job:
        job.call(jobs.exchange_with, victim, count)
        job.await_notes()
        time.sleep(random.random() / 20)
        job.signal(victim, signal.SIGKILL)
        for failure in failures_of(job, [r for r in range(3) if r != victim], "RankLostError"):
            assert (failure.fields["rank"], failure.fields["pid"]) == (victim, job.pids[victim])
            assert failure.fields["op"] in ("send", "recv")


def survivors_of(job: ProcessJob, victim: int, name: str) -> list[int]:
    """Kill a rank while rank 1 is in a call that the others do not make; returns those that are left."""
    job.call(jobs.call_on, 1, name)
    job.await_notes()
    job.collect(30, [0, 2])
    killed = job.signal(victim, signal.SIGKILL)
    check_lost(job.collect(30, [1]), victim, job.pids[victim], name, killed)
    survivors = [1, 2 - victim]
    job.call(jobs.loop, name, 10, ranks=survivors)
    failures_of(job, survivors, "RankLostError")
    return survivors


@pytest.mark.every(n=8)
@pytest.mark.parametrize("transport", ["shm", "tcp", "hierarchical"])
@pytest.mark.parametrize("victim", [0, 2])
@pytest.mark.parametrize("name", ["barrier", "all_reduce", "all_gather", "reduce_scatter", "all_to_all"])
def test_a_killed_rank_is_named_while_another_does_not_call(name: str, victim: int, transport: str) -> None:
    """Whichever of the two the call waits for."""
    with joined(3, env={"UNICOLL_TRANSPORT": transport}) as job:
        leave_cleanly(job, survivors_of(job, victim, name))


def test_survivors_make_a_smaller_world(tmp_path: Path) -> None:
    with joined(3) as job:
        job.call(jobs.loop, "all_reduce", 10)
        job.await_notes()
        job.signal(0, signal.SIGKILL)
        job.collect(30, [1, 2])
        job.call(jobs.start_anew, str(tmp_path / "store"), [1, 2], ranks=[1, 2])
        assert values_of(job, [1, 2]) == [[2.0] * 3] * 2
        leave_cleanly(job, [1, 2])


def _keep_the_gil(fifo: str) -> None:
    """Once it is initialized, rank 0 keeps the GIL until the other rank is, as MPI_Init does."""
    descriptor = os.open(fifo, os.O_RDWR)
    if worker._rank == 1:
        read_directory = Endpoint.read_directory

        def late(self: Endpoint) -> None:
            time.sleep(0.5)
            read_directory(self)

        Endpoint.read_directory = late  # type: ignore[method-assign]
    worker.enter()
    if worker._rank == 0:
        ctypes.PyDLL(None).read(descriptor, ctypes.create_string_buffer(1), 1)
    else:
        os.write(descriptor, b"x")
    os.close(descriptor)


def test_rank_0_may_keep_the_gil_once_it_is_initialized(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    with ProcessJob(2, join="tcp") as job:
        job.call(_keep_the_gil, str(fifo))
        job.results()


@pytest.mark.every(n=4)
@pytest.mark.parametrize("join", ["tcp", "file"])
@pytest.mark.parametrize("transport", ["shm", "tcp", "hierarchical"])
def test_survivors_of_rank_0_shrink_the_group_repeatedly(transport: str, join: str) -> None:
    with joined(5, join=join, env={"UNICOLL_TRANSPORT": transport}) as job:
        left = [0, 1, 2, 3, 4]
        for victim in (0, 1, 3):
            job.call(jobs.loop_smallest, ranks=left)
            for rank in left:
                job.await_note(rank)
            killed = job.signal(victim, signal.SIGKILL)
            place, left = left.index(victim), [r for r in left if r != victim]
            check_lost(job.collect(30, left), victim, job.pids[victim], "all_reduce", killed)
            job.call(jobs.shrink_smallest, place, ranks=left)
            assert values_of(job, left) == [
                {"size": len(left), "sum": float(sum(left)), "received": before}
                for before in [left[-1], *left[:-1]]
            ]
        leave_cleanly(job, left)


@pytest.mark.parametrize("join", ["tcp", "file"])
def test_a_group_grows_after_the_death_of_rank_0(join: str) -> None:
    """With tcp another store replaced that of rank 0, and the joining rank counted invitations of both stores."""
    with joined(3, join=join) as job:
        job.call(jobs.grow_pair)
        assert job.results() == [3.0] * 3
        job.call(jobs.loop_smallest)
        job.await_notes()
        job.signal(0, signal.SIGKILL)
        failures_of(job, [1, 2], "RankLostError")
        job.call(jobs.grow_without_rank_0, ranks=[1, 2])
        assert values_of(job, [1, 2]) == [([1, 2], 3.0)] * 2
        leave_cleanly(job, [1, 2])


def test_several_ranks_that_die_with_rank_0_are_all_noticed() -> None:
    with joined(5, join="tcp") as job:
        job.call(jobs.loop_smallest)
        job.await_notes()
        for victim in (1, 3, 0):
            job.signal(victim, signal.SIGKILL)
        failures_of(job, [2, 4], "RankLostError")
        job.call(jobs.departed_ranks, [0, 1, 3], ranks=[2, 4])
        assert values_of(job, [2, 4]) == [[0, 1, 3]] * 2
        job.call(jobs.shrink_smallest, 0, [1, 3], ranks=[2, 4])
        expected = {"size": 2, "sum": 6.0}
        assert values_of(job, [2, 4]) == [{**expected, "received": other} for other in (4, 2)]
        leave_cleanly(job, [2, 4])


# --- stopped and late ranks ---------------------------------------------------------------------------------

TIMED = (*COLLECTIVES, *COALESCED, "monitored_barrier")


def check_timeouts(outcomes: Sequence[Outcome], timeout: float, words: Sequence[str]) -> None:
    """Every operation timed out on every rank at the first one's deadline, and its error has these words."""
    for o in outcomes:
        assert o.failure is None, o.failure
        for name, (failure, seconds) in o.value.items():
            assert failure is not None, f"rank {o.rank}: {name} went well without the others"
            assert failure.type == "OperationTimeoutError", f"{name}: {failure.traceback}"
            assert f"timed out after {timeout:g} s" in failure.message
            assert row_name(name) in failure.message
            print(f"rank {o.rank}: {name} gave up after {seconds:.2f} s")
            for word in words:
                assert word in failure.message, f"{name}: {failure.message}"
    for name in outcomes[0].value:
        assert outcomes[0].value[name][1] >= timeout - 0.2, f"{name} gave up early"


@pytest.mark.every(n=2)
@pytest.mark.parametrize("connected", [True, False])
def test_a_stopped_rank_is_named_when_time_is_up(connected: bool) -> None:
    with joined(3) as job:
        job.call(jobs.make_groups)
        job.results()
        if connected:
            job.call(jobs.use_groups)
            job.results()
        job.signal(2, signal.SIGSTOP)
        job.call(jobs.all_at_once, TIMED, 1.0, ranks=[0, 1])
        words = ["missing: rank 2", "sends no report", f"pid {job.pids[2]}", "arrived: ranks 0, 1"]
        check_timeouts(job.collect(60, [0, 1]), 1.0, words)


def test_a_late_rank_is_named_with_the_place_where_it_is(tmp_path: Path) -> None:
    told = named_pipe(tmp_path)
    with joined(3) as job:
        job.call(jobs.make_groups)
        job.results()
        job.call(jobs.compute, told, ranks=[2])
        with reading(told):
            job.call(jobs.all_at_once, TIMED, 1.0, ranks=[0, 1])
            outcomes = job.collect(60, [0, 1])
        line = jobs.compute.__code__.co_firstlineno + 2
        words = [
            "missing: rank 2",
            "not in a collective of this group",
            f"fault_jobs.py:{line}",
            "arrived: ranks 0, 1",
        ]
        check_timeouts(outcomes, 1.0, words)
        job.collect(60, [2])
        leave_cleanly(job, range(3))


OWN_TIMEOUTS: dict[str, Callable[..., Any]] = {
    "barrier": dist.barrier,
    "all_reduce": lambda **options: dist.all_reduce(np.ones(4), **options),
    "work.wait": lambda **options: dist.all_reduce(np.ones(4), async_op=True, **options).wait(),  # type: ignore[union-attr]
    "recv": lambda **options: dist.recv(np.ones(4), src=1, **options),
    "recv from any": lambda **options: dist.recv(np.ones(4), **options),
}


@pytest.mark.every(n=2)
@pytest.mark.parametrize("name", OWN_TIMEOUTS)
@on_ranks(2)
def test_a_call_has_its_own_timeout(name: str) -> None:
    """Only rank 0 makes it."""
    group = dist.new_group(timeout=60)
    dist.barrier()
    if dist.get_rank() == 0:
        started = time.monotonic()
        with pytest.raises(dist.OperationTimeoutError, match=r"0\.5 s") as raised:
            OWN_TIMEOUTS[name](group=group, timeout=0.5)
        assert isinstance(raised.value, TimeoutError)
        assert time.monotonic() - started >= 0.4
    dist.barrier()
    dist.destroy_process_group(group)


@on_ranks(2)
def test_a_wait_that_times_out_does_not_end_the_operation() -> None:
    x = np.ones(4)
    if dist.get_rank() == 0:
        await_word()
        dist.all_reduce(x)
    else:
        work: Any = dist.all_reduce(x, async_op=True)
        started = time.monotonic()
        with pytest.raises(dist.OperationTimeoutError, match="all_reduce"):
            work.wait(0.2)
        assert time.monotonic() - started >= 0.1
        assert (work.is_completed(), work.exception()) == (False, None)
        send_word(0)
        work.wait()
    assert x.tolist() == [2.0] * 4


# --- ends ---------------------------------------------------------------------------------------------------


@pytest.mark.every(n=3)
@pytest.mark.parametrize("who", [0, 1])
@pytest.mark.parametrize(
    ("how", "code", "word"),
    [
        ("return", 0, "has left the job: its program ended"),
        ("sys.exit", 3, "has left the job: its program ended"),
        ("os._exit", 4, "died"),
        ("exception", 1, "the reason why"),
        ("destroy", None, "has left the job"),
    ],
)
def test_a_rank_that_ends_is_named_by_those_who_wait_for_it(
    how: str, code: int | None, word: str, who: int
) -> None:
    with joined(3, quiet=how != "exception") as job:
        job.call(jobs.end_differently, how, who)
        others = [r for r in range(3) if r != who]
        for failure, _ in values_of(job, others):
            assert failure.type == "RankLostError", failure.traceback
            assert failure.fields["rank"] == who
            assert word in failure.message
            assert f"rank {who} " in failure.message
        if code is not None:
            assert job.wait_for_exit(20, [who]) == [code]
        if how == "exception":
            assert "Uncaught: the reason why" in job.stderr(who)
            assert not any(job.stderr(r) for r in others)
        job.call(end, ranks=others)
        assert job.wait_for_exit(20, others) == [0, 0]


@pytest.mark.every(n=2)
@pytest.mark.parametrize("size", [1, 2, 3])
def test_interpreters_end_without_destroy(size: int) -> None:
    with joined(size, fresh=True) as job:
        job.call(end)
        assert job.wait_for_exit(30) == [0] * size


def test_interpreters_end_with_work_in_flight() -> None:
    """Rank 0's fails if it hears that the others have left before it closes its groups."""
    with joined(3, fresh=True, quiet=False) as job:
        job.call(jobs.leave_work_behind)
        assert not any(o.failure for o in job.collect(30)), job.report()
        start = time.monotonic()
        codes = job.wait_for_exit(40)
        print(f"ended after {time.monotonic() - start:.1f} s")
        texts = [job.stderr(rank) for rank in range(3)]
        assert texts[1:] == ["", ""]
        assert codes == [120 if texts[0] else 0, 0, 0]
        if texts[0]:
            assert re.fullmatch(
                "no call has raised this error, .* has left the job: its program ended\n", texts[0]
            )


@pytest.mark.parametrize("who", [0, 2])
@on_ranks(3, env={})
def test_destroy_while_the_others_are_in_a_collective(who: int) -> None:
    dist.barrier()
    if dist.get_rank() == who:
        for _ in range(2):
            await_word()
        dist.destroy_process_group()
        return
    thread = send_word_in_call(who)
    with pytest.raises(dist.RankLostError, match=rf"rank {who} .*left the job"):
        dist.all_reduce(np.ones(5), timeout=60)
    thread.join()


@on_ranks(3, env={})
def test_an_interrupted_rank_ends_the_waits_of_the_others() -> None:
    """Rank 1 gets SIGINT in the midst of a collective that rank 0 does not make."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    dist.barrier()
    world: Any = dist.group.WORLD
    if dist.get_rank() == 1:

        def interrupt() -> None:
            await_true(jobs.in_a_collective)
            os.kill(os.getpid(), signal.SIGINT)

        thread = threading.Thread(target=interrupt)
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            dist.all_reduce(np.ones(4), timeout=60)
        thread.join()
        return
    if dist.get_rank() == 0:
        await_true(lambda: world.job.control.group_failure(world.name))
    with pytest.raises(dist.DistError, match=r"rank 1 .*KeyboardInterrupt$"):
        dist.all_reduce(np.ones(4), timeout=60)


# --- unauthenticated clients ---------------------------------------------------------------------------------


def _wrong_secret(sock: socket.socket) -> None:
    purpose = random.choice([b"data", b"control", b"store"])
    handshake.client_handshake(sock, b"w" * 32, purpose, time.monotonic() + 5)


def _garbage(sock: socket.socket) -> None:
    sock.sendall(random.randbytes(200))
    sock.recv(100)


BEHAVIOURS: list[Callable[[socket.socket], object]] = [
    _garbage,
    _wrong_secret,
    lambda sock: sock.sendall(b"unicoll"),
    lambda sock: sock.sendall(b"GET / HTTP/1.1\r\n" + b"x" * 300_000),
    lambda sock: None,  # the connection is kept
]


@contextmanager
def unauthenticated_clients(addresses: Sequence[tuple[str, int]]) -> Iterator[Counter[str]]:
    """Clients without the secret, which connect to all ports of a job until the block ends; counts attempts."""
    counts: Counter[str] = Counter()
    stop = threading.Event()
    kept: list[socket.socket] = []

    def connect(behave: Callable[[socket.socket], object]) -> None:
        while not stop.wait(0.02):
            for address in addresses:
                try:
                    sock = socket.create_connection(address, 5)
                except OSError:
                    continue
                counts["attempts"] += 1
                try:
                    behave(sock)
                except (OSError, DistError):
                    counts["refused"] += 1
                if behave is BEHAVIOURS[-1] and len(kept) <= 50:
                    kept.append(sock)
                else:
                    sock.close()

    threads = [threading.Thread(target=connect, args=(behave,)) for behave in BEHAVIOURS]
    for thread in threads:
        thread.start()
    try:
        yield counts
    finally:
        stop.set()
        for thread in threads:
            thread.join()
        for sock in kept:
            sock.close()


def test_unauthenticated_clients_do_not_disturb_a_job(tmp_path: Path) -> None:
    with joined(3, join="tcp", env={"UNICOLL_SECRET": "s" * 32}) as job:
        job.call(listening_ports)
        addresses = sorted({a for found in job.results() for a in found})
        assert len(addresses) >= 4, addresses  # three listeners for data, one for control; the store
        with unauthenticated_clients(addresses) as counts:
            job.call(jobs.work_until, str(tmp_path / "enough"))
            await_true(lambda: counts["attempts"] > 20 and counts["refused"] > 0)
            (tmp_path / "enough").touch()
            print(f"{job.results()[0]} rounds beside unauthenticated clients: {counts}")
        job.quiet = False  # refusals may be logged
        end_cleanly(job)


# --- children -----------------------------------------------------------------------------------------------


def _work_with_child(how: str) -> None:
    """Rank 1 has a forked child while all work on; then, if the child lives on, until rank 1 is killed."""
    dist.barrier()
    child = _fork(how) if dist.get_rank() == 1 else 0
    for i in range(20):
        for name in COLLECTIVES:
            invoke(name, timeout=20)
        if i == 10 and child and how != "lives on":
            assert os.waitpid(child, 0) == (child, 0)
    if how == "lives on":
        jobs.loop("all_reduce", 4)


def _fork(how: str) -> int:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of fork in a process with threads
        child = os.fork()
    if child:
        return child
    if how == "exits":
        os._exit(0)
    if how == "leaves":
        assert not dist.is_initialized()
        with pytest.raises(dist.NotInitializedError, match="forked"):
            dist.barrier()
        sys.stderr.flush()
        sys.exit(0)
    time.sleep(600)
    os._exit(1)


@pytest.mark.parametrize("how", ["exits", "leaves"])
@on_ranks(3, env={})
def test_a_forked_child_does_not_disturb_the_job(how: str) -> None:
    _work_with_child(how)


def test_the_death_of_a_rank_is_noticed_though_its_child_lives_on() -> None:
    with joined(3) as job:
        job.call(_work_with_child, "lives on")
        assert job.await_notes() == ["looping"] * 3
        killed = job.signal(1, signal.SIGKILL)
        check_lost(job.collect(30, [0, 2]), 1, job.pids[1], "all_reduce", killed)
