"""The launcher: ``python -m unicoll.run``."""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unicoll.net.formatting import ranks_text
from unicoll.net.signal_handlers import is_caught
from unicoll.run.dump_directory import remove_old_dumps
from unicoll.run.failure import root_cause
from unicoll.run.output import Lines
from unicoll.run.tracebacks import ExceptionRecord

ROOT = Path(__file__).resolve().parents[2]
BOUND = 180.0
SECRET = "0123456789abcdef0123456789abcdef"
# Whatever runs the tests may have had signals ignored (a shell's background job, nohup), and that is inherited.
INTERRUPTIBLE = (
    "import os, signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); "
    "[signal.signal(n, signal.SIG_DFL) for n in (signal.SIGHUP, signal.SIGQUIT, signal.SIGTERM)]; "
    "sys.argv[0] = sys.executable; os.execv(sys.executable, sys.argv)"
)


def environment(**extra: str) -> dict[str, str]:
    hidden = ("PET_", "UNICOLL_", "TORCHELASTIC_", "OMP_", "MASTER_", "PYTHON")
    kept = {k: v for k, v in os.environ.items() if not k.startswith(hidden)}
    return {**kept, "PYTHONPATH": os.pathsep.join([str(ROOT), *PYTHONPATH]), **extra}


PYTHONPATH = [p for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p]


_RANKS = r"ranks? ([\d, -]+)"


def _ranks_in(text: str) -> set[int]:
    ends = [[int(end) for end in span.split("-")] for span in text.split(", ")]
    return {rank for span in ends for rank in range(span[0], span[-1] + 1)}


def with_late_ranks(output: str) -> str:
    """The launcher's output as if no rank had ended late: not "rank 3: the same as rank 0", but 3 beside rank 0."""
    late: dict[int, set[int]] = {}
    for ranks, shown in re.findall(rf"^{_RANKS}: the same as rank (\d+)\n", output, re.M):
        late.setdefault(int(shown), set()).update(_ranks_in(ranks))

    def complete(found: re.Match[str]) -> str:
        ranks = _ranks_in(found[1])
        return ranks_text(ranks.union(*(late[rank] for rank in ranks & late.keys()))) + found[2]

    output = re.sub(rf"^{_RANKS}: the same as rank \d+\n", "", output, flags=re.M)
    return re.sub(rf"^{_RANKS}(:| \(this is)", complete, output, flags=re.M)


