"""More groups: any set of ranks, neighbours, and parts of a group."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from types import EllipsisType
from typing import Any, NamedTuple

from unicoll.api import objects, world
from unicoll.backend.contract import Context, Job
from unicoll.calls.error_marks import leaves_doubt
from unicoll.errors import DistArgumentError
from unicoll.group import backend_choice, resizing
from unicoll.group.arguments import as_integer, check_ranks
from unicoll.group.backend_choice import BackendChoice
from unicoll.group.process_group import ProcessGroup
from unicoll.group.resizing import GrowthRecord
from unicoll.process.timeouts import Timeout

_LISTED = "new_group()"
"""The kind of the groups that all processes of a job make, by which their names are numbered."""


class Listed(NamedTuple):
    """A group that all processes of a job make with others, in one order: arguments of
    :func:`new_group`."""

    ranks: Sequence[int]
    backend: str | None = None
    options: Any = None
    desc: str | None = None


def _reserve(job: Job, kind: str, names: list[str], count: int = 1) -> None:
    """Add the names of the next groups of a kind to ``names``, before anything can fail on this
    rank alone.

    So the names of later groups are equal on all ranks.
    """
    qualifier = f"{job.name}/" if job.name else ""
    before = job.named[kind]
    prefix = "group" if kind == _LISTED else f"local-{kind}"
    made = [f"{qualifier}{prefix}-{before + i}" for i in range(1, count + 1)]
    # Nothing is called from here on: an exception of a signal's handler comes before both or behind
    # both.
    names += made
    job.named[kind] = before + count


def _parent(group: Any) -> ProcessGroup | None:
    """The group that a function makes others from; None if there is none, or this rank is not in
    it."""
    found = world.GroupMember.WORLD if group is None else group
    return found if isinstance(found, ProcessGroup) else None


def _failed(
    names: list[str], group: Any, reserve: Callable[[], object], cause: BaseException
) -> None:
    """:meth:`ProcessGroup.fail_derived`; ``group``: whose members make the groups; None is the
    default group."""
    parent = _parent(group)
    if parent is not None:
        parent.fail_derived(names, reserve, cause)


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
        # Where the parent's communicator is split, all its members take part, also this one.
        if parent is not None:
            parent.leave_out(choices)
        return world.GroupMember.NON_GROUP_MEMBER
    if device is None and parent is not None:
        device = parent.bound_device_id
    context = Context(job, name, tuple(ranks), timeout, options, device, desc=desc or "undefined")
    return ProcessGroup.create(context, choices, parent)


def _choices(job: Job, backend: str | None, parent: ProcessGroup) -> Sequence[BackendChoice]:
    # In a job of the backend fake all groups have it.
    if backend is None or job.fake:
        return parent.choices
    choices = backend_choice.choose(backend)
    if backend_choice.is_fake(choices):
        raise DistArgumentError(
            f"backend: {backend!r} is for jobs without other processes: init_process_group('fake',"
            " ...)"
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
        timeout: default timeout of its operations; None takes the default group's (torch: the
            backend's default).
        backend: as for init_process_group; None takes the default group's. Not ``"fake"``; in a job
            of that backend every group has it, and this argument is ignored.
        pg_options: passed to the backend.
        use_local_synchronization: only the members call.
        group_desc: a description, for messages.
        device_id: device that the group is bound to.
        sort_ranks: number the members by global rank; False keeps the order given.

    Returns:
        The group on its members, ``GroupMember.NON_GROUP_MEMBER`` elsewhere.

    Raises:
        DistArgumentError: ranks are empty, repeated or not in the world, or with
            ``use_local_synchronization`` the caller is not among them.
        BackendUnavailableError: the backend cannot be used here.
    """
    names: list[str] = []

    # The handler below calls this again if an exception has come before the names were reserved.
    def reserve() -> None:
        job, kind = world.current("new_group"), _LISTED
        if use_local_synchronization:
            members = _members(job, ranks, sort_ranks)
            if job.rank not in members:
                raise DistArgumentError(
                    "new_group: with use_local_synchronization only the members may call"
                )
            # Other ranks do not count these groups, so each set of members has a counter of its
            # own.
            kind = hashlib.sha256(repr(members).encode()).hexdigest()[:12]
        _reserve(job, kind, names)

    try:
        default = world.member(None, "new_group")
        reserve()
        members = _members(default.job, ranks, sort_ranks)
        seconds = world.seconds(timeout, default.timeout)
        choices = _choices(default.job, backend, default)
        # The communicator of the default group can be split only if all its members call this.
        parent = None if use_local_synchronization else default
        return _make(
            default.job,
            names[0],
            members,
            choices,
            seconds,
            group_desc,
            pg_options,
            device_id,
            parent,
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

    names: list[str] = []

    def listed() -> list[Listed]:
        parent = world.member(group, "new_subgroups")
        given = group_size if group_size is not None else parent.job.local_size or parent.size()
        size = as_integer("new_subgroups: group_size", given)
        if not 0 < size <= parent.size() or parent.size() % size:
            raise DistArgumentError(
                f"new_subgroups: a group of {parent.size()} cannot be cut into groups of {size}"
            )
        ranks = parent.ranks
        return [
            Listed(ranks[i : i + size], backend, pg_options, group_desc)
            for i in range(0, len(ranks), size)
        ]

    try:
        return _with_own(make_listed("new_subgroups", group, listed(), names, timeout))
    except BaseException as e:
        fail_listed("new_subgroups", group, listed, names, e)
        raise


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

    what = "new_subgroups_by_enumeration"
    names: list[str] = []

    def listed() -> list[Listed]:
        if not ranks_per_subgroup_list:
            raise DistArgumentError("new_subgroups_by_enumeration: no subgroups given")
        everyone = [r for ranks in ranks_per_subgroup_list for r in ranks]
        if len(set(everyone)) != len(everyone):
            raise DistArgumentError("new_subgroups_by_enumeration: a rank is in two subgroups")
        return [Listed(ranks, backend, pg_options, group_desc) for ranks in ranks_per_subgroup_list]

    try:
        return _with_own(make_listed(what, None, listed(), names, timeout))
    except BaseException as e:
        fail_listed(what, None, listed, names, e)
        raise


def _with_own(made: list[Any]) -> tuple[Any, list[Any]]:
    """The group of this process, or None, and all of them."""
    own = [one for one in made if isinstance(one, ProcessGroup)]
    return own[-1] if own else None, made


def make_listed(
    what: str, group: Any, listed: Sequence[Listed], names: list[str], timeout: Timeout = None
) -> list[Any]:
    """Make groups, as by :func:`new_group` one after the other; the caller calls
    :func:`fail_listed` if that raises.

    Args:
        what: the function, for errors.
        group: of the job.
        names: their names are added to it, before anything can fail on this rank alone.
    """
    job = world.member(group, what).job
    default = job.default or world.member(None, what)
    # The names of all groups come first: if one of them fails in the middle, later groups still
    # have the same names on all ranks.
    _reserve(job, _LISTED, names, len(listed))
    members = [sorted(check_ranks("new_group", one.ranks, job.size)) for one in listed]
    seconds = world.seconds(timeout, default.timeout)
    made = []
    for name, ranks, one in zip(names, members, listed, strict=True):
        choices = _choices(job, one.backend, default)
        made.append(_make(job, name, ranks, choices, seconds, one.desc, one.options, None, default))
    return made


def fail_listed(
    what: str,
    group: Any,
    listed: Callable[[], Sequence[Listed]],
    names: list[str],
    cause: BaseException,
) -> None:
    """Fail the groups of :func:`make_listed`, or of its caller before it, after an exception that
    is no refusal."""

    def reserve() -> None:
        _reserve(world.member(group, what).job, _LISTED, names, len(listed()))

    _failed(names, group, reserve, cause)


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

    The parts are given by ``split_ranks``, equal on all ranks, or by each rank's own ``color`` and
    ``key``, as for MPI_Comm_split.

    Args:
        parent_pg: what to cut; None is the default group.
        split_ranks: for each part the ranks *in the parent* of its members; their positions are
            their ranks in it, as in torch from 2.14 on (earlier versions sort them).
        color: ranks that give the same number form a part; None for no part.
        key: a part's ranks are in the order of their keys, and of their ranks in the parent where
            keys are equal.
        timeout: default timeout of the parts; None takes the parent's.
        pg_options, group_desc: as for :func:`new_group`.
        backend: None takes the parent's.

    Returns:
        This process's part, or None if it is in none.

    Raises:
        DistArgumentError: no parts, an empty one, or a rank that is repeated or not in the parent;
            or both ``split_ranks`` and ``color``.
    """
    names: list[str] = []

    def reserve() -> None:
        parent = world.member(parent_pg, "split_group").base
        # By colour there is a part for each rank at most.
        parent.reserve_parts(names, len(split_ranks or ()) or parent.size())

    try:
        parent = world.member(parent_pg, "split_group").base
        parts: list[list[int]]
        if not isinstance(color, EllipsisType):
            if split_ranks is not None:
                raise DistArgumentError("split_group: give split_ranks or color, not both")
            parts = _parts_by_color(parent, color, key)
            # All ranks have the same colours, so all of them return here, and none counts this
            # split.
            if not parts:
                return None
        elif split_ranks:
            parts = [[*part] for part in split_ranks]
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
                    parent.job,
                    names[i],
                    members,
                    choices,
                    seconds,
                    group_desc,
                    pg_options,
                    None,
                    parent,
                )
                return made
        parent.leave_out(choices)
        return None
    except BaseException as e:
        _failed(names, parent_pg, reserve, e)
        # By colour the call includes a collective of the parent, whose state may be unknown, too.
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

    The members call it with their group, or :meth:`ProcessGroup.grow`; the added ranks with the
    result of ``new_group``, ``GroupMember.NON_GROUP_MEMBER``. The smaller group is unchanged;
    destroy it after use. NCCL grows the communicator where it can (2.29), else all connect anew;
    operations in flight end first.

    Args:
        ranks_to_add: global ranks to add, in the order of their ranks in the larger group.
        group: None is the default group.
        pg_options: as for :func:`new_group`.
        device_id: on added ranks, the device that the group is bound to; None takes the current
            one.
        timeout: how long added ranks wait for the members; None is the default group's timeout.

    Raises:
        DistArgumentError: no ranks, or one that is in the group already or not in the job; or the
            ranks differ.
        OperationTimeoutError, RankLostError: not all ranks joined.
        GroupAbortedError: the group has failed or was destroyed.
    """
    records: list[GrowthRecord] = []
    try:
        if isinstance(group, type(world.GroupMember.NON_GROUP_MEMBER)):
            return _join(records, ranks_to_add, pg_options, device_id, timeout)
        return resizing.grow(world.member(group, "grow_group"), records, ranks_to_add, pg_options)
    except BaseException as e:
        parent = _parent(group)
        if parent is not None:
            resizing.fail_grown(parent, records, ranks_to_add, e)
        elif leaves_doubt(e):
            # A rank that has no record yet has changed nothing, and can call this again.
            for record in records:
                record.fail(world.current("grow_group"), e)
        raise


def _join(
    records: list[GrowthRecord],
    ranks_to_add: Sequence[int],
    pg_options: Any,
    device_id: Any,
    timeout: Timeout,
) -> ProcessGroup:
    """:func:`grow_group` on an added rank; the record of the group is added to ``records``."""
    job = world.current("grow_group")
    added = check_ranks("grow_group", ranks_to_add, job.size)
    if job.rank not in added:
        raise DistArgumentError(
            f"grow_group: this rank, {job.rank}, is not in ranks_to_add={added}"
        )
    if job.fake:
        raise DistArgumentError(
            "grow_group: with backend fake a rank cannot be added to a group: there are no other"
            " processes"
        )
    GrowthRecord.receive(
        job.store, job.rank, added, world.seconds(timeout, job.default.timeout), records
    )
    record = records[0]
    same = record.backends == job.default.backend_config
    choices = job.default.choices if same else _choices(job, record.backends, job.default)
    device = job.default.bound_device_id if device_id is None else device_id
    return ProcessGroup.create(record.context(job, pg_options, device), choices, grown=True)


def shrink_group(
    ranks_to_exclude: Sequence[int],
    group: ProcessGroup | None = None,
    shrink_flags: int = 0,
    pg_options: Any = None,
) -> ProcessGroup:
    """A group of the remaining members of one; they all call this, the excluded ranks do not.

    The group may have failed, and should then be destroyed: its operations ended when it failed.
    NCCL shrinks the communicator where it can (2.27), else the remaining members connect anew.

    Args:
        ranks_to_exclude: ranks *in the group*, at least one.
        group: None is the default group, which is not replaced.
        shrink_flags: accepted because torch has it; a failed group is detected without it.
        pg_options: as for :func:`new_group`.

    Raises:
        DistArgumentError: no rank is excluded, or the caller, or a rank that is not in the group.
        OperationTimeoutError, RankLostError: not all remaining members joined.
    """
    names: list[str] = []
    try:
        return resizing.shrink(
            world.member(group, "shrink_group"), names, ranks_to_exclude, pg_options
        )
    except BaseException as e:
        parent = _parent(group)
        if parent is not None:
            resizing.fail_shrunk(parent, names, ranks_to_exclude, e)
        raise
