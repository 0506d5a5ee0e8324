"""The launcher's main loop: start the workers, forward their output, see them end, leave nothing behind."""

from __future__ import annotations

import json
import logging
import math
import os
import selectors
import shutil
import signal
import socket
import threading
import time
from collections import deque
from types import FrameType
from typing import Any

from unicoll.errors import DistError
from unicoll.run.args import Options
from unicoll.run.failure import SEEN_LATE, Failure, Record, last_words, read_record, report, root_cause
from unicoll.run.guard import JOB_VARIABLE, Guard, kill_group, kill_members, members
from unicoll.run.job import EXIT_KEY, LocalJob, job_token, job_variable
from unicoll.run.output import Console, Streams
from unicoll.run.tracebacks import Tracebacks
from unicoll.run.workers import LogFiles, Worker, shared_environment, start_worker

__all__ = ["Agent"]

log = logging.getLogger("unicoll")

_TOGETHER = 1.0  # seconds for which a traceback waits for the other ranks'
_HANG_CHECK = 1.0  # seconds between two looks for workers that have failed and do not end
_LEFTOVER_PATIENCE = (
    1.0  # seconds for helpers (multiprocessing's tracker...) to notice that their worker has ended
)
_KILL_PATIENCE = 10.0  # seconds from SIGKILL until the launcher gives up on a process (stuck in the kernel)
_DRAIN_PATIENCE = 2.0  # seconds for the last output, when the workers are gone
_REPEAT = 0.5  # seconds within which a second signal of a kind is taken for an echo of the first


