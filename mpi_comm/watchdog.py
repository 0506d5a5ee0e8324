"""The watchdog of collectives that block inside MPI, which has no timeouts; it checks them four
times a second.

All ranks have agreed before a collective is entered in MPI (:mod:`mpi_comm.call_agreement`), so it
blocks for ever only if a rank dies or stops during it. An asynchronous operation then ends with the
error, while MPI keeps its arrays. A blocking call cannot be interrupted inside MPI: the job is
aborted, with the reason on standard error.
"""

from __future__ import annotations

import threading
import time
import weakref
from typing import TYPE_CHECKING

from unicoll.backend import operation_errors
from unicoll.errors import DistError, OperationTimeoutError
from unicoll.process import logs

if TYPE_CHECKING:
    from mpi_comm.backend import MPIBackend
    from mpi_comm.group_communicator import GroupCommunicator

log = logs.logger("mpi")

_INTERVAL_S = 0.25
_GRACE_S = 1.0
"""How long an operation may be inside MPI before it is checked; mpirun also needs time to end a
job."""

_backends: weakref.WeakSet[MPIBackend] = weakref.WeakSet()
_thread: threading.Thread | None = None
_lock = threading.Lock()


def watch(backend: MPIBackend) -> None:
    """Add a group's backend to those that the watchdog checks."""
    global _thread
    with _lock:
        _backends.add(backend)
        # A thread that has failed is still in the variable.
        if _thread is None or not _thread.is_alive():
            _thread = threading.Thread(target=_run, name="unicoll-mpi-watchdog", daemon=True)
            _thread.start()


def _run() -> None:
    try:
        _serve()
    except BaseException as e:
        log.exception("the watchdog of MPI's collectives failed")
        # Without the watchdog a collective that blocks in MPI might never end.
        for backend in list(_backends):
            backend.thread_failed(e)


def _serve() -> None:
    global _thread
    while True:
        time.sleep(_INTERVAL_S)
        with _lock:
            # With the lock held: a backend that watch() adds is either seen here, or finds no
            # thread and starts one.
            backends = [b for b in _backends if not b.closed]
            if not backends:
                _thread = None
                return
        for backend in backends:
            _check_backend(backend)
        _flush_sends(backends)


def _flush_sends(backends: list[MPIBackend]) -> None:
    """Call MPI if no operation is in it.

    The rest of a message can wait for the sender's next call of MPI though MPI has reported that it
    is sent (seen over TCP on busy hosts with Intel MPI 2021.18 and Open MPI 5.0.11).
    """
    mpi = backends[0].mpi
    communicators = [b.communicator for b in backends if b.communicator is not None]
    if mpi.any_thread_calls and not any(c.in_mpi_since for c in communicators):
        try:
            mpi.make_progress()
        except mpi.MPI.Exception as e:
            # An operation that fails for the same reason reports the error.
            log.debug("a call of MPI between operations failed: %s", e)


def _check_backend(backend: MPIBackend) -> None:
    communicator = backend.communicator
    if (
        communicator is not None
        and communicator.in_mpi_since
        and time.monotonic() - communicator.in_mpi_since > _GRACE_S
    ):
        try:
            _check(backend, communicator)
        except Exception as e:
            # The thread goes on, so that the other groups are still checked.
            log.exception("the watchdog of group %r failed", backend.context.name)
            backend.thread_failed(e)


def _check(backend: MPIBackend, communicator: GroupCommunicator) -> None:
    """End an operation that has been inside MPI for long, if its group failed, a member departed or
    it timed out."""
    # Read once: the thread of the operation resets these when it ends.
    since, call = communicator.in_mpi_since, communicator.state.call
    if call is None or not since or communicator.abandoned_seq == call.seq:
        # Nothing is in MPI any more, or the call has been given up before and is still in it.
        return
    peer = communicator.departed_member()
    error: DistError | None = communicator.state.error
    if error is None and peer is not None:
        error = communicator.lost_error(peer)
    if error is None and time.monotonic() - since > call.timeout:
        error = operation_errors.timeout_error(communicator.context, call)
    # The call may have ended while the error was made, which asks the other ranks for reports.
    if error is None or communicator.in_mpi_since != since:
        return
    # Set before the call is ended: the program may then close the group, which does not wait for a
    # call that it knows to be stuck.
    communicator.abandoned_seq = call.seq
    if communicator.in_background:
        _give_up(backend, communicator, error)
    else:
        communicator.mpi.abort(error)


def _give_up(backend: MPIBackend, communicator: GroupCommunicator, error: DistError) -> None:
    """End an asynchronous operation with an error."""
    if isinstance(error, OperationTimeoutError):
        error = OperationTimeoutError(
            f"{error}; MPI operations cannot be cancelled: MPI keeps the arrays and a thread until"
            " the operation ends, if it does",
            group=error.group,
            op=error.op,
            seq=error.seq,
        )
    try:
        communicator.state.fail(error)
    except DistError as agreed:
        backend.queue.abandon(agreed)
