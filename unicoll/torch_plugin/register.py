"""Registering with torch.distributed, and making groups when it asks for one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from unicoll import registry
from unicoll.errors import DistArgumentError, NotInitializedError

from . import compat, functional, starting
from .group import Group
from .members import members_of
from .names import BACKENDS, MPI, spec_of

__all__ = ["enable_mpi", "explain", "register"]


def register() -> None:
    """Register the backends with torch.distributed; called when the package is imported. Again, it does nothing."""
    for name, devices in BACKENDS.items():
        if name.upper() not in c10d.Backend._plugins:
            dist.Backend.register_backend(name, _maker(name), extended_api=True, devices=list(devices))
    compat.dispatch_monitored_barrier(Group)
    compat.dispatch_batches(Group)
    compat.dispatch_splits(Group)
    compat.dispatch_ends(Group)
    compat.leave_out_of_flight_recorder(Group)
    functional.register()
    starting.register(lambda: c10d.ProcessGroupMPI is _MPI if hasattr(c10d, "ProcessGroupMPI") else False)


def enable_mpi() -> None:
    """Make ``init_process_group("mpi")`` and ``"cpu:mpi"`` work where torch was built without MPI.

    torch looks at that name before it looks at registered backends, so it is told that it has MPI, and its class for it
    is ours. Where torch was built with MPI nothing is changed.

    Raises:
        BackendUnavailableError: there is no MPI that can be used; says why.
    """
    if c10d.is_mpi_available() and getattr(c10d, "ProcessGroupMPI", _MPI) is not _MPI:
        return
    registry.choose("mpi")
    c10d.ProcessGroupMPI = dist.ProcessGroupMPI = _MPI
    c10d._MPI_AVAILABLE = True
    c10d.is_mpi_available = dist.is_mpi_available = lambda: True


class _MPI:
    """Stands where torch's own process group over MPI would."""

    @staticmethod
    def create(ranks: list[int]) -> Group:
        """The group of these ranks, all of them if the list is empty."""
        return _make(MPI, None, -1, -1, list(ranks), None, None)


def _maker(name: str) -> Callable[[Any, Any], Group]:
    def make(opts: Any, pg_options: Any) -> Group:
        ranks = list(opts.global_ranks_in_group)
        return _make(name, opts.store, opts.group_rank, opts.group_size, ranks, opts, pg_options)

    return make


def _make(name: str, store: Any, rank: int, size: int, ranks: list[int], opts: Any, pg_options: Any) -> Group:
    asked = compat.asked()
    timeout = opts.timeout if opts is not None else asked.timeout
    group_name = opts.group_id if opts is not None else asked.name or f"mpi:{ranks}"
    spec = spec_of(asked.backend or name)
    world = c10d.GroupMember.WORLD
    if ranks and isinstance(world, Group):
        members, members_ranks = world.members, ranks
        choices = world.choices_for(spec)
        for cls in {c.cls for c in choices if c not in world.unicoll.choices}:
            cls.prepare(members.membership.job)
    else:
        if ranks and opts is None:
            raise DistArgumentError("new_group: a group over MPI in a job of another backend cannot be made")
        store = asked.store if store is None else store
        members = members_of(spec, store, rank, size, timeout)
        members_ranks, choices = list(members.everybody), members.membership.choices
    desc = asked.desc or "undefined"
    splits = asked.together and ranks and isinstance(world, Group) and world.bound_device_id is not None
    parent = world.unicoll if splits else None
    ours = members.make(group_name, members_ranks, choices, timeout, desc, pg_options, asked.device, parent)
    group = Group(members, ours, asked.backend or name, group_name, desc, store)
    group.asked_for = spec
    return group


def explain(group: Any = None) -> str:
    """What was chosen for a group of ours (the default one), and why: rank, store, secret, backends; one line each.

    Raises:
        NotInitializedError: there is no default group.
        DistArgumentError: the group is not one of unicoll's.
    """
    pg = c10d.GroupMember.WORLD if group is None else group
    if pg is None:
        raise NotInitializedError("explain: there is no default process group: call init_process_group first")
    if not isinstance(pg, Group):
        raise DistArgumentError(f"explain: {pg!r} is not a group of unicoll's")
    ours = pg.unicoll
    return "\n".join(
        [*pg.members.membership.notes, f"group {ours.name!r} of {ours.size()}: {ours.describe()}"]
    )
