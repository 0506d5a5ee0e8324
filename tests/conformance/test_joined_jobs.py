"""Jobs of :func:`unicoll.join`: several in one process, of other processes and with other ranks."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import unicoll as dist
from tests.support.on_ranks import on_ranks
from tests.support.order import await_true
from tests.support.ranks import ROOT, environment, joined, reserved_port
from tests.support.worker import send_note
from unicoll.bootstrap import process_end, rendezvous_protocol
from unicoll.group.call_counters import CallCounters
from unicoll.process.formatting import command_to_type

SECRET = "meeting secret of at least 32 bytes"


def join_pair(folder: str, name: str = "pair", **more: Any) -> Any:
    """A job of the default group's ranks 2 and 0, which are ranks 0 and 1 in it; None on other ranks."""
    rank = {2: 0, 0: 1}.get(dist.get_rank())
    if rank is None:
        return None
    return dist.join(f"file://{folder}/{name}", name=name, rank=rank, world_size=2, **more)


@contextmanager
def jobs_as_before() -> Iterator[None]:
    """Checks that the block leaves the jobs which it joins."""
    before = [*process_end._joined]
    yield
    assert process_end._joined == before


@on_ranks(3)
def test_jobs_have_their_own_members_ranks_and_groups(tmp_path: Path) -> None:
    with jobs_as_before():
        pair = join_pair(str(tmp_path))
        if pair is not None:
            me = dist.get_rank(pair)
            assert (me, dist.get_world_size(pair), pair.name) == ({2: 0, 0: 1}[dist.get_rank()], 2, "pair")
            assert dist.get_rank() != me
            x = np.full(3, 7.0 if me == 0 else 0.0)
            dist.broadcast(x, src=0, group=pair)
            assert x.tolist() == [7.0] * 3
            found: list[Any] = [None, None]
            dist.all_gather_object(found, {"rank": me}, group=pair)
            assert found == [{"rank": 0}, {"rank": 1}]
            part = dist.split_group(pair, [[1, 0]])
            assert dist.all_reduce(np.ones(1), group=part, async_op=True).wait()
            own, every = dist.new_subgroups(1, group=pair)
            assert (own.ranks, len(every), own.name) == ((me,), 2, f"pair/group-{1 + me}")
            assert f"rank {me} of 2: from arguments" in dist.explain(pair)
            dist.destroy_process_group(part)
            with pytest.raises(dist.GroupAbortedError, match="destroyed"):
                dist.barrier(group=part)
            dist.destroy_process_group(pair)
            with pytest.raises(dist.GroupAbortedError, match="group 'pair' has been destroyed"):
                dist.barrier(group=pair)
            with pytest.raises(dist.DistArgumentError, match="not a group of this process"):
                dist.destroy_process_group(pair)
            with pytest.raises(dist.GroupAbortedError):
                dist.barrier(group=own)
        total = np.ones(1)
        dist.all_reduce(total)
        assert total[0] == 3.0


@on_ranks(3)
def test_two_threads_call_two_jobs(tmp_path: Path) -> None:
    pairs = [join_pair(str(tmp_path), name) for name in ("left", "right")]
    wrong: list[Any] = []

    def work(group: Any, factor: int) -> None:
        for i in range(100):
            x = np.full(2000, float(factor * i))
            dist.all_reduce(x, group=group)
            if (x != 2 * factor * i).any():
                wrong.append((group, i, x))

    threads = [
        threading.Thread(target=work, args=(pair, i + 1)) for i, pair in enumerate(pairs) if pair is not None
    ]
    for thread in threads:
        thread.start()
    for _ in range(20):
        dist.barrier()
    for thread in threads:
        thread.join()
    assert wrong == []
    for pair in pairs:
        if pair is not None:
            dist.destroy_process_group(pair)


@on_ranks(2)
def test_jobs_at_one_address_have_names(tmp_path: Path) -> None:
    """Rank 0 of both serves the store at one port; the server ends with the last of them."""
    ports: list[Any] = [None]
    if dist.get_rank() == 0:
        with reserved_port() as ports[0]:
            dist.broadcast_object_list(ports)
            _meet_at(ports[0])
    else:
        dist.broadcast_object_list(ports)
        _meet_at(ports[0])


