"""Ranks that die, stop, are late, raise or get invalid connections: all other ranks raise errors with the cause."""

from __future__ import annotations

import os
import random
import signal
import socket
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests.faults import fault_jobs as jobs
from tests.support.calls import COALESCED, COLLECTIVES, EVERYTHING, OBJECTS, row_name
from tests.support.order import await_true, named_pipe, reading
from tests.support.ports import listening_ports
from tests.support.ranks import Outcome, Pool, ProcessJob, end_cleanly, joined
from tests.support.worker import end, leave
from unicoll.errors import DistError
from unicoll.net import handshake

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


@pytest.mark.every(4)
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
        job.call(leave, ranks=survivors)
        assert [o.value for o in job.collect(30, survivors)] == [[], []]


@pytest.mark.every(2)
@pytest.mark.parametrize("count", [5, 300_000])
@pytest.mark.parametrize("victim", [0, 2])
def test_a_killed_rank_is_named_by_those_it_exchanges_messages_with(victim: int, count: int) -> None:
    with joined(3) as job:
        job.call(jobs.exchange_with, victim, count)
        job.await_notes()
        time.sleep(random.random() / 20)
        job.signal(victim, signal.SIGKILL)
        for o in job.collect(30, [r for r in range(3) if r != victim]):
            assert o.failure is not None
            assert o.failure.type == "RankLostError", o.failure.traceback
            assert (o.failure.fields["rank"], o.failure.fields["pid"]) == (victim, job.pids[victim])
            assert o.failure.fields["op"] in ("send", "recv")


@pytest.mark.parametrize("name", ["all_reduce", "broadcast", "all_gather_coalesced"])
def test_a_killed_rank_fails_work_in_the_background(name: str) -> None:
    with joined(3) as job:
        job.call(jobs.loop_async, name)
        job.await_notes()
        killed = job.signal(1, signal.SIGKILL)
        check_lost(job.collect(30, [0, 2]), 1, job.pids[1], name, killed)


def test_survivors_make_a_smaller_world(tmp_path: Path) -> None:
    with joined(3) as job:
        job.call(jobs.loop, "all_reduce", 10)
        job.await_notes()
        job.signal(0, signal.SIGKILL)
        job.collect(30, [1, 2])
        job.call(jobs.start_anew, str(tmp_path / "store"), [1, 2], ranks=[1, 2])
        assert [o.value for o in job.collect(30, [1, 2])] == [[2.0] * 3] * 2
        job.call(leave, ranks=[1, 2])
        assert [o.value for o in job.collect(30, [1, 2])] == [[], []]


