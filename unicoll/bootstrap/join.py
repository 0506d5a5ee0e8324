"""Joining and leaving a job: rendezvous, choice of backends, control plane, end of the process."""

from __future__ import annotations

import atexit
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from functools import lru_cache
from typing import Any

from unicoll.backend.contract import Job
from unicoll.bootstrap import enclosing_jobs, fake_job, mpi_launch
from unicoll.bootstrap.mpi_launch import MPIJobStart
from unicoll.bootstrap.rendezvous import Rendezvous, gives_members, refuse_protection, rendezvous
from unicoll.bootstrap.rendezvous_protocol import MIN_SECONDS, StoreLocation
from unicoll.bootstrap.termination import raise_before_sigterm
from unicoll.calls.error_marks import mark_delivered
from unicoll.diagnosis.flight_dump import FlightDumper
from unicoll.diagnosis.wait_monitor import WaitMonitor
from unicoll.errors import DistError
from unicoll.group import backend_choice, registry
from unicoll.group.backend_choice import BackendChoice
from unicoll.group.process_group import ProcessGroup
from unicoll.net.control.client import ControlClient, StaleRendezvousError
from unicoll.net.control.departures import publish_refusal
from unicoll.net.objects.received_json import parse
from unicoll.net.stores import Store
from unicoll.net.stores.signed import SignedStore
from unicoll.net.wire.secret import Secret
from unicoll.process import debug_level, environment, excepthook, fork_safety, logs
from unicoll.process.formatting import backend_text, printable_line
from unicoll.process.timeouts import seconds_left

log = logs.logger("job")

_EXIT_NOTE_S = 0.3
"""Seconds to wait for the launcher's note on how a rank ended; it polls its workers ten times a
second."""


Backends = str | Sequence[BackendChoice] | None
"""The backends of a job's default group: as the user names them, or chosen."""


def join(
    backend: Backends,
    init_method: str | None,
    rank: int,
    world_size: int,
    store: Store | StoreLocation | None,
    timeout: float,
    join_timeout: float,
    name: str = "",
    secret: Secret | None = None,
) -> Job:
    """:func:`run_rendezvous`, then :func:`join_job`; again if the rendezvous was that of an earlier
    job."""
    started = time.monotonic()
    backend = fake_job.override or backend
    while True:
        left = seconds_left(started + join_timeout, MIN_SECONDS)
        found = run_rendezvous(backend, init_method, rank, world_size, store, left, name, secret)
        left = seconds_left(started + join_timeout, MIN_SECONDS)
        try:
            job = join_job(found, backend, timeout, left, name)
        except StaleRendezvousError as error:
            log.info("the store has the record of an earlier job: %s; reading it again", error)
            continue
        log.info(
            "joined as rank %d of %d in %.3f s",
            found.rank,
            found.world_size,
            time.monotonic() - started,
        )
        return job


def run_rendezvous(
    backend: Backends,
    init_method: str | None,
    rank: int,
    world_size: int,
    store: Store | StoreLocation | None,
    join_timeout: float,
    name: str = "",
    secret: Secret | None = None,
) -> Rendezvous:
    """Find the other processes, with the arguments of :func:`unicoll.join`; ``store`` may also be a
    location.

    A job with a name whose ranks are given is not the launcher's.

    Raises:
        DistArgumentError: arguments and environment do not give rank and world size, or contradict
            each other; a variable of unicoll has an unknown value; the process is a subprocess of
            one that has joined in its place.
        BackendUnavailableError: MPI was requested by name, but was not started with the other
            processes.
        AuthenticationError, DistStoreError, DistNetworkError: as
            :func:`unicoll.bootstrap.rendezvous.rendezvous`.
    """
    apply_environment()
    # a backend that cannot be used fails before other ranks wait for this one
    if isinstance(backend, str) and backend_choice.is_fake(backend_choice.choose(backend)):
        return fake_job.rendezvous(init_method, rank, world_size)
    log.info("joining: process %d", os.getpid())
    given = gives_members(init_method, rank, world_size)
    use_launcher = not (name and given)
    if not given and store is None:
        # This comes before the lines that may start MPI.
        enclosing_jobs.refuse_subprocess(mpi_launch.detect)
    mpi = MPIJobStart(rank, world_size)
    if use_launcher:
        named = backend if isinstance(backend, str) else None
        mpi = mpi_launch.start(named, rank, world_size, join_timeout)
    found = rendezvous(
        init_method,
        mpi.rank,
        mpi.world_size,
        store,
        join_timeout,
        launched=mpi.launched,
        mpi_store=mpi.store,
        spare_store=mpi.spare_store,
        name=name,
        secret=secret,
        use_launcher=use_launcher,
    )
    found.notes[:0] = mpi.notes
    found.mpi_started, found.mpi_reason = found.mpi_started or mpi.started, mpi.reason
    if not name:
        logs.set_rank(found.rank)
    return found


