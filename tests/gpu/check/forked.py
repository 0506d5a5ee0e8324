"""Simulated ranks that are forks of this process, since the start of an interpreter takes too long for them."""

from __future__ import annotations

import gc
import multiprocessing
import os
import subprocess
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from tests.simulated_nccl.ranks import SimulatedJob
from unicoll.testing import worker

__all__ = ["ForkedJob"]

_FORK = multiprocessing.get_context("fork")


class _Process:
    """A fork, with the methods of :class:`subprocess.Popen` that a job needs."""

    def __init__(self, function: Callable[..., None], *args: Any) -> None:
        self._process = _FORK.Process(target=function, args=args, daemon=True)
        self._process.start()
        assert self._process.pid is not None
        self.pid: int = self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        code = self._process.exitcode
        if code is None:
            raise subprocess.TimeoutExpired("a rank", timeout or 0.0)
        return code

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)


class ForkedJob(SimulatedJob):
    """As the base class, by a fork; this process must have no threads. Functions registered for exit do not run."""

    def _start(self, rank: int, init: str, variables: dict[str, str]) -> None:
        ours, theirs = _FORK.Pipe()
        self._pipes.append(ours)
        stderr = os.open(self._stderr(rank), os.O_WRONLY | os.O_CREAT, 0o600)
        with theirs:
            process: Any = _Process(_be_rank, theirs, stderr, rank, self.size, init, variables)
        self._processes.append(process)
        os.close(stderr)


def _be_rank(
    pipe: Connection, stderr: int, rank: int, size: int, init: str, variables: dict[str, str]
) -> None:
    os.setsid()
    os.dup2(stderr, 2)
    os.environ.clear()
    os.environ.update(variables)
    warnings.simplefilter("error")
    gc.freeze()  # the garbage collector need not traverse the objects of the parent
    worker.work(pipe.fileno(), rank, size, init)
