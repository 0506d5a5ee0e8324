"""Functions as the ranks of a job, each in a fresh interpreter: results, exceptions, signals, and nothing left behind.

In the test process::

    results = run_ranks(3, fn, 1, 2)            # joined, called, left; raises if any rank failed
    with Job(3) as job:                         # step by step, for faults
        job.call(fn, 1, 2)
        job.await_note(0)
        job.signal(2, signal.SIGKILL)
        outcomes = job.collect()

In a rank, functions of :mod:`worker` join (``enter``), send a note to the test (``tell``) and leave (``leave``).
Functions travel by module and name, and the ranks search modules where this process does; a module without pytest in
it starts faster. Warnings are errors in the ranks too, and whatever a rank writes to its standard error fails the test
unless the test expects it.
"""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from .worker import Failure, end, enter, leave

ROOT = Path(__file__).resolve().parents[2]
"""The folder that the packages are in."""

_SCRUBBED = (
    "RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "UNICOLL_", "GLOO_", "GROUP_RANK", "ROLE_", "TORCHELASTIC_",
    "OMPI_", "PMI", "MPI_", "MV2_", "SLURM_", "PALS_", "HYDRA_", "NCCL_",
)  # fmt: skip
_TEST_OPTIONS = ("UNICOLL_TEST_", "UNICOLL_TRANSPORT", "UNICOLL_CHANNEL")
_GRACE_S = 8.0
"""How long the other ranks may go on after one has failed, and how long things may take to be given back."""


@dataclass
class Outcome:
    """How a call ended on one rank; ``at`` is on the clock of time.monotonic, which all processes share."""

    rank: int
    value: Any = None
    failure: Failure | None = None
    at: float = 0.0
    returncode: int | None = None
    finished: bool = field(default=False)


class RanksFailed(AssertionError):
    """At least one rank failed, hung or died; the message has every rank's story."""


SEED_VARIABLE = "UNICOLL_TEST_SEED"


def drawn_seed() -> int:
    """The seed of this run's random samples: from the environment, or drawn, and put there."""
    return int(os.environ.setdefault(SEED_VARIABLE, str(random.SystemRandom().randrange(1 << 24))))


def free_port() -> int:
    """A port that nothing listens on, outside the range from which outgoing connections take theirs."""
    for _ in range(100):
        port = random.SystemRandom().randrange(20000, 32000)
        with socket.socket() as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                sock.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise RuntimeError("no free port found")


