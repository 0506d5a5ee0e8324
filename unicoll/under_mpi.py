"""How a job begins that MPI's launcher has started, or that asks for MPI by name."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NamedTuple

from . import launchers, registry
from .errors import BackendUnavailableError, DistArgumentError
from .launchers import Launched
from .stores import Store

__all__ = ["Beginning", "begin"]


class Beginning(NamedTuple):
    """What the rendezvous is told.

    Attributes:
        rank, world_size: -1 leaves them to the launcher.
        launched: who started us, as far as MPI or the environment says; None leaves it to the rendezvous to look.
        store: opens a store over MPI; None where MPI is not chosen.
        but: why MPI is of no use here, though its launcher started us; "" otherwise.
        notes: for explain().
    """

    rank: int
    world_size: int
    launched: Launched | None = None
    store: Callable[[float], Store] | None = None
    but: str = ""
    notes: tuple[str, ...] = ()


def begin(backend: str | None, rank: int, world_size: int, patience: float) -> Beginning:
    """Start MPI if it is chosen: by name, or because its launcher started us.

    As with torch.distributed, MPI counts the processes itself: where it is asked for by name, ``rank`` and
    ``world_size`` mean nothing. A launcher whose variables tell no size is one that MPI itself must be asked about.

    Args:
        backend, rank, world_size: as init_process_group got them.
        patience: seconds that starting MPI may take.

    Raises:
        BackendUnavailableError: MPI was asked for by name, and it does not know the other processes.
    """
    by_name = "mpi" in re.split("[:,]", (backend or "").lower())
    found = _launcher()
    if found is None:
        by_mpi = launchers.mpi_alone_knows()
    else:
        by_mpi = found.started_by_mpi and (by_name or world_size in (-1, found.world_size))
    if not any(c.name == "mpi" for c in registry.choose(backend, by_mpi)):
        return Beginning(rank, world_size)
    seen = registry.mpi_world(patience)
    launched = found or launchers.counted_by_mpi(seen.rank, seen.size)
    alone = found is None and seen.size == 1 and (world_size > 1 or not by_name)
    if alone or launched.world_size != seen.size:
        but = _why_not(launched, seen, world_size)
        if by_name:
            raise BackendUnavailableError(f"backend 'mpi': {but}, or take backend='gloo'")
        return Beginning(rank, world_size, found, but=but)
    notes = []
    if by_name and launched.started_by_mpi:
        if (rank, world_size) not in ((-1, -1), (launched.rank, launched.world_size)):
            notes.append(
                f"rank={rank}, world_size={world_size} mean nothing to MPI, which counts the processes"
            )
        rank = world_size = -1
    return Beginning(
        rank, world_size, launched, registry.mpi_store if seen.stores else None, notes=tuple(notes)
    )


def _launcher() -> Launched | None:
    try:
        return launchers.detect()
    except DistArgumentError:  # the rendezvous says so, if it needs to know
        return None


def _why_not(launched: Launched, seen: registry.MPIWorld, world_size: int) -> str:
    """Why MPI is of no use to processes that something else started."""
    here = f"rank {seen.rank} of {seen.size} for {seen.library}"
    if launched.name == "mpi":
        return f"this is {here}, which no mpirun has started: use `mpirun -n {max(world_size, 2)} python script.py`"
    there = f"this is rank {launched.rank} of {launched.world_size} for {launched.name} ({launched.source}), but {here}"
    if launched.name == "slurm":
        return f"{there}: start with srun --mpi=pmix or --mpi=pmi2, as the library was built for, or with its mpirun"
    return (
        f"{there}: start with that library's `mpirun -n {launched.world_size} python script.py`, or with srun"
    )
