"""How programs under mpirun end, and the example of the quickstart."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import textwrap
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.mpi.mpi_library import lives
from tests.mpi.mpi_ranks import (
    Ended,
    library,
    mpirun,
    run_alone,
    run_script,
    started,
    try_script,
    unavailable_reason,
)
from tests.support.ranks import ROOT, environment

if unavailable_reason():
    pytest.skip(unavailable_reason(), allow_module_level=True)

EXAMPLE = str(ROOT / "examples" / "train_digits.py")

RAISES = """
import sys, time
import numpy as np
import unicoll as dist

dist.init_process_group()
dist.barrier()

def compute_something():
    raise ValueError("the reason why")

if dist.get_rank() == 1:
    compute_something()
dist.all_reduce(np.ones(3))
time.sleep(1000)
"""


def check_the_end(ended: Ended) -> None:
    """It exited with an error, and the first traceback is complete."""
    assert ended.returncode != 0
    for part in ("Traceback (most recent call last):", "in compute_something", "ValueError: the reason why"):
        assert part in ended.stderr, ended.stderr


@pytest.mark.parametrize("size", [2, 3])
def test_an_uncaught_exception_ends_the_job(size: int, script: Path) -> None:
    check_the_end(try_script(script, RAISES, size))


def test_started_by_srun_without_mpi_no_process_aborts_its_own_mpi(tmp_path: Path, port: int) -> None:
    """With srun --mpi=none each process is an MPI world of one, and the ranks are those of Slurm."""
    slurm = {
        "SLURM_JOB_ID": f"{port}",
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NODELIST": "localhost",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_TASKS_PER_NODE": "2",
        "SLURM_NODEID": "0",
    }
    with ThreadPoolExecutor() as threads:
        ends = [
            threads.submit(
                run_alone, RAISES, tmp_path, **slurm, SLURM_PROCID=f"{rank}", SLURM_LOCALID=f"{rank}"
            )
            for rank in range(2)
        ]
    survivor, failed = (end.result() for end in ends)
    assert (survivor.returncode, failed.returncode) == (1, 1)
    assert failed.stderr.endswith("ValueError: the reason why\n")
    assert "RankLostError" in survivor.stderr
    assert "rank 1 " in survivor.stderr
    assert "ends the MPI job" not in survivor.stderr + failed.stderr


def test_an_exception_ends_the_job_while_the_others_compute(script: Path) -> None:
    source = RAISES.replace("dist.all_reduce(np.ones(3))", "")
    check_the_end(try_script(script, source, 3))


def test_the_abort_can_be_disabled(script: Path) -> None:
    """Then mpirun ends the job by the exit code, and the other ranks raise an error that names the rank."""
    ended = try_script(script, RAISES, 3, env={"UNICOLL_MPI_ABORT": "0"})
    check_the_end(ended)
    assert "unicoll: rank 1 ends the MPI job" not in ended.stderr
    aborted = try_script(script, RAISES, 3)
    assert "unicoll: rank 1 ends the MPI job" in aborted.stderr
    assert "UNICOLL_MPI_ABORT=0" in aborted.stderr


def test_a_missing_rank_ends_the_wait_of_the_others(script: Path) -> None:
    """MPI's initialisation cannot be cancelled: the process exits with the reason."""
    source = """
        import os, sys, time
        import unicoll as dist
        if os.environ[sys.argv[1]] == "1":
            time.sleep(1000)
        dist.init_process_group(timeout=2)
    """
    script.write_text(textwrap.dedent(source))
    ended = mpirun(3, str(script), library().rank)
    assert ended.returncode != 0
    assert "MPI_Init_thread: not all processes have called it, after 2 s" in ended.stderr