class LaunchFolder:
    """A directory to write worker scripts to and to launch from."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.started: list[subprocess.Popen[bytes]] = []

    def script(self, source: str, name: str = "work.py") -> str:
        file = self.path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(textwrap.dedent(source))
        return name

    def start(self, *arguments: str, **extra: str) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            [sys.executable, "-c", INTERRUPTIBLE, "-m", "unicoll.run", *arguments],
            cwd=self.path,
            env=environment(**extra),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        self.started.append(process)
        return process

    def launch(self, *arguments: str, **extra: str) -> subprocess.CompletedProcess[str]:
        process = self.start(*arguments, **extra)
        out, err = process.communicate(timeout=BOUND)
        return subprocess.CompletedProcess(arguments, process.returncode, out.decode(), err.decode())

    def pids(self, number: int) -> list[int]:
        """The pids that so many processes of the job have written to files named ``pid.*``."""
        files: list[Path] = []

        def there() -> bool:
            files[:] = [f for f in self.path.glob("pid.*") if f.read_text().endswith("\n")]
            return len(files) >= number

        wait_until(there)
        return [int(file.read_text()) for file in files]


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[LaunchFolder]:
    folder = LaunchFolder(tmp_path)
    yield folder
    for process in folder.started:
        if process.poll() is None:
            process.kill()
        process.wait()
        for pipe in (process.stdout, process.stderr):
            if pipe is not None:
                pipe.close()


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + BOUND
    while not condition():
        assert time.monotonic() < deadline, "the condition did not become true in time"
        time.sleep(0.02)


def runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def all_gone(pids: list[int]) -> bool:
    return not any(runs(pid) for pid in pids)


# Environment.


def test_worker_environment(folder: LaunchFolder) -> None:
    script = folder.script("import json, os; print(json.dumps(dict(os.environ)))")
    done = folder.launch("--nproc-per-node=3", "--role=trainer", "--rdzv_id", "job7", "--no-prefix", script)
    assert done.returncode == 0, done.stderr
    workers = sorted((json.loads(line) for line in done.stdout.splitlines()), key=lambda e: int(e["RANK"]))
    assert len(workers) == 3
    for rank, env in enumerate(workers):
        expected = {
            "RANK": rank,
            "LOCAL_RANK": rank,
            "ROLE_RANK": rank,
            "GROUP_RANK": 0,
            "ROLE_NAME": "trainer",
            "WORLD_SIZE": 3,
            "LOCAL_WORLD_SIZE": 3,
            "GROUP_WORLD_SIZE": 1,
            "ROLE_WORLD_SIZE": 3,
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


@pytest.mark.parametrize("flag", ["", "--use-env", "--use_env"])
def test_the_interface_of_torchs_launch(folder: LaunchFolder, flag: str) -> None:
    """As torch.distributed.launch: --local-rank is the program's first argument unless --use-env is given."""
    script = folder.script("import os, sys; print(os.environ['LOCAL_RANK'], *sys.argv[1:])")
    flags = ["--nproc_per_node=2", "--no-prefix", *filter(None, [flag])]
    done = subprocess.run(
        [sys.executable, "-m", "unicoll.launch", *flags, script, "-x"],
        cwd=folder.path,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=BOUND,
        check=True,
    )
    expected = ["0 -x", "1 -x"] if flag else ["0 --local-rank=0 -x", "1 --local-rank=1 -x"]
    assert sorted(done.stdout.splitlines()) == expected, done.stderr


def test_the_users_secret_and_thread_count_are_kept(folder: LaunchFolder) -> None:
    script = folder.script("import os; print(os.environ['UNICOLL_SECRET'], os.environ['OMP_NUM_THREADS'])")
    done = folder.launch("--nproc-per-node=2", script, UNICOLL_SECRET=SECRET, OMP_NUM_THREADS="5")
    assert sorted(done.stdout.splitlines()) == [f"[default{r}]:{SECRET} 5" for r in (0, 1)]


def test_a_relative_secret_file_after_a_change_of_the_directory(folder: LaunchFolder) -> None:
    secret = folder.path / "secret"
    secret.write_text(SECRET)
    secret.chmod(0o600)
    script = folder.script(
        """
        import os
        import unicoll
        os.chdir("/")
        unicoll.init_process_group()
        unicoll.destroy_process_group()
        """
    )
    done = folder.launch("--nproc-per-node=2", script, UNICOLL_SECRET_FILE="secret")
    assert (done.returncode, done.stderr) == (0, "")


def test_workers_reach_the_store_and_learn_how_a_rank_ended(folder: LaunchFolder) -> None:
    script = folder.script(
        """
        import json, os, signal
        from unicoll.net.secret import find_secret
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


def test_defaults_come_from_pet_variables(folder: LaunchFolder) -> None:
    script = folder.script("import os; print(os.environ['RANK'])")
    done = folder.launch(script, PET_NPROC_PER_NODE="2", PET_ROLE="r", PET_STANDALONE="1")
    assert sorted(done.stdout.splitlines()) == ["[r0]:0", "[r1]:1"]
    module = folder.launch("--nproc_per_node", "1", "work", PET_NPROC_PER_NODE="2", PET_MODULE="1")
    assert module.stdout == "0\n"


def test_two_nodes_with_a_static_master(folder: LaunchFolder) -> None:
    script = folder.script(
        """
        import os
        names = ["RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"]
        print(*(os.environ[name] for name in names), os.environ.get("UNICOLL_STORE"))
        """
    )
    flags = ("--nnodes=2:2", "--nproc-per-node=2", "--rdzv-endpoint=localhost:29611", "--no-prefix")
    for node in (0, 1):
        done = folder.launch(*flags, f"--node_rank={node}", script, UNICOLL_SECRET=SECRET)
        assert done.stderr == ""
        expected = [f"{2 * node + k} {k} {node} 4 localhost 29611 None" for k in (0, 1)]
        assert sorted(done.stdout.splitlines()) == expected
    assert "WARNING" in folder.launch(*flags, script).stderr


def test_the_error_has_a_port_in_use(folder: LaunchFolder) -> None:
    import socket

    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
        done = folder.launch(f"--master-port={port}", folder.script("print('no')"))
    assert done.returncode == 1
    assert str(port) in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.slow
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
            print(port)
        """
    )
    jobs = [folder.start("--nproc-per-node=2", "--no-prefix", script) for _ in range(20)]
    ports = []
    for job in jobs:
        out, err = job.communicate(timeout=BOUND)
        assert job.returncode == 0, err.decode()
        ports.append(out.strip())
    assert len(ports) == 20