def test_rank_0_may_keep_the_gil_once_it_is_initialized(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    with ProcessJob(2, join="tcp") as job:
        job.call(jobs.keep_the_gil, str(fifo))
        assert job.results() == [None] * 2


@pytest.mark.every(2)
@pytest.mark.parametrize("join", ["tcp", "file"])
@pytest.mark.parametrize("transport", ["shm", "tcp", "hierarchical"])
def test_survivors_of_rank_0_shrink_the_group_repeatedly(transport: str, join: str) -> None:
    env = {"UNICOLL_TRANSPORT": transport}
    with joined(5, join=join, env=env) as job:
        left = [0, 1, 2, 3, 4]
        for victim in (0, 1, 3):
            job.call(jobs.loop_smallest, ranks=left)
            for rank in left:
                job.await_note(rank)
            killed = job.signal(victim, signal.SIGKILL)
            place, left = left.index(victim), [r for r in left if r != victim]
            check_lost(job.collect(30, left), victim, job.pids[victim], "all_reduce", killed)
            job.call(jobs.shrink_smallest, place, ranks=left)
            expected = {"size": len(left), "sum": float(sum(left)), "received": [left[-1], *left[:-1]]}
            for place, outcome in enumerate(job.collect(30, left)):
                assert outcome.failure is None, outcome.failure.traceback
                assert outcome.value == {**expected, "received": expected["received"][place]}
        job.call(leave, ranks=left)
        assert [o.value for o in job.collect(30, left)] == [[]] * len(left)


@pytest.mark.parametrize("join", ["tcp", "file"])
def test_a_group_grows_after_the_death_of_rank_0(join: str) -> None:
    """With tcp another store replaced that of rank 0, and the joining rank counted invitations of both stores."""
    with joined(3, join=join) as job:
        job.call(jobs.grow_pair)
        assert job.results() == [3.0] * 3
        job.call(jobs.loop_smallest)
        job.await_notes()
        job.signal(0, signal.SIGKILL)
        for outcome in job.collect(30, [1, 2]):
            assert outcome.failure is not None
            assert outcome.failure.type == "RankLostError"
        job.call(jobs.grow_without_rank_0, ranks=[1, 2])
        for outcome in job.collect(30, [1, 2]):
            assert outcome.failure is None, outcome.failure.traceback
            assert outcome.value == ([1, 2], 3.0)
        job.call(leave, ranks=[1, 2])
        assert [o.value for o in job.collect(30, [1, 2])] == [[], []]


def test_several_ranks_that_die_with_rank_0_are_all_noticed() -> None:
    with joined(5, join="tcp") as job:
        job.call(jobs.loop_smallest)
        job.await_notes()
        for victim in (1, 3, 0):
            job.signal(victim, signal.SIGKILL)
        for outcome in job.collect(30, [2, 4]):
            assert outcome.failure is not None
            assert outcome.failure.type == "RankLostError"
        job.call(jobs.departed_ranks, [0, 1, 3], ranks=[2, 4])
        assert [o.value for o in job.collect(30, [2, 4])] == [[0, 1, 3]] * 2
        job.call(jobs.shrink_smallest, 0, [1, 3], ranks=[2, 4])
        assert [o.value for o in job.collect(30, [2, 4])] == [
            {"size": 2, "sum": 6.0, "received": 4},
            {"size": 2, "sum": 6.0, "received": 2},
        ]
        job.call(leave, ranks=[2, 4])
        assert [o.value for o in job.collect(30, [2, 4])] == [[], []]


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


@pytest.mark.every(2)
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
        job.call(leave)
        assert [o.value for o in job.collect()] == [[]] * 3


@pytest.mark.every(2)
@pytest.mark.parametrize("name", ["barrier", "all_reduce", "work.wait", "recv", "recv from any"])
def test_a_call_has_its_own_timeout(name: str, pool: Callable[[int], Pool]) -> None:
    outcome = pool(2).run(jobs.own_timeout, name)[0]
    failure, seconds = outcome
    assert failure is not None
    assert failure.type == "OperationTimeoutError"
    assert "TimeoutError" in failure.bases
    assert "0.5 s" in failure.message
    assert seconds >= 0.4


def test_a_wait_that_times_out_does_not_end_the_operation(pool: Callable[[int], Pool]) -> None:
    late, waiting = pool(2).run(jobs.wait_with_a_timeout)
    failure, seconds = waiting["first"]
    assert failure.type == "OperationTimeoutError"
    assert "all_reduce" in failure.message
    assert seconds >= 0.1
    assert waiting["state"] == (False, None)
    assert late["sum"] == waiting["sum"] == [2.0] * 4


# --- ends ---------------------------------------------------------------------------------------------------


@pytest.mark.every(3)
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
        for o in job.collect(30, others):
            assert o.failure is None, o.failure
            failure, _ = o.value
            assert failure.type == "RankLostError", failure.traceback
            assert failure.fields["rank"] == who
            assert word in failure.message
            assert f"rank {who} " in failure.message
        if code is not None:
            assert job._processes[who].wait(20) == code
        if how == "exception":
            assert "Uncaught: the reason why" in job.stderr(who)
            assert not any(job.stderr(r) for r in others)
        job.call(end, ranks=others)
        for r in others:
            assert job._processes[r].wait(20) == 0


@pytest.mark.every(2)
@pytest.mark.parametrize("size", [1, 2, 3])
def test_interpreters_end_without_destroy(size: int) -> None:
    with joined(size, fresh=True) as job:
        job.call(end)
        assert job.wait_for_exit(30) == [0] * size


def test_interpreters_end_with_work_in_flight() -> None:
    with joined(3, fresh=True) as job:
        job.call(jobs.leave_work_behind)
        assert not any(o.failure for o in job.collect(30)), job.report()
        start = time.monotonic()
        assert job.wait_for_exit(40) == [0] * 3
        print(f"ended after {time.monotonic() - start:.1f} s")


@pytest.mark.parametrize("who", [0, 2])
def test_destroy_while_the_others_are_in_a_collective(who: int) -> None:
    with joined(3) as job:
        job.call(jobs.destroy_early, who)
        for o in job.collect(60):
            assert o.failure is None, o.failure
            failure, _ = o.value
            if o.rank == who:
                assert failure is None
            else:
                assert failure.type == "RankLostError"
                assert f"rank {who} " in failure.message
                assert "left the job" in failure.message
        job.call(leave)
        assert job.results() == [[]] * 3


def test_an_interrupted_rank_ends_the_waits_of_the_others() -> None:
    with joined(3) as job:
        job.call(jobs.interrupted)
        job.await_note(1)
        job.signal(1, signal.SIGINT)
        outcomes = job.collect(40)
        assert outcomes[1].value == "interrupted", outcomes[1].failure
        for o in (outcomes[0], outcomes[2]):
            failure, _ = o.value
            assert failure is not None
            assert "DistError" in failure.bases
            assert "rank 1 " in failure.message
            assert failure.message.endswith("KeyboardInterrupt")


# --- unauthenticated clients ---------------------------------------------------------------------------------


class UnauthenticatedClients:
    """Clients without the secret, which connect to all ports of a job until the block ends."""

    def __init__(self, addresses: Sequence[tuple[str, int]]):
        self._addresses = addresses
        self._stop = threading.Event()
        self._open: list[socket.socket] = []
        self._threads = [
            threading.Thread(target=self._connect_repeatedly, args=(behave,))
            for behave in (
                self._garbage,
                self._no_data,
                self._wrong_secret,
                self._incomplete_hello,
                self._excess_data,
            )
        ]
        self.attempts = 0
        self.refused = 0

    def __enter__(self) -> UnauthenticatedClients:
        for t in self._threads:
            t.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        for t in self._threads:
            t.join()
        for sock in self._open:
            sock.close()

    def _connect_repeatedly(self, behave: Callable[[socket.socket], None]) -> None:
        while not self._stop.is_set():
            for address in self._addresses:
                try:
                    sock = socket.create_connection(address, 5)
                except OSError:
                    continue
                self.attempts += 1
                sock.settimeout(5)
                try:
                    behave(sock)
                except (OSError, DistError):
                    self.refused += 1
                finally:
                    if behave != self._no_data or len(self._open) > 50:
                        sock.close()
                    else:
                        self._open.append(sock)
            time.sleep(0.02)

    def _garbage(self, sock: socket.socket) -> None:
        sock.sendall(random.randbytes(200))
        sock.recv(100)

    def _no_data(self, sock: socket.socket) -> None:
        """Sends nothing and keeps the connection."""

    def _wrong_secret(self, sock: socket.socket) -> None:
        purpose = random.choice([b"data", b"control", b"store"])
        handshake.client_handshake(sock, b"w" * 32, purpose, time.monotonic() + 5)

    def _incomplete_hello(self, sock: socket.socket) -> None:
        sock.sendall(b"unicoll")

    def _excess_data(self, sock: socket.socket) -> None:
        sock.sendall(b"GET / HTTP/1.1\r\n" + b"x" * 300_000)


def test_unauthenticated_clients_do_not_disturb_a_job(tmp_path: Path) -> None:
    with joined(3, join="tcp", env={"UNICOLL_SECRET": "s" * 32}) as job:
        job.call(listening_ports)
        addresses = sorted({a for found in job.results() for a in found})
        assert len(addresses) >= 4, addresses  # three listeners for data, one for control; the store
        with UnauthenticatedClients(addresses) as clients:
            job.call(jobs.work_until, str(tmp_path / "enough"))
            await_true(lambda: clients.attempts > 20 and clients.refused > 0)
            (tmp_path / "enough").touch()
            rounds = job.results()
        print(
            f"{rounds[0]} rounds beside {clients.attempts} unauthenticated clients, {clients.refused} of them refused"
        )
        job.quiet = False  # refusals may be logged
        end_cleanly(job)


# --- children -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["exits", "leaves"])
def test_a_forked_child_does_not_disturb_the_job(how: str) -> None:
    with joined(3) as job:
        job.call(jobs.work_with_child, how)
        job.results()
        end_cleanly(job)


def test_the_death_of_a_rank_is_noticed_though_its_child_lives_on() -> None:
    with joined(3) as job:
        job.call(jobs.work_with_child, "lives on")
        assert job.await_notes() == ["worked"] * 3
        assert job.await_notes() == ["looping"] * 3
        killed = job.signal(1, signal.SIGKILL)
        check_lost(job.collect(30, [0, 2]), 1, job.pids[1], "all_reduce", killed)
