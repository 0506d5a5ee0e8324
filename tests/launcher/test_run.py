"""The launcher: ``unirun``."""

from __future__ import annotations

import json
import os
import re
import resource
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.launcher.launching import (
    BOUND,
    PYTHONPATH,
    ROOT,
    LaunchFolder,
    all_gone,
    counters,
    environment,
    wait_until,
)
from unicoll.process.formatting import command_to_type
from unicoll.process.signal_handlers import is_caught
from unicoll.run.dump_directory import remove_old_dumps
from unicoll.run.failure import root_cause
from unicoll.run.output import Lines
from unicoll.run.tracebacks import ExceptionRecord

SECRET = "0123456789abcdef0123456789abcdef"


def test_worker_environment(folder: LaunchFolder) -> None:
    script = folder.script("import json, os; print(json.dumps(dict(os.environ)))")
    done = folder.launch("--nproc-per-node=3", "--role=trainer", "--rdzv_id", "job7", "--no-prefix", script)
    assert done.returncode == 0, done.stderr
    workers = sorted((json.loads(line) for line in done.stdout.splitlines()), key=lambda e: int(e["RANK"]))
    assert len(workers) == 3
    for rank, env in enumerate(workers):
        expected = {
            **dict.fromkeys(("RANK", "LOCAL_RANK", "ROLE_RANK"), rank),
            "GROUP_RANK": 0,
            "ROLE_NAME": "trainer",
            **dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE", "ROLE_WORLD_SIZE"), 3),
            "GROUP_WORLD_SIZE": 1,
            "MASTER_ADDR": "127.0.0.1",
            "TORCHELASTIC_RESTART_COUNT": 0,
            "TORCHELASTIC_MAX_RESTARTS": 0,
            "TORCHELASTIC_RUN_ID": "job7",
            "OMP_NUM_THREADS": 1,
            "PYTHONUNBUFFERED": 1,
            "UNICOLL_LAUNCHER": 1,
        }
        assert {name: env.get(name) for name in expected} == {k: str(v) for k, v in expected.items()}
        assert re.fullmatch(r"127\.0\.0\.1:\d+", env["UNICOLL_STORE"])
        assert re.fullmatch(r"[0-9a-f]{64}", env["UNICOLL_SECRET"])
        assert int(env["MASTER_PORT"]) > 0
    assert len({env["UNICOLL_SECRET"] for env in workers}) == 1
    assert len({env["TORCHELASTIC_ERROR_FILE"] for env in workers}) == 3


SHOWS_SECRET = "import os; print(os.environ['UNICOLL_SECRET'], os.environ['OMP_NUM_THREADS'])"
SHOWS_RANK = "import os; print(os.environ['RANK'])"
JOINS_ELSEWHERE = (
    "import os, unicoll; os.chdir('/'); unicoll.init_process_group(); unicoll.destroy_process_group()"
)
USES_MULTIPROCESSING = """
import multiprocessing
def double(x):
    return 2 * x
if __name__ == "__main__":
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        print(pool.map(double, [1, 2]))
"""
TWO = ["--nproc-per-node=2"]
TEMPLATE = {"TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": "<${role_name}/${rank}/${local_rank}> "}
PET = {"PET_NPROC_PER_NODE": "2", "PET_ROLE": "r", "PET_STANDALONE": "1"}
OUT_ERR = "import sys; print('out'); print('err', file=sys.stderr)"
NOT_UTF_8 = os.fsdecode(b"r\xe9")


class Job(NamedTuple):
    """A job, and the lines that it prints in any order."""

    flags: list[str]
    source: str
    out: list[str]
    err: list[str] = []
    env: Mapping[str, str] = {}


JOBS = {
    "a given secret and thread count": Job(
        TWO,
        SHOWS_SECRET,
        [f"[default0]:{SECRET} 5", f"[default1]:{SECRET} 5"],
        env={"UNICOLL_SECRET": SECRET, "OMP_NUM_THREADS": "5"},
    ),
    "a relative secret file": Job(TWO, JOINS_ELSEWHERE, [], env={"UNICOLL_SECRET_FILE": "secret"}),
    "defaults of PET variables": Job([], SHOWS_RANK, ["[r0]:0", "[r1]:1"], env=PET),
    "flags before PET variables": Job(["--nproc_per_node", "1"], SHOWS_RANK, ["0"], env=PET),
    "a module by a PET variable": Job(["work"], SHOWS_RANK, ["0"], env={"PET_MODULE": "1"}),
    "separate streams": Job([*TWO, "--role=r"], OUT_ERR, ["[r0]:out", "[r1]:out"], ["[r0]:err", "[r1]:err"]),
    "a role that is not UTF-8": Job(
        [*TWO, "--role", NOT_UTF_8], "print('x')", [f"[{NOT_UTF_8}0]:x", f"[{NOT_UTF_8}1]:x"]
    ),
    "a template and a filter": Job(
        ["-n", "3", "--local-ranks-filter=0,2"],
        "print('x')",
        ["<default/0/0> x", "<default/2/2> x"],
        env=TEMPLATE,
    ),
    "a single worker": Job([], "import sys; sys.stdout.write('as it is')", ["as it is"]),
    "multiprocessing": Job(TWO, USES_MULTIPROCESSING, ["[default0]:[2, 4]", "[default1]:[2, 4]"]),
    "64 workers": Job(["-n", "64"], SHOWS_RANK, [f"[default{r}]:{r}" for r in range(64)]),
}


@pytest.mark.every(n=4)
@pytest.mark.parametrize("name", JOBS)
def test_jobs(folder: LaunchFolder, name: str) -> None:
    job = JOBS[name]
    (folder.path / "secret").write_text(SECRET)
    (folder.path / "secret").chmod(0o600)
    script = folder.script(job.source)
    done = folder.launch(*job.flags, *([] if "work" in job.flags else [script]), **job.env)
    assert sorted(done.stdout.splitlines()) == sorted(job.out), done.stderr
    assert sorted(done.stderr.splitlines()) == job.err
    assert done.returncode == 0


def test_commands_that_are_not_python(folder: LaunchFolder) -> None:
    done = folder.launch(*TWO, "--no-python", "sh", "-c", "echo $RANK $1; exit 4", "-", "arg")
    assert done.returncode == 4
    assert sorted(done.stdout.splitlines()) == ["[default0]:0 arg", "[default1]:1 arg"]


@pytest.mark.parametrize("flag", ["", "--use-env", "--use_env"])
def test_the_interface_of_torchs_launch(folder: LaunchFolder, flag: str) -> None:
    """As torch.distributed.launch: --local-rank is the program's first argument unless --use-env is given."""
    script = folder.script("import os, sys; print(os.environ['LOCAL_RANK'], *sys.argv[1:])")
    flags = ["--nproc_per_node=2", "--no-prefix", *filter(None, [flag])]
    done = folder.python("-m", "unicoll.launch", *flags, script, "-x")
    expected = ["0 -x", "1 -x"] if flag else ["0 --local-rank=0 -x", "1 --local-rank=1 -x"]
    assert sorted(done.stdout.splitlines()) == expected, done.stderr