# Output.


def test_lines_are_prefixed_and_the_streams_are_separate(folder: LaunchFolder) -> None:
    script = folder.script("import os, sys; print('out'); print('err', file=sys.stderr)")
    done = folder.launch("--nproc-per-node=2", "--role=r", script)
    assert sorted(done.stdout.splitlines()) == ["[r0]:out", "[r1]:out"]
    assert sorted(done.stderr.splitlines()) == ["[r0]:err", "[r1]:err"]


def test_a_role_that_is_not_utf_8(folder: LaunchFolder) -> None:
    script = folder.script("print('x')")
    process = folder.start("--nproc-per-node=2", "--role", os.fsdecode(b"r\xe9"), script)
    out, err = process.communicate(timeout=BOUND)
    assert (process.returncode, err) == (0, b"")
    assert sorted(out.splitlines()) == [b"[r\xe90]:x", b"[r\xe91]:x"]


def test_prefix_template_and_rank_filter(folder: LaunchFolder) -> None:
    script = folder.script("print('x')")
    template = "<${role_name}/${rank}/${local_rank}> "
    done = folder.launch(
        "--nproc-per-node=3",
        "--local-ranks-filter=0,2",
        script,
        TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE=template,
    )
    assert sorted(done.stdout.splitlines()) == ["<default/0/0> x", "<default/2/2> x"]


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
    done = folder.launch("--nproc-per-node=4", script)
    for rank in range(4):
        lines = [line for line in done.stdout.splitlines() if line.startswith(f"[default{rank}]:")]
        assert lines == [f"[default{rank}]:{str(rank) * 70}.{i}" for i in range(300)]
    assert len(done.stdout.splitlines()) == 1200


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
    command = [sys.executable, "-m", "unicoll.run", "-n", "2", folder.script("print('x')")]
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            command, stdout=full, stderr=subprocess.PIPE, cwd=folder.path, env=environment(), timeout=BOUND
        )
    assert done.stderr == b"unicoll.run: standard output: No space left on device; no longer written\n"
    assert done.returncode == 0


def test_a_module_in_a_working_directory_that_has_been_removed(folder: LaunchFolder) -> None:
    folder.script("print('x')")
    (folder.path / "gone").mkdir()
    program = "import os, sys; os.rmdir('../gone'); os.execv(sys.executable, sys.orig_argv[3:])"
    command = [sys.executable, "-c", program, sys.executable, "-m", "unicoll.run", "-m", "work"]
    variables = environment()
    variables["PYTHONPATH"] += f"{os.pathsep}{folder.path}"
    done = subprocess.run(
        command, cwd=folder.path / "gone", env=variables, capture_output=True, text=True, timeout=BOUND
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "x\n", "")


def test_a_single_worker_writes_to_the_console(folder: LaunchFolder) -> None:
    done = folder.launch(folder.script("import sys; sys.stdout.write('as it is'); sys.exit(0)"))
    assert done.stdout == "as it is"


