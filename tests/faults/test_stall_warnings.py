"""A call that waits for long: one rank logs who has come, who has not, and what those do."""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.faults import deadlock_jobs as jobs
from tests.support.order import await_true, named_pipe, reading
from tests.support.outcomes import leave_cleanly
from tests.support.ranks import ProcessJob, joined
from unicoll.net.control import relay

ENV = {"UNICOLL_STALL_WARNING": "1"}


def warnings(job: ProcessJob, ranks: Sequence[int], count: int, words: str = "") -> list[str]:
    """The lines on the standard error of some ranks that contain ``words``, once there are ``count``."""
    lines: list[str] = []

    def are_there() -> bool:
        lines[:] = [line for rank in ranks for line in job.stderr(rank).splitlines() if words in line]
        return len(lines) >= count

    await_true(are_there)
    return lines


def test_one_rank_warns_of_a_stopped_rank_and_again_later() -> None:
    with joined(4, env=ENV, quiet=False) as job:
        job.call(jobs.reduce_once)
        job.results()
        job.signal(3, signal.SIGSTOP)
        job.call(jobs.reduce_once, ranks=[0, 1, 2])
        lines = warnings(job, [0, 1, 2], 2, "arrived: ranks 0, 1, 2;")  # one of them may have come late
        ages = []
        for line in lines:
            assert line.startswith("all_reduce(float64[3], SUM) #2 on group 'world' at ")
            assert "deadlock_jobs.py:" in line
            assert "; arrived: ranks 0, 1, 2; missing: rank 3 (host " in line
            assert f"pid {job.pids[3]}): sends no report (the process is stopped" in line
            seconds = re.search(r"has waited (\d+) s", line)
            assert seconds is not None
            ages.append(int(seconds[1]))
        assert len({*ages}) == len(ages), lines
        job.signal(3, signal.SIGCONT)
        job.call(jobs.reduce_once, ranks=[3])
        assert job.results() == [[4.0] * 3] * 4
        leave_cleanly(job, range(4))


def test_a_warning_follows_when_the_call_has_waited_twice_as_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that came later than another by a quarter of the time logged a warning, too."""
    now = 100.0
    monkeypatch.setattr(relay, "time", SimpleNamespace(monotonic=lambda: now))
    grant = relay._Warnings().grant
    assert grant("all_reduce", 1, 1.0)
    assert grant("recv", 0, 1.0)
    now += 0.9
    assert not grant("all_reduce", 1, 1.0)
    assert not grant("recv", 0, 1.0)
    assert grant("all_reduce", 2, 1.0)
    now += 0.2
    assert not grant("all_reduce", 1, 1.0)
    assert grant("recv", 0, 1.0), "another message"
    assert grant("all_reduce", 1, 2.1)
    assert not grant("all_reduce", 1, 2.1)


def test_a_busy_rank_is_described(tmp_path: Path) -> None:
    told = named_pipe(tmp_path)
    with joined(3, env=ENV | {"UNICOLL_TRANSPORT": "shm"}, quiet=False) as job:
        job.call(jobs.reduce_once)
        job.results()
        job.call(jobs.reduce_when_told, told, ranks=[1])
        with reading(told):
            job.call(jobs.reduce_once, ranks=[0, 2])
            line = warnings(job, [0, 1, 2], 1)[0]
        job.results()
        assert "arrived: ranks 0, 2; missing: rank 1 " in line
        assert "not in a collective of this group; is at " in line
        line_number = jobs.reduce_when_told.__code__.co_firstlineno + 2
        assert f"deadlock_jobs.py:{line_number}" in line
        leave_cleanly(job, range(3))


def test_a_receive_says_what_the_sender_does(tmp_path: Path) -> None:
    told = named_pipe(tmp_path)
    with joined(2, env=ENV, quiet=False) as job:
        job.call(jobs.send_when_told, told, ranks=[1])
        with reading(told):
            job.call(jobs.receive_once, ranks=[0])
            line = warnings(job, [0, 1], 1)[0]
        job.results()
        assert line.startswith("recv(float64[1], peer=1, tag=0) on group 'world' at ")
        assert (
            f"; rank 1 (host {line.partition('(host ')[2].partition(',')[0]}, pid {job.pids[1]}): not in a"
            in line
        )
        assert f"deadlock_jobs.py:{jobs.send_when_told.__code__.co_firstlineno + 2}" in line
        assert not job.stderr(1)
        leave_cleanly(job, range(2))


def test_a_receive_says_which_tags_have_come(tmp_path: Path) -> None:
    """mpi4py's ANY_TAG is -1, which is a tag like others here."""
    told = named_pipe(tmp_path)
    with joined(2, env=ENV, quiet=False) as job:
        job.call(jobs.send_two_tags_when_told, told, ranks=[1])
        with reading(told):
            job.call(jobs.receive_with_minus_one, ranks=[0])
            line = warnings(job, [0, 1], 1)[0]
        assert job.results() == [[2.0, 1.0], None]
        assert line.endswith("; messages with other tags have come: 7 (tag=None receives with any tag)")
        leave_cleanly(job, range(2))


def test_zero_turns_the_warnings_off() -> None:
    with joined(2, env={"UNICOLL_STALL_WARNING": "0"}) as job:
        job.call(jobs.late, 2.5, ranks=[1])
        job.call(jobs.reduce_once, ranks=[0])
        assert job.results() == [[2.0] * 3] * 2
        job.check_quiet()
        leave_cleanly(job, range(2))
