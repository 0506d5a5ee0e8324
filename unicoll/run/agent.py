"""The launcher's main loop: starts the workers, forwards their output, waits for them and cleans up."""

from __future__ import annotations

import json
import math
import os
import selectors
import shutil
import signal
import socket
import sys
import threading
import time
from collections import deque
from types import FrameType
from typing import Any

from unicoll.errors import DistError
from unicoll.net import logs
from unicoll.net.formatting import ranks_text
from unicoll.net.interfaces import require_descriptors
from unicoll.net.signal_handlers import is_caught
from unicoll.run.args import LaunchOptions
from unicoll.run.dump_directory import TraceDirectory, remove_old_dumps
from unicoll.run.failure import exit_code, last_stderr_lines, report, root_cause
from unicoll.run.job import EXIT_KEY, LocalJob, job_token, job_variable
from unicoll.run.output import Console, OutputPipes
from unicoll.run.process_cleanup import JOB_VARIABLE, Guard, kill_group, kill_members, kill_process, members
from unicoll.run.tracebacks import ExceptionRecord, Tracebacks, read_record
from unicoll.run.workers import LogFiles, Worker, open_files, shared_environment, start_worker

log = logs.logger("run")

_TRACEBACK_DELAY = 1.0  # seconds for which a traceback waits for those of the other ranks
_HANG_CHECK_INTERVAL = 1.0  # seconds between checks for failed workers whose processes do not end
_LEFTOVER_SECONDS = 1.0  # for helpers (multiprocessing's tracker...) to end after their worker
_KILL_SECONDS = 10.0  # from SIGKILL until the launcher gives up on a process (stuck in the kernel)
_DRAIN_SECONDS = 2.0  # for the last output, after the workers have ended
_REPEAT_SECONDS = 0.5  # a repeated signal within this time is ignored: both come from one Ctrl-C