def environment(extra: dict[str, str] | None = None) -> dict[str, str]:
    """This process's environment without what a launcher may have put there."""
    kept = {k: v for k, v in os.environ.items() if k.startswith(_TEST_OPTIONS) or not k.startswith(_SCRUBBED)}
    kept |= {"UNICOLL_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    return kept | {"PYTHONFAULTHANDLER": "1"} | (extra or {})


class Job:
    """``size`` fresh interpreters that do what they are called to.

    Args:
        size: number of ranks.
        join: how :func:`enter` meets the others: "file", "tcp" or "env".
        env: more environment variables, for all ranks.
        quiet: whether output on a rank's standard error is a failure.
        prepare: a function, and its arguments, that every rank calls before anything else.
    """

    warnings = "error"
    """What the ranks' interpreters do with warnings, as ``-W`` has it."""
    patience = 60.0
    """Seconds that ``prepare`` may take."""

    def __init__(
        self,
        size: int,
        *,
        join: str = "file",
        env: dict[str, str] | None = None,
        quiet: bool = True,
        prepare: tuple[Any, ...] | None = None,
    ):
        self.size = size
        self.quiet = quiet
        self.outcomes = [Outcome(rank) for rank in range(size)]
        self._notes: list[list[Any]] = [[] for _ in range(size)]
        self._folder = tempfile.TemporaryDirectory(prefix="unicoll-ranks-")
        self._pipes: list[Connection] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        try:
            self._start_all(join, environment(env))
            if prepare is not None:
                self.call(*prepare)
                self.results(self.patience)
        except BaseException:
            self.close()
            raise

    def _start_all(self, join: str, variables: dict[str, str]) -> None:
        """Start the ranks, each with a pipe to it."""
        port = free_port()
        init = {
            "file": f"file://{self._folder.name}/store",
            "tcp": f"tcp://127.0.0.1:{port}",
            "env": "env",
        }[join]
        if join == "env":
            variables |= {"WORLD_SIZE": str(self.size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
            variables.setdefault("UNICOLL_SECRET", "x" * 32)
        for rank in range(self.size):
            self._start(rank, init, variables | ({"RANK": str(rank)} if join == "env" else {}))

    def _start(self, rank: int, init: str, variables: dict[str, str]) -> None:
        ours, theirs = socket.socketpair()
        self._pipes.append(Connection(ours.detach()))
        program = (
            f"import sys; sys.path[:] = {sys.path!r}; from unicoll.testing import worker;"
            f" worker.work({theirs.fileno()}, {rank}, {self.size}, {init!r})"
        )
        with theirs, open(self._stderr(rank), "wb") as stderr:
            self._processes.append(
                subprocess.Popen(
                    [sys.executable, "-W", self.warnings, "-c", program],
                    env=variables, stdin=subprocess.DEVNULL, stderr=stderr, pass_fds=[theirs.fileno()],
                    start_new_session=True,
                )
            )  # fmt: skip

    def _stderr(self, rank: int) -> Path:
        return Path(self._folder.name, f"stderr-{rank}")

    @property
    def pids(self) -> list[int]:
        """Process ids of the ranks."""
        return [p.pid for p in self._processes]

    @property
    def children(self) -> list[int]:
        """Processes that this one has started for the job."""
        return [p.pid for p in self._processes]

    def shared_memory(self) -> set[str]:
        """Files of /dev/shm that the ranks' libraries use for as long as the job lasts."""
        return set()

    def call(self, function: Callable[..., Any], *args: Any, ranks: Sequence[int] | None = None) -> None:
        """Start a function on all ranks, or some."""
        for rank in range(self.size) if ranks is None else ranks:
            self.outcomes[rank] = Outcome(rank)
            self._pipes[rank].send((function.__module__, function.__qualname__, args))

    def signal(self, rank: int, number: int) -> float:
        """Send a signal to a rank; returns the time, on the clock of :attr:`Outcome.at`."""
        now = time.monotonic()
        os.kill(self.pids[rank], number)
        return now

    def await_note(self, rank: int, timeout: float = 60.0) -> Any:
        """The next note of a rank."""
        deadline = time.monotonic() + timeout
        while not self._notes[rank]:
            if self.outcomes[rank].finished:
                raise RanksFailed(f"rank {rank} ended in place of sending a note\n{self.report()}")
            if not self._hear(deadline):
                raise RanksFailed(f"no note from rank {rank} in {timeout:g} s\n{self._dump()}")
        return self._notes[rank].pop(0)

    def await_notes(self, timeout: float = 60.0) -> list[Any]:
        """The next note of each rank."""
        return [self.await_note(rank, timeout) for rank in range(self.size)]

    def collect(
        self, timeout: float = 60.0, ranks: Sequence[int] | None = None, hurry: bool = False
    ) -> list[Outcome]:
        """Wait until the call has ended on the given ranks (all), with a result, an exception or the rank's end.

        With ``hurry`` the others get only a few seconds once one has failed.
        """
        deadline = time.monotonic() + timeout
        wanted = range(self.size) if ranks is None else ranks
        while not all(self.outcomes[r].finished for r in wanted):
            failed = any(o.failure or o.returncode for o in self.outcomes)
            if hurry and failed:
                deadline = min(deadline, time.monotonic() + _GRACE_S)
                hurry = False
            if not self._hear(deadline):
                late = [r for r in wanted if not self.outcomes[r].finished]
                raise RanksFailed(f"ranks {late} did not end in {timeout:g} s\n{self._dump()}")
        return [self.outcomes[r] for r in wanted]

    def results(self, timeout: float = 60.0) -> list[Any]:
        """As :meth:`collect`, but every rank must have ended well; their values."""
        outcomes = self.collect(timeout, hurry=True)
        if any(o.failure or o.returncode is not None for o in outcomes):
            raise RanksFailed(self.report())
        return [o.value for o in outcomes]

    def _hear(self, deadline: float) -> bool:
        """Take in what comes next; False when nothing has come by the deadline."""
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
            return -1000  # closed its pipe, and lives on

    def wait_for_exit(self, timeout: float = 30.0, ranks: Sequence[int] | None = None) -> list[int]:
        """Exit codes of the given ranks (all), which end by themselves."""
        deadline = time.monotonic() + timeout
        processes = self._processes if ranks is None else [self._processes[r] for r in ranks]
        try:
            return [p.wait(max(0.0, deadline - time.monotonic())) for p in processes]
        except subprocess.TimeoutExpired:
            raise RanksFailed(f"ranks did not exit in {timeout:g} s\n{self._dump()}") from None

    def stderr(self, rank: int) -> str:
        """What a rank has written to its standard error."""
        return self._stderr(rank).read_text(errors="replace")

    def report(self) -> str:
        """Every rank's story."""
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
        """End whatever runs on, ranks and what they have started; idempotent."""
        for process in self._processes:
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            process.wait()
        for pipe in self._pipes:
            pipe.close()
        self._folder.cleanup()

    def check_quiet(self) -> None:
        """Fails if a rank has written to its standard error."""
        loud = [r for r in range(self.size) if self.stderr(r)]
        if self.quiet and loud:
            raise RanksFailed(f"ranks {loud} wrote to their standard error\n{self.report()}")

    def __enter__(self) -> Job:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        try:
            if kind is None:
                self.check_quiet()
        finally:
            self.close()


def end_well(job: Job) -> None:
    """Leave the job on all ranks, see that everything was given back, and end the interpreters."""
    job.call(leave)
    leaks = job.results()
    if any(leaks):
        raise RanksFailed(f"left over after destroy_process_group, by rank: {leaks}")
    job.call(end)
    codes = job.wait_for_exit()
    if any(codes):
        raise RanksFailed(f"exit codes {codes}\n{job.report()}")


def joined(size: int, start: Callable[..., Job] = Job, **options: Any) -> Job:
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
    timeout: float = 60.0,
    env: dict[str, str] | None = None,
    join: str = "file",
) -> list[Any]:
    """Join, call, leave: each rank's value; RanksFailed where any failed, hung, left something behind or was loud."""
    with joined(size, join=join, env=env) as job:
        job.call(function, *args)
        values = job.results(timeout)
        end_well(job)
    return values


_pooled: set[Job] = set()


def pooled() -> tuple[set[int], int]:
    """Processes and sockets of the pools that are open, which outlive the tests that use them."""
    return {pid for job in _pooled for pid in job.children}, sum(job.size for job in _pooled)


def pooled_memory() -> set[str]:
    """Files of /dev/shm of the pools that are open."""
    return {name for job in _pooled for name in job.shared_memory()}


class Pool:
    """A job that does many calls, started at the first, and anew after a failure."""

    def __init__(self, size: int, start: Callable[[int], Job] = Job):
        self.size = size
        self._begin = start
        self._job: Job | None = None

    def run(self, function: Callable[..., Any], *args: Any, timeout: float = 60.0) -> list[Any]:
        """Each rank's value; RanksFailed where any failed or hung."""
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
        """Leave the job, in order."""
        job, self._job = self._job, None
        if job is not None:
            _pooled.discard(job)
            with job:
                end_well(job)


@contextmanager
def pools(start: Callable[[int], Job] = Job) -> Iterator[Callable[[int], Pool]]:
    """A pool for every world size that is asked for."""
    made: dict[int, Pool] = {}

    def pool(size: int) -> Pool:
        return made.setdefault(size, Pool(size, start))

    try:
        yield pool
    finally:
        errors = []
        for each in made.values():
            try:
                each.close()
            except AssertionError as error:
                errors.append(error)
        if errors:
            raise errors[0]
