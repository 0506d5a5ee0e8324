"""Programs that end without destroying their groups, on every installed Python from 3.11 that has NumPy.

``UNICOLL_TEST_PYTHONS`` names more interpreters than PATH has; ``scripts/test_pythons`` makes environments for them.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.support.ranks import ROOT, environment

PROGRAM = Path(__file__).resolve().parent / "exit_program.py"
RANKS = 3
LEFT = "has left the job: its program ended"
LOCKED = """
import threading
from unicoll.calls.work import Completion, Work
class Locked(Completion):
    def __init__(self):
        self.lock = threading.Lock()
        self.lock.acquire()
    def done(self):
        return self.lock.acquire()
    def wait(self, timeout): ...
    def exception(self): ...
    def add_done_callback(self, fn): ...
kept = Work(Locked(), ())
"""


def _candidates(version: str) -> Iterator[str]:
    yield from filter(None, os.environ.get("UNICOLL_TEST_PYTHONS", "").split(os.pathsep))
    yield sys.executable
    if found := shutil.which(f"python{version}"):
        yield found


@cache
def python(version: str) -> str:
    """An interpreter of a version with NumPy; without one the test is skipped."""
    says = "import numpy, sys; print('%d.%d' % sys.version_info[:2])"
    for candidate in _candidates(version):
        answer = subprocess.run([candidate, "-c", says], capture_output=True, text=True, check=False)
        if answer.stdout.strip() == version:
            return candidate
    pytest.skip(f"there is no Python {version} with NumPy here (UNICOLL_TEST_PYTHONS)")


@pytest.fixture(params=["3.11", "3.12", "3.13", "3.14"])
def interpreter(request: pytest.FixtureRequest) -> str:
    return python(request.param)


def run(*commands: list[str], path: str = "") -> list[tuple[int, str, str]]:
    """Exit codes and what was written, of commands that run side by side."""
    env = environment({"PYTHONPATH": str(ROOT)})
    env["PATH"] = path + os.pathsep + env["PATH"]
    env |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    started = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env)
        for command in commands
    ]
    try:
        written = [process.communicate(timeout=300) for process in started]
    finally:
        for process in started:
            process.kill()
    return [(process.returncode, *texts) for process, texts in zip(started, written, strict=True)]


@pytest.mark.every(n=6)
@pytest.mark.parametrize("backend", ["gloo", "nccl"])
@pytest.mark.parametrize("how", ["ends", "raises"])
def test_a_program_may_end_without_destroying_its_groups(
    backend: str, how: str, interpreter: str, tmp_path: Path
) -> None:
    command = [interpreter, "-W", "error", str(PROGRAM), backend, how]
    init = f"file://{tmp_path}/store"
    first, *others, last = run(*([*command, str(rank), str(RANKS), init] for rank in range(RANKS)))
    assert [written for _, written, _ in others] == [""]
    for code, _, logged in (first, *others):
        if logged:  # the operation under way, which the last rank has not executed when the exception ends it
            assert how == "raises"
            assert logged.count("\n") == 1
            assert (
                "no call has raised this error, so the program ends with an exit code other than 0: "
                in logged
            )
            assert "rank 2 " in logged
        assert code == (120 if logged else 0)
    if how == "ends":
        assert last == (0, "", "")
        assert first[1].startswith("died [] left [1, 2] rank 2 ")
        assert first[1].rstrip().endswith(LEFT)
    else:
        assert last[0] == 1
        assert last[2].count("Traceback") == 1
        assert last[2].endswith("ValueError: enough\n")
        assert first[1].startswith("died [] left [1] rank 2 ")
        assert first[1].rstrip().endswith("ended with ValueError: enough")


@pytest.mark.every(n=2)
@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_a_program_whose_last_operation_fails_unheard_ends_with_an_exit_code(
    backend: str, interpreter: str, tmp_path: Path
) -> None:
    """Rank 1 does not call it. Functions that the program has registered for its exit are called."""
    command = [interpreter, "-W", "error", str(PROGRAM), backend, "late"]
    init = f"file://{tmp_path}/store"
    first, second = run(*([*command, str(rank), "2", init] for rank in range(2)))
    assert first[:2] == (120, "at exit\nat the end\n")
    assert "no call has raised this error, so the program ends with an exit code other than 0: " in first[2]
    assert (
        "all_reduce(float64[4], SUM) #2 on group 'world' timed out after 0.5 s; arrived: rank 0" in first[2]
    )
    assert second == (0, "at exit\nat the end\n", "")


def test_a_work_that_is_alive_at_the_end_of_the_interpreter_takes_no_lock(interpreter: str) -> None:
    """A daemon thread, which no longer runs then, may hold the lock of a completion."""
    assert run([interpreter, "-W", "error", "-c", LOCKED]) == [(0, "", "")]


def test_a_program_under_mpirun_may_end_without_destroying_its_groups(interpreter: str) -> None:
    folder = str(Path(interpreter).parent)
    mpirun = shutil.which("mpirun", path=folder)
    found = subprocess.run([interpreter, "-c", "import mpi4py"], capture_output=True, check=False)
    if mpirun is None or found.returncode:
        pytest.skip(f"there is no mpi4py with an MPI library beside {interpreter}")
    (ended,) = run([mpirun, "-n", "2", interpreter, "-W", "error", str(PROGRAM), "mpi", "ends"], path=folder)
    assert ended[::2] == (0, "")
    assert ended[1].startswith("died [] left [1] rank 1 ")
    assert ended[1].rstrip().endswith(LEFT)