def test_workers_reach_the_store_and_learn_how_a_rank_ended(folder: LaunchFolder) -> None:
    script = folder.script(
        """
        import json, os, signal
        from unicoll.net.wire.secret import find_secret
        from unicoll.net.stores import TCPStore
        host, _, port = os.environ["UNICOLL_STORE"].rpartition(":")
        store = TCPStore(host, int(port), is_master=False, secret=find_secret())
        if os.environ["RANK"] == "0":
            store.get("ready")
            os.kill(os.getpid(), signal.SIGKILL)
        store.set("ready", "yes")
        print("rank 0 ended:", json.loads(store.get("launcher/exit/0"))["status"])
        """
    )
    done = folder.launch("--nproc-per-node=2", "--grace=30", script)
    assert done.returncode == 137, done.stderr
    assert "[default1]:rank 0 ended: -9" in done.stdout


def test_the_error_has_a_port_in_use(folder: LaunchFolder) -> None:
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
        done = folder.launch(f"--master-port={port}", folder.script("print('no')"))
    assert done.returncode == 1
    assert str(port) in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.every(n=0)
def test_twenty_concurrent_launches_do_not_conflict(folder: LaunchFolder) -> None:
    script = folder.script(
        """
        import os, socket, time
        port, job = int(os.environ["MASTER_PORT"]), os.environ["UNICOLL_SECRET"].encode()
        if os.environ["RANK"] == "0":
            with socket.create_server(("", port)) as server:   # sets SO_REUSEADDR, as torch's store does
                connection, _ = server.accept()
                with connection:
                    connection.sendall(job)
        else:
            deadline = time.monotonic() + 120
            while True:
                try:
                    connection = socket.create_connection(("127.0.0.1", port), timeout=120)
                    break
                except ConnectionRefusedError:
                    assert time.monotonic() < deadline
                    time.sleep(0.05)
            with connection:
                assert connection.recv(100) == job
        """
    )
    jobs = [folder.start("--nproc-per-node=2", "--no-prefix", script) for _ in range(20)]
    for job in jobs:
        _, err = job.communicate(timeout=BOUND)
        assert job.returncode == 0, err.decode()


# Output.


def test_no_interleaving_inside_lines(folder: LaunchFolder) -> None:
    script = folder.script(
        """
        import os, sys
        rank = os.environ["RANK"]
        for i in range(300):
            for _ in range(10):
                os.write(1, rank.encode() * 7)
            os.write(1, b"." + str(i).encode() + b"\\n")
        """
    )
    lines = folder.launch("--nproc-per-node=4", script).stdout.splitlines()
    for rank in range(4):
        own = [line for line in lines if line.startswith(f"[default{rank}]:")]
        assert own == [f"[default{rank}]:{str(rank) * 70}.{i}" for i in range(300)]
    assert len(lines) == 1200


def test_long_binary_and_unfinished_output_is_complete(folder: LaunchFolder) -> None:
    script = folder.script("import os; os.write(1, bytes(range(256)) * 12000); os.write(2, b'no newline')")
    process = folder.start("--nproc-per-node=2", "--no-prefix", "--local-ranks-filter=1", script)
    out, err = process.communicate(timeout=BOUND)
    assert process.returncode == 0
    assert out.replace(b"\n", b"") == (bytes(range(256)) * 12000).replace(b"\n", b"")
    assert err == b"no newline\n"


def test_progress_bars_show_while_they_run(folder: LaunchFolder) -> None:
    script = folder.script(
        """
        import os, sys, time
        for i in range(3):
            sys.stderr.write(f"\\r{i * 50}%")
        while not os.path.exists("seen"):
            time.sleep(0.02)
        sys.stderr.write("\\n")
        """
    )
    process = folder.start("--nproc-per-node=2", script)
    assert process.stderr is not None
    seen = process.stderr.readline()
    (folder.path / "seen").touch()
    rest = seen + process.stderr.read()
    process.wait(BOUND)
    assert re.match(rb"\[default\d\]:\r?(\[default\d\]:)?0%", seen)
    for rank in (b"0", b"1"):
        assert b"[default" + rank + b"]:100%" in rest


def test_output_for_which_there_is_no_space(folder: LaunchFolder) -> None:
    with open("/dev/full", "wb") as full:
        command = ("-m", "unicoll.run", "-n", "2", folder.script("print('x')"))
        done = folder.python(*command, stdout=full, stderr=subprocess.PIPE)
    assert done.stderr == "unicoll.run: standard output: No space left on device; no longer written\n"
    assert done.returncode == 0


def test_a_module_in_a_working_directory_that_has_been_removed(folder: LaunchFolder) -> None:
    folder.script("print('x')")
    (folder.path / "gone").mkdir()
    program = "import os, sys; os.rmdir('../gone'); os.execv(sys.executable, sys.orig_argv[3:])"
    variables = environment()
    variables["PYTHONPATH"] += f"{os.pathsep}{folder.path}"
    command = ["-c", program, sys.executable, "-m", "unicoll.run", "-m", "work"]
    done = folder.python(*command, cwd=folder.path / "gone", env=variables)
    assert (done.returncode, done.stdout, done.stderr) == (0, "x\n", "")


def test_stdin_goes_to_local_rank_0(folder: LaunchFolder) -> None:
    script = folder.script("import sys; print(repr(sys.stdin.read()))")
    done = folder.python("-m", "unicoll.run", "--nproc-per-node=2", script, input="typed")
    assert sorted(done.stdout.splitlines()) == ["[default0]:'typed'", "[default1]:''"]


def test_prompts_show_on_a_terminal(folder: LaunchFolder) -> None:
    """Above them nothing of the launcher's own line stays."""
    script = folder.script(
        """
        import os, time
        if os.environ["RANK"] == "0":
            while not os.path.exists("shown"):
                time.sleep(0.01)
            print("hello", input("name? "))
        """
    )
    terminal, worker_end = os.openpty()
    # its terminal, as in a shell's foreground
    wrapper = (
        "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); "
        "sys.argv[0] = sys.executable; os.execv(sys.executable, sys.argv)"
    )
    launcher = subprocess.Popen(
        [sys.executable, "-c", wrapper, "-m", "unicoll.run", "--nproc-per-node=2", script],
        cwd=folder.path,
        env=environment(TERM="linux"),
        start_new_session=True,
        stdin=worker_end,
        stdout=worker_end,
        stderr=worker_end,
    )
    folder.started.append(launcher)
    os.close(worker_end)
    shown = b""

    def shows(text: bytes) -> bool:
        nonlocal shown
        if text not in shown and select.select([terminal], [], [], 0)[0]:
            shown += os.read(terminal, 1000)
        return text in shown

    try:
        wait_until(lambda: shows(b"unicoll.run: 1/2 workers running"))
        (folder.path / "shown").touch()
        wait_until(lambda: shows(b"\r\x1b[K[default0]:name? "))
        os.write(terminal, b"Ada\n")
        wait_until(lambda: shows(b"[default0]:name? hello Ada"))
        assert launcher.wait(BOUND) == 0
        with suppress(OSError):  # EIO: no process has the terminal open, and all is read
            while True:
                shown += os.read(terminal, 1000)
        assert shown.endswith((b"\n", b"\r\x1b[K")), shown
    finally:
        os.close(terminal)


