"""Groups of torch's own Gloo, watched: what hangs or fails is named on all ranks, and good programs are not accused."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support import forkserver
from tests.support.order import await_true
from tests.support.programs import python
from tests.support.ranks import ROOT, environment, reserved_port
from unicoll.errors import DistArgumentError

pytest.importorskip("torch")
from torch._C import _distributed_c10d as torchs

pytestmark = pytest.mark.torch

PROGRAM = Path(__file__).parent / "watch_program.py"
PRELOADED = ("torch.distributed._functional_collectives", "torch._dynamo", "unicoll.bootstrap.enter")


SEARCH_PATH = [str(ROOT)]


@pytest.fixture(scope="module", autouse=True)
def torch_finds_unicoll(installed: Path) -> Iterator[None]:
    """UNICOLL_WATCH has an effect by an entry point of torch, also where unicoll is not installed."""
    SEARCH_PATH.append(str(installed))
    # The forked ranks have the path of this process.
    sys.path.append(str(installed))
    yield
    sys.path.remove(SEARCH_PATH.pop())


class Processes:
    """The ranks of a program, each with files for its output."""

    def __init__(
        self, size: int, folder: Path, port: int, words: list[str], variables: dict[str, str], forks: bool
    ) -> None:
        self.files = [(folder / f"out{rank}", folder / f"err{rank}") for rank in range(size)]
        self.popens: list[subprocess.Popen[bytes] | forkserver.Forked] = []
        for rank, (out, err) in enumerate(self.files):
            env = environment(
                {
                    "MASTER_ADDR": "127.0.0.1",
                    "MASTER_PORT": str(port),
                    "RANK": str(rank),
                    "WORLD_SIZE": str(size),
                    "PYTHONPATH": os.pathsep.join(SEARCH_PATH),
                    "UNICOLL_STALL_WARNING": "1",
                    **variables,
                }
            )
            with out.open("w") as stdout, err.open("w") as stderr:
                if forks:
                    server = forkserver.server(PRELOADED, "error", environment({"UNICOLL_WATCH": "1"}))
                    self.popens.append(server.run(str(PROGRAM), words, env, stdout.fileno(), stderr.fileno()))
                else:
                    call = [sys.executable, str(PROGRAM), *words]
                    self.popens.append(subprocess.Popen(call, env=env, stdout=stdout, stderr=stderr))

    def out(self, rank: int) -> str:
        return self.files[rank][0].read_text()

    def err(self, rank: int) -> str:
        return self.files[rank][1].read_text()

    def all_errors(self) -> str:
        return "".join(map(self.err, range(len(self.files))))

    def await_text(self, rank: int | None, pattern: str) -> None:
        """Wait until a rank's standard error, or that of any rank, has a pattern."""

        def is_there() -> bool:
            found = re.search(pattern, self.all_errors() if rank is None else self.err(rank))
            return found is not None

        try:
            await_true(is_there)
        except AssertionError:
            pytest.fail(f"not found: {pattern}\n{self.all_errors()}")


@contextmanager
def program(
    size: int, folder: Path, *words: str, forks: bool = False, **variables: str
) -> Iterator[Processes]:
    """The ranks of the program; with ``forks`` of a process that has imported torch with UNICOLL_WATCH set."""
    with reserved_port() as port:
        made = Processes(size, folder, port, [*words], variables, forks)
        try:
            yield made
        finally:
            for popen in made.popens:
                popen.kill()
                popen.wait()


