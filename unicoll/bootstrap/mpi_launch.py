"""The start of a job that MPI's launcher has started, or that requests MPI by name."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import lru_cache, partial
from typing import NamedTuple

from unicoll.bootstrap import launchers
from unicoll.bootstrap.launchers import LaunchInfo
from unicoll.errors import BackendUnavailableError, DistArgumentError
from unicoll.group import backend_choice, registry
from unicoll.net.stores import Store
from unicoll.process import logs
from unicoll.process.timeouts import seconds_left

log = logs.logger("mpi")


class MPIJobStart(NamedTuple):
    """The arguments of the rendezvous.

    Attributes:
        rank, world_size: -1 to read them from the launcher.
        launched: the launcher's information from MPI or the environment; None if the rendezvous
            reads it.
        store: opens a store over MPI; None if MPI is not used.
        spare_store: opens one if the rendezvous has no address: MPI's launcher has started the job,
            but MPI was not requested for arrays.
        started: True if MPI is used, even if only for the store.
        reason: why MPI is not used for arrays although its launcher started the job; "" otherwise.
        notes: for explain().
    """

    rank: int
    world_size: int
    launched: LaunchInfo | None = None
    store: Callable[[float], Store] | None = None
    spare_store: Callable[[float], Store] | None = None
    started: bool = False
    reason: str = ""
    notes: tuple[str, ...] = ()


def start(backend: str | None, rank: int, world_size: int, timeout: float) -> MPIJobStart:
    """Start MPI if it is chosen: by name, or because its launcher started the job.

    If the launcher's variables put all ranks on this host, the rendezvous uses MPI, but MPI is not
    the default for arrays: the CPU backend is faster within a host (docs/hpc.md has measurements).
    All ranks make the same choice: if one rank's host has as many ranks as the job, then all ranks
    are on that host and have equal variables.

    As in torch.distributed, MPI determines rank and size: if it is requested by name, ``rank`` and
    ``world_size`` have no effect. If the launcher's variables do not contain the size, it is read
    from MPI.

    Raises:
        BackendUnavailableError: MPI was requested by name, but was not started with the other
            processes.
    """
    by_name = "mpi" in re.split("[:,]", (backend or "").lower())
    detected = detect()
    if detected is None:
        by_mpi = launchers.has_rank_without_size()
    else:
        # With another world size than the launcher's the caller describes other processes than
        # those that MPI's launcher has started. If MPI is requested by name, the arguments have no
        # effect.
        by_mpi = detected.started_by_mpi and (by_name or world_size in (-1, detected.world_size))
    choices = backend_choice.choose(backend, by_mpi)
    if not any(c.name == "mpi" for c in choices):
        if by_mpi and not all(c.explicit for c in choices):
            _warn(detected, registry.reason_against("mpi"))
        # MPI is not started here, because only a rendezvous without an address needs it.
        spare = partial(_spare_store, detected) if by_mpi and detected is not None else None
        return MPIJobStart(rank, world_size, spare_store=spare)
    world = registry.mpi_world(timeout)
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
        return MPIJobStart(rank, world_size, detected, reason=reason)
    notes, reason = [], ""
    if not by_name and launched.single_host:
        ranks = (
            f"all {launched.world_size} ranks are on this host"
            if launched.world_size > 1
            else "there is one rank"
        )
        reason = f"{ranks}, where the CPU backend is faster than MPI; backend='mpi' uses MPI"
    if by_name and launched.started_by_mpi:
        if (rank, world_size) not in ((-1, -1), (launched.rank, launched.world_size)):
            notes.append(
                f"rank={rank}, world_size={world_size} have no effect: MPI determines them"
            )
        rank = world_size = -1
    store = registry.mpi_store if world.stores else None
    return MPIJobStart(rank, world_size, launched, store, None, True, reason, tuple(notes))


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


def detect() -> LaunchInfo | None:
    """The launcher's information; None also if its variables are wrong."""
    try:
        return launchers.detect()
    except DistArgumentError:
        # The rendezvous raises the same error if it needs the launcher; with complete arguments it
        # does not.
        return None


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
