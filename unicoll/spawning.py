"""``spawn``: run a function on several processes of this host, from a program that was started as one.

What it means is PyTorch's documentation of ``torch.multiprocessing.spawn``. Beyond that, each child finds
its rank, the job's store and secret in its environment, as under the launcher, so that the function may
simply call ``init_process_group()``.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from multiprocessing import resource_tracker
from multiprocessing.connection import wait
from multiprocessing.context import SpawnProcess
from typing import Any, NamedTuple

from unicoll import joining
from unicoll.errors import DistArgumentError, DistError, DistTypeError
from unicoll.run import bootstrap
from unicoll.run.failure import SEEN_LATE, Record, describe_exit, read_record
from unicoll.run.guard import JOB_VARIABLE, Guard, kill_members
from unicoll.run.job import LocalJob, job_token, job_variable

__all__ = ["ProcessContext", "SpawnError", "spawn"]

_LOOK = 1.0  # seconds between two looks for processes that have failed and do not end
_CAUSE_PATIENCE = 1.0  # seconds to wait for the cause when only a consequence has been seen
_TERM_PATIENCE = 30.0
_KILL_PATIENCE = 10.0

_environment_lock = threading.Lock()


class SpawnError(DistError):
    """A spawned process failed; the message holds its traceback.

    Attributes:
        rank: the process that failed first.
        pid: its process id.
        exitcode: its exit code, ``-N`` when signal N killed it.
        signal: the signal's name, for example ``"SIGKILL"``; None when it was not killed by one.
    """

    def __init__(self, message: str, *, rank: int | None = None, pid: int = 0, exitcode: int = 1) -> None:
        super().__init__(message, rank=rank)
        self.pid = pid
        self.exitcode = exitcode
        self.signal = _signal_name(-exitcode) if exitcode < 0 else None


def spawn(
    fn: Callable[..., object],
    args: tuple[Any, ...] = (),
    nprocs: int = 1,
    join: bool = True,
    daemon: bool = False,
    start_method: str = "spawn",
) -> ProcessContext | None:
    """Run ``fn(rank, *args)`` in ``nprocs`` fresh processes, ranks 0 to ``nprocs - 1``.

    Each child has RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT, and our
    UNICOLL_STORE and UNICOLL_SECRET, in its environment from its first instruction on. When one fails the
    others are stopped. None outlives this process, nor does anything they start.

    Args:
        fn: a function that can be pickled: defined at the top level of a module.
        args: its further arguments, pickled too.
        nprocs: how many processes.
        join: wait for all of them; otherwise return at once.
        daemon: the processes' daemon flag (multiprocessing): such a process may have no children of its own.
        start_method: only ``"spawn"``, as in torch; a forked copy of a threaded program does not work
        reliably.

    Returns:
        None with ``join``, else a ProcessContext, whose ``join`` must be called until it returns True or
        raises.

    Raises:
        SpawnError: (with ``join``) a process failed: the first one that did.
        DistArgumentError: ``nprocs`` is below 1, or ``start_method`` is another.
        DistTypeError: ``fn`` cannot be called.
    """
    if not callable(fn):
        raise DistTypeError(f"spawn: fn must be a function, not {type(fn).__name__}")
    if nprocs < 1:
        raise DistArgumentError(f"spawn: nprocs must be at least 1, not {nprocs}")
    if start_method != "spawn":
        raise DistArgumentError(f"spawn: start_method must be 'spawn', not {start_method!r}")
    context = ProcessContext(fn, tuple(args), nprocs, daemon)
    if not join:
        return context
    context.join()
    return None


class ProcessContext:
    """The processes that ``spawn`` has started.

    Attributes:
        processes: ``multiprocessing.Process`` objects, by rank.
    """

    def __init__(self, fn: Callable[..., object], args: tuple[Any, ...], nprocs: int, daemon: bool) -> None:
        self.processes: list[SpawnProcess] = []
        self._token = job_token()
        self._scratch = tempfile.mkdtemp(prefix="unicoll_spawn_")
        self._guard: Guard | None = None
        self._job: LocalJob | None = None
        self._open = True
        self._seen: dict[int, float] = {}  # when a failed process was first seen to have ended
        try:
            self._job = LocalJob()
            self._guard = Guard(self._token, self._scratch)
            resource_tracker.ensure_running()  # before it could inherit the job's token, and end with the job
            for rank in range(nprocs):
                self._start(rank, nprocs, fn, args, daemon)
        except BaseException:
            self._kill_all()
            raise

    def _start(
        self, rank: int, nprocs: int, fn: Callable[..., object], args: tuple[Any, ...], daemon: bool
    ) -> None:
        # The kernel ties a child's death signal to the thread that started it, and only the main one lasts.
        parent = os.getpid() if threading.current_thread() is threading.main_thread() else None
        process = multiprocessing.get_context("spawn").Process(
            target=_run, args=(parent, fn, rank, args), daemon=daemon, name=f"unicoll-spawn-{rank}"
        )
        assert self._job is not None
        environment = _environment(rank, nprocs, self._job)
        environment[JOB_VARIABLE] = job_variable(self._token)
        environment["TORCHELASTIC_ERROR_FILE"] = self._error_file(rank)
        with _added_to_environment(environment):
            process.start()
        self.processes.append(process)

    def pids(self) -> list[int]:
        """The processes' ids, by rank."""
        return [process.pid or 0 for process in self.processes]

    def join(self, timeout: float | None = None, grace_period: float | None = None) -> bool:
        """Wait until all processes have ended.

        Args:
            timeout: seconds to wait at most; None waits without limit.
            grace_period: when one has failed, seconds that the others get to end by themselves, and again
                between SIGTERM and SIGKILL. None: SIGTERM at once, SIGKILL after 30.

        Returns:
            True when all have ended well, False when the time is up.

        Raises:
            SpawnError: a process failed; the others have been stopped.
        """
        if not self._open:
            return True
        deadline = None if timeout is None else time.monotonic() + timeout
        try:
            while running := [p.sentinel for p in self.processes if p.exitcode is None]:
                left = _LOOK if deadline is None else min(_LOOK, max(0.0, deadline - time.monotonic()))
                ended = wait(running, left)
                if self._failures():
                    self._fail(grace_period)
                if not ended and deadline is not None and time.monotonic() >= deadline:
                    return False
            if self._failures():
                self._fail(grace_period)
        except BaseException:
            self._kill_all()
            raise
        self._close()
        return True

    def _fail(self, grace_period: float | None) -> None:
        """Raise the first failure, when the others have been given the time that they get to end."""
        failures = self._failures()
        if grace_period is not None:
            self._wait_for_ends(grace_period)
        elif all(failure.consequence for failure in failures):
            self._wait_for_ends(_CAUSE_PATIENCE)
        # Whoever ends from now on may do so because of our signal.
        failures = self._failures()
        for process in self.processes:
            if process.exitcode is None:
                process.terminate()
        self._wait_for_ends(_TERM_PATIENCE if grace_period is None else grace_period)
        raise min(failures).error()

    def _failures(self) -> list[_Failure]:
        failures = []
        for rank, process in enumerate(self.processes):
            record = read_record(self._error_file(rank))
            if process.exitcode or (process.exitcode is None and record is not None and record.final):
                seen = self._seen.setdefault(rank, time.time() - SEEN_LATE)
                ended = record.time if record is not None else seen
                consequence = record is not None and record.consequence
                exitcode = process.exitcode or 1
                failures.append(_Failure(consequence, ended, rank, process.pid or 0, exitcode, record))
        return failures

    def _wait_for_ends(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        for process in self.processes:
            process.join(max(0.0, deadline - time.monotonic()))

    def _kill_all(self) -> None:
        for process in self.processes:
            if process.exitcode is None:
                process.kill()
        self._wait_for_ends(_KILL_PATIENCE)
        self._close()

    def _close(self) -> None:
        """The processes have ended: end what they have left, and all that was there for them."""
        self._open = False
        for process in self.processes:
            process.join(0)  # multiprocessing forgets it only then
        kill_members(self._token, (), _KILL_PATIENCE)
        if self._guard is not None:
            self._guard.dismiss()
        if self._job is not None:
            self._job.close()
        shutil.rmtree(self._scratch, ignore_errors=True)

    def _error_file(self, rank: int) -> str:
        return os.path.join(self._scratch, f"{rank}.json")


class _Failure(NamedTuple):
    """Ordered so that the least is the root cause."""

    consequence: bool
    time: float
    rank: int
    pid: int
    exitcode: int
    record: Record | None

    def error(self) -> SpawnError:
        if self.record is not None:
            text = f"process {self.rank} (pid {self.pid}) failed:\n\n{self.record.traceback}"
        else:
            text = f"process {self.rank} failed: {describe_exit(self.exitcode, self.pid)}"
        return SpawnError(text, rank=self.rank, pid=self.pid, exitcode=self.exitcode)


def _run(parent: int | None, fn: Callable[..., object], rank: int, args: tuple[Any, ...]) -> None:
    """In the child."""
    if parent is not None:
        bootstrap.die_with(parent)
    try:
        fn(rank, *args)
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)  # Ctrl-C reaches the parent too, which tells
    except SystemExit as error:
        joining.ended_with(error)
        raise
    except Exception as error:
        if error.__traceback__ is not None:
            error.__traceback__ = error.__traceback__.tb_next
        bootstrap.record(error)
        joining.ended_with(error)
        sys.exit(1)


def _environment(rank: int, nprocs: int, job: LocalJob) -> dict[str, str]:
    environment = {
        **job.environment,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(nprocs),
        "LOCAL_WORLD_SIZE": str(nprocs),
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
    }
    if nprocs > 1:
        environment["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS") or "1"
    if "MASTER_ADDR" not in os.environ or "MASTER_PORT" not in os.environ:
        environment.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(job.master_port))
    return environment


@contextlib.contextmanager
def _added_to_environment(added: Mapping[str, str]) -> Iterator[None]:
    """Have children started meanwhile inherit ``added``; multiprocessing has no other way to give it."""
    with _environment_lock:
        before = {name: os.environ.get(name) for name in added}
        os.environ.update(added)
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
