"""The start of a job that MPI's launcher has started, or that requests MPI by name."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import TYPE_CHECKING, NamedTuple

from unicoll.bootstrap import launchers
from unicoll.bootstrap.launcher_table import Environ
from unicoll.bootstrap.launchers import LaunchInfo
from unicoll.errors import BackendUnavailableError, DistArgumentError
from unicoll.group import registry
from unicoll.group.backend_choice import BackendChoice
from unicoll.net.stores import Store
from unicoll.process import logs
from unicoll.process.timeouts import seconds_left

if TYPE_CHECKING:
    from unicoll.bootstrap.resolve import JoinRequest

log = logs.logger("mpi")


class MPIStart(NamedTuple):
    """How MPI takes part in a job.

    Attributes:
        decides: True if rank and world size are MPI's, whatever was asked.
        launched: the launcher's information, from MPI or the environment, if MPI has been asked.
        store: opens a store over MPI; None if MPI is not used.
        spare_store: opens one if the rendezvous has no address: MPI's launcher has started the job,
            but MPI was not requested for arrays.
        started: True if MPI is used, even if only for the store.
        reason: why MPI is not used for arrays although its launcher started the job; "" otherwise.
        notes: for explain().
    """

    decides: bool = False
    launched: LaunchInfo | None = None
    store: Callable[[float], Store] | None = None
    spare_store: Callable[[float], Store] | None = None
    started: bool = False
    reason: str = ""
    notes: tuple[str, ...] = ()


def is_default(request: JoinRequest, detected: LaunchInfo | None, environ: Environ) -> bool:
    """True if MPI's launcher has started the processes of this join, so that MPI is the default for
    arrays in host memory."""
    if detected is None:
        return launchers.has_rank_without_size(environ)
    # With another world size than the launcher's the caller describes other processes than those
    # that MPI's launcher has started. If MPI is requested by name, the arguments have no effect.
    return detected.started_by_mpi and (
        _is_named(request) or request.world_size in (-1, detected.world_size)
    )


def _is_named(request: JoinRequest) -> bool:
    backend = request.wanted
    return isinstance(backend, str) and "mpi" in re.split("[:,]", backend.lower())


def start(
    request: JoinRequest,
    detected: LaunchInfo | None,
    choices: Sequence[BackendChoice],
    by_mpi: bool,
) -> MPIStart:
    """Start MPI if it is among the backends: by name, or because its launcher started the job.

    If the launcher's variables put all ranks on this host, the rendezvous uses MPI, but MPI is not
    the default for arrays: the CPU backend is faster within a host (docs/hpc.md has measurements).
    All ranks make the same choice: if one rank's host has as many ranks as the job, then all ranks
    are on that host and have equal variables.

    As in torch.distributed, MPI determines rank and size: if it is requested by name, those of
    ``request`` have no effect. If the launcher's variables do not contain the size, it is read from
    MPI.

    Args:
        detected: the launcher's information; None if none is complete.
        choices: the backends, if MPI can be used.
        by_mpi: the result of :func:`is_default`.

    Raises:
        BackendUnavailableError: MPI was requested by name, but was not started with the other
            processes.
    """
    rank, world_size = request.rank, request.world_size
    if not any(c.name == "mpi" for c in choices):
        if by_mpi and not all(c.explicit for c in choices):
            _warn(detected, registry.reason_against("mpi"))
        # MPI is not started here, because only a rendezvous without an address needs it.
        spare = partial(_spare_store, detected) if by_mpi and detected is not None else None
        return MPIStart(spare_store=spare)
    by_name = _is_named(request)
    world = registry.mpi_world(request.join_timeout)
    launched = detected or launchers.from_mpi_world(world.rank, world.size)
    # A world of one process without a launcher shows that no mpirun has started this process. For a
    # job of one rank that requests MPI by name this is right. A library that does not know the
    # launcher's protocol makes each process a world of one, which the second condition finds.
    alone = detected is None and world.size == 1 and (world_size > 1 or not by_name)
    if alone or launched.world_size != world.size:
        reason = _reason_against(launched, world, world_size)
        if by_name:
            raise BackendUnavailableError(f"backend 'mpi': {reason}, or use backend='gloo'")
        _warn(detected, reason)
        return MPIStart(launched=detected, reason=reason)
    notes, reason = [], ""
    if not by_name and launched.single_host:
        ranks = (
            f"all {launched.world_size} ranks are on this host"
            if launched.world_size > 1
            else "there is one rank"
        )
        reason = f"{ranks}, where the CPU backend is faster than MPI; backend='mpi' uses MPI"
    decides = by_name and launched.started_by_mpi
    if decides and (rank, world_size) not in ((-1, -1), (launched.rank, launched.world_size)):
        notes.append(f"rank={rank}, world_size={world_size} have no effect: MPI determines them")
    store = registry.mpi_store if world.stores else None
    return MPIStart(decides, launched, store, None, True, reason, tuple(notes))


def _spare_store(launched: LaunchInfo, deadline: float) -> Store:
    """A store over MPI for a job that uses another backend.

    Raises:
        DistArgumentError: MPI cannot be used; the message says how to give an address.
    """
    reason = registry.reason_against("mpi")
    if reason is None:
        world = registry.mpi_world(seconds_left(deadline))
        if (world.rank, world.size) == (launched.rank, launched.world_size) and world.stores:
            return registry.mpi_store(deadline)
        reason = _reason_against(launched, world, launched.world_size)
    raise DistArgumentError(
        f"no address for the rendezvous: {launched.master_hint}; without one MPI is used, but"
        f" {reason}"
    )


@lru_cache(maxsize=1)
def _warn(launched: LaunchInfo | None, reason: str | None) -> None:
    """Once per process, on rank 0: mpirun started several ranks, but MPI cannot be used. Not for
    srun, which also starts jobs without MPI."""
    if (
        launched is None
        or launched.rank != 0
        or launched.world_size == 1
        or launched.name == "slurm"
    ):
        return
    log.warning(
        "mpirun (%s) started this job, but MPI cannot be used: %s. Arrays in host memory use"
        " backend 'gloo'; backend='gloo' avoids this warning",
        launched.source,
        reason,
    )


def _reason_against(launched: LaunchInfo, world: registry.MPIWorld, world_size: int) -> str:
    """Why MPI cannot be used by processes that another launcher has started."""
    in_mpi = f"rank {world.rank} of {world.size} for {world.library}"
    if launched.name == "mpi":
        return (
            f"this is {in_mpi}, which no mpirun has started: use `mpirun -n {max(world_size, 2)}"
            " python script.py`"
        )
    launcher = f"{launched.name} ({launched.source})"
    ranks = f"this is rank {launched.rank} of {launched.world_size} for {launcher}, but {in_mpi}"
    if launched.name == "slurm":
        return (
            f"{ranks}: start with srun --mpi=pmix or --mpi=pmi2, as the library was built for, or"
            " with its mpirun"
        )
    return (
        f"{ranks}: start with that library's `mpirun -n {launched.world_size} python script.py`, or"
        " with srun"
    )
