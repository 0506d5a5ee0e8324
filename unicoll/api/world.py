"""The default group, from init to destroy, and what is asked of it and of other groups: rank, size,
backends."""

from __future__ import annotations

import os
import warnings
from typing import TYPE_CHECKING, Any

import unicoll.group as group
from unicoll.errors import DistArgumentError, DistError, DistTypeError, NotInitializedError
from unicoll.group import backend_choice, registry
from unicoll.group.arguments import as_integer
from unicoll.group.registry import BackendName
from unicoll.process import environment
from unicoll.process.timeouts import Timeout, positive_seconds

if TYPE_CHECKING:
    from unicoll.backend.contract import Job
    from unicoll.group.process_group import ProcessGroup


class _NonMember:
    """The type of ``GroupMember.NON_GROUP_MEMBER``, which ``new_group`` returns to processes
    outside the group."""

    def __repr__(self) -> str:
        return "GroupMember.NON_GROUP_MEMBER"

    def using(self, options: Any = None, **named: Any) -> _NonMember:
        """Itself, so that code for members runs (:meth:`ProcessGroup.using`)."""
        return self


_job: Job | None = None
"""The job of the default group, from ``init_process_group`` to ``destroy_process_group``."""
_by_functions: ProcessGroup | None = None
"""The view of the default group for public functions, which each of their calls takes from here: an
attribute that is computed once takes 0.05 microseconds longer."""
_pid = 0
"""Of the process that is in the job; in a forked child, until it joins a job itself, of the parent
that was in one."""
_had_group = False
"""True once this process has had a default group."""


class _GroupMeta(type):
    @property
    def WORLD(cls) -> ProcessGroup | None:
        """The default process group; None before init_process_group."""
        return group.WORLD


class GroupMember(metaclass=_GroupMeta):
    """Names for groups: ``GroupMember.WORLD`` and ``GroupMember.NON_GROUP_MEMBER``."""

    NON_GROUP_MEMBER = _NonMember()


def resolve(pg: ProcessGroup | _NonMember | None, by_function: bool = False) -> ProcessGroup | None:
    """The group of an argument; None means the default group. Returns None, with a warning, for
    non-members.

    Args:
        pg: the argument.
        by_function: True gives the group's view for a public function, whose caller is the call
            site of the one method that it calls.

    Raises:
        NotInitializedError: there is no default group.
    """
    if pg is None:
        # The end of the job, maybe on another thread, resets the job before the view.
        if by_function and (view := _by_functions) is not None:
            return view
        if _job is None:
            raise _not_initialized()
        return _job.default  # type: ignore[no-any-return]
    # This is the usual case: a group that has the view needs no check of its type.
    if by_function and (view := getattr(pg, "by_functions", None)) is not None:
        return view  # type: ignore[no-any-return]
    if isinstance(pg, _NonMember):
        warnings.warn(
            "this process is not in the given group: the call does nothing here", stacklevel=3
        )
        return None
    # Torch's groups over unicoll's, and test doubles, are accepted: there is no common base class.
    if not hasattr(pg, "size"):
        raise DistTypeError(f"group: expected a process group, got {pg!r}")
    return pg


def interrupted(pg: Any, error: BaseException) -> None:
    """Call :meth:`ProcessGroup.interrupted` of a function's argument with ``error``, which ends the
    function.

    The group fails if its state is unknown then, and closing it does not raise ``error`` again. A
    signal's handler may raise before the call has reached the group, too: a program that catches
    that and goes on makes one call less than the other ranks. The functions have the handler in
    their bodies: a decorator would take 0.12 microseconds, a fiftieth of a small collective.
    """
    found = pg if pg is not None else _job.default if _job is not None else None
    method = getattr(found, "interrupted", None)
    if method is not None:
        method(error)


def enter(job: Job) -> None:
    """Make a job's group of all ranks the default group, until this process leaves the job.

    It may replace that of another job, which this process is still in.
    """
    global _job, _by_functions, _pid, _had_group
    # The default group is the new job's from here on, so the end of the job before must not reset
    # it.
    if _job is not None:
        _job.on_leave.remove(_forget)
    _had_group = True
    job.on_leave.append(_forget)
    # The view comes first: a call of another thread that finds the job has to find the view, too.
    _by_functions = job.default.by_functions
    _job, _pid = job, os.getpid()
    group.WORLD = job.default


def forget(job: Job) -> None:
    """There is no default group any more, if it was the one of this job; the job is not left."""
    if job is _job:
        job.on_leave.remove(_forget)
        _forget()


def _forget() -> None:
    global _job, _by_functions, _pid
    _job = _by_functions = group.WORLD = None
    # A forked child keeps its parent's pid, by which an error explains why there is no group.
    _pid = 0 if _pid == os.getpid() else _pid


def leave(error: BaseException | None = None) -> None:
    """Leave the job of the default group, if there is one; ``error`` is the exception that ends the
    process."""
    if _job is not None:
        _job.leave(error)


def replaces_lost_rank() -> bool:
    """True if the launcher has started this process in place of one that has ended, and it has had
    no group yet."""
    return not _had_group and environment.number("UNICOLL_REPLACEMENT") > 0


def seconds(timeout: Timeout, default: float) -> float:
    """A timeout in seconds, checked; ``default`` for None."""
    given = positive_seconds(timeout)
    return default if given is None else given


