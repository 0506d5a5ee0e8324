"""The flight recorder's dumps: on request, on SIGUSR1, when a group fails; and on one clock."""

from __future__ import annotations

import json
import os
import signal
import stat
import time
from pathlib import Path
from typing import Any

import pytest

import unicoll as dist
from tests.support.ranks import ProcessJob, end_cleanly, joined
from tests.support.worker import leave
from tests.tools import dump_jobs as jobs
from unicoll.process.formatting import command_to_type
from unicoll.trace.dumps import read
from unicoll.trace.findings import diagnose


def load(directory: Path, rank: int) -> dict[str, Any]:
    content = json.loads((directory / f"rank_{rank}.json").read_text())
    assert isinstance(content, dict)
    return content


def test_a_dump_on_request(tmp_path: Path) -> None:
    directory = tmp_path / "new" / "dumps"
    with joined(3) as job:
        job.call(jobs.some_calls, str(directory))
        assert job.results() == [str(directory / f"rank_{rank}.json") for rank in range(3)]
        end_cleanly(job)
        pids = job.pids
    names = {*(f"nccl_trace_rank_{rank}" for rank in range(3)), *(f"rank_{rank}.json" for rank in range(3))}
    assert {path.name for path in directory.iterdir()} == names
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    contents = [load(directory, rank) for rank in range(3)]
    assert len({content["job"] for content in contents}) == 1
    for rank, content in enumerate(contents):
        assert (content["rank"], content["world_size"], content["pid"]) == (rank, 3, pids[rank])
        assert content["host"] == os.uname().nodename
        assert content["reason"] == "dump_flight_recorder() was called"
        assert abs(content["written"]["wall"] - time.time()) < 600
        assert content["clock"]["error"] < 1
        assert abs(content["clock"]["offset"]) <= content["clock"]["error"]
        world = {"name": "world", "description": "default_pg", "ranks": [0, 1, 2], "backends": "cpu:gloo"}
        assert content["groups"][0] == world
        assert len(content["groups"]) == (2 if rank < 2 else 1)
        (main,) = [thread for thread in content["threads"] if thread["main"]]
        assert main["at"]["file"] == jobs.__file__
        assert main["at"]["function"] == "some_calls"
        assert main["stack"][-1]["file"] != jobs.__file__
        texts = [call["text"] for call in content["calls"] if call["group"] == "world"]
        assert texts[:2] == ["all_reduce(float32[4], SUM)", "broadcast(float32[4], root=1)"]
        assert {call["state"] for call in content["calls"]} == {"completed"}
        first = content["calls"][0]
        assert (first["inputs"], first["bytes"], first["backend"]) == ([["float32", [4]]], 16, "gloo")
        assert first["site"].startswith(jobs.__file__)