LINE = r"at \S*watch_program\.py:\d+"
REDUCE = r"all_reduce\(float32\[3\], SUM\) #\d+ on group 'default_pg'"
WAITS = rf"{REDUCE} {LINE} has waited \d+ s; arrived: ranks? .*; missing: rank 1 \(host \S+, pid PID\): "
DIFFER = r"the calls #\d+ of the ranks of group 'default_pg' differ:\n"
MINE = rf"  rank.*: all_reduce\(float32\[3\], SUM\) {LINE}\n"
RANK_1 = r"  rank 1 \(host \S+, pid PID\): "
CYCLE = r"deadlock: \d ranks wait for each other in a cycle:\n(.*\n)*"
HAS_RECORDER = hasattr(torchs, "_dump_fr_trace_json")
UNKNOWN = r"collective #\d+, which torch's C\+\+ code has started,"
IN_CPP = r"broadcast\(int32\[\d\]\) #\d+" if HAS_RECORDER else UNKNOWN
FAULTS = {
    # what rank 1 does: what one rank logs, for the whole job, or if True, all ranks but those that have ended
    "sleeps": (False, rf"{WAITS}not in a collective of this group; is {LINE}"),
    "stopped": (False, rf"{WAITS}sends no report \(the process is stopped"),
    "trains": (
        False,
        rf"{IN_CPP} on group 'default_pg' {LINE} has waited \d+ s; arrived: .*; missing: rank 1 .*"
        rf": not in a collective of this group; is {LINE}",
    ),
    "receives": (
        False,
        rf"recv\(float32\[3\], peer=1, tag=0\).* {LINE} has waited \d+ s; rank 1 .*not in a coll",
    ),
    "killed": (True, rf"rank \d: {REDUCE}: rank 1 \(host \S+, pid PID\) died: its process ended"),
    "killed in training": (
        True,
        rf"rank \d: ({UNKNOWN}|{IN_CPP}) on group 'default_pg': rank 1 \(.*\) died: its process",
    ),
    "exits": (True, rf"rank \d: {REDUCE}: rank 1 \(host \S+, pid PID\) has left the job"),
    "leaves": (True, rf"rank \d: {REDUCE}: rank 1 \(host \S+, pid PID\) has left the job"),
    "raises": (True, rf"rank \d: {REDUCE}: rank 1 \(host \S+, pid PID\) ended with ValueError: bad batch"),
    "other shape": (False, rf"{DIFFER}(.*\n)*{RANK_1}all_reduce\(float32\[5\], SUM\) {LINE}"),
    "other type": (False, rf"{DIFFER}(.*\n)*{RANK_1}all_reduce\(float64\[3\], SUM\) {LINE}"),
    "other order": (False, rf"{DIFFER}{MINE}{RANK_1}broadcast\(float32\[3\], root=0\) {LINE}"),
    "other of many": (
        False,
        rf"{DIFFER}  rank.*: broadcast\(.*, root=0\) {LINE}\n{RANK_1}broadcast\(.*, root=1\) {LINE}",
    ),
    "skips": (
        False,
        rf"{DIFFER}  rank.*: barrier\(\) {LINE}\n{RANK_1}broadcast\(float32\[3\], root=0\) {LINE}",
    ),
    "other in C++": (
        False,
        rf"{DIFFER}  rank.*: all_reduce\(float32\[3\]\) {LINE}\n{RANK_1}broadcast\(float32\[3\]\) {LINE}",
    ),
    "device": (False, rf"{WAITS}not in a collective of this group; is {LINE}"),
    "messages": (
        True,
        rf"{CYCLE}{RANK_1}recv\(float32\[3\], peer=\d, tag=7\) on group 'default_pg' {LINE} waits for rank \d",
    ),
    "other group": (
        True,
        rf"{CYCLE}{RANK_1}broadcast\(float32\[3\], root=0\) #1 on group '\d' {LINE} waits for rank \d",
    ),
}
FAULTS["other group with DETAIL"] = FAULTS["other group"]
FAULTS["skips with the default backend"] = FAULTS["skips"]
FAULTS["skips with two backends"] = False, FAULTS["skips"][1].replace("'default_pg'", "'default_pg:cpu'")
BLOCKED = ("other group", "other group with DETAIL", "messages")
"""Faults after which rank 1 is blocked in torch, too."""
DIES = ("other shape", "other type")
"""Faults after which Gloo ends the process of the rank with the smaller array: of two ranks none remains to compare."""
BY_RECORDER = ("other in C++", "device")
"""Faults that torch's flight recorder shows."""


@pytest.mark.every(n=18)
@pytest.mark.parametrize(
    ("fault", "size"),
    [
        (fault, size)
        for fault in FAULTS
        for size in (2, 4)
        if (size > 2 or fault not in DIES) and (HAS_RECORDER or fault not in BY_RECORDER)
    ],
)
def test_the_rank_that_does_something_else_is_named(fault: str, size: int, tmp_path: Path) -> None:
    by_all, pattern = FAULTS[fault]
    with program(size, tmp_path, fault, forks=True, UNICOLL_WATCH="1") as ranks:
        pattern = pattern.replace("PID", str(ranks.popens[1].pid))
        if not by_all:
            ranks.await_text(None, pattern)
        for rank in range(size) if by_all else ():
            if rank != 1 or fault in BLOCKED:
                ranks.await_text(rank, pattern)


