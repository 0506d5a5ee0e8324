"""A stage in a process of its own, with a limit that is kept: then it and all its ranks are killed."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

__all__ = ["TESTS", "environment", "run_stage"]

_TICK_S = 0.25
_TAIL = 4000
TESTS = Path(__file__).resolve().parents[1]

Take = Callable[[dict[str, Any]], None]


def run_stage(arguments: Sequence[str], limit: float, take: Take) -> tuple[str, str]:
    """Run ``python -m gpu_check`` with these arguments and a pipe to report through.

    Args:
        arguments: of the stage; ``--report FD`` is added.
        limit: seconds after which it is killed, with everything that it has started.
        take: gets every line of its report.

    Returns:
        "done", "cut off" or "crashed", and the end of what it wrote to its standard error if it crashed.
    """
    reading, writing = os.pipe()
    with tempfile.TemporaryFile() as stderr:
        process = subprocess.Popen(
            [sys.executable, "-m", "gpu_check", *arguments, "--report", str(writing)],
            cwd=TESTS.parent, env=environment(), stdin=subprocess.DEVNULL, stdout=stderr, stderr=stderr,
            pass_fds=[writing], start_new_session=True,
        )  # fmt: skip
        os.close(writing)
        try:
            state = _follow(reading, process, time.monotonic() + limit, take)
        finally:
            os.close(reading)
            _kill(process)
        if state != "done":
            stderr.seek(max(0, stderr.tell() - _TAIL))
            return state, stderr.read().decode(errors="replace")
    return state, ""


def environment() -> dict[str, str]:
    """This process's environment, with the tests and the checkout on Python's path."""
    paths = [str(TESTS), str(TESTS.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONFAULTHANDLER": "1"}


def _follow(reading: int, process: subprocess.Popen[bytes], deadline: float, take: Take) -> str:
    """Take what comes until the stage has ended."""
    rest = b""
    while True:
        left = deadline - time.monotonic()
        if left <= 0:
            return "cut off"
        if not select.select([reading], [], [], min(left, _TICK_S))[0]:
            continue
        data = os.read(reading, 1 << 16)
        if not data:
            break
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            take(json.loads(line))
    try:
        return "done" if process.wait(max(0.1, deadline - time.monotonic())) == 0 else "crashed"
    except subprocess.TimeoutExpired:
        return "cut off"


def _kill(process: subprocess.Popen[bytes]) -> None:
    """End the stage's process group; its ranks end with it, each with the group that it leads."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()
