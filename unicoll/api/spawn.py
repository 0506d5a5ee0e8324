"""``spawn``: run a function in several processes of this host.

The semantics are those of ``torch.multiprocessing.spawn`` (PyTorch's documentation). In addition,
each child has its rank and the job's store and secret in its environment, as under the launcher, so
that the function can call ``init_process_group()`` without arguments.
"""

from __future__ import annotations

import contextlib
import io
import math
import multiprocessing
import os
import pickle
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from typing import Any, Literal, NamedTuple, overload

from unicoll.bootstrap.process_end import set_exit_cause
from unicoll.errors import DistArgumentError, DistError, DistTypeError
from unicoll.group.arguments import as_integer
from unicoll.net.objects.object_format import type_name
from unicoll.process.files import temporary_directory
from unicoll.process.formatting import signal_name
from unicoll.run import worker_main
from unicoll.run.job import LocalJob, job_token, job_variable
from unicoll.run.process_cleanup import JOB_VARIABLE, Guard, kill_members
from unicoll.run.tracebacks import DETECTION_DELAY, ExceptionRecord, describe_exit, read_record

# Seconds between checks for failed processes that do not end.
_POLL_INTERVAL = 1.0
# Seconds to wait for the root cause if only its consequences have been detected.
_CAUSE_SECONDS = 1.0
_TERM_SECONDS = 30.0
_KILL_SECONDS = 10.0
# Bytes that Linux stores in a pipe.
_PIPE_BYTES = 1 << 16

# The environment is one for all threads, several of which may be in spawn().
_environment_lock = threading.Lock()


class SpawnError(DistError):
    """A spawned process failed; the message holds its traceback.

    Attributes:
        rank: the process that failed first.
        pid: its process id.
        exitcode: its exit code, ``-N`` if signal N killed it.
        signal: the name of that signal, for example ``"SIGKILL"``; None without one.
    """

    def __init__(
        self, message: str, *, rank: int | None = None, pid: int = 0, exitcode: int = 1
    ) -> None:
        super().__init__(message, rank=rank)
        self.pid = pid
        self.exitcode = exitcode
        self.signal = signal_name(-exitcode) if exitcode < 0 else None


@overload
def spawn(
    fn: Callable[..., object],
    args: tuple[Any, ...] = (),
    nprocs: int = 1,
    join: Literal[True] = True,
    daemon: bool = False,
    start_method: str = "spawn",
) -> list[Any]: ...


@overload
def spawn(
    fn: Callable[..., object],
    args: tuple[Any, ...] = (),
    nprocs: int = 1,
    *,
    join: Literal[False],
    daemon: bool = False,
    start_method: str = "spawn",
) -> ProcessContext: ...


@overload
def spawn(
    fn: Callable[..., object],
    args: tuple[Any, ...] = (),
    nprocs: int = 1,
    join: bool = True,
    daemon: bool = False,
    start_method: str = "spawn",
) -> list[Any] | ProcessContext: ...


def spawn(
    fn: Callable[..., object],
    args: tuple[Any, ...] = (),
    nprocs: int = 1,
    join: bool = True,
    daemon: bool = False,
    start_method: str = "spawn",
) -> list[Any] | ProcessContext:
    """Run ``fn(rank, *args)`` in ``nprocs`` fresh processes, ranks 0 to ``nprocs - 1``.

    Each child has RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT,
    UNICOLL_STORE and UNICOLL_SECRET in its environment from its start. If one fails the others are
    stopped. No child, and no process that a child starts, outlives this process.

    Args:
        fn: a picklable function: defined at the top level of a module. In a notebook, an
            interactive session or ``python -c`` it may be any function that the package cloudpickle
            can pickle, if that is installed.
        args: its further arguments, pickled too.
        nprocs: number of processes.
        join: wait for all of them; otherwise return immediately.
        daemon: the processes' daemon flag (multiprocessing): such a process cannot have children.
        start_method: only ``"spawn"``, as in torch; a forked copy of a threaded program is not
            reliable.

    Returns:
        With ``join`` the list of what ``fn`` has returned, by rank; the values are pickled, as the
        arguments are. A process that has called ``sys.exit(0)`` has None. Without ``join`` a
        ProcessContext: call its ``join`` until it returns True or raises; then its ``results`` is
        that list.

    Raises:
        SpawnError: (with ``join``) a process failed, or what it has returned cannot be pickled or
            unpickled; for the first failure.
        DistArgumentError: ``nprocs`` is below 1, ``start_method`` is not ``"spawn"``, or ``fn`` is
            defined in an interactive session and cloudpickle is not installed.
        DistTypeError: ``fn`` is not callable.
    """
    if not callable(fn):
        raise DistTypeError(f"spawn: fn must be a function, not {type(fn).__name__}")
    nprocs = as_integer("spawn: nprocs", nprocs)
    if nprocs < 1:
        raise DistArgumentError(f"spawn: nprocs must be at least 1, not {nprocs}")
    if start_method != "spawn":
        raise DistArgumentError(f"spawn: start_method must be 'spawn', not {start_method!r}")
    context = ProcessContext(_call(fn, tuple(args)), nprocs, daemon)
    if not join:
        return context
    context.join()
    return context.results