def _meet_at(port: int) -> None:
    rank, address = dist.get_rank(), f"tcp://127.0.0.1:{port}"
    first, second = [dist.join(address, name=name, rank=rank, world_size=2) for name in ("one", "two")]
    dist.destroy_process_group(first)
    dist.barrier(group=second)
    dist.destroy_process_group(second)
    dist.barrier()
    if rank == 0:
        await_true(lambda: _refused(port))


def _refused(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port)).close()
    except ConnectionRefusedError:
        return True
    return False


@on_ranks(2)
def test_nothing_is_left_of_jobs_that_were_left(tmp_path: Path) -> None:
    """The ranks' own end finds threads, files and segments that are left."""
    dist.barrier()
    descriptors = len(os.listdir("/proc/self/fd"))
    for number in range(20):
        with jobs_as_before():
            group = dist.join(
                f"file://{tmp_path}/{number}", name=f"job{number}", rank=dist.get_rank(), world_size=2
            )
            x = np.ones(10)
            group.all_reduce(x)
            assert x[0] == 2.0
            dist.destroy_process_group(group)
    assert len(os.listdir("/proc/self/fd")) <= descriptors
    assert len(rendezvous_protocol._used) <= 1000


@on_ranks(2)
def test_a_rank_that_leaves_in_the_first_collective_is_named(tmp_path: Path) -> None:
    rank = dist.get_rank()
    group = dist.join(f"file://{tmp_path}/pair", name="pair", rank=rank, world_size=2)
    if rank == 0:
        work = group.all_reduce(np.ones(3), async_op=True)
        dist.destroy_process_group(group)
        with pytest.raises(dist.GroupAbortedError):
            work.wait()
        dist.barrier()
    else:
        dist.barrier()
        with pytest.raises(dist.RankLostError, match="rank 0 "):
            group.all_reduce(np.ones(3))
        dist.destroy_process_group(group)


@on_ranks(3)
def test_a_callback_of_one_job_calls_another(tmp_path: Path) -> None:
    """Two ranks that wait for messages are in no deadlock while the callback of another job's call may send one."""
    me, pair = dist.get_rank(), join_pair(str(tmp_path))
    received = np.zeros(1)
    if me == 1:
        time.sleep(2)  # the search for deadlocks needs less
        dist.all_reduce(np.ones(4))
        return
    work = dist.all_reduce(np.ones(4), async_op=True)
    assert work is not None
    if me == 2:
        work.get_future().then(lambda _: pair.send(np.full(1, 7.0), 1))
        pair.recv(received, 1)
    else:
        pair.recv(received, 0)
        pair.send(received, 0)
    assert received[0] == 7.0
    work.wait()
    dist.destroy_process_group(pair)


@on_ranks(3)
def test_a_dump_has_the_calls_of_one_job(tmp_path: Path) -> None:
    pair = join_pair(str(tmp_path))
    dist.barrier()
    if pair is None:
        return
    dist.all_reduce(np.ones(1), group=pair)
    for group, folder in ((None, "default"), (pair, "pair")):
        path = Path(dist.dump_flight_recorder(tmp_path / f"{folder}{dist.get_rank()}", group))
        assert path.name == f"rank_{dist.get_rank(group)}.json"
        dump = json.loads(path.read_text())
        assert {call["group"] for call in dump["calls"]} == {"world" if group is None else "pair"}
    dist.destroy_process_group(pair)
    with pytest.raises(dist.DistArgumentError, match="is not a group of this process"):
        dist.dump_flight_recorder(tmp_path, pair)


@on_ranks(1)
def test_counters_of_two_jobs_count_each_call_once(tmp_path: Path) -> None:
    jobs = [
        dist.join(f"file://{tmp_path}/{name}", name=name, rank=0, world_size=1) for name in ("one", "two")
    ]
    counters = CallCounters()
    for group in (*jobs, *jobs):
        counters.enable(group._context.job)
    for group in jobs:
        dist.barrier(group=group)
    counters.disable()
    for group in jobs:
        dist.barrier(group=group)
        dist.destroy_process_group(group)
    assert {key: found.calls for key, found in counters.snapshot().items()} == {
        ("barrier", "one"): 1,
        ("barrier", "two"): 1,
    }