def test_survivors_of_the_default_backend_do_not_wait_for_dead_ranks_at_exit(
    script: Path, tmp_path: Path
) -> None:
    """With an mpirun that leaves them running. It may no longer forward output, so they write to files."""
    source = """
        import os, sys
        from pathlib import Path
        import numpy as np
        import unicoll as dist
        dist.init_process_group()
        here = Path(sys.argv[1], str(dist.get_rank()))
        here.with_suffix(".pid").write_text(f"{os.getpid()} ")
        try:
            while True:
                dist.all_reduce(np.ones(3))
        except dist.RankLostError as e:
            here.write_text(str(e))
    """
    script.write_text(textwrap.dedent(source))
    with started(3, str(script), str(tmp_path), options=library().recover) as running:
        files = [tmp_path / f"{rank}.pid" for rank in range(3)]
        running.wait_until(
            lambda: all(f.exists() and f.read_text().endswith(" ") for f in files),
            "not all ranks have joined",
        )
        pids = [int(f.read_text()) for f in files]
        running.record()
        running.stop_proxy()
        os.kill(pids[1], signal.SIGKILL)
        running.wait_until(lambda: not any(map(lives, pids)), "the ranks did not end")
        for rank in (0, 2):
            assert "rank 1 " in (tmp_path / str(rank)).read_text()


@pytest.mark.parametrize("who", [0, 1])
def test_exit_codes_are_passed_on(who: int, script: Path) -> None:
    source = f"""
        import sys
        import unicoll as dist
        dist.init_process_group()
        dist.barrier()
        dist.destroy_process_group()
        sys.exit(3 if int(__import__("os").environ[{library().rank!r}]) == {who} else 0)
    """
    assert try_script(script, source).returncode == 3


def test_a_program_may_end_without_destroying(script: Path) -> None:
    source = """
        import numpy as np
        import unicoll as dist
        dist.init_process_group()
        group = dist.new_group([0, 2])
        dist.all_reduce(np.ones(3))
        dist.barrier()
    """
    run_script(script, source, 3)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_mpirun_ends_the_job(number: int, script: Path) -> None:
    script.write_text(
        textwrap.dedent("""
        import os, sys
        import numpy as np
        import unicoll as dist
        dist.init_process_group()
        print(os.getpid(), flush=True)
        while True:
            dist.all_reduce(np.ones(3))
        """)
    )
    with started(3, str(script)) as running:
        running.wait_until(lambda: running.output().count("\n") == 3, "not all ranks have joined")
        pids = [int(pid) for pid in running.output().split()]
        running.record()
        running.process.send_signal(number)
        assert running.wait() != 0
        running.wait_until(lambda: not any(map(lives, pids)), "the ranks did not end")


# --- the example of the quickstart --------------------------------------------------------------------------------


def digest(output: str) -> str:
    found = re.search(r"bit-identical on all \d processes \(SHA-256 (\w+)", output)
    assert found is not None, output
    return found[1]


WITH_MPI = f"""
import functools, runpy
import unicoll as dist
dist.init_process_group = functools.partial(dist.init_process_group, "mpi")
runpy.run_path({EXAMPLE!r}, run_name="__main__")
"""


def train(command: Sequence[str], variables: dict[str, str]) -> str:
    ended = subprocess.run(
        [sys.executable, *command, EXAMPLE, "--epochs", "3", "--seed", "5"],
        env=environment({"PYTHONPATH": str(ROOT)} | variables),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert ended.returncode == 0, ended
    return ended.stdout


@pytest.mark.every(n=3)
@pytest.mark.parametrize("setting", ["UNICOLL_DETERMINISTIC", "UNICOLL_EXACT_SUM"])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_the_example_trains_the_same_weights_as_under_our_launcher(size: int, setting: str) -> None:
    env = {setting: "1"}  # else each backend sums in the order that is quickest for it
    ours = train(["-m", "unicoll.run", "--nproc-per-node", str(size), "--no-prefix"], env)
    ended = mpirun(size, "-c", WITH_MPI, "--epochs", "3", "--seed", "5", env=env)
    assert ended.returncode == 0, ended
    assert "VERDICT: identical and correct" in ended.stdout
    assert digest(ended.stdout) == digest(ours)


def test_the_example_is_correct_with_the_sums_of_mpi() -> None:
    ended = mpirun(4, "-c", WITH_MPI, "--epochs", "3", "--seed", "5")
    assert ended.returncode == 0, ended
    assert "bit-identical on all 4 processes" in ended.stdout
    assert "VERDICT: identical and correct" in ended.stdout
