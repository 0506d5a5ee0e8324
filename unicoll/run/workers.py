"""Starting the workers: their environment, command line, log files and pipes."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from string import Template
from typing import BinaryIO, NamedTuple, cast

from unicoll.net.wire.secret import KeyText
from unicoll.process.files import make_directory, open_directory, temporary_directory
from unicoll.run.args import ERR, OUT, LaunchOptions
from unicoll.run.nodes import Placement
from unicoll.run.output import Console, LineCopies, LogFile, OutputPipe, OutputPipes
from unicoll.run.tracebacks import ExceptionRecord, read_record

_WORKER_MAIN = str(Path(__file__).with_name("worker_main.py"))
_TAIL_SIZE = 16 << 10
_STREAMS = {OUT: "stdout", ERR: "stderr"}


class LogFiles:
    """The launch's directory: ``<log_dir>/<run_id>_<random>/attempt_<N>/<local_rank>/``, as
    torchrun's.

    Without ``--log-dir`` it is in the temporary directory, and is removed at the end unless streams
    are logged there (``kept`` is True). OSError if it cannot be made.

    Attributes:
        folder: its descriptor.
    """

    def __init__(self, options: LaunchOptions) -> None:
        wanted = any(
            any(each.values()) for each in (options.redirects, options.tees, options.matches)
        )
        self.kept = options.log_dir is not None or wanted
        # Absolute, because the workers may change their working directory.
        base = os.path.abspath(
            temporary_directory() if options.log_dir is None else options.log_dir
        )
        name = "".join(c if c.isalnum() or c in "-_.:" else "_" for c in options.run_id)
        parent = open_directory(base, make=0o777)
        try:
            # Opened once: other users may write to the directories above, and exchange this one by
            # its name.
            name, self.folder = make_directory(
                f"{name}_" if options.log_dir else "unicoll_run_", parent
            )
        finally:
            os.close(parent)
        self.path = os.path.join(base, name)

    def make(self, name: str) -> None:
        """Make a directory in it."""
        os.mkdir(name, dir_fd=self.folder)

    def open(self, name: str, mode: str) -> BinaryIO:
        """Open a file in it, unbuffered, by its path from here."""
        try:
            file = open(
                name, mode, buffering=0, opener=partial(os.open, mode=0o666, dir_fd=self.folder)
            )
        except OSError as error:
            error.filename = os.path.join(self.path, name)
            raise
        return cast(BinaryIO, file)

    def log_file(self, name: str, console: Console) -> LogFile:
        """A new file in it that the launcher writes."""
        return LogFile(self.open(name, "wb"), os.path.join(self.path, name), console)

    def close(self) -> None:
        """Close the descriptor of the directory, and remove it if it is not kept."""
        os.close(self.folder)
        if not self.kept:
            shutil.rmtree(self.path, ignore_errors=True)


class AttemptFiles:
    """The directory of one attempt.

    Attributes:
        copies: for OUT and ERR, the file of the lines that have some texts, as far as the options
            name texts.
    """

    def __init__(
        self, options: LaunchOptions, logs: LogFiles, number: int, console: Console
    ) -> None:
        self._logs, self._name = logs, f"attempt_{number}"
        logs.make(self._name)
        self.copies: dict[int, LineCopies] = {}
        for which, texts in options.matches.items():
            if texts:
                file = logs.log_file(f"{self._name}/filtered_{_STREAMS[which]}.log", console)
                self.copies[which] = LineCopies(texts, file)

    def of_worker(self, local_rank: int, replacement: int = 0) -> WorkerFiles:
        """A new directory for a worker's files."""
        name = f"{self._name}/{local_rank}" + (f"_replacement_{replacement}" if replacement else "")
        self._logs.make(name)
        return WorkerFiles(self._logs, name)

    def close(self) -> None:
        """Close the files of copied lines."""
        for each in self.copies.values():
            each.close()