@on_ranks(1)
def test_hooks_of_a_joined_group(tmp_path: Path) -> None:
    group = dist.join(f"file://{tmp_path}/store", name="checked", rank=0, world_size=1)
    with (
        dist.check_finite(group),
        pytest.raises(dist.DistArgumentError, match=r"'checked'.*of rank 0 has 1 NaN"),
    ):
        dist.all_reduce(np.full(1, np.nan), group=group)
    dist.destroy_process_group(group)


# --- failures -------------------------------------------------------------------------------------------------------


def join_and_wait(folder: str, members: list[int]) -> None:
    """Join a job of ``members``; then make calls in it, and in the default job, until a rank of both is lost."""
    me, victim = dist.get_rank(), 1
    other = (
        dist.join(f"file://{folder}/store", name="other", rank=members.index(me), world_size=len(members))
        if me in members
        else None
    )
    send_note("joined")
    with pytest.raises(dist.RankLostError) as lost:
        while True:
            dist.barrier()
    assert lost.value.rank == victim
    if other is None:
        return
    if victim in members:
        with pytest.raises(dist.RankLostError, match=f"rank {members.index(victim)} ") as lost:
            while True:
                dist.barrier(group=other)
        assert (lost.value.rank, lost.value.group) == (members.index(victim), "other")
    else:
        x = np.ones(1)
        for _ in range(100):
            dist.all_reduce(x, op=dist.ReduceOp.MAX, group=other)
        assert x[0] == 1.0
    dist.destroy_process_group(other)


@pytest.mark.parametrize("members", [[2, 0], [2, 1, 0]])
def test_a_lost_rank_concerns_the_jobs_that_it_is_in(members: list[int], tmp_path: Path) -> None:
    with joined(3) as job:
        job.call(join_and_wait, str(tmp_path), members)
        job.await_notes()
        job.signal(1, signal.SIGKILL)
        for outcome in job.collect(60, [0, 2]):
            assert outcome.failure is None, outcome.failure.traceback


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"name": "a/b"}, "join: name='a/b' must be a letter and up to 63"),
        ({"name": ""}, "join: name=''"),
        ({"name": "world"}, "and not 'world'"),
        ({"name": "x" * 65}, "join: name="),
        ({"name": ".."}, "join: name="),
        ({"name": 3}, "join: name=3"),
        ({"secret": "  "}, "secret: a text that is not empty"),
        ({"init_method": None}, "give init_method or store, too"),
        ({"world_size": -1}, "unknown world_size"),
        ({"rank": 1}, "rank 1 is not below world_size 1"),
        ({"init_method": "tcp://127.0.0.1"}, "write tcp://host:port"),
    ],
)
def test_arguments(arguments: dict[str, Any], match: str) -> None:
    with pytest.raises(dist.DistArgumentError, match=match):
        dist.join(**{"init_method": "tcp://[::1]:1", "name": "some", "rank": 0, "world_size": 1} | arguments)


@on_ranks(2)
def test_another_secret_is_refused(tmp_path: Path) -> None:
    rank = dist.get_rank()
    with pytest.raises((dist.AuthenticationError, dist.OperationTimeoutError)):
        dist.join(
            f"file://{tmp_path}/store",
            name="refused",
            rank=rank,
            world_size=2,
            secret=f"{rank}{SECRET}",
            timeout=3 if rank == 0 else 30,
        )


# --- processes of two launchers -------------------------------------------------------------------------------------

