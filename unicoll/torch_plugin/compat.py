"""Differences between torch versions, and workarounds for process groups written in Python.

Each docstring names the limitation of torch that it works around. :data:`TESTED` has the tested
versions.
"""

from __future__ import annotations

import functools
import inspect
import re
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from contextvars import ContextVar
from datetime import timedelta
from types import CodeType, FrameType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from unicoll.errors import DistError
from unicoll.process import excepthook, logs
from unicoll.torch_autoload import caller

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
    """Log a warning if a version of torch is older than the oldest one tested, or its minor version
    is newer."""
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
    """The arguments of the group that torch is creating; None for those that are not accessible.

    Attributes:
        backend: the full backend string, ``"cpu:unicoll-gloo,cuda:nccl"``.
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
    """The arguments of the group that torch is creating, read from the local variables of torch's
    function.

    torch passes to the factory of a backend neither the backends of the other devices, which the
    group of a Python backend replaces, nor the device; and to the factory of "mpi" only the ranks.
    """
    frame = caller("_new_process_group_helper")
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
        # With "mpi" the store is an object of the base class, which is of no use.
        None if type(store) is dist.Store else store,
        tuple(variables.get("global_ranks_in_group", ())),
        not variables.get("pg_tag") and not _is_local(),
    )


def _is_local() -> bool:
    """True if only the members call the current ``new_group``."""
    frame = caller("_new_group_with_tag")
    return frame is not None and bool(frame.f_locals.get("use_local_synchronization"))


def timeout_or_none(timeout: timedelta) -> timedelta | None:
    """A call's timeout; None for torch's default of -1 ms."""
    return timeout if timeout > _ZERO else None


_BLOCKING_P2P = frozenset(inspect.unwrap(function).__code__ for function in (c10d.send, c10d.recv))


def is_awaited() -> bool:
    """True if the caller is ``dist.send`` or ``dist.recv``, which wait for the message immediately.

    They call the same methods of the group as ``isend`` and ``irecv``; from 2.13 on, they call
    these functions.
    """
    # Behind this function come the method of the group that calls it, the method's guard, and the
    # caller.
    frame: FrameType | None = sys._getframe(3)
    # These may be the frames of isend, its exception logger and send.
    for _ in range(3):
        if frame is None or frame.f_code in _BLOCKING_P2P:
            break
        frame = frame.f_back
    else:
        return False
    return frame is not None


def is_profiling() -> bool:
    """True if a profiler is on, so that operations are recorded."""
    return torch.autograd._profiler_enabled()  # type: ignore[no-any-return]


def compile_not(code: CodeType) -> None:
    """Have torch.compile execute a function as it is, where it is called by a compiled one.

    The functions of ``torch._dynamo`` that do this take a second to import.
    """
    dynamo: Any = torch._C._dynamo.eval_frame
    with suppress(AttributeError, TypeError):
        # Torch 2.6 has this function.
        if hasattr(dynamo, "skip_code"):
            dynamo.skip_code(code)
        else:
            skip = dynamo._FrameAction.SKIP
            dynamo.set_code_exec_strategy(code, dynamo._FrameExecStrategy(skip, skip))


def inline_not(function: Any) -> None:
    """Have torch.compile neither compile a function and what it calls nor inline it.

    Behind a graph break torch.compile compiles every function that the program calls. It refuses
    those that use a process group, whose attributes it does not know, with an internal error. The
    attribute is that of ``torch.compiler.disable``, which would import all of ``torch._dynamo``.
    """
    compile_not(function.__code__)
    function._torchdynamo_disable = True


def inline_no_methods(cls: type[Any]) -> None:
    """:func:`inline_not` for all methods and properties of a class."""
    for member in vars(cls).values():
        function = member.fget if isinstance(member, property) else member
        if inspect.isfunction(function):
            inline_not(function)


def replace(name: str, made: Callable[[Any], Any]) -> None:
    """Replace a function of torch.distributed, where this version has it, by ``made(function)``,
    once per ``made``."""
    torchs = getattr(c10d, name, None)
    makers = getattr(torchs, "dispatches_unicoll", ())
    if torchs is None or made.__qualname__ in makers:
        return
    function: Any = functools.wraps(torchs)(made(torchs))
    inline_not(function)
    function.dispatches_unicoll = (*makers, made.__qualname__)
    setattr(c10d, name, function)
    if getattr(dist, name, None) is torchs:
        setattr(dist, name, function)


def _replace_gradients(cls: type[Any]) -> None:
    """Have the gradients of gathers use reduce_scatter for groups of ``cls``, as those of NCCL do.

    torch decides by the backend's name: by others that of ``_all_gather_base`` is refused, and that
    of ``all_gather`` is an all_to_all with ``size`` times the memory.
    """
    from torch.distributed.nn import functional

    both, single = functional._AllGather, functional._AllGatherBase
    torchs_both, torchs_single = both.backward, single.backward
    if torchs_both.__module__ == __name__:
        return

    def gathered(ctx: Any, *gradients: Any) -> Any:
        if not isinstance(ctx.group or c10d.GroupMember.WORLD, cls):
            return torchs_both(ctx, *gradients)
        mine = torch.empty_like(gradients[dist.get_rank(ctx.group)])
        return None, functional._Reduce_Scatter.apply(
            dist.ReduceOp.SUM, ctx.group, mine, *gradients
        )

    def gathered_into_tensor(ctx: Any, gradient: Any) -> Any:
        if not isinstance(ctx.group or c10d.GroupMember.WORLD, cls):
            return torchs_single(ctx, gradient)
        mine = gradient.new_empty(
            gradient.shape[0] // dist.get_world_size(ctx.group), *gradient.shape[1:]
        )
        dist.reduce_scatter_tensor(mine, gradient.contiguous(), group=ctx.group)
        return None, mine, None

    both.backward, single.backward = staticmethod(gathered), staticmethod(gathered_into_tensor)


def _replace_backward() -> None:
    """Have ``backward`` raise the error of an operation itself, of which torch's C++ code (DDP's)
    raises a RuntimeError with its text."""
    torchs: Any = torch.autograd._engine_run_backward
    if torchs.__module__ == __name__:
        return

    def run(*args: Any, **options: Any) -> Any:
        try:
            return torchs(*args, **options)
        except RuntimeError as error:
            found = excepthook.origin(error)
            if found is error:
                raise
        # It is raised out here so that the RuntimeError is not its context.
        raise found

    run.__module__ = __name__
    inline_not(run)
    # torch's compiler replaces both for a while, and puts the function of the second one back.
    torch.autograd._engine_run_backward = torch.autograd.graph._engine_run_backward = run


_ended: ContextVar[list[DistError] | None] = ContextVar("_ended", default=None)
"""In a call of ``destroy_process_group``: the errors of the groups that it has shut down so far."""


def raised_by_destroy(error: DistError) -> bool:
    """True if ``destroy_process_group`` shuts a group down; it raises the error once torch has
    removed the group.

    An exception within torch's function would leave torch with a default group that cannot be used.
    """
    errors = _ended.get()
    if errors is not None:
        errors.append(error)
    return errors is not None


def _destroy(torchs: Any) -> Any:
    def destroy_process_group(group: Any = None) -> None:
        errors: list[DistError] = []
        token = _ended.set(errors)
        try:
            torchs(group)
        finally:
            _ended.reset(token)
        if errors:
            # The frames are those of the teardown.
            raise errors[0].with_traceback(None) from errors[0].__cause__

    return destroy_process_group


def dispatch(cls: type[Any]) -> None:
    """Make functions of torch.distributed, which support groups of torch's own classes only, call
    groups of ``cls``.

    * ``monitored_barrier`` accepts the backend named gloo only.
    * ``batch_isend_irecv`` starts messages one by one if the group is not of torch's own class (2.7
      to 2.14) or has a CPU backend. Each would then be a separate NCCL operation that waits for the
      previous one.
    * ``new_group`` splits groups by their C++ backends. It calls ``_get_split_source`` on all
      processes; those outside the new group take part in the split there.
    * ``destroy_process_group`` and ``abort`` end groups of some backends only, in some versions.
      The former raises what ``shutdown`` of a group raises once it has removed the groups.
    * ``_set_pg_timeout`` and ``_add_ephemeral_timeout_for_all_pgs`` set timeouts of torch's own
      classes only.
    * ``backward`` raises the errors of operations of DDP as RuntimeErrors.
    * The gradients of gathers in ``torch.distributed.nn.functional`` use reduce_scatter over NCCL
      and XCCL only.
    * torch's flight recorder (2.15 and newer) cannot be attached. Its hooks run in the C++ dispatch
      to a C++ backend, and a process group in Python has neither. torch skips such groups itself,
      but only those without devices.
    """

    def barrier(torchs: Any) -> Any:
        def monitored_barrier(
            group: Any = None, timeout: Any = None, wait_all_ranks: bool = False
        ) -> None:
            pg = c10d.GroupMember.WORLD if group is None else group
            try:
                call = (
                    pg.monitored_barrier
                    if isinstance(pg, cls)
                    else functools.partial(torchs, group)
                )
                call(timeout, wait_all_ranks=wait_all_ranks)
            except BaseException as error:
                if isinstance(pg, cls):
                    pg.interrupted(error)
                raise

        return monitored_barrier

    def batch(torchs: Any) -> Any:
        def batch_isend_irecv(p2p_op_list: list[Any]) -> list[Any]:
            c10d._check_p2p_op_list(p2p_op_list)
            group = p2p_op_list[0].group or c10d.GroupMember.WORLD
            try:
                start = group.batch_isend_irecv if isinstance(group, cls) else torchs
                return start(p2p_op_list)  # type: ignore[no-any-return]
            except BaseException as error:
                if isinstance(group, cls):
                    group.interrupted(error)
                raise

        return batch_isend_irecv

    def calling(method: Callable[[Any], Any]) -> Callable[[Any], Any]:
        return lambda torchs: (
            lambda pg, *args, **options: (
                method(pg) if isinstance(pg, cls) else torchs(pg, *args, **options)
            )
        )

    def set_timeout(torchs: Any) -> Any:
        def _set_pg_timeout(timeout: timedelta, group: Any = None) -> None:
            pg = c10d.GroupMember.WORLD if group is None else group
            if isinstance(pg, cls):
                pg._set_default_timeout(timeout)
            else:
                torchs(timeout, group)

        return _set_pg_timeout

    def extend_timeouts(torchs: Any) -> Any:
        def _add_ephemeral_timeout_for_all_pgs(timeout: timedelta) -> None:
            torchs(timeout)
            for pg in [*c10d._world.pg_map]:
                if isinstance(pg, cls):
                    pg._add_ephemeral_timeout(timeout)

        return _add_ephemeral_timeout_for_all_pgs

    replace("_set_pg_timeout", set_timeout)
    replace("_add_ephemeral_timeout_for_all_pgs", extend_timeouts)
    _replace_gradients(cls)
    _replace_backward()
    replace("monitored_barrier", barrier)
    replace("batch_isend_irecv", batch)
    replace("_get_split_source", calling(lambda pg: pg.skip_split()))
    replace("destroy_process_group", _destroy)
    replace("_shutdown_backend", calling(lambda pg: pg.shutdown()))
    replace("_abort_backend", calling(lambda pg: pg.abort()))
    replace("_maybe_attach_flight_recorder", calling(lambda pg: None))