class WorkerFiles:
    """The directory of one worker: its error file, and the log files of its streams."""

    def __init__(self, logs: LogFiles, name: str) -> None:
        self._logs, self._name = logs, name
        # The worker opens it by this path. The launcher reads it by the descriptor of the
        # directory, because other users may have exchanged a part of the path.
        self.error_file = os.path.join(logs.path, name, "error.json")

    def read_record(self) -> ExceptionRecord | None:
        """The exception in the error file; None if it does not exist or is malformed."""
        return read_record(f"{self._name}/error.json", self._logs.folder)

    def open(self, which: int, mode: str) -> BinaryIO:
        """Open the log file of OUT or ERR."""
        return self._logs.open(self._log(which), mode)

    def log_file(self, which: int, console: Console) -> LogFile:
        """A new log file of OUT or ERR that the launcher writes."""
        return self._logs.log_file(self._log(which), console)

    def _log(self, which: int) -> str:
        return f"{self._name}/{_STREAMS[which]}.log"


@dataclass(eq=False)
class Worker:
    """A worker process, which leads its own session and process group.

    Attributes:
        status: None while it runs; then its exit code, or ``-N`` if signal N killed it.
        ended: when its end was detected, on the clock of ``time.monotonic``.
        stopped: True if the launcher's signal ended it.
        prints: True if it prints its traceback to the launcher's own stderr; else the launcher
            prints it.
        logs_stderr: True if the launcher writes its stderr to a log file.
        stderr: its stream of stderr; None if it writes that to the console or a file itself.
        record: the exception that ended its program, once the launcher has read it.
        failure: the last exception that it has recorded, if it has failed.
        replacement: its number among the processes that were started for its rank.
    """

    rank: int
    local_rank: int
    process: subprocess.Popen[bytes]
    files: WorkerFiles
    prints: bool
    logs_stderr: bool = False
    stderr: OutputPipe | None = None
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

        The process stays a zombie until ``reap``, so that its pid, which is also its group's, is
        not reused.
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
        return self.prints or (self.stderr is not None and self.stderr.is_shown)

    @property
    def tail(self) -> str:
        """The last lines of its stderr, as far as the launcher has them."""
        if self.stderr is not None:
            return self.stderr.tail
        with contextlib.suppress(OSError), self.files.open(ERR, "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL_SIZE))
            return file.read().decode("utf-8", "replace")
        return ""


def shared_environment(
    options: LaunchOptions, place: Placement, environ: Mapping[str, str], job: Mapping[str, str]
) -> dict[str, str]:
    """The environment variables of all workers of this node: the user's, and the launcher's
    (``job`` and others)."""
    shared = dict(environ)
    # These are of an enclosing job: workers would look for its store, or write to the error file of
    # one of its workers.
    for name in ("UNICOLL_STORE", "UNICOLL_REPLACEMENT", "TORCHELASTIC_ERROR_FILE"):
        shared.pop(name, None)
    # Python writes to a pipe in blocks otherwise: lines come late, and those of a killed worker are
    # lost.
    shared.setdefault("PYTHONUNBUFFERED", "1")
    shared |= checkout_path(shared)
    # The key's text is hidden where this dictionary is shown, for example in an error.
    if secret := shared.get("UNICOLL_SECRET"):
        shared["UNICOLL_SECRET"] = KeyText(secret)
    # The workers may change their working directory.
    if path := shared.get("UNICOLL_SECRET_FILE"):
        shared["UNICOLL_SECRET_FILE"] = os.path.abspath(path)
    # The workers share the cores, and OpenMP's default is a thread for each core in every one.
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
        # MASTER_PORT is free for rank 0 to listen on. With "True" rank 0 of torch would expect a
        # store of the launcher there.
        TORCHELASTIC_USE_AGENT_STORE="False",
        **options.variables,
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
    """Start one worker and connect its output; OSError if it cannot be started or a log file cannot
    be opened.

    ``replacement`` is its number among the processes that are started for this rank; 0 is the
    first.
    """
    own_files = files.of_worker(local_rank, replacement)
    environment = {
        **shared,
        "RANK": str(rank),
        "LOCAL_RANK": str(_shown_local_rank(options, local_rank)),
        "ROLE_RANK": str(rank),
        "TORCHELASTIC_ERROR_FILE": own_files.error_file,
    }
    if replacement:
        environment |= {
            "UNICOLL_REPLACEMENT": str(replacement),
            "TORCHELASTIC_RESTART_COUNT": str(replacement),
        }
    if options.devices:
        environment |= options.devices[local_rank]
    out, err = (_destination(options, local_rank, which) for which in (OUT, ERR))
    # The child has copies of the open files, and inherits the CPUs to which this thread is bound
    # meanwhile; both end here with the block.
    with contextlib.ExitStack() as opened:
        logs = [
            (
                opened.enter_context(own_files.open(which, "wb"))
                if each.to_file and not each.to_pipe
                else None
            )
            for which, each in ((OUT, out), (ERR, err))
        ]
        if cpus := options.affinity.get(local_rank):
            opened.enter_context(_bound_to(cpus, f"--numa-binding: local rank {local_rank}"))
        process = subprocess.Popen(
            # The launcher prints the traceback of a worker whose stderr it reads, so that equal
            # ones are printed once; other workers print their own.
            _command(options, local_rank, "record" if err.to_pipe else "print"),
            # Local rank 0 may read from the user (in a debugger); the others must not read the same
            # input.
            stdin=None if local_rank == 0 else subprocess.DEVNULL,
            stdout=subprocess.PIPE if out.to_pipe else logs[0],
            stderr=subprocess.PIPE if err.to_pipe else logs[1],
            env=environment,
            # A signal of the terminal then reaches only the launcher, which forwards it, and a
            # signal to the group reaches what the worker has started.
            start_new_session=True,
        )
    prints = not err.to_pipe and not err.to_file
    logs_stderr = err.to_pipe and err.to_file
    worker = Worker(
        rank, local_rank, process, own_files, prints, logs_stderr, replacement=replacement
    )
    prefix = _prefix(options, rank, local_rank)
    for which, each, pipe in ((OUT, out, process.stdout), (ERR, err, process.stderr)):
        if pipe is not None:
            file = own_files.log_file(which, console) if each.to_file else None
            # The stream owns a descriptor. The file object's own would also be closed by its
            # finalizer, when the number may be that of another file.
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
    """How many files the launcher opens for its workers: pipes, logs and their connections to its
    store."""
    count = sum(map(bool, options.matches.values())) + options.nproc
    for local_rank in range(options.nproc):
        for which in (OUT, ERR):
            to_pipe, to_file, _ = _destination(options, local_rank, which)
            count += to_pipe + (to_pipe and to_file)
    return count


class _Destination(NamedTuple):
    """A stream's destinations: a pipe to the launcher, which writes the file and the console; else
    one of these."""

    to_pipe: bool
    to_file: bool
    is_shown: bool


def _destination(options: LaunchOptions, local_rank: int, which: int) -> _Destination:
    is_teed = bool(options.tees[local_rank] & which)
    to_file = is_teed or bool(options.redirects[local_rank] & which)
    chosen = options.shown is None or local_rank in options.shown
    # A single worker writes to the console directly, which may be a terminal.
    prefixed = not to_file and (options.nproc > 1 or options.shown is not None)
    to_pipe = is_teed or prefixed or bool(options.matches[which])
    return _Destination(to_pipe, to_file, chosen and (is_teed or not to_file))


def _command(options: LaunchOptions, local_rank: int, reporting: str) -> list[str]:
    # A command is not run by this interpreter, so -I -S is possible: worker_main.py starts in a few
    # milliseconds.
    python = (
        [sys.executable, "-I", "-S"]
        if options.kind == "command"
        else python_command(options.python)
    )
    launcher = str(os.getpid())
    command = [*python, _WORKER_MAIN, launcher, reporting, options.kind, options.target]
    return [
        *command,
        *(
            [f"--local-rank={_shown_local_rank(options, local_rank)}"]
            if options.gives_local_rank
            else ()
        ),
        *options.arguments,
    ]


def python_command(python: str) -> list[str]:
    """The command of an interpreter: with the flags of this process, as ``-O`` or ``-X dev``, if it
    is the same one."""
    if python != sys.executable:
        return [python]
    # With -E or -I the interpreter ignores PYTHONUNBUFFERED.
    unbuffered = ["-u"] if sys.flags.ignore_environment else []
    return [python, *subprocess._args_from_interpreter_flags(), *unbuffered]  # type: ignore[attr-defined]


def _shown_local_rank(options: LaunchOptions, local_rank: int) -> int:
    """LOCAL_RANK, which programs use as the number of their GPU: 0 for a worker that sees one
    only."""
    return 0 if options.devices else local_rank


@contextlib.contextmanager
def _bound_to(cpus: Collection[int], what: str) -> Iterator[None]:
    """Bind this thread, and with it the processes that it starts, to these CPUs."""
    before = os.sched_getaffinity(0)
    try:
        # This binds the calling thread only; the thread of the console keeps its CPUs.
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