def test_stdin_goes_to_local_rank_0(folder: LaunchFolder) -> None:
    script = folder.script("import sys; print(repr(sys.stdin.read()))")
    done = subprocess.run(
        [sys.executable, "-m", "unicoll.run", "--nproc-per-node=2", script],
        input="typed",
        capture_output=True,
        text=True,
        cwd=folder.path,
        env=environment(),
        timeout=BOUND,
        check=True,
    )
    assert sorted(done.stdout.splitlines()) == ["[default0]:'typed'", "[default1]:''"]


def test_prompts_show_on_a_terminal(folder: LaunchFolder) -> None:
    script = folder.script(
        """
        import os
        if os.environ["RANK"] == "0":
            print("hello", input("name? "))
        """
    )
    terminal, worker_end = os.openpty()
    launcher = subprocess.Popen(
        [sys.executable, "-m", "unicoll.run", "--nproc-per-node=2", script],
        cwd=folder.path,
        env=environment(),
        stdin=worker_end,
        stdout=worker_end,
        stderr=worker_end,
    )
    folder.started.append(launcher)
    os.close(worker_end)
    shown = b""

    def shows(text: bytes) -> bool:
        nonlocal shown
        if text not in shown:
            shown += os.read(terminal, 1000)
        return text in shown

    try:
        wait_until(lambda: shows(b"[default0]:name? "))
        os.write(terminal, b"Ada\n")
        wait_until(lambda: shows(b"[default0]:name? hello Ada"))
        assert launcher.wait(BOUND) == 0
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
    done = folder.launch(
        "--nproc-per-node=2", "--log-dir=logs", "-r", "0:3,1:1", "-t", "1:2", "--rdzv-id=j", script
    )
    assert done.returncode == 1
    (launch,) = (folder.path / "logs").iterdir()
    assert launch.name.startswith("j_")
    attempt = launch / "attempt_0"
    assert (attempt / "0" / "stdout.log").read_text() == "out\n"
    assert (attempt / "0" / "stderr.log").read_text() == "err\n"
    assert (attempt / "1" / "stdout.log").read_text() == "out\n"
    logged = (attempt / "1" / "stderr.log").read_text()
    assert logged.startswith("err\nTraceback")
    assert done.stdout == ""
    shown = [
        line.removeprefix("[default1]:")
        for line in done.stderr.splitlines()
        if line.startswith("[default1]:")
    ]
    assert shown == ["err"]
    assert f"\nrank 1:\n{logged.removeprefix('err' + chr(10))}\n" in done.stderr  # without a prefix, and once
    assert done.stderr.count("Traceback") == 1
    assert not any(line.startswith("[default0]:") for line in done.stderr.splitlines())
    record = json.loads((attempt / "1" / "error.json").read_text())["message"]
    assert record["message"] == "ValueError: kept"
    assert record["extraInfo"]["py_callstack"].startswith("Traceback")
    assert abs(int(record["extraInfo"]["timestamp"]) - time.time()) < 3600
    assert str(attempt / "1" / "error.json").removeprefix(str(folder.path) + "/") in done.stderr


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


def test_exit_code_of_the_failing_rank(folder: LaunchFolder) -> None:
    script = folder.script("import os, sys; sys.exit(3 if os.environ['RANK'] == '1' else 0)")
    done = folder.launch("--nproc-per-node=3", script)
    assert done.returncode == 3
    assert "work.py FAILED" in done.stderr
    assert "rank      : 1 (local_rank: 1)" in done.stderr


def test_a_worker_that_has_changed_its_directory_records_its_exception(folder: LaunchFolder) -> None:
    script = folder.script("import os; os.chdir('/'); raise ValueError('moved')")
    done = folder.launch("--nproc-per-node=2", "--grace=60", "--log-dir=logs", script)
    assert done.stderr.count("ValueError: moved") == 2  # the traceback of both ranks, and the summary
    assert "traceback : ValueError: moved (above)" in done.stderr


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


