"""torch's process group over one of ours."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.autograd.profiler import record_function
from torch.distributed import distributed_c10d as c10d

from unicoll.errors import DistArgumentError, DistError, OperationTimeoutError
from unicoll.group import ProcessGroup
from unicoll.joining import choose
from unicoll.registry import Choice
from unicoll.types import to_seconds
from unicoll.work import Work as Handle

from .calls import ROWS, Row, one, reduction
from .compat import OLD_NAMES, asked, is_awaited, is_profiling, limit
from .members import Members
from .names import asks_for_us, spec_of
from .sparse import sparse_all_reduce
from .words import in_torchs_words, raise_monitored
from .work import DONE, Done, Keeper, Work

__all__ = ["Group"]

_set_grad_enabled: Callable[[bool], Any] = torch._C._set_grad_enabled
_LABEL = "unicoll:"
"""How operations are called in profiles: ``unicoll:all_reduce``."""
Message = tuple[bool, Any, int | None, int]
"""Whether it is sent, its tensor, the other rank in the group, and its tag."""


class Coalescing(NamedTuple):
    """What has come since ``_start_coalescing``.

    Attributes:
        works: of collectives, which have been started.
        messages: to be started together.
    """

    works: list[Work]
    messages: list[Message]


class Group(dist.ProcessGroup):  # type: ignore[misc]
    """A process group of torch.distributed whose operations are a unicoll group's; made by torch, never directly.

    All of torch.distributed's operations work on it, on tensors of the devices that its backends serve. Their errors
    are :mod:`unicoll.errors`' (RuntimeErrors, all of them).

    Args:
        members: the job that the group belongs to.
        ours: the unicoll group.
        backend: what the user called it.
        name, desc: torch's name and description of it.
        store: what torch calls the group's store.
    """

    def __init__(
        self, members: Members, ours: ProcessGroup, backend: str, name: str, desc: str, store: Any
    ) -> None:
        super().__init__(ours.rank(), ours.size())
        self._backend = backend
        self.unicoll = ours
        self.members = members
        self._names = [name, desc]
        self._store = store
        self._keeper = Keeper()
        self._coalescing: Coalescing | None = None
        self._over = False
        self._limit: timedelta | None = None  # a default timeout that was set later
        self.options = None
        self.asked_for: str | None = None  # backends, as the user named them
        if ours.bound_device_id is not None:
            self.bound_device_id = ours.bound_device_id

    # --- who it is -----------------------------------------------------------------------------------------------

    def getBackendName(self) -> str:
        """The backend as the user named it."""
        return self._backend

    def getGroupName(self) -> str:
        """torch's name of the group."""
        return self._names[0]

    def setGroupName(self, name: str) -> None:
        """Called by torch."""
        self._names[0] = name

    def getGroupDesc(self) -> str:
        """The user's description."""
        return self._names[1]

    def setGroupDesc(self, desc: str) -> None:
        """Called by torch."""
        self._names[1] = desc

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device(choice.device) for choice in self.unicoll.choices]

    def _get_backend(self, device: torch.device) -> Group:
        return self

    # torch's own answers to these ask a C++ backend, which is not there
    supports_splitting = supports_coalescing = True
    supports_time_estimate = _supports_time_estimate = False
    supports_reconfigure = supports_window = supports_abort_hooks = False

    def get_group_store(self) -> Any:
        """The store of the group."""
        return self._store

    def _get_sequence_number_for_group(self) -> int:
        return self.unicoll._host.sequence

    def _set_sequence_number_for_group(self) -> None:
        pass  # operations are numbered from 1 on all ranks

    def _has_hooks(self) -> bool:
        return False

    def _enable_collectives_timing(self) -> None:
        pass

    def set_timeout(self, timeout: timedelta) -> None:
        """Default timeout of the operations from now on."""
        self._limit = timeout

    _set_default_timeout = set_timeout

    # --- operations ----------------------------------------------------------------------------------------------

    def _started(self, handle: Handle, outputs: Sequence[Any]) -> Work:
        work = self._keeper.keep(handle, outputs)
        if self._coalescing is not None:
            self._coalescing.works.append(work)
        return work

    def monitored_barrier(
        self, timeout: timedelta | float | None = None, wait_all_ranks: bool = False
    ) -> None:
        """A barrier whose timeout names every rank that has not come; afterwards the group is of no further use."""
        seconds = to_seconds(self._limit if timeout is None else timeout)
        if seconds is None:
            seconds = self.unicoll.timeout
        if seconds <= 0:
            raise OperationTimeoutError(f"Rank {self.rank()} timed out in monitoredBarrier after {seconds} s")
        try:
            self.unicoll.monitored_barrier(seconds, wait_all_ranks)
        except DistError as error:
            raise_monitored(self.unicoll, error, seconds, wait_all_ranks)

    def send(self, tensors: Sequence[Any], peer: int, tag: int) -> Work | Done | None:
        """Send one tensor."""
        if self._coalescing is None and is_awaited() and not is_profiling():
            return self._message_at_once(self.unicoll.send, tensors, peer, tag)
        return self._message("send", (True, one(tensors), peer, tag))

    def recv(self, tensors: Sequence[Any], peer: int, tag: int) -> Work | Done | None:
        """Receive one tensor."""
        if self._coalescing is None and is_awaited() and not is_profiling():
            return self._message_at_once(self.unicoll.recv, tensors, peer, tag)
        return self._message("recv", (False, one(tensors), peer, tag))

    def recv_anysource(self, tensors: Sequence[Any], tag: int) -> Work | None:
        """Receive one tensor from anyone."""
        return self._message("recv", (False, one(tensors), None, tag))

    def batch_isend_irecv(self, ops: Sequence[Any]) -> list[Work]:
        """Start torch's ``P2POp`` records together, so that none waits for another; a work for each."""
        messages = []
        for op in ops:
            tensor = torch.view_as_real(op.tensor) if op.tensor.is_complex() else op.tensor
            messages.append((op.op is c10d.isend, tensor, op.group_peer, op.tag))
        return self._together("batch_isend_irecv", messages)

    def _message_at_once(
        self, method: Callable[..., Any], tensors: Sequence[Any], peer: int, tag: int
    ) -> Done:
        """On the caller's thread: a message that is waited for at once need not go through another."""
        try:
            method(one(tensors), peer, tag, timeout=self._limit)
        except OperationTimeoutError as error:
            raise in_torchs_words(error) from None
        return DONE

    def _message(self, name: str, message: Message) -> Work | None:
        """Start a message; None between the start and the end of coalescing, as with torch's own NCCL backend."""
        if self._coalescing is None:
            return self._together(name, [message])[0]
        self._coalescing.messages.append(message)
        return None

    def _together(self, name: str, messages: Sequence[Message]) -> list[Work]:
        if is_profiling():
            with record_function(f"{_LABEL}{name}"):
                handles = self.unicoll.batch_isend_irecv(messages, timeout=self._limit)
        else:
            handles = self.unicoll.batch_isend_irecv(messages, timeout=self._limit)
        return [self._keeper.keep(handle, [m[1]]) for handle, m in zip(handles, messages, strict=True)]

    def _start_coalescing(self, device: torch.device) -> None:
        if self._coalescing is not None:
            raise DistArgumentError("operations of this group are being coalesced already")
        self._coalescing = Coalescing([], [])

    def _end_coalescing(self, device: torch.device) -> Any:
        if self._coalescing is None:
            return DONE
        (works, messages), self._coalescing = self._coalescing, None
        works += self._together("batch_isend_irecv", messages)
        return Several(works) if works else DONE

    def gather_single(self, output: Any, input: Any, opts: Any = None) -> Any:
        """Gather every member's ``input`` into one tensor on the root; ``output`` is not used elsewhere.

        Args:
            output: contiguous, with as many elements as all inputs together.
            input: of the same shape on all members.

        Raises:
            DistArgumentError: the sizes do not fit.
        """
        opts = opts or c10d.GatherOptions()
        parts = []
        if opts.rootRank == self.rank():
            if output.numel() != self.size() * input.numel():
                raise DistArgumentError(
                    f"gather_single: output has {output.numel()} elements, expected {self.size()} * {input.numel()}"
                )
            parts = [output.detach().view(self.size(), *input.shape).unbind()]
        return self.gather(parts, [input], opts)

    gather_into_tensor = gather_single

    # --- more groups, and none any more ----------------------------------------------------------------------------

    def split_group(
        self,
        ranks: Sequence[int],
        timeout: timedelta | None = None,
        opts: Any = None,
        group_name: str | None = None,
        group_desc: str | None = None,
        device_types: Any = None,
    ) -> Group | None:
        """A group of some members, by their ranks in this one; all members call it at once, each for its own part.

        None where this process is not among them.
        """
        parent = self.unicoll
        parent.splits += 1
        if self.rank() not in ranks:
            parent.leave_out(parent.choices)
            return None
        name = group_name or f"{self._names[0]}:split:{list(ranks)}"
        desc = group_desc or f"{self._names[1]}:split"
        ours = self.members.make(
            f"{parent.name}/{parent.splits}.{min(ranks)}",  # torch's own differs between ranks of unequally many groups
            [parent.global_rank(r) for r in ranks],
            parent.choices,
            timeout,
            desc,
            opts,
            parent.bound_device_id,
            parent,
        )
        return Group(self.members, ours, self._backend, name, desc, self._store)

    def choices_for(self, spec: str | None) -> Sequence[Choice]:
        """The backends of another group of this job: this one's, unless others are asked for."""
        if (self.asked_for or "") == (spec or ""):
            return self.unicoll.choices
        return choose(self.members.membership.meeting, spec)

    def eager_connect_single_device(self, device: Any = None) -> None:
        """Nothing: connections are made when they are needed."""

    def perform_nocolor_split(self, device: Any = None) -> None:
        """Nothing: :meth:`stay_out` and :meth:`split_group` do it."""

    def stay_out(self) -> None:
        """Take part in splitting this group for the one that ``new_group`` makes, if this process is not in that."""
        group = asked()
        outside = group.together and bool(group.ranks) and self.rank() not in group.ranks
        if outside and asks_for_us(group.backend, mpi_is_ours=False):
            self.unicoll.leave_out(self.choices_for(spec_of(group.backend or "")))

    def shutdown(self) -> None:
        """Finish what was posted, within bounds, and give everything back; the last group leaves the job."""
        if not self._over:
            self._over = True
            self.members.end(self.unicoll)
            self._keeper.clear()
            self._store = None

    def abort(self) -> None:
        """Make every pending operation raise, on all members, and give everything back."""
        if not self._over:
            self.unicoll.abort()
            self.shutdown()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._names[0]!r} over {self.unicoll!r}>"