class Agent:
    """One launch, from start to exit code.

    ``_pending_signals`` has the signals still to be sent to the workers and their times; it is empty without failures.
    """

    def __init__(self, options: LaunchOptions) -> None:
        self._options = options
        self._token = job_token()
        self._workers: list[Worker] = []
        self._failed: list[Worker] = []
        self._root: Worker | None = None
        self._pending_signals: deque[tuple[float, signal.Signals]] = deque()
        self._signals: deque[signal.Signals] = deque()
        self._dump_requested = False
        self._signal: signal.Signals | None = None  # that ended the job
        self._signal_time = 0.0
        self._stopping_since: float | None = None  # wall clock of the first signal to the workers
        self._kill_time: float | None = None
        self._hang_check = 0.0
        self._tracebacks = Tracebacks()
        self._show_time = math.inf
        self._selector = selectors.DefaultSelector()
        self._wake_read, self._wake_write = socket.socketpair()
        for end in (self._wake_read, self._wake_write):
            end.setblocking(False)
        self._selector.register(self._wake_read, selectors.EVENT_READ, None)
        self._console = Console(self._wake)
        self._streams = OutputPipes(self._selector, self._console)

    def run(self) -> int:
        """Run the job; returns the exit code. OSError or DistError if it cannot be started."""
        previous = self._install_signal_handlers()
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
            self._wake_read.close()
            self._wake_write.close()

    def _run_job(self) -> None:
        options = self._options
        remove_old_dumps()
        require_descriptors(open_files(options), f"the launcher of {options.nproc} processes")
        job: LocalJob | None = None
        guard: Guard | None = None
        logs = LogFiles(options)
        self._dumps = TraceDirectory(os.environ, logs.path if logs.kept else None)
        try:
            job = LocalJob(os.environ, options.master_port) if options.nnodes == 1 else None
            guard = Guard(self._token, "" if logs.kept else logs.path)
            self._start(logs, job, guard)
            self._wait_for_workers(job)
        finally:
            self._clean_up()
            if guard is not None:
                guard.stop()
            if job is not None:
                job.close()
            self._report(logs)
            if not logs.kept:
                shutil.rmtree(logs.path, ignore_errors=True)

    def _start(self, logs: LogFiles, job: LocalJob | None, guard: Guard) -> None:
        options = self._options
        added = {JOB_VARIABLE: job_variable(self._token), **self._dumps.environment}
        if job is not None:
            added.update(job.environment, MASTER_PORT=str(job.master_port))
        else:
            added.update(UNICOLL_LAUNCHER="1", MASTER_PORT=str(options.master_port))
            self._warn_without_secret()
        if logs.kept and options.log_dir is None:
            self._log(f"log files are in {logs.path}")
        environment = shared_environment(options, os.environ, added)
        for local_rank in range(options.nproc):
            worker = start_worker(options, local_rank, environment, logs, self._console, self._streams)
            guard.watch(worker.pid)
            self._workers.append(worker)

    def _warn_without_secret(self) -> None:
        if "UNICOLL_SECRET" not in os.environ and "UNICOLL_SECRET_FILE" not in os.environ:
            options = self._options
            self._log(
                "WARNING: this job has several nodes and no secret, so any process that can reach "
                f"{options.master_addr} port {options.master_port} can join it. Set UNICOLL_SECRET, or "
                "UNICOLL_SECRET_FILE, to the same secret on every node."
            )

    # --- the main loop ----------------------------------------------------------------------------------------

    def _wait_for_workers(self, job: LocalJob | None) -> None:
        while any(worker.status is None for worker in self._workers):
            self._poll(self._poll_timeout())
            self._handle_signals()
            for worker in self._workers:
                if worker.status is None and worker.poll():
                    worker.ended = time.time()
                    self._record_end(worker, job)
            self._check_hanging_failures()
            if time.monotonic() >= self._show_time:
                self._show_tracebacks()
            self._send_due_signals()
            if self._kill_time is not None and time.monotonic() > self._kill_time + _KILL_SECONDS:
                stuck = [worker.pid for worker in self._workers if worker.status is None]
                self._log(f"processes {stuck} do not end after SIGKILL; no longer waiting for them")
                return

    def _poll_timeout(self) -> float:
        wait = self._options.monitor_interval
        if self._streams.unfinished:
            wait = min(wait, 0.1)
        if self._pending_signals:
            wait = min(wait, max(0.0, self._pending_signals[0][0] - time.monotonic()))
        return wait

    def _poll(self, seconds: float) -> None:
        for key, _events in self._selector.select(seconds):
            if key.data is None:
                self._wake_read.recv(4096)
            else:
                self._streams.read(key.data)
        self._streams.tick()

    def _record_end(self, worker: Worker, job: LocalJob | None) -> None:
        assert worker.status is not None
        record = self._read_record(worker)
        if worker.status == 0:
            worker.stopped = self._stopping_since is not None  # its handler of SIGTERM may end it so
            return
        if self._stopping_since is not None:
            if record is None or record.time > self._stopping_since:
                worker.stopped = True
                return
            if worker.status < 0:
                worker.status = 1  # its exception was first; the launcher's signal only ended its clean-up
        worker.failure = record
        self._failed.append(worker)
        if job is not None:
            _publish(job, worker)
        self._schedule_stop()

    def _check_hanging_failures(self) -> None:
        """A worker whose program has failed but whose process does not end is a failure too."""
        if time.monotonic() < self._hang_check:
            return
        self._hang_check = time.monotonic() + _HANG_CHECK_INTERVAL
        for worker in self._workers:
            if worker.status is None and os.path.exists(worker.error_file):
                record = self._read_record(worker)
                if record is not None and record.final:
                    self._schedule_stop()

    def _read_record(self, worker: Worker) -> ExceptionRecord | None:
        """The worker's recorded exception; if it ended the program, its traceback is scheduled for output."""
        if worker.record is None:
            record = read_record(worker.error_file)
            if record is None or not record.final:
                return record
            worker.record = record
            if not worker.prints:
                self._tracebacks.add(worker.rank, record.traceback)
                self._show_time = min(self._show_time, time.monotonic() + _TRACEBACK_DELAY)
        return worker.record

    def _show_tracebacks(self, last: int | None = None) -> None:
        self._show_time = math.inf
        self._write(self._tracebacks.take(last))

    def _schedule_stop(self) -> None:
        """After the first failure: a grace period for the others to fail by themselves, then SIGTERM, then SIGKILL."""
        if not self._pending_signals and self._kill_time is None:
            term = time.monotonic() + self._options.grace
            self._pending_signals.append((term, signal.SIGTERM))
            self._pending_signals.append((term + self._options.shutdown_timeout, signal.SIGKILL))

    def _send_due_signals(self) -> None:
        while self._pending_signals and time.monotonic() >= self._pending_signals[0][0]:
            self._send(self._pending_signals.popleft()[1])

    def _send(self, number: signal.Signals) -> None:
        """Signal all workers' process groups, also those whose leader has ended but left children."""
        if self._stopping_since is None:
            self._stopping_since = time.time()
        if number == signal.SIGKILL:
            self._kill_time = time.monotonic()
            self._pending_signals.clear()
        for worker in self._workers:
            kill_group(worker.pid, number)
            if number == signal.SIGTERM:
                kill_group(worker.pid, signal.SIGCONT)  # a stopped process does not handle it

    # --- signals to the launcher --------------------------------------------------------------------------------

    def _install_signal_handlers(self) -> dict[signal.Signals, Any]:
        if threading.current_thread() is not threading.main_thread():
            raise DistError("the launcher handles signals and must run in the main thread")
        previous: dict[signal.Signals, Any] = {}
        for number in {*self._options.signals, signal.SIGCHLD, signal.SIGUSR1}:
            # Signals that are ignored at the start stay ignored: SIGHUP under nohup, SIGINT in the background.
            if number == signal.SIGCHLD or signal.getsignal(number) != signal.SIG_IGN:
                previous[number] = signal.signal(number, self._on_signal)
        signal.set_wakeup_fd(self._wake_write.fileno(), warn_on_full_buffer=False)
        return previous

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        if number == signal.SIGUSR1 and number not in self._options.signals:
            self._dump_requested = True
        elif number != signal.SIGCHLD and not self._workers:
            self._signal = signal.Signals(number)
            sys.exit(128 + number)  # nothing has been started, and the main loop may not be reached
        elif number != signal.SIGCHLD:
            self._signals.append(signal.Signals(number))

    def _wake(self) -> None:
        try:
            self._wake_write.send(b"\0")
        except OSError:
            pass  # full: the loop wakes up anyway; closed: the job has ended

    def _request_dumps(self) -> None:
        """Send SIGUSR1 to the workers that handle it: in a job of unicoll they write the flight recorder's dump."""
        sent, others = [], []
        for worker in self._workers:
            if worker.status is None and is_caught(signal.SIGUSR1, worker.pid):
                kill_process(worker.pid, signal.SIGUSR1)
                sent.append(worker.rank)
            elif worker.status is None:
                others.append(worker.rank)
        words = ["got SIGUSR1"]
        words += [f"sent it to {ranks_text(sent)}"] if sent else []
        words += [f"to read their dumps: {self._dumps.reader}"] if sent and self._dumps.reader else []
        words += [f"{ranks_text(others)} without a handler (init_process_group sets one)"] if others else []
        self._log("; ".join(words))

    def _handle_signals(self) -> None:
        if self._dump_requested:
            self._dump_requested = False
            self._request_dumps()
        while self._signals:
            number = self._signals.popleft()
            now = time.monotonic()
            if number == self._signal and now - self._signal_time < _REPEAT_SECONDS:
                continue
            if number == self._signal or self._failed:
                self._log(
                    f"got {number.name} again: killing the workers" if self._signal else f"got {number.name}"
                )
                self._send(signal.SIGKILL)
                continue
            running = sum(worker.status is None for worker in self._workers)
            self._log(f"got {number.name}; forwarding it to {running} workers")
            self._signal, self._signal_time = number, now
            self._pending_signals.clear()
            self._send(number)
            kill = now + self._options.shutdown_timeout
            if number != signal.SIGTERM:
                self._pending_signals.append((now + self._options.grace, signal.SIGTERM))
                kill += self._options.grace
            self._pending_signals.append((kill, signal.SIGKILL))

    # --- the end of the job -----------------------------------------------------------------------------------

    def _clean_up(self) -> None:
        """Kill the processes that the workers have left, forward the last output, reap the workers."""
        leaders = {worker.pid for worker in self._workers}
        if all(worker.status is not None for worker in self._workers) and self._kill_time is None:
            self._wait_for_leftovers(leaders, _LEFTOVER_SECONDS)
            if left := members(self._token, leaders):
                for pid in left:
                    kill_process(pid, signal.SIGTERM)
                self._wait_for_leftovers(leaders, _LEFTOVER_SECONDS)
        for leader in leaders:
            kill_group(leader, signal.SIGKILL)
        kill_members(self._token, leaders, _KILL_SECONDS)
        deadline = time.monotonic() + _DRAIN_SECONDS
        while self._streams.open and time.monotonic() < deadline:
            self._poll(0.05)
        self._streams.close()
        for worker in self._workers:
            worker.poll()
            worker.reap()

    def _wait_for_leftovers(self, leaders: set[int], seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and not self._signals and members(self._token, leaders):
            self._poll(0.02)

    def _report(self, logs: LogFiles) -> None:
        self._complete_logs()
        reader = self._dumps.command(
            any(worker.status for worker in self._workers) or self._signal is not None
        )
        if not self._failed or self._signal is not None:
            if self._signal is not None and not self._workers:
                self._log(f"got {self._signal.name}")
            self._show_tracebacks()
            if reader:
                self._log(f"the last calls of the ranks: {reader}")
            return
        title = os.path.basename(self._options.target) or self._options.target
        self._root = root = root_cause(self._failed)
        if root.failure is not None and not root.failure.final:
            self._tracebacks.add(root.rank, root.failure.traceback)
        self._show_tracebacks(root.rank)
        self._write(last_stderr_lines(root) + report(title, self._workers, self._failed, reader, logs.kept))

    def _complete_logs(self) -> None:
        """Append the tracebacks that the launcher prints for workers to the workers' log files."""
        for worker in self._workers:
            if worker.log is not None and worker.record is not None:
                try:
                    with open(worker.log, "a", encoding="utf-8", errors="backslashreplace") as log:
                        log.write(worker.record.traceback)
                except OSError as error:
                    self._log(f"{worker.log}: {error.strerror}; it lacks the traceback")

    def _exit_code(self) -> int:
        if self._signal is not None:
            return 128 + self._signal
        if self._root is not None:
            return exit_code(self._root)
        return 0 if all(worker.status == 0 for worker in self._workers) else 1

    def _close_output(self) -> None:
        deadline = time.monotonic() + _KILL_SECONDS
        ending = self._signal is not None
        self._console.close(lambda: bool(self._signals) or (ending and time.monotonic() > deadline))

    def _log(self, text: str) -> None:
        self._write(f"unicoll.run: {text}\n")

    def _write(self, text: str) -> None:
        self._console.write(2, text.encode("utf-8", "backslashreplace"))


def _publish(job: LocalJob, worker: Worker) -> None:
    """Store how a rank ended, for the errors of the ranks that report it as lost."""
    cause = worker.failure.message if worker.failure is not None else ""
    note = {"pid": worker.pid, "status": worker.status, "cause": cause}
    try:
        job.store.set(EXIT_KEY.format(rank=worker.rank), json.dumps(note))
    except DistError as error:
        log.debug("the store did not accept the end of rank %d: %s", worker.rank, error)
