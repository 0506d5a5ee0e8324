"""Differences between torch versions, and workarounds for process groups written in Python.

Each docstring names the limitation of torch that it works around. :data:`TESTED` has the tested versions.
"""

from __future__ import annotations

import functools
import inspect
import re
import sys
from collections.abc import Callable, Sequence
from datetime import timedelta
from types import FrameType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from unicoll.net import logs

__all__ = [
    "OLD_NAMES",
    "TESTED",
    "RequestedGroup",
    "backend_of_init",
    "dispatch_batch_isend_irecv",
    "dispatch_shutdown",
    "dispatch_monitored_barrier",
    "dispatch_splits",
    "is_awaited",
    "is_profiling",
    "skip_flight_recorder",
    "requested_group",
    "timeout_or_none",
    "warn_of_untested",
]

TESTED = ("2.6.0", "2.13.0", "2.15.0")
"""Tested versions of torch: the oldest supported one, that of most tests, and the newest."""

_log = logs.logger("torch")

OLD_NAMES: dict[str, tuple[str, ...]] = {
    "all_gather_single": ("_allgather_base",),
    "reduce_scatter_single": ("_reduce_scatter_base",),
    "all_to_all_single": ("alltoall_base",),
    "all_gather_single_coalesced": ("allgather_into_tensor_coalesced",),
    "reduce_scatter_single_coalesced": ("reduce_scatter_tensor_coalesced",),
}
"""Methods of torch's process group that have other names in older versions."""

_ZERO = timedelta(0)


def warn_of_untested(version: str) -> None:
    """Log a warning if a version of torch is older than the oldest one tested, or its minor version is newer."""
    oldest, newest = TESTED[0], TESTED[-1]
    if not _minor(oldest) <= _minor(version) <= _minor(newest):
        _log.warning(
            "unicoll.torch_plugin is tested with torch %s to %s; this is torch %s",
            oldest,
            newest,
            version,
        )


def _minor(version: str) -> tuple[int, ...]:
    """(2, 15) of ``"2.15.0+cpu"``."""
    return tuple(map(int, re.findall(r"\d+", version)[:2]))


class RequestedGroup(NamedTuple):
    """The arguments of the group that torch is creating.

    Attributes:
        backend: the full backend string, ``"cpu:unicoll-gloo,cuda:nccl"``; None if it is not accessible.
        timeout: default timeout of its operations.
        name: torch's name of the group.
        desc: its description.
        device: the device that it is bound to, or None.
        store: torch's store, or None if it has none.
        ranks: ranks of its members in the default group; empty for the default group itself.
        collective: True if all processes take part in its creation, not only its members.
    """

    backend: str | None = None
    timeout: timedelta | None = None
    name: str | None = None
    desc: str | None = None
    device: Any = None
    store: Any = None
    ranks: Sequence[int] = ()
    collective: bool = False


def requested_group() -> RequestedGroup:
    """The arguments of the group that torch is creating, read from the local variables of torch's function.

    torch passes to the factory of a backend neither the backends of the other devices, which the group of a Python
    backend replaces, nor the device; and to the factory of "mpi" only the ranks.
    """
    frame = _caller("_new_process_group_helper")
    if frame is None:
        return RequestedGroup()
    variables = frame.f_locals
    backend, store = variables.get("backend"), variables.get("store")
    return RequestedGroup(
        None if backend is None else str(backend),
        variables.get("timeout"),
        variables.get("group_name"),
        variables.get("group_desc"),
        variables.get("device_id"),
        None if type(store) is dist.Store else store,  # an empty base object, for "mpi" only
        tuple(variables.get("global_ranks_in_group", ())),
        not variables.get("pg_tag") and not _is_local(),
    )


def _is_local() -> bool:
    """True if only the members call the current ``new_group``."""
    frame = _caller("_new_group_with_tag")
    return frame is not None and bool(frame.f_locals.get("use_local_synchronization"))


def backend_of_init() -> str | None:
    """The backend string of the current ``init_process_group`` call, which torch does not pass to the rendezvous."""
    frame = _caller("init_process_group")
    backend = frame.f_locals.get("backend") if frame is not None else None
    return None if backend is None else str(backend)


def _caller(function: str) -> FrameType | None:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == function and frame.f_globals.get("__name__") == c10d.__name__:
            return frame
        frame = frame.f_back
    return None


def timeout_or_none(timeout: timedelta) -> timedelta | None:
    """A call's timeout; None for torch's default of -1 ms."""
    return timeout if timeout > _ZERO else None


_BLOCKING_P2P = frozenset(inspect.unwrap(function).__code__ for function in (c10d.send, c10d.recv))