@pytest.mark.every(4)
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
    commands = re.findall(r"^  last calls: python (-m unicoll\.trace (.*))$", done.stderr, re.M)
    if where == "disabled":
        assert (commands, list(scratch.iterdir())) == ([], [])
        return
    ((command, directory),) = commands
    if where == "default":
        assert re.fullmatch(re.escape(str(scratch)) + r"/unicoll_trace_[0-9a-f]{16}", directory)
        assert list(scratch.iterdir()) == [Path(directory)]
    else:
        pattern = r"own" if where == "variable" else re.escape(str(folder.path)) + r"/logs/[^/]+/trace"
        assert re.fullmatch(pattern, directory)
        assert list(scratch.iterdir()) == []
    shown = subprocess.run(
        [sys.executable, *command.split()],
        cwd=folder.path,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=BOUND,
    )
    assert (shown.returncode, shown.stderr) == (1, "")
    first = shown.stdout.partition("\n")[0]
    assert first.startswith(
        "rank 1 has not called all_reduce #2 of group 'world' (float32[4], SUM); rank 0 has waited"
    )
    assert first.endswith("; rank 1 is at work.py:9 in <module>")


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
    assert re.search(
        r"^unicoll\.run: the last calls of the ranks: python -m unicoll\.trace /", done.stderr, re.M
    )


@pytest.mark.parametrize("name", ["SIGKILL", "SIGSEGV", "SIGABRT"])
def test_exit_code_of_a_signal(folder: LaunchFolder, name: str) -> None:
    script = folder.script(
        f"""
        import os, signal, time
        if os.environ["RANK"] == "2":
            os.kill(os.getpid(), signal.{name})
        time.sleep(600)
        """
    )
    done = folder.launch("--nproc-per-node=3", "--grace=0.1", script)
    number = getattr(signal, name)
    assert done.returncode == 128 + number
    assert f"Signal {int(number)} ({name}) received by PID" in done.stderr
    assert f"exitcode  : -{int(number)} (pid: " in done.stderr
    assert "(stopped by the launcher: ranks 0, 1)" in done.stderr


def test_a_crash_prints_the_stack(folder: LaunchFolder) -> None:
    script = folder.script(
        """
        import os, signal
        def inner():
            os.kill(os.getpid(), signal.SIGSEGV)
        inner()
        """
    )
    done = folder.launch("--nproc-per-node=2", script)
    assert done.returncode == 139
    last = done.stderr.rpartition("wrote to stderr:\n")[2].partition("====")[0]
    assert "Segmentation fault" in last
    assert "in inner" in last


def test_the_first_failure_is_the_root_cause(folder: LaunchFolder) -> None:
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
    done = folder.launch("--nproc-per-node=3", "--grace=60", script)
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


def test_a_failed_worker_that_does_not_end_is_a_failure(folder: LaunchFolder) -> None:
    script = folder.script(
        """
        import threading, time
        threading.Thread(target=time.sleep, args=(600,)).start()
        raise ValueError("and yet it runs")
        """
    )
    done = folder.launch("--nproc-per-node=1", "--grace=0.2", script)
    assert done.returncode == 1
    assert done.stderr.startswith("Traceback")
    assert done.stderr.count("\nValueError: and yet it runs\n") == 1


@pytest.mark.every(2)
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
        (["--nnodes=1:4", "work.py"], "elastic"),
        (["--nnodes=0", "work.py"], "at least 1"),
        (["--nnodes=2", "--node-rank=2", "work.py"], "--node-rank 2"),
        (["--max-restarts=3", "work.py"], "--max-restarts"),
        (["--nnodes=2", "--rdzv-backend=c10d", "work.py"], "--rdzv-backend c10d"),
        (["--rdzv-backend=etcd", "work.py"], "--rdzv-backend etcd"),
        (["--numa-binding=node", "work.py"], "--numa-binding is not supported"),
        (["--redirects=5", "work.py"], "--redirects 5"),
        (["--tee=3:1", "work.py"], "no local rank 3"),
        (["--signals-to-handle=SIGKILL", "work.py"], "SIGKILL"),
        (["-m", "--no-python", "work.py"], "exclude each other"),
        ([], "required"),
    ],
)
def test_argument_errors_are_one_line_and_status_2(
    folder: LaunchFolder, arguments: list[str], expected: str
) -> None:
    folder.script("print('not reached')")
    done = folder.launch(*arguments)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert expected in done.stderr


