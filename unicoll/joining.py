"""How a process joins a job, and leaves it: from a meeting to a job with backends and control plane."""

from __future__ import annotations

import atexit
import json
import signal
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from types import TracebackType

from . import excepthook, forks, registry, settings, under_mpi
from .backend import Job
from .errors import DistError
from .group import ProcessGroup
from .meeting import Place
from .observe.control import Control
from .registry import Choice
from .rendezvous import Rendezvous, refuse_protection, rendezvous
from .stores import Store
from .stores.signed import SignedStore

__all__ = ["Membership", "choose", "ended_with", "enter", "join", "meet", "when_leaving"]

_WITNESS_S = 0.3
"""How long the launcher's word on a death is waited for; it looks at its workers ten times a second."""


class Membership:
    """A job that this process has joined, and its groups in it.

    Attributes:
        meeting: where the processes met.
        job: what all groups share.
        choices: the backends that were chosen for it.
        groups: the groups that are in use, in the order in which they were made.
        notes: what was chosen, from which source, why; one line each.
        named: how often a group was made under a name, for numbering.
    """

    def __init__(self, meeting: Rendezvous, job: Job, choices: list[Choice]) -> None:
        self.meeting = meeting
        self.job = job
        self.choices = choices
        self.groups: list[ProcessGroup] = job.groups
        self.notes = [*meeting.notes, *(f"{c.device} arrays: backend {c.name}: {c.why}" for c in choices)]
        self.named: dict[str, int] = {}

    def close(self, error: BaseException | None = None) -> None:
        """Leave: end the groups, say goodbye, give everything back. ``error`` is what ended the program, if it did."""
        with ExitStack() as left:  # whatever fails, the rest is done, and the others hear a goodbye
            left.callback(_take_down, self.meeting, self.job, error)
            for one in self.groups:
                left.callback(one.close)
            groups = [*self.groups]
            self.groups.clear()
            if error is not None and not isinstance(error, SystemExit):
                for one in groups:
                    for backend in one._served.values():  # nobody is to wait for what was posted
                        backend.abort(DistError(f"this process ended with {type(error).__name__}: {error}"))


def join(
    backend: str | None,
    init_method: str | None,
    rank: int,
    world_size: int,
    store: Store | Place | None,
    timeout: float,
    patience: float,
) -> Membership:
    """:func:`meet` the other processes and :func:`enter` their job."""
    _watch_for_the_uncaught()  # here and in meet, so that the refusal of a backend is shown with folded frames, too
    if backend is not None:
        registry.choose(backend)  # refuse it before anybody is kept waiting
    meeting = meet(backend, init_method, rank, world_size, store, patience)
    return enter(meeting, backend, timeout, patience)


def meet(
    backend: str | None,
    init_method: str | None,
    rank: int,
    world_size: int,
    store: Store | Place | None,
    patience: float,
) -> Rendezvous:
    """Meet the other processes.

    Args:
        backend, init_method, rank, world_size: as for init_process_group.
        store: as for init_process_group, or the place where to meet.
        patience: seconds until rank 0 must have come.

    Raises:
        DistArgumentError: arguments or environment do not say who we are, or contradict each other; a variable of
            ours has a value that is not known.
        BackendUnavailableError: MPI was asked for by name, and it does not know the other processes.
        AuthenticationError, DistStoreError, DistNetworkError: as :func:`unicoll.rendezvous.rendezvous`.
    """
    _watch_for_the_uncaught()
    settings.check()
    settings.warn_of_unknown()
    mpi = under_mpi.begin(backend, rank, world_size, patience)
    meeting = rendezvous(
        init_method, mpi.rank, mpi.world_size, store, patience, launched=mpi.launched, mpi_store=mpi.store
    )
    meeting.notes[:0] = mpi.notes
    meeting.mpi_started, meeting.mpi_but = mpi.started, mpi.but
    return meeting


