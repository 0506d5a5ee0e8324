"""Records the calls of torch.distributed's groups, of any backend, in the flight recorder.

The methods of torch's C++ class ``ProcessGroup`` are replaced by functions that record the call and then make it; so is
``Work.wait``. Every function of torch.distributed calls these methods, also if it was imported before. Calls that torch
makes in C++ are not seen, but they count: a call's number is torch's own.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from math import prod
from time import monotonic
from types import CodeType, FrameType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from unicoll.arrays.buffer import Buffer
from unicoll.arrays.types import DTYPES, DType, Reduction
from unicoll.backend.call import Call
from unicoll.backend.flight_recorder import CallKind, failure_text, line_of, ring, user_frame
from unicoll.backend.ops import OPS, Arity, Op, Sizes
from unicoll.errors import DistError
from unicoll.torch_plugin.method_table import reduction

_Tensor = torch.Tensor
_DTYPES = {getattr(torch, dtype.name): dtype for dtype in DTYPES if hasattr(torch, dtype.name)}

_NOTHING: tuple[int, ...] = ()
_plain: set[type] = set()
"""Types of arguments that are not tensors; ``isinstance`` with the class of tensors takes half a microsecond."""


class Method(NamedTuple):
    """A method of torch's process group.

    Attributes:
        op: the operation.
        inputs, outputs: positions of the arguments that are tensors, or lists of tensors.
    """

    op: Op
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


def _methods(op: str, inputs: tuple[int, ...], outputs: tuple[int, ...], *names: str) -> dict[str, Method]:
    return {name: Method(OPS[op], inputs, outputs) for name in names}


METHODS: dict[str, Method] = {
    **_methods("barrier", _NOTHING, _NOTHING, "barrier"),
    **_methods("broadcast", (0,), (0,), "broadcast"),
    **_methods("all_reduce", (0,), (0,), "allreduce", "allreduce_coalesced"),
    **_methods("reduce", (0,), (0,), "reduce"),
    **_methods("all_gather", (1,), (0,), "allgather", "allgather_coalesced"),
    **_methods(
        "all_gather_into_tensor",
        (1,),
        (0,),
        "_allgather_base",
        "all_gather_single",
        "allgather_into_tensor_coalesced",
        "all_gather_single_coalesced",
    ),
    **_methods("gather", (1,), (0,), "gather", "gather_single", "gather_into_tensor"),
    **_methods("scatter", (1,), (0,), "scatter"),
    **_methods("reduce_scatter", (1,), (0,), "reduce_scatter"),
    **_methods(
        "reduce_scatter_tensor",
        (1,),
        (0,),
        "_reduce_scatter_base",
        "reduce_scatter_single",
        "reduce_scatter_tensor_coalesced",
        "reduce_scatter_single_coalesced",
    ),
    **_methods("all_to_all", (1,), (0,), "alltoall"),
    **_methods("all_to_all_single", (1,), (0,), "alltoall_base", "all_to_all_single"),
    **_methods("send", (0,), _NOTHING, "send"),
    **_methods("recv", _NOTHING, (0,), "recv", "recv_anysource"),
}
"""By torch's name, the methods that are recorded, where a version of torch has them."""


def _described(argument: Any) -> Any:
    """An argument without memory: shape and element type in place of a tensor."""
    kind = type(argument)
    if kind is _Tensor:
        return argument.shape, argument.dtype
    if kind is list:
        return [(x.shape, x.dtype) if type(x) is _Tensor else _described(x) for x in argument]
    if kind not in _plain:
        if isinstance(argument, _Tensor):
            return argument.shape, argument.dtype
        _plain.add(kind)
    return argument