def test_log_files(folder: LaunchFolder) -> None:
    script = folder.script(
        """
        import os, sys
        print("out", flush=True); print("err", file=sys.stderr, flush=True)
        if os.environ["RANK"] == "1": raise ValueError("kept")
        """
    )
    flags = ("--nproc-per-node=2", "--log-dir=logs", "-r", "0:3,1:1", "-t", "1:2", "--rdzv-id=j")
    done = folder.launch(*flags, script)
    assert (done.returncode, done.stdout) == (1, "")
    (launch,) = (folder.path / "logs").iterdir()
    assert launch.name.startswith("j_")
    attempt = launch / "attempt_0"
    for file, text in (("0/stdout.log", "out\n"), ("0/stderr.log", "err\n"), ("1/stdout.log", "out\n")):
        assert (attempt / file).read_text() == text
    logged = (attempt / "1" / "stderr.log").read_text()
    assert logged.startswith("err\nTraceback")
    assert [line for line in done.stderr.splitlines() if line.startswith("[default")] == ["[default1]:err"]
    assert f"\nrank 1:\n{logged.removeprefix('err' + chr(10))}\n" in done.stderr  # without a prefix, and once
    assert done.stderr.count("Traceback") == 1
    record = json.loads((attempt / "1" / "error.json").read_text())["message"]
    assert record["message"] == "ValueError: kept"
    assert record["extraInfo"]["py_callstack"].startswith("Traceback")
    assert abs(int(record["extraInfo"]["timestamp"]) - time.time()) < 3600
    assert str(attempt / "1" / "error.json").removeprefix(str(folder.path) + "/") in done.stderr


# The file of UNICOLL_METRICS_FILE.

COUNTED = """
    import os, time
    from pathlib import Path
    import numpy as np
    import unicoll as dist
    dist.init_process_group()
    rank, size = dist.get_rank(), dist.get_world_size()
    for _ in range(3):
        dist.all_reduce(np.ones(4))
    WAIT
    if rank == 1:
        dist.send(np.ones(2), 0)
    elif size > 1:
        dist.recv(np.ones(2), 1)
    dist.destroy_process_group()
    END
    """
SENT = {("calls", "recv", 0): 1, ("calls", "send", 1): 1, ("bytes", "recv", 0): 16, ("bytes", "send", 1): 16}


def counted(folder: LaunchFolder, wait: str = "", end: str = "") -> str:
    return folder.script(COUNTED.replace("WAIT", wait).replace("END", end))


def totals(file: Path) -> dict[tuple[str, str, int], float]:
    """Numbers of calls and bytes, and the ranks with other counters."""
    found = counters(file)
    assert len(found) % 5 == 0
    return {key: value for key, value in found.items() if key[0] in ("calls", "bytes")}


def reduced(ranks: int) -> dict[tuple[str, str, int], float]:
    return {(n, "all_reduce", r): v for n, v in (("calls", 3), ("bytes", 96)) for r in range(ranks)}


def test_the_counters_of_all_ranks_are_in_the_named_file(folder: LaunchFolder) -> None:
    script = counted(folder, 'while not Path("stop").exists(): time.sleep(0.02)')
    for name in ("out", "tmp"):
        (folder.path / name).mkdir()
    file = folder.path / "out" / "job.prom"
    file.write_text('of_an_earlier_job{rank="7"} 1\n')
    launcher = folder.start(
        *TWO, script, UNICOLL_METRICS_FILE="out/job.prom", TMPDIR=str(folder.path / "tmp")
    )
    wait_until(lambda: "earlier" not in file.read_text() and totals(file) == reduced(2))
    assert os.listdir(file.parent) == [file.name]
    (folder.path / "stop").touch()
    assert launcher.communicate(timeout=BOUND) == (b"", b"")
    assert launcher.returncode == 0
    assert totals(file) == reduced(2) | SENT
    assert os.listdir(file.parent) == [file.name]
    assert file.stat().st_mode & 0o777 == 0o644
    assert os.listdir(folder.path / "tmp") == []


@pytest.mark.parametrize(
    ("workers", "name", "files"),
    [(2, "job.{rank}.prom", ["job.0.prom", "job.1.prom"]), (1, "job.prom", ["job.prom"])],
)
def test_files_that_the_launcher_does_not_merge(
    folder: LaunchFolder, workers: int, name: str, files: list[str]
) -> None:
    done = folder.launch("-n", str(workers), counted(folder), UNICOLL_METRICS_FILE=name)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert sorted(path.name for path in folder.path.glob("*.prom")) == files
    found = [totals(folder.path / file) for file in files]
    assert {key: value for each in found for key, value in each.items()} == (
        reduced(2) | SENT if workers == 2 else reduced(1)
    )


def test_counters_in_no_directory(folder: LaunchFolder) -> None:
    done = folder.launch(*TWO, counted(folder), UNICOLL_METRICS_FILE="none/job.prom")
    assert done.returncode == 1
    assert "DistArgumentError: UNICOLL_METRICS_FILE: there is no directory none" in done.stderr


@pytest.mark.every(n=2)
@pytest.mark.parametrize(
    ("make", "said"),
    [
        (os.mkdir, "job.prom cannot be written: Is a directory"),
        (os.mkfifo, "job.prom is not complete: writing takes longer than 5 s"),  # nobody reads
    ],
)
def test_counters_that_cannot_be_written(folder: LaunchFolder, make: Any, said: str) -> None:
    make(folder.path / "job.prom")
    script = counted(folder, "time.sleep(5)")  # for several attempts to write
    done = folder.launch(*TWO, script, UNICOLL_METRICS_FILE="job.prom")
    assert (done.returncode, done.stderr) == (0, f"unicoll.run: UNICOLL_METRICS_FILE: {said}\n")