def enter(meeting: Rendezvous, backend: str | None, timeout: float, patience: float) -> Membership:
    """Join the job of a meeting; returns when all have come. On an error all is taken down, the meeting too.

    Args:
        backend: as for init_process_group.
        timeout: default timeout of the world group, seconds.
        patience: seconds until the ranks must have come.

    Raises:
        BackendUnavailableError: the backend cannot be used here, and why.
        DistArgumentError: UNICOLL_CHANNEL asks for protection, and the job has no secret that others lack.
        OperationTimeoutError: not all ranks came in time; names the missing.
    """
    job = Job(
        meeting.rank,
        meeting.world_size,
        SignedStore(meeting.store, meeting.secret.key),
        meeting.secret.key,
        meeting.trusted,
        list(meeting.listen_addresses),
        timeout,
        local_size=meeting.local_world_size,
        post_mortem=_launcher_witness(meeting),
        local_rank=meeting.local_rank,
    )
    try:
        if meeting.world_size > 1 and not meeting.trusted:
            refuse_protection()
        choices = choose(meeting, backend)
        for cls in {c.cls for c in choices}:
            cls.prepare(job)
        if job.size > 1:
            job.control = Control(job.rank, job.size, job.key, job.addresses[0])
            job.control.start(job.store, patience)
        if meeting.mpi_started:
            registry.accompany(job)
    except BaseException as e:
        _take_down(meeting, job, e)
        raise
    return Membership(meeting, job, choices)


def choose(meeting: Rendezvous, backend: str | None) -> list[Choice]:
    """The backends of a group whose ranks have met: :func:`unicoll.registry.choose`."""
    launched = meeting.launched
    return registry.choose(backend, launched is not None and launched.started_by_mpi, meeting.mpi_but)


def _take_down(meeting: Rendezvous, job: Job, error: BaseException | None) -> None:
    with ExitStack() as left:
        left.callback(meeting.close)
        left.callback(job.close)
        if job.control is not None:
            left.callback(job.control.close, error)


# --- how others ended ------------------------------------------------------------------------------------------------


def _launcher_witness(meeting: Rendezvous) -> Callable[[int], str | None] | None:
    """How to learn from our launcher, which hosts the store, how a rank ended."""
    if meeting.launched is None or meeting.launched.name != "unicoll":
        return None

    def ask(rank: int) -> str | None:
        deadline = time.monotonic() + _WITNESS_S
        while time.monotonic() < deadline:
            try:
                note = meeting.root.try_get(f"launcher/exit/{rank}")
            except DistError:
                return None
            if note is not None:
                return _how_it_ended(**json.loads(note))
            time.sleep(0.02)
        return None

    return ask


def _how_it_ended(pid: int, status: int, cause: str) -> str:
    if cause:
        return cause
    if status >= 0:
        return f"exit code {status}"
    try:
        return f"killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"killed by signal {-status}"


# --- how this process ends ------------------------------------------------------------------------------------------

_ended_with: BaseException = SystemExit()
_watching = False
_leaving: list[Callable[[BaseException | None], None]] = []


def when_leaving(leave: Callable[[BaseException | None], None], forget: Callable[[], None]) -> None:
    """Have an interpreter that ends call ``leave`` with the exception that ended it, SystemExit if none did.

    A forked child, which is no member of its parent's groups, calls ``forget`` instead. Each ``leave`` counts once.
    """
    if leave in _leaving:
        return
    _watch_for_the_uncaught()
    _leaving.append(leave)
    atexit.register(lambda: leave(_ended_with))
    forks.in_child(forget)


def ended_with(error: BaseException) -> None:
    """What ends this program, for the others to know: an uncaught exception, or SystemExit with its code.

    Python tells nobody of a SystemExit, so only our launcher's bootstrap, which runs the program, can do it.
    """
    global _ended_with
    _ended_with = error


def _watch_for_the_uncaught() -> None:
    """Once: note the exception that ends the program, and fold our frames where Python itself prints it."""
    global _watching
    if _watching:
        return
    _watching = True
    before = sys.excepthook if sys.excepthook is not sys.__excepthook__ else excepthook.show

    def hook(kind: type[BaseException], value: BaseException, trace: TracebackType | None) -> None:
        ended_with(value)
        before(kind, value, trace)

    sys.excepthook = hook
