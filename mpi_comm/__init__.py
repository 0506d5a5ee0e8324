"""The MPI backend, ``mpi``: mpi4py's communicators, where an MPI launcher started the processes.

Importing this package imports neither mpi4py nor an MPI library; :mod:`mpi_comm.runtime` does, once MPI is chosen.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from unicoll.backend import Job

    from .backend import MPIBackend
    from .store import MPIStore

__all__ = ["accompany", "backend_class", "identity", "open_store"]


def backend_class() -> type[MPIBackend]:
    """The backend, for the registry."""
    from .backend import MPIBackend

    return MPIBackend


def identity(patience: float) -> tuple[int, int, str, bool, str]:
    """MPI's world as this process sees it; initialises MPI, for which the processes may wait for each other.

    Args:
        patience: seconds after which that has gone wrong; since it cannot be given up, the process then ends.

    Returns:
        rank, number of processes, the library's name and version, whether :func:`open_store` may be used, and
        whether arrays on a GPU are handed to the library, with the reason.

    Raises:
        BackendUnavailableError: MPI cannot be used in this process.
    """
    from .runtime import runtime

    mpi = runtime(patience)
    return mpi.rank, mpi.size, mpi.library, mpi.serves, str(mpi.cuda)


def accompany(job: Job) -> None:
    """Tell MPI's runtime of a job, whichever backends it uses; all its ranks do."""
    from .members import members_of, publish

    publish(job)
    members_of(job)


def open_store(deadline: float) -> MPIStore:
    """A store over MPI that all processes of MPI's world share; all open it, until ``deadline``.

    Raises:
        BackendUnavailableError: MPI cannot be used in this process.
        StoreTimeoutError: not all processes have come by then.
    """
    from .store import MPIStore

    return MPIStore.open(deadline)
