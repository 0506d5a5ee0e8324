"""The state of this process: the default group, the other groups, and the functions that make and end them."""

from __future__ import annotations

import os
import warnings
from typing import TYPE_CHECKING, Any

from unicoll.arrays.types import default_pg_timeout
from unicoll.errors import DistArgumentError, DistError, DistTypeError, NotInitializedError
from unicoll.group import registry
from unicoll.group.arguments import as_integer
from unicoll.group.registry import BackendName
from unicoll.net.timeouts import Timeout, positive_seconds

if TYPE_CHECKING:
    from unicoll.bootstrap.join import Membership
    from unicoll.group.process_group import ProcessGroup

_RENDEZVOUS_S = 300.0


class _NonMember:
    """The type of ``GroupMember.NON_GROUP_MEMBER``, which ``new_group`` returns to processes outside the group."""

    def __repr__(self) -> str:
        return "GroupMember.NON_GROUP_MEMBER"

    def using(self, options: Any = None, **named: Any) -> _NonMember:
        """Itself, so that code for members runs (:meth:`ProcessGroup.using`)."""
        return self


class World:
    """The state from ``init_process_group`` to ``destroy_process_group``."""

    def __init__(self, membership: Membership, default: ProcessGroup) -> None:
        self.membership = membership
        self.job = membership.job
        self.default = default
        self.function_view = default._function_view  # the group's view for public functions
        self.groups = membership.groups
        self.notes = membership.notes
        self.made = 0  # number of new_group calls so far, equal on all ranks; numbers the next group
        self.named = membership.named

    def close(self, error: BaseException | None = None) -> None:
        self.membership.close(error)


_world: World | None = None
_forked = False  # True in a forked child whose parent was in a job, until it joins one itself


class _GroupMeta(type):
    @property
    def WORLD(cls) -> ProcessGroup | None:
        """The default process group; None before init_process_group."""
        return _world.default if _world is not None else None


class GroupMember(metaclass=_GroupMeta):
    """Names for groups: ``GroupMember.WORLD`` and ``GroupMember.NON_GROUP_MEMBER``."""

    NON_GROUP_MEMBER = _NonMember()


class group(metaclass=_GroupMeta):
    """``group.WORLD``: the default process group, or None before init_process_group."""


def resolve(pg: ProcessGroup | _NonMember | None, by_function: bool = False) -> ProcessGroup | None:
    """The group of an argument; None means the default group. Returns None, with a warning, for non-members.

    Args:
        pg: the argument.
        by_function: True gives the group's view for a public function, whose caller is the call site of the one method
            that it calls.

    Raises:
        NotInitializedError: there is no default group.
    """
    if pg is None:
        if _world is None:
            raise _not_initialized()
        return _world.function_view if by_function else _world.default
    if by_function and (view := getattr(pg, "_made_function_view", None)) is not None:
        return view  # type: ignore[no-any-return]
    if isinstance(pg, _NonMember):
        warnings.warn("this process is not in the given group: the call does nothing here", stacklevel=3)
        return None
    if not hasattr(pg, "size"):  # duck typing: torch's groups over ours, and test doubles
        raise DistTypeError(f"group: expected a process group, got {pg!r}")
    if by_function and _world is not None and isinstance(pg, type(_world.default)):
        return pg._function_view
    return pg


# --- init and destroy ---------------------------------------------------------------------------------------------


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
    global _world, _forked
    if _world is not None:
        raise DistArgumentError(
            "init_process_group: the default process group exists already; call destroy_process_group first"
        )
    # Here and not at the top: most modules of unicoll, and logging, hashlib and socket, serve jobs only.
    from unicoll.bootstrap.join import join, register_exit_handler
    from unicoll.group.process_group import ProcessGroup

    rank = as_integer("init_process_group: rank", rank)
    world_size = as_integer("init_process_group: world_size", world_size)
    limit = seconds(timeout, default_pg_timeout.total_seconds())
    patience = min(limit, _RENDEZVOUS_S) if timeout is None else limit
    membership = join(backend, init_method, rank, world_size, store, limit, patience)
    job, choices = membership.job, membership.choices
    try:
        all_ranks = tuple(range(job.size))
        default = ProcessGroup.create(
            job, "world", all_ranks, choices, limit, "default_pg", pg_options, device_id
        )
        if job.control is not None:
            job.control.initialized(patience)
    except BaseException as e:
        membership.close(e)
        raise
    _world, _forked = World(membership, default), False
    register_exit_handler(_leave, _forget)
    if metrics_file := os.environ.get("UNICOLL_METRICS_FILE"):
        from unicoll.group.call_counters import start_file

        try:
            start_file(job, metrics_file)
        except BaseException:
            destroy_process_group()
            raise


