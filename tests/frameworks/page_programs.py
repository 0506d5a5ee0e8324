"""The programs of docs/frameworks.md, and how they are started."""

from __future__ import annotations

import importlib.util
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.support.pages import blocks
from tests.support.ranks import ROOT, environment, reserved_port

PAGE = ROOT / "docs" / "frameworks.md"
PROGRAMS = {block.value("file"): block.code for block in blocks(PAGE) if block.value("file")}
PACKAGES = {"with_transformers.py": "transformers", "with_trl.py": "trl", "with_fabric.py": "lightning"}
"""The package that a program needs, if its name is another one than the program's."""
TORCHRUN = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port"]
UNIRUN = ["-m", "unicoll.run", "--no-prefix", "-n", "2", "--master-port"]
_STUBS = ROOT / "tests" / "frameworks" / "stubs"


class Ended(NamedTuple):
    returncode: int
    stdout: str
    stderr: str


def unchanged(code: str) -> str:
    """A program without the lines for unicoll."""
    code = re.sub(r"^.*  # new\n", "", code, flags=re.M)
    return re.sub(r"^( *)\S.*  # before: (.*)$", r"\1\2", code, flags=re.M)


def start(
    folder: Path,
    name: str,
    code: str,
    launcher: list[str],
    meanwhile: Callable[[subprocess.Popen[bytes]], None] | None = None,
    **variables: str,
) -> Ended:
    """Run a program with two ranks in a folder, and call a function with the launcher's process meanwhile."""
    package = PACKAGES.get(name, name.removeprefix("with_").removesuffix(".py"))
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(code)
    path = [str(ROOT), str(folder / "site-packages"), *([str(_STUBS)] if package == "composer" else [])]
    variables |= {
        "PYTHONPATH": os.pathsep.join(path),
        "OMP_NUM_THREADS": "1",
        "UNICOLL_LOG_LEVEL": "info",
        "HF_HOME": str(folder),
        "HF_HUB_OFFLINE": "1",
        # DeepSpeed compiles an operator for half a minute when it starts for the first time.
        "TORCH_EXTENSIONS_DIR": str(Path(sys.prefix) / "torch_extensions"),
    }
    output, errors = folder / "stdout", folder / "stderr"
    # Programs that a script starts in the background ignore SIGINT; with a handler here the job does not.
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    with reserved_port() as port, output.open("wb") as out, errors.open("wb") as err:
        process = subprocess.Popen(
            [sys.executable, *launcher, *([str(port)] if launcher else []), name],
            cwd=folder,
            env=environment(variables),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            start_new_session=True,
        )
        try:
            if meanwhile is not None:
                meanwhile(process)
            process.wait(300)
        finally:
            left = _end_session(process)
            signal.signal(signal.SIGINT, handler)
    assert not left, f"processes {left} of the job outlive the launcher"
    return Ended(process.returncode, output.read_text(), errors.read_text())


def _end_session(process: subprocess.Popen[bytes]) -> list[int]:
    """Kill what is left of the session of a launcher; returns the processes that are there a second after its end."""
    process.kill()
    process.wait()
    deadline = time.monotonic() + 1
    while (left := _of_session(process.pid)) and time.monotonic() < deadline:
        time.sleep(0.02)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    return left


def _of_session(session: int) -> list[int]:
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            # after the name in parentheses: state, parent, process group, session
            state, _, _, number = (entry / "stat").read_text().rpartition(")")[2].split()[:4]
        except OSError:
            continue
        if int(number) == session and state != "Z":
            found.append(int(entry.name))
    return found
