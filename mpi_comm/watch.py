"""A look, four times a second, at the collectives that are inside MPI: MPI itself would wait for ever.

All ranks have agreed before a call goes into MPI (:mod:`mpi_comm.team`), so it can only get stuck there when a rank
dies or stops in the midst of it. What happens then depends on who waits. An operation in the background is ended with
the error, though MPI keeps its arrays. A thread that is itself inside MPI cannot be brought back: the job is ended,
with the reason on the standard error.
"""

from __future__ import annotations

import threading
import time
import weakref
from typing import TYPE_CHECKING

from unicoll.errors import DistError, OperationTimeoutError
from unicoll.observe import inquest

if TYPE_CHECKING:
    from .backend import MPIBackend
    from .team import Team

__all__ = ["over"]

_LOOK_S = 0.25
_GRACE_S = 1.0
"""How long an operation may take to end by itself once a member is gone; mpirun, too, takes its time."""

_groups: weakref.WeakSet[MPIBackend] = weakref.WeakSet()
_thread: threading.Thread | None = None
_lock = threading.Lock()


def over(backend: MPIBackend) -> None:
    """Watch a group's collectives from now on."""
    global _thread
    with _lock:
        _groups.add(backend)
        if _thread is None or not _thread.is_alive():
            _thread = threading.Thread(target=_look, name="unicoll-mpi-watch", daemon=True)
            _thread.start()


def _look() -> None:
    global _thread
    while True:
        time.sleep(_LOOK_S)
        with _lock:
            groups = [g for g in _groups if not g.closed]
            if not groups:
                _thread = None
                return
        for group in groups:
            team = group.team
            if team is not None and team.inside and time.monotonic() - team.inside > _GRACE_S:
                _judge(group, team)


def _judge(group: MPIBackend, team: Team) -> None:
    """Something is inside MPI for long: may it go on?"""
    since, call = team.inside, team.call
    if call is None or not since or team.given_up == call.seq:
        return
    peer = team.gone()
    error: DistError | None = team.error
    if error is None and peer is not None:
        error = team.lost(peer)
    if error is None and time.monotonic() - since > call.timeout:
        error = inquest.timed_out(team.context, call)
    if error is None or team.inside != since:  # it has just come to its end
        return
    team.given_up = call.seq
    if team.in_background:
        _give_up(group, team, error)
    else:
        team.mpi.abort(error)


def _give_up(group: MPIBackend, team: Team, error: DistError) -> None:
    """End the operation for whoever waits for it."""
    if isinstance(error, OperationTimeoutError):
        error = OperationTimeoutError(
            f"{error}; MPI cannot be called off: it keeps the arrays and a thread until the operation ends, if it does",
            group=error.group,
            op=error.op,
            seq=error.seq,
        )
    try:
        team.fail(error)
    except DistError as agreed:
        group.lane.abandon(agreed)