def apply_environment() -> None:
    """Check unicoll's variables and apply the debug level, before anything else that joining a job
    does.

    Raises:
        DistArgumentError: a variable has an unknown value.
    """
    # This comes first, so that the errors below are shown without unicoll's frames.
    _install_excepthook()
    environment.check()
    debug_level.apply()
    environment.warn_of_unknown()


def join_job(
    rendezvous: Rendezvous, backend: Backends, timeout: float, join_timeout: float, name: str = ""
) -> Job:
    """Join the job of a rendezvous; returns when all ranks have joined. On an error ``rendezvous``
    is closed too.

    At the end of the interpreter the process leaves the job, with the exception that has ended the
    program.

    Raises:
        BackendUnavailableError: the backend cannot be used on this machine; the message has the
            reason.
        DistArgumentError: UNICOLL_CHANNEL requires protection, but other processes may have the
            job's key.
        OperationTimeoutError: not all ranks joined in time; the message has the missing ones.
    """
    launched = rendezvous.launched
    job = Job(
        rendezvous.rank,
        rendezvous.world_size,
        SignedStore(rendezvous.store, rendezvous.secret.key),
        rendezvous.secret.key,
        list(rendezvous.listen_addresses),
        timeout,
        local_size=launched.local_world_size if launched else None,
        exit_cause=_exit_note_reader(rendezvous),
        local_rank=launched.local_rank if launched else None,
        fake=rendezvous.fake,
        rendezvous=rendezvous,
        name=name,
    )
    job.cleanup.callback(log.info, "left the job")
    job.cleanup.callback(rendezvous.close)
    job.cleanup.callback(_remove_keys, job)
    job.cleanup.callback(job.close_shared)
    try:
        if rendezvous.world_size > 1 and not rendezvous.trusted:
            refuse_protection()
        job.allows_pickle = rendezvous.trusted and bool(environment.flag("UNICOLL_ALLOW_PICKLE"))
        job.choices = (
            choose(job, backend) if backend is None or isinstance(backend, str) else backend
        )
        for cls in {c.cls for c in job.choices}:
            cls.prepare(job)
        if job.size > 1 and not job.fake:
            job.control = control = ControlClient(
                job.rank,
                job.size,
                job.key,
                job.addresses[0],
                rendezvous.store_ends_with_rank_0,
                job.allows_pickle,
                name,
            )
            job.cleanup.callback(lambda: control.close(job.error))
            control.start(job.store, join_timeout, rendezvous.address, rendezvous.replaced)
            job.allows_pickle = all(peer.allows_pickle for peer in control.peers)
            job.shared("wait monitor", lambda: WaitMonitor(job))
        if rendezvous.mpi_started:
            registry.register_job_with_mpi(job)
    except BaseException as e:
        if job.control is None and job.rank != 0:
            with suppress(DistError):
                publish_refusal(job.store, job.rank, e)
        leave(job, e)
        # The traceback of the exception has frames that refer to the job, which would be a cycle.
        job.error = None
        raise
    chosen = [f"{c.device} arrays: backend {backend_text(c.name)}: {c.why}" for c in job.choices]
    job.notes = [*rendezvous.notes, *chosen]
    for note in job.notes:
        log.info("%s", note)
    job.cleanup.callback(FlightDumper(job).close)
    _joined.append(job)
    if launched is not None:
        enclosing_jobs.mark_joined(launched)
        if launched.name == "torchrun":
            raise_before_sigterm(job)
    _register_exit_handler()
    return job


def choose(job: Job, backend: str | None) -> list[BackendChoice]:
    """The backends of a group of a job: :func:`unicoll.group.backend_choice.choose`."""
    launched = job.rendezvous.launched
    by_mpi = launched is not None and launched.started_by_mpi
    return backend_choice.choose(backend, by_mpi, job.rendezvous.mpi_reason)


def leave(job: Job, error: BaseException | None = None) -> None:
    """Leave a job: close the groups, the control plane and the store; idempotent.

    Args:
        error: the exception that has ended the program, or SystemExit; None if the program goes on.

    Raises:
        DistError: of a group that has failed, if no call has raised it.
    """
    job.error = job.error or error
    if job in _joined:
        _joined.remove(job)
        if not any(other.rendezvous.launched for other in _joined):
            enclosing_jobs.unmark_joined()
    if job.leaving is not None:
        job.leaving()
    groups = [*job.groups]
    job.groups.clear()
    # An exception in one of these does not keep the others open.
    with job.cleanup.pop_all() as cleanup:
        for group in groups:
            cleanup.callback(group.close)
        if error is not None and not isinstance(error, SystemExit):
            ended = DistError(f"this process ended with {type(error).__name__}: {error}")
            mark_delivered(ended)
            for group in groups:
                # Pending operations must not block the exit.
                group.abort_on_this_rank(ended)


