"""``--max-restarts``: the launcher starts all workers again after a failure."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path

import pytest

from tests.launcher.launching import LaunchFolder, all_gone, wait_until

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
    expected = [f"[default{rank}]:{attempt} {rank} [3.] 3" for attempt in range(3) for rank in range(3)]
    assert sorted(done.stdout.splitlines()) == sorted(expected)
    lines = [line for line in done.stderr.splitlines() if line.startswith("unicoll.run: ")]
    trace = re.escape(str(folder.path / "logs")) + r"/none_\w+/trace"
    patterns = [
        f"the last calls of the ranks: python -m unicoll.trace {trace}",
        r"rank 1: KeyError: 'the first'; restarting all 3 workers \(restart 1 of 3\)",
        f"the last calls of the ranks: python -m unicoll.trace {trace}/attempt_1",
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


def test_without_restarts_the_launchers_error_file_has_the_exception(folder: LaunchFolder) -> None:
    """A scheduler reads it. The program of a worker that starts a launcher has not ended with it."""
    inner = folder.script("raise KeyError('inner')", "inner.py")
    outer = folder.script(
        f"""
        import os, subprocess, sys, time
        done = subprocess.run([sys.executable, "-m", "unicoll.run", "-n", "2", {inner!r}], capture_output=True)
        time.sleep(2.5)  # longer than between the launcher's two looks for programs that have failed
        print("goes on after", done.returncode, os.path.exists(os.environ["TORCHELASTIC_ERROR_FILE"]))
        """,
        "outer.py",
    )
    done = folder.launch("-n", "2", outer)
    assert sorted(done.stdout.splitlines()) == [f"[default{r}]:goes on after 1 True" for r in range(2)]
    assert done.returncode == 0, done.stderr


KEEPS_PROCESSES = """
    import os, pathlib, signal, subprocess, sys, time
    attempt, rank = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), int(os.environ["RANK"])
    if attempt == 0:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        child = subprocess.Popen(["sleep", "600"], start_new_session=True)
        names = {f"pid.{attempt}.{rank}": os.getpid(), f"pid.{attempt}.{rank}.child": child.pid}
        for name, pid in names.items():
            pathlib.Path(name + ".new").write_text(f"{pid}\\n")
            os.rename(name + ".new", name)
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
    """Also a child that has left the session, and a worker that ignores SIGTERM; one of each is in no call."""
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
        print("loss 1,5", os.environ["LOCAL_RANK"], os.environ["CUDA_VISIBLE_DEVICES"])
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
    done = folder.launch(
        "-n", "2", *flags, script, CUDA_VISIBLE_DEVICES="7, GPU-a,3", PET_DUPLICATE_STDERR_FILTERS="error"
    )
    assert done.returncode == 0, done.stderr
    shown = [line for device in ("7", "GPU-a") for line in (f"loss 1,5 0 {device}", "other")]
    assert sorted(line.partition(":")[2] for line in done.stdout.splitlines()) == sorted(shown)
    assert done.stderr == ""
    (attempt,) = Path(folder.path, "logs").glob("*/attempt_0")
    copied = sorted((attempt / "filtered_stdout.log").read_text().splitlines())
    assert copied == ["[default0]:loss 1,5 0 7", "[default1]:loss 1,5 0 GPU-a"]
    copied = sorted((attempt / "filtered_stderr.log").read_text().splitlines())
    assert copied == ["[default0]:an error", "[default1]:an error"]
    assert (attempt / "1" / "stderr.log").read_text() == "an error\na warning, no loss\n"


def test_a_worker_is_bound_to_cpus_and_the_launcher_is_not(folder: LaunchFolder) -> None:
    script = folder.script("import os; print(sorted(os.sched_getaffinity(0)), os.getppid())")
    done = folder.launch("--numa-binding=exclusive", "--no-prefix", "-n", "1", script)
    if "/sys/" in done.stderr:
        pytest.skip(done.stderr)  # the machine is not described there
    assert done.returncode == 0, done.stderr
    assert set(json.loads(done.stdout.rpartition(" ")[0])) <= os.sched_getaffinity(0)
