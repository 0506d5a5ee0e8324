"""The process that runs the stages, with time limits: at its limit it is killed with all its ranks."""

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

__all__ = ["ROOT", "Runner", "environment"]

_TAIL = 4000
_END_S = 3.0
ROOT = Path(__file__).resolve().parents[3]

Take = Callable[[dict[str, Any]], None]


class Runner:
    """A process that runs the stages one after another; after one that was cut off or crashed a new process starts.

    Args:
        arguments: arguments of ``python -m tests.gpu.check``, to which ``--report FD`` is added.
    """

    def __init__(self, arguments: Sequence[str]) -> None:
        self._arguments = list(arguments)
        self._process: subprocess.Popen[bytes] | None = None
        self._reading = -1
        self._stderr: Any = None

    def do(self, order: dict[str, Any], limit: float, take: Take) -> tuple[str, str]:
        """Run a stage.

        Args:
            order: the stage's name and its settings.
            limit: seconds after which the process is killed, with all processes that it has started.
            take: called with every line of its report.

        Returns:
            "done", "cut off" or "crashed", and a description of a crash.
        """
        deadline = time.monotonic() + limit
        try:
            if self._process is None:
                self._start()
            state, description = self._follow(order, deadline, take)
        except BaseException:
            self.close()
            raise
        if state != "done":
            description = description or self._said()
            self.close()
        return state, description

    def _start(self) -> None:
        self._reading, writing = os.pipe()
        self._stderr = tempfile.TemporaryFile()
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.gpu.check", *self._arguments, "--report", str(writing)],
                cwd=ROOT,
                env=environment(),
                stdin=subprocess.PIPE,
                stdout=self._stderr,
                stderr=self._stderr,
                pass_fds=[writing],
                start_new_session=True,
            )
        finally:
            os.close(writing)

    def _follow(self, order: dict[str, Any], deadline: float, take: Take) -> tuple[str, str]:
        """Read the report until the stage has ended."""
        process = self._process
        assert process is not None
        assert process.stdin is not None
        try:
            process.stdin.write(json.dumps(order).encode() + b"\n")
            process.stdin.flush()
        except BrokenPipeError:
            return "crashed", ""
        rest = b""
        while True:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([self._reading], [], [], left)[0]:
                return "cut off", ""
            data = os.read(self._reading, 1 << 16)
            if not data:
                return "crashed", ""
            *lines, rest = (rest + data).split(b"\n")
            for line in map(json.loads, lines):
                if "ended" in line:
                    return ("crashed", line["ended"]) if line["ended"] else ("done", "")
                take(line)

    def _said(self) -> str:
        """The last part of the process's standard error."""
        end = self._stderr.seek(0, os.SEEK_END)
        self._stderr.seek(max(0, end - _TAIL))
        said: bytes = self._stderr.read()
        return said.decode(errors="replace")

    def close(self) -> None:
        """Kill the process and its ranks, each with its process group; idempotent."""
        process, self._process = self._process, None
        if process is None:
            return
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        try:
            process.wait(_END_S)
        except subprocess.TimeoutExpired:  # the driver blocks its end
            pass
        assert process.stdin is not None
        process.stdin.close()
        os.close(self._reading)
        self._stderr.close()


def environment() -> dict[str, str]:
    """This process's environment, with the checkout on Python's path."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    few = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}  # a process without threads can fork ranks
    return {**os.environ, **few, "PYTHONPATH": os.pathsep.join(paths), "PYTHONFAULTHANDLER": "1"}