def destroy_process_group(group: Any = None) -> None:
    """End a group, or with None or ``group.WORLD`` the whole job as far as this process is concerned.

    Posted operations are finished first, for a few seconds at most. Afterwards ``init_process_group`` may be called
    again. A view made by ``ProcessGroup.using`` stands for its group.

    Raises:
        NotInitializedError: there is no default group.
        DistArgumentError: the group is not one of this process.
    """
    global _world
    pg = resolve(group) if not isinstance(group, _NonMember) else None
    if pg is None:
        return
    assert _world is not None
    pg = getattr(pg, "whole", pg)
    if pg is _world.default:
        ending, _world = _world, None
        ending.close()
        return
    if pg not in _world.groups:
        raise DistArgumentError(
            f"destroy_process_group: {pg!r} is not a group of this process, or not any more"
        )
    _world.groups.remove(pg)
    pg.close()


def _leave(error: BaseException | None) -> None:
    global _world
    if _world is not None:
        ending, _world = _world, None
        ending.close(error)


def _forget() -> None:
    """A forked child is not a member of its parent's groups."""
    global _world, _forked
    _forked = _forked or _world is not None
    _world = None


def seconds(timeout: Timeout, default: float) -> float:
    """A timeout in seconds, checked; ``default`` for None."""
    given = positive_seconds(timeout)
    return default if given is None else given


def current(what: str) -> World:
    """The state of this process; NotInitializedError, naming the call ``what``, before init_process_group."""
    if _world is None:
        raise _not_initialized(f"{what}: ")
    return _world


def _not_initialized(before: str = "") -> NotInitializedError:
    forked = "; this process was forked from a rank, and is not a rank itself" if _forked else ""
    return NotInitializedError(
        f"{before}there is no default process group: call init_process_group first{forked}"
    )


def explain() -> str:
    """The choices of init_process_group with source and reason: rank, store, secret, interface, backends.

    Before init_process_group: the choices that the environment would give. One line for each; never raises.
    """
    if _world is None:
        from unicoll.bootstrap import environment_report

        return "\n".join(["not initialised", *environment_report.lines()])
    groups = [f"group {one.name!r} of {one.size()}: {one.describe()}" for one in _world.groups]
    return "\n".join([*_world.notes, *groups])


# --- queries -------------------------------------------------------------------------------------------------------


def is_available() -> bool:
    """Always True: the package can be used."""
    return True


def is_initialized() -> bool:
    """True if the default process group exists."""
    return _world is not None


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
    """Always False: there is no XCCL backend."""
    return False


def is_torchelastic_launched() -> bool:
    """True if torchrun, or a launcher that sets the same variables (ours does), started this process."""
    from unicoll.bootstrap import launchers

    return launchers.is_torchelastic_launched()


def get_default_backend_for_device(device: Any) -> str:
    """Name of the backend that serves a device (``"cpu"``, ``"cuda:0"``, a device object) by default.

    Raises:
        DistArgumentError: no backend serves it.
    """
    return registry.default_backend_for_device(device)


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
    if isinstance(group, _NonMember):
        return -1
    pg = resolve(group)
    assert pg is not None
    return pg.rank()


def get_world_size(group: Any = None) -> int:
    """Number of processes in a group (the default one); -1 if this one is not in it.

    Raises:
        NotInitializedError: before init_process_group.
    """
    if isinstance(group, _NonMember):
        return -1
    pg = resolve(group)
    assert pg is not None
    return pg.size()


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
        "get_node_local_rank: no launcher gave a local rank (LOCAL_RANK is not set); give fallback_rank"
    )


def get_pg_count() -> int:
    """Number of groups that this process is in."""
    return len(_world.groups) if _world is not None else 0


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
    """The group of an argument; DistArgumentError, naming the call ``what``, if this process is not in it."""
    if isinstance(pg, _NonMember):
        raise DistArgumentError(f"{what}: this process is not in the given group")
    found = resolve(pg)
    assert found is not None
    return found
