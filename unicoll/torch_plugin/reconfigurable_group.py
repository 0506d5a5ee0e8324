"""torch's default group with members that change: ``init_process_group(enable_reconfigure=True)``
of torch 2.14."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import distributed_c10d as c10d

from unicoll.api import init, world
from unicoll.arrays.types import default_pg_timeout
from unicoll.bootstrap.enter import join
from unicoll.bootstrap.resolve import JoinRequest
from unicoll.errors import DistArgumentError, DistError
from unicoll.group.arguments import DEFAULT_NAME
from unicoll.group.call_hooks import Hook, add_to_job
from unicoll.torch_plugin.compat import RequestedGroup
from unicoll.torch_plugin.error_messages import adapt_for_torch
from unicoll.torch_plugin.group import Members, TorchProcessGroup
from unicoll.torch_plugin.stores import (
    TorchBackedStore,
    TorchStoreLocation,
    UnicollBackedStore,
    innermost,
)
from unicoll.torch_plugin.torch_job import TorchJob
from unicoll.torch_plugin.work import DONE, CompletedWork


class ReconfigurableGroup(TorchProcessGroup):
    """torch's default group, which has members after :meth:`reconfigure` only.

    Each reconfiguration joins a new job at torch's store, which must outlive lost ranks.
    """

    supports_reconfigure = True

    def __init__(
        self,
        requested: RequestedGroup,
        backend: str,
        name: str,
        spec: str | None,
        store: Any,
        rank: int,
        size: int,
        timeout: timedelta | None,
        options: Any,
    ) -> None:
        desc = requested.desc or "undefined"
        super().__init__(None, requested.backend or backend, name, desc, store, rank, size)
        self.backend_spec = spec
        self._rank, self._size = rank, size
        self._limit = (timeout or default_pg_timeout).total_seconds()
        self._settings = options, requested.device
        # The hooks of unicoll.add_hook go from one job to the next.
        self._hooks: Sequence[Hook] = ()
        if requested.device is not None:
            self.bound_device_id = requested.device
        # C++ does not keep the Python part of a UnicollBackedStore alive.
        self._inner = innermost(store)
        self._token = secrets.token_hex(8)
        self._reconfigured = 0

    # Torch has these names in Python and in C++.
    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size

    getRank, getSize = rank, size

    def get_error(self) -> Any:
        """torch's ErrorType: REMOTE_ERROR after a failure of the group, such as a lost rank, else
        SUCCESS."""
        kinds = torch._C._distributed_c10d.ErrorType
        if self._members is None:
            return kinds.SUCCESS
        control = self.job.joined.control
        failed = control is not None and control.group_failure(self.unicoll.name) is not None
        return kinds.REMOTE_ERROR if failed else kinds.SUCCESS

    def get_reconfigure_handle(self) -> str:
        """This process among the handles of the next :meth:`reconfigure`, which changes it."""
        return f"unicoll:{self._rank:08}:{self._token}:{self._reconfigured}"

    def reconfigure(self, opts: Any) -> CompletedWork:
        """Leave the present members and join those of ``opts``, torch's ReconfigureOptions; all of
        them call this.

        It returns when all have joined. Groups that ``new_group`` made before stay; so do hooks and
        metrics.

        Args:
            opts: ``handles`` of all members, from a list in the order of the new ranks, from a set
                in that of the old ones; ``uuid``, an integer that no reconfiguration at this store
                has had; ``timeout``, how long to wait for the other members, by default the
                group's, but 5 minutes at most. ``hints`` are ignored.

        Raises:
            DistArgumentError: the uuid was used, or the handle of this process is not among
                ``handles``. The group is unchanged.
            OperationTimeoutError: not all members called this in time; names the missing. The group
                has no members.
            DistError: the errors of ``unicoll.join``.
        """
        given = opts.handles
        handles = list(given) if isinstance(given, list) else sorted(given)
        limit = (
            min(self._limit, init.RENDEZVOUS_S)
            if opts.timeout is None
            else opts.timeout.total_seconds()
        )
        try:
            # Both of these can refuse the call, so they come before the present members are left.
            rank = self._rank_among(handles)
            self._claim(opts.uuid, handles)
            self._leave("reconfigure")
            self._join(f"reconfigure.{opts.uuid}", rank, len(handles), limit)
        except DistError as error:
            adapt_for_torch(error)
            raise error
        return DONE

    def _rank_among(self, handles: list[str]) -> int:
        own = self.get_reconfigure_handle()
        if self._closed:
            raise DistArgumentError("reconfigure: this process group has been destroyed")
        if own not in handles:
            raise DistArgumentError(
                f"reconfigure: the handle of this process, {own}, is not among {handles}; it"
                " changes each time"
            )
        if len({*handles}) < len(handles):
            raise DistArgumentError(f"reconfigure: a handle is given twice: {handles}")
        return handles.index(own)

    def _claim(self, uuid: int, handles: list[str]) -> None:
        """Record the handles of a uuid. They differ after each reconfiguration, and so for each use
        of it."""
        digest = hashlib.sha256("\n".join(handles).encode()).hexdigest()
        found = TorchBackedStore(self._store).compare_set(f"unicoll/reconfigure/{uuid}", "", digest)
        if found.decode() != digest:
            raise DistArgumentError(
                f"reconfigure: uuid {uuid} was already used, or with other handles on another rank"
            )

    def _join(self, name: str, rank: int, size: int, limit: float) -> None:
        request = JoinRequest(
            self.backend_spec,
            rank=rank,
            world_size=size,
            store=TorchStoreLocation(self._store),
            timeout=self._limit,
            join_timeout=limit,
            name=name,
            makes_group=False,
        )
        joined = join(request)
        try:
            job = TorchJob(joined)
            is_default = not world.is_initialized()
            group_name = DEFAULT_NAME if is_default else self.getGroupName()
            options, device = self._settings
            group = job.make(
                group_name,
                job.ranks,
                joined.choices,
                timedelta(seconds=self._limit),
                self.getGroupDesc(),
                options,
                device,
            )
            for hook in self._hooks:
                add_to_job(joined, hook)
            self._set_members(Members(job, group))
            self._rank, self._size = rank, size
            self._reconfigured += 1
            if self in c10d._world.pg_group_ranks:
                c10d._world.pg_group_ranks[self] = {each: each for each in range(size)}
            if is_default:
                joined.default = group
                init.enter_world(joined)
        except BaseException as error:
            # This may be an exception of a signal's handler: the other members have joined, and
            # learn by its leave() that this one has not.
            made, self._members = self._members, None
            if made is not None:
                made.group.wrapper = None
            joined.leave(error)
            # Its traceback has frames that have the job.
            joined.error = None
            raise

    def _leave(self, call: str) -> None:
        members = self._members
        if members is not None:
            job, group = members.job, members.group
            reason = f"rank {self._rank} calls {call}()"
            try:
                # Closing the unicoll group would else close this group, too, which goes on without
                # members.
                group.wrapper = None
                members.works.clear()
                self._hooks = job.joined.hooks
                job.end(group, reason)
            except BaseException:
                # After an exception of a signal's handler the rest is still ended.
                group.wrapper = None
                job.end(group, reason)
                raise
            finally:
                self._members = None

    def abort(self) -> None:
        """Make all pending operations raise, on all ranks. The group has no members until the next
        reconfiguration."""
        self._leave("abort")

    def shutdown(self) -> None:
        if self._members is not None:
            super().shutdown()
            self._members = None
        inner, self._inner = self._inner, None
        if isinstance(inner, UnicollBackedStore) and inner.claim():
            inner.rendezvous.close()
        self._closed, self._store = True, None
