"""torch's process group over a unicoll group."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from datetime import timedelta
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch.autograd.profiler import record_function
from torch.distributed import distributed_c10d as c10d

from unicoll.calls.error_marks import mark_changed
from unicoll.calls.work import Work as Handle
from unicoll.errors import (
    DistArgumentError,
    DistError,
    NotInitializedError,
    OperationTimeoutError,
)
from unicoll.group.backend_choice import BackendChoice
from unicoll.group.process_group import ProcessGroup
from unicoll.process.timeouts import Timeout, to_seconds
from unicoll.torch_autoload import caller
from unicoll.torch_plugin.backend_names import names_unicoll, spec_of
from unicoll.torch_plugin.compat import (
    OLD_NAMES,
    is_awaited,
    is_profiling,
    raised_by_destroy,
    requested_group,
    timeout_or_none,
)
from unicoll.torch_plugin.error_messages import adapt_for_torch, raise_monitored
from unicoll.torch_plugin.group_options import GroupOptions
from unicoll.torch_plugin.method_table import ROWS, Row, one, reduction
from unicoll.torch_plugin.sparse import sparse_all_reduce
from unicoll.torch_plugin.tensor_pool import TensorPool
from unicoll.torch_plugin.torch_job import TorchJob
from unicoll.torch_plugin.work import DONE, CompletedWork, ReleasedHandle, TorchWork, WorkRegistry

_set_grad_enabled: Callable[[bool], Any] = torch._C._set_grad_enabled
_LABEL = "unicoll:"
"""Prefix of operation names in profiles: ``unicoll:all_reduce``."""
Message = tuple[bool, Any, int | None, int]
"""(True for a send, tensor, peer's rank in the group or None for any, tag)."""


Method = TypeVar("Method", bound=Callable[..., Any])


def _guarded(method: Method) -> Method:
    """A method of torch's process group that fails the group if an exception ends it that is not
    the library's.

    unicoll's own methods do that, too, but a signal's handler may raise before or after them.
    """

    @functools.wraps(method)
    def call(self: TorchProcessGroup, *args: Any, **options: Any) -> Any:
        try:
            return method(self, *args, **options)
        except BaseException as error:
            self.interrupted(error)
            raise

    guarded: Any = call
    # ProcessGroup.interrupted reads the name of the call from this code object.
    guarded.__code__ = guarded.__code__.replace(co_name=method.__name__)
    return guarded  # type: ignore[no-any-return]


class Coalescing(NamedTuple):
    """Operations since ``_start_coalescing``: collectives, already started, and messages to be
    started together."""

    works: list[TorchWork]
    messages: list[Message]


class Members:
    """The members of a process group, as this rank is one of them.

    Attributes:
        job: the job that they have joined.
        group: the unicoll group.
        works: the works of its calls.
        coalescing: the operations that are collected at present; None if none are.
        pool: tensors in symmetric memory.
        tagless: the device types whose backend ignores tags.
    """

    def __init__(self, job: TorchJob, group: ProcessGroup) -> None:
        self.job = job
        self.group = group
        self.works = WorkRegistry(group)
        self.coalescing: Coalescing | None = None
        self.pool = TensorPool(group)
        self.tagless = {c.device for c in group.choices if not (c.staged or c.cls.caps.tags)}


class TorchProcessGroup(dist.ProcessGroup):  # type: ignore[misc]
    """A process group of torch.distributed that runs its operations on a unicoll group. torch
    creates it.

    All operations of torch.distributed are supported, on tensors of the devices that the group's
    backends serve. They raise the errors of :mod:`unicoll.errors`, which are all RuntimeErrors.

    Args:
        members: None for a :class:`ReconfigurableGroup` that has none yet, of which ``rank`` and
            ``size`` are torch's arguments.

    Attributes:
        backend_spec: unicoll's specification of the requested backends; None for the default.
    """

    def __init__(
        self,
        members: Members | None,
        backend: str,
        name: str,
        desc: str,
        store: Any,
        rank: int = -1,
        size: int = -1,
    ) -> None:
        if members is not None:
            rank, size = members.group.rank(), members.group.size()
        super().__init__(rank, size)
        self._members: Members | None = None
        self._backend = backend
        self._names = [name, desc]
        self._store = store
        self._closed = False
        # It is None until set_timeout is called.
        self._default_timeout: timedelta | None = None
        self._extension = self._new_extension = timedelta(0)
        self.backend_spec: str | None = None
        if members is not None:
            self._set_members(members)

    def _set_members(self, members: Members) -> None:
        group = members.group
        self._members = members
        group.wrapper = self
        # Groups of unicoll also accept other types.
        if isinstance(group.bound_device_id, torch.device):
            self.bound_device_id = group.bound_device_id

    @property
    def members(self) -> Members:
        """The members; NotInitializedError if there are none."""
        members = self._members
        if members is None:
            raise NotInitializedError("this process group has no members: call reconfigure first")
        return members

    @property
    def unicoll(self) -> ProcessGroup:
        """The unicoll group; NotInitializedError if there are no members."""
        members = self._members
        return members.group if members is not None else self.members.group

    @property
    def job(self) -> TorchJob:
        """The job of the members; NotInitializedError if there are none."""
        return self.members.job

    # --- properties -------------------------------------------------------------------------------

    def getBackendName(self) -> str:
        # Not the name that get_backend() keeps for a replaced backend: DDP takes a group with the
        # name "gloo" or "nccl" for torch's own and fails.
        return self._backend

    def getGroupName(self) -> str:
        return self._names[0]

    def setGroupName(self, name: str) -> None:
        self._names[0] = name

    def getGroupDesc(self) -> str:
        return self._names[1]

    def setGroupDesc(self, desc: str) -> None:
        self._names[1] = desc

    @property
    # Functions for objects read this first, so their first call of the group begins here.
    @_guarded
    def _device_types(self) -> list[torch.device]:
        return [torch.device(choice.device) for choice in self.unicoll.choices]

    def _get_backend(self, device: torch.device) -> TorchProcessGroup:
        return self

    # Torch's implementations query a C++ backend, which this group does not have.
    supports_splitting = supports_coalescing = True
    supports_time_estimate = _supports_time_estimate = False
    supports_reconfigure = supports_window = supports_abort_hooks = False

    def get_group_store(self) -> Any:
        return self._store

    def _get_sequence_number_for_group(self) -> int:
        return self.unicoll.sequence

    def _set_sequence_number_for_group(self) -> None:
        # Operations are numbered from 1 on all ranks.
        pass

    def _has_hooks(self) -> bool:
        return False

    def _enable_collectives_timing(self) -> None:
        pass

    @property
    def options(self) -> GroupOptions:
        return GroupOptions(self)

    def set_timeout(self, timeout: timedelta) -> None:
        self._default_timeout = timeout

    _set_default_timeout = set_timeout

    def _add_ephemeral_timeout(self, timeout: timedelta) -> None:
        """Extend the default timeout, until the first collective from now on has ended."""
        self._extension += timeout
        self._new_extension += timeout

    @property
    def _timeout(self) -> timedelta | None:
        """The default timeout of operations; None for that of the unicoll group."""
        return self.timeout if self._extension else self._default_timeout

    @property
    def timeout(self) -> timedelta:
        """The time limit of an operation that is called without one."""
        return (self._default_timeout or timedelta(seconds=self.unicoll.timeout)) + self._extension

    def _take_extension(self) -> Callable[[], None] | None:
        """What to call at the end of the collective that is about to start; None if it does not end
        an extension."""
        mine, self._new_extension = self._new_extension, timedelta(0)

        def end() -> None:
            self._extension -= mine

        return end if mine else None

    # --- memory -----------------------------------------------------------------------------------

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        """True for a CPU: :meth:`allocate_tensor` gives tensors in symmetric memory."""
        kind: str = torch.device(device).type
        return kind == "cpu"

    @_guarded
    def allocate_tensor(
        self, size: int, *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """An uninitialized tensor of ``size`` elements in symmetric memory of the CPU; all members
        call this."""
        if not self.supports_tensor_alloc(device):
            raise DistArgumentError(
                f"allocate_tensor: there is no symmetric memory on {device}, only on a CPU"
            )
        return self.members.pool.allocate(size, dtype)

    # --- operations -------------------------------------------------------------------------------

    def interrupted(self, error: BaseException) -> None:
        """Fail the group on all members if ``error``, which ends a method, leaves its state
        unknown."""
        if self._members is not None:
            self._members.group.interrupted(error)

    def _register(self, handle: Handle, outputs: Sequence[Any]) -> TorchWork:
        work = self.members.works.add(handle, outputs)
        if self.members.coalescing is not None:
            self.members.coalescing.works.append(work)
        return work

    @_guarded
    def monitored_barrier(self, timeout: Timeout = None, wait_all_ranks: bool = False) -> None:
        """A barrier whose timeout error names the missing ranks; the group is unusable after it."""
        seconds = to_seconds(self._timeout if timeout is None else timeout)
        if seconds is None:
            seconds = self.unicoll.timeout
        if seconds <= 0:
            raise OperationTimeoutError(
                f"Rank {self.rank()} timed out in monitoredBarrier after {seconds} s"
            )
        try:
            self.unicoll.monitored_barrier(seconds, wait_all_ranks)
        except DistError as error:
            raise_monitored(self.unicoll, error, seconds, wait_all_ranks)

    @_guarded
    def send(self, tensors: Sequence[Any], peer: int, tag: int) -> TorchWork | CompletedWork | None:
        # A blocking message cannot be deferred, and profiles show only those of _start_messages.
        if self.members.coalescing is None and is_awaited() and not is_profiling():
            return self._blocking_message(self.unicoll.send, tensors, peer, tag)
        return self._message("send", (True, one(tensors), peer, tag))

    @_guarded
    def recv(self, tensors: Sequence[Any], peer: int, tag: int) -> TorchWork | CompletedWork | None:
        if self.members.coalescing is None and is_awaited() and not is_profiling():
            return self._blocking_message(self.unicoll.recv, tensors, peer, tag)
        return self._message("recv", (False, one(tensors), peer, tag))

    @_guarded
    def recv_anysource(self, tensors: Sequence[Any], tag: int) -> TorchWork | None:
        return self._message("recv", (False, one(tensors), None, tag))

    @_guarded
    def batch_isend_irecv(self, ops: Sequence[Any]) -> list[TorchWork]:
        """Start torch's ``P2POp`` operations together, so that none waits for another; returns one
        work each."""
        messages = []
        for op in ops:
            tensor = torch.view_as_real(op.tensor) if op.tensor.is_complex() else op.tensor
            messages.append((op.op is c10d.isend, tensor, op.group_peer, op.tag))
        return self._start_messages("batch_isend_irecv", messages)

    def _blocking_message(
        self, method: Callable[..., Any], tensors: Sequence[Any], peer: int, tag: int
    ) -> CompletedWork:
        """Send or receive on the calling thread, which avoids the switch to the group's thread."""
        tensor = one(tensors)
        try:
            method(tensor, peer, self._tag(tensor, tag), timeout=self._timeout)
        except DistError as error:
            adapt_for_torch(error)
            raise error
        except BaseException as error:
            # Torch's recv_object_list may have received the sizes before.
            if caller("recv_object_list") is not None:
                mark_changed(error)
            raise
        return DONE

    def _tag(self, tensor: Any, tag: int) -> int:
        """The tag of a message: 0 over NCCL, where torch ignores tags."""
        return 0 if tag and tensor.device.type in self.members.tagless else tag

    def _message(self, name: str, message: Message) -> TorchWork | None:
        """Start a message. While coalescing, it is deferred and the result is None, as with torch's
        NCCL backend."""
        if self.members.coalescing is None:
            return self._start_messages(name, [message])[0]
        self.members.coalescing.messages.append(message)
        return None

    def _start_messages(self, name: str, messages: Sequence[Message]) -> list[TorchWork]:
        with record_function(f"{_LABEL}{name}") if is_profiling() else nullcontext():
            if self.members.tagless:
                messages = [(sends, x, peer, self._tag(x, tag)) for sends, x, peer, tag in messages]
            try:
                handles = self.unicoll.batch_isend_irecv(messages, timeout=self._timeout)
            except DistError as error:
                adapt_for_torch(error)
                raise error
        return [
            self.members.works.add(handle, [m[1]])
            for handle, m in zip(handles, messages, strict=True)
        ]

    @_guarded
    def _start_coalescing(self, device: torch.device) -> None:
        if self.members.coalescing is not None:
            raise DistArgumentError("this group is already coalescing operations")
        self.members.coalescing = Coalescing([], [])

    @_guarded
    def _end_coalescing(self, device: torch.device) -> Any:
        if self.members.coalescing is None:
            return DONE
        # The state is reset first: if a message is refused, the group does not go on coalescing.
        (works, messages), self.members.coalescing = self.members.coalescing, None
        works += self._start_messages("batch_isend_irecv", messages)
        return CoalescedWork(works) if works else DONE

    @_guarded
    def gather_single(self, output: Any, input: Any, opts: Any = None) -> Any:
        """Gather every rank's ``input`` into one contiguous tensor of ``size * input.numel()``
        elements on the root.

        ``output`` is ignored on other ranks; the root is rank 0 if ``opts`` is omitted.
        """
        opts = opts or c10d.GatherOptions()
        parts = []
        if opts.rootRank == self.rank():
            if output.numel() != self.size() * input.numel():
                raise DistArgumentError(
                    f"gather_single: output has {output.numel()} elements, expected {self.size()} *"
                    f" {input.numel()}"
                )
            parts = [output.detach().view(self.size(), *input.shape).unbind()]
        return self.gather(parts, [input], opts)

    gather_into_tensor = gather_single

    # --- split and shutdown -----------------------------------------------------------------------

    @_guarded
    def split_group(
        self,
        ranks: Sequence[int],
        timeout: timedelta | None = None,
        opts: Any = None,
        group_name: str | None = None,
        group_desc: str | None = None,
        device_types: Any = None,
    ) -> TorchProcessGroup | None:
        """Split off a new group. All ranks of this group call it; different new groups may be made
        at once.

        ``ranks`` are ranks in this group of the new group that this process belongs to; None is
        returned if it is not among them. ``device_types`` is ignored: the new group serves the
        devices of this group.
        """
        parent = self.unicoll
        # All members count the split, also those that return below, since the number is in later
        # names.
        number = parent.next_child()
        if self.rank() not in ranks:
            parent.leave_out(parent.choices)
            return None
        name = group_name or f"{self._names[0]}:split:{list(ranks)}"
        desc = group_desc or f"{self._names[1]}:split"
        group = self.job.make(
            # Torch's name would differ between ranks that are in different numbers of groups.
            f"{parent.name}/{number}.{min(ranks)}",
            [parent.global_rank(r) for r in ranks],
            parent.choices,
            timeout,
            desc,
            opts,
            parent.bound_device_id,
            parent,
        )
        members = Members(self.job, group)
        return TorchProcessGroup(members, self._backend, name, desc, self._store)

    def choices_for(self, spec: str | None) -> Sequence[BackendChoice]:
        """The backends of a new group of this job: those of this group if ``spec`` is the same,
        else chosen anew."""
        if (self.backend_spec or "") == (spec or ""):
            return self.unicoll.choices
        choices: Sequence[BackendChoice] = self.job.joined.rendezvous.found.choose(spec)
        return choices

    def eager_connect_single_device(self, device: Any = None) -> None:
        """Does nothing: connections are made on first use."""

    def perform_nocolor_split(self, device: Any = None) -> None:
        """Does nothing: see :meth:`skip_split` and :meth:`split_group`."""

    @_guarded
    def skip_split(self) -> None:
        """Take part in the split for the current ``new_group`` call if this process is not in the
        new group."""
        group = requested_group()
        outside = group.collective and bool(group.ranks) and self.rank() not in group.ranks
        if outside and names_unicoll(group.backend, include_mpi=False):
            self.unicoll.leave_out(self.choices_for(spec_of(group.backend or "")))

    def shutdown(self) -> None:
        """Complete started operations, up to a time limit, and release all resources.

        The default group leaves the job, and closes all other groups in it; without it the last
        group does.

        Raises:
            DistError: the error with which operations have ended, if no call has raised it; torch's
                ``destroy_process_group`` raises it when the groups are removed.
        """
        if not self._closed:
            # Closing the unicoll group calls close() of this one, which must find it closed.
            self._closed = True
            try:
                self._release()
            except DistError as error:
                if not raised_by_destroy(error):
                    raise
            finally:
                self.unicoll.wrapper = None
                self.members.works.clear()
                self._store = None

    def _release(self) -> None:
        self.job.remove(self.unicoll)

    def close(self) -> None:
        """Called when the unicoll group is closed: destroys this group, and if it is torch's
        default, all others.

        Not at the interpreter's end, where torch keeps its groups.
        """
        if self._closed or self.unicoll.job.exiting:
            return
        if self in c10d._world.pg_map:
            dist.destroy_process_group(self)
        else:
            # It is a part that torch has not registered, or torch has failed while it made the
            # group.
            self.shutdown()

    def abort(self) -> None:
        """Make all pending operations raise, on all ranks, and release all resources."""
        if not self._closed:
            self.unicoll.abort()
            self.shutdown()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._names[0]!r} over {self.unicoll!r}>"


class CoalescedWork(dist.Work):  # type: ignore[misc]
    """The work of coalesced operations."""

    def __init__(self, works: Sequence[TorchWork]) -> None:
        super().__init__()
        self._works = works

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        for work in self._works:
            work.wait(timeout)
        return True

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)


