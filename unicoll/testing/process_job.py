"""A job of processes that execute the calls of a test (:mod:`unicoll.testing.ranks`)."""

from __future__ import annotations

import itertools
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from unicoll.net.secret import new_key_text
from unicoll.testing import forkserver, sampling
from unicoll.testing.environment import LAUNCHER_VARIABLES, environment, reserved_port
from unicoll.testing.worker import Failure

CALL_S = 180.0
"""Time limit of a call on the ranks: a call that takes seconds takes a minute on a machine with ten times its load."""
_GRACE_S = 8.0
"""Time limit for the other ranks after a failure, and for the release of resources."""


@dataclass
class Outcome:
    """The result of a call on one rank; ``at`` is a time of time.monotonic, which all processes share."""

    rank: int
    value: Any = None
    failure: Failure | None = None
    at: float = 0.0
    returncode: int | None = None
    finished: bool = False


class RanksFailed(AssertionError):
    """At least one rank failed, hung or died; the message has the outcome report of every rank."""


_jobs = itertools.count()
_SHARE_FRESH = 8
_MODULES = (
    "encodings.ascii",  # as sockets import them
    "encodings.idna",
    "gloo_fallback.backend",
    "unicoll.api.subgroups",
    "unicoll.backend.fallback_adapter",
    "unicoll.bootstrap.join",
    "unicoll.testing.conformance_jobs",
)
"""What ranks import when they start, join and are tested; a fork has it."""


def _selects_fresh() -> bool:
    """True if the next job uses new interpreters."""
    return sampling.wants_full() or (next(_jobs) + sampling.sample_seed()) % _SHARE_FRESH == 0


