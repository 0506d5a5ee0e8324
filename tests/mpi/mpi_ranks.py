"""Ranks that ``mpirun`` starts: the harness of :mod:`ranks` for Open MPI, MPICH and Intel MPI.

In the test process::

    with MpiJob(3) as job:                      # as ranks.Job, the ranks being mpirun's children
        job.call(enter)
    ended = mpirun(2, "script.py", "--option")  # a program of its own: output and exit code

A rank cannot inherit a pipe through mpirun: it connects to a socket in a folder that only this user can open, and
sends its rank.
"""

from __future__ import annotations

import os
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tests.mpi.mpi_library import (
    Tree,
    across,
    command,
    descendants,
    kill,
    library,
    lives,
    segments,
    unavailable_reason,
    variables_for,
)
from tests.support import worker
from tests.support.hosts import ADDRESSES, Hosts
from tests.support.ranks import ROOT, ProcessJob, RanksFailed

__all__ = ["Ended", "MpiJob", "Program", "library", "mpirun", "started", "unavailable_reason"]

_START_S = _EXIT_S = 60.0
_HELLO = struct.Struct("=ii")
UNKNOWN = -1001
"""The exit code of a rank that has ended: only mpirun has the real one."""


# --- programs -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ended:
    """How a program under mpirun ended."""

    returncode: int
    stdout: str
    stderr: str


class Program(Tree):
    """A program under mpirun.

    Attributes:
        process: mpirun.
        folder: with its output, files ``stdout`` and ``stderr``.
    """

    def __init__(self, process: subprocess.Popen[bytes], folder: str) -> None:
        super().__init__(process)
        self.folder = Path(folder)

    def output(self, stream: str = "stdout") -> str:
        """Output of the ranks and of mpirun so far."""
        return (self.folder / stream).read_text(errors="replace")

    def wait(self, timeout: float = 120.0) -> int:
        """Exit code of mpirun; RanksFailed if it does not end in time."""
        self.wait_until(lambda: self.process.poll() is not None, "mpirun did not end", timeout)
        return self.process.returncode

    def wait_until(self, condition: Callable[[], object], failure: str, timeout: float = 60.0) -> None:
        """Wait for a condition, and record the processes; RanksFailed with a text if it is not true in time."""
        deadline = time.monotonic() + timeout
        while not condition():
            if time.monotonic() > deadline:
                output = f"{self.output()}\n{self.output('stderr')}"
                raise RanksFailed(f"{failure} in {timeout:g} s\n{output}")
            self.record()
            time.sleep(0.02)


@contextmanager
def started(
    size: int, *program: str, env: dict[str, str] | None = None, options: Sequence[str] = ()
) -> Iterator[Program]:
    """Start a Python program on ``size`` ranks (arguments of ``python``); it ends with the block."""
    with tempfile.TemporaryDirectory(prefix="unicoll-mpirun-") as folder:
        out, err = Path(folder, "stdout"), Path(folder, "stderr")
        with out.open("wb") as stdout, err.open("wb") as stderr:
            process = subprocess.Popen(
                command(size, options, [sys.executable, *program]),
                env=variables_for(folder, {"PYTHONPATH": str(ROOT)} | (env or {})),
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                start_new_session=True,
                cwd=folder,
            )
        running = Program(process, folder)
        try:
            yield running
        finally:
            running.close()


def mpirun(
    size: int,
    *program: str,
    env: dict[str, str] | None = None,
    options: Sequence[str] = (),
    timeout: float = 120.0,
) -> Ended:
    """As :func:`started`, to the program's end."""
    with started(size, *program, env=env, options=options) as running:
        code = running.wait(timeout)
        return Ended(code, running.output(), running.output("stderr"))


def run_script(script: Path, source: str, size: int = 2, **options: object) -> Ended:
    """Run source under mpirun; it must exit with 0 and write nothing to standard error."""
    ended = try_script(script, source, size, **options)
    assert ended.returncode == 0, ended
    assert ended.stderr == "", ended
    return ended


