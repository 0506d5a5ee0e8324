"""Jobs of torch's groups: joined with the first group, left with the default one or the last."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any

from unicoll.api import world
from unicoll.arrays.types import default_pg_timeout
from unicoll.backend.contract import Context, Job
from unicoll.bootstrap import enter
from unicoll.bootstrap.resolve import JoinRequest
from unicoll.calls import flight_recorder
from unicoll.calls.flight_recorder import call_kind
from unicoll.group.backend_choice import BackendChoice
from unicoll.group.process_group import ProcessGroup
from unicoll.process import logs
from unicoll.torch_plugin.group_options import GroupOptions
from unicoll.torch_plugin.stores import TorchStoreLocation, UnicollBackedStore, innermost

_RENDEZVOUS_TIMEOUT_S = 300.0

log = logs.logger("torch")


class TorchJob:
    """A job with torch's groups in it."""

    def __init__(self, job: Job) -> None:
        self.joined = job
        self.ranks = tuple(range(job.size))
        # C++ does not keep the Python part of a UnicollBackedStore alive.
        self.store: Any = None

    def unique_name(self, name: str) -> str:
        """The name of a new group, with a number if this job had one of this name before."""
        named = self.joined.named
        named[name] += 1
        return name if named[name] == 1 else f"{name}#{named[name]}"

    def make(
        self,
        name: str,
        ranks: Sequence[int],
        choices: Sequence[BackendChoice],
        timeout: timedelta | None,
        desc: str,
        options: Any,
        device: Any = None,
        parent: ProcessGroup | None = None,
    ) -> ProcessGroup:
        """Make a group. All its members call this.

        Args:
            name: the group's name, which no other group of this job has had.
            ranks: ranks in the job.
            timeout: default timeout of its operations; 30 minutes if None.
            parent: the group that it is split from; its ranks outside the new group call
                ``parent.leave_out`` at the same time.
        """
        context = Context(
            self.joined,
            name,
            tuple(ranks),
            (timeout or default_pg_timeout).total_seconds(),
            None if isinstance(options, GroupOptions) else options,
            device,
            desc=desc,
        )
        return ProcessGroup.create(context, choices, parent)

    def end(self, group: ProcessGroup, reason: str) -> None:
        """Close a group in which other ranks may wait: their calls raise. The last one leaves the
        job."""
        self.joined.close_group(group, reason)
        if group is self.joined.default:
            world.forget(self.joined)

    def remove(self, group: ProcessGroup) -> None:
        """Close a group; the last one, and the default group, leaves the job."""
        try:
            self.joined.close_group(group)
        finally:
            if not self.joined.groups:
                self.store = None


def join_torch_job(
    backend: str | None, store: Any, rank: int, world_size: int, timeout: timedelta | None
) -> TorchJob:
    """Join a job as :func:`unicoll.bootstrap.enter.join` does, at torch's store or the launcher's
    rendezvous.

    Rank and world size are -1 if the launcher sets them.
    """
    limit = (timeout or default_pg_timeout).total_seconds()
    inner = innermost(store)
    request = JoinRequest(
        backend,
        rank=rank,
        world_size=world_size,
        timeout=limit,
        join_timeout=min(limit, _RENDEZVOUS_TIMEOUT_S),
        makes_group=False,
    )
    # The first job uses the rendezvous that the store is of. A later one needs another, which it
    # does in this store.
    if isinstance(inner, UnicollBackedStore) and inner.claim():
        joined = enter.enter(inner.rendezvous, request, time.monotonic() + request.join_timeout)
    else:
        location = TorchStoreLocation(store) if store is not None else None
        joined = enter.join(replace(request, store=location))
    job = TorchJob(joined)
    job.store = inner
    return job


def warn_without_calls(job: Job) -> None:
    """When rank 0 leaves a job of several ranks, log that it has made no call."""
    if job.rank == 0 and job.size > 1:
        job.on_leave.append(partial(_warn_without_calls, job))


def _warn_without_calls(job: Job) -> None:
    # A forked child does not leave it, and a program that has failed says so itself.
    ends_well = job.error is None or (isinstance(job.error, SystemExit) and not job.error.code)
    if job.forked or not ends_well or not flight_recorder.ring().maxlen:
        return
    if any(call_kind(entry).job == job.number for entry in flight_recorder.snapshot()):
        return
    log.warning(
        "%d ranks joined, but rank 0 made no call in their groups: it worked alone. A framework that"
        " is not told to use several processes trains a model of its own on each rank: on a CPU"
        " accelerate needs Accelerator(cpu=True), and transformers TrainingArguments(use_cpu=True)",
        job.size,
    )