def end_group(job: Job, group: ProcessGroup, reason: str) -> None:
    """Destroy a group; calls of other ranks in it, which may not know of a loss yet, raise. The job
    is not left."""
    control = job.control
    if control is not None and control.group_failure(group.name) is None:
        died = [rank for rank in control.died if rank in group.ranks]
        group.abort(f"{control.departed[died[0]]}; {reason}" if died else reason)
    job.groups.remove(group)
    group.close(raise_failure=False)


def _remove_keys(job: Job) -> None:
    """On the last rank that leaves a job with a name, remove its keys if the store outlives it.

    The ranks' claims stay until the next rendezvous of that name, so that no process of a later job
    takes part in this one.
    """
    rendezvous = job.rendezvous
    if job.name and job.error is None and not rendezvous.store_ends_with_rank_0:
        with suppress(DistError):
            store: Store = rendezvous.store
            if store.add("left", 1) == job.size:
                for key in store.list_keys():
                    if not key.startswith("rank/"):
                        store.delete_key(key)


# --- the end of other ranks -----------------------------------------------------------------------


def _exit_note_reader(rendezvous: Rendezvous) -> Callable[[int], str | None] | None:
    """A reader of the launcher's notes on how ranks ended; None if unicoll's launcher does not host
    the store."""
    if rendezvous.launched is None or rendezvous.launched.name != "unicoll":
        return None

    def read(rank: int) -> str | None:
        deadline = time.monotonic() + _EXIT_NOTE_S
        while time.monotonic() < deadline:
            try:
                note = rendezvous.root.try_get(rendezvous.exit_keys[rank])
            except DistError:
                return None
            if note is not None:
                with suppress(ValueError):
                    found = parse(note, {"pid": int, "status": int, "cause": str})
                    return _describe_exit(found["status"], found["cause"])
                return None
            time.sleep(0.02)
        return None

    return read


def _describe_exit(status: int, cause: str) -> str:
    if cause:
        return printable_line(cause)
    if status >= 0:
        return f"exit code {status}"
    try:
        return f"killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"killed by signal {-status}"


# --- the end of this process ----------------------------------------------------------------------

_exit_cause: BaseException = SystemExit()
_hook_installed = False
_joined: list[Job] = []
"""The jobs that this process is in."""


@lru_cache(maxsize=1)
def _register_exit_handler() -> None:
    """Once per process, when it has joined a job: at exit it leaves its jobs; a forked child is in
    none of them."""
    _install_excepthook()
    atexit.register(_leave_all)
    fork_safety.in_child(_forget_all)


def _leave_all() -> None:
    try:
        # An exception in one does not keep the others open; the newest is first.
        with ExitStack() as leaving:
            for job in [*_joined]:
                leaving.callback(leave, job, _exit_cause)
    except DistError as error:
        log.error(
            "no call has raised this error, so the program ends with an exit code other than 0: %s",
            error,
        )
        if isinstance(_exit_cause, SystemExit):
            sys.stderr = _FailingAtEnd(sys.stderr)


class _FailingAtEnd:
    """Standard error for a program that has come to its end, but has failed.

    An exception in a function that is called at exit does not change the exit code, and
    ``os._exit`` would leave out what other libraries do at exit. But the interpreter ends with exit
    code 120 if it cannot flush the standard streams (documented with ``sys.exit``).
    """

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def flush(self) -> None:
        self._stream.flush()
        # The functions that are called at exit may write, too, so only a flush after them fails.
        if sys.is_finalizing():
            raise OSError("the program has failed")


def _forget_all() -> None:
    while _joined:
        job = _joined.pop()
        job.forked = True
        if job.leaving is not None:
            job.leaving()
        while job.groups:
            job.groups.pop().forget()


def set_exit_cause(error: BaseException) -> None:
    """Record the exception that ends this program, for the other ranks: an uncaught one, or
    SystemExit with its code.

    ``sys.excepthook`` is not called for a SystemExit, so the launcher's bootstrap, which runs the
    program, records it.
    """
    global _exit_cause
    _exit_cause = error


def _install_excepthook() -> None:
    """Once per process: record the exception that ends the program, and print it without unicoll's
    frames."""
    global _hook_installed
    if not _hook_installed:
        _hook_installed = True
        excepthook.install(set_exit_cause)
