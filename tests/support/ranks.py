"""Runs functions in the ranks of a job, each in its own process, and collects results, exceptions and leaks.

In the test process::

    results = run_ranks(3, fn, 1, 2)            # join, call, leave; raises if any rank failed
    with ProcessJob(3) as job:                  # step by step, for fault tests
        job.call(fn, 1, 2)
        job.await_note(0)
        job.signal(2, signal.SIGKILL)
        outcomes = job.collect()

In a rank, functions of :mod:`worker` join (``enter``), send a note to the test (``send_note``) and leave (``leave``).
Functions are sent by module and name, and the ranks have this process's module search path; modules that do not import
pytest start faster. Warnings are errors in the ranks too, and output on a rank's standard error fails the test unless
the test expects it.
"""

from __future__ import annotations

import itertools
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from tests.support import forkserver
from tests.support.worker import Failure, end, enter, leave
from unicoll.net.wire.secret import new_key_text
from unicoll.run.job import reserve_port
from unicoll.testing import ranks as conformance_ranks
from unicoll.testing import sampling
from unicoll.testing.ranks import CALL_S, LAUNCHER_VARIABLES, PATIENCE_S
from unicoll.testing.ranks import RanksFailed as RanksFailed
from unicoll.testing.ranks import environment as environment
from unicoll.testing.sampling import sample_seed as sample_seed

ROOT = Path(__file__).resolve().parents[2]
"""The directory that contains the packages."""


@contextmanager
def reserved_port() -> Iterator[int]:
    """A free TCP port that no other program is given meanwhile; a server with SO_REUSEADDR can listen on it."""
    with reserve_port() as reserved:
        yield reserved.getsockname()[1]


@dataclass
class Outcome:
    """The result of a call on one rank; ``at`` is a time of time.monotonic, which all processes share."""

    rank: int
    value: Any = None
    failure: Failure | None = None
    at: float = 0.0
    returncode: int | None = None
    finished: bool = False


_jobs = itertools.count()
_SHARE_FRESH = 8


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
        self._modules = (*conformance_ranks.MODULES, *modules)
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
        init = {"file": f"file://{self._folder.name}/store", "tcp": f"tcp://127.0.0.1:{port}", "env": "env"}[
            join
        ]
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
                f"import sys; sys.path[:] = {sys.path!r}; from tests.support import worker;"
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
                deadline = min(deadline, time.monotonic() + PATIENCE_S)
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
            return self._processes[rank].wait(PATIENCE_S)
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


def end_cleanly(job: ProcessJob) -> None:
    """Leave the job on all ranks, check for leaks, and end the interpreters; raises RanksFailed."""
    job.call(leave)
    leaks = job.results()
    if any(leaks):
        raise RanksFailed(f"leaks after destroy_process_group, by rank: {leaks}")
    job.call(end)
    codes = job.wait_for_exit()
    if any(codes):
        raise RanksFailed(f"exit codes {codes}\n{job.report()}")


def joined(size: int, start: Callable[..., ProcessJob] = ProcessJob, **options: Any) -> ProcessJob:
    """A job whose ranks have joined; ``options`` are those of ``start``."""
    job = start(size, **options)
    try:
        job.call(enter)
        job.results()
    except BaseException:
        job.close()
        raise
    return job


def run_ranks(
    size: int,
    function: Callable[..., Any],
    *args: Any,
    timeout: float = CALL_S,
    env: dict[str, str] | None = None,
    start: Callable[..., ProcessJob] = ProcessJob,
) -> list[Any]:
    """Join, call, leave; returns each value. Raises RanksFailed on failures, hangs, leaks and output on stderr."""
    with joined(size, start, env=env) as job:
        job.call(function, *args)
        values = job.results(timeout)
        end_cleanly(job)
    return values


_pooled: set[ProcessJob] = set()


def pooled() -> tuple[set[int], Counter[str]]:
    """Processes and descriptors of the open pools and fork servers, which outlive the tests that use them.

    Descriptors are counted by their descriptions, as in :func:`unicoll.testing.ranks.snapshot`.
    """
    servers = forkserver.running()
    processes = servers | {pid for job in _pooled for pid in job.children}
    ranks = sum(job.size for job in _pooled)
    return processes, Counter({"fd socket": len(servers) + ranks, "fd pipe": sum(j.forks for j in _pooled)})


def pooled_memory() -> set[str]:
    """Files of /dev/shm of the open pools."""
    return {name for job in _pooled for name in job.shared_memory()}


class Pool:
    """A job for many calls; it starts at the first call, and again after a failure."""

    def __init__(self, size: int, start: Callable[[int], ProcessJob] = ProcessJob):
        self.size = size
        self._begin = start
        self._job: ProcessJob | None = None

    def run(self, function: Callable[..., Any], *args: Any, timeout: float = CALL_S) -> list[Any]:
        """Call a function on all ranks; returns their values. Raises RanksFailed on a failure or a hang."""
        try:
            if self._job is None:
                self._job = joined(self.size, self._begin)
                _pooled.add(self._job)
            self._job.call(function, *args)
            return self._job.results(timeout)
        except BaseException:
            job, self._job = self._job, None
            if job is not None:
                _pooled.discard(job)
                job.close()
            raise

    def close(self) -> None:
        """Leave the job and check for leaks."""
        job, self._job = self._job, None
        if job is not None:
            _pooled.discard(job)
            with job:
                end_cleanly(job)


def pools(start: Callable[[int], ProcessJob] = ProcessJob) -> AbstractContextManager[Callable[[int], Pool]]:
    """Creates pools on demand, one per world size, and closes them at the end."""
    return conformance_ranks.pools(lambda size: Pool(size, start))