def test_errors_in_pet_variables_and_python_exec(folder: LaunchFolder) -> None:
    script = folder.script("print('not reached')")
    for name, value in {"PET_NPROC_PER_NODE": "x", "PET_MODULE": "yes", "PYTHON_EXEC": "/no/python"}.items():
        done = folder.launch(script, **{name: value})
        assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr


# No orphans.

STUBBORN = """
import os, pathlib, signal, subprocess, sys, time
def note(name, pid):
    pathlib.Path(f"pid.{name}.{pid}").write_text(f"{pid}\\n")
if MASKED:
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
note("child", subprocess.Popen(["sleep", "600"]).pid)
note("session", subprocess.Popen(["sleep", "600"], start_new_session=True).pid)
note("worker", os.getpid())
time.sleep(600)
"""


@pytest.mark.every(2)
@pytest.mark.parametrize("python", [True, False])
def test_nothing_survives_a_killed_launcher(folder: LaunchFolder, python: bool) -> None:
    script = folder.script(STUBBORN.replace("MASKED", "True"))
    command = [script] if python else ["--no-python", sys.executable, script]
    launcher = folder.start("--nproc-per-node=2", *command)
    pids = folder.pids(6)
    assert not all_gone(pids)
    launcher.kill()
    launcher.wait()
    wait_until(lambda: all_gone(pids))


def test_nothing_survives_a_failure(folder: LaunchFolder) -> None:
    fail = """if os.environ['RANK'] == '0':
    while sum(bool(file.read_text()) for file in pathlib.Path().glob("pid.*")) < 6:
        time.sleep(0.01)
    os._exit(7)
time.sleep(600)
"""
    script = folder.script(STUBBORN.replace("MASKED", "True").replace("time.sleep(600)", fail))
    done = folder.launch("--nproc-per-node=2", "--grace=0.2", "--shutdown-timeout=0.5", script)
    assert done.returncode == 7
    assert all_gone(folder.pids(6))


def test_nothing_survives_success(folder: LaunchFolder) -> None:
    text = STUBBORN.replace("MASKED", "False").replace("time.sleep(600)", "")
    done = folder.launch("--nproc-per-node=2", folder.script(text))
    assert done.returncode == 0, done.stderr
    assert all_gone(folder.pids(6))


@pytest.mark.every(3)
@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT"])
def test_a_signal_to_the_launcher_ends_the_job(folder: LaunchFolder, name: str) -> None:
    launcher = folder.start("--nproc-per-node=2", folder.script(STUBBORN.replace("MASKED", "False")))
    pids = folder.pids(6)
    launcher.send_signal(getattr(signal, name))
    launcher.communicate(timeout=BOUND)
    assert launcher.returncode == 128 + getattr(signal, name)
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


def test_old_dump_directories_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    old, recent = (tmp_path / f"unicoll_trace_{digit * 16}" for digit in "01")
    other, link = tmp_path / "unicoll_trace_of_mine", tmp_path / f"unicoll_trace_{'2' * 16}"
    for path in (old, recent, other):
        path.mkdir()
        (path / "rank_0.json").touch()
    link.symlink_to(other)
    for path in (old, other, link):
        os.utime(path, (0, 0), follow_symlinks=False)
    (recent / "rank_0.json").rename(recent / "notes.txt")
    old_with_notes = tmp_path / f"unicoll_trace_{'3' * 16}"
    old_with_notes.mkdir()
    (old_with_notes / "notes.txt").touch()
    os.utime(old_with_notes, (0, 0))
    remove_old_dumps()
    assert sorted(tmp_path.iterdir()) == sorted([recent, other, link, old_with_notes])
    assert (other / "rank_0.json").exists()


def test_too_few_open_files_for_the_workers(folder: LaunchFolder) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if not 0 <= hard <= 1 << 20:
        pytest.skip("the limit of open files is too high")
    launcher = folder.start("-n", str(hard), folder.script(""))
    _, errors = launcher.communicate(timeout=BOUND)
    assert launcher.returncode == 1
    assert re.search(
        rb"the launcher of \d+ processes needs \d+ open files in process \d+; its limit is", errors
    )