class TorchCall:
    """A call of a torch group in the flight recorder, where it is what a :class:`PendingEntry` is for unicoll's.

    It has no reference to the tensors. What the recorder needs in addition is computed when somebody reads it.

    Attributes:
        group: the group.
        method: torch's name of the method.
        seq: torch's number of the call in the group, from 1; 0 for messages, and before torch has it.
        created, ended: on the clock of ``time.monotonic``; ``ended`` is 0 if it has not, or is not known to have.
        error: text, or "".
    """

    __slots__ = (
        "_arguments",
        "_call",
        "_code",
        "_offset",
        "_options",
        "created",
        "ended",
        "error",
        "group",
        "method",
        "seq",
    )

    call = None

    def __init__(
        self, group: TorchGroup, method: str, arguments: Sequence[Any], options: Any, frame: FrameType
    ) -> None:
        self.group = group
        self.method = method
        self.ended = 0.0
        self.seq = 0
        self.error = ""
        # in line what most calls have: [tensor], options
        if (
            len(arguments) == 2
            and type(first := arguments[0]) is list
            and len(first) == 1
            and type(x := first[0]) is _Tensor
            and type(arguments[1]) in _plain
        ):
            self._arguments: Sequence[Any] = ((x.shape, x.dtype), arguments[1])
        else:
            self._arguments = [_described(argument) for argument in arguments]
        self._options = options and {name: _described(argument) for name, argument in options.items()}
        frame = user_frame(frame)
        self._code = frame.f_code
        self._offset = frame.f_lasti
        self._call: WatchedCall | None = None
        self.created = monotonic()

    @property
    def started(self) -> float:
        """When torch got it."""
        return self.created

    @property
    def site(self) -> str:
        """``file:line`` of the caller."""
        return f"{self._code.co_filename}:{line_of(self._code, self._offset)}"

    @property
    def kind(self) -> CallKind:
        """The call without its number and times."""
        kind = self.watched_call.kind_of_call
        kind.job = self.group.job_number
        return kind

    @property
    def is_message(self) -> bool:
        """True for sends and receives."""
        return METHODS[self.method].op.message

    @property
    def watched_call(self) -> WatchedCall:
        """The call as the wait monitor and errors have it."""
        call = self._call
        if call is None:
            call = self._call = self._make_call()
        call.seq = self.seq or (0 if call.op.message else self.group.sequence + 1)
        return call

    def _make_call(self) -> WatchedCall:
        method, group = METHODS[self.method], self.group
        op, arguments = method.op, self._arguments
        peer, tag = -1, 0
        if op.message:
            numbers = [each for each in arguments[1:] if isinstance(each, int)]
            if self.method != "recv_anysource":
                peer, *numbers = numbers or [-1]
            tag = numbers[0] if numbers else 0
        call = WatchedCall(
            op,
            tuple(_buffers(arguments, method.inputs)),
            tuple(_buffers(arguments, method.outputs)),
            group.timeout,
            self._reduction() if op.reduces else None,
            self._root() if op.rooted else -1,
            peer,
            tag,
        )
        call.site = self.site
        call.kind_of_call = CallKind(call, group.job_number, group.name, group.ranks, group.backend_name)
        return call

    def _others(self) -> Iterator[Any]:
        yield from self._arguments
        yield from (self._options or {}).values()

    def _reduction(self) -> Reduction | None:
        for argument in self._others():
            op = getattr(argument, "reduceOp", argument)
            if isinstance(op, dist.ReduceOp | dist.ReduceOp.RedOpType):
                try:
                    return reduction(op)
                except DistError:
                    return None
        return None

    def _root(self) -> int:
        roots = (getattr(argument, "rootRank", None) for argument in self._others())
        return next((root for root in roots if root is not None), -1)


class WatchedCall(Call):
    """A call of a torch group, without its tensors.

    Attributes:
        kind_of_call: what it has in common with others.
    """

    __slots__ = ("kind_of_call",)

    kind_of_call: CallKind


_COLLECTIVE = Op("collective", 0, Arity.NONE, Arity.NONE, Sizes.NONE)


class UnrecordedCall(Call):
    """A collective that torch's C++ code has started: of DistributedDataParallel, for example, or a functional one."""

    __slots__ = ()

    presumed = True

    def __init__(self, group: TorchGroup, seq: int, site: str) -> None:
        super().__init__(_COLLECTIVE, (), (), group.timeout)
        self.seq = seq
        self.site = site

    def describe(self) -> str:
        return "a collective that torch's C++ code has started"


def _buffers(arguments: Sequence[Any], positions: Sequence[int]) -> Iterator[Buffer]:
    for position in positions:
        if position < len(arguments):
            yield from _flat(arguments[position])


