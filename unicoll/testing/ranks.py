"""The ranks of the conformance suite: processes of this host that join with a backend and execute
calls.

A process imports the modules that ranks need, and forks the ranks, which takes less time than to
start each of them. Warnings are errors in the ranks, and output on their standard error is one,
too.
"""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Protocol, TypeVar

CALL_S = 180.0
"""Time limit of a call on the ranks: a call that takes seconds takes a minute on a machine with ten
times its load."""
PATIENCE_S = 8.0
"""Time limit for the other ranks after a failure, and for the release of resources."""

LAUNCHER_VARIABLES = re.compile(
    r"(RANK|WORLD_SIZE|LOCAL_|MASTER_|UNICOLL_|GLOO_|GROUP_RANK|ROLE_|TORCHELASTIC_"
    r"|OMPI_|PMI|MPI_|MV2_|SLURM_|PALS_|HYDRA_|NCCL_)"
)
"""Beginnings of the variables that launchers and libraries set."""
_TEST_OPTIONS = ("UNICOLL_TEST_", "UNICOLL_TRANSPORT", "UNICOLL_CHANNEL")


class RanksFailed(AssertionError):
    """At least one rank failed, hung, died or left something behind; the message has the ranks'
    output."""


class Runner(Protocol):
    """Ranks that have joined."""

    def run(self, function: Callable[..., Any], *args: Any, timeout: float = CALL_S) -> list[Any]:
        """Call a function of a module on all ranks; returns their values."""

    def close(self) -> None:
        """End the ranks."""


_Runner = TypeVar("_Runner", bound=Runner)


@contextmanager
def pools(start: Callable[[int], _Runner]) -> Iterator[Callable[[int], _Runner]]:
    """Makes ranks on demand, once for each number of them, by ``start``; closes them at the end."""
    made: dict[int, _Runner] = {}
    try:
        yield lambda size: made.setdefault(size, start(size))
    finally:
        errors = []
        for each in made.values():
            try:
                each.close()
            except AssertionError as error:
                errors.append(error)
        if errors:
            raise errors[0]


class Pool:
    """``size`` ranks for many calls; they start at the first call, and again after a failure."""

    def __init__(self, size: int, backend: str, imports: Sequence[str] = ()) -> None:
        self.size = size
        self._backend = backend
        self._imports = tuple(imports)
        self._process: subprocess.Popen[bytes] | None = None
        self._pipes: list[Connection] = []

    def run(self, function: Callable[..., Any], *args: Any, timeout: float = CALL_S) -> list[Any]:
        """Call a function on all ranks; returns their values. Raises RanksFailed on a failure or a
        hang."""
        try:
            if self._process is None:
                self._start()
                self._call(_enter, (self._backend, self._imports), CALL_S)
            return self._call(function, args, timeout)
        except BaseException:
            self._kill()
            raise

    def close(self) -> None:
        """Leave the job; raises RanksFailed if a rank has left something behind or written
        output."""
        if self._process is None:
            return
        try:
            left = self._call(_leave, (), CALL_S)
            for pipe in self._pipes:
                pipe.close()
            self._process.wait(CALL_S)
            if any(left) or self._output():
                raise RanksFailed(
                    f"leaks after destroy_process_group, by rank: {left}\n{self._output()}"
                )
        finally:
            self._kill()

    def _start(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="unicoll-ranks-")
        sockets = [socket.socketpair() for _ in range(self.size)]
        theirs = [pair[1].fileno() for pair in sockets]
        program = (
            f"import sys; sys.path[:] = {sys.path!r}; from unicoll.testing import ranks;"
            f" ranks.fork_ranks({theirs}, {self._folder.name!r})"
        )
        with open(self._folder.name + "/stderr", "wb") as stderr:
            self._process = subprocess.Popen(
                [sys.executable, "-W", "error", "-c", program],
                env=environment(),
                stdin=subprocess.DEVNULL,
                stderr=stderr,
                pass_fds=theirs,
                start_new_session=True,
            )
        self._pipes = [Connection(ours.detach()) for ours, _ in sockets]
        for _, socket_of_rank in sockets:
            socket_of_rank.close()

    def _call(
        self, function: Callable[..., Any], args: tuple[Any, ...], timeout: float
    ) -> list[Any]:
        for pipe in self._pipes:
            # The rank has died, which is found below.
            with suppress(BrokenPipeError):
                pipe.send((function, args))
        values: list[Any] = [None] * self.size
        failures = []
        running: dict[Any, int] = {pipe: rank for rank, pipe in enumerate(self._pipes)}
        deadline = time.monotonic() + timeout
        while running:
            ready = wait(list(running), max(0.0, deadline - time.monotonic()))
            if not ready:
                assert self._process is not None
                # Ranks write the stacks of their threads.
                os.killpg(self._process.pid, signal.SIGUSR1)
                failures.append(f"ranks {sorted(running.values())} did not end in {timeout:g} s")
                failures += [
                    f"--- rank {rank}: {self._stacks(rank)}" for rank in sorted(running.values())
                ]
                break
            for answered in ready:
                rank = running.pop(answered)
                try:
                    values[rank], failure = self._pipes[rank].recv()
                except (EOFError, OSError):
                    failure = "died"
                if failure:
                    failures.append(f"--- rank {rank}: {failure}")
                    deadline = min(deadline, time.monotonic() + PATIENCE_S)
        if failures:
            # The status is needed for exit codes.
            time.sleep(0.5)
            raise RanksFailed("\n".join([*failures, self._output()]))
        return values

    def _stacks(self, rank: int) -> str:
        """The stacks of a rank's threads, waiting for the last frame of its main thread, which is
        the last one."""
        file, text, deadline = (
            Path(self._folder.name, f"stacks{rank}"),
            "",
            time.monotonic() + PATIENCE_S,
        )
        while " in <module>\n" not in text and time.monotonic() < deadline:
            time.sleep(0.02)
            text = file.read_text(errors="replace") if file.exists() else ""
        return text

    def _output(self) -> str:
        """What the ranks have written to their standard error."""
        return Path(self._folder.name, "stderr").read_text(errors="replace")[-8000:]

    def _kill(self) -> None:
        """Kill the ranks and their children that are still running."""
        if self._process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            for pipe in self._pipes:
                pipe.close()
            self._folder.cleanup()
            self._process = None