def test_a_request_for_dumps_to_workers_that_write_none(folder: LaunchFolder) -> None:
    launcher = folder.start("--nproc-per-node=2", folder.script(STUBBORN.replace("MASKED", "False")))
    pids = folder.pids(6)
    launcher.send_signal(signal.SIGUSR1)
    assert launcher.stderr is not None
    assert launcher.stderr.readline() == (
        b"unicoll.run: got SIGUSR1; ranks 0, 1 without a handler (init_process_group sets one)\n"
    )
    assert all(map(runs, pids))
    launcher.send_signal(signal.SIGTERM)
    launcher.communicate(timeout=BOUND)


def test_workers_that_ignore_signals_are_killed(folder: LaunchFolder) -> None:
    script = folder.script(STUBBORN.replace("MASKED", "True"))
    launcher = folder.start("--nproc-per-node=2", "--grace=0.1", "--shutdown-timeout=0.2", script)
    pids = folder.pids(6)
    launcher.send_signal(signal.SIGINT)
    launcher.communicate(timeout=BOUND)
    assert launcher.returncode == 130
    assert all_gone(pids)


def test_a_second_interrupt_kills_at_once(folder: LaunchFolder) -> None:
    script = folder.script(STUBBORN.replace("MASKED", "True"))
    launcher = folder.start("--nproc-per-node=2", "--grace=600", script)
    pids = folder.pids(6)
    assert launcher.stderr is not None
    launcher.send_signal(signal.SIGINT)
    assert b"got SIGINT" in launcher.stderr.readline()
    time.sleep(0.6)  # an earlier one would be ignored as a repetition of the first
    launcher.send_signal(signal.SIGINT)
    launcher.communicate(timeout=BOUND)
    assert launcher.returncode == 130
    assert all_gone(pids)


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


def test_no_scratch_directory_is_left(folder: LaunchFolder) -> None:
    scratch = folder.path / "tmp"
    scratch.mkdir()
    assert folder.launch(folder.script("raise ValueError"), TMPDIR=str(scratch)).returncode == 1
    assert list(scratch.iterdir()) == []
    launcher = folder.start(folder.script(STUBBORN.replace("MASKED", "False")), TMPDIR=str(scratch))
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


@pytest.mark.every(2)
@pytest.mark.parametrize("isolating", [{}, {"PYTHONSAFEPATH": "1"}])
def test_a_script_runs_as_under_plain_python(folder: LaunchFolder, isolating: dict[str, str]) -> None:
    script = folder.script(PRINTS_ITS_STATE, "sub/prints_state.py")
    (folder.path / "link.py").symlink_to(script)
    for name in (script, "link.py"):
        plain = subprocess.run(
            [sys.executable, name, "a", "-b", "--", "c"],
            cwd=folder.path,
            env=environment(**isolating),
            capture_output=True,
            text=True,
            check=True,
        )
        assert folder.launch(name, "a", "-b", "--", "c", **isolating).stdout == plain.stdout


def test_a_module_and_a_directory_run_as_under_plain_python(folder: LaunchFolder) -> None:
    folder.script("", "package/__init__.py")
    folder.script(PRINTS_ITS_STATE, "package/prints_state.py")
    folder.script(PRINTS_ITS_STATE, "package/__main__.py")
    for target in (["-m", "package.prints_state"], ["-m", "package"], ["package"]):
        plain = subprocess.run(
            [sys.executable, *target, "a"],
            cwd=folder.path,
            env=environment(),
            capture_output=True,
            text=True,
            check=True,
        )
        assert folder.launch(*target, "a").stdout == plain.stdout


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
        done = subprocess.run(
            [sys.executable, *command], cwd=folder.path, env=environment(), capture_output=True, text=True
        )
        ends.append((done.returncode, done.stdout, done.stderr))
    assert ends[1] == ends[0]