def test_a_malformed_file_of_a_rank_is_left_out(folder: LaunchFolder) -> None:
    end = """for name in ([1] if rank else []):
        Path(os.environ["UNICOLL_METRICS_FILE"].format(rank=name)).write_text("# HELP\\nof something else 1\\n")"""
    done = folder.launch(*TWO, counted(folder, end=end), UNICOLL_METRICS_FILE="job.prom")
    said = "unicoll.run: UNICOLL_METRICS_FILE: 1.prom of the ranks' files is malformed\n"
    assert (done.returncode, done.stderr) == (0, said)
    assert totals(folder.path / "job.prom") == {
        key: value for key, value in (reduced(2) | SENT).items() if key[2] == 0
    }


def test_a_stopped_reader_does_not_stop_the_launcher(folder: LaunchFolder) -> None:
    script = folder.script(
        """
        import os, pathlib, sys, time
        rank = os.environ["RANK"]
        pathlib.Path(f"pid.{rank}").write_text(f"{os.getpid()}\\n")
        while rank == "0":
            print("x" * 10000)
        time.sleep(2)
        sys.exit(3)
        """
    )
    process = folder.start("--nproc-per-node=2", "--grace=0.1", script)
    pids = folder.pids(2)
    wait_until(lambda: all_gone(pids))  # although no byte of stdout was read
    process.communicate(timeout=BOUND)
    assert process.returncode == 3


@given(st.lists(st.binary(max_size=40), max_size=20))
def test_lines_keep_every_byte(chunks: list[bytes]) -> None:
    plain, marked = Lines(), Lines(b"<p>")
    kept = b"".join([*(plain.feed(chunk) for chunk in chunks), plain.finish()])
    whole = b"".join(chunks)
    assert kept == whole or kept == whole + b"\n"
    shown = b"".join([*(marked.feed(chunk) for chunk in chunks), marked.finish()])
    assert all(line.startswith(b"<p>") for line in shown.splitlines(keepends=False) if line) or b"\r" in shown
    assert len(shown.split(b"\n")) == len(kept.split(b"\n"))


def test_lines_repeat_the_prefix_after_a_carriage_return() -> None:
    lines = Lines(b">")
    assert lines.feed(b"a\r\nb\rc") == b">a\r\n"
    assert lines.progress() == b">b\n"
    assert lines.unfinished == b">c"
    assert lines.feed(b"\rd\re\n") == b">\r>c\r>d\r>e\n"
    assert lines.finish() == b""
    assert Lines(b">", max_line=3).feed(b"abcd") == b">abcd\n"


# Failure.

DIES = """
import os, signal, time
if os.environ["RANK"] == "2":
    os.kill(os.getpid(), signal.{})
time.sleep(600)
"""
CRASHES = "import os, signal\ndef inner():\n    os.kill(os.getpid(), signal.SIGSEGV)\ninner()"
DOES_NOT_END = """
import threading, time
threading.Thread(target=time.sleep, args=(600,)).start()
raise ValueError("and yet it runs")
"""
CAUSE_COMES_LATER = """
import os, time
from unicoll.errors import RankLostError
if os.environ["RANK"] == "0":
    raise RankLostError("rank 1 is gone", rank=1)  # seen first, but not the cause
time.sleep(0.5)
raise ValueError("the cause")
"""
KILLED_AFTER_AN_ERROR = """
import os, signal, sys, time
if os.environ["RANK"] == "0":
    print("unicoll.errors.RankLostError: rank 1 left, and we go on", file=sys.stderr, flush=True)
    os.symlink(str(os.getpid()), "pid")
    os.kill(os.getpid(), signal.SIGKILL)
while not os.path.islink("pid") or os.path.exists(f"/proc/{os.readlink('pid')}"):
    time.sleep(0.01)  # until the launcher has noticed the end of rank 0
sys.exit(3)
"""
STOPPED = r"\(stopped by the launcher: ranks 0, 1\)"
COMMAND = ["--no-python", sys.executable]
FAILURES: dict[str, tuple[list[str], str, int, str]] = {
    "exit code": (
        ["-n", "3"],
        "import os, sys; sys.exit(3 if os.environ['RANK'] == '1' else 0)",
        3,
        r"work.py FAILED(.|\n)*rank      : 1 \(local_rank: 1\)",
    ),
    # the traceback of both ranks, and the summary
    "another directory": (
        ["-n", "2", "--grace=60", "--log-dir=logs"],
        "import os; os.chdir('/'); raise ValueError('moved')",
        1,
        r"(?s)ValueError: moved.*traceback : ValueError: moved \(above\)",
    ),
    **{
        name: (
            ["-n", "3", "--grace=0.1"],
            DIES.format(name),
            128 + number,
            rf"(?s){STOPPED}.*exitcode  : -{number} \(pid: .*Signal {number} \({name}\) received by PID",
        )
        for name, number in (("SIGKILL", 9), ("SIGSEGV", 11), ("SIGABRT", 6))
    },
    "stack of a crash": (["-n", "2"], CRASHES, 139, r"(?s)Segmentation fault.*in inner.*===="),
    "does not end": (
        ["-n", "1", "--grace=0.2"],
        DOES_NOT_END,
        1,
        r"^Traceback(?s:.*)\nValueError: and yet it runs\n",
    ),
    # a command has no record of its exception, but the last line of its stderr
    "cause of commands": (
        ["-n", "2", "--grace=60", *COMMAND],
        CAUSE_COMES_LATER,
        1,
        r"(?s)rank 0 [^\n]*: unicoll.errors.RankLostError: rank 1 is gone\n.*Root Cause.*rank +: 1 ",
    ),
    # the last line on stderr was of an exception that it had handled
    "signal of commands": (
        ["-n", "2", *COMMAND],
        KILLED_AFTER_AN_ERROR,
        137,
        r"(?s)Root Cause.*rank +: 0 .*SIGKILL",
    ),
}


@pytest.mark.every(n=2)
@pytest.mark.parametrize("name", FAILURES)
def test_failures(folder: LaunchFolder, name: str) -> None:
    flags, source, status, expected = FAILURES[name]
    done = folder.launch(*flags, folder.script(source))
    assert done.returncode == status
    assert re.search(expected, done.stderr), done.stderr
    assert (
        done.stderr.count("ValueError: ") == source.count("ValueError") * 2
    )  # once above, once in the summary


TIMES_OUT = """
import time
import numpy as np
import unicoll as dist

dist.init_process_group()
dist.all_reduce(np.ones(4, np.float32))
if dist.get_rank() == 1:
    time.sleep(60)
dist.all_reduce(np.ones(4, np.float32), timeout=1)
"""


