"""One start of all workers: forwards their output, waits for them and cleans up."""

from __future__ import annotations

import json
import math
import os
import selectors
import signal
import time
from collections import deque
from contextlib import ExitStack
from typing import NamedTuple

from unicoll.errors import DistError
from unicoll.net.control.departures import ENDED_KEY, exit_key
from unicoll.process import logs
from unicoll.process.formatting import ranks_text
from unicoll.process.signal_handlers import is_caught
from unicoll.run.args import ERR, LaunchOptions
from unicoll.run.dump_directory import TraceDirectory
from unicoll.run.failure import Failure, last_stderr_lines, report, root_cause, summary
from unicoll.run.job import job_variable
from unicoll.run.metrics_file import MetricsFile
from unicoll.run.nodes import Cause, NodeEnd, Nodes, Placement
from unicoll.run.output import Console, OutputPipes
from unicoll.run.process_cleanup import (
    JOB_VARIABLE,
    Guard,
    kill_group,
    kill_members,
    kill_process,
    members,
)
from unicoll.run.signals import SignalQueue
from unicoll.run.tracebacks import ExceptionRecord, Tracebacks
from unicoll.run.workers import AttemptFiles, LogFiles, Worker, shared_environment, start_worker

log = logs.logger("run")

# Seconds for which a traceback waits for those of the other ranks.
_TRACEBACK_DELAY = 1.0
# Seconds between checks for failed workers whose processes do not end.
_HANG_CHECK_INTERVAL = 1.0
# Seconds for helpers, such as multiprocessing's resource tracker, to end after their worker.
_LEFTOVER_SECONDS = 1.0
# Seconds from SIGKILL until the launcher no longer waits for a process, which may be blocked in the
# kernel.
_KILL_SECONDS = 10.0
# Seconds for the last output after the workers have ended: a process that has left the job may keep
# a pipe open.
_DRAIN_SECONDS = 2.0
# Seconds after the start until a terminal shows the launcher's state.
_STATUS_DELAY = 1.0
_STOPPING = "stopping the workers"
# A repeated signal within these seconds is ignored, because both come from one Ctrl-C.
_REPEAT_SECONDS = 0.5


class Launch(NamedTuple):
    """What all attempts of a launch share."""

    options: LaunchOptions
    token: str
    logs: LogFiles
    console: Console
    signals: SignalQueue
    guard: Guard
    nodes: Nodes


