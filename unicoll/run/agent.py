"""The launcher's main function: starts all workers, and starts them again after a failure."""

from __future__ import annotations

import os
import time

from unicoll.net.wire.interfaces import require_descriptors
from unicoll.run.args import LaunchOptions
from unicoll.run.attempt import Attempt, Launch
from unicoll.run.dump_directory import remove_old_dumps
from unicoll.run.failure import Failure
from unicoll.run.job import job_token
from unicoll.run.nodes import Cause, Nodes, OneNode
from unicoll.run.output import Console
from unicoll.run.process_cleanup import JOB_VARIABLE, Guard
from unicoll.run.signals import SignalQueue
from unicoll.run.workers import LogFiles, open_files

# Seconds for the last output after a signal, in case the reader of the console has stopped.
_OUTPUT_SECONDS = 10.0


class Agent:
    """One launch, from start to exit code."""

    def __init__(self, options: LaunchOptions) -> None:
        self._options = options
        self._signals = SignalQueue(options.signals)
        self._console = Console(self._signals.wake)

    def run(self) -> int:
        """Run the job; returns the exit code. OSError or DistError if it cannot be started."""
        try:
            # The output is closed before the signals: the console's thread wakes the main loop by
            # their socket, and another signal ends the wait for a reader that has stopped.
            self._signals.install()
            try:
                return self._run_job()
            finally:
                self._close_output()
        finally:
            self._signals.close()

    def _run_job(self) -> int:
        options = self._options
        remove_old_dumps()
        require_descriptors(open_files(options), f"the launcher of {options.nproc} processes")
        nodes = self._open_nodes()
        logs = LogFiles(options)
        token = job_token()
        guard: Guard | None = None
        try:
            # Before the first worker starts. The guard removes the directory if the launcher is
            # killed, so it does not get one that is kept.
            guard = Guard(token, "" if logs.kept else logs.path)
            if options.nnodes > 1:
                self._warn_without_secret()
            if logs.kept and options.log_dir is None:
                self._console.log(f"log files are in {logs.path}")
            return self._run_attempts(
                Launch(options, token, logs, self._console, self._signals, guard, nodes)
            )
        finally:
            nodes.close()
            if self._signals.exit_signal is not None:
                self._console.log(f"got {self._signals.exit_signal.name}")
            if guard is not None:
                guard.stop()
            logs.close()

    def _run_attempts(self, launch: Launch) -> int:
        # With --replace the limit is that of the replacements within an attempt; all workers are
        # never started again.
        nodes, most = launch.nodes, 0 if self._options.replaces else self._options.max_restarts
        first: Cause | None = None
        last: Cause | None = None
        failure: Failure | None = None
        attempt: Attempt | None = None
        reported = False
        number = 0
        try:
            while True:
                place = nodes.start(number, first)
                first = first or place.first_cause
                # Stored before it runs, because the handler below reports an attempt that was
                # interrupted.
                attempt, reported = Attempt(launch, place, last), False
                attempt.run()
                failure = attempt.failure
                # All nodes restart, or none: the end may be a failure elsewhere, or a signal to
                # another launcher.
                end = nodes.agree(attempt.end)
                if end.cause is None or attempt.number >= most or not end.may_restart:
                    break
                attempt.report_restart(end.cause)
                last = end.cause
                first = first or last
                number, reported = attempt.number + 1, True
        # An attempt that cannot be started, or SystemExit of a signal that arrives while no worker
        # runs. The other launchers get the reason before this one ends.
        except BaseException as error:
            how = (
                f"exit code {error.code}"
                if isinstance(error, SystemExit)
                else f"{type(error).__name__}: {error}"
            )
            nodes.announce(f"the launcher ends: {how}", final=True)
            if attempt is not None:
                # The line of the restart has already shown why the attempt has failed.
                attempt.report(None if reported else attempt.end.cause, first)
                self._write_error_file(attempt.failure or failure)
            raise
        attempt.report(end.cause, first)
        self._write_error_file(failure)
        return attempt.exit_code(end.cause)

    def _open_nodes(self) -> Nodes:
        if self._options.nnodes == 1:
            return OneNode(self._options)
        from unicoll.run.several_nodes import SeveralNodes

        return SeveralNodes(self._options, self._console, self._signals)

    def _write_error_file(self, failure: Failure | None) -> None:
        """Write the failure to the launcher's own error file, as torchrun does.

        Not in a job of unicoll: the file belongs to a worker that has started this launcher, and
        may go on.
        """
        error_file = os.environ.get("TORCHELASTIC_ERROR_FILE")
        if error_file and failure is not None and JOB_VARIABLE not in os.environ:
            try:
                failure.write(error_file)
            except OSError as error:
                self._console.log(f"TORCHELASTIC_ERROR_FILE={error_file}: {error.strerror}")

    def _warn_without_secret(self) -> None:
        if "UNICOLL_SECRET" not in os.environ and "UNICOLL_SECRET_FILE" not in os.environ:
            options = self._options
            self._console.log(
                "WARNING: this job has several nodes and no secret, so any process that can reach"
                f" {options.master_addr} port {options.master_port} can join it. Set"
                " UNICOLL_SECRET, or UNICOLL_SECRET_FILE, to the same secret on every node."
            )

    def _close_output(self) -> None:
        deadline = time.monotonic() + _OUTPUT_SECONDS
        self._console.close(
            lambda: (
                bool(self._signals.received) or (self._signals.seen and time.monotonic() > deadline)
            )
        )