MEETING = """
import os, signal, sys, numpy as np, unicoll as dist

address, secret, side = sys.argv[1:]
dist.init_process_group()  # of this launcher's two processes
own = dist.get_rank()
rank = own + (2 if side == "evaluator" else 0)
everyone = dist.join(address, name="everyone", rank=rank, world_size=4, secret=secret)
weights = np.full(1000, 3.0 if rank == 1 else 0.0)
dist.broadcast(weights, src=1, group=everyone)
assert (weights == 3.0).all()
if own == 0:  # one process of each side; the size, and on one side the rank, are those of the launcher, too
    pair = dist.join(f"{address}?rank={rank // 2}&world_size=2", name="pair", secret=secret)
    x = np.full(1, float(rank))
    dist.all_reduce(x, group=pair)
    assert x[0] == 2.0, x
    dist.destroy_process_group(pair)
dist.barrier(group=everyone)
if side == "evaluator":
    if own == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    signal.pause()
try:
    while True:
        dist.barrier(group=everyone)
except dist.RankLostError as error:
    assert error.rank in (2, 3), error  # the launcher of the evaluators ends the other one
    print("lost", error.rank, flush=True)
x = np.ones(1)
dist.all_reduce(x)
print("sum", x[0], flush=True)
dist.destroy_process_group(everyone)
dist.destroy_process_group()
"""


def launch(folder: Path, program: str, *words: str, flags: Sequence[str] = ()) -> subprocess.Popen[str]:
    """Our launcher with two processes of a program."""
    (folder / "program.py").write_text(program)
    return subprocess.Popen(
        [
            sys.executable,
            "-m",
            "unicoll.run",
            "--nproc-per-node=2",
            "--no-prefix",
            *flags,
            "program.py",
            *words,
        ],
        cwd=folder,
        env=environment({"PYTHONPATH": str(ROOT)}),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_processes_of_two_launchers_meet(tmp_path: Path) -> None:
    with reserved_port() as port:
        address = f"tcp://127.0.0.1:{port}"
        trainer, evaluator = [
            launch(tmp_path, MEETING, address, SECRET, side, flags=[f"--rdzv-id={side}"])
            for side in ("trainer", "evaluator")
        ]
        out, err = trainer.communicate(timeout=300)
        _, evaluator_err = evaluator.communicate(timeout=300)
    assert trainer.returncode == 0, err
    assert evaluator.returncode != 0, evaluator_err
    assert "SIGKILL" in evaluator_err
    lines = sorted(out.splitlines())
    assert lines[2:] == ["sum 2.0"] * 2, (out, err)
    assert {line.split()[0] for line in lines[:2]} == {"lost"}


ENDING = """
import os, sys, unicoll as dist

group = dist.join(name="ending")
other = dist.join(name="other")
if group.rank() == 1:
    if os.fork() == 0:  # the child is in no job: its calls and its end are not the parent's
        for call in (dist.barrier, lambda g: dist.split_group(g, [[0, 1]])):
            try:
                call(group)
            except dist.GroupAbortedError as error:
                assert "forked from a rank" in str(error), error
            else:
                sys.exit(1)
        sys.exit(0)
    assert os.wait()[1] == 0
    dist.barrier(group=group)
    raise ValueError("broken")
dist.barrier(group=group)
for each in (group, other):
    try:
        while True:
            dist.barrier(group=each)
    except dist.RankLostError as error:
        assert error.rank == 1, error
        assert "ValueError: broken" in str(error), error
        print("told", each.name, flush=True)
"""


def test_a_program_that_ends_leaves_its_jobs(tmp_path: Path) -> None:
    process = launch(tmp_path, ENDING, flags=["--grace=60"])  # rank 0 ends by itself
    out, err = process.communicate(timeout=300)
    assert process.returncode == 1, err
    assert "ValueError: broken" in err
    assert out.splitlines() == ["told ending", "told other"], (out, err)


ASKING = """
import unicoll as dist

dist.init_process_group()
group = dist.join(name="asking")
print(dist.dump_flight_recorder(group=group), flush=True)
dist.destroy_process_group(group)
dist.barrier()
keys = dist.group.WORLD.job.rendezvous.root.list_keys()
left = [key.rpartition("/")[2] for key in keys if "asking" in key]
assert sorted(left) == ["0", "1", "generation"], keys  # the record and the claims
"""


def test_a_requested_dump_of_a_job_stays_and_its_keys_do_not(tmp_path: Path) -> None:
    process = launch(tmp_path, ASKING)
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    paths = sorted(Path(line) for line in out.splitlines())
    assert [path.name for path in paths] == ["rank_0.json", "rank_1.json"]
    assert all(path.parent.name == "asking" and path.exists() for path in paths)
    assert command_to_type("trace", str(paths[0].parent)) in err
    shutil.rmtree(paths[0].parents[1])