def current(what: str) -> Job:
    """The job of the default group; NotInitializedError, naming the call ``what``, before
    init_process_group."""
    if _job is None:
        raise _not_initialized(f"{what}: ")
    return _job


def job_of(pg: Any, what: str) -> Job:
    """The job of a group; DistArgumentError, naming the call ``what``, if it is none of this
    process's groups."""
    job: Any = getattr(pg, "job", None)
    if getattr(pg, "base", pg) not in getattr(job, "groups", ()):
        raise DistArgumentError(f"{what}: {pg!r} is not a group of this process, or not any more")
    return job  # type: ignore[no-any-return]


def _not_initialized(before: str = "") -> NotInitializedError:
    forked = _pid not in (0, os.getpid())
    note = "; this process was forked from a rank, and is not a rank itself" if forked else ""
    return NotInitializedError(
        f"{before}there is no default process group: call init_process_group first{note}"
    )


# --- queries --------------------------------------------------------------------------------------


def is_available() -> bool:
    """Always True: the package can be used."""
    return True


def is_initialized() -> bool:
    """True if the default process group exists."""
    return _job is not None


def is_backend_available(backend: str) -> bool:
    """True if a backend, by name, can be used on this machine."""
    return registry.reason_against(backend.lower()) is None


def is_gloo_available() -> bool:
    """True if the CPU backend can be used."""
    return is_backend_available("gloo")


def is_mpi_available() -> bool:
    """True if the MPI backend can be used."""
    return is_backend_available("mpi")


def is_nccl_available() -> bool:
    """True if the NCCL backend can be used."""
    return is_backend_available("nccl")


def is_ucc_available() -> bool:
    """Always False: there is no UCC backend."""
    return False


def is_xccl_available() -> bool:
    """True if the XCCL backend can be used, on arrays in host memory (docs/xccl.md)."""
    return is_backend_available("xccl")


def is_torchelastic_launched() -> bool:
    """True if torchrun, or a launcher that sets the same variables (ours does), started this
    process."""
    from unicoll.bootstrap import launchers

    return launchers.is_torchelastic_launched()


def get_default_backend_for_device(device: Any) -> str:
    """Name of the backend that serves a device (``"cpu"``, ``"cuda:0"``, a device object) by
    default.

    Raises:
        DistArgumentError: no backend serves it.
    """
    return backend_choice.default_backend_for_device(device)


def get_backend(group: Any = None) -> BackendName:
    """Name of a group's backend.

    Raises:
        NotInitializedError: before init_process_group.
        DistArgumentError: this process is not in the group.
    """
    return BackendName(member(group, "get_backend").backend_name)


def get_backend_config(group: Any = None) -> str:
    """The backend of each device type, ``"cpu:gloo,cuda:nccl"``; raises as :func:`get_backend`."""
    return member(group, "get_backend_config").backend_config


def get_rank(group: Any = None) -> int:
    """This process's rank in a group (the default one); -1 if it is not in it.

    Raises:
        NotInitializedError: before init_process_group.
    """
    return -1 if isinstance(group, _NonMember) else member(group, "get_rank").rank()


def get_world_size(group: Any = None) -> int:
    """Number of processes in a group (the default one); -1 if this one is not in it.

    Raises:
        NotInitializedError: before init_process_group.
    """
    return -1 if isinstance(group, _NonMember) else member(group, "get_world_size").size()


def get_node_local_rank(fallback_rank: int | None = None) -> int:
    """This process's rank on its host, as the launcher gave it, else ``fallback_rank``.

    Raises:
        DistError: no launcher gave it, and there is no fallback.
    """
    from unicoll.bootstrap.launchers import detect

    found = detect()
    if found is not None and found.local_rank is not None:
        return found.local_rank
    if fallback_rank is not None:
        return as_integer("get_node_local_rank: fallback_rank", fallback_rank)
    raise DistError(
        "get_node_local_rank: no launcher gave a local rank (LOCAL_RANK is not set); give"
        " fallback_rank"
    )


def get_pg_count() -> int:
    """Number of groups that this process is in."""
    return len(_job.groups) if _job is not None else 0


def get_group_rank(group: ProcessGroup, global_rank: int) -> int:
    """A global rank's rank in ``group``; DistArgumentError if it is not in it."""
    return member(group, "get_group_rank").group_rank(global_rank)


def get_global_rank(group: ProcessGroup, group_rank: int) -> int:
    """The global rank of rank ``group_rank`` of ``group``; DistArgumentError if there is none."""
    return member(group, "get_global_rank").global_rank(group_rank)


def get_process_group_ranks(group: ProcessGroup | None) -> list[int]:
    """Global ranks of a group's members (of the default group for None), in group order.

    Raises:
        NotInitializedError: before init_process_group.
        DistArgumentError: this process is not in the group.
    """
    return list(member(group, "get_process_group_ranks").ranks)


def member(pg: Any, what: str) -> ProcessGroup:
    """The group of an argument; DistArgumentError, naming the call ``what``, if this process is not
    in it."""
    if isinstance(pg, _NonMember):
        raise DistArgumentError(f"{what}: this process is not in the given group")
    found = current(what).default if pg is None else resolve(pg)
    assert found is not None
    return found