@pytest.mark.every(n=4)
@pytest.mark.parametrize("where", ["default", "log-dir", "variable", "disabled"])
def test_the_summary_has_the_command_that_shows_the_last_calls(folder: LaunchFolder, where: str) -> None:
    scratch = folder.path / "tmp"
    scratch.mkdir()
    variables = {"TMPDIR": str(scratch)}
    flags = ["--log-dir", "logs"] if where == "log-dir" else []
    program = TIMES_OUT
    if where == "variable":
        variables["UNICOLL_TRACE_DIR"] = "own"
        program = "import os; os.chdir('tmp')" + program
    elif where == "disabled":
        variables["UNICOLL_TRACE_DIR"] = ""
    done = folder.launch("-n", "2", *flags, folder.script(program), **variables)
    assert done.returncode != 0
    commands = re.findall(rf"^  last calls: ({re.escape(command_to_type('trace'))} (.*))$", done.stderr, re.M)
    if where == "disabled":
        assert (commands, list(scratch.iterdir())) == ([], [])
        return
    ((command, directory),) = commands
    pattern = {
        "default": re.escape(str(scratch)) + r"/unicoll_trace_[0-9a-f]{16}",
        "variable": "own",
        "log-dir": re.escape(str(folder.path)) + r"/logs/[^/]+/trace",
    }
    assert re.fullmatch(pattern[where], directory)
    assert list(scratch.iterdir()) == ([Path(directory)] if where == "default" else [])
    shown = subprocess.run(
        command, shell=True, cwd=folder.path, env=environment(), capture_output=True, text=True, check=False
    )
    assert (shown.returncode, shown.stderr) == (1, "")
    first = shown.stdout.partition("\n")[0]
    assert first.startswith(
        "rank 1 has not called all_reduce #2 of group 'world' (float32[4], SUM); rank 0 has waited"
    )
    assert first.endswith("; rank 1 is at work.py:9 in <module>")


WITHOUT_DESCRIPTORS = """
import os, resource
import unicoll as dist

dist.init_process_group(timeout=60)
held = []
if dist.get_rank() == 1:
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    try:
        while True:
            held.append(os.open(os.devnull, os.O_RDONLY))
    except OSError:
        pass
try:
    dist.barrier(group=dist.new_group())
except (OSError, dist.DistError):
    print("failed")
for fd in held:
    os.close(fd)
dist.barrier(group=dist.new_group())
print(dist.new_group().group_name)
"""


def test_a_group_that_one_rank_cannot_make_is_numbered_on_all(folder: LaunchFolder) -> None:
    """Its first use imported a module: without descriptors the rank failed before it had counted the group."""
    script = folder.script(WITHOUT_DESCRIPTORS)
    done = folder.launch("-n", "2", "--no-prefix", script, UNICOLL_TRANSPORT="tcp")
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.split()) == ["failed", "failed", "group-3", "group-3"]


HANDLES = """
import numpy as np
import unicoll as dist

dist.init_process_group()
try:
    dist.all_reduce(np.ones(4 + dist.get_rank()))
except dist.CollectiveMismatchError:
    print("handled")
"""


def test_dumps_of_failures_that_the_program_handles_are_removed(folder: LaunchFolder) -> None:
    scratch = folder.path / "tmp"
    scratch.mkdir()
    done = folder.launch("-n", "2", folder.script(HANDLES), TMPDIR=str(scratch))
    assert (done.returncode, done.stderr, done.stdout.count("handled")) == (0, "", 2)
    assert list(scratch.iterdir()) == []


def test_requested_dumps_of_a_job_that_succeeds_are_mentioned(folder: LaunchFolder) -> None:
    program = "import unicoll as dist; dist.init_process_group(); dist.barrier(); dist.dump_flight_recorder()"
    done = folder.launch("-n", "2", folder.script(program), TMPDIR=str(folder.path))
    assert done.returncode == 0
    assert f"\nunicoll.run: the last calls of the ranks: {command_to_type('trace')} /" in "\n" + done.stderr


@pytest.mark.parametrize("clock", ["right", "goes back"])
def test_the_first_failure_is_the_root_cause(folder: LaunchFolder, clock: str) -> None:
    variables = {} if clock == "right" else folder.turn_clock_back()
    script = folder.script(
        """
        import os, time
        from pathlib import Path
        from unicoll.errors import RankLostError
        rank = int(os.environ["RANK"])
        def await_end_of(rank):
            file = Path(f"pid.{rank}")
            while not file.exists():
                time.sleep(0.01)
            try:
                while Path(f"/proc/{file.read_text()}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX":
                    time.sleep(0.01)
            except OSError:
                pass
        def train():
            Path(f"new.{rank}").write_text(str(os.getpid()))
            os.replace(f"new.{rank}", f"pid.{rank}")
            if rank == 2:
                await_end_of(0)
                raise ValueError("the cause\\nin two lines")
            if rank == 0:
                raise RankLostError("rank 2 is gone", rank=2)   # seen first, but not the cause
            await_end_of(2)
            raise RuntimeError("later")
        train()
        """
    )
    done = folder.launch("--nproc-per-node=3", "--grace=60", script, **variables)
    assert done.returncode == 1
    tracebacks, _, banner = done.stderr.partition("\n\n====")
    # the last one, unless rank 1's came a second later
    cause = tracebacks.partition("rank 2:\n")[2].partition("\nrank 1:\n")[0]
    lines = cause.splitlines()
    assert lines[0] == "Traceback (most recent call last):"
    assert lines[-2:] == ["ValueError: the cause", "in two lines"]
    assert "worker_main" not in tracebacks
    assert "runpy" not in tracebacks
    others = banner.rpartition("Failures:\n")[2].partition("\n---")[0].splitlines()
    assert len(others) == 2
    assert re.match(r"  rank 0 .*: unicoll.errors.RankLostError: rank 2 is gone$", others[0])
    assert re.match(r"  rank 1 .*: RuntimeError: later$", others[1])
    assert "rank      : 2 (local_rank: 2)" in banner
    assert "traceback : ValueError: the cause (above)" in banner
    assert done.stderr.endswith("=\n")


@pytest.mark.parametrize(
    ("named", "consequences", "rank"),
    [
        ([(), (), ()], [], 0),
        ([(1,), (), ()], [0], 1),
        ([(1,), (1,), (1,)], [], 1),  # its call differs from that of the others
        ([(2,), (), ()], [1, 2], 0),  # rank 2 has failed because of rank 0
        ([(), (2,), (2,)], [], 0),  # later errors do not decide
    ],
)
def test_an_error_names_the_root_cause(
    named: list[tuple[int, ...]], consequences: list[int], rank: int
) -> None:
    failures: list[Any] = []
    for each, names in enumerate(named):
        record = ExceptionRecord(float(each), "", "", each in consequences, True, names)
        failures.append(SimpleNamespace(rank=each, failure=record))
    assert root_cause(failures).rank == rank


