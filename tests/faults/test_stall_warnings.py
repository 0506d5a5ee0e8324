"""A call that waits for long: one rank logs who has come, who has not, and what those do."""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Sequence
from pathlib import Path

from tests.faults import deadlock_jobs as jobs
from tests.support.order import named_pipe, tell
from unicoll.testing.ranks import ProcessJob, joined
from unicoll.testing.worker import leave

ENV = {"UNICOLL_STALL_WARNING": "1"}


def warnings(job: ProcessJob, ranks: Sequence[int], count: int, timeout: float = 20.0) -> list[str]:
    """The lines on the standard error of some ranks, once there are ``count``."""
    deadline = time.monotonic() + timeout
    while True:
        lines = [line for rank in ranks for line in job.stderr(rank).splitlines()]
        if len(lines) >= count or time.monotonic() > deadline:
            return lines
        time.sleep(0.05)


def test_one_rank_warns_of_a_stopped_rank_and_again_later() -> None:
    with joined(4, env=ENV, quiet=False) as job:
        job.call(jobs.reduce_once)
        job.results()
        job.signal(3, signal.SIGSTOP)
        job.call(jobs.reduce_once, ranks=[0, 1, 2])
        lines = warnings(job, [0, 1, 2], 2)
        assert len(lines) == 2, lines
        ages = []
        for line in lines:
            assert line.startswith("all_reduce(float64[3], SUM) #2 on group 'world' at ")
            assert "deadlock_jobs.py:" in line
            assert "arrived: ranks 0, 1, 2; missing: rank 3 (host " in line
            assert f"pid {job.pids[3]}): sends no report (the process is stopped" in line
            seconds = re.search(r"has waited (\d+) s", line)
            assert seconds is not None
            ages.append(int(seconds[1]))
        assert sorted(ages)[0] < sorted(ages)[1]
        job.signal(3, signal.SIGCONT)
        job.call(jobs.reduce_once, ranks=[3])
        assert job.results() == [[4.0] * 3] * 4
        job.call(leave)
        assert job.results() == [[]] * 4


def test_a_dead_rank_and_a_busy_one_are_described(tmp_path: Path) -> None:
    told = named_pipe(tmp_path)
    with joined(3, env=ENV | {"UNICOLL_TRANSPORT": "shm"}, quiet=False) as job:
        job.call(jobs.reduce_once)
        job.results()
        job.signal(2, signal.SIGKILL)
        job.call(jobs.reduce_when_told, told, ranks=[1])
        job.call(jobs.reduce_once, ranks=[0])
        (line, *more) = warnings(job, [0, 1], 1)
        tell(told)
        assert not more
        assert "arrived: rank 0; missing: rank 1 " in line
        assert "not in a collective of this group; is at " in line
        line_number = jobs.reduce_when_told.__code__.co_firstlineno + 2
        assert f"deadlock_jobs.py:{line_number}" in line
        assert re.search(r"; rank 2 \(host \S+, pid \d+\): rank 2 .* died", line), line
        for outcome in job.collect(30, [0, 1]):
            assert outcome.failure is not None
            assert outcome.failure.type == "RankLostError"


def test_a_receive_says_what_the_sender_does(tmp_path: Path) -> None:
    told = named_pipe(tmp_path)
    with joined(2, env=ENV, quiet=False) as job:
        job.call(jobs.send_when_told, told, ranks=[1])
        job.call(jobs.receive_once, ranks=[0])
        line = warnings(job, [0, 1], 1)[0]
        tell(told)
        job.results()
        assert line.startswith("recv(float64[1], peer=1, tag=0) on group 'world' at ")
        assert (
            f"; rank 1 (host {line.partition('(host ')[2].partition(',')[0]}, pid {job.pids[1]}): not in a"
            in line
        )
        assert f"deadlock_jobs.py:{jobs.send_when_told.__code__.co_firstlineno + 2}" in line
        assert not job.stderr(1)
        job.call(leave)
        assert job.results() == [[]] * 2


def test_zero_turns_the_warnings_off() -> None:
    with joined(2, env={"UNICOLL_STALL_WARNING": "0"}) as job:
        job.call(jobs.late, 2.5, ranks=[1])
        job.call(jobs.reduce_once, ranks=[0])
        assert job.results() == [[2.0] * 3] * 2
        job.check_quiet()
        job.call(leave)
        assert job.results() == [[]] * 2