def _flat(described: Any) -> Iterator[Buffer]:
    if isinstance(described, list):
        for each in described:
            yield from _flat(each)
    elif isinstance(described, tuple) and len(described) == 2:
        shape, dtype = described
        yield Buffer(None, _dtype(dtype), tuple(shape), None, count=prod(shape))


def _dtype(dtype: torch.dtype) -> DType:
    """The element type; for one that unicoll does not know, one of its name and size."""
    found = _DTYPES.get(dtype)
    return found or DType(0, str(dtype).removeprefix("torch."), "u", f"V{dtype.itemsize}")


class TorchGroup:
    """A group of torch.distributed whose calls are recorded. It does not keep torch's group alive.

    Attributes:
        pg: a weak reference to torch's process group.
        name, desc, ranks: torch's name and description of it, and the global ranks of its members, in group order.
        backend_name: torch's name of its backend, or ``"gloo+nccl"`` if it has several.
        completes: True if its works may be asked on any thread whether they are completed. Those of a device's library
            ask the device, which would break the capture of a graph.
        timeout: default timeout of its calls, seconds.
        job_number: of the job in which it is watched; 0 before there is one.
        newest: the call that was made last, or None.
        last: the call that ended last, or None.
        on_error: called with a call in whose wait torch raises an error, and the error; or None.
        is_numbered: True if torch numbers its collectives.
        messages: by how much torch's number is too high: Gloo counts messages, too, of which ranks have different
            numbers.
        count: number of its recorded collectives, if torch does not number them.
    """

    def __init__(self, pg: Any, ranks: Sequence[int]) -> None:
        self.pg = weakref.ref(pg)
        self.name: str = c10d._world.pg_names.get(pg, "")
        self.desc = str(getattr(pg, "group_desc", ""))
        self.ranks = tuple(ranks)
        config = [part.partition(":") for part in c10d._world.pg_backend_config.get(pg, "").split(",")]
        self.backend_name = "+".join(dict.fromkeys(name or device for device, _, name in config))
        self.completes = all(device == "cpu" or name in ("", "gloo") for device, _, name in config)
        self.timeout = float("inf")
        self.job_number = 0
        self.newest: TorchCall | None = None
        self.last: TorchCall | None = None
        self.on_error: Callable[[TorchCall, BaseException], None] | None = None
        self.messages = 0
        self.count = 0
        self._message_step: int | None = None  # by how much a message increases torch's number
        try:
            pg._get_sequence_number_for_group()
            self.is_numbered = True
        except Exception:  # not every backend of torch numbers its calls
            self.is_numbered = False

    def count_one(self) -> int:
        """The number of a collective that torch does not number."""
        self.count += 1
        return self.count

    def _torchs_number(self) -> int:
        pg = self.pg()
        return int(pg._get_sequence_number_for_group()) if pg is not None and self.is_numbered else 0

    @property
    def sequence(self) -> int:
        """The number of the last collective that was passed to torch."""
        return self._torchs_number() - self.messages if self.is_numbered else self.count

    @contextmanager
    def messages_not_counted(self, count: int | None = None) -> Iterator[None]:
        """Within the ``with`` block messages are passed to torch: ``count`` of them, or None if that is not known."""
        before = self._torchs_number()
        try:
            yield
        finally:
            step = self._message_step
            if count is None or step is None:
                # later messages are not measured: other threads may make collectives at the same time
                step = self._torchs_number() - before
                if count is not None:
                    self._message_step = step
            self.messages += step


groups: dict[int, TorchGroup] = {}
"""The recorded groups, by the id of torch's process group."""
pending: dict[int, tuple[weakref.ref[Any], TorchCall]] = {}
"""The calls that have not been seen to end, by the id of torch's work. The work has references to the tensors."""


def find(pg: Any) -> TorchGroup | None:
    """The recorded group of a process group of torch; None if it is not one of torch.distributed's, or has one rank."""
    group = groups.get(id(pg))
    if group is None or group.pg() is not pg:
        ranks = c10d._world.pg_group_ranks.get(pg)
        if not ranks or len(ranks) < 2 or pg not in c10d._world.pg_map:
            return None
        group = groups[id(pg)] = TorchGroup(pg, sorted(ranks, key=ranks.__getitem__))
    return group


