"""The blocks of docs/hpc.md run under this environment's mpirun and print the output shown.

A block runs if its first line has the word ``mpirun``; a library's name says that only that one does what is shown,
``exit=1`` and the text below it are as in :mod:`test_docs`. Files that the page shows are there: a block below a line
that ends with a name and a colon is the file of that name.
"""

from __future__ import annotations

import re
import shutil
import stat
import subprocess
from pathlib import Path

import pytest

from tests.docs.test_docs import HELLO, Block, blocks, differences, user_environment
from tests.mpi.mpi_ranks import Program, library, unavailable_reason
from tests.support.ranks import ROOT

if unavailable_reason():
    pytest.skip(unavailable_reason(), allow_module_level=True)

PAGE = ROOT / "docs" / "hpc.md"
LIBRARIES = {"openmpi", "mpich", "intelmpi"}
BLOCKS = [block for block in blocks(PAGE) if "mpirun" in block.options]
FILE = re.compile(r"`([\w.-]+)`:\n\n```\w*\n((?:.*\n)*?)```$", re.M)


def lay_out(folder: Path) -> None:
    """Write the files that the page shows, and the example."""
    shutil.copy(HELLO, folder)
    for name, text in FILE.findall(PAGE.read_text()):
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)


def to_path(folder: Path) -> None:
    """Put this environment's ``mpirun`` on the PATH."""
    command = folder / "bin" / "mpirun"
    command.write_text(f'#!/bin/sh\nexec "{library().mpirun}" "$@"\n')
    command.chmod(command.stat().st_mode | stat.S_IXUSR)


def test_there_are_blocks_for_all_libraries() -> None:
    for name in LIBRARIES:
        assert len([b for b in BLOCKS if name in b.options or not LIBRARIES & set(b.options)]) > 3


@pytest.mark.every(n=2)
@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_a_block_runs_and_prints_the_output_shown(block: Block, tmp_path: Path) -> None:
    meant = LIBRARIES & set(block.options)
    if meant and library().name not in meant:
        pytest.skip(f"shows {meant.pop()}")
    lay_out(tmp_path)
    (tmp_path / "commands.sh").write_text(block.code)
    variables = user_environment(tmp_path) | library().variables | {"TMPDIR": str(tmp_path)}
    to_path(tmp_path)
    variables["OMPI_MCA_btl_sm_backing_directory"] = str(
        tmp_path
    )  # a process without mpirun leaves it behind
    with (tmp_path / "stdout").open("wb") as stdout, (tmp_path / "stderr").open("wb") as stderr:
        process = subprocess.Popen(
            ["bash", "-euo", "pipefail", "commands.sh"],
            cwd=tmp_path,
            env=variables,
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            start_new_session=True,
        )
    running = Program(process, str(tmp_path))
    try:
        code = running.wait()
    finally:
        running.close()
    assert code == block.option("exit", 0), running.output() + running.output("stderr")
    if block.output is not None:
        found = differences(block.output, running.output())
        assert not found, "\n".join([*found, running.output("stderr")])


@pytest.mark.parametrize(
    "name", [name for name, _ in FILE.findall(PAGE.read_text()) if name.endswith(".sbatch")]
)
def test_batch_files_are_valid_bash(name: str, tmp_path: Path) -> None:
    lay_out(tmp_path)
    checked = subprocess.run(["bash", "-n", name], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (checked.returncode, checked.stderr) == (0, "")