def _method(name: str, row: Row) -> Callable[..., Any]:
    """The method of torch's process group for a row of the table."""
    unicoll_method, default, convert, outputs = row
    arity = row.arity
    label = _LABEL + unicoll_method

    def run(self: TorchProcessGroup, *arguments: Any, opts: Any = None) -> Any:
        try:
            if len(arguments) > arity:
                opts = arguments[arity]
                arguments = arguments[:arity]
            elif opts is None:
                opts = default()
            grad_enabled = torch.is_grad_enabled()
            try:
                # As with torch's backends, outputs may be tensors that require grad.
                if grad_enabled:
                    _set_grad_enabled(False)
                if is_profiling():
                    with record_function(label):
                        return start(self, arguments, opts)
                return start(self, arguments, opts)
            finally:
                if grad_enabled:
                    _set_grad_enabled(True)
        except DistError as error:
            adapt_for_torch(error)
            raise error
        except BaseException as error:
            self.interrupted(error)
            raise

    def start(self: TorchProcessGroup, arguments: tuple[Any, ...], opts: Any) -> Any:
        members = self.members
        method = getattr(members.group, unicoll_method)
        timeout = timeout_or_none(opts.timeout) or self._timeout
        ended = self._take_extension() if self._new_extension else None
        if getattr(opts, "asyncOp", True) or members.coalescing is not None:
            handle = method(*convert(opts, *arguments), async_op=True, timeout=timeout)
            if ended is not None:
                handle.add_done_callback(ended)
            return self._register(handle, outputs(*arguments))
        method(*convert(opts, *arguments), timeout=timeout)
        if ended is not None:
            ended()
        return DONE

    run.__name__ = name
    run.__code__ = run.__code__.replace(co_name=name)
    run.__doc__ = f"unicoll's {unicoll_method} with torch's arguments."
    return run


_dense_allreduce = _method("allreduce", ROWS["allreduce"])


def _allreduce(self: TorchProcessGroup, tensors: Any, opts: Any = None) -> Any:
    """unicoll's all_reduce with torch's arguments; that of a sparse tensor is complete on
    return."""
    try:
        tensor, opts = one(tensors), opts or c10d.AllreduceOptions()
        if tensor.layout is torch.strided:
            return _dense_allreduce(self, tensors, opts)
        timeout = timeout_or_none(opts.timeout) or self._timeout
        sparse_all_reduce(self.unicoll, tensor, reduction(opts.reduceOp), timeout)
        return self.members.works.add(ReleasedHandle(), [tensor])
    except DistError as error:
        adapt_for_torch(error)
        raise error
    except BaseException as error:
        self.interrupted(error)
        raise


for _name, _row in ROWS.items():
    for _each in (_name, *OLD_NAMES.get(_name, ())):
        setattr(TorchProcessGroup, _each, _method(_each, _row))
TorchProcessGroup.allreduce = _allreduce