def end_completed() -> None:
    """Mark the calls as ended that torch has completed; those whose work was dropped are not tracked any more."""
    for key, (reference, call) in [*pending.items()]:
        work = reference()
        if work is None or (call.group.completes and work.is_completed()):
            if pending.get(key, (None,))[0] is reference:
                del pending[key]
            call.ended = call.ended or monotonic()
            call.group.last = call


def pending_calls(group: TorchGroup) -> list[TorchCall]:
    """The calls of a group that have not been seen to end, oldest first; of a group of a device's library only the one
    that is being made."""
    calls = {call for _, call in [*pending.values()] if call.group is group and group.completes}
    newest = group.newest
    if newest is not None and not (newest.ended or newest.seq or newest.is_message):
        calls.add(newest)  # its method has not returned
    return sorted(calls, key=lambda call: call.created)


def awaited_in(frame: FrameType) -> TorchCall | None:
    """The call that a thread waits for in its innermost frame without a limit of its own, or None."""
    if frame.f_code is _WAIT:
        variables = frame.f_locals
        if variables["limits"] or variables["options"]:
            return None
        found = pending.get(id(variables["self"]))
        return found[1] if found is not None else None
    if frame.f_code is _METHOD:
        made: TorchCall | None = frame.f_locals.get("call")
        return made
    return None


def _recorded(name: str, torchs: Any) -> Any:
    """A method of torch's process group that records its call."""
    if METHODS[name].op.message:
        torchs = _not_counted(torchs, 1)
    is_message = METHODS[name].op.message
    known = groups.get
    reference = weakref.ref

    def method(self: Any, *args: Any, **options: Any) -> Any:
        group = known(id(self))
        if group is None or group.pg() is not self:
            group = find(self)
            if group is None:
                return torchs(self, *args, **options)
        call = TorchCall(group, name, args, options, sys._getframe(1))
        ring().append(call)
        group.newest = call
        try:
            work = torchs(self, *args, **options)
        except BaseException as error:
            call.error, call.ended = failure_text(error), monotonic()
            raise
        if not is_message:
            if group.is_numbered:
                call.seq = self._get_sequence_number_for_group() - group.messages
            else:
                call.seq = group.count_one()
        if work is not None:
            pending[id(work)] = reference(work), call
        else:
            call.ended = monotonic()
        return work

    return functools.update_wrapper(method, torchs)


def _not_counted(torchs: Any, count: int | None) -> Any:
    """A method of torch's process group that sends or receives this number of messages; None if it is not known."""

    def method_of_messages(self: Any, *args: Any, **options: Any) -> Any:
        group = find(self)
        if group is None:
            return torchs(self, *args, **options)
        with group.messages_not_counted(count):
            return torchs(self, *args, **options)

    return functools.update_wrapper(method_of_messages, torchs)


_METHOD: CodeType = next(
    each for each in _recorded.__code__.co_consts if isinstance(each, CodeType) and each.co_name == "method"
)
_torchs_wait: Any = dist.Work.wait


def _wait(self: Any, *limits: Any, **options: Any) -> Any:
    """torch's ``Work.wait``."""
    try:
        result = _torchs_wait(self, *limits, **options)
    except BaseException as error:
        found = pending.pop(id(self), None)
        if found is not None and found[0]() is self:
            call = found[1]
            call.error, call.ended = failure_text(error), monotonic()
            call.group.last = call
            if call.group.on_error is not None:
                call.group.on_error(call, error)
        raise
    found = pending.pop(id(self), None)
    if found is not None and found[0]() is self:
        call = found[1]
        call.ended = monotonic()
        call.group.last = call
    return result


_WAIT: CodeType = _wait.__code__


@functools.cache
def record() -> None:
    """Record the calls of all groups from now on; once per process."""
    process_group: Any = c10d.ProcessGroup
    for name in METHODS:
        torchs = process_group.__dict__.get(name)
        if torchs is not None:
            setattr(process_group, name, _recorded(name, getattr(process_group, name)))
    process_group.monitored_barrier = _not_counted(process_group.monitored_barrier, None)
    dist.Work.wait = functools.update_wrapper(_wait, _torchs_wait)
