"""Starting the workers: their environment, command line, log files and pipes."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from string import Template
from typing import NamedTuple

from unicoll.net.secret import KeyText
from unicoll.run.args import ERR, OUT, LaunchOptions
from unicoll.run.nodes import Placement
from unicoll.run.output import Console, LineCopies, LogFile, OutputPipe, OutputPipes
from unicoll.run.tracebacks import ExceptionRecord

_WORKER_MAIN = str(Path(__file__).with_name("worker_main.py"))
_TAIL_SIZE = 16 << 10
_STREAMS = {OUT: "stdout", ERR: "stderr"}


class LogFiles:
    """The launch's directory: ``<log_dir>/<run_id>_<random>/attempt_<N>/<local_rank>/``, as torchrun's.

    Without ``--log-dir`` it is a temporary directory, which is removed at the end unless streams are logged there
    (``kept`` is True).
    """

    def __init__(self, options: LaunchOptions) -> None:
        wanted = any(any(each.values()) for each in (options.redirects, options.tees, options.matches))
        self.kept = options.log_dir is not None or wanted
        # Absolute, because the workers may change their working directory.
        base = options.log_dir and os.path.abspath(options.log_dir)
        if base is not None:
            os.makedirs(base, exist_ok=True)
        name = "".join(c if c.isalnum() or c in "-_.:" else "_" for c in options.run_id)
        self.path = tempfile.mkdtemp(prefix=f"{name}_" if base else "unicoll_run_", dir=base)


class AttemptFiles:
    """The directory of one attempt.

    Attributes:
        copies: for OUT and ERR, the file of the lines that have some texts, as far as the options name texts.
    """

    def __init__(self, options: LaunchOptions, logs: LogFiles, number: int, console: Console) -> None:
        self._path = os.path.join(logs.path, f"attempt_{number}")
        os.makedirs(self._path)
        self.copies: dict[int, LineCopies] = {}
        for which, texts in options.matches.items():
            if texts:
                path = os.path.join(self._path, f"filtered_{_STREAMS[which]}.log")
                self.copies[which] = LineCopies(texts, LogFile(path, console))

    def directory(self, local_rank: int, replacement: int = 0) -> str:
        """A new directory for a worker's files."""
        name = f"{local_rank}" + (f"_replacement_{replacement}" if replacement else "")
        path = os.path.join(self._path, name)
        os.makedirs(path)
        return path

    def close(self) -> None:
        """Close the files of copied lines."""
        for each in self.copies.values():
            each.close()


@dataclass(eq=False)
class Worker:
    """A worker process, which leads its own session and process group.

    Attributes:
        status: None while it runs; then its exit code, or ``-N`` if signal N killed it.
        ended: when its end was detected, in seconds since the epoch.
        stopped: True if the launcher's signal ended it.
        prints: True if it prints its traceback to the launcher's own stderr; else the launcher prints it.
        log: the log file of its stderr that the launcher writes, or None.
        stderr: the source of :attr:`tail`: its stream, or the path of the file that it writes itself.
        record: the exception that ended its program, once the launcher has read it.
        failure: the last exception that it has recorded, if it has failed.
        replacement: its number among the processes that were started for its rank.
    """

    rank: int
    local_rank: int
    process: subprocess.Popen[bytes]
    error_file: str
    prints: bool
    log: str | None
    stderr: OutputPipe | str | None = None
    status: int | None = None
    ended: float = 0.0
    stopped: bool = False
    record: ExceptionRecord | None = None
    failure: ExceptionRecord | None = None
    replacement: int = 0

    @property
    def pid(self) -> int:
        """Its process id, also of its session and process group."""
        return self.process.pid

    def poll(self) -> bool:
        """Set ``status`` if the process has ended; True if it has.

        The process stays a zombie until ``reap``, so that its pid, which is also its group's, is not reused.
        """
        if self.status is None:
            result = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if result is not None:
                killed = result.si_code != os.CLD_EXITED
                self.status = -result.si_status if killed else result.si_status
        return self.status is not None

    def reap(self) -> None:
        """Free the pid of a process that has ended."""
        self.process.wait()

    @property
    def shows_stderr(self) -> bool:
        """True if what it writes to stderr appears on the console."""
        return self.prints or (isinstance(self.stderr, OutputPipe) and self.stderr.is_shown)

    @property
    def tail(self) -> str:
        """The last lines of its stderr, as far as the launcher has them."""
        if isinstance(self.stderr, str):
            with contextlib.suppress(OSError), open(self.stderr, "rb") as file:
                file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL_SIZE))
                return file.read().decode("utf-8", "replace")
            return ""
        return self.stderr.tail if self.stderr is not None else ""


