"""Calls of torch.distributed's groups, of any backend, as the flight recorder and the wait monitor
have them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from time import monotonic
from types import FrameType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist

from unicoll.arrays.buffer import Buffer
from unicoll.arrays.types import ALL_DTYPES, DType, Reduction
from unicoll.calls.call import Call
from unicoll.calls.call_site import caller_frame, place_of, place_text
from unicoll.calls.flight_recorder import CallKind, failure_text
from unicoll.calls.ops import OPS, Op
from unicoll.errors import DistError
from unicoll.torch_plugin.compat import compile_not
from unicoll.torch_plugin.method_table import reduction

if TYPE_CHECKING:
    from unicoll.torch_watch.torch_groups import TorchGroup

_Tensor = torch.Tensor
_DTYPES = {getattr(torch, dtype.name): dtype for dtype in ALL_DTYPES if hasattr(torch, dtype.name)}

_NOTHING: tuple[int, ...] = ()
plain: set[type] = set()
"""Types of arguments that are not tensors; ``isinstance`` with the class of tensors takes half a
microsecond."""


class Method(NamedTuple):
    """A method of torch's process group.

    Attributes:
        op: the operation.
        inputs, outputs: positions of the arguments that are tensors, or lists of tensors.
    """

    op: Op
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


def _methods(
    op: str, inputs: tuple[int, ...], outputs: tuple[int, ...], *names: str
) -> dict[str, Method]:
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
    if kind not in plain:
        if isinstance(argument, _Tensor):
            return argument.shape, argument.dtype
        plain.add(kind)
    return argument


class TorchCall:
    """A call of a torch group in the flight recorder, where it is what a :class:`PendingEntry` is
    for unicoll's.

    It has no reference to the tensors. What the recorder needs in addition is computed when
    somebody reads it.

    Attributes:
        group: the group.
        method: torch's name of the method.
        seq: number of the collective in the group, from 1; 0 for messages, and before it has one.
        message: number of the message among those of its kind (:meth:`TorchGroup.count_message`),
            from 1; else 0.
        returned: True once torch's method has returned.
        counted: True once it is in the metrics.
        has_callbacks: True if the program has asked for the future of its work.
        created, ended: on the clock of ``time.monotonic``; ``ended`` is 0 if it has not, or is not
            known to have.
        error: text, or "".
    """

    __slots__ = (
        "_arguments",
        "_call",
        "_options",
        "_place",
        "counted",
        "created",
        "ended",
        "error",
        "group",
        "has_callbacks",
        "message",
        "method",
        "returned",
        "seq",
    )

    call = None

    def __init__(
        self,
        group: TorchGroup,
        method: str,
        arguments: Sequence[Any],
        options: Any,
        frame: FrameType,
    ) -> None:
        self.group = group
        self.method = method
        self.ended = 0.0
        self.seq = self.message = 0
        self.error = ""
        self.returned = self.has_callbacks = self.counted = False
        # Written out here for the arguments that most calls have, [tensor] and options: each call
        # of the program waits for this.
        if (
            len(arguments) == 2
            and type(first := arguments[0]) is list
            and len(first) == 1
            and type(x := first[0]) is _Tensor
            and type(arguments[1]) in plain
        ):
            self._arguments: Sequence[Any] = ((x.shape, x.dtype), arguments[1])
        else:
            self._arguments = [_described(argument) for argument in arguments]
        self._options = options and {
            name: _described(argument) for name, argument in options.items()
        }
        self._place = place_of(caller_frame(frame))
        self._call: WatchedCall | None = None
        self.created = monotonic()

    @property
    def started(self) -> float:
        """When torch got it."""
        return self.created

    @property
    def site(self) -> str:
        """The place of the caller."""
        return place_text(*self._place)

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

    def end(self, error: BaseException | None = None) -> None:
        """Mark the call as ended; only the first time, and the first error, count."""
        if error is not None and not self.error:
            self.error = failure_text(error)
        if not self.ended:
            self.ended = monotonic()
            if self.seq:
                self.group.last = self

    @property
    def watched_call(self) -> WatchedCall:
        """The call as the wait monitor and errors have it."""
        call = self._call
        if call is None:
            call = self._call = self._make_call()
        # Set in each reading: this may have been read before torch's method returned, and with it
        # the number.
        call.seq = self.seq or (0 if call.op.message else self.group.sequence)
        call.message = self.message
        return call

    def _make_call(self) -> WatchedCall:
        method, group = METHODS[self.method], self.group
        op, arguments = method.op, self._arguments
        peer, tag = -1, 0
        if op.message:
            numbers = [each for each in arguments[1:] if isinstance(each, int)]
            # A receive from any rank has a tag, but no peer.
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
        call.kind_of_call = CallKind(
            call, group.job_number, group.name, group.ranks, group.backend_name
        )
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
        message: as in :class:`TorchCall`.
    """

    __slots__ = ("kind_of_call", "message")

    kind_of_call: CallKind
    message: int


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