class ProcessJob:
    """``size`` processes that execute calls sent by the test.

    The ranks of most jobs are forks of an interpreter that has imported the library (:mod:`forkserver`), which is
    faster. One job in eight, selected by the seed, uses new interpreters, and so do all jobs with
    ``UNICOLL_TEST_FULL=1`` and jobs with variables that are read when an interpreter starts.

    Args:
        size: number of ranks.
        join: rendezvous of :func:`enter`: "file", "tcp" or "env".
        env: additional environment variables of all ranks.
        quiet: True if output on a rank's standard error is a failure.
        prepare: a function and its arguments, which every rank calls first.
        modules: modules that the ranks use and that are slow to import, for example torch.
        fresh: True for new interpreters, False for forks, None to select by the seed.
    """

    warnings = "error"
    """Value of ``-W`` for the ranks' interpreters."""
    prepare_timeout = CALL_S
    """Timeout of ``prepare`` in seconds."""

    def __init__(
        self,
        size: int,
        *,
        join: str = "file",
        env: dict[str, str] | None = None,
        quiet: bool = True,
        prepare: tuple[Any, ...] | None = None,
        modules: Sequence[str] = (),
        fresh: bool | None = None,
    ):
        self.size = size
        self._modules = (*_MODULES, *modules)
        self._fresh = _selects_fresh() if fresh is None else fresh
        self.quiet = quiet
        self.outcomes = [Outcome(rank) for rank in range(size)]
        self._notes: list[list[Any]] = [[] for _ in range(size)]
        self._folder = tempfile.TemporaryDirectory(prefix="unicoll-ranks-")
        self._held = ExitStack()
        self._pipes: list[Connection] = []
        self._processes: list[subprocess.Popen[bytes] | forkserver.Forked] = []
        try:
            self._start_all(join, environment(env))
            if prepare is not None:
                self.call(*prepare)
                self.results(self.prepare_timeout)
        except BaseException:
            self.close()
            raise

    def _start_all(self, join: str, variables: dict[str, str]) -> None:
        """Start the ranks, each with a pipe."""
        port = 0 if join == "file" else self._held.enter_context(reserved_port())
        init = {
            "file": f"file://{self._folder.name}/store",
            "tcp": f"tcp://127.0.0.1:{port}",
            "env": "env",
        }[join]
        if join == "env":
            variables |= {"WORLD_SIZE": str(self.size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
            variables.setdefault("UNICOLL_SECRET", new_key_text())
        for rank in range(self.size):
            self._start(rank, init, variables | ({"RANK": str(rank)} if join == "env" else {}))

    def _start(self, rank: int, init: str, variables: dict[str, str]) -> None:
        ours, theirs = socket.socketpair()
        self._pipes.append(Connection(ours.detach()))
        with theirs, open(self._stderr(rank), "wb") as stderr:
            if self._is_forked(variables):
                server = forkserver.server(self._modules, self.warnings, environment())
                arguments = (rank, self.size, init)
                self._processes.append(server.fork(theirs.fileno(), stderr.fileno(), variables, arguments))
                return
            program = (
                f"import sys; sys.path[:] = {sys.path!r}; from unicoll.testing import worker;"
                f" worker.work({theirs.fileno()}, {rank}, {self.size}, {init!r})"
            )
            self._processes.append(
                subprocess.Popen(
                    [sys.executable, "-W", self.warnings, "-c", program],
                    env=variables,
                    stdin=subprocess.DEVNULL,
                    stderr=stderr,
                    pass_fds=[theirs.fileno()],
                    start_new_session=True,
                )
            )

    def _is_forked(self, variables: dict[str, str]) -> bool:
        """True if a rank with this environment can be a fork: it may differ only in variables read after the start."""
        if self._fresh or not forkserver.is_supported():
            return False
        differing = {name for name, _ in variables.items() ^ environment().items()}
        return all(LAUNCHER_VARIABLES.match(name) for name in differing - {"TMPDIR"})

    def _stderr(self, rank: int) -> Path:
        return Path(self._folder.name, f"stderr-{rank}")

    @property
    def pids(self) -> list[int]:
        return [p.pid for p in self._processes]

    @property
    def children(self) -> list[int]:
        """Processes that this process has started for the job."""
        return [p.pid for p in self._processes]

    @property
    def forks(self) -> int:
        """Number of its processes that are forks; each has a pipe for its exit code."""
        return sum(isinstance(p, forkserver.Forked) for p in self._processes)

    def shared_memory(self) -> set[str]:
        """Files of /dev/shm that the ranks' libraries keep for the lifetime of the job."""
        return set()

    def call(self, function: Callable[..., Any], *args: Any, ranks: Sequence[int] | None = None) -> None:
        """Start a function on the given ranks (all)."""
        for rank in range(self.size) if ranks is None else ranks:
            self.outcomes[rank] = Outcome(rank)
            self._pipes[rank].send((function.__module__, function.__qualname__, args))

    def signal(self, rank: int, number: int) -> float:
        """Send a signal to a rank; returns the time, on the clock of :attr:`Outcome.at`."""
        now = time.monotonic()
        os.kill(self.pids[rank], number)
        return now

    def await_note(self, rank: int, timeout: float = CALL_S) -> Any:
        deadline = time.monotonic() + timeout
        while not self._notes[rank]:
            if self.outcomes[rank].finished:
                raise RanksFailed(f"rank {rank} ended without sending a note\n{self.report()}")
            if not self._receive(deadline):
                raise RanksFailed(f"no note from rank {rank} in {timeout:g} s\n{self._dump()}")
        return self._notes[rank].pop(0)

    def await_notes(self, timeout: float = CALL_S) -> list[Any]:
        return [self.await_note(rank, timeout) for rank in range(self.size)]

    def collect(
        self, timeout: float = CALL_S, ranks: Sequence[int] | None = None, fail_fast: bool = False
    ) -> list[Outcome]:
        """Wait until the call has ended on the given ranks (all): with a result, an exception or the rank's exit.

        With ``fail_fast`` the timeout is reduced to a few seconds after a rank has failed.
        """
        deadline = time.monotonic() + timeout
        wanted = range(self.size) if ranks is None else ranks
        while not all(self.outcomes[r].finished for r in wanted):
            failed = any(o.failure or o.returncode for o in self.outcomes)
            if fail_fast and failed:
                deadline = min(deadline, time.monotonic() + _GRACE_S)
                fail_fast = False
            if not self._receive(deadline):
                late = [r for r in wanted if not self.outcomes[r].finished]
                raise RanksFailed(f"ranks {late} did not end in {timeout:g} s\n{self._dump()}")
        return [self.outcomes[r] for r in wanted]

    def results(self, timeout: float = CALL_S) -> list[Any]:
        """As :meth:`collect`, but raises RanksFailed if a rank failed; returns the values."""
        outcomes = self.collect(timeout, fail_fast=True)
        if any(o.failure or o.returncode is not None for o in outcomes):
            raise RanksFailed(self.report())
        return [o.value for o in outcomes]

    def _receive(self, deadline: float) -> bool:
        """Receive the next messages of the ranks; False if none arrives by the deadline."""
        open_pipes = {
            p: r for r, p in enumerate(self._pipes) if not p.closed and self.outcomes[r].returncode is None
        }
        ready = wait(list(open_pipes), max(0.0, deadline - time.monotonic()))
        for pipe in ready:
            assert isinstance(pipe, Connection)
            rank = open_pipes[pipe]
            outcome = self.outcomes[rank]
            try:
                kind, *rest = pipe.recv()
            except (EOFError, OSError):
                outcome.at = outcome.at or time.monotonic()
                outcome.returncode = self._reap(rank)
                outcome.finished = True
                continue
            if kind == "note":
                self._notes[rank].append(rest[0])
            else:
                outcome.value, outcome.failure, outcome.at = rest
                outcome.finished = True
        return bool(ready)

    def _reap(self, rank: int) -> int:
        try:
            return self._processes[rank].wait(_GRACE_S)
        except subprocess.TimeoutExpired:
            return -1000  # it closed its pipe but is still running

    def wait_for_exit(self, timeout: float = 30.0, ranks: Sequence[int] | None = None) -> list[int]:
        """Wait for the given ranks (all) to exit; returns their exit codes."""
        deadline = time.monotonic() + timeout
        processes = self._processes if ranks is None else [self._processes[r] for r in ranks]
        try:
            return [p.wait(max(0.0, deadline - time.monotonic())) for p in processes]
        except subprocess.TimeoutExpired:
            raise RanksFailed(f"ranks did not exit in {timeout:g} s\n{self._dump()}") from None

    def stderr(self, rank: int) -> str:
        """The output of a rank on its standard error."""
        return self._stderr(rank).read_text(errors="replace")

    def report(self) -> str:
        """The outcome report: state, traceback and standard error of every rank."""
        lines = []
        for outcome in self.outcomes:
            state = "still in the call"
            if outcome.failure is not None:
                state = f"raised\n{outcome.failure.traceback}"
            elif outcome.returncode is not None:
                state = f"exited with {outcome.returncode}"
            elif outcome.finished:
                state = "done"
            lines.append(f"--- rank {outcome.rank} (pid {self.pids[outcome.rank]}): {state}")
            lines.append(self.stderr(outcome.rank)[-8000:])
        return "\n".join(lines)

    def _dump(self) -> str:
        """:meth:`report` with the stacks of all threads of all ranks."""
        for process in self._processes:
            if process.poll() is None:
                process.send_signal(signal.SIGUSR1)
        time.sleep(0.5)
        return self.report()

    def close(self) -> None:
        """Kill the ranks and their children that are still running; idempotent."""
        for process in self._processes:
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            process.wait()
        for pipe in self._pipes:
            pipe.close()
        self._held.close()
        self._folder.cleanup()

    def check_quiet(self) -> None:
        """Raise RanksFailed if a rank has written to its standard error."""
        noisy = [r for r in range(self.size) if self.stderr(r)]
        if self.quiet and noisy:
            raise RanksFailed(f"ranks {noisy} wrote to their standard error\n{self.report()}")

    def __enter__(self) -> ProcessJob:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        try:
            if kind is None:
                self.check_quiet()
        finally:
            self.close()
