"""Records the calls of torch.distributed's groups, of any backend, in the flight recorder.

The methods of torch's C++ class ``ProcessGroup`` are replaced by functions that record the call and then make it; so is
``Work.wait``. Every function of torch.distributed calls these methods, also if it was imported before. Calls that torch
makes in C++ are not seen, but they count: a call's number is torch's own.
"""

from __future__ import annotations

import functools
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
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
from unicoll.torch_plugin.compat import compile_not
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
    if kind is list or kind is tuple:
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
        seq: number of the collective in the group, from 1; 0 for messages, and before it has one.
        returned: True once torch's method has returned.
        has_callbacks: True if the program has asked for the future of its work.
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
        "has_callbacks",
        "method",
        "returned",
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
        self.returned = self.has_callbacks = False
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
        call.seq = self.seq or (0 if call.op.message else self.group.sequence)
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


compile_not(TorchCall.__init__.__code__)


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

    The number of a collective must be equal on all ranks. Gloo and NCCL number their collectives, also those of torch's
    C++ code. Where the number may mean something else, the recorded collectives are counted: in a group with other or
    several backends, a group that torch made before they were recorded (its messages may be in the number), and at
    torch's debug level DETAIL, whose comparison of calls comes before the number.

    Attributes:
        pg: a weak reference to torch's process group.
        name: torch's name of it, with a number if it had an earlier group of this name.
        desc: torch's description of it.
        backend_name: torch's name of its backend, or ``"gloo+nccl"`` if it has several.
        completes: True if its works may be asked on any thread whether they are completed. Those of a device's library
            ask the device, which would break the capture of a graph.
        timeout: default timeout of its calls, seconds.
        job_number: of the job in which it is watched; 0 before there is one.
        newest: the collective that was made last, or None.
        last: the collective that ended last, or None.
        on_error: called with a call in whose wait torch raises an error, and the error; or None.
        is_numbered: True if calls have torch's numbers.
        messages: by how much torch's number is too high: Gloo counts messages, too, of which ranks have different
            numbers.
        count: number of its recorded collectives, if calls do not have torch's numbers.
    """

    def __init__(self, pg: Any, name: str, desc: str, config: str, is_new: bool) -> None:
        self.pg = weakref.ref(pg)
        _names[name] += 1
        self.name = name if _names[name] == 1 else f"{name}#{_names[name]}"
        self.desc = desc
        backends = [part.partition(":") for part in config.split(",")]
        names = [backend or device for device, _, backend in backends]
        self.backend_name = "+".join(dict.fromkeys(names))
        self.completes = all(backend in ("", "gloo") for _, _, backend in backends)
        self.timeout = float("inf")
        self.job_number = 0
        self.newest: TorchCall | None = None
        self.last: TorchCall | None = None
        self.on_error: Callable[[TorchCall, BaseException], None] | None = None
        self.messages = 0
        self.count = 0
        self._ranks: tuple[int, ...] = ()
        self.is_numbered = (
            is_new
            and self.backend_name in ("gloo", "nccl")
            and dist.get_debug_level() is not dist.DebugLevel.DETAIL
        )
        self._message_step = int(self.backend_name == "gloo")
        self._counting = threading.Lock()

    @property
    def ranks(self) -> tuple[int, ...]:
        """The global ranks of its members, in group order; empty while torch makes the group."""
        if not self._ranks:
            ranks = c10d._world.pg_group_ranks.get(self.pg()) or {}
            self._ranks = tuple(sorted(ranks, key=ranks.__getitem__))
        return self._ranks

    def _torchs_number(self) -> int:
        pg = self.pg()
        return int(pg._get_sequence_number_for_group()) if pg is not None and self.is_numbered else 0

    @property
    def sequence(self) -> int:
        """The number of the last collective that was passed to torch."""
        return self._torchs_number() - self.messages if self.is_numbered else self.count

    def message(self, torchs: Callable[[], Any], is_one: bool = True) -> Any:
        """Have torch send or receive; ``is_one`` is False if it is not known how many messages."""
        before = self._torchs_number()
        step = self._message_step if is_one else None
        try:
            result = torchs()
        except BaseException:
            step = None
            raise
        finally:
            if self.is_numbered:
                # measured only where it is not known: other threads may make collectives at the same time
                step = self._torchs_number() - before if step is None else step
                with self._counting:
                    self.messages += step
        return result


_names: Counter[str] = Counter()
"""How many groups of each name torch has made beside, or after, its present default group."""
groups: dict[int, TorchGroup] = {}
"""The recorded groups, by the id of torch's process group."""
pending: dict[int, tuple[weakref.ref[Any], TorchCall]] = {}
"""The calls that have not been seen to end, by the id of torch's work. The work has references to the tensors."""
_finding = threading.Lock()


def add(pg: Any, name: str, desc: str, config: str) -> None:
    """Record the calls of a group that torch makes now; all its members do this in the same order."""
    if pg.size() > 1 and type(pg) is c10d.ProcessGroup:
        with _finding:
            if c10d.GroupMember.WORLD is None:
                _names.clear()
            groups[id(pg)] = TorchGroup(pg, name, desc, config, True)


def find(pg: Any) -> TorchGroup | None:
    """The recorded group of a process group of torch; None if it is not one of torch.distributed's, or has one rank."""
    with _finding:
        group = groups.get(id(pg))
        if group is not None and group.pg() is pg:
            return group
        if type(pg) is not c10d.ProcessGroup or pg not in c10d._world.pg_map or pg.size() < 2:
            return None
        world, desc = c10d._world, str(getattr(pg, "group_desc", ""))
        group = TorchGroup(pg, world.pg_names.get(pg, ""), desc, world.pg_backend_config.get(pg, ""), False)
        groups[id(pg)] = group
        return group