def test_a_directory_that_cannot_be_written(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    with joined(2) as job:
        job.call(jobs.refused_directories, str(file))
        for first, second in job.results():
            assert first.startswith("DistArgumentError: dump_flight_recorder: directory: ")
            assert str(file) in first
            assert str(file) in second
        end_cleanly(job)


def test_a_dump_needs_a_job() -> None:
    with pytest.raises(dist.NotInitializedError, match="init_process_group"):
        dist.dump_flight_recorder()


def test_a_world_of_one(tmp_path: Path) -> None:
    """A dump has the calls of its own job only, not those of an earlier one in this process."""
    dist.init_process_group(rank=0, world_size=1, store=dist.HashStore())
    dist.barrier()
    dist.destroy_process_group()
    dist.init_process_group(rank=0, world_size=1, store=dist.HashStore())
    try:
        dist.barrier()
        dist.dump_flight_recorder(tmp_path)
    finally:
        dist.destroy_process_group()
    assert [call["op"] for call in load(tmp_path, 0)["calls"]] == ["barrier"]
    assert diagnose(read(str(tmp_path)))[0].kind == "completed"


def has_started(directory: Path) -> bool:
    """True if the last call in rank 0's dump is in progress."""
    calls = load(directory, 0)["calls"] if (directory / "rank_0.json").exists() else []
    return bool(calls) and calls[-1]["state"] == "started"


@pytest.mark.parametrize("given", [True, False])
def test_a_signal_dumps_a_blocked_call(tmp_path: Path, given: bool) -> None:
    """The main thread is blocked in an all_reduce, which is in the dump; the all_reduce continues."""
    directory = tmp_path / "dumps"
    variables = {"TMPDIR": str(tmp_path)} | ({"UNICOLL_TRACE_DIR": str(directory)} if given else {})
    with ProcessJob(2, env=variables, quiet=False) as job:
        job.call(jobs.enter_with_signal)
        assert job.results() == [True, True]
        job.call(jobs.blocked_when_signalled, str(tmp_path / "go"))
        job.await_note(0)
        deadline = time.monotonic() + 30
        while not has_started(directory):  # the first signal may come before the call
            directory = next(tmp_path.glob("unicoll_trace_*"), directory)
            assert time.monotonic() < deadline
            job.signal(0, signal.SIGUSR1)
            time.sleep(0.2)
        (tmp_path / "go").touch()
        assert job.results() == [2.0, 2.0]
        content = load(directory, 0)
        assert content["reason"] == "SIGUSR1"
        call = content["calls"][-1]
        assert (call["op"], call["state"], call["ended"], call["blocking"]) == (
            "all_reduce",
            "started",
            0,
            True,
        )
        assert call["site"].startswith(jobs.__file__)
        job.call(jobs.leave_and_look)
        assert job.results() == [True, True]
        job.call(leave)
        assert job.results() == [[], []]
        assert f"to read it: {command_to_type('trace', str(directory))}" in job.stderr(0)
        assert job.stderr(1) == ""


def test_other_handlers_of_the_signal_stay() -> None:
    with ProcessJob(2) as job:
        job.call(jobs.enter_with_own_handler)
        assert job.results() == [True, True]
        end_cleanly(job)


@pytest.mark.every(n=2)
@pytest.mark.parametrize(
    ("function", "error", "kind", "written"),
    [
        (jobs.one_is_missing, "OperationTimeoutError", "missing_call", (0, 1, 2)),
        (jobs.one_calls_another, "CollectiveMismatchError", "mismatch", (0, 1, 2)),
        (jobs.one_dies, "RankLostError", "missing_dump", (0, 1)),
    ],
)
def test_a_failure_is_dumped(
    tmp_path: Path, function: Any, error: str, kind: str, written: tuple[int, ...]
) -> None:
    """Every rank dumps, also the one that has not called; the calls that fail are in the dump while they run."""
    arguments = [str(tmp_path)] if function is jobs.one_is_missing else []
    with joined(3, env={"UNICOLL_TRACE_DIR": str(tmp_path)}) as job:
        job.call(function, *arguments)
        found = job.collect()
        assert all(outcome.failure is None for outcome in found)
        assert [outcome.value for outcome in found[:2]] == [error] * 2
        alive = [rank for rank in range(3) if rank in written]
        job.call(leave, ranks=alive)
        assert [outcome.value for outcome in job.collect(ranks=alive)] == [[]] * len(alive)
    trace = read(str(tmp_path))
    assert tuple(trace.dumps) == written
    (diagnosis, *_) = diagnose(trace)
    assert diagnosis.kind == kind
    assert diagnosis.ranks == (2,)
    assert (diagnosis.group, diagnosis.seq) == ("world", 2)
    for rank in range(2):
        dump = trace.dumps[rank]
        assert dump.reason.startswith(f"group 'world' failed: {error}: ")
        assert load(tmp_path, rank)["failures"][0]["group"] == "world"
        (call,) = [call for call in dump.calls if call.seq == 2]
        if (
            error != "CollectiveMismatchError"
        ):  # a rank that notices it may end its call before the others know
            assert call.state == "started"
    if kind == "missing_call":
        assert trace.dumps[2].place.endswith("in _await_file")


def test_a_rank_outside_of_a_group_that_hangs_dumps_once(tmp_path: Path) -> None:
    with joined(3, env={"UNICOLL_TRACE_DIR": str(tmp_path)}) as job:
        job.call(jobs.pair_fails, str(tmp_path))
        assert job.results() == [["OperationTimeoutError"] * 2, [], []]
        end_cleanly(job)
    trace = read(str(tmp_path))
    assert tuple(trace.dumps) == (0, 1, 2)
    reasons = [trace.dumps[rank].reason for rank in range(3)]
    assert reasons[0] == reasons[1] != reasons[2]  # those of the last group, and of the first
    for reason in reasons:
        assert "failed: OperationTimeoutError: " in reason
    assert trace.dumps[2].place.endswith("in _await_file")
    assert [len(load(tmp_path, rank)["failures"]) for rank in range(3)] == [2, 2, 1]


def test_a_rank_outside_of_a_group_whose_calls_differ_does_not_dump(tmp_path: Path) -> None:
    with joined(3, env={"UNICOLL_TRACE_DIR": str(tmp_path)}) as job:
        job.call(jobs.pair_differs)
        assert job.results() == [["CollectiveMismatchError"], ["CollectiveMismatchError"], []]
        end_cleanly(job)
    assert tuple(read(str(tmp_path)).dumps) == (0, 1)


@pytest.mark.parametrize(
    ("directory", "dumps", "warns"), [("", 0, False), ("new", 2, False), ("file", 0, True)]
)
def test_the_directory_of_a_failure(tmp_path: Path, directory: str, dumps: int, warns: bool) -> None:
    """None without the variable; a relative one is that of init; one that cannot be written causes a warning."""
    (tmp_path / "file").touch()
    with ProcessJob(2, env={"UNICOLL_TRACE_DIR": directory, "TMPDIR": str(tmp_path)}, quiet=False) as job:
        job.call(jobs.enter_in, str(tmp_path))
        job.results()
        job.call(jobs.one_calls_another)
        assert job.results() == ["CollectiveMismatchError"] * 2
        end_cleanly(job)
        for rank in range(2):
            said = f"rank {rank}: the flight recorder's dump is not written: "
            assert (said in job.stderr(rank)) == warns == bool(job.stderr(rank))
    assert len([*tmp_path.glob("*/rank_*.json")]) == dumps
    assert {path.name for path in tmp_path.iterdir()} == {"file", *(["new"] if dumps else [])}


@pytest.mark.every(n=2)
@pytest.mark.parametrize("rank", [0, 1])
def test_a_wrong_clock_is_found(tmp_path: Path, rank: int) -> None:
    """One rank's clock is 3 s ahead: in the merged trace its calls are where they were, within the bound."""
    with ProcessJob(3, fresh=True) as job:
        job.call(jobs.enter_with_wrong_clock, rank, 3.0)
        job.results()
        job.call(jobs.dump_of_barriers, str(tmp_path))
        job.results()
        end_cleanly(job)
    trace = read(str(tmp_path))
    for dump in trace.dumps.values():
        assert dump.clock_error is not None
        assert dump.clock_error < 1
        ahead = 3.0 if dump.rank == rank else 0.0
        true_zero = 3.0 if rank == 0 else 0.0  # the merged trace is on rank 0's clock
        for call, raw in zip(dump.calls, load(tmp_path, dump.rank)["calls"], strict=True):
            assert abs(call.created - (raw["created"] - ahead + true_zero)) <= dump.clock_error + 1e-6