def is_awaited() -> bool:
    """True if the caller is ``dist.send`` or ``dist.recv``, which wait for the message immediately.

    They call the same methods of the group as ``isend`` and ``irecv``; from 2.13 on, they call these functions.
    """
    frame: FrameType | None = sys._getframe(2)
    for _ in range(3):  # isend, its exception logger, send
        if frame is None or frame.f_code in _BLOCKING_P2P:
            break
        frame = frame.f_back
    else:
        return False
    return frame is not None


def is_profiling() -> bool:
    """True if a profiler is on, so that operations are recorded."""
    return torch.autograd._profiler_enabled()  # type: ignore[no-any-return]


def dispatch_monitored_barrier(cls: type[Any]) -> None:
    """Make ``dist.monitored_barrier`` accept unicoll groups: torch's accepts the backend named gloo only."""
    torchs = c10d.monitored_barrier
    if getattr(torchs, "dispatches_unicoll", False):
        return

    def monitored_barrier(group: Any = None, timeout: Any = None, wait_all_ranks: bool = False) -> None:
        pg = c10d.GroupMember.WORLD if group is None else group
        if not isinstance(pg, cls):
            torchs(group, timeout, wait_all_ranks)
            return
        pg.monitored_barrier(timeout, wait_all_ranks=wait_all_ranks)

    monitored_barrier.__doc__ = torchs.__doc__
    monitored_barrier.dispatches_unicoll = True  # type: ignore[attr-defined]
    c10d.monitored_barrier = monitored_barrier
    dist.monitored_barrier = monitored_barrier


def dispatch_batch_isend_irecv(cls: type[Any]) -> None:
    """Pass all messages of a ``dist.batch_isend_irecv`` to a unicoll group in one call.

    torch starts them one by one if the group is not of its own class (2.7 to 2.14) or has a CPU backend. Each would
    then be a separate NCCL operation that waits for the previous one.
    """
    torchs = c10d.batch_isend_irecv
    if getattr(torchs, "dispatches_unicoll", False):
        return

    @functools.wraps(torchs)
    def batch_isend_irecv(p2p_op_list: list[Any]) -> list[Any]:
        c10d._check_p2p_op_list(p2p_op_list)
        group = p2p_op_list[0].group or c10d.GroupMember.WORLD
        start: Callable[[list[Any]], list[Any]] = (
            group.batch_isend_irecv if isinstance(group, cls) else torchs
        )
        return start(p2p_op_list)

    batch_isend_irecv.dispatches_unicoll = True  # type: ignore[attr-defined]
    c10d.batch_isend_irecv = batch_isend_irecv
    dist.batch_isend_irecv = batch_isend_irecv


def dispatch_splits(cls: type[Any]) -> None:
    """Make ``new_group`` skip torch's own group splitting, which requires a C++ backend, for unicoll groups.

    torch calls the patched function on all processes; those outside the new group take part in the split there.
    """
    torchs = c10d._get_split_source
    if getattr(torchs, "dispatches_unicoll", False):
        return

    def split_source(pg: Any, *arguments: Any) -> Any:
        if not isinstance(pg, cls):
            return torchs(pg, *arguments)
        pg.skip_split()
        return None

    split_source.dispatches_unicoll = True  # type: ignore[attr-defined]
    c10d._get_split_source = split_source


def dispatch_shutdown(cls: type[Any]) -> None:
    """Shut down and abort unicoll groups in torch versions that do so for some of torch's own backends only."""
    for name, method in (("_shutdown_backend", "shutdown"), ("_abort_backend", "abort")):
        torchs = getattr(c10d, name, None)
        if torchs is not None and not getattr(torchs, "dispatches_unicoll", False):
            setattr(c10d, name, _dispatching(torchs, cls, method))


def skip_flight_recorder(cls: type[Any]) -> None:
    """Do not attach torch's flight recorder (2.15 and newer) to unicoll groups, since that raises.

    Its hooks run in the C++ dispatch to a C++ backend, and a process group in Python has neither. torch skips such
    groups itself, but recognises only those without devices.
    """
    torchs = getattr(c10d, "_maybe_attach_flight_recorder", None)
    if torchs is None or getattr(torchs, "dispatches_unicoll", False):
        return

    def attach(pg: Any, *arguments: Any, **options: Any) -> None:
        if not isinstance(pg, cls):
            torchs(pg, *arguments, **options)

    attach.dispatches_unicoll = True  # type: ignore[attr-defined]
    c10d._maybe_attach_flight_recorder = attach


def _dispatching(torchs: Callable[[Any], None], cls: type[Any], method: str) -> Callable[[Any], None]:
    def end(pg: Any) -> None:
        if isinstance(pg, cls):
            getattr(pg, method)()
        else:
            torchs(pg)

    end.dispatches_unicoll = True  # type: ignore[attr-defined]
    return end
