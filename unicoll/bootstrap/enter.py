"""The third step of joining a job: the control plane, and the default group. And all three steps,
:func:`join`."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from contextlib import suppress

from unicoll.backend.contract import Context, Job
from unicoll.bootstrap import process_end
from unicoll.bootstrap.rendezvous import Rendezvous, meet, refuse_protection
from unicoll.bootstrap.rendezvous_protocol import MIN_SECONDS
from unicoll.bootstrap.resolve import JoinRequest, resolve
from unicoll.bootstrap.termination import raise_before_sigterm
from unicoll.diagnosis.flight_dump import FlightDumper
from unicoll.diagnosis.wait_monitor import monitor_of
from unicoll.errors import DistError
from unicoll.group import registry
from unicoll.group.arguments import DEFAULT_NAME
from unicoll.group.process_group import ProcessGroup
from unicoll.net.control.client import ControlClient, ControlSettings, StaleRendezvousError
from unicoll.net.control.departures import publish_refusal
from unicoll.net.objects.received_json import parse
from unicoll.net.stores import Store
from unicoll.net.stores.signed import SignedStore
from unicoll.process import logs
from unicoll.process.formatting import backend_text, printable_line
from unicoll.process.timeouts import seconds_left

log = logs.logger("job")

_EXIT_NOTE_S = 0.3
"""Seconds to wait for the launcher's note on how a rank ended; it polls its workers ten times a
second."""


def join(request: JoinRequest) -> Job:
    """Join a job: :func:`~unicoll.bootstrap.resolve.resolve`,
    :func:`~unicoll.bootstrap.rendezvous.meet` and :func:`enter`, with all their errors.

    All three again if the rendezvous was that of an earlier job.
    """
    started = time.monotonic()
    deadline = started + request.join_timeout
    while True:
        met = meet(resolve(request), request, deadline)
        try:
            job = enter(met, request, deadline)
        except StaleRendezvousError as error:
            log.info("the store has the record of an earlier job: %s; reading it again", error)
            continue
        log.info(
            "joined as rank %d of %d in %.3f s", job.rank, job.size, time.monotonic() - started
        )
        return job


def enter(met: Rendezvous, request: JoinRequest, deadline: float) -> Job:
    """Join the job of a rendezvous; returns when all ranks have joined. On an error ``met`` is
    closed too.

    At the end of the interpreter the process leaves the job, with the exception that has ended the
    program.

    Args:
        deadline: until which all ranks have to join (``time.monotonic()``).

    Raises:
        BackendUnavailableError: the backend cannot be used on this machine; the message has the
            reason.
        DistArgumentError: UNICOLL_CHANNEL requires protection, but other processes may have the
            job's key.
        OperationTimeoutError: not all ranks joined in time; the message has the missing ones.
        StaleRendezvousError: this is an earlier rendezvous, whose rank 0 has ended.
    """
    found, launched = met.found, met.found.launched
    if not request.name:
        logs.set_rank(met.rank)
    job = Job(
        met.rank,
        met.world_size,
        SignedStore(met.store, met.secret.key),
        met.secret.key,
        list(met.listen_addresses),
        request.timeout,
        local_size=launched.local_world_size if launched else None,
        exit_cause=_exit_note_reader(met),
        local_rank=launched.local_rank if launched else None,
        fake=found.fake,
        rendezvous=met,
        name=request.name,
    )
    job.cleanup.callback(log.info, "left the job")
    job.cleanup.callback(met.close)
    job.cleanup.callback(_remove_keys, job)
    job.cleanup.callback(job.close_shared)
    try:
        if job.size > 1 and not met.trusted:
            refuse_protection(found.channel)
        job.allows_pickle = met.trusted and found.allows_pickle
        # torch's groups may be of another backend than the one with which the processes have met.
        same = request.wanted == found.backend
        job.choices = found.choices if same else found.choose(request.wanted)
        for cls in {c.cls for c in job.choices}:
            cls.prepare(job)
        if job.size > 1 and not job.fake:
            _start_control(job, deadline)
        if found.mpi_started:
            registry.register_job_with_mpi(job)
        _describe(job)
        job.cleanup.callback(FlightDumper(job).close)
        process_end.add(job)
        if launched is not None and launched.name == "torchrun":
            raise_before_sigterm(job)
        if request.makes_group:
            _make_group(job, request)
    except BaseException as e:
        if job.control is None and job.rank != 0:
            with suppress(DistError):
                publish_refusal(job.store, job.rank, e)
        job.leave(e)
        # The traceback of the exception has frames that refer to the job, which would be a cycle.
        job.error = None
        raise
    return job


def _start_control(job: Job, deadline: float) -> None:
    met: Rendezvous = job.rendezvous
    settings = ControlSettings(met.found.location.ends_with_rank_0, job.allows_pickle, job.name)
    control = ControlClient(job.rank, job.size, job.key, job.addresses[0], settings)
    job.control = control
    job.cleanup.callback(lambda: control.close(job.error))
    control.start(job.store, seconds_left(deadline, MIN_SECONDS), met.address, met.replaced)
    job.allows_pickle = all(peer.allows_pickle for peer in control.peers)
    monitor_of(job)


def _describe(job: Job) -> None:
    """Log what was chosen, and keep it for explain()."""
    chosen = [f"{c.device} arrays: backend {backend_text(c.name)}: {c.why}" for c in job.choices]
    job.notes = [*job.rendezvous.notes, *chosen]
    for note in job.notes:
        log.info("%s", note)


def _make_group(job: Job, request: JoinRequest) -> None:
    """Make the group of all ranks of a job."""
    name, desc = job.name or DEFAULT_NAME, job.name or "default_pg"
    options, device = request.pg_options, request.device_id
    ranks = tuple(range(job.size))
    context = Context(job, name, ranks, job.timeout, options, device, desc=desc)
    job.default = ProcessGroup.create(context, job.choices)
    # Rank 0 returns only when the others have made their groups, too: for that they need its
    # threads, and its program may next make a call that keeps the GIL until all ranks make it, such
    # as MPI_Init.
    if job.control is not None:
        job.control.initialized(request.join_timeout)


def _remove_keys(job: Job) -> None:
    """On the last rank that leaves a job with a name, remove its keys if the store outlives it.

    The ranks' claims stay until the next rendezvous of that name, so that no process of a later job
    takes part in this one.
    """
    rendezvous = job.rendezvous
    if job.name and job.error is None and not rendezvous.found.location.ends_with_rank_0:
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
    launched, keys = rendezvous.found.launched, rendezvous.found.exit_keys
    if launched is None or launched.name != "unicoll":
        return None

    def read(rank: int) -> str | None:
        deadline = time.monotonic() + _EXIT_NOTE_S
        while time.monotonic() < deadline:
            try:
                note = rendezvous.root.try_get(keys[rank])
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