class Attempt:
    """One start of all workers of this node, until they have ended and nothing of them is left.

    ``_pending_signals`` has the signals still to be sent to the workers and their times; it is
    empty without failures.

    Attributes:
        number: number of earlier restarts.
        failed: the workers that have failed, in the order of detection.
        signal: the launcher's signal that ended it.
        failure: why it has failed on this node, after the end of :meth:`run`; None without a failed
            worker.

    Args:
        last_cause: why the last attempt has failed.
    """

    def __init__(self, launch: Launch, place: Placement, last_cause: Cause | None) -> None:
        self._options = launch.options
        self._token = launch.token
        self._logs = launch.logs
        self._console = launch.console
        self._signals = launch.signals
        self._guard = launch.guard
        self._nodes = launch.nodes
        self._place = place
        self._node_rank = place.node_rank if launch.options.nnodes > 1 else None
        self.number = place.attempt
        self.failed: list[Worker] = []
        self.signal: signal.Signals | None = None
        self.failure: Failure | None = None
        self._last_cause = last_cause
        self._store_failed = False
        # Why the attempt has failed on another node; empty if it has not.
        self._failed_elsewhere = ""
        # True if the workers have a grace period after that.
        self._has_grace = False
        self._workers: list[Worker] = []
        self._environment: dict[str, str] = {}
        self._replacements = 0
        self._pending_signals: deque[tuple[float, signal.Signals]] = deque()
        self._signal_time = 0.0
        # Pids of processes that have not ended after SIGKILL; with them there is no restart.
        self._left: list[int] = []
        # Time of the first signal to the workers, by which failures and effects of the signal are
        # told apart.
        self._stopping_since: float | None = None
        self._kill_time: float | None = None
        self._hang_check = 0.0
        self._tracebacks = Tracebacks()
        self._show_time = math.inf
        self._status_time = time.monotonic() + (0.0 if self.number else _STATUS_DELAY)
        self._dumps = TraceDirectory(
            os.environ, self._logs.path if self._logs.kept else None, self.number
        )
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._signals, selectors.EVENT_READ, None)
        self._streams = OutputPipes(self._selector, self._console)
        self._files: AttemptFiles | None = None
        self._metrics: MetricsFile | None = None

    def run(self) -> None:
        """Start the workers and wait for them. OSError or DistError if they cannot be started."""
        # The callbacks run in reverse order, each also if an earlier one has raised: the clean-up
        # still reads output by the selector, and the failure is determined from the complete
        # output.
        with ExitStack() as at_end:
            at_end.callback(self._determine_failure)
            at_end.callback(self._selector.close)
            at_end.callback(self._clean_up)
            self._start()
            self._wait_for_workers()

    def _determine_failure(self) -> None:
        if self.failed:
            self.failure = Failure(self._workers, self.failed, self._logs.kept, self._node_rank)

    @property
    def end(self) -> NodeEnd:
        """Its end on this node. The workers can be started again if none is left and no signal ends
        the launch."""
        cause = self.failure.cause if self.failure is not None else None
        return NodeEnd(cause, not self._left and not self._signals.seen)

    def exit_code(self, cause: Cause | None) -> int:
        """The launcher's exit code if this is the last attempt, and ``cause`` is why it has
        failed."""
        if self.signal is not None:
            return 128 + self.signal
        if cause is not None:
            return cause.exit_code
        return 0 if all(worker.status == 0 for worker in self._workers) else 1

    def _start(self) -> None:
        options = self._options
        self._metrics = MetricsFile(
            os.environ, options.nnodes, self._place, self._logs, self._console
        )
        added = {**self._dumps.environment, **self._metrics.environment}
        added[JOB_VARIABLE] = job_variable(self._token)
        self._environment = shared_environment(options, self._place, os.environ, added)
        self._files = AttemptFiles(options, self._logs, self.number, self._console)
        for local_rank in range(options.nproc):
            # Once a worker was started, in this attempt or an earlier one, a signal is queued. It
            # ends the launch, so no further worker is started.
            if self._signals.received:
                break
            # Before the start: SystemExit from the handler in the middle of it would leave a worker
            # that is not in the list.
            self._signals.started = True
            self._workers.append(self._start_worker(local_rank))

    def _start_worker(self, local_rank: int, replacement: int = 0) -> Worker:
        assert self._files is not None
        worker = start_worker(
            self._options,
            self._place.first_rank + local_rank,
            local_rank,
            self._environment,
            self._files,
            self._console,
            self._streams,
            replacement,
        )
        # From now on the guard kills the worker's session if the launcher is killed. Until then it
        # finds the worker by the job's token.
        self._guard.watch(worker.pid)
        return worker

    # --- the main loop ----------------------------------------------------------------------------

    def _wait_for_workers(self) -> None:
        # There is no worker if a signal arrived between two attempts; then the loop does not run.
        self._handle_signals()
        while self._running() or self._waits_for_nodes():
            self._poll(self._poll_timeout())
            self._handle_signals()
            # Several ends may come with one SIGCHLD, so every worker is asked.
            for worker in [
                worker for worker in self._workers if worker.status is None and worker.poll()
            ]:
                worker.ended = time.monotonic()
                self._record_end(worker)
            self._check_hanging_failures()
            self._check_nodes()
            self._show_status()
            if time.monotonic() >= self._show_time:
                self._show_tracebacks()
            self._send_due_signals()
            if self._kill_time is not None and time.monotonic() > self._kill_time + _KILL_SECONDS:
                return

    def _waits_for_nodes(self) -> bool:
        """True if this node's workers have succeeded and those of other nodes have not ended."""
        ended = (
            self.failed
            or self.signal is not None
            or self._failed_elsewhere
            or self._kill_time is not None
        )
        return not ended and not self._nodes.succeeded()

    def _check_nodes(self) -> None:
        """If the attempt has failed on another node, stop the workers of this one."""
        if self._failed_elsewhere or not (failure := self._nodes.failure()):
            return
        self._failed_elsewhere = failure.text
        if not self._running():
            self._console.log(failure.text)
            return
        seconds = 0.0 if failure.at_once else self._options.grace
        what = f"the workers have {seconds:g} s to end by themselves" if seconds else _STOPPING
        self._console.log(f"{failure.text}; {what}")
        self._has_grace = seconds > 0
        self._schedule_stop(seconds)

    def _running(self) -> int:
        return sum(worker.status is None for worker in self._workers)

    def _show_status(self) -> None:
        """Show how many workers run, the restarts and the last failure, unless a single one has the
        terminal."""
        running = self._running()
        if len(self._workers) == 1 or not running or time.monotonic() < self._status_time:
            return
        text = f"node {self._node_rank}: " if self._node_rank is not None else ""
        text += f"{running}/{len(self._workers)} workers running"
        if self.number:
            text += f", restart {self.number}/{self._options.max_restarts}"
        if self.failed:
            text += f"; rank {root_cause(self.failed).rank} has failed"
        elif self._last_cause is not None:
            text += f"; {self._last_cause.summary}"
        self._console.show_status(text)

    def _poll_timeout(self) -> float:
        wait = self._options.monitor_interval
        if self._streams.unfinished:
            # An unfinished line is shown once it is old enough; no event ends the poll for that.
            wait = min(wait, 0.1)
        if self._pending_signals:
            wait = min(wait, max(0.0, self._pending_signals[0][0] - time.monotonic()))
        return wait

    def _poll(self, seconds: float) -> None:
        for key, _events in self._selector.select(seconds):
            if key.data is None:
                self._signals.clear()
            else:
                self._streams.read(key.data)
        self._streams.tick()

    def _record_end(self, worker: Worker) -> None:
        assert worker.status is not None
        record = self._read_record(worker)
        if worker.status == 0:
            # The worker's handler of SIGTERM may end it with status 0.
            worker.stopped = self._stopping_since is not None
            if self._options.replaces:
                # The other ranks read this in recover(): a rank whose program has ended joins no
                # new round.
                self._store(ENDED_KEY, str(worker.rank))
            return
        if self._stopping_since is not None:
            # An exception from before the signal is the worker's own failure; whatever came later
            # is an effect of the signal.
            if record is None or (record.time or worker.ended) > self._stopping_since:
                worker.stopped = True
                return
            if worker.status < 0:
                # The worker's exception was first. The launcher's signal only ended its clean-up,
                # and its number is not the cause.
                worker.status = 1
        worker.failure = record
        if self._may_replace():
            self._replace(worker)
            return
        self.failed.append(worker)
        # The other launchers get the failure before the store, whose requests may take seconds.
        # After the first failure, here or elsewhere, they know that the attempt ends.
        if len(self.failed) == 1 and not self._failed_elsewhere:
            self._nodes.announce(summary(worker))
        self._publish_end(worker)
        self._schedule_stop()

    def _may_replace(self) -> bool:
        """True if a worker that fails now is replaced, and the others go on: none has ended, as all
        have to recover."""
        stops = (
            self.failed
            or self._failed_elsewhere
            or self._pending_signals
            or self._kill_time is not None
        )
        ended = any(worker.status == 0 for worker in self._workers)
        left = self._replacements < self._options.max_restarts
        return self._options.replaces and left and not stops and not ended

    def _replace(self, worker: Worker) -> None:
        """Start a process in place of one that has ended; it joins the others by
        unicoll.recover()."""
        # Before the replacement starts: the errors of the other ranks have this note.
        self._publish_end(worker)
        self._show_tracebacks()
        self._replacements += 1
        self._console.log(
            f"{summary(worker)}; starting a replacement ({self._replacements} of"
            f" {self._options.max_restarts})"
        )
        # The group's other processes, which the worker has started, must not run beside the
        # replacement.
        kill_group(worker.pid, signal.SIGKILL)
        # The worker is not in the list any more when _clean_up() completes the logs.
        self._complete_log(worker)
        # Before the pid is freed: the guard would kill the session of another process that gets it.
        self._guard.forget(worker.pid)
        replacement = self._start_worker(worker.local_rank, worker.replacement + 1)
        # Only now: if the start fails, the list still has the ended process, and _clean_up() sends
        # signals to its group, whose number must not be that of another process.
        worker.reap()
        self._workers[worker.local_rank] = replacement

    def _publish_end(self, worker: Worker) -> None:
        """Store how a rank ended, for the errors of the ranks that report it as lost."""
        cause = worker.failure.message if worker.failure is not None else ""
        note = {"pid": worker.pid, "status": worker.status, "cause": cause}
        self._store(exit_key(worker.rank, worker.replacement), json.dumps(note))

    def _store(self, key: str, value: str) -> None:
        # A request to a store that does not answer may last for seconds, in which this thread
        # forwards no output and handles no signal. After a failure elsewhere, or one failed
        # request, there are no more.
        if self._failed_elsewhere or self._store_failed:
            return
        try:
            with self._nodes.telling():
                self._place.store.set(key, value)
        except DistError as error:
            self._store_failed = True
            log.debug("the store did not accept %s: %s", key, error)

    def _check_hanging_failures(self) -> None:
        """A worker whose program has failed but whose process does not end is a failure too."""
        if time.monotonic() < self._hang_check:
            return
        self._hang_check = time.monotonic() + _HANG_CHECK_INTERVAL
        for worker in self._workers:
            if worker.status is None:
                record = self._read_record(worker)
                if record is not None and record.final and self._may_replace():
                    # The end by this signal leads to _record_end(), which starts the replacement.
                    if time.monotonic() > (record.time or 0.0) + self._options.grace:
                        kill_group(worker.pid, signal.SIGKILL)
                elif record is not None and record.final and not self._pending_signals:
                    self._nodes.announce(f"rank {worker.rank}: {record.message}")
                    self._schedule_stop()

    def _read_record(self, worker: Worker) -> ExceptionRecord | None:
        """The worker's recorded exception; if it ended the program, its traceback is scheduled for
        output."""
        if worker.record is None:
            record = worker.files.read_record()
            # A record of an exception that did not end the program is not kept, because the program
            # may write another one.
            if record is None or not record.final:
                return record
            worker.record = record
            if not worker.prints:
                self._tracebacks.add(worker.rank, record.traceback)
                self._show_time = min(self._show_time, time.monotonic() + _TRACEBACK_DELAY)
        return worker.record

    def _show_tracebacks(self, last: int | None = None) -> None:
        self._show_time = math.inf
        self._console.write_text(self._tracebacks.take(last))

    def _schedule_stop(self, grace: float | None = None) -> None:
        """After the first failure: a grace period for the others to fail by themselves, then
        SIGTERM, then SIGKILL."""
        # Only the first failure sets the times; later ones do not extend them.
        if not self._pending_signals and self._kill_time is None:
            term = time.monotonic() + (self._options.grace if grace is None else grace)
            self._pending_signals.append((term, signal.SIGTERM))
            self._pending_signals.append((term + self._options.shutdown_timeout, signal.SIGKILL))

    def _send_due_signals(self) -> None:
        while self._pending_signals and time.monotonic() >= self._pending_signals[0][0]:
            if self._has_grace and self._stopping_since is None and self._running():
                self._console.log(_STOPPING)
            self._send(self._pending_signals.popleft()[1])

    def _send(self, number: signal.Signals) -> None:
        """Signal all workers' process groups, also those whose leader has ended but left
        children."""
        if self._stopping_since is None:
            self._stopping_since = time.monotonic()
        if number == signal.SIGKILL:
            self._kill_time = time.monotonic()
            self._pending_signals.clear()
        for worker in self._workers:
            # A leader that has ended stays a zombie until _clean_up(), or _replace(), so its
            # group's number is not that of other processes.
            kill_group(worker.pid, number)
            if number == signal.SIGTERM:
                # A stopped process handles SIGTERM only when it goes on.
                kill_group(worker.pid, signal.SIGCONT)

    # --- signals to the launcher ------------------------------------------------------------------

    def _hand_on(self, number: signal.Signals) -> None:
        """Send a signal to the workers that handle it: after SIGUSR1 a job of unicoll writes
        dumps."""
        sent, others = [], []
        for worker in self._workers:
            # The default action of these signals ends a process. So only workers with a handler get
            # one, and not their process groups, where others may have none.
            if worker.status is None and is_caught(number, worker.pid):
                kill_process(worker.pid, number)
                sent.append(worker.rank)
            elif worker.status is None:
                others.append(worker.rank)
        is_request = number == signal.SIGUSR1
        words = [f"got {number.name}"]
        words += [f"sent it to {ranks_text(sent)}"] if sent else []
        words += (
            [f"to read their dumps: {self._dumps.reader}"]
            if is_request and sent and self._dumps.reader
            else []
        )
        hint = " (init_process_group sets one)" if is_request else ""
        words += [f"{ranks_text(others)} without a handler{hint}"] if others else []
        self._console.log("; ".join(words))

    def _handle_signals(self) -> None:
        while self._signals.handed_on:
            self._hand_on(self._signals.handed_on.popleft())
        while self._signals.received:
            number = self._signals.received.popleft()
            now = time.monotonic()
            if number == self.signal and now - self._signal_time < _REPEAT_SECONDS:
                continue
            # The same signal again, or one after a failure, ends the workers without a grace
            # period.
            if number == self.signal or self.failed:
                self._console.log(
                    f"got {number.name} again: killing the workers"
                    if self.signal
                    else f"got {number.name}"
                )
                self._send(signal.SIGKILL)
                continue
            running = self._running()
            self._console.log(
                f"got {number.name}; forwarding it to {running} workers"
                if running
                else f"got {number.name}"
            )
            self.signal, self._signal_time = number, now
            # The times of an earlier signal, or of a failure elsewhere, are replaced by those
            # below.
            self._pending_signals.clear()
            self._send(number)
            # After the signal to the workers, because the announcement may wait a second for its
            # answer.
            self._nodes.announce(f"the launcher got {number.name}", final=True)
            kill = now + self._options.shutdown_timeout
            # A worker that ignores SIGINT, for example, gets SIGTERM before SIGKILL.
            if number != signal.SIGTERM:
                self._pending_signals.append((now + self._options.grace, signal.SIGTERM))
                kill += self._options.grace
            self._pending_signals.append((kill, signal.SIGKILL))

    # --- the end of the job -----------------------------------------------------------------------

    def _clean_up(self) -> None:
        """Kill the processes that the workers have left, forward the last output, reap the
        workers."""
        leaders = {worker.pid for worker in self._workers}
        # If all workers have ended by themselves, what they have started may end, too, and may
        # handle SIGTERM. After SIGKILL to the workers there is no such wait.
        if all(worker.status is not None for worker in self._workers) and self._kill_time is None:
            self._wait_for_leftovers(leaders, _LEFTOVER_SECONDS)
            if left := members(self._token, leaders):
                for pid in left:
                    kill_process(pid, signal.SIGTERM)
                self._wait_for_leftovers(leaders, _LEFTOVER_SECONDS)
        # No leader is reaped before the end of this function, so the groups' numbers are still
        # theirs.
        for leader in leaders:
            kill_group(leader, signal.SIGKILL)
        self._left = kill_members(self._token, leaders, _KILL_SECONDS)
        if self._left:
            self._console.log(
                f"processes {self._left} do not end after SIGKILL; no longer waiting for them"
            )
        deadline = time.monotonic() + _DRAIN_SECONDS
        while self._streams.open and time.monotonic() < deadline:
            self._poll(0.05)
        self._streams.close()
        # After the pipes are closed, so that a log has the traceback behind the worker's last
        # output.
        self._complete_logs()
        self._console.show_status("")
        if self._files is not None:
            self._files.close()
        if self._metrics is not None:
            self._metrics.close()
        # Nothing else reads the queue after the main loop. SignalQueue.seen already prevents a
        # restart.
        while self._signals.received:
            self._console.log(f"got {self._signals.received.popleft().name}")
        for worker in self._workers:
            # Only now the pid may become that of another process: nothing more is sent to the
            # group. A process that has not ended stays with the guard.
            if worker.poll():
                self._guard.forget(worker.pid)
                worker.reap()

    def _wait_for_leftovers(self, leaders: set[int], seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while (
            time.monotonic() < deadline
            and not self._signals.received
            and members(self._token, leaders)
        ):
            self._poll(0.02)

    def report(self, cause: Cause | None, first: Cause | None = None) -> None:
        """Show what is left to show of the last attempt.

        Args:
            cause: why it has failed, if it has.
            first: why the first attempt has failed, if there were more.
        """
        if cause is None or self.signal is not None:
            self._show_tracebacks()
            self._log_reader()
            if first is not None:
                self._console.log(f"restarts: {self.number}; the first failure: {first.summary}")
            return
        self._show_failure()
        title = os.path.basename(self._options.target) or self._options.target
        lines = self.failure.lines(cause) if self.failure is not None else []
        self._console.write_text(report(title, lines, cause, self._reader(), first))

    def report_restart(self, cause: Cause) -> None:
        """Show why the attempt has failed, and that all workers start again."""
        self._show_failure()
        self._log_reader()
        self._console.log(
            f"{cause.summary}; restarting all {self._place.world_size} workers "
            f"(restart {self.number + 1} of {self._options.max_restarts})"
        )

    def _show_failure(self) -> None:
        if self.failure is None:
            self._show_tracebacks()
            return
        root = self.failure.root
        # Records that are not final were not added when they were read; that of the root cause is
        # shown nevertheless.
        if root.failure is not None and not root.failure.final:
            self._tracebacks.add(root.rank, root.failure.traceback)
        self._show_tracebacks(root.rank)
        self._console.write_text(last_stderr_lines(root))

    def _log_reader(self) -> None:
        if reader := self._reader():
            self._console.log(f"the last calls of the ranks: {reader}")

    def _reader(self) -> str:
        failed = any(worker.status for worker in self._workers) or self.signal is not None
        failed = failed or bool(self._failed_elsewhere)
        return self._dumps.command(failed)

    def _complete_logs(self) -> None:
        """Append the tracebacks that the launcher prints for workers to the files that their stderr
        goes to."""
        for worker in self._workers:
            self._complete_log(worker)

    def _complete_log(self, worker: Worker) -> None:
        if worker.record is None:
            return
        # The launcher has printed the traceback in place of the worker, so the pipe did not have
        # it.
        if worker.stderr is not None:
            worker.stderr.copy_lines(worker.record.traceback)
        if worker.logs_stderr:
            try:
                with worker.files.open(ERR, "ab") as log:
                    log.write(worker.record.traceback.encode("utf-8", "backslashreplace"))
            except OSError as error:
                self._console.log(
                    f"rank {worker.rank}'s log of stderr: {error.strerror}; it lacks the traceback"
                )