def test_the_others_are_diagnosed_after_rank_0_has_left(tmp_path: Path) -> None:
    with program(4, tmp_path, "other group without rank 0", forks=True, UNICOLL_WATCH="1") as ranks:
        pattern = FAULTS["other group"][1].replace("PID", str(ranks.popens[1].pid))
        for rank in range(1, 4):
            ranks.await_text(rank, pattern)


@pytest.mark.every(n=3)
@pytest.mark.parametrize("words", [(), ("later",)])
def test_the_error_of_torch_has_the_cause(words: tuple[str, ...], tmp_path: Path) -> None:
    with program(2, tmp_path, "raises", "watch", *words) as ranks:
        assert ranks.popens[0].wait(100)
        assert re.search(r"unicoll: .* ended with ValueError: bad batch\n", ranks.err(0))
        assert "unicoll" not in ranks.err(1).replace("unicoll/torch_watch", "")


@pytest.mark.every(n=0)
@pytest.mark.parametrize("how", ["environment", "function"])
def test_on_hang_ends_the_processes(how: str, tmp_path: Path) -> None:
    by_call, variables = (["watch"], {}) if how == "function" else ([], {"UNICOLL_WATCH": "1"})
    with program(2, tmp_path, "other group", *by_call, UNICOLL_ON_HANG="abort", **variables) as ranks:
        codes = [popen.wait(100) for popen in ranks.popens]
        # the end of one may be an error of torch in the other one
        assert (2 if how == "function" else -signal.SIGABRT) in codes, ranks.all_errors()
        assert all(codes), ranks.all_errors()


def test_on_hang_is_checked() -> None:
    from unicoll.torch_plugin import watch

    with pytest.raises(DistArgumentError, match="on_hang is 'stop', not one of log, abort or a function"):
        watch(on_hang="stop")


GOOD = {
    "by call": ("none", "watch"),
    "by environment": ("none",),
    "again": ("again",),
}


@pytest.mark.every(n=2)
@pytest.mark.parametrize("how", GOOD)
def test_a_good_program_logs_nothing_and_its_calls_are_recorded(how: str, tmp_path: Path) -> None:
    dumps = tmp_path / "dumps"
    variables = {"UNICOLL_STALL_WARNING": "60", "UNICOLL_METRICS_FILE": str(tmp_path / "{rank}.prom")}
    if "watch" not in GOOD[how]:
        variables["UNICOLL_WATCH"] = "1"
    with program(3, tmp_path, *GOOD[how], str(dumps), **variables) as ranks:
        assert [popen.wait(100) for popen in ranks.popens] == [0, 0, 0], ranks.all_errors()
        assert ranks.all_errors() == ""
        left = {ranks.out(rank).splitlines()[-1] for rank in range(3)}
    if how != "again":  # it ends without the last threads
        assert left == {"left MainThread unicoll-signal unicoll-watch"}
        report = python("-m", "unicoll.trace", dumps).stdout
        assert "all calls have completed" in report, report
        assert "not called" not in report, report
        for rank in range(3):
            metrics = (tmp_path / f"{rank}.prom").read_text()
            assert (
                f'unicoll_calls_total{{op="all_reduce",group="default_pg",rank="{rank}"}} 5\n' in metrics
            ), metrics


def test_a_dump_on_sigusr1_shows_where_the_ranks_are(tmp_path: Path) -> None:
    variables = {"UNICOLL_WATCH": "1", "UNICOLL_TRACE_DIR": str(tmp_path)}
    with program(2, tmp_path, "sleeps", forks=True, **variables) as ranks:
        ranks.await_text(None, "has waited")
        for popen in ranks.popens:
            os.kill(popen.pid, signal.SIGUSR1)
        for rank in range(2):
            ranks.await_text(rank, f"rank {rank}: the flight recorder's dump is ")
    report = python("-m", "unicoll.trace", tmp_path / "torch").stdout
    assert re.match(
        r"rank 1 has not called all_reduce #\d+ of group 'default_pg' \(float32\[3\], SUM\); rank 0 has ",
        report,
    )
    assert re.search(
        r"started .* watch_program.py:\d+\n +\d+ +1 +not called +watch_program.py:\d+ in hang", report
    )