class Agent:
    """One launch, from start to exit code.

    Args:
        options: the command line.

    The plan (``_plan``) holds what is still to be sent to the workers and when; it is empty while all is
    well.
    """

    def __init__(self, options: Options) -> None:
        self._options = options
        self._token = job_token()
        self._workers: list[Worker] = []
        self._failed: list[tuple[Worker, Record | None]] = []
        self._root: Failure | None = None
        self._plan: deque[tuple[float, signal.Signals]] = deque()
        self._signals: deque[signal.Signals] = deque()
        self._signal: signal.Signals | None = None  # that ended the job
        self._signal_time = 0.0
        self._stopping_since: float | None = None  # wall clock, when the first signal was sent to the workers
        self._kill_time: float | None = None
        self._hang_check = 0.0
        self._tracebacks = Tracebacks()
        self._show_time = math.inf
        self._selector = selectors.DefaultSelector()
        self._woken, self._waker = socket.socketpair()
        for end in (self._woken, self._waker):
            end.setblocking(False)
        self._selector.register(self._woken, selectors.EVENT_READ, None)
        self._console = Console(self._wake)
        self._streams = Streams(self._selector, self._console)

    def run(self) -> int:
        """Do it all; returns the exit code.

        Raises:
            OSError: a process, a file or the wanted port is not to be had.
            DistError: the store or the secret is not usable.
        """
        previous = self._take_over_signals()
        try:
            try:
                self._run_job()
            finally:
                self._close_output()
            return self._exit_code()
        finally:
            signal.set_wakeup_fd(-1)
            for number, handler in previous.items():
                signal.signal(number, handler)
            self._selector.close()
            self._woken.close()
            self._waker.close()

    def _run_job(self) -> None:
        options = self._options
        logs = LogFiles(options)
        job: LocalJob | None = None
        guard: Guard | None = None
        try:
            job = LocalJob(os.environ, options.master_port) if options.nnodes == 1 else None
            guard = Guard(self._token, "" if logs.kept else logs.path)
            self._start(logs, job, guard)
            self._watch(job)
        finally:
            self._clean_up()
            if guard is not None:
                guard.dismiss()
            if job is not None:
                job.close()
            self._report(logs)
            if not logs.kept:
                shutil.rmtree(logs.path, ignore_errors=True)

    def _start(self, logs: LogFiles, job: LocalJob | None, guard: Guard) -> None:
        options = self._options
        added = {JOB_VARIABLE: job_variable(self._token)}
        if job is not None:
            added.update(job.environment, MASTER_PORT=str(job.master_port))
        else:
            added.update(UNICOLL_LAUNCHER="1", MASTER_PORT=str(options.master_port))
            self._warn_if_open()
        if logs.kept and options.log_dir is None:
            self._say(f"log files are in {logs.path}")
        environment = shared_environment(options, os.environ, added)
        for local_rank in range(options.nproc):
            worker = start_worker(options, local_rank, environment, logs, self._console, self._streams)
            guard.watch(worker.pid)
            self._workers.append(worker)

    def _warn_if_open(self) -> None:
        if "UNICOLL_SECRET" not in os.environ and "UNICOLL_SECRET_FILE" not in os.environ:
            options = self._options
            self._say(
                "WARNING: this job has several nodes and no secret, so whoever can reach "
                f"{options.master_addr} port {options.master_port} can join it. Set UNICOLL_SECRET, or "
                "UNICOLL_SECRET_FILE, to the same secret on every node."
            )

    # The loop.

    def _watch(self, job: LocalJob | None) -> None:
        while any(worker.status is None for worker in self._workers):
            self._poll(self._time_to_next())
            self._handle_signals()
            for worker in self._workers:
                if worker.status is None and worker.look():
                    worker.ended = time.time()
                    self._note_end(worker, job)
            self._find_hanging_failures()
            if time.monotonic() >= self._show_time:
                self._show_tracebacks()
            self._follow_plan()
            if self._kill_time is not None and time.monotonic() > self._kill_time + _KILL_PATIENCE:
                stuck = [worker.pid for worker in self._workers if worker.status is None]
                self._say(f"processes {stuck} do not end even on SIGKILL; giving up on them")
                return

    def _time_to_next(self) -> float:
        wait = self._options.monitor_interval
        if self._streams.unfinished:
            wait = min(wait, 0.1)
        if self._plan:
            wait = min(wait, max(0.0, self._plan[0][0] - time.monotonic()))
        return wait

    def _poll(self, seconds: float) -> None:
        for key, _events in self._selector.select(seconds):
            if key.data is None:
                self._woken.recv(4096)
            else:
                self._streams.read(key.data)
        self._streams.tick()

    def _note_end(self, worker: Worker, job: LocalJob | None) -> None:
        assert worker.status is not None
        record = self._read_record(worker)
        if worker.status == 0:
            return
        if self._stopping_since is not None:
            if record is None or record.time > self._stopping_since:
                worker.stopped = True
                return
            if worker.status < 0:
                worker.status = 1  # its exception came first, and our signal only ended its clean-up
        self._failed.append((worker, record))
        if job is not None:
            _publish(job, worker, record)
        self._plan_stop()

    def _find_hanging_failures(self) -> None:
        """A worker whose program has failed but whose process does not end is a failure, too."""
        if time.monotonic() < self._hang_check:
            return
        self._hang_check = time.monotonic() + _HANG_CHECK
        for worker in self._workers:
            if worker.status is None and os.path.exists(worker.error_file):
                record = self._read_record(worker)
                if record is not None and record.final:
                    self._plan_stop()

    def _read_record(self, worker: Worker) -> Record | None:
        """The worker's exception so far; if it ended the program, its traceback is to be shown."""
        if worker.record is None:
            record = read_record(worker.error_file)
            if record is None or not record.final:
                return record
            worker.record = record
            if not worker.prints:
                self._tracebacks.add(worker.rank, record.traceback)
                self._show_time = min(self._show_time, time.monotonic() + _TOGETHER)
        return worker.record

    def _show_tracebacks(self, last: int | None = None) -> None:
        self._show_time = math.inf
        self._write(self._tracebacks.take(last))

    def _plan_stop(self) -> None:
        """After the first failure: some grace for the others to fail by themselves, SIGTERM, SIGKILL."""
        if not self._plan and self._kill_time is None:
            term = time.monotonic() + self._options.grace
            self._plan.append((term, signal.SIGTERM))
            self._plan.append((term + self._options.shutdown_timeout, signal.SIGKILL))

    def _follow_plan(self) -> None:
        while self._plan and time.monotonic() >= self._plan[0][0]:
            self._send(self._plan.popleft()[1])

    def _send(self, number: signal.Signals) -> None:
        """Signal all the workers' groups, also those whose leader has ended and left children."""
        if self._stopping_since is None:
            self._stopping_since = time.time()
        if number == signal.SIGKILL:
            self._kill_time = time.monotonic()
            self._plan.clear()
        for worker in self._workers:
            kill_group(worker.pid, number)
            if number == signal.SIGTERM:
                kill_group(worker.pid, signal.SIGCONT)  # a stopped process could not act on it

    # Signals to the launcher.

    def _take_over_signals(self) -> dict[signal.Signals, Any]:
        if threading.current_thread() is not threading.main_thread():
            raise DistError("the launcher handles signals and must run in the main thread")
        previous: dict[signal.Signals, Any] = {}
        for number in (*self._options.signals, signal.SIGCHLD):
            # What the parent had us ignore stays ignored: SIGHUP under nohup, SIGINT in the background.
            if number == signal.SIGCHLD or signal.getsignal(number) != signal.SIG_IGN:
                previous[number] = signal.signal(number, self._on_signal)
        signal.set_wakeup_fd(self._waker.fileno(), warn_on_full_buffer=False)
        return previous

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        if number != signal.SIGCHLD:
            self._signals.append(signal.Signals(number))

    def _wake(self) -> None:
        try:
            self._waker.send(b"\0")
        except OSError:
            pass  # full: it will wake up anyway; closed: the job is over

    def _handle_signals(self) -> None:
        while self._signals:
            number = self._signals.popleft()
            now = time.monotonic()
            if number == self._signal and now - self._signal_time < _REPEAT:
                continue
            if number == self._signal or self._failed:
                self._say(
                    f"got {number.name} again: killing the workers" if self._signal else f"got {number.name}"
                )
                self._send(signal.SIGKILL)
                continue
            running = sum(worker.status is None for worker in self._workers)
            self._say(f"got {number.name}; passing it on to {running} workers")
            self._signal, self._signal_time = number, now
            self._plan.clear()
            self._send(number)
            kill = now + self._options.shutdown_timeout
            if number != signal.SIGTERM:
                self._plan.append((now + self._options.grace, signal.SIGTERM))
                kill += self._options.grace
            self._plan.append((kill, signal.SIGKILL))

    # The end.

    def _clean_up(self) -> None:
        """Kill what the workers have left, forward the last output, reap."""
        leaders = {worker.pid for worker in self._workers}
        if all(worker.status is not None for worker in self._workers) and self._kill_time is None:
            self._wait_for_leftovers(leaders, _LEFTOVER_PATIENCE)
            if left := members(self._token, leaders):
                for pid in left:
                    _terminate(pid)
                self._wait_for_leftovers(leaders, _LEFTOVER_PATIENCE)
        for leader in leaders:
            kill_group(leader, signal.SIGKILL)
        kill_members(self._token, leaders, _KILL_PATIENCE)
        deadline = time.monotonic() + _DRAIN_PATIENCE
        while self._streams.open and time.monotonic() < deadline:
            self._poll(0.05)
        self._streams.close()
        for worker in self._workers:
            worker.look()
            worker.reap()

    def _wait_for_leftovers(self, leaders: set[int], seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and not self._signals and members(self._token, leaders):
            self._poll(0.02)

    def _report(self, logs: LogFiles) -> None:
        self._complete_logs()
        if not self._failed or self._signal is not None:
            self._show_tracebacks()
            return
        title = os.path.basename(self._options.target) or self._options.target
        stopped = [worker.rank for worker in self._workers if worker.stopped]
        failures = [self._failure(worker, record, logs) for worker, record in self._failed]
        self._root = root = root_cause(failures)
        if root.record is not None and not root.record.final:
            self._tracebacks.add(root.rank, root.record.traceback)
        self._show_tracebacks(root.rank)
        self._write(last_words(root) + report(title, failures, stopped))

    def _complete_logs(self) -> None:
        """Tracebacks that workers have left to the launcher belong into their log files, too."""
        for worker in self._workers:
            if worker.log is not None and worker.record is not None:
                try:
                    with open(worker.log, "a", encoding="utf-8", errors="backslashreplace") as log:
                        log.write(worker.record.traceback)
                except OSError as error:
                    self._say(f"{worker.log}: {error.strerror}; without the traceback")

    def _failure(self, worker: Worker, record: Record | None, logs: LogFiles) -> Failure:
        assert worker.status is not None
        return Failure(
            rank=worker.rank,
            local_rank=worker.local_rank,
            pid=worker.pid,
            status=worker.status,
            time=record.time if record is not None else worker.ended - SEEN_LATE,
            record=record,
            tail=worker.tail,
            error_file=worker.error_file if record is not None and logs.kept else None,
        )

    def _exit_code(self) -> int:
        if self._signal is not None:
            return 128 + self._signal
        if self._root is not None:
            return self._root.exit_code
        return 0 if all(worker.status == 0 for worker in self._workers) else 1

    def _close_output(self) -> None:
        deadline = time.monotonic() + _KILL_PATIENCE
        ending = self._signal is not None
        self._console.close(lambda: bool(self._signals) or (ending and time.monotonic() > deadline))

    def _say(self, text: str) -> None:
        self._write(f"unicoll.run: {text}\n")

    def _write(self, text: str) -> None:
        self._console.write(2, text.encode("utf-8", "backslashreplace"))


def _publish(job: LocalJob, worker: Worker, record: Record | None) -> None:
    """Tell the other ranks how this one ended; an error that names it as lost can then say why."""
    note = {"pid": worker.pid, "status": worker.status, "cause": record.message if record is not None else ""}
    try:
        job.store.set(EXIT_KEY.format(rank=worker.rank), json.dumps(note))
    except DistError as error:
        log.debug("the store did not take the end of rank %d: %s", worker.rank, error)


def _terminate(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGTERM)
    except (ProcessLookupError, PermissionError):
        pass