def test_workers_can_use_multiprocessing(folder: LaunchFolder) -> None:
    script = folder.script(
        """
        import multiprocessing
        def double(x):
            return 2 * x
        if __name__ == "__main__":
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                print(pool.map(double, [1, 2]))
        """
    )
    done = folder.launch("--nproc-per-node=2", script)
    assert sorted(done.stdout.splitlines()) == ["[default0]:[2, 4]", "[default1]:[2, 4]"], done.stderr
    assert done.stderr == ""


def test_commands_that_are_not_python(folder: LaunchFolder) -> None:
    done = folder.launch("--nproc-per-node=2", "--no-python", "sh", "-c", "echo $RANK $1; exit 4", "-", "arg")
    assert done.returncode == 4
    assert sorted(done.stdout.splitlines()) == ["[default0]:0 arg", "[default1]:1 arg"]


def test_the_root_cause_of_commands_is_not_an_error_that_reports_another_rank(folder: LaunchFolder) -> None:
    """A command has no record of its exception, but the last line of its stderr."""
    script = folder.script(
        """
        import os, time
        from unicoll.errors import RankLostError
        if os.environ["RANK"] == "0":
            raise RankLostError("rank 1 is gone", rank=1)  # seen first, but not the cause
        time.sleep(0.5)
        raise ValueError("the cause")
        """
    )
    done = folder.launch("--nproc-per-node=2", "--grace=60", "--no-python", sys.executable, script)
    failures, _, root = done.stderr.partition("Root Cause")
    assert re.search(r"rank 0 .*: unicoll.errors.RankLostError: rank 1 is gone$", failures, re.MULTILINE)
    assert re.search(r"rank +: 1 ", root)


def test_a_signal_is_the_root_cause_whatever_the_killed_command_has_written(folder: LaunchFolder) -> None:
    """The last line on stderr was of an exception that it had handled."""
    script = folder.script(
        """
        import os, signal, sys, time
        if os.environ["RANK"] == "0":
            print("unicoll.errors.RankLostError: rank 1 left, and we go on", file=sys.stderr, flush=True)
            os.symlink(str(os.getpid()), "pid")
            os.kill(os.getpid(), signal.SIGKILL)
        while not os.path.islink("pid") or os.path.exists(f"/proc/{os.readlink('pid')}"):
            time.sleep(0.01)  # until the launcher has noticed the end of rank 0
        sys.exit(3)
        """
    )
    done = folder.launch("--nproc-per-node=2", "--no-python", sys.executable, script)
    _, _, root = done.stderr.partition("Root Cause")
    assert re.search(r"rank +: 0 ", root)
    assert "SIGKILL" in root


def test_python_exec_is_honoured(folder: LaunchFolder) -> None:
    wrapper = folder.path / "mypython"
    wrapper.write_text(
        f'#!/bin/sh\nWRAPPED=yes {sys.executable} "$@"\n'
    )  # no exec: the worker is a grandchild
    wrapper.chmod(0o755)
    script = folder.script("import os; print(os.environ['WRAPPED'])")
    assert folder.launch(script, PYTHON_EXEC=str(wrapper)).stdout == "yes\n"


def test_launch_script_from_elsewhere(folder: LaunchFolder) -> None:
    script = folder.script("import unicoll.errors; print(unicoll.errors.__file__)")
    env = environment()
    env["PYTHONPATH"] = os.pathsep.join(PYTHONPATH)
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "launch.py"), "--nproc-per-node=2", script],
        cwd=folder.path,
        env=env,
        capture_output=True,
        text=True,
        timeout=BOUND,
        check=True,
    )
    expected = ROOT / "unicoll" / "errors.py"
    assert sorted(done.stdout.splitlines()) == [f"[default{r}]:{expected}" for r in (0, 1)]


def test_sixty_four_workers(folder: LaunchFolder) -> None:
    done = folder.launch("--nproc-per-node=64", folder.script("import os; print(os.environ['RANK'])"))
    assert done.returncode == 0
    assert sorted(done.stdout.splitlines()) == sorted(f"[default{r}]:{r}" for r in range(64))


@pytest.mark.slow
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