@pytest.mark.every(n=2)
@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["nowhere.py"], "nowhere.py: no such file"),
        (["."], "without __main__.py"),
        (["-m", "no_such_module_anywhere"], "no module named"),
        (["--no-python", "no-such-command"], "command not found"),
        (["--no-python", "./work.py"], "not executable"),
        (["--nproc-per-node=0", "work.py"], "at least one worker"),
        (["--nproc-per-node=many", "work.py"], "neither a number"),
        (["--nproc-per-node=4194305", "work.py"], "at most 4194304 processes"),
        (["--unheard-of", "work.py"], "--unheard-of"),
        (
            ["--nnodes=1:4", "work.py"],
            "torchrun --nnodes 1:4 --rdzv-backend c10d --rdzv-endpoint HOST:PORT ... work.py",
        ),
        (["--rdzv-conf=join_timeout=soon", "work.py"], "join_timeout=soon is not a number of seconds"),
        (["--nnodes=0", "work.py"], "at least 1"),
        (["--nnodes=2", "--node-rank=2", "work.py"], "--node-rank 2"),
        (["--max-restarts=-1", "work.py"], "must not be negative"),
        (["--rdzv-backend=etcd", "work.py"], "--rdzv-backend etcd"),
        (["--numa-binding=core", "work.py"], "none of node, socket, exclusive, core-complex"),
        (["--numa-binding=exclusive", "-n", "9999", "work.py"], "--numa-binding"),
        (
            ["--virtual-local-rank", "-n", "2", "CUDA_VISIBLE_DEVICES=0", "work.py"],
            "CUDA_VISIBLE_DEVICES=0 has 1",
        ),
        (["--logs-specs=x", "work.py"], "--logs-specs is not supported"),
        (["--mpi", "--nnodes=2", "work.py"], "--mpi is for one node"),
        (["--mpi", "--tee=1", "work.py"], "--tee cannot be used with --mpi"),
        (["--replace-backend=gloo,glo", "work.py"], "gloo,glo has a name that is none of gloo, nccl"),
        (["--redirects=5", "work.py"], "--redirects 5"),
        (["--tee=3:1", "work.py"], "no local rank 3"),
        (["--signals-to-handle=SIGKILL", "work.py"], "SIGKILL"),
        (["-m", "--no-python", "work.py"], "exclude each other"),
        ([], "required"),
        (["PET_NPROC_PER_NODE=x", "work.py"], ""),
        (["PET_MODULE=yes", "work.py"], ""),
        (["PYTHON_EXEC=/no/python", "work.py"], ""),
    ],
)
def test_argument_errors_are_one_line_and_status_2(
    folder: LaunchFolder, arguments: list[str], expected: str
) -> None:
    """Those of variables, too."""
    folder.script("print('not reached')")
    variables = dict(word.split("=") for word in arguments if word[0].isupper())
    done = folder.launch(*(word for word in arguments if not word[0].isupper()), **variables)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done.stderr
    assert expected in done.stderr


# No orphans.

STUBBORN = """
import os, pathlib, signal, subprocess, sys, time
def note(name, pid):
    pathlib.Path(f"pid.{name}.{pid}").write_text(f"{pid}\\n")
if IGNORES:
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
note("child", subprocess.Popen(["sleep", "600"]).pid)
note("session", subprocess.Popen(["sleep", "600"], start_new_session=True).pid)
note("worker", os.getpid())
"""
STUBBORN_WORKER = STUBBORN.replace("IGNORES", "True") + "time.sleep(600)"
WORKER = STUBBORN.replace("IGNORES", "False") + "time.sleep(600)"
FAILING_WORKER = (
    STUBBORN.replace("IGNORES", "True")
    + """
while os.environ["RANK"] == "0" and sum(bool(file.read_text()) for file in pathlib.Path().glob("pid.*")) < 6:
    time.sleep(0.01)
if os.environ["RANK"] == "0":
    os._exit(7)
time.sleep(600)
"""
)


@pytest.mark.every(n=4)
@pytest.mark.parametrize(
    ("flags", "worker", "number", "status"),
    [
        ([], STUBBORN_WORKER, signal.SIGKILL, -9),
        (["--no-python", sys.executable], STUBBORN_WORKER, signal.SIGKILL, -9),
        ([], WORKER, signal.SIGTERM, 143),
        ([], WORKER, signal.SIGINT, 130),
        ([], WORKER, signal.SIGHUP, 129),
        ([], WORKER, signal.SIGQUIT, 131),
        (["--grace=0.1", "--shutdown-timeout=0.2"], STUBBORN_WORKER, signal.SIGINT, 130),
        (["--grace=0.2", "--shutdown-timeout=0.5"], FAILING_WORKER, None, 7),
        ([], STUBBORN.replace("IGNORES", "False"), None, 0),
    ],
    ids=[
        "killed",
        "killed command",
        "SIGTERM",
        "SIGINT",
        "SIGHUP",
        "SIGQUIT",
        "ignored",
        "failure",
        "success",
    ],
)
def test_nothing_survives_the_launcher(
    folder: LaunchFolder, flags: list[str], worker: str, number: signal.Signals | None, status: int
) -> None:
    launcher = folder.start("--nproc-per-node=2", *flags, folder.script(worker))
    pids = folder.pids(6)
    if number is not None:
        assert not all_gone(pids)
        launcher.send_signal(number)
    launcher.communicate(timeout=BOUND)
    assert launcher.returncode == status
    wait_until(lambda: all_gone(pids) or number != signal.SIGKILL)  # what outlives it, ends
    assert all_gone(pids)


def test_a_second_interrupt_kills_at_once(folder: LaunchFolder) -> None:
    launcher = folder.start("--nproc-per-node=2", "--grace=600", folder.script(STUBBORN_WORKER))
    pids = folder.pids(6)
    assert launcher.stderr is not None
    launcher.send_signal(signal.SIGINT)
    assert b"got SIGINT" in launcher.stderr.readline()
    time.sleep(0.6)  # an earlier one would be ignored as a repetition of the first
    launcher.send_signal(signal.SIGINT)
    launcher.communicate(timeout=BOUND)
    assert launcher.returncode == 130
    assert all_gone(pids)


def test_a_signal_before_the_first_worker_ends_the_launcher(folder: LaunchFolder) -> None:
    """Reading a secret from a pipe to which nobody writes takes forever."""
    secret = folder.path / "secret"
    os.mkfifo(secret, 0o600)
    launcher = folder.start("--nproc-per-node=2", folder.script(""), UNICOLL_SECRET_FILE=str(secret))
    wait_until(lambda: is_caught(signal.SIGTERM, launcher.pid))
    launcher.send_signal(signal.SIGTERM)
    launcher.communicate(timeout=BOUND)
    assert launcher.returncode == 128 + signal.SIGTERM