# --- jobs whose launcher ends all processes when one has failed -----------------------------------------------------

MISMATCH = """
import sys, time
import torch, torch.distributed as dist
dist.init_process_group("gloo")
rank = dist.get_rank()
for _ in range(20):
    dist.all_reduce(torch.ones(3))
    time.sleep(0.05)
if rank != 1:
    dist.all_reduce(torch.ones(3))
dist.all_reduce(torch.ones(4000))
"""
KILLED = """
import os, signal
import torch, torch.distributed as dist, unicoll.torch_plugin
dist.init_process_group("unicoll")
for _ in range(20):
    dist.all_reduce(torch.ones(3))
if dist.get_rank() == 1:
    os.kill(os.getpid(), signal.SIGKILL)
dist.all_reduce(torch.ones(3))
"""
LAUNCHERS = {
    "torchrun": ("torch.distributed.run", "--standalone", "--nproc-per-node"),
    "unirun": ("unicoll.run", "-n"),
}


def launch(launcher: str, size: int, folder: Path, program: str, **variables: str) -> str:
    """All output of a job that fails."""
    path = folder / "program.py"
    path.write_text(program)
    env = environment({"PYTHONPATH": os.pathsep.join(SEARCH_PATH), "OMP_NUM_THREADS": "1", **variables})
    call = [sys.executable, "-m", *LAUNCHERS[launcher], str(size), str(path)]
    done = subprocess.run(
        call, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=180
    )
    assert done.returncode == 1, done.stdout
    return done.stdout


@pytest.mark.every(n=0)
@pytest.mark.parametrize(
    ("launcher", "size"),
    [
        ("torchrun", 2),
        pytest.param("torchrun", 3, marks=pytest.mark.every(n=0)),
        pytest.param("unirun", 3, marks=pytest.mark.every(n=0)),
    ],
)
def test_a_call_that_gloo_aborts_for_is_explained(launcher: str, size: int, tmp_path: Path) -> None:
    """Gloo ends the process of a rank that gets more bytes than its array has, and the launcher the others."""
    dumps = tmp_path / "dumps"
    out = launch(launcher, size, tmp_path, MISMATCH, UNICOLL_WATCH="1", UNICOLL_TRACE_DIR=str(dumps))
    time = r"^(?:\[default\d\]:)?\d{4}-\d\d-\d\d \d\d:\d\d:\d\d"
    line = rf"{time} rank \d: the calls #21 of the ranks of group 'default_pg' differ:"
    assert len(re.findall(line, out, re.M)) == 1, out
    assert re.search(r"rank 1 .*: all_reduce\(float32\[4000\], SUM\) at \S*program\.py:11", out), out
    assert [*(dumps / "torch").glob("rank_*.json")], out
    if launcher == "unirun":
        root = out.partition("Root Cause")[2]
        assert re.search(r"rank +: 1 \(local_rank: 1\)", root), out
        assert "all_reduce(float32[4000], SUM)" in root, out


@pytest.mark.every(n=0)
def test_the_error_of_a_killed_rank_comes_before_torchruns_signal(tmp_path: Path) -> None:
    out = launch("torchrun", 3, tmp_path, KILLED)
    lost = r"RankLostError: all_reduce\(float32\[3\], SUM\) #21 on group 'world': rank 1 \(.*\) died"
    assert len(re.findall(rf"^\[rank[02]\]: .*{lost}", out, re.M)) == 2, out
    # The notice is logged, too, since another handler of SIGTERM may end a rank before the error.
    # It has the line that the rank is at, unless the rank has left it with the error already.
    place = r"(?:; this rank is at .*program\.py:\d+.*)?"
    notice = rf"^rank 1 \(host .*\) died: its process ended without leaving the job{place}$"
    assert len(re.findall(notice, out, re.M)) == 2, out


@pytest.mark.every(n=0)
def test_a_signal_ends_a_watched_process_as_without_watching(tmp_path: Path) -> None:
    with program(2, tmp_path, "sleeps", UNICOLL_WATCH="1", UNICOLL_STALL_WARNING="0") as ranks:
        for rank in range(2):
            await_true(lambda rank=rank: "ready" in ranks.out(rank))
        for popen in ranks.popens:
            popen.terminate()
        assert [popen.wait(100) for popen in ranks.popens] == [-signal.SIGTERM] * 2
        assert ranks.all_errors() == ""
