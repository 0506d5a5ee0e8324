"""``unicoll.breakpoint`` at a pseudo-terminal: under the launchers and in plain processes."""

from __future__ import annotations

import os
import pty
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.launcher.test_run import environment, with_late_ranks

BOUND = 180.0
LAUNCHER = ["-m", "unicoll.run", "-n", "2"]
TORCHRUN = ["-m", "torch.distributed.run", "--nproc-per-node", "2"]
PROGRAM = """
import sys
import numpy as np
import unicoll as dist

dist.init_process_group(timeout=60.0)
world = dist.group.WORLD
world._settings = world.using(timeout=4.0)._settings  # the timeout of init is that of joining, too
for i in range(2):
    x = np.full(3, 40 + dist.get_rank() + i)
    dist.breakpoint(rank=int(sys.argv[1]), skip=1)
    y = x + 1
dist.all_reduce(x, timeout=60.0)
print(f"sum {x[0]}", flush=True)
dist.destroy_process_group()
"""
INIT = "dist.init_process_group(timeout=60.0)\n"
INIT_BY_TORCH = """
import torch.distributed, unicoll.torch_plugin

torch.distributed.init_process_group("unicoll")
"""
PLAIN = """
import os, subprocess, sys

from unicoll.run.job import reserve_port

reserved = reserve_port()
port = str(reserved.getsockname()[1])
started = []
for rank in range(2):
    where = dict(os.environ, RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    started.append(subprocess.Popen([sys.executable, "program.py", "1"], env=where, process_group=0))
sys.exit(max(process.wait() for process in started))
"""


def talk(
    folder: Path, arguments: list[str], *answers: tuple[str, float], **env: str
) -> tuple[str, list[str], int]:
    """Run Python with a terminal, and type a line at each prompt of pdb, after some seconds.

    Returns:
        The output, what came after each typed line until the next prompt, and the exit status.
    """
    child, terminal = pty.fork()
    if child == 0:
        os.chdir(folder)
        os.execve(sys.executable, [sys.executable, *arguments], environment(PYTHON_COLORS="0", **env))
    output, answered, deadline = "", [], time.monotonic() + BOUND
    waiting = [*answers]
    ended = False
    try:
        while not ended and time.monotonic() < deadline:
            if select.select([terminal], [], [], 0.2)[0]:
                try:
                    read = os.read(terminal, 4096)
                except OSError:  # all processes have closed the terminal
                    read = b""
                ended = not read
                output += read.decode()
            if output.endswith("(Pdb) ") and waiting:
                answered.append(output.rpartition("(Pdb) ")[0].rpartition("(Pdb) ")[2])
                line, pause = waiting.pop(0)
                time.sleep(pause)
                os.write(terminal, line.encode() + b"\n")
                output += "\x00"
        assert ended, output
    finally:
        if not ended:
            os.killpg(child, signal.SIGKILL)
        os.close(terminal)
        status = os.waitpid(child, 0)[1]
    return output.replace("\x00", ""), answered, os.waitstatus_to_exitcode(status)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "program.py").write_text(PROGRAM)
    (tmp_path / "plain.py").write_text(PLAIN)
    return tmp_path


@pytest.mark.every(2)
@pytest.mark.parametrize("rank", [0, 1])
def test_under_the_launcher(rank: int, folder: Path) -> None:
    """Pauses of more than the group's timeout do no harm."""
    output, answers, status = talk(
        folder, [*LAUNCHER, "program.py", str(rank)], ("p x", 4.5), ("n", 0), ("n", 0), ("p y", 0), ("c", 0)
    )
    assert status == 0, output
    assert f"rank {rank} of 2 (pid " in answers[0]
    assert "program.py(" in answers[0]  # at the call from Python 3.13 on, else at the next line
    assert f"p x\r\narray([{', '.join([str(41 + rank)] * 3)}])\r\n" in answers[1].replace("\x00", "")
    assert f"array([{', '.join([str(42 + rank)] * 3)}])" in answers[4]
    assert output.count("sum 83") == 2
    assert "[default0]:sum 83" in output


def test_a_single_worker_has_the_terminal_itself(folder: Path) -> None:
    output, answers, status = talk(
        folder, ["-m", "unicoll.run", "-n", "1", "program.py", "0"], ("p x", 0), ("c", 0)
    )
    assert status == 0, output
    assert "array([41, 41, 41])" in answers[1]
    assert "sum 41" in output


@pytest.mark.slow
@pytest.mark.torch
@pytest.mark.parametrize("by_torch", [False, True], ids=["unicoll", "torch"])
def test_under_torchrun(by_torch: bool, folder: Path) -> None:
    pytest.importorskip("torch")
    text = PROGRAM.replace(INIT, INIT_BY_TORCH) if by_torch else PROGRAM
    (folder / "program.py").write_text(text)
    output, answers, status = talk(folder, [*TORCHRUN, "program.py", "1"], ("p x", 0), ("c", 0))
    assert status == 0, output
    assert "array([42, 42, 42])" in answers[1]
    assert output.count("sum 83") == 2


@pytest.mark.skipif(sys.version_info < (3, 11), reason="process_group= of subprocess is new in Python 3.11")
def test_a_process_in_the_background_of_the_terminal(folder: Path) -> None:
    """Each process is a process group of its own, as jobs of a shell: the kernel stops those that read the terminal."""
    output, answers, status = talk(folder, ["plain.py"], ("p x", 0), ("c", 0))
    assert status == 0, output
    assert "array([42, 42, 42])" in answers[1]
    assert output.count("sum 83") == 2


def test_quitting_ends_the_job(folder: Path) -> None:
    output, _, status = talk(folder, [*LAUNCHER, "program.py", "0"], ("q", 0), ("y", 0))
    assert status == 1, output
    assert "BdbQuit" in output or "rank 0" in output
    assert "sum" not in output


@pytest.mark.parametrize("wrong", ["0", "2"])
def test_without_a_terminal_all_ranks_raise(wrong: str, folder: Path) -> None:
    done = subprocess.run(
        [sys.executable, *LAUNCHER, "program.py", wrong],
        cwd=folder,
        env=environment(),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        start_new_session=True,
        timeout=BOUND,
        check=False,
    )
    assert done.returncode == 1
    assert "ranks 0, 1:" in with_late_ranks(done.stderr)
    if wrong == "0":
        assert "has no terminal, and neither do its parent processes" in done.stderr
    else:
        assert "DistArgumentError: breakpoint: 2 is not a rank of a world of 2" in done.stderr
