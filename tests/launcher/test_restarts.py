"""``--max-restarts``: the launcher starts all workers again after a failure."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from pathlib import Path

import pytest

from tests.launcher.launching import LaunchFolder, all_gone, counters, wait_until
from unicoll.process.formatting import command_to_type
from unicoll.run.workers import _bound_to

FAILS = """
    import os, sys
    import numpy as np
    import unicoll as dist
    attempt, rank = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), int(os.environ["RANK"])
    dist.init_process_group()
    x = np.ones(1)
    dist.all_reduce(x)
    print(attempt, rank, x, os.environ["TORCHELASTIC_MAX_RESTARTS"], flush=True)
    if rank == 1 and attempt < FAILURES:
        if attempt == 0:
            raise KeyError("the first")
        os.kill(os.getpid(), 9)
    dist.barrier()
    """


def fails(folder: LaunchFolder, failures: int) -> str:
    return folder.script(FAILS.replace("FAILURES", str(failures)))


def test_all_workers_are_restarted_until_they_succeed(folder: LaunchFolder) -> None:
    done = folder.launch("-n", "3", "--max-restarts=3", "--log-dir=logs", fails(folder, 2))
    assert done.returncode == 0, done.stderr
    shown = {f"[default{rank}]:{attempt} {rank} [3.] 3" for attempt in range(3) for rank in range(3)}
    lines = done.stdout.splitlines()
    assert len(set(lines)) == len(lines)
    assert {f"[default{rank}]:2 {rank} [3.] 3" for rank in range(3)} <= set(lines) <= shown
    lines = [line for line in done.stderr.splitlines() if line.startswith("unicoll.run: ")]
    trace = re.escape(str(folder.path / "logs")) + r"/none_\w+/trace"
    patterns = [
        f"the last calls of the ranks: {command_to_type('trace')} {trace}",
        r"rank 1: KeyError: 'the first'; restarting all 3 workers \(restart 1 of 3\)",
        f"the last calls of the ranks: {command_to_type('trace')} {trace}/attempt_1",
        r"rank 1: Signal 9 \(SIGKILL\) .*; restarting all 3 workers \(restart 2 of 3\)",
        "restarts: 2; the first failure: rank 1: KeyError: 'the first'",
    ]
    assert len(lines) == len(patterns), done.stderr
    for line, pattern in zip(lines, patterns, strict=True):
        assert re.fullmatch(f"unicoll.run: {pattern}", line), line
    assert done.stderr.count("KeyError: 'the first'") >= 2
    assert "FAILED" not in done.stderr
    (logs,) = (folder.path / "logs").iterdir()
    assert sorted(path.name for path in logs.glob("attempt_*")) == ["attempt_0", "attempt_1", "attempt_2"]
    assert (logs / "attempt_0" / "1" / "error.json").exists()


def test_the_last_report_has_the_first_failure(folder: LaunchFolder) -> None:
    error_file = folder.path / "error.json"
    done = folder.launch(
        "-n", "2", "--max-restarts", "1", fails(folder, 9), TORCHELASTIC_ERROR_FILE=str(error_file)
    )
    assert done.returncode == 128 + signal.SIGKILL
    report = done.stderr[done.stderr.index("work.py FAILED") :]
    last, first = report.split("First failure before the restarts:")
    assert "exitcode  : -9" in last
    assert "KeyError" not in last
    assert "exitcode  : 1" in first
    assert "KeyError: 'the first'" in first
    message = json.loads(error_file.read_text())["message"]
    assert message["errorCode"] == -9
    assert "Signal 9" in message["message"]
    assert float(message["extraInfo"]["timestamp"]) > 1e9


def test_the_launchers_error_file_has_the_exception(folder: LaunchFolder) -> None:
    script = folder.script("import os\nif os.environ['RANK'] == '1': raise KeyError('the cause')")
    error_file = folder.path / "error.json"
    done = folder.launch("-n", "2", script, TORCHELASTIC_ERROR_FILE=str(error_file))
    assert done.returncode == 1
    message = json.loads(error_file.read_text())["message"]
    assert (message["message"], message["errorCode"]) == ("KeyError: 'the cause'", 1)
    assert message["extraInfo"]["py_callstack"].startswith("Traceback (most recent call last):")


def test_a_failed_launch_that_a_worker_handles_is_no_failure_of_the_worker(folder: LaunchFolder) -> None:
    inner = folder.script("raise KeyError('handled')", "inner.py")
    outer = folder.script(
        f"""
        import os, subprocess, sys, time
        if os.environ["RANK"] == "0":
            command = [sys.executable, "-m", "unicoll.run", "-n", "2", {inner!r}]
            subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            open("handled", "w").close()
            time.sleep(600)
        while not os.path.exists("handled"):
            time.sleep(0.01)
        raise ValueError("the cause")
        """,
        "outer.py",
    )
    done = folder.launch("-n", "2", "--grace=0.1", outer)
    assert done.returncode == 1
    assert "handled')" not in done.stderr
    root = done.stderr[done.stderr.index("Root Cause") :]
    assert re.search(r"rank      : 1 .*ValueError: the cause", root, re.S), done.stderr


KEEPS_PROCESSES = """
    import os, pathlib, signal, subprocess, sys, time
    attempt, rank = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), int(os.environ["RANK"])
    if attempt == 0:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        child = subprocess.Popen(["sleep", "600"], start_new_session=True)
        names = {f"pid.{attempt}.{rank}": os.getpid(), f"pid.{attempt}.{rank}.child": child.pid}
        for name, pid in names.items():
            pathlib.Path("new." + name).write_text(f"{pid}\\n")
            os.rename("new." + name, name)
        while len(list(pathlib.Path().glob("pid.0.*"))) < 4:
            time.sleep(0.01)
        if rank == 1:
            os._exit(5)
        time.sleep(600)
    for path in pathlib.Path().glob("pid.0.*"):
        try:
            state = pathlib.Path(f"/proc/{int(path.read_text())}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
        if state not in "ZX":
            print("still runs:", path.name)
    """


def test_nothing_of_an_attempt_runs_when_the_next_starts(folder: LaunchFolder) -> None:
    """Also no child that has left the session, and no worker that ignores SIGTERM."""
    script = folder.script(KEEPS_PROCESSES)
    done = folder.launch("-n", "2", "--max-restarts=1", "--grace=0.1", "--shutdown-timeout=0.2", script)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    assert all_gone(folder.pids(4))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_signal_ends_the_launch_in_a_later_attempt(folder: LaunchFolder, number: signal.Signals) -> None:
    script = folder.script(
        """
        import os, pathlib, sys, time
        if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            sys.exit(3)
        pathlib.Path(f"new.{os.getpid()}").write_text(f"{os.getpid()}\\n")
        os.rename(f"new.{os.getpid()}", f"pid.{os.getpid()}")
        time.sleep(600)
        """
    )
    process = folder.start("-n", "2", "--max-restarts=5", script)
    pids = folder.pids(2)
    process.send_signal(number)
    _out, err = process.communicate()
    wait_until(lambda: all_gone(pids))
    if number == signal.SIGTERM:
        assert process.returncode == 128 + number
        assert b"restarts: 1; the first failure: rank" in err
        assert b"restart 2" not in err
    assert len(list(folder.path.glob("pid.*"))) == 2


def test_a_signal_during_the_clean_up_prevents_the_restart(folder: LaunchFolder) -> None:
    script = folder.script("import sys; sys.exit(3)")
    program = f"""
import os, signal, sys
from unicoll.run import attempt, main
kill_members = attempt.kill_members
def kill_after_a_signal(*arguments):
    os.kill(os.getpid(), signal.SIGTERM)
    return kill_members(*arguments)
attempt.kill_members = kill_after_a_signal
sys.exit(main(["-n", "2", "--max-restarts=5", {script!r}]))
"""
    done = folder.python("-c", program)
    assert done.returncode == 3, done.stderr
    assert done.stderr.startswith("unicoll.run: got SIGTERM\n")
    assert "work.py FAILED" in done.stderr
    assert "restarting" not in done.stderr


def test_a_signal_while_the_workers_of_a_failure_end_prevents_the_restart(folder: LaunchFolder) -> None:
    script = folder.script(
        """
        import os, pathlib, signal, sys, time
        if os.environ["RANK"] == "1":
            while not os.path.exists("ready"):
                time.sleep(0.01)
            sys.exit(3)
        def stop(number, frame):
            pathlib.Path("pid.stopping").write_text("1\\n")
            time.sleep(600)
        signal.signal(signal.SIGTERM, stop)
        pathlib.Path("ready").touch()
        time.sleep(600)
        """
    )
    process = folder.start("-n", "2", "--max-restarts=5", "--grace=0", script)
    folder.pids(1)
    process.send_signal(signal.SIGTERM)
    _out, err = process.communicate()
    assert process.returncode == 3, err
    assert b"got SIGTERM" in err
    assert b"work.py FAILED" in err
    assert b"restarting" not in err


def test_copies_of_lines_and_one_gpu_for_each_worker(folder: LaunchFolder) -> None:
    script = folder.script(
        """
        import os, sys
        visible = os.environ["CUDA_VISIBLE_DEVICES"], os.environ["HIP_VISIBLE_DEVICES"]
        print("loss 1,5", os.environ["LOCAL_RANK"], *visible)
        print("other")
        print("an error", file=sys.stderr)
        print("a warning, no loss", file=sys.stderr)
        """
    )
    flags = [
        "--virtual-local-rank",
        "--duplicate-stdout-filters=1,,5,nothing",
        "--log-dir=logs",
        "--redirects=2",
    ]
    visible = {"CUDA_VISIBLE_DEVICES": "7, GPU-a,3", "HIP_VISIBLE_DEVICES": "2,3"}
    done = folder.launch("-n", "2", *flags, script, PET_DUPLICATE_STDERR_FILTERS="error", **visible)
    assert done.returncode == 0, done.stderr
    shown = [line for device in ("7 2", "GPU-a 3") for line in (f"loss 1,5 0 {device}", "other")]
    assert sorted(line.partition(":")[2] for line in done.stdout.splitlines()) == sorted(shown)
    assert done.stderr == ""
    (attempt,) = Path(folder.path, "logs").glob("*/attempt_0")
    copied = sorted((attempt / "filtered_stdout.log").read_text().splitlines())
    assert copied == ["[default0]:loss 1,5 0 7 2", "[default1]:loss 1,5 0 GPU-a 3"]
    copied = sorted((attempt / "filtered_stderr.log").read_text().splitlines())
    assert copied == ["[default0]:an error", "[default1]:an error"]
    assert (attempt / "1" / "stderr.log").read_text() == "an error\na warning, no loss\n"


def test_the_copies_have_tracebacks_and_the_last_state_of_a_progress_bar(folder: LaunchFolder) -> None:
    """The texts are not searched in the prefix."""
    script = folder.script(
        """
        import sys
        for i in range(4):
            print("step", i, end="\\r", flush=True)
        print("step done")
        print("default")
        raise KeyError("the Error")
        """
    )
    filters = ["--duplicate-stdout-filters=step,0", "--duplicate-stderr-filters=KeyError"]
    done = folder.launch("-n", "2", "--log-dir=logs", "--local-ranks-filter=0", *filters, script)
    assert done.returncode == 1
    (attempt,) = Path(folder.path, "logs").glob("*/attempt_0")
    assert sorted((attempt / "filtered_stdout.log").read_text().splitlines()) == [
        "[default0]:step done",
        "[default1]:step done",
    ]
    assert sorted((attempt / "filtered_stderr.log").read_text().splitlines()) == [
        '[default0]:    raise KeyError("the Error")',
        "[default0]:KeyError: 'the Error'",
        '[default1]:    raise KeyError("the Error")',
        "[default1]:KeyError: 'the Error'",
    ]


@pytest.mark.every(n=0)
def test_dumps_of_each_attempt_are_in_the_users_directory(folder: LaunchFolder) -> None:
    traces = folder.path / "traces"
    done = folder.launch("-n", "2", "--max-restarts=2", fails(folder, 2), UNICOLL_TRACE_DIR="traces")
    assert done.returncode == 0, done.stderr
    assert (traces / "rank_0.json").exists()
    assert (traces / "attempt_1" / "rank_0.json").exists()
    assert command_to_type("trace", "traces/attempt_1") in done.stderr


@pytest.mark.every(n=0)
def test_counters_begin_again_after_a_restart(folder: LaunchFolder) -> None:
    done = folder.launch(
        "-n", "2", "--max-restarts=2", "--log-dir=logs", fails(folder, 2), UNICOLL_METRICS_FILE="job.prom"
    )
    assert done.returncode == 0, done.stderr
    assert "METRICS" not in done.stderr
    calls = {key[1:]: value for key, value in counters(folder.path / "job.prom").items() if key[0] == "calls"}
    assert calls == {(op, rank): 1 for op in ("all_reduce", "barrier") for rank in range(2)}
    (logs,) = (folder.path / "logs").iterdir()
    assert sorted(path.name for path in logs.glob("metrics_[012]/*.prom")) == ["0.prom"] * 3 + ["1.prom"] * 3


def test_an_attempt_that_cannot_start_ends_the_launch_with_the_first_failure(folder: LaunchFolder) -> None:
    script = folder.script("import os; os.unlink('python'); raise KeyError('the cause')")
    (folder.path / "python").symlink_to(sys.executable)
    error_file = folder.path / "error.json"
    done = folder.launch(
        "--max-restarts=3", script, PYTHON_EXEC="./python", TORCHELASTIC_ERROR_FILE=str(error_file)
    )
    assert done.returncode == 1
    assert "restarts: 1; the first failure: rank 0: KeyError: 'the cause'" in done.stderr
    assert done.stderr.endswith("unicoll.run: error: [Errno 2] No such file or directory: './python'\n")
    assert json.loads(error_file.read_text())["message"]["message"] == "KeyError: 'the cause'"


def test_workers_are_bound_to_cpus_and_the_launcher_is_not(folder: LaunchFolder) -> None:
    own = os.sched_getaffinity(0)
    ranks = min(2, len(own))
    # the launcher is bound while it starts a worker
    script = folder.script(
        """
        import os, sys, time
        deadline = time.monotonic() + 60
        while sorted(os.sched_getaffinity(os.getppid())) != OWN and time.monotonic() < deadline:
            time.sleep(0.01)
        print(sorted(os.sched_getaffinity(0)), sorted(os.sched_getaffinity(os.getppid())), sep="|")
        """.replace("OWN", repr(sorted(own)))
    )
    done = folder.launch("--numa-binding=exclusive", "--no-prefix", "-n", str(ranks), script)
    if "/sys/" in done.stderr or "cores for" in done.stderr:
        pytest.skip(done.stderr)  # the machine is not described there, or has one core
    assert done.returncode == 0, done.stderr
    bound = []
    for line in done.stdout.splitlines():
        worker, launcher = (set(json.loads(part)) for part in line.split("|"))
        assert worker <= own
        assert launcher == own
        bound.append(worker)
    assert len(bound) == ranks
    assert ranks == 1 or not bound[0] & bound[1]


def test_an_impossible_binding_names_the_flag() -> None:
    before = os.sched_getaffinity(0)
    with (
        pytest.raises(OSError, match=r"rank 3 cannot be bound to the CPUs \[999\]: Invalid"),
        _bound_to({999}, "rank 3"),
    ):
        pass
    with pytest.raises(KeyError), _bound_to({min(before)}, "rank 3"):
        raise KeyError(os.sched_getaffinity(0))
    assert os.sched_getaffinity(0) == before
