"""The MPI backend, ``mpi``: mpi4py's communicators, where an MPI launcher started the processes.

Importing this package imports neither mpi4py nor an MPI library;
:mod:`mpi_comm.runtime.init_finalize` does, once MPI is chosen. Start with ``backend.py``; the ranks
compare their calls in ``call_agreement.py`` before MPI's collective, which cannot be cancelled.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mpi_comm.backend import MPIBackend
    from mpi_comm.store import MPIStore
    from unicoll.backend import Job

__all__ = ["backend_class", "describe_mpi_world", "open_store", "register_job"]


def backend_class() -> type[MPIBackend]:
    """The backend's class, for the registry."""
    from mpi_comm.backend import MPIBackend

    return MPIBackend


def describe_mpi_world(timeout: float) -> tuple[int, int, str, bool, str]:
    """Initialise MPI and describe MPI_COMM_WORLD; the processes may wait for each other in the
    initialisation.

    Args:
        timeout: seconds that the initialisation may take; it cannot be cancelled, so the process
            then exits.

    Returns:
        rank, number of processes, the library's name and version, whether :func:`open_store` may be
        used, and how CUDA arrays are passed to the library, with the reason.

    Raises:
        BackendUnavailableError: MPI cannot be used in this process.
    """
    from mpi_comm.runtime.init_finalize import runtime

    mpi = runtime(timeout)
    return mpi.rank, mpi.size, mpi.library, mpi.usable_concurrently, str(mpi.cuda)


def register_job(job: Job) -> None:
    """Register a job with MPI's runtime, whichever backends it uses; called on all its ranks."""
    from mpi_comm.runtime.communicators import publish, world_ranks_of

    publish(job)
    world_ranks_of(job)


def open_store(deadline: float) -> MPIStore:
    """A store over MPI, shared by all processes of MPI_COMM_WORLD, which all open it by
    ``deadline``.

    Raises:
        BackendUnavailableError: MPI cannot be used in this process.
        StoreTimeoutError: not all processes have opened it by then.
    """
    from mpi_comm.store import MPIStore

    return MPIStore.open(deadline)