def shared_environment(
    options: LaunchOptions, place: Placement, environ: Mapping[str, str], job: Mapping[str, str]
) -> dict[str, str]:
    """The environment variables of all workers of this node: the user's, and the launcher's (``job`` and others)."""
    shared = dict(environ)
    for name in ("UNICOLL_STORE", "UNICOLL_REPLACEMENT", "TORCHELASTIC_ERROR_FILE"):  # of an enclosing job
        shared.pop(name, None)
    shared.setdefault("PYTHONUNBUFFERED", "1")
    shared |= checkout_path(shared)
    if secret := shared.get("UNICOLL_SECRET"):
        shared["UNICOLL_SECRET"] = KeyText(secret)
    if path := shared.get("UNICOLL_SECRET_FILE"):  # they may change their working directory
        shared["UNICOLL_SECRET_FILE"] = os.path.abspath(path)
    if options.nproc > 1:
        shared.setdefault("OMP_NUM_THREADS", "1")
    shared.update(
        LOCAL_WORLD_SIZE=str(options.nproc),
        WORLD_SIZE=str(place.world_size),
        GROUP_RANK=str(place.node_rank),
        GROUP_WORLD_SIZE=str(options.nnodes),
        ROLE_NAME=options.role,
        ROLE_WORLD_SIZE=str(place.world_size),
        MASTER_ADDR=options.master_addr,
        TORCHELASTIC_RESTART_COUNT=str(place.attempt),
        TORCHELASTIC_MAX_RESTARTS=str(options.max_restarts),
        TORCHELASTIC_RUN_ID=options.run_id,
        TORCHELASTIC_USE_AGENT_STORE="False",  # MASTER_PORT is free for rank 0 to listen on
        **place.environment,
        **job,
    )
    return shared


def checkout_path(environ: Mapping[str, str]) -> dict[str, str]:
    """PYTHONPATH for processes that use the same checkout; {} if unicoll is installed."""
    root = Path(__file__).resolve().parents[2]
    if root.name in ("site-packages", "dist-packages"):
        return {}
    return {"PYTHONPATH": os.pathsep.join(filter(None, [environ.get("PYTHONPATH"), str(root)]))}