def test_an_ignored_hangup_stays_ignored(folder: LaunchFolder) -> None:
    script = folder.script(
        """
        import os, pathlib, time
        pathlib.Path("pid.0").write_text(f"{os.getpid()}\\n")
        while not os.path.exists("go"):
            time.sleep(0.02)
        """
    )
    command = f"trap '' HUP; exec {sys.executable} -m unicoll.run {script}"
    launcher = subprocess.Popen(["sh", "-c", command], cwd=folder.path, env=environment())
    folder.started.append(launcher)
    folder.pids(1)
    launcher.send_signal(signal.SIGHUP)
    (folder.path / "go").touch()
    assert launcher.wait(BOUND) == 0


@pytest.mark.parametrize(
    ("number", "hint"), [(signal.SIGUSR1, " (init_process_group sets one)"), (signal.SIGUSR2, "")]
)
def test_a_signal_that_is_handed_on_ends_no_worker(
    folder: LaunchFolder, number: signal.Signals, hint: str
) -> None:
    """SIGUSR2 ended the launcher; batch systems send it before the end of a job."""
    launcher = folder.start("--nproc-per-node=2", folder.script(WORKER))
    pids = folder.pids(6)
    launcher.send_signal(number)
    assert launcher.stderr is not None
    line = f"unicoll.run: got {number.name}; ranks 0, 1 without a handler{hint}\n"
    assert launcher.stderr.readline() == line.encode()
    assert not any(all_gone([pid]) for pid in pids)
    launcher.send_signal(signal.SIGTERM)
    launcher.communicate(timeout=BOUND)


def test_a_warning_of_a_batch_system_reaches_the_workers(folder: LaunchFolder) -> None:
    script = """
        import os, pathlib, signal, sys
        signal.signal(signal.SIGUSR2, lambda *_: sys.exit())
        pathlib.Path("new." + os.environ["RANK"]).write_text(f"{os.getpid()}\\n")
        os.rename("new." + os.environ["RANK"], "pid." + os.environ["RANK"])
        while True:
            signal.pause()
    """
    launcher = folder.start("--nproc-per-node=2", folder.script(script))
    folder.pids(2)
    launcher.send_signal(signal.SIGUSR2)
    _, err = launcher.communicate(timeout=BOUND)
    assert (launcher.returncode, err) == (0, b"unicoll.run: got SIGUSR2; sent it to ranks 0, 1\n")


def test_workers_have_the_flags_of_the_launchers_interpreter(folder: LaunchFolder) -> None:
    script = folder.script("import sys; print(sys.flags.optimize, sys.flags.dev_mode, sys.flags.isolated)")
    flags = ["-O", "-X", "dev", "-I"]
    done = folder.python(*flags, "-m", "unicoll.run", "-n", "2", "--no-prefix", script)
    assert (done.returncode, done.stdout, done.stderr) == (0, "1 True 1\n" * 2, "")


def test_a_program_in_a_pipe(folder: LaunchFolder) -> None:
    os.mkfifo(folder.path / "pipe")
    for target in ("-", "pipe"):
        done = folder.launch("-n", "2", target)
        text = f"{target}: every worker reads the program, and a pipe can be read once: give a file"
        assert (done.returncode, text in done.stderr) == (2, True)


@pytest.mark.parametrize("call", ["run.main(['work.py'])", "unicoll.spawn(print, nprocs=1)"])
def test_no_temporary_directory(folder: LaunchFolder, call: str) -> None:
    folder.script("")
    program = (
        "import sys, tempfile, unicoll; from unicoll import run;"
        f" tempfile._candidate_tempdir_list = lambda: ['/nonexistent']; sys.exit({call})"
    )
    done = folder.python("-c", program)
    assert done.returncode == 1
    assert done.stderr.rstrip().endswith(
        "set TMPDIR to a directory that can be written to and has space left"
    )


def test_old_dump_directories_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    old, recent, notes, link = (tmp_path / f"unicoll_trace_{digit * 16}" for digit in "0123")
    other = tmp_path / "unicoll_trace_of_mine"
    for path in (old, recent, notes, other):
        path.mkdir()
        (path / ("notes.txt" if path in (recent, notes) else "rank_0.json")).touch()
    (old / "job").mkdir()
    (old / "job" / "rank_0.json").touch()
    link.symlink_to(other)
    for path in (old, notes, other, link):
        os.utime(path, (0, 0), follow_symlinks=False)
    remove_old_dumps()
    assert sorted(tmp_path.iterdir()) == sorted([recent, other, link, notes])
    assert (other / "rank_0.json").exists()


WITHOUT_PROC = ["unshare", "--mount", "sh", "-c", 'mount -t tmpfs none /proc && exec "$@"', "sh"]
USES_ALL = """
import numpy as np
import unicoll as dist

dist.init_process_group(timeout=60)
x = np.ones(1 << 16)
dist.all_reduce(x)
objects = [None, None]
dist.all_gather_object(objects, dist.get_rank())
if dist.get_rank():
    dist.send(x, 0)
else:
    dist.recv(x, 1)
print(x[0], objects)
"""


@pytest.mark.parametrize("transport", ["auto", "shm"])
def test_a_job_without_proc(folder: LaunchFolder, transport: str) -> None:
    """It failed at its first collective, for want of a file; its ranks cannot share memory."""
    if subprocess.run([*WITHOUT_PROC, "true"], capture_output=True, check=False).returncode:
        pytest.skip("no process can be without /proc here: it needs root and unshare")
    done = subprocess.run(
        [
            *WITHOUT_PROC,
            sys.executable,
            "-m",
            "unicoll.run",
            "-n",
            "2",
            "--no-prefix",
            folder.script(USES_ALL),
        ],
        cwd=folder.path,
        env=environment(UNICOLL_TRANSPORT=transport),
        capture_output=True,
        text=True,
        timeout=BOUND,
        check=False,
    )
    if transport == "auto":
        assert (done.returncode, done.stdout) == (0, "2.0 [0, 1]\n" * 2), done.stderr
    else:
        assert "UNICOLL_TRANSPORT=shm, but rank 0 " in done.stderr
        assert "cannot share memory" in done.stderr


MANY_GROUPS = """
import resource
import numpy as np
import unicoll as dist

resource.setrlimit(resource.RLIMIT_NOFILE, (128, 128))
dist.init_process_group(timeout=60)
for _ in range(128):
    dist.barrier(group=dist.new_group())
"""


@pytest.mark.every(n=2)
@pytest.mark.parametrize("transport", ["tcp", "shm"])
def test_too_few_open_files_for_the_groups(folder: LaunchFolder, transport: str) -> None:
    """The error asked whether another program listened on the port."""
    done = folder.launch("-n", "2", folder.script(MANY_GROUPS), UNICOLL_TRANSPORT=transport)
    assert done.returncode == 1
    assert re.search(
        r"rank \d \(host .*cannot be reached at .*: its process can open no more files: the limit is 128 \(ulimit -n\)",
        done.stderr,
    )
    assert "another program" not in done.stderr