class _Call(NamedTuple):
    """The function that the processes run, and its arguments after the rank.

    ``interactive``: its classes may be those of an interactive session.
    """

    fn: Callable[..., object]
    args: tuple[Any, ...]
    interactive: bool = False


class _PickledCall(NamedTuple):
    """A call that is pickled as ``data``, and unpickled as the :class:`_Call` in it."""

    data: bytes

    def __reduce__(self) -> tuple[Any, ...]:
        return pickle.loads, (self.data,)


def _call(fn: Callable[..., object], args: tuple[Any, ...]) -> Any:
    """What is given to the new processes, which cannot import the functions and classes of an
    interactive session."""
    main = sys.modules["__main__"]
    if main.__spec__ is not None or hasattr(main, "__file__"):
        return _Call(fn, args)
    try:
        import cloudpickle
    except ImportError:
        if getattr(fn, "__module__", None) != "__main__":
            return _Call(fn, args)
        raise DistArgumentError(
            "spawn: fn is defined in an interactive session, from which new processes cannot import"
            " it; install cloudpickle, or define fn in a file and import it from there (a"
            " notebook's cell that begins with %%writefile work.py writes one)"
        ) from None
    return _PickledCall(cloudpickle.dumps(_Call(fn, args, interactive=True)))


class ProcessContext:
    """The processes of one ``spawn``.

    Attributes:
        processes: ``multiprocessing.Process`` objects, by rank.
        results: what the function has returned, by rank; empty before :meth:`join` has returned
            True.
    """

    def __init__(self, call: _Call, nprocs: int, daemon: bool) -> None:
        self.processes: list[SpawnProcess] = []
        self.results: list[Any] = []
        self._receivers: list[_Receiver] = []
        self._token = job_token()
        self._scratch = tempfile.mkdtemp(prefix="unicoll_spawn_", dir=temporary_directory())
        self._guard: Guard | None = None
        self._job: LocalJob | None = None
        self._open = True
        # Times at which the ends of failed processes were detected, by rank.
        self._detected: dict[int, float] = {}
        try:
            self._job = LocalJob()
            self._guard = Guard(self._token, self._scratch)
            # Otherwise multiprocessing would start its tracker with the first process. It would
            # inherit the job's token, and be killed with the job, although the program goes on to
            # use it.
            resource_tracker.ensure_running()
            for rank in range(nprocs):
                self._start(rank, nprocs, call, daemon)
        except BaseException:
            self._kill_all()
            raise

    def _start(self, rank: int, nprocs: int, call: _Call, daemon: bool) -> None:
        # A child's death signal is sent when the thread that started it ends, so only the main
        # thread can be used.
        parent = os.getpid() if threading.current_thread() is threading.main_thread() else None
        assert self._job is not None
        environment = _environment(rank, nprocs, self._job)
        environment[JOB_VARIABLE] = job_variable(self._token)
        environment["TORCHELASTIC_ERROR_FILE"] = self._error_file(rank)
        own_end, childs_end = multiprocessing.Pipe(duplex=False)
        # Stored before the start, which may fail, so that _close() closes it.
        self._receivers.append(_Receiver(own_end))
        # This process's copy of the child's end is closed after the start: otherwise the pipe would
        # not end with the child.
        with childs_end, _added_to_environment(environment):
            process = multiprocessing.get_context("spawn").Process(
                target=_run,
                args=(parent, call, rank, childs_end),
                daemon=daemon,
                name=f"unicoll-spawn-{rank}",
            )
            process.start()
        self.processes.append(process)

    def pids(self) -> list[int]:
        """The process ids, by rank."""
        return [process.pid or 0 for process in self.processes]

    def join(self, timeout: float | None = None, grace_period: float | None = None) -> bool:
        """Wait until all processes have ended, and receive their results.

        A process whose result is larger than 64 KiB does not end before it is received.

        Args:
            timeout: longest wait in seconds; None for no limit.
            grace_period: after a failure, seconds for the others to end by themselves, and again
                between SIGTERM and SIGKILL. None: SIGTERM immediately, SIGKILL after 30 s.

        Returns:
            True if all have ended without failure, False after ``timeout``.

        Raises:
            SpawnError: a process failed; the others have been stopped.
        """
        if not self._open:
            return True
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        try:
            while self._running():
                left = deadline - time.monotonic()
                self._wait(min(_POLL_INTERVAL, left))
                if self._failures():
                    self._fail(grace_period)
                if left <= 0 and self._running():
                    return False
            # The processes may have ended before the first wait, or after the last check.
            if self._failures():
                self._fail(grace_period)
            results = [self._result(rank) for rank in range(len(self.processes))]
        except BaseException:
            self._kill_all()
            raise
        self.results = results
        self._close()
        return True

    def _running(self) -> list[SpawnProcess]:
        return [process for process in self.processes if process.exitcode is None]

    def _wait(self, seconds: float) -> None:
        """Wait until a process has ended, at most ``seconds``, and receive what the processes
        send."""
        deadline = time.monotonic() + seconds
        sentinels = [process.sentinel for process in self._running()]
        while True:
            receivers = {
                receiver.fileno(): receiver for receiver in self._receivers if receiver.is_open
            }
            ready = set(wait([*sentinels, *receivers], max(0.0, deadline - time.monotonic())))
            for fileno, receiver in receivers.items():
                if fileno in ready:
                    receiver.receive()
            # The pipe may end later than the process, because processes that it has started may
            # have it, too. So only the ends of the processes are awaited.
            if not ready or not ready.isdisjoint(sentinels) or time.monotonic() >= deadline:
                return

    def _result(self, rank: int) -> Any:
        """What the function has returned on a rank that has ended without failure."""
        pid = self.processes[rank].pid or 0
        kind = "unknown"
        with self._receivers[rank].all() as file:
            try:
                if not file.getbuffer():
                    return None
                kind = pickle.load(file)
                return pickle.load(file)
            except Exception as error:
                text = (
                    f"process {rank} (pid {pid}): its result, of type {kind}, cannot be unpickled"
                )
                raise SpawnError(
                    f"{text}: {_text(error)}", rank=rank, pid=pid, exitcode=0
                ) from error

    def _fail(self, grace_period: float | None) -> None:
        """Stop the other processes and raise the first failure."""
        failures = self._failures()
        if grace_period is not None:
            self._wait_for_ends(grace_period)
        elif all(failure.consequence for failure in failures):
            # The process whose failure has caused these may be seen a moment later.
            self._wait_for_ends(_CAUSE_SECONDS)
        # Read again, with what has come meanwhile. From now on a process may end because of the
        # signal below, which is no failure of its own.
        failures = self._failures()
        for process in self._running():
            process.terminate()
        self._wait_for_ends(_TERM_SECONDS if grace_period is None else grace_period)
        raise min(failures).error()

    def _failures(self) -> list[_Failure]:
        failures = []
        for rank, process in enumerate(self.processes):
            record = read_record(self._error_file(rank))
            if process.exitcode or (
                process.exitcode is None and record is not None and record.final
            ):
                # The time of the first detection is kept: the order of failures must not depend on
                # the later checks.
                detected = self._detected.setdefault(rank, time.monotonic() - DETECTION_DELAY)
                recorded = record.time if record is not None else None
                ended = detected if recorded is None else recorded
                consequence = record is not None and record.consequence
                exitcode = process.exitcode or 1
                failures.append(
                    _Failure(consequence, ended, rank, process.pid or 0, exitcode, record)
                )
        return failures

    def _wait_for_ends(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while self._running() and (left := deadline - time.monotonic()) > 0:
            self._wait(min(_POLL_INTERVAL, left))

    def _kill_all(self) -> None:
        for process in self._running():
            process.kill()
        try:
            self._wait_for_ends(_KILL_SECONDS)
        finally:
            self._close()

    def _close(self) -> None:
        """Kill the processes that the ended ones have left, and release the resources of the
        job."""
        self._open = False
        for receiver in self._receivers:
            receiver.close()
        for process in self.processes:
            # The package multiprocessing refers to a process until it is joined.
            process.join(0)
        # These processes lead no sessions, so what they have left is found by the token only. The
        # guard is stopped afterwards: until then it acts if this process is killed.
        kill_members(self._token, (), _KILL_SECONDS)
        if self._guard is not None:
            self._guard.stop()
        if self._job is not None:
            self._job.close()
        shutil.rmtree(self._scratch, ignore_errors=True)

    def _error_file(self, rank: int) -> str:
        return os.path.join(self._scratch, f"{rank}.json")


class _Receiver:
    """The parent's end of a rank's pipe, and what has been received from it; no method waits."""

    def __init__(self, end: Connection) -> None:
        os.set_blocking(end.fileno(), False)
        self._end = end
        self._received = io.BytesIO()

    @property
    def is_open(self) -> bool:
        return not self._end.closed

    def fileno(self) -> int:
        return self._end.fileno()

    def receive(self) -> bool:
        """Read once from the pipe, and close it at its end; False if there is nothing to read."""
        try:
            data = os.read(self._end.fileno(), _PIPE_BYTES)
        except BlockingIOError:
            return False
        self._received.write(data)
        if not data:
            self._end.close()
        return bool(data)

    def all(self) -> io.BytesIO:
        """What a process that has ended has sent."""
        while self.is_open and self.receive():
            pass
        self._received.seek(0)
        return self._received

    def close(self) -> None:
        self._end.close()
        self._received.close()


class _Failure(NamedTuple):
    """A failed process; the smallest one is the root cause."""

    consequence: bool
    time: float
    rank: int
    pid: int
    exitcode: int
    record: ExceptionRecord | None

    def error(self) -> SpawnError:
        if self.record is not None:
            text = f"process {self.rank} (pid {self.pid}) failed:\n\n{self.record.traceback}"
        else:
            text = f"process {self.rank} failed: {describe_exit(self.exitcode, self.pid)}"
        return SpawnError(text, rank=self.rank, pid=self.pid, exitcode=self.exitcode)


def _run(parent: int | None, call: _Call, rank: int, end: Connection) -> None:
    """Run the function in the child process, and send what it returns."""
    if parent is not None:
        worker_main.die_with(parent)
    # Programs that the function starts must not keep the pipe open.
    os.set_inheritable(end.fileno(), False)
    pid = os.getpid()
    try:
        result = call.fn(rank, *call.args)
        # A process that the function has forked may return here, too, and has the same pipe.
        if result is not None and os.getpid() == pid:
            _send(result, rank, end, call.interactive)
    except KeyboardInterrupt:
        # Ctrl-C also interrupts the parent, which reports it.
        sys.exit(128 + signal.SIGINT)
    except SystemExit as error:
        set_exit_cause(error)
        raise
    except Exception as error:
        if error.__traceback__ is not None:
            # The traceback begins in the user's function.
            error.__traceback__ = error.__traceback__.tb_next
        worker_main.record(error)
        set_exit_cause(error)
        sys.exit(1)


def _send(result: object, rank: int, end: Connection, interactive: bool) -> None:
    """Send the name of a result's type, and the result, which the parent may be unable to
    unpickle."""
    name = type_name(result)
    try:
        data = _pickled(result, interactive)
    except Exception as error:
        text = f"spawn: rank {rank}'s result, of type {name}, cannot be pickled: {_text(error)}"
        raise DistTypeError(text) from None
    with open(end.fileno(), "wb", closefd=False) as file:
        file.write(pickle.dumps(name))
        file.write(data)


def _pickled(result: object, interactive: bool) -> bytes:
    try:
        return pickle.dumps(result, pickle.HIGHEST_PROTOCOL)
    except Exception:
        if not interactive:
            raise
    import cloudpickle

    data: bytes = cloudpickle.dumps(result)
    return data


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


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
    """Children started in this context inherit ``added``; multiprocessing has no parameter for the
    environment."""
    with _environment_lock:
        previous = {name: os.environ.get(name) for name in added}
        os.environ.update(added)
        try:
            yield
        finally:
            for name, value in previous.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value
