"""What differs between versions of torch, and what stands in the way of a process group in Python, in one place.

Everything here says what it works around. :data:`TESTED` has the versions that the tests are run with.
"""

from __future__ import annotations

import functools
import inspect
import logging
import re
import sys
from collections.abc import Callable, Sequence
from datetime import timedelta
from types import FrameType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

__all__ = [
    "OLD_NAMES",
    "TESTED",
    "Asked",
    "asked",
    "backend_of_init",
    "dispatch_batches",
    "dispatch_ends",
    "dispatch_monitored_barrier",
    "dispatch_splits",
    "is_awaited",
    "is_profiling",
    "leave_out_of_flight_recorder",
    "limit",
    "warn_of_untested",
]

TESTED = ("2.6.0", "2.13.0", "2.15.0")
"""Versions of torch that the tests are run with: the oldest supported, the one of most tests, and the newest."""

_log = logging.getLogger("unicoll")

OLD_NAMES: dict[str, tuple[str, ...]] = {
    "all_gather_single": ("_allgather_base",),
    "reduce_scatter_single": ("_reduce_scatter_base",),
    "all_to_all_single": ("alltoall_base",),
    "all_gather_single_coalesced": ("allgather_into_tensor_coalesced",),
    "reduce_scatter_single_coalesced": ("reduce_scatter_tensor_coalesced",),
}
"""Methods of torch's process group that older versions call by another name."""

_ZERO = timedelta(0)


def warn_of_untested(version: str) -> None:
    """Log a warning if a version of torch is older than the oldest one tested, or its minor version is newer."""
    oldest, newest = TESTED[0], TESTED[-1]
    if not _minor(oldest) <= _minor(version) <= _minor(newest):
        _log.warning(
            "unicoll.torch_plugin is tested with torch %s to %s, and not with this one, %s", oldest, newest, version
        )


def _minor(version: str) -> tuple[int, ...]:
    """(2, 15) of ``"2.15.0+cpu"``."""
    return tuple(map(int, re.findall(r"\d+", version)[:2]))


class Asked(NamedTuple):
    """What a group was asked to be, as far as torch tells a backend.

    Attributes:
        backend: the whole backend string, ``"cpu:unicoll-gloo,cuda:nccl"``; None where it cannot be seen.
        timeout: default timeout of its operations.
        name, desc: of the group.
        device: the device that it is bound to, or None.
        store: torch's store, or None where it has none.
        ranks: of its members, in the default group; empty for the default group itself.
        together: whether all processes make it together, those that are not in it as well.
    """

    backend: str | None = None
    timeout: timedelta | None = None
    name: str | None = None
    desc: str | None = None
    device: Any = None
    store: Any = None
    ranks: Sequence[int] = ()
    together: bool = False


def asked() -> Asked:
    """What the group that is being made was asked to be.

    torch tells the maker of a backend neither the other devices' backends, which the group of a Python backend
    replaces, nor the device; and the maker of "mpi" nothing but the ranks. So the caller's own variables are looked at.
    """
    frame = _caller("_new_process_group_helper")
    if frame is None:
        return Asked()
    there = frame.f_locals
    backend, store = there.get("backend"), there.get("store")
    return Asked(
        None if backend is None else str(backend),
        there.get("timeout"),
        there.get("group_name"),
        there.get("group_desc"),
        there.get("device_id"),
        None if type(store) is dist.Store else store,  # what torch passes for "mpi" alone
        tuple(there.get("global_ranks_in_group", ())),
        not there.get("pg_tag") and not _is_local(),
    )


def _is_local() -> bool:
    """Whether only the members call the ``new_group`` that is being called."""
    frame = _caller("_new_group_with_tag")
    return frame is not None and bool(frame.f_locals.get("use_local_synchronization"))


def backend_of_init() -> str | None:
    """The backend string of the ``init_process_group`` that is being called; its rendezvous is not told."""
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


def limit(timeout: timedelta) -> timedelta | None:
    """A call's timeout; torch says -1 ms where none was given."""
    return timeout if timeout > _ZERO else None


_WAIT_AT_ONCE = frozenset(inspect.unwrap(function).__code__ for function in (c10d.send, c10d.recv))


def is_awaited() -> bool:
    """Whether the message that is being started is that of ``dist.send`` or ``dist.recv``, which wait for it at once.

    A process group is not told: both call what ``isend`` and ``irecv`` call, from 2.13 on those themselves.
    """
    frame: FrameType | None = sys._getframe(2)
    for _ in range(3):  # isend, what logs its exceptions, send
        if frame is None or frame.f_code in _WAIT_AT_ONCE:
            break
        frame = frame.f_back
    else:
        return False
    return frame is not None


