"""The process that does the stages, with limits that are kept: what goes beyond one is killed with all its ranks."""

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

__all__ = ["TESTS", "Runner", "environment"]

_TAIL = 4000
_END_S = 3.0
TESTS = Path(__file__).resolve().parents[1]

Take = Callable[[dict[str, Any]], None]


class Runner:
    """A process that does stage after stage; after one that was cut off or crashed there is a new one.

    Args:
        arguments: of ``python -m gpu_check``, to which ``--report FD`` is added.
    """

    def __init__(self, arguments: Sequence[str]) -> None:
        self._arguments = list(arguments)
        self._process: subprocess.Popen[bytes] | None = None
        self._reading = -1
        self._stderr: Any = None

    def do(self, order: dict[str, Any], limit: float, take: Take) -> tuple[str, str]:
        """Do a stage.

        Args:
            order: the stage's name and what else the process has to know.
            limit: seconds after which it is killed, with everything that it has started.
            take: gets every line of its report.

        Returns:
            "done", "cut off" or "crashed", and what there is to say about a crash.
        """
        deadline = time.monotonic() + limit
        try:
            if self._process is None:
                self._start()
            state, story = self._follow(order, deadline, take)
        except BaseException:
            self.close()
            raise
        if state != "done":
            story = story or self._said()
            self.close()
        return state, story

    def _start(self) -> None:
        self._reading, writing = os.pipe()
        self._stderr = tempfile.TemporaryFile()
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "gpu_check", *self._arguments, "--report", str(writing)],
                cwd=TESTS.parent, env=environment(), stdin=subprocess.PIPE, stdout=self._stderr, stderr=self._stderr,
                pass_fds=[writing], start_new_session=True,
            )  # fmt: skip
        finally:
            os.close(writing)

    def _follow(self, order: dict[str, Any], deadline: float, take: Take) -> tuple[str, str]:
        """Take what comes until the stage has ended."""
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
        """The end of what the process has written to its standard error."""
        end = self._stderr.seek(0, os.SEEK_END)
        self._stderr.seek(max(0, end - _TAIL))
        said: bytes = self._stderr.read()
        return said.decode(errors="replace")

    def close(self) -> None:
        """End the process and its ranks, each with the process group that it leads; idempotent."""
        process, self._process = self._process, None
        if process is None:
            return
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        try:
            process.wait(_END_S)
        except subprocess.TimeoutExpired:  # the driver holds it; there is no time to wait for that
            pass
        assert process.stdin is not None
        process.stdin.close()
        os.close(self._reading)
        self._stderr.close()


def environment() -> dict[str, str]:
    """This process's environment, with the tests and the checkout on Python's path."""
    paths = [str(TESTS), str(TESTS.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    few = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}  # a process without threads can fork ranks
    return {**os.environ, **few, "PYTHONPATH": os.pathsep.join(paths), "PYTHONFAULTHANDLER": "1"}