def try_script(script: Path, source: str, size: int = 2, **options: object) -> Ended:
    """Run source under mpirun, with any exit code."""
    script.write_text(textwrap.dedent(source))
    return mpirun(size, "-W", "error", str(script), **options)  # type: ignore[arg-type]


def run_alone(
    source: str, folder: Path, *launcher: str, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run source in processes without mpirun, where Open MPI does not remove its shared memory."""
    script = folder / "script.py"
    script.write_text(source)
    own = {"PYTHONPATH": str(ROOT), "OMPI_MCA_btl_sm_backing_directory": str(folder)}
    return subprocess.run(
        [sys.executable, *launcher, str(script)],
        env=variables_for(str(folder), own | variables),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def sorted_lines(ended: Ended) -> list[str]:
    return sorted(ended.stdout.splitlines())


# --- jobs -----------------------------------------------------------------------------------------------------


class MpiJob(ProcessJob):
    """``size`` new interpreters under one mpirun, which run the functions passed to :meth:`call`.

    Args:
        size: number of ranks.
        backend: backend of :func:`worker.enter`; None for the default.
        env: more environment variables, for all ranks. Large arrays are moved by MPI, not through shared memory, unless
            ``UNICOLL_TRANSPORT`` is among them or set for the tests.
        quiet: True if output on a rank's standard error, or of mpirun, is a failure.
        recover: True if the other ranks keep running when a rank dies; by default mpirun ends them at once.
        warm_up: True if ranks join and leave once before the job, so that resources that the MPI library opens for the
            life of the process are not reported as leaks.
        prepare: a function, with its arguments, that every rank calls before it joins.
        hosts: the ranks are on these in turn, mpirun on the first.
    """

    def __init__(
        self,
        size: int,
        *,
        backend: str | None = None,
        env: dict[str, str] | None = None,
        quiet: bool = True,
        recover: bool = False,
        warm_up: bool = False,
        prepare: tuple[Any, ...] | None = None,
        hosts: Hosts | None = None,
    ):
        self._hosts = hosts
        self._ranks = [-1] * size
        self._options = library().recover if recover else ()
        self._recover = recover
        self._arguments = (backend, warm_up)
        transport = {"UNICOLL_TRANSPORT": os.environ.get("UNICOLL_TRANSPORT", "tcp")}
        super().__init__(size, join="env", env=transport | (env or {}), quiet=quiet, prepare=prepare)

    def _start_all(self, join: str, variables: dict[str, str]) -> None:
        folder = self._folder.name
        program = (
            f"import sys; sys.path[:] = {sys.path!r}; from tests.mpi import mpi_ranks;"
            f" mpi_ranks.attend({folder!r}, {library().rank!r}, {self.size}, {self._arguments!r})"
        )
        options, variables = [*self._options], variables | library().variables | {"TMPDIR": folder}
        if self._hosts is not None:
            agent = Path(folder, "agent")
            self._hosts.write_agent(agent)
            more, needed = across(ADDRESSES, "lan0", str(agent))
            options, variables = options + more, variables | needed
            variables.pop("UNICOLL_SOCKET_IFNAME", None)
        words = command(self.size, options, [sys.executable, "-W", self.warnings, "-c", program])
        with socket.socket(socket.AF_UNIX) as listener, open(self._output_path, "wb") as output:
            listener.bind(f"{folder}/hello")
            listener.listen(self.size)
            listener.settimeout(0.1)
            self._processes.append(
                subprocess.Popen(
                    words if self._hosts is None else self._hosts.on(1, *words),
                    env=variables,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    start_new_session=True,
                )
            )
            self._tree = Tree(self._processes[0])
            self._greet(listener)

    def _greet(self, listener: socket.socket) -> None:
        """Accept the connections of all ranks, and order them by rank."""
        deadline = time.monotonic() + _START_S
        pipes: dict[int, Connection] = {}
        try:
            while len(pipes) < self.size:
                if self._processes[0].poll() is not None or time.monotonic() > deadline:
                    raise RanksFailed(f"only ranks {sorted(pipes)} have connected\n{self.report()}")
                try:
                    sock = listener.accept()[0]
                except TimeoutError:
                    continue
                with sock:
                    sock.settimeout(_START_S)
                    rank, pid = _HELLO.unpack(sock.recv(_HELLO.size, socket.MSG_WAITALL))
                    sock.settimeout(None)
                    pipes[rank] = Connection(sock.detach())
                self._ranks[rank] = pid
        finally:
            self._pipes += [pipes[rank] for rank in sorted(pipes)]

    @property
    def _output_path(self) -> Path:
        return Path(self._folder.name, "mpirun")

    @property
    def pids(self) -> list[int]:
        return self._ranks

    def mpirun_output(self) -> str:
        """Output of mpirun, with that of its ranks."""
        return self._output_path.read_text(errors="replace")

    def shared_memory(self) -> set[str]:
        return {Path(path).name for path in segments(descendants(self._processes[0].pid))}

    def call(self, *args: object, **options: object) -> None:
        self._tree.record()
        super().call(*args, **options)  # type: ignore[arg-type]

    def signal(self, rank: int, number: int) -> float:
        self._tree.record()
        if self._recover and number == signal.SIGKILL:
            self._tree.stop_proxy()
        return super().signal(rank, number)

    def _reap(self, rank: int) -> int:
        deadline = time.monotonic() + _EXIT_S
        while lives(self._ranks[rank]):
            if time.monotonic() > deadline:
                return -1000
            time.sleep(0.01)
        return UNKNOWN

    def wait_for_exit(self, timeout: float = 30.0) -> list[int]:
        """mpirun's exit code, once for each rank."""
        return super().wait_for_exit(timeout) * self.size

    def report(self) -> str:
        return f"{super().report()}\n--- mpirun: {self.mpirun_output()[-8000:]}"

    def stderr(self, rank: int) -> str:
        path = self._stderr(rank)
        return path.read_text(errors="replace") if path.exists() else ""

    def _dump(self) -> str:
        for pid in filter(lives, self._ranks):
            kill(pid, signal.SIGUSR1)
        time.sleep(0.5)
        return self.report()

    def close(self) -> None:
        if self._processes:
            self._tree.close()
        for pipe in self._pipes:
            pipe.close()
        self._folder.cleanup()

    def __enter__(self) -> MpiJob:
        return self

    def check_quiet(self) -> None:
        super().check_quiet()
        # Open MPI's mpirun may warn that the process group of an agent, which runs its command already, cannot be set.
        lines = [line for line in self.mpirun_output().splitlines() if "Warning: setpgid" not in line]
        if self.quiet and lines:
            raise RanksFailed(f"mpirun wrote output\n{self.report()}")


def attend(folder: str, variable: str, size: int, arguments: tuple[str | None, bool]) -> None:
    """The main function of a rank; ``variable`` is the launcher's variable with its rank."""
    rank = int(os.environ[variable])
    with open(f"{folder}/stderr-{rank}", "wb") as stderr:
        os.dup2(stderr.fileno(), 2)
    worker.BACKEND, warm_up = arguments
    if warm_up:
        _warm_up()
    # only now: a rank that joins again before all have left keeps the thread of rank 0's store alive
    sock = socket.socket(socket.AF_UNIX)
    sock.connect(f"{folder}/hello")
    sock.sendall(_HELLO.pack(rank, os.getpid()))
    worker.work(sock.detach(), rank, size, "env")


def _warm_up() -> None:
    """Join, reduce arrays over connections of all kinds, and leave; only the thread that makes all MPI calls stays.

    Intel MPI connects a process with itself when it exchanges with all processes for a NaN.
    """
    import numpy as np

    import unicoll as dist
    from tests.support.order import await_true

    worker._init = "env"
    before = {*threading.enumerate()}
    worker.enter()
    for value in (0.0, np.nan):
        dist.all_reduce(np.full(10_000, value), op=dist.ReduceOp.MAX)
    dist.destroy_process_group()
    await_true(lambda: {t.name for t in {*threading.enumerate()} - before} <= {"unicoll-mpi"})
