"""init_process_group, join and destroy_process_group; explain, which says what they have chosen and
why."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from unicoll.api import world
from unicoll.api.world import GroupMember
from unicoll.arrays.torch_tensors import profiler_watch
from unicoll.arrays.types import default_pg_timeout
from unicoll.errors import DistArgumentError, DistError
from unicoll.group.arguments import DEFAULT_NAME, as_integer
from unicoll.process.timeouts import Timeout

if TYPE_CHECKING:
    from unicoll.backend.contract import Job
    from unicoll.bootstrap.resolve import JoinRequest
    from unicoll.group.process_group import ProcessGroup

RENDEZVOUS_S = 300.0
"""Seconds to join a job, unless a timeout is given."""
_NAME_LENGTH = 64
_NAME = re.compile(rf"[A-Za-z][A-Za-z0-9._-]{{0,{_NAME_LENGTH - 1}}}")


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
    """Join the job: find the other processes and make the default process group. Returns when all
    have joined.

    Args:
        backend: ``"gloo"``, ``"mpi"``, ``"nccl"``, a registered name, ``"cpu:gloo,cuda:nccl"``, or
            None to choose by device and launcher (:func:`explain` says what was chosen and why).
            ``"fake"``: one process alone, as any rank of any world size, for dry runs
            (:mod:`unicoll.backend.host.fake`); it needs no init method or store.
        init_method: ``env://`` (the default: the launcher's environment), ``tcp://host:port`` (IPv6
            in brackets), ``file:///path``. Not together with ``store``.
        timeout: default timeout of the group's operations and limit of the time to join, timedelta
            or seconds; None is 30 minutes for operations and 5 minutes to join.
        world_size, rank: number of processes and rank of this one; -1 takes them from the launcher.
        store: a store that all processes share; with it ``world_size`` and ``rank`` are needed.
        group_name: accepted because torch has it; not used.
        pg_options: passed to the backend.
        device_id: device that this process is bound to (index, or a torch or unicoll device).

    Raises:
        DistArgumentError: arguments or environment do not give rank and world size, or contradict
            each other.
        BackendUnavailableError: the backend cannot be used here, and why.
        OperationTimeoutError: not all ranks joined in time; names the missing.
        AuthenticationError: the other ranks have another secret.
        DistStoreError, DistNetworkError: the store cannot be reached.
    """
    if world.replaces_lost_rank():
        raise DistArgumentError(
            "init_process_group: this process replaces a rank that has ended, and joins the others"
            " by unicoll.recover(state), which they call, too (docs/recovery.md)"
        )
    if world.is_initialized():
        raise DistArgumentError(
            "init_process_group: the default process group exists already"
            " (torch.distributed.init_process_group makes it, too, with a backend of unicoll); call"
            " destroy_process_group first"
        )
    asked = request(
        "init_process_group",
        timeout,
        backend=backend,
        init_method=init_method,
        world_size=world_size,
        rank=rank,
        store=store,
        pg_options=pg_options,
        device_id=device_id,
    )
    # It is imported here for the reason in request().
    from unicoll.bootstrap import enter

    enter_world(enter.join(asked), follow_profiler)


def join(
    init_method: str | None = None,
    *,
    name: str,
    rank: int = -1,
    world_size: int = -1,
    secret: str | None = None,
    backend: str | None = None,
    store: Any = None,
    timeout: Timeout = None,
    pg_options: Any = None,
    device_id: Any = None,
) -> ProcessGroup:
    """Join a job and return the group of all its ranks; it does not become the default group.

    A process can be in several jobs at once, of other processes and with other ranks. Their groups
    are independent: a failure in one does not concern the others. Pass the group as ``group=`` to
    the functions of the package, or call its methods; :func:`split_group` makes further groups of
    it. ``destroy_process_group(group)`` leaves the job. Ranks that functions take and return,
    ``src=`` for example, are those of this job.

    Args:
        init_method, store, timeout, backend, pg_options, device_id: as for
            :func:`init_process_group`.
        name: of the job, and of the group; equal on all ranks, and another one than those of the
            other jobs that this process is in or that use the same address or store: a letter and
            up to 63 letters, digits, ``.``, ``_`` and ``-``; not "world". Jobs at one address
            (``tcp://``) have the same process as rank 0, and one secret.
        rank, world_size: of this process in this job. -1 takes both from the launcher, whose
            processes then join. If they are given, here or in the URL, the processes may be of
            several launchers, whose variables are not used, and ``init_method`` or ``store`` is
            needed.
        secret: the secret of the job, equal on all its ranks; None takes the launcher's, or that of
            UNICOLL_SECRET or UNICOLL_SECRET_FILE. Processes of several launchers need one that both
            know. The launcher's own store, which serves ``env://``, has the launcher's secret.

    Raises:
        DistArgumentError: also for an invalid name, an empty secret, and ranks without a place to
            meet.
        BackendUnavailableError, OperationTimeoutError, AuthenticationError: as for
            :func:`init_process_group`.
        DistStoreError, DistNetworkError: likewise.
    """
    from unicoll.net.wire.secret import given_secret

    key = None if secret is None else given_secret(secret)
    # Tracebacks that show local variables do not show the secret.
    secret = None
    if not isinstance(name, str) or not _NAME.fullmatch(name) or name == DEFAULT_NAME:
        raise DistArgumentError(
            f"join: name={name!r} must be a letter and up to {_NAME_LENGTH - 1} letters, digits,"
            f" '.', '_' or '-', and not {DEFAULT_NAME!r}"
        )
    if (world_size, rank) != (-1, -1) and init_method is None and store is None:
        raise DistArgumentError(
            "join: rank and world_size are given; give init_method or store, too"
        )
    asked = request(
        "join",
        timeout,
        backend=backend,
        init_method=init_method,
        world_size=world_size,
        rank=rank,
        store=store,
        pg_options=pg_options,
        device_id=device_id,
        name=name,
        secret=key,
    )
    # It is imported here for the reason in request().
    from unicoll.bootstrap import enter

    group: ProcessGroup = enter.join(asked).default
    return group


def request(call: str, timeout: Timeout, **asked: Any) -> JoinRequest:
    """The request of the public function ``call``, with its arguments; ``timeout`` is the user's.

    Raises:
        DistTypeError: rank or world size is no integer.
        DistArgumentError: the timeout is not positive.
    """
    # These are imported here and not at the top: most modules of unicoll, and logging, hashlib and
    # socket, serve jobs only. new_group imports nothing: an import that fails on one rank, for want
    # of descriptors for example, would come before the rank has counted the group, and its later
    # groups would have other names than on the other ranks.
    import unicoll.api.subgroups  # noqa: F401
    from unicoll.bootstrap.resolve import JoinRequest

    for name in ("rank", "world_size"):
        asked[name] = as_integer(f"{call}: {name}", asked[name])
    limit = world.seconds(timeout, default_pg_timeout.total_seconds())
    joining_s = min(limit, RENDEZVOUS_S) if timeout is None else limit
    return JoinRequest(timeout=limit, join_timeout=joining_s, **asked)


def enter_world(job: Job, follow: Callable[[bool], None] | None = None) -> None:
    """Make the group of a job that this process has joined the default group, which the functions
    then use.

    Args:
        follow: called when ``torch.profiler`` has started or stopped.
    """
    # If the profiler runs already, the next call with a tensor finds a change, and calls `follow`.
    profiler_watch.running, profiler_watch.changed = False, follow
    world.enter(job)
    if metrics_file := os.environ.get("UNICOLL_METRICS_FILE"):
        from unicoll.group.call_counters import start_file

        try:
            start_file(job, metrics_file)
        except BaseException:
            world.leave()
            raise


def follow_profiler(running: bool) -> None:
    """Show the default group's calls in ``torch.profiler`` while it runs."""
    from unicoll.api import hooks

    hooks.follow_profiler(running)


def destroy_process_group(group: Any = None) -> None:
    """End a group; with None, ``group.WORLD`` or a group of :func:`join` the whole job, for this
    process.

    Posted operations are finished first, for a few seconds at most. Afterwards
    ``init_process_group`` may be called again. A view made by ``ProcessGroup.using`` stands for its
    group.

    Raises:
        NotInitializedError: there is no default group.
        DistArgumentError: the group is not one of this process.
        DistError: the error with which posted operations of the group have ended, if no call has
            raised it. The group is destroyed.
    """
    if group is GroupMember.NON_GROUP_MEMBER:
        return
    pg: Any = world.member(group, "destroy_process_group")
    pg = getattr(pg, "base", pg)
    job = world.job_of(pg, "destroy_process_group")
    try:
        job.close_group(pg)
    except DistError as e:
        # The frames are those of the teardown, not of the call that has failed.
        raise e.with_traceback(None) from e.__cause__


def explain(group: Any = None) -> str:
    """The choices of init_process_group with source and reason: rank, store, secret, interface,
    backends.

    Before init_process_group: the choices that the environment would give. One line for each.

    Args:
        group: whose job is meant; None is that of the default group.

    Raises:
        DistArgumentError: this process is not in the group.
    """
    if group is None and not world.is_initialized():
        from unicoll.bootstrap import environment_report

        return "\n".join(["not initialised", *environment_report.lines()])
    job = world.job_of(world.member(group, "explain"), "explain")
    groups = [f"group {one.name!r} of {one.size()}: {one.describe()}" for one in job.groups]
    return "\n".join([*job.notes, *groups])
