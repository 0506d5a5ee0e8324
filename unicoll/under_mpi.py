"""How a job begins that MPI's launcher has started, or that asks for MPI by name."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

from . import launchers, registry
from .errors import BackendUnavailableError, DistArgumentError
from .launchers import Launched
from .stores import Store

__all__ = ["Beginning", "begin"]

log = logging.getLogger("unicoll")


class Beginning(NamedTuple):
    """What the rendezvous is told.

    Attributes:
        rank, world_size: -1 leaves them to the launcher.
        launched: who started us, as far as MPI or the environment says; None leaves it to the rendezvous to look.
        store: opens a store over MPI; None where MPI is not used.
        started: whether MPI is used, be it only for the store.
        but: why MPI does not serve the arrays, though its launcher started us; "" otherwise.
        notes: for explain().
    """

    rank: int
    world_size: int
    launched: Launched | None = None
    store: Callable[[float], Store] | None = None
    started: bool = False
    but: str = ""
    notes: tuple[str, ...] = ()


def begin(backend: str | None, rank: int, world_size: int, patience: float) -> Beginning:
    """Start MPI if it is chosen: by name, or because its launcher started us.

    Where the launcher says that all ranks are on this host, they meet over MPI, but MPI is not the default for their
    arrays: the CPU backend is faster there (docs/hpc.md has the figures). If one rank is told that its host has as many
    ranks as the job, then all are on that host and are told the same, so all choose alike.

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
    choices = registry.choose(backend, by_mpi)
    if not any(c.name == "mpi" for c in choices):
        if by_mpi and not all(c.asked for c in choices):
            _warn(found, registry.reason_against("mpi"))
        return Beginning(rank, world_size)
    seen = registry.mpi_world(patience)
    launched = found or launchers.counted_by_mpi(seen.rank, seen.size)
    alone = found is None and seen.size == 1 and (world_size > 1 or not by_name)
    if alone or launched.world_size != seen.size:
        but = _why_not(launched, seen, world_size)
        if by_name:
            raise BackendUnavailableError(f"backend 'mpi': {but}, or take backend='gloo'")
        _warn(found, but)
        return Beginning(rank, world_size, found, but=but)
    notes, but = [], ""
    if not by_name and launched.single_host:
        here = f"all {launched.world_size} ranks are on this host" if launched.world_size > 1 else "there is one rank"
        but = f"{here}, where the CPU backend is faster than MPI; backend='mpi' takes MPI"
    if by_name and launched.started_by_mpi:
        if (rank, world_size) not in ((-1, -1), (launched.rank, launched.world_size)):
            notes.append(
                f"rank={rank}, world_size={world_size} mean nothing to MPI, which counts the processes"
            )
        rank = world_size = -1
    store = registry.mpi_store if seen.stores else None
    return Beginning(rank, world_size, launched, store, True, but, tuple(notes))


@lru_cache(maxsize=1)
def _warn(launched: Launched | None, why: str | None) -> None:
    """Once in a process, on rank 0: mpirun started several ranks, but MPI cannot be used. srun is no sign of MPI."""
    if launched is None or launched.rank != 0 or launched.world_size == 1 or launched.name == "slurm":
        return
    log.warning(
        "mpirun (%s) started this job, but MPI cannot be used: %s. Arrays of the host's memory go to backend 'gloo';"
        " backend='gloo' says so without this warning",
        launched.source,
        why,
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
