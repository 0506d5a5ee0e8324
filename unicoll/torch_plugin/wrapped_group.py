"""torch's process groups over groups made by ``unicoll.init_process_group`` and
``unicoll.new_group``."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from unicoll.api import world
from unicoll.errors import DistArgumentError
from unicoll.group.process_group import ProcessGroup
from unicoll.torch_plugin.compat import RequestedGroup
from unicoll.torch_plugin.group import Members, TorchProcessGroup
from unicoll.torch_plugin.stores import UnicollBackedStore, innermost
from unicoll.torch_plugin.torch_job import TorchJob


class WrappedProcessGroup(TorchProcessGroup):
    """torch's process group over an existing unicoll group.

    Destroying it does not close the unicoll group; closing the unicoll group destroys it.
    """

    def __init__(self, group: ProcessGroup, requested: RequestedGroup) -> None:
        job = TorchJob(world.current("torch_group"))
        job.store = innermost(requested.store)
        name, desc = requested.name or group.name, requested.desc or group.group_desc
        members = Members(job, group)
        super().__init__(members, requested.backend or "unicoll", name, desc, requested.store)

    def _release(self) -> None:
        """Torch's group only is destroyed."""


def torch_group(group: Any = None) -> Any:
    """torch's process group over a unicoll group; the same one for every call. Nothing is
    communicated.

    If torch.distributed has no default group, one over unicoll's default group is created, since
    many of torch's functions need it. It is destroyed with unicoll's.

    Args:
        group: a unicoll group, or a torch group, which is returned unchanged. None is unicoll's
            default group, or torch's if unicoll has none.

    Raises:
        NotInitializedError: there is no default group.
        DistArgumentError: this process is not in the group, or the group has been destroyed.
        DistTypeError: ``group`` is not a process group.
    """
    if isinstance(group, dist.ProcessGroup):
        return group
    if group is None and dist.is_initialized() and not world.is_initialized():
        return c10d.GroupMember.WORLD
    unicoll_group = world.member(group, "torch_group").base
    current = world.current("torch_group")
    if unicoll_group not in current.groups:
        raise DistArgumentError(
            f"torch_group: {unicoll_group!r} is not of init_process_group's job, or has been"
            " destroyed"
        )
    if not dist.is_initialized():
        dist.init_process_group(
            "unicoll",
            store=UnicollBackedStore(current.rendezvous),
            rank=current.rank,
            world_size=current.size,
            # The backend's factory wraps a group that it gets as options, and joins no job.
            pg_options=current.default,
        )
    if unicoll_group.wrapper is None:
        pg = dist.new_group(
            sorted(unicoll_group.ranks),
            backend="unicoll",
            pg_options=unicoll_group,
            use_local_synchronization=True,
            group_desc=unicoll_group.group_desc,
        )
        # Some versions of torch always sort the ranks; unicoll keeps their order.
        c10d._world.pg_group_ranks[pg] = {rank: i for i, rank in enumerate(unicoll_group.ranks)}
    return unicoll_group.wrapper