def is_profiling() -> bool:
    """Whether a profiler is on, so that operations are to be marked."""
    return torch.autograd._profiler_enabled()  # type: ignore[no-any-return]


def dispatch_monitored_barrier(ours: type[Any]) -> None:
    """Let ``dist.monitored_barrier`` take groups of ours: it refuses any backend that is not called gloo."""
    theirs = c10d.monitored_barrier
    if getattr(theirs, "knows_unicoll", False):
        return

    def monitored_barrier(group: Any = None, timeout: Any = None, wait_all_ranks: bool = False) -> None:
        pg = c10d.GroupMember.WORLD if group is None else group
        if not isinstance(pg, ours):
            theirs(group, timeout, wait_all_ranks)
            return
        pg.monitored_barrier(timeout, wait_all_ranks=wait_all_ranks)

    monitored_barrier.__doc__ = theirs.__doc__
    monitored_barrier.knows_unicoll = True  # type: ignore[attr-defined]
    c10d.monitored_barrier = monitored_barrier
    dist.monitored_barrier = monitored_barrier


def dispatch_batches(ours: type[Any]) -> None:
    """Let a group of ours have all messages of a ``dist.batch_isend_irecv`` at once.

    torch starts them one after another where the group is not of its own class (2.7 to 2.14) or its backend is one for
    the CPU. Each would then be an operation of NCCL of its own, and wait for the one before.
    """
    theirs = c10d.batch_isend_irecv
    if getattr(theirs, "knows_unicoll", False):
        return

    @functools.wraps(theirs)
    def batch_isend_irecv(p2p_op_list: list[Any]) -> list[Any]:
        c10d._check_p2p_op_list(p2p_op_list)
        group = p2p_op_list[0].group or c10d.GroupMember.WORLD
        start: Callable[[list[Any]], list[Any]] = (
            group.batch_isend_irecv if isinstance(group, ours) else theirs
        )
        return start(p2p_op_list)

    batch_isend_irecv.knows_unicoll = True  # type: ignore[attr-defined]
    c10d.batch_isend_irecv = batch_isend_irecv
    dist.batch_isend_irecv = batch_isend_irecv


def dispatch_splits(ours: type[Any]) -> None:
    """Split groups of ours for ``new_group`` without torch's help, which is for backends in C++.

    All processes ask for the group to split from, those that are not to be members, too; these do their part then.
    """
    theirs = c10d._get_split_source
    if getattr(theirs, "knows_unicoll", False):
        return

    def split_source(pg: Any, *arguments: Any) -> Any:
        if not isinstance(pg, ours):
            return theirs(pg, *arguments)
        pg.stay_out()
        return None

    split_source.knows_unicoll = True  # type: ignore[attr-defined]
    c10d._get_split_source = split_source


def dispatch_ends(ours: type[Any]) -> None:
    """Have groups of ours shut down and aborted by torch versions that do so with some backends of their own only."""
    for name, method in (("_shutdown_backend", "shutdown"), ("_abort_backend", "abort")):
        theirs = getattr(c10d, name, None)
        if theirs is not None and not getattr(theirs, "knows_unicoll", False):
            setattr(c10d, name, _ending(theirs, ours, method))


def leave_out_of_flight_recorder(ours: type[Any]) -> None:
    """Keep torch (2.15 and newer) from attaching its flight recorder to groups of ours: that raises.

    Its hooks are called where C++ dispatches an operation to a C++ backend, and a process group in Python has neither.
    torch leaves such groups out itself, but takes for one only a group that serves no device.
    """
    theirs = getattr(c10d, "_maybe_attach_flight_recorder", None)
    if theirs is None or getattr(theirs, "knows_unicoll", False):
        return

    def attach(pg: Any, *arguments: Any, **more: Any) -> None:
        if not isinstance(pg, ours):
            theirs(pg, *arguments, **more)

    attach.knows_unicoll = True  # type: ignore[attr-defined]
    c10d._maybe_attach_flight_recorder = attach


def _ending(theirs: Callable[[Any], None], ours: type[Any], method: str) -> Callable[[Any], None]:
    def end(pg: Any) -> None:
        if isinstance(pg, ours):
            getattr(pg, method)()
        else:
            theirs(pg)

    end.knows_unicoll = True  # type: ignore[attr-defined]
    return end
