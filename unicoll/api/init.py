"""init_process_group and destroy_process_group; explain, which says what init has chosen and why."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from unicoll.api import world
from unicoll.api.world import GroupMember
from unicoll.arrays.torch_tensors import profiler_watch
from unicoll.arrays.types import default_pg_timeout
from unicoll.errors import DistArgumentError
from unicoll.group.arguments import as_integer
from unicoll.net.timeouts import Timeout

if TYPE_CHECKING:
    from unicoll.backend.contract import Job
    from unicoll.group.process_group import ProcessGroup

DEFAULT_NAME = "world"
"""Name of the default group."""
_RENDEZVOUS_S = 300.0


def init_process_group(
    backend: str | None = None,
    init_method: str | None = None,
    timeout: Timeout = None,
    world_size: int = -1,
    rank: int = -1,
    store: Any = None,
    group_name: str = "",
    pg_options: Any = None,
    device_id: Any = None,
) -> None:
    """Join the job: find the other processes and make the default process group. Returns when all have joined.

    Args:
        backend: ``"gloo"``, ``"mpi"``, ``"nccl"``, a registered name, ``"cpu:gloo,cuda:nccl"``, or None to choose by
            device and launcher (:func:`explain` says what was chosen and why). ``"fake"``: one process alone, as any
            rank of any world size, for dry runs (:mod:`unicoll.backend.fake`); it needs no init method or store.
        init_method: ``env://`` (the default: the launcher's environment), ``tcp://host:port`` (IPv6 in brackets),
            ``file:///path``. Not together with ``store``.
        timeout: default timeout of the group's operations and limit of the time to join, timedelta or seconds; None is
            30 minutes for operations and 5 minutes to join.
        world_size, rank: number of processes and rank of this one; -1 takes them from the launcher.
        store: a store that all processes share; with it ``world_size`` and ``rank`` are needed.
        group_name: accepted because torch has it; not used.
        pg_options: passed to the backend.
        device_id: device that this process is bound to (index, or a torch or unicoll device).

    Raises:
        DistArgumentError: arguments or environment do not give rank and world size, or contradict each other.
        BackendUnavailableError: the backend cannot be used here, and why.
        OperationTimeoutError: not all ranks joined in time; names the missing.
        AuthenticationError: the other ranks have another secret.
        DistStoreError, DistNetworkError: the store cannot be reached.
    """
    if world.is_initialized():
        raise DistArgumentError(
            "init_process_group: the default process group exists already (torch.distributed.init_process_group makes"
            " it, too, with a backend of unicoll); call destroy_process_group first"
        )
    # Here and not at the top: most modules of unicoll, and logging, hashlib and socket, serve jobs only.
    from unicoll.backend.contract import Context
    from unicoll.bootstrap.join import join, leave
    from unicoll.group.process_group import ProcessGroup

    rank = as_integer("init_process_group: rank", rank)
    world_size = as_integer("init_process_group: world_size", world_size)
    limit = world.seconds(timeout, default_pg_timeout.total_seconds())
    joining_s = min(limit, _RENDEZVOUS_S) if timeout is None else limit
    job = join(backend, init_method, rank, world_size, store, limit, joining_s)
    try:
        all_ranks = tuple(range(job.size))
        context = Context(job, DEFAULT_NAME, all_ranks, limit, pg_options, device_id, desc="default_pg")
        default = ProcessGroup.create(context, job.choices)
        if job.control is not None:
            job.control.initialized(joining_s)
    except BaseException as e:
        leave(job, e)
        raise
    enter(job, default, _follow_profiler)


def enter(job: Job, default: ProcessGroup, follow: Callable[[bool], None] | None = None) -> None:
    """Set the default group of this process, which has joined a job; the functions of the package then serve it.

    Args:
        follow: called when ``torch.profiler`` has started or stopped.
    """
    from unicoll.bootstrap.join import register_exit_handler

    profiler_watch.running, profiler_watch.changed = False, follow
    world.enter(job, default)
    register_exit_handler(world.leave, world.forget)
    if metrics_file := os.environ.get("UNICOLL_METRICS_FILE"):
        from unicoll.group.call_counters import start_file

        try:
            start_file(job, metrics_file)
        except BaseException:
            world.leave()
            raise


def _follow_profiler(running: bool) -> None:
    from unicoll.api.hooks import follow_profiler

    follow_profiler(running)


def destroy_process_group(group: Any = None) -> None:
    """End a group, or with None or ``group.WORLD`` the whole job as far as this process is concerned.

    Posted operations are finished first, for a few seconds at most. Afterwards ``init_process_group`` may be called
    again. A view made by ``ProcessGroup.using`` stands for its group.

    Raises:
        NotInitializedError: there is no default group.
        DistArgumentError: the group is not one of this process.
    """
    if group is GroupMember.NON_GROUP_MEMBER:
        return
    job = world.current("destroy_process_group")
    pg: Any = world.resolve(group)
    pg = getattr(pg, "base", pg)
    if pg is job.default:
        world.leave()
        return
    if pg not in job.groups:
        raise DistArgumentError(
            f"destroy_process_group: {pg!r} is not a group of this process, or not any more"
        )
    job.groups.remove(pg)
    pg.close()


def explain() -> str:
    """The choices of init_process_group with source and reason: rank, store, secret, interface, backends.

    Before init_process_group: the choices that the environment would give. One line for each; never raises.
    """
    if not world.is_initialized():
        from unicoll.bootstrap import environment_report

        return "\n".join(["not initialised", *environment_report.lines()])
    job = world.current("explain")
    groups = [f"group {one.name!r} of {one.size()}: {one.describe()}" for one in job.groups]
    return "\n".join([*job.notes, *groups])
