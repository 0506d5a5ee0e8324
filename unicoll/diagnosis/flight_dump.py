"""Writing the flight recorder's dump of this rank: on request, on SIGUSR1, and when a group
fails."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import secrets
import signal
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from unicoll.backend.contract import Job
from unicoll.calls.flight_recorder import failure_text, ring
from unicoll.diagnosis.recorder_contents import RecordedCall, recorded_calls
from unicoll.errors import DistArgumentError, DistError, NotInitializedError
from unicoll.net.control.clock import Offset
from unicoll.net.wire.interfaces import hostname
from unicoll.process import fork_safety, signal_thread
from unicoll.process.files import open_own_directory, write_whole
from unicoll.process.formatting import command_to_type

log = logging.getLogger("unicoll")

_WRITER = "unicoll-flight-dump"
"""Name of the threads that write."""
_SNAPSHOT_S = 0.3
"""Seconds for which a failure waits for the copy of the calls, which must be made before they
end."""
_WRITE_S = 3.0
"""Seconds for which the end of the job waits for dumps that are being written."""

_open: list[FlightDumper] = []


def dumper_of(job: Job) -> FlightDumper:
    """The dumper of a job that this process is in."""
    return next(dumper for dumper in _open if dumper.job is job)


def dump_flight_recorder(directory: str | os.PathLike[str] | None = None, group: Any = None) -> str:
    """Write this rank's last calls, with the stacks of its threads, for ``unicoll trace``; returns
    the path.

    The file is ``rank_R.json``; ``nccl_trace_rank_R`` beside it has the calls in the format of
    PyTorch's flight recorder. Files of an earlier dump are replaced. Every rank writes its own
    files, so all ranks call this function, in any order, with a directory that they share.
    ``UNICOLL_FLIGHT_RECORDER`` is the number of calls that are kept.

    Args:
        directory: made if it does not exist; it has to belong to this user or root, and not every
            user may write to it unless it has the sticky bit, as /tmp. None is the directory that
            ``UNICOLL_TRACE_DIR`` had in init_process_group, or if it was not set a directory of the
            job's own among this host's temporary files.
        group: whose job's calls are written; None is init_process_group's, or else the job that was
            joined last.

    Raises:
        NotInitializedError: there is no job.
        DistArgumentError: ``group`` is not one of this process, or ``directory`` cannot be written,
            and why.
    """
    if group is None:
        found = [each for each in _open if not each.job.name] or _open
    else:
        base = getattr(group, "base", group)
        found = [each for each in _open if base in each.job.groups]
        if not found:
            raise DistArgumentError(
                f"dump_flight_recorder: {group!r} is not a group of this process"
            )
    if not found:
        raise NotInitializedError(
            "dump_flight_recorder: there is no job: call init_process_group first"
        )
    try:
        return found[-1].dump(directory, "dump_flight_recorder() was called")
    except OSError as error:
        raise DistArgumentError(f"dump_flight_recorder: directory: {error}") from error


class FlightDumper:
    """The dumps of one job; :meth:`close` ends it.

    Failures of groups are dumped if UNICOLL_TRACE_DIR is set now, those of a job with a name in a
    folder of that name. In the main thread of a process that has no handler of SIGUSR1, the signal
    is handled.
    """

    def __init__(self, job: Job) -> None:
        self.job = job
        self._id = job.control.job_id if job.control is not None else secrets.token_hex(8)
        self._writers: list[threading.Thread] = []
        self._failures: list[dict[str, object]] = []
        self.directory = os.environ.get("UNICOLL_TRACE_DIR", "")
        # The working directory may have been deleted. The path is made absolute here, because the
        # program may change its directory before a dump.
        with suppress(OSError):
            self.directory = self.directory and os.path.abspath(
                os.path.join(self.directory, job.name)
            )
        if job.control is not None:
            job.control.failure_listeners.append(self._on_failure)
        handle_signal()
        _open.append(self)

    def close(self) -> None:
        """Wait for dumps that are being written, for a few seconds at most; restore the signal."""
        # It is removed first, so that a signal starts no further dump while the present ones are
        # waited for.
        if self in _open:
            _open.remove(self)
        if not _open:
            signal_thread.release(signal.SIGUSR1)
        if self.job.control is not None:
            with suppress(ValueError):
                self.job.control.failure_listeners.remove(self._on_failure)
        self.await_written(_WRITE_S)

    def await_written(self, seconds: float) -> None:
        """Wait for dumps that are being written."""
        deadline = time.monotonic() + seconds
        for thread in list(self._writers):
            thread.join(max(0.0, deadline - time.monotonic()))

    def dump(self, directory: str | os.PathLike[str] | None, reason: str) -> str:
        """Write the dump; returns its path, or raises OSError.

        ``directory`` is made if it does not exist, see
        :func:`unicoll.process.files.open_own_directory`; None is UNICOLL_TRACE_DIR or a directory
        of the job's own.
        """
        place = self._default_directory() if directory is None else os.fspath(directory)
        return self._write(place, reason, False, lambda: None)

    def content(
        self,
        reason: str,
        calls: Sequence[RecordedCall],
        failure: bool = False,
        copied: Callable[[], object] = bool,
    ) -> dict[str, Any]:
        """The dump as a dict for JSON; ``copied`` is called when the threads' stacks have been
        copied."""
        # This is imported here, since dumps are rare.
        from unicoll.diagnosis import dump_format

        stacks = dump_format.threads(_WRITER)
        # Like the stacks, the groups are copied before copied(): after it the control thread goes
        # on and ends the calls.
        groups = list(self.job.groups)
        copied()
        # This is behind copied(): the control thread, which waits for the copy, has to receive the
        # answers with the relay's clock.
        job, control = self.job, self.job.control
        if control is None or job.rank == 0:
            offset: Offset | None = Offset(0.0, 0.0)
        else:
            offset = control.measure_clock()
        content = dump_format.content(job, self._id, reason, failure, groups, calls, stacks, offset)
        content["failures"] = list(self._failures)
        return content

    def start(self, reason: str, failure: bool) -> None:
        """Write the dump on another thread; errors are logged.

        If a group has failed, this waits for a moment until its calls have been copied; else it is
        logged where the dump is.
        """
        copied = threading.Event()

        def write() -> None:
            try:
                path = self._write(self._default_directory(), reason, failure, copied.set)
                if not failure:
                    log.warning(
                        "rank %d: the flight recorder's dump is %s; to read it: %s",
                        self.job.rank,
                        path,
                        command_to_type("trace", os.path.dirname(path)),
                    )
            except Exception as error:
                # Diagnostics must not cause failures of the program.
                self._warn(error)
            finally:
                # The control thread waits for this also if the dump has failed.
                copied.set()

        thread = threading.Thread(target=write, name=_WRITER, daemon=True)
        try:
            thread.start()
        except RuntimeError as error:
            # No further thread can be started, for example at the end of the program.
            self._warn(error)
            return
        # Several groups may fail at once.
        self._writers.append(thread)
        for ended in [t for t in self._writers if not t.is_alive()]:
            # Several groups may fail at once, on several threads, and another one may have removed
            # it.
            with suppress(ValueError):
                self._writers.remove(ended)
        if failure:
            copied.wait(_SNAPSHOT_S)

    def _warn(self, error: Exception) -> None:
        log.warning("rank %d: the flight recorder's dump is not written: %s", self.job.rank, error)

    def _on_failure(self, group: str, error: DistError) -> None:
        """A group has failed; its calls have not ended yet."""
        # Only the text is kept: the exception would keep frames alive, and with them arrays.
        text = failure_text(error)
        self._failures.append({"group": group, "error": text, "at": time.monotonic()})
        if self.directory:
            self.start(f"group {group!r} failed: {text}", True)

    def _default_directory(self) -> str:
        import tempfile

        if self.directory:
            return self.directory
        # The name is a hash over the host's name, too: a name that is seen on one host says nothing
        # about those on the others.
        name = hashlib.sha256(f"{self._id} {hostname()}".encode()).hexdigest()[:16]
        return os.path.join(tempfile.gettempdir(), f"unicoll_trace_{name}")

    def _write(self, directory: str, reason: str, failure: bool, copied: Callable[[], None]) -> str:
        # This comes first, since the calls may end at any time.
        calls = recorded_calls(self.job.number)
        # This is imported here, since dumps are rare.
        from unicoll.diagnosis import torch_dump_format

        job, groups = self.job, list(self.job.groups)
        content = self.content(reason, calls, failure, copied)
        name, folder = f"rank_{job.rank}.json", open_own_directory(directory)
        try:
            write_whole(name, json.dumps(content).encode(), directory=folder)
            maximum = ring().maxlen
            full = maximum is not None and len(calls) >= maximum
            epoch = content["written"]["wall"] - content["written"]["monotonic"]
            for_torch = torch_dump_format.dumped(job.rank, calls, groups, full, epoch)
            write_whole(f"{torch_dump_format.PREFIX}{job.rank}", for_torch, directory=folder)
        finally:
            os.close(folder)
        return os.path.join(directory, name)


# --- the signal -----------------------------------------------------------------------------------


def handle_signal() -> None:
    """Dump on SIGUSR1, if this is the main thread and nothing else handles the signal."""
    signal_thread.handle(signal.SIGUSR1, _dump_on_signal)


def _dump_on_signal() -> None:
    # The dump is written on another thread, since this one may be within a call whose locks the
    # dump needs. Of several jobs with one directory only the newest is written: the files have the
    # same names.
    for dumper in {each.directory or each: each for each in _open}.values():
        dumper.start("SIGUSR1", False)


def _forget() -> None:
    """A forked child is not a member of its parent's job."""
    _open.clear()


fork_safety.in_child(_forget)