def environment(extra: dict[str, str] | None = None) -> dict[str, str]:
    """The environment of ranks: this process's without variables of launchers."""
    kept = {
        k: v
        for k, v in os.environ.items()
        if k.startswith(_TEST_OPTIONS) or not LAUNCHER_VARIABLES.match(k)
    }
    # on a busy machine calls may wait for long, and what ranks print may be a failure
    kept |= {
        "UNICOLL_SOCKET_IFNAME": "lo",
        "UNICOLL_STALL_WARNING": "180",
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
    }
    return kept | {"PYTHONFAULTHANDLER": "1"} | (extra or {})


# --- in the ranks ---------------------------------------------------------------------------------

MODULES = (
    # Sockets import these modules.
    "encodings.ascii",
    "encodings.idna",
    "gloo_fallback.backend",
    "unicoll.api.subgroups",
    "unicoll.backend.host.fallback_adapter",
    "unicoll.bootstrap.enter",
    "unicoll.testing.conformance_jobs",
)
"""What ranks import when they start, join and are tested."""
_place = (-1, -1, "")
"""Number of this rank, number of ranks, and the file in which they meet."""
_baseline: list[str] = []


def fork_ranks(descriptors: Sequence[int], folder: str) -> None:
    """Main function of the process that forks the ranks, and of each rank, which has one of the
    descriptors."""
    global _place
    die_with_parent()
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    for name in MODULES:
        import_module(name)
    ranks = {}
    for rank, descriptor in enumerate(descriptors):
        pid = os.fork()
        if pid == 0:
            die_with_parent()
            stacks = os.open(f"{folder}/stacks{rank}", os.O_CREAT | os.O_WRONLY)
            faulthandler.register(signal.SIGUSR1, stacks, all_threads=True)
            for other in descriptors:
                if other != descriptor:
                    os.close(other)
            _place = rank, len(descriptors), f"file://{folder}/store"
            _work(Connection(descriptor))
            return
        ranks[pid] = rank
    for descriptor in descriptors:
        os.close(descriptor)
    for _ in descriptors:
        pid, status = os.wait()
        if status:
            sys.stderr.write(f"rank {ranks[pid]}: exit code {os.waitstatus_to_exitcode(status)}\n")
            sys.stderr.flush()


def _work(pipe: Connection) -> None:
    """Execute calls until the pipe is closed; the answer to each is its value, and a traceback or
    ""."""
    global _baseline
    _baseline = snapshot()
    while True:
        value, failure = None, ""
        try:
            function, args = pipe.recv()
            value = function(*args)
        except EOFError:
            return
        except BaseException:
            failure = traceback.format_exc()
        pipe.send((value, failure))


def _enter(backend: str, imports: Sequence[str]) -> None:
    import unicoll as dist

    for name in imports:
        import_module(name)
    rank, size, store = _place
    dist.init_process_group(backend, store, timeout=60.0, rank=rank, world_size=size)


def _leave() -> list[str]:
    """Leave the job; returns leaked threads and descriptors."""
    import unicoll as dist

    dist.destroy_process_group()
    return leftovers(_baseline)


def die_with_parent() -> None:
    """Make the kernel kill this process when its parent ends."""
    ctypes.CDLL(None).prctl(1, int(signal.SIGKILL))


def snapshot() -> list[str]:
    """One text per thread and descriptor of this process; descriptors by their kind."""
    # threading keeps a thread whose start was interrupted; it has no identifier and does not exist
    threads = [f"thread {t.name}" for t in threading.enumerate() if t.ident is not None]
    files = [
        f"fd {name.partition(':[')[0]}" for name in _open_files() if not name.startswith("/proc/")
    ]
    return sorted(threads + files)


def _open_files() -> Iterator[str]:
    """What each descriptor of this process refers to."""
    for fd in os.listdir("/proc/self/fd"):
        # The descriptor was closed meanwhile, as the one that listed the directory.
        with suppress(OSError):
            yield os.readlink(f"/proc/self/fd/{fd}")


def leftovers(before: Sequence[str], matters: Callable[[str], bool] | None = None) -> list[str]:
    """Entries of :func:`snapshot` that stay although they are not in ``before``; filtered by
    ``matters``."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        left = list(snapshot())
        for entry in before:
            if entry in left:
                left.remove(entry)
        left = list(filter(matters, left)) if matters else left
        if not left or time.monotonic() > deadline:
            return left
        # The collector releases objects in reference cycles. Others are released after a while.
        if not gc.collect():
            time.sleep(0.02)