def test_too_few_open_files_for_the_workers(folder: LaunchFolder) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if not 0 <= hard <= 1 << 20:
        pytest.skip("the limit of open files is too high")
    done = folder.launch("-n", str(hard), folder.script(""))
    assert done.returncode == 1
    words = r"the launcher of \d+ processes needs \d+ open files in process \d+; its limit is"
    assert re.search(words, done.stderr)


def test_no_scratch_directory_is_left(folder: LaunchFolder) -> None:
    scratch = folder.path / "tmp"
    scratch.mkdir()
    assert folder.launch(folder.script("raise ValueError"), TMPDIR=str(scratch)).returncode == 1
    assert list(scratch.iterdir()) == []
    launcher = folder.start(folder.script(WORKER), TMPDIR=str(scratch))
    folder.pids(3)
    assert list(scratch.iterdir()) != []
    launcher.kill()
    wait_until(lambda: list(scratch.iterdir()) == [])


# What a worker is.

PRINTS_ITS_STATE = """
import sys
print(sys.argv, sys.path[0], __name__, __file__, __package__, __doc__, type(__loader__).__name__)
print(__spec__ and __spec__.name, sorted(globals()), sys.modules["__main__"].__dict__ is globals())
print(sorted(name for name in sys.modules if name.split(".")[0] in ("unicoll", "numpy", "runpy")))
"""


@pytest.mark.every(n=2)
@pytest.mark.parametrize(
    "target",
    [["sub/prints_state.py"], ["link.py"], ["-m", "package.prints_state"], ["-m", "package"], ["package"]],
)
@pytest.mark.parametrize("isolating", [{}, {"PYTHONSAFEPATH": "1"}], ids=str)
def test_a_worker_runs_as_under_plain_python(
    folder: LaunchFolder, target: list[str], isolating: dict[str, str]
) -> None:
    """A script, a link to one, a module and a directory."""
    for name in ("sub/prints_state.py", "package/prints_state.py", "package/__main__.py"):
        folder.script(PRINTS_ITS_STATE, name)
    folder.script("", "package/__init__.py")
    (folder.path / "link.py").symlink_to("sub/prints_state.py")
    if "-m" in target and isolating:
        isolating = {
            **isolating,
            "PYTHONPATH": os.pathsep.join([environment()["PYTHONPATH"], str(folder.path)]),
        }
    plain = folder.python(*target, "a", "-b", "--", "c", env=environment(**isolating))
    assert plain.returncode == 0, plain.stderr
    assert folder.launch(*target, "a", "-b", "--", "c", **isolating).stdout == plain.stdout


@pytest.mark.parametrize(
    "source",
    [
        "import sys; sys.exit(5)",
        "import sys; sys.exit('words')",
        "raise SystemExit",
        "def f():\n    raise KeyError('k')\nf()",
        "def f(:\n",
        "raise KeyboardInterrupt",
        "import sys\nsys.excepthook = lambda *e: print('hook', e[0].__name__, file=sys.stderr)\n1 / 0",
        "import atexit\natexit.register(lambda: print('at exit', __name__))\nraise ValueError('x')",
        "try:\n    1 / 0\nexcept ZeroDivisionError as error:\n    raise ValueError('y') from error",
    ],
)
def test_exit_codes_are_as_under_plain_python(folder: LaunchFolder, source: str) -> None:
    script = folder.script(source)
    worker_main = str(ROOT / "unicoll" / "run" / "worker_main.py")
    ends = []
    for command in ([script], [worker_main, str(os.getpid()), "print", "script", script]):
        done = folder.python(*command)
        ends.append((done.returncode, done.stdout, done.stderr))
    assert ends[1] == ends[0]


def test_python_exec_is_honoured(folder: LaunchFolder) -> None:
    wrapper = folder.path / "mypython"
    # no exec: the worker is a grandchild
    wrapper.write_text(f'#!/bin/sh\nWRAPPED=yes {sys.executable} "$@"\n')
    wrapper.chmod(0o755)
    script = folder.script("import os; print(os.environ['WRAPPED'])")
    assert folder.launch(script, PYTHON_EXEC=str(wrapper)).stdout == "yes\n"


def test_launch_script_from_elsewhere(folder: LaunchFolder) -> None:
    script = folder.script("import unicoll.errors; print(unicoll.errors.__file__)")
    env = environment(PYTHONPATH=os.pathsep.join(PYTHONPATH))
    done = folder.python(str(ROOT / "scripts" / "launch.py"), "--nproc-per-node=2", script, env=env)
    expected = ROOT / "unicoll" / "errors.py"
    assert sorted(done.stdout.splitlines()) == [f"[default{r}]:{expected}" for r in (0, 1)], done.stderr


@pytest.mark.every(n=0)
@pytest.mark.torch
def test_a_torch_program_runs(folder: LaunchFolder) -> None:
    pytest.importorskip("torch.distributed")
    script = folder.script(
        """
        import torch
        import torch.distributed as dist
        dist.init_process_group("gloo")
        t = torch.ones(3) * (dist.get_rank() + 1)
        dist.all_reduce(t)
        print(t.tolist())
        dist.destroy_process_group()
        """
    )
    done = folder.launch("--nproc-per-node=2", script)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["[default0]:[3.0, 3.0, 3.0]", "[default1]:[3.0, 3.0, 3.0]"]


def test_a_subprocess_cannot_join_in_place_of_its_rank(folder: LaunchFolder) -> None:
    """It can with a launcher of its own."""
    script = folder.script(
        """
        import os, subprocess, sys
        import unicoll as dist
        try:
            dist.init_process_group(timeout=60)
        except dist.DistArgumentError as error:
            print(f"refused: {error}", flush=True)
            sys.exit()
        if len(sys.argv) == 1 and dist.get_rank() == 1:
            print(f"pid {os.getpid()}", flush=True)
            subprocess.run([sys.executable, __file__, "inner"], check=True)
            launcher = ["-m", "unicoll.run", "--no-prefix", "--nproc-per-node", "2"]
            subprocess.run([sys.executable, *launcher, __file__, "inner"], check=True)
        dist.barrier()
        print(f"rank {dist.get_rank()} of {dist.get_world_size()}", flush=True)
        dist.destroy_process_group()
        assert "UNICOLL_JOINED" not in os.environ
        """
    )
    done = folder.launch("--nproc-per-node=3", "--no-prefix", script)
    assert done.returncode == 0, done
    pid, refused, *ends = done.stdout.splitlines()
    assert refused.startswith("refused: rank 1 of 3 (RANK=1, WORLD_SIZE=3, ")
    assert f") has joined already: process {pid.split()[1]} (" in refused
    assert sorted(ends[:2]) == ["rank 0 of 2", "rank 1 of 2"]
    assert sorted(ends[2:]) == ["rank 0 of 3", "rank 1 of 3", "rank 2 of 3"]
