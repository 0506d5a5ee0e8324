"""More groups: any set of ranks, neighbours, and parts of a group."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import EllipsisType
from typing import Any

from unicoll.api import objects, world
from unicoll.backend.contract import Context, Job
from unicoll.backend.interrupts import leaves_doubt
from unicoll.errors import DistArgumentError, DistError
from unicoll.group import backend_choice
from unicoll.group.arguments import as_integer, check_ranks
from unicoll.group.backend_choice import BackendChoice
from unicoll.group.growth import GrowthRecord
from unicoll.group.process_group import ProcessGroup
from unicoll.net.timeouts import Timeout

_LISTED = "new_group()"
"""The kind of the groups that all processes of a job make, by which their names are numbered."""


def _reserve(job: Job, kind: str, names: list[str], count: int = 1) -> None:
    """Add the names of the next groups of a kind to ``names``, before anything can fail on this rank alone.

    So the names of later groups are equal on all ranks.
    """
    above = f"{job.name}/" if job.name else ""
    before = job.named[kind]
    prefix = "group" if kind == _LISTED else f"local-{kind}"
    made = [f"{above}{prefix}-{before + i}" for i in range(1, count + 1)]
    # Nothing is called from here on: an exception of a signal's handler comes before both or behind both.
    names += made
    job.named[kind] = before + count


def _failed(names: list[str], group: Any, reserve: Callable[[], object], cause: BaseException) -> None:
    """Fail the groups that an exception which is no refusal has kept this rank from making: others may have made them.

    Args:
        names: of these groups; empty if they have not been reserved.
        group: whose members make them; None is the default group.
        reserve: reserves the names.
        cause: the exception.
    """
    parent = world.GroupMember.WORLD if group is None else group
    if not leaves_doubt(cause) or not isinstance(parent, ProcessGroup):
        return
    if not names:
        with suppress(DistError):  # the other ranks refuse the call
            reserve()
    parent.fail_derived(names, cause)


def _make(
    job: Job,
    name: str,
    ranks: Sequence[int],
    choices: Sequence[BackendChoice],
    timeout: float,
    desc: str | None,
    options: Any,
    device: Any,
    parent: ProcessGroup | None,
) -> Any:
    if job.rank not in ranks:
        if parent is not None:
            parent.leave_out(choices)
        return world.GroupMember.NON_GROUP_MEMBER
    if device is None and parent is not None:
        device = parent.bound_device_id
    context = Context(job, name, tuple(ranks), timeout, options, device, desc=desc or "undefined")
    return ProcessGroup.create(context, choices, parent)


def _choices(job: Job, backend: str | None, parent: ProcessGroup) -> Sequence[BackendChoice]:
    if backend is None or job.fake:  # then all groups have the backend fake
        return parent.choices
    choices = backend_choice.choose(backend)
    if backend_choice.is_fake(choices):
        raise DistArgumentError(
            f"backend: {backend!r} is for jobs without other processes: init_process_group('fake', ...)"
        )
    for cls in {c.cls for c in choices}:
        cls.prepare(job)
    return choices


def new_group(
    ranks: Sequence[int] | None = None,
    timeout: Timeout = None,
    backend: str | None = None,
    pg_options: Any = None,
    use_local_synchronization: bool = False,
    group_desc: str | None = None,
    device_id: Any = None,
    sort_ranks: bool = True,
) -> Any:
    """Make a group of some of the processes. All processes of the job call this, in the same order.

    Args:
        ranks: global ranks of the members; None is all.
        timeout: default timeout of its operations; None takes the default group's (torch: the backend's default).
        backend: as for init_process_group; None takes the default group's. Not ``"fake"``; in a job of that backend
            every group has it, and this argument is ignored.
        pg_options: passed to the backend.
        use_local_synchronization: only the members call.
        group_desc: a description, for messages.
        device_id: device that the group is bound to.
        sort_ranks: number the members by global rank; False keeps the order given.

    Returns:
        The group on its members, ``GroupMember.NON_GROUP_MEMBER`` elsewhere.

    Raises:
        DistArgumentError: ranks are empty, repeated or not in the world, or with ``use_local_synchronization`` the
            caller is not among them.
        BackendUnavailableError: the backend cannot be used here.
    """
    names: list[str] = []

    def reserve() -> None:
        job, kind = world.current("new_group"), _LISTED
        if use_local_synchronization:
            members = _members(job, ranks, sort_ranks)
            if job.rank not in members:
                raise DistArgumentError("new_group: with use_local_synchronization only the members may call")
            kind = hashlib.sha256(repr(members).encode()).hexdigest()[:12]
        _reserve(job, kind, names)

    try:
        default = world.member(None, "new_group")
        reserve()
        members = _members(default.job, ranks, sort_ranks)
        seconds = world.seconds(timeout, default.timeout)
        choices = _choices(default.job, backend, default)
        parent = None if use_local_synchronization else default
        return _make(
            default.job, names[0], members, choices, seconds, group_desc, pg_options, device_id, parent
        )
    except BaseException as e:
        _failed(names, None, reserve, e)
        raise


def _members(job: Job, ranks: Sequence[int] | None, sort: bool = True) -> list[int]:
    members = check_ranks("new_group", range(job.size) if ranks is None else ranks, job.size)
    return sorted(members) if sort else members


def new_subgroups(
    group_size: int | None = None,
    group: Any = None,
    timeout: Timeout = None,
    backend: str | None = None,
    pg_options: Any = None,
    group_desc: str | None = None,
) -> tuple[Any, list[Any]]:
    """Cut a group into neighbouring subgroups of one size; all processes of the job call this.

    Args:
        group_size: members of each subgroup; None is the number of processes on a host.
        group: what to cut; None is the default group.
        timeout, backend, pg_options, group_desc: as for :func:`new_group`.

    Returns:
        This process's subgroup, and the list of all (NON_GROUP_MEMBER where it is not in it).

    Raises:
        DistArgumentError: the group cannot be cut evenly.
    """

    def lists() -> list[list[int]]:
        parent = world.member(group, "new_subgroups")
        given = group_size if group_size is not None else parent.job.local_size or parent.size()
        size = as_integer("new_subgroups: group_size", given)
        if not 0 < size <= parent.size() or parent.size() % size:
            raise DistArgumentError(
                f"new_subgroups: a group of {parent.size()} cannot be cut into groups of {size}"
            )
        ranks = parent.ranks
        return [list(ranks[i : i + size]) for i in range(0, len(ranks), size)]

    return _subgroups("new_subgroups", group, lists, timeout, backend, pg_options, group_desc)


def new_subgroups_by_enumeration(
    ranks_per_subgroup_list: Sequence[Sequence[int]],
    timeout: Timeout = None,
    backend: str | None = None,
    pg_options: Any = None,
    group_desc: str | None = None,
) -> tuple[Any, list[Any]]:
    """Make disjoint subgroups from lists of global ranks; all processes of the job call this.

    Returns:
        This process's subgroup (None if it is in none), and the list of all.

    Raises:
        DistArgumentError: no lists, or a rank in two of them.
    """

    def lists() -> Sequence[Sequence[int]]:
        if not ranks_per_subgroup_list:
            raise DistArgumentError("new_subgroups_by_enumeration: no subgroups given")
        everyone = [r for ranks in ranks_per_subgroup_list for r in ranks]
        if len(set(everyone)) != len(everyone):
            raise DistArgumentError("new_subgroups_by_enumeration: a rank is in two subgroups")
        return ranks_per_subgroup_list

    what = "new_subgroups_by_enumeration"
    return _subgroups(what, None, lists, timeout, backend, pg_options, group_desc)


def _subgroups(
    what: str,
    group: Any,
    lists: Callable[[], Sequence[Sequence[int]]],
    timeout: Timeout,
    backend: str | None,
    pg_options: Any,
    group_desc: str | None,
) -> tuple[Any, list[Any]]:
    """Groups of the members in ``lists()``; ``group``: of the job."""
    names: list[str] = []

    def reserve() -> None:
        _reserve(world.member(group, what).job, _LISTED, names, len(lists()))

    try:
        job = world.member(group, what).job
        default = job.default or world.member(None, what)
        reserve()
        members = [sorted(check_ranks("new_group", ranks, job.size)) for ranks in lists()]
        seconds = world.seconds(timeout, default.timeout)
        choices = _choices(job, backend, default)
        mine, made = None, []
        for name, ranks in zip(names, members, strict=True):
            made.append(_make(job, name, ranks, choices, seconds, group_desc, pg_options, None, default))
            if isinstance(made[-1], ProcessGroup):
                mine = made[-1]
        return mine, made
    except BaseException as e:
        _failed(names, group, reserve, e)
        raise


def split_group(
    parent_pg: ProcessGroup | None = None,
    split_ranks: Sequence[Sequence[int]] | None = None,
    timeout: Timeout = None,
    pg_options: Any = None,
    group_desc: str | None = None,
    backend: str | None = None,
    *,
    color: int | EllipsisType | None = ...,
    key: int = 0,
) -> ProcessGroup | None:
    """Cut a group into disjoint parts; all members of the parent call this, and no other rank.

    The parts are given by ``split_ranks``, equal on all ranks, or by each rank's own ``color`` and ``key``, as for
    MPI_Comm_split.

    Args:
        parent_pg: what to cut; None is the default group.
        split_ranks: for each part the ranks *in the parent* of its members.
        color: ranks that give the same number form a part; None for no part.
        key: a part's ranks are in the order of their keys, and of their ranks in the parent where keys are equal.
        timeout: default timeout of the parts; None takes the parent's.
        pg_options, group_desc: as for :func:`new_group`.
        backend: None takes the parent's.

    Returns:
        This process's part, or None if it is in none.

    Raises:
        DistArgumentError: no parts, an empty one, or a rank that is repeated or not in the parent; or both
            ``split_ranks`` and ``color``.
    """
    names: list[str] = []

    def reserve() -> None:
        parent = world.member(parent_pg, "split_group").base
        # by colour there is a part for each rank at most
        parent.reserve_parts(names, len(split_ranks or ()) or parent.size())

    try:
        parent = world.member(parent_pg, "split_group").base
        parts: list[list[int]]
        if not isinstance(color, EllipsisType):
            if split_ranks is not None:
                raise DistArgumentError("split_group: give split_ranks or color, not both")
            parts = _parts_by_color(parent, color, key)
            if not parts:
                return None
        elif split_ranks:
            parts = [sorted(part) for part in split_ranks]
        else:
            raise DistArgumentError("split_group: split_ranks is empty")
        everyone = [r for part in parts for r in part]
        check_ranks("split_group", everyone, parent.size())
        reserve()
        seconds = world.seconds(timeout, parent.timeout)
        choices = _choices(parent.job, backend, parent)
        for i, part in enumerate(parts):
            if len(part) == 0:
                raise DistArgumentError(f"split_group: part {i} of split_ranks is empty")
            if parent.rank() in part:
                members = [parent.ranks[r] for r in part]
                made: ProcessGroup = _make(
                    parent.job, names[i], members, choices, seconds, group_desc, pg_options, None, parent
                )
                return made
        parent.leave_out(choices)
        return None
    except BaseException as e:
        _failed(names, parent_pg, reserve, e)
        world.interrupted(parent_pg, e)
        raise


def _parts_by_color(parent: ProcessGroup, color: int | None, key: int) -> list[list[int]]:
    """The parts of a split in the order of their colours; a collective of the parent."""
    own = (
        None if color is None else as_integer("split_group: color", color),
        as_integer("split_group: key", key),
    )
    found: list[Any] = [None] * parent.size()
    objects.all_gather_object(found, own, parent)
    parts: dict[int, list[tuple[int, int]]] = {}
    for rank, (chosen, order) in enumerate(found):
        if chosen is not None:
            parts.setdefault(chosen, []).append((order, rank))
    return [[rank for _, rank in sorted(parts[chosen])] for chosen in sorted(parts)]


def grow_group(
    ranks_to_add: Sequence[int],
    group: Any = None,
    pg_options: Any = None,
    device_id: Any = None,
    timeout: Timeout = None,
) -> ProcessGroup:
    """A group of one group's members followed by more ranks of the job; all of them call it.

    The members call it with their group, or :meth:`ProcessGroup.grow`; the added ranks with the result of
    ``new_group``, ``GroupMember.NON_GROUP_MEMBER``. The smaller group is unchanged; destroy it after use.
    NCCL grows the communicator where it can (2.29), else all connect anew; operations in flight end first.

    Args:
        ranks_to_add: global ranks to add, in the order of their ranks in the larger group.
        group: None is the default group.
        pg_options: as for :func:`new_group`.
        device_id: on added ranks, the device that the group is bound to; None takes the current one.
        timeout: how long added ranks wait for the members; None is the default group's timeout.

    Raises:
        DistArgumentError: no ranks, or one that is in the group already or not in the job; or the ranks differ.
        OperationTimeoutError, RankLostError: not all ranks joined.
        GroupAbortedError: the group has failed or was destroyed.
    """
    if not isinstance(group, type(world.GroupMember.NON_GROUP_MEMBER)):
        return world.member(group, "grow_group").grow(ranks_to_add, pg_options)
    job = world.current("grow_group")
    added = check_ranks("grow_group", ranks_to_add, job.size)
    if job.rank not in added:
        raise DistArgumentError(f"grow_group: this rank, {job.rank}, is not in ranks_to_add={added}")
    if job.fake:
        raise DistArgumentError(
            "grow_group: with backend fake a rank cannot be added to a group: there are no other processes"
        )
    limit = world.seconds(timeout, job.default.timeout)
    record = GrowthRecord.receive(job.store, job.rank, added, limit)
    same = record.backends == job.default.backend_config
    choices = job.default.choices if same else _choices(job, record.backends, job.default)
    device = job.default.bound_device_id if device_id is None else device_id
    context = Context(job, record.name, record.ranks, record.timeout, pg_options, device, desc=record.desc)
    return ProcessGroup.create(context, choices, grown=True)


def shrink_group(
    ranks_to_exclude: Sequence[int],
    group: ProcessGroup | None = None,
    shrink_flags: int = 0,
    pg_options: Any = None,
) -> ProcessGroup:
    """A group of the remaining members of one; they all call this, the excluded ranks do not.

    The group may have failed, and should then be destroyed: its operations ended when it failed. NCCL shrinks the
    communicator where it can (2.27), else the remaining members connect anew.

    Args:
        ranks_to_exclude: ranks *in the group*, at least one.
        group: None is the default group, which is not replaced.
        shrink_flags: accepted because torch has it; a failed group is detected without it.
        pg_options: as for :func:`new_group`.

    Raises:
        DistArgumentError: no rank is excluded, or the caller, or a rank that is not in the group.
        OperationTimeoutError, RankLostError: not all remaining members joined.
    """
    return world.member(group, "shrink_group").shrink(ranks_to_exclude, pg_options)
