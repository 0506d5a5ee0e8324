"""``unicoll.breakpoint`` at a pseudo-terminal: under the launchers and in plain processes."""

from __future__ import annotations

import os
import pty
import select
import signal
import sys
import time
from pathlib import Path

import pytest

from tests.launcher.launching import BOUND, LaunchFolder, environment, with_late_ranks

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


@pytest.fixture(autouse=True)
def programs(folder: LaunchFolder) -> None:
    folder.script(PROGRAM, "program.py")
    folder.script(PLAIN, "plain.py")


@pytest.mark.every(n=2)
@pytest.mark.parametrize("rank", [0, 1])
def test_under_the_launcher(rank: int, folder: LaunchFolder) -> None:
    """Pauses of more than the group's timeout do no harm."""
    typed = ("p x", 4.5), ("n", 0), ("n", 0), ("p y", 0), ("c", 0)
    output, answers, status = talk(folder.path, [*LAUNCHER, "program.py", str(rank)], *typed)
    assert status == 0, output
    assert f"rank {rank} of 2 (pid " in answers[0]
    assert "program.py(" in answers[0]  # at the call from Python 3.13 on, else at the next line
    assert f"p x\r\narray([{', '.join([str(41 + rank)] * 3)}])\r\n" in answers[1].replace("\x00", "")
    assert f"array([{', '.join([str(42 + rank)] * 3)}])" in answers[4]
    assert output.count("sum 83") == 2
    assert "[default0]:sum 83" in output


@pytest.mark.parametrize(
    ("command", "value", "total"),
    [
        # a single worker has the terminal itself
        (["-m", "unicoll.run", "-n", "1", "program.py", "0"], 41, "sum 41"),
        # each process is a process group of its own, as jobs of a shell: the kernel stops those that read the terminal
        (["plain.py"], 42, "sum 83"),
        *(
            pytest.param(
                [*TORCHRUN, name, "1"],
                42,
                "sum 83",
                marks=(pytest.mark.every(n=0), pytest.mark.torch),
                id=name,
            )
            for name in ("program.py", "by_torch.py")
        ),
    ],
)
def test_other_ways_to_start(command: list[str], value: int, total: str, folder: LaunchFolder) -> None:
    if command[:2] == TORCHRUN[:2]:
        pytest.importorskip("torch")
        folder.script(PROGRAM.replace(INIT, INIT_BY_TORCH), "by_torch.py")
    output, answers, status = talk(folder.path, command, ("p x", 0), ("c", 0))
    assert status == 0, output
    assert f"array([{value}, {value}, {value}])" in answers[1]
    assert output.count(total) == (1 if total == "sum 41" else 2)


def test_quitting_ends_the_job(folder: LaunchFolder) -> None:
    output, _, status = talk(folder.path, [*LAUNCHER, "program.py", "0"], ("q", 0), ("y", 0))
    assert status == 1, output
    assert "BdbQuit" in output or "rank 0" in output
    assert "sum" not in output


@pytest.mark.parametrize(
    ("rank", "words"),
    [
        ("0", "has no terminal, and neither do its parent processes"),
        ("2", "DistArgumentError: breakpoint: 2 is not a rank of a world of 2"),
    ],
)
def test_without_a_terminal_all_ranks_raise(rank: str, words: str, folder: LaunchFolder) -> None:
    done = folder.python(*LAUNCHER, "program.py", rank, start_new_session=True)
    assert done.returncode == 1
    assert "ranks 0, 1:" in with_late_ranks(done.stderr)
    assert words in done.stderr