def forget_destroyed() -> None:
    """Drop the groups that torch has destroyed."""
    with _finding:
        for key, group in [*groups.items()]:
            if group.pg() is None:
                del groups[key]


def end_completed() -> None:
    """Mark the calls as ended that torch has completed; those whose work was dropped are not tracked any more."""
    for key, (reference, call) in [*pending.items()]:
        work = reference()
        if work is None or (call.group.completes and work.is_completed()):
            if pending.get(key, (None,))[0] is reference:
                del pending[key]
            _end(call)


def _end(call: TorchCall, error: str = "") -> None:
    if not call.ended:
        call.error = error
        call.ended = monotonic()
        if call.seq:
            call.group.last = call


def pending_calls(group: TorchGroup) -> list[TorchCall]:
    """The calls of a group that have not been seen to end, oldest first; of a group of a device's library only the one
    that is being made."""
    calls = {call for _, call in [*pending.values()] if call.group is group and group.completes}
    newest = group.newest
    if newest is not None and not (newest.ended or newest.returned):
        calls.add(newest)
    return sorted(calls, key=lambda call: call.created)


def awaited_in(frame: FrameType) -> TorchCall | None:
    """The call that a thread waits for in its innermost frame without a limit of its own, or None."""
    if frame.f_code is _WAIT:
        variables = frame.f_locals
        if variables["limits"] or variables["options"]:
            return None
        found = pending.get(id(variables["self"]))
        return found[1] if found is not None else None
    if frame.f_code in _METHODS:
        made: TorchCall | None = frame.f_locals.get("call")
        # without an own number it is not known which number it will have
        return made if made is not None and not made.group.is_numbered else None
    return None


_METHODS: set[CodeType] = set()
"""The code of the functions that replace torch's methods."""


def _replacing(function: Any, torchs: Any, name: str) -> Any:
    """A function that replaces torch's method ``name``. torch.compile traces neither of them.

    The code has this name, too: a method of a Python subclass is not called again for itself because pybind11 finds the
    name and the object in the calling frame.
    """
    function.__code__ = function.__code__.replace(co_name=name)
    function = functools.update_wrapper(function, torchs)
    function._torchdynamo_disable = True
    compile_not(function.__code__)
    return function


def _recorded(name: str, torchs: Any) -> Any:
    """A method of torch's process group that records its call."""
    known = groups.get
    reference = weakref.ref
    is_message = METHODS[name].op.message

    def method(self: Any, *args: Any, **options: Any) -> Any:
        group = known(id(self))
        if group is None or group.pg() is not self:
            group = find(self)
            if group is None:
                return torchs(self, *args, **options)
        try:
            call = TorchCall(group, name, args, options, sys._getframe(1))
        except Exception:  # arguments that torch will refuse, or that are not known
            return torchs(self, *args, **options)
        ring().append(call)
        if is_message:
            work = group.message(lambda: torchs(self, *args, **options))
        else:
            if not group.is_numbered:
                group.count = call.seq = group.count + 1
            group.newest = call
            try:
                work = torchs(self, *args, **options)
            except BaseException as error:
                if group.count == call.seq:
                    group.count -= 1  # torch has refused it
                call.seq = 0
                _end(call, failure_text(error))
                raise
            if group.is_numbered:
                call.seq = self._get_sequence_number_for_group() - group.messages
        call.returned = True
        if work is not None:
            pending[id(work)] = reference(work), call
        else:
            _end(call)
        return work

    replacing = _replacing(method, torchs, name)
    _METHODS.add(replacing.__code__)
    return replacing


_torchs_wait: Any = dist.Work.wait
_torchs_get_future: Any = dist.Work.get_future


def _call_of(work: Any) -> TorchCall | None:
    found = pending.get(id(work))
    return found[1] if found is not None and found[0]() is work else None


def _wait(self: Any, *limits: Any, **options: Any) -> Any:
    """torch's ``Work.wait``."""
    try:
        result = _torchs_wait(self, *limits, **options)
    except BaseException as error:
        call = _call_of(self)
        if call is not None and not limits and not options:  # with a limit it may go on
            del pending[id(self)]
            _end(call, failure_text(error))
            if call.group.on_error is not None:
                call.group.on_error(call, error)
        raise
    found = pending.pop(id(self), None)
    if found is not None and found[0]() is self:
        _end(found[1])
    return result


def _get_future(self: Any) -> Any:
    """torch's ``Work.get_future``."""
    call = _call_of(self)
    if call is not None:
        call.has_callbacks = True
    return _torchs_get_future(self)


def _monitored_barrier(torchs: Any) -> Any:
    """torch's method, which sends messages; how many depends on the rank."""

    def method(self: Any, *args: Any, **options: Any) -> Any:
        group = find(self)
        if group is None:
            return torchs(self, *args, **options)
        return group.message(lambda: torchs(self, *args, **options), is_one=False)

    return _replacing(method, torchs, "monitored_barrier")


@functools.cache
def record() -> None:
    """Record the calls of all groups from now on; once per process."""
    global _WAIT
    process_group: Any = c10d.ProcessGroup
    for name in METHODS:
        if name in process_group.__dict__:
            setattr(process_group, name, _recorded(name, getattr(process_group, name)))
    process_group.monitored_barrier = _monitored_barrier(process_group.monitored_barrier)
    dist.Work.wait = _replacing(_wait, _torchs_wait, "wait")
    dist.Work.get_future = _replacing(_get_future, _torchs_get_future, "get_future")
    _WAIT = _wait.__code__


_WAIT: CodeType = _wait.__code__