class Several(dist.Work):  # type: ignore[misc]
    """Operations that were coalesced."""

    def __init__(self, works: Sequence[Work]) -> None:
        super().__init__()
        self._works = works

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Wait for all of them."""
        for work in self._works:
            work.wait(timeout)
        return True

    def is_completed(self) -> bool:
        """Whether all have ended."""
        return all(work.is_completed() for work in self._works)


def _method(name: str, row: Row) -> Callable[..., Any]:
    """The method of torch's process group for a row of the table."""
    ours, arity, default, take, outputs = row
    label = _LABEL + ours

    def run(self: Group, *given: Any, opts: Any = None) -> Any:
        if len(given) > arity:
            opts = given[arity]
            given = given[:arity]
        elif opts is None:
            opts = default()
        recording = torch.is_grad_enabled()
        if recording:  # as with torch's backends, results may be written to what autograd knows
            _set_grad_enabled(False)
        try:
            if is_profiling():
                with record_function(label):
                    return start(self, given, opts)
            return start(self, given, opts)
        finally:
            if recording:
                _set_grad_enabled(True)

    def start(self: Group, given: tuple[Any, ...], opts: Any) -> Any:
        method = getattr(self.unicoll, ours)
        timeout = limit(opts.timeout) or self._limit
        if getattr(opts, "asyncOp", True) or self._coalescing is not None:
            handle = method(*take(opts, *given), async_op=True, timeout=timeout)
            return self._started(handle, outputs(*given))
        try:
            method(*take(opts, *given), timeout=timeout)
        except OperationTimeoutError as error:
            raise in_torchs_words(error) from None
        return DONE

    run.__name__ = name
    run.__doc__ = f"unicoll's {ours} with torch's arguments."
    return run


_dense_allreduce = _method("allreduce", ROWS["allreduce"])


def _allreduce(self: Group, tensors: Any, opts: Any = None) -> Any:
    """unicoll's all_reduce with torch's arguments; a sparse tensor's is over when this returns."""
    tensor = one(tensors)
    if tensor.layout is torch.strided:
        return _dense_allreduce(self, tensors, opts or c10d.AllreduceOptions())
    opts = opts or c10d.AllreduceOptions()
    sparse_all_reduce(self.unicoll, tensor, reduction(opts.reduceOp), limit(opts.timeout) or self._limit)
    return self._keeper.keep_done([tensor])


for _name, _row in ROWS.items():
    for _each in (_name, *OLD_NAMES.get(_name, ())):
        setattr(Group, _each, _method(_each, _row))
Group.allreduce = _allreduce