def start_worker(
    options: LaunchOptions,
    rank: int,
    local_rank: int,
    shared: Mapping[str, str],
    files: AttemptFiles,
    console: Console,
    streams: OutputPipes,
    replacement: int = 0,
) -> Worker:
    """Start one worker and connect its output; OSError if it cannot be started or a log file cannot be opened.

    ``replacement`` is its number among the processes that are started for this rank; 0 is the first.
    """
    directory = files.directory(local_rank, replacement)
    error_file = os.path.join(directory, "error.json")
    environment = {
        **shared,
        "RANK": str(rank),
        "LOCAL_RANK": str(_shown_local_rank(options, local_rank)),
        "ROLE_RANK": str(rank),
        "TORCHELASTIC_ERROR_FILE": error_file,
    }
    if replacement:
        environment |= {
            "UNICOLL_REPLACEMENT": str(replacement),
            "TORCHELASTIC_RESTART_COUNT": str(replacement),
        }
    if options.devices:
        environment |= options.devices[local_rank]
    out, err = (_destination(options, local_rank, which) for which in (OUT, ERR))
    paths = {
        which: os.path.join(directory, f"{_STREAMS[which]}.log")
        for which, each in ((OUT, out), (ERR, err))
        if each.to_file
    }
    with contextlib.ExitStack() as opened:
        logs = [
            opened.enter_context(open(paths[which], "wb")) if each.to_file and not each.to_pipe else None
            for which, each in ((OUT, out), (ERR, err))
        ]
        if cpus := options.affinity.get(local_rank):
            opened.enter_context(_bound_to(cpus, f"--numa-binding: local rank {local_rank}"))
        process = subprocess.Popen(
            _command(options, local_rank, "record" if err.to_pipe else "print"),
            # Local rank 0 may read from the user (in a debugger); the others must not read the same input.
            stdin=None if local_rank == 0 else subprocess.DEVNULL,
            stdout=subprocess.PIPE if out.to_pipe else logs[0],
            stderr=subprocess.PIPE if err.to_pipe else logs[1],
            env=environment,
            start_new_session=True,
        )
    prints = not err.to_pipe and not err.to_file
    path = paths.get(ERR)
    log = path if err.to_pipe else None
    worker = Worker(rank, local_rank, process, error_file, prints, log, path, replacement=replacement)
    prefix = _prefix(options, rank, local_rank)
    for which, each, pipe in ((OUT, out, process.stdout), (ERR, err, process.stderr)):
        if pipe is not None:
            file = LogFile(paths[which], console) if each.to_file else None
            fd = os.dup(pipe.fileno())
            pipe.close()
            stream = OutputPipe(
                fd, console, which if each.is_shown else None, prefix, file, files.copies.get(which)
            )
            streams.add(stream)
            if which == ERR:
                worker.stderr = stream
    return worker


def open_files(options: LaunchOptions) -> int:
    """How many files the launcher opens for its workers: pipes, logs and their connections to its store."""
    count = sum(map(bool, options.matches.values())) + options.nproc
    for local_rank in range(options.nproc):
        for which in (OUT, ERR):
            to_pipe, to_file, _ = _destination(options, local_rank, which)
            count += to_pipe + (to_pipe and to_file)
    return count


class _Destination(NamedTuple):
    """A stream's destinations: a pipe to the launcher, which writes the file and the console; else one of these."""

    to_pipe: bool
    to_file: bool
    is_shown: bool


def _destination(options: LaunchOptions, local_rank: int, which: int) -> _Destination:
    is_teed = bool(options.tees[local_rank] & which)
    to_file = is_teed or bool(options.redirects[local_rank] & which)
    chosen = options.shown is None or local_rank in options.shown
    # a single worker writes to the console directly, which may be a terminal
    prefixed = not to_file and (options.nproc > 1 or options.shown is not None)
    to_pipe = is_teed or prefixed or bool(options.matches[which])
    return _Destination(to_pipe, to_file, chosen and (is_teed or not to_file))


def _command(options: LaunchOptions, local_rank: int, reporting: str) -> list[str]:
    # A command is not run by this interpreter, so -I -S is possible: worker_main.py starts in a few milliseconds.
    python = [sys.executable, "-I", "-S"] if options.kind == "command" else [options.python]
    launcher = str(os.getpid())
    command = [*python, _WORKER_MAIN, launcher, reporting, options.kind, options.target]
    return [
        *command,
        *([f"--local-rank={_shown_local_rank(options, local_rank)}"] if options.gives_local_rank else ()),
        *options.arguments,
    ]


def _shown_local_rank(options: LaunchOptions, local_rank: int) -> int:
    """LOCAL_RANK, which programs use as the number of their GPU: 0 for a worker that sees one only."""
    return 0 if options.devices else local_rank


@contextlib.contextmanager
def _bound_to(cpus: Collection[int], what: str) -> Iterator[None]:
    """Bind this thread, and with it the processes that it starts, to these CPUs."""
    before = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, cpus)
    except OSError as error:
        text = f"{what} cannot be bound to the CPUs {sorted(cpus)}: {error.strerror}"
        raise OSError(error.errno, text) from None
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def _prefix(options: LaunchOptions, rank: int, local_rank: int) -> bytes:
    template = os.environ.get("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE")
    if not options.prefix:
        return b""
    if template:
        names = {"role_name": options.role, "rank": rank, "local_rank": local_rank}
        return os.fsencode(Template(template).safe_substitute(names))
    return os.fsencode(f"[{options.role}{local_rank}]:")
