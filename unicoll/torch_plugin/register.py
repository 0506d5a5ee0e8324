"""Registration with torch.distributed, and creation of its groups."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from unicoll.api import init
from unicoll.api.world import is_initialized
from unicoll.errors import DistArgumentError, DistError, NotInitializedError
from unicoll.group import backend_choice
from unicoll.group.arguments import DEFAULT_NAME
from unicoll.group.process_group import ProcessGroup
from unicoll.process.formatting import ranks_text
from unicoll.torch_autoload import BACKENDS
from unicoll.torch_plugin import compat, functional, rendezvous, replaced_backends
from unicoll.torch_plugin.backend_names import MPI, spec_of
from unicoll.torch_plugin.error_messages import adapt_for_torch
from unicoll.torch_plugin.group import CoalescedWork, Members, TorchProcessGroup
from unicoll.torch_plugin.reconfigurable_group import ReconfigurableGroup
from unicoll.torch_plugin.torch_job import join_torch_job, warn_without_calls
from unicoll.torch_plugin.work import CompletedWork, TorchWork
from unicoll.torch_plugin.wrapped_group import WrappedProcessGroup

_LONGEST_NAME = 60


def register() -> None:
    """Register the backends with torch.distributed. Importing the package calls it; repeated calls
    do nothing."""
    plugins = c10d.Backend._plugins
    for name, devices in BACKENDS.items():
        known = plugins.get(name.upper())
        if known is None:
            dist.Backend.register_backend(
                name, _factory(name), extended_api=True, devices=list(devices)
            )
        else:
            # It is torch_autoload's, of which errors would have a frame.
            plugins[name.upper()] = known._replace(creator_fn=_factory(name))
    compat.dispatch(TorchProcessGroup)
    for cls in (
        TorchProcessGroup,
        ReconfigurableGroup,
        WrappedProcessGroup,
        TorchWork,
        CoalescedWork,
        CompletedWork,
    ):
        compat.inline_no_methods(cls)
    functional.register()
    replaced_backends.install()
    rendezvous.register(
        lambda: c10d.ProcessGroupMPI is _MPI if hasattr(c10d, "ProcessGroupMPI") else False
    )


def enable_mpi() -> None:
    """Make ``init_process_group("mpi")`` and ``"cpu:mpi"`` work where torch was built without MPI.

    torch checks that name before the registered backends, so this replaces torch's availability
    flag and its class for MPI. If torch was built with MPI, nothing is changed.

    Raises:
        BackendUnavailableError: MPI cannot be used; the message has the reason.
    """
    if c10d.is_mpi_available() and getattr(c10d, "ProcessGroupMPI", _MPI) is not _MPI:
        return
    backend_choice.choose("mpi")
    c10d.ProcessGroupMPI = dist.ProcessGroupMPI = _MPI
    c10d._MPI_AVAILABLE = True
    c10d.is_mpi_available = dist.is_mpi_available = lambda: True


class _MPI:
    """Replaces torch's own process group over MPI."""

    @staticmethod
    def create(ranks: list[int]) -> TorchProcessGroup:
        """A group of these ranks; of all ranks if the list is empty."""
        return _make(MPI, None, -1, -1, list(ranks), None, None)


def _factory(name: str) -> Callable[[Any, Any], TorchProcessGroup]:
    def make(opts: Any, pg_options: Any) -> TorchProcessGroup:
        ranks = list(opts.global_ranks_in_group)
        try:
            return _make(
                name, opts.store, opts.group_rank, opts.group_size, ranks, opts, pg_options
            )
        except DistError as error:
            adapt_for_torch(error)
            raise error

    return make


def _make(
    name: str, store: Any, rank: int, size: int, ranks: list[int], opts: Any, pg_options: Any
) -> TorchProcessGroup:
    requested = compat.requested_group()
    if isinstance(pg_options, ProcessGroup):
        return WrappedProcessGroup(pg_options, requested)
    timeout = opts.timeout if opts is not None else requested.timeout
    torch_name = opts.group_id if opts is not None else requested.name or f"mpi:{ranks}"
    spec = spec_of(requested.backend or name)
    if getattr(opts, "enable_reconfigure", False):
        return ReconfigurableGroup(
            requested, name, torch_name, spec, store, rank, size, timeout, pg_options
        )
    world = c10d.GroupMember.WORLD
    # A default group of unicoll's functions counts, too.
    is_default = world is None and not is_initialized()
    if ranks and isinstance(world, TorchProcessGroup):
        job, job_ranks = world.job, ranks
        # Before anything that may raise on one rank alone: the members count groups of this name.
        group_name = job.unique_name(_members_name(ranks))
        choices = world.choices_for(spec)
        for cls in {c.cls for c in choices if c not in world.unicoll.choices}:
            cls.prepare(job.joined)
    else:
        if ranks and opts is None:
            raise DistArgumentError(
                "new_group: backend 'mpi' needs a default process group of unicoll"
            )
        store = requested.store if store is None else store
        job = join_torch_job(spec, store, rank, size, timeout)
        job_ranks, choices = list(job.ranks), job.joined.choices
        group_name = job.unique_name(
            DEFAULT_NAME if is_default else _members_name(ranks or job_ranks)
        )
    desc = requested.desc or "undefined"
    # Processes outside the new group then take part in the split by skip_split(), which torch calls
    # on them.
    splits = (
        requested.collective
        and ranks
        and isinstance(world, TorchProcessGroup)
        and world.bound_device_id is not None
    )
    parent = world.unicoll if splits else None
    unicoll_group = job.make(
        group_name, job_ranks, choices, timeout, desc, pg_options, requested.device, parent
    )
    members = Members(job, unicoll_group)
    group = TorchProcessGroup(members, requested.backend or name, torch_name, desc, store)
    group.backend_spec = spec
    if is_default:
        job.joined.default = unicoll_group
        init.enter_world(job.joined)
        warn_without_calls(job.joined)
    return group


def _members_name(ranks: list[int]) -> str:
    """The name of a group in errors and records: its ranks in torch's default group. torch's name is
    a number or a hash, and its description need not be equal on all ranks."""
    text = ranks_text(ranks)
    if len(text) <= _LONGEST_NAME:
        return text
    digest = hashlib.sha256(text.encode()).hexdigest()[:8]
    return f"{text[:_LONGEST_NAME].rpartition(',')[0]}, ... ({len(ranks)} ranks, {digest})"


def explain(group: Any = None) -> str:
    """A report of a group's rank, store, secret and backends and how they were chosen; one line
    each.

    Args:
        group: a unicoll group of torch.distributed; None is the default group.

    Raises:
        NotInitializedError: there is no default group.
        DistArgumentError: the group is not a unicoll group.
    """
    pg = c10d.GroupMember.WORLD if group is None else group
    if pg is None:
        raise NotInitializedError(
            "explain: there is no default process group: call init_process_group first"
        )
    if not isinstance(pg, TorchProcessGroup):
        raise DistArgumentError(f"explain: {pg!r} is not a unicoll group")
    unicoll_group = pg.unicoll
    replaced = replaced_backends.note()
    return "\n".join(
        [
            *([replaced] if replaced else []),
            *pg.job.joined.notes,
            f"group {unicoll_group.name!r} of {unicoll_group.size()}: {unicoll_group.describe()}",
        ]
    )
