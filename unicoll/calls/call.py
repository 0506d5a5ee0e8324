"""One operation, as the group hands it to a backend."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from unicoll.arrays.conversion import Buffer
from unicoll.arrays.types import DType, Reduction
from unicoll.calls.ops import Op, Sizes
from unicoll.calls.options import CallOptions

INTERNAL_TAGS = range(-(1 << 63), (1 << 32) - (1 << 63))
"""Tags of the library's own messages; receives and probes with any tag do not match them."""


class Described(Protocol):
    """What a call, and what all calls of a kind have in common, can say."""

    def describe(self) -> str:
        """The call in words, for errors: ``all_reduce(float32[4], SUM)``."""


EndedCall = tuple[int, Described]
"""Sequence number and kind of a call that has ended, see :attr:`Call.ended`."""


class Call:
    """One operation as a backend gets it.

    Attributes:
        op: its row in the table.
        inputs, outputs: contiguous buffers; the same tuple for operations in place.
        reduce: the reduction, or None.
        root: rank in the group of the special rank, or -1.
        peer: for send and recv the other rank in the group; -1 receives from anyone.
        tag: for send and recv; None receives a message with any tag.
        partial: for recv, True if the message may be shorter than the array.
        envelope: of the message of a recv that is ``partial``, or of a probe: its tag, the code of
            its element type and its bytes; None before it has come.
        in_counts, out_counts: for all_to_all, elements per rank.
        even: for all_to_all_single, True if no split sizes were given.
        timeout: seconds the operation may take.
        signature: see :func:`unicoll.calls.validation.sign`.
        seq: position in the group's order (from 1), given by the backend when it accepts the call.
        site: ``file:line`` of the caller where it was recorded, else "".
        source: for a receive from anyone, the rank in the group that the message came from.
        options: from :meth:`~unicoll.group.process_group.ProcessGroup.using`, or None.
        compression: of the data between hosts: a key of :data:`unicoll.arrays.types.COMPRESSIONS`,
            or "".
        refused: on the root of a gather or scatter the reason why it refused its list, sent to the
            others; else "".
        timed: True if its duration is recorded.
        watched_as: number that the wait monitor has given it; 0 before.
        kind: the same object for all calls of the group that are alike but for the memory of their
            arrays, under which backends keep what they need for such calls; None for a call that
            the library makes within another one.
    """

    __slots__ = (
        "compression",
        "envelope",
        "even",
        "in_counts",
        "inputs",
        "kind",
        "op",
        "options",
        "out_counts",
        "outputs",
        "partial",
        "peer",
        "reduce",
        "refused",
        "root",
        "seq",
        "signature",
        "site",
        "source",
        "tag",
        "timed",
        "timeout",
        "watched_as",
    )

    presumed = False
    """True if it is not known whether it is in progress: the rank may do something else
    meanwhile."""

    def __init__(
        self,
        op: Op,
        inputs: tuple[Buffer, ...],
        outputs: tuple[Buffer, ...],
        timeout: float,
        reduce: Reduction | None = None,
        root: int = -1,
        peer: int = -1,
        tag: int | None = 0,
    ) -> None:
        self.op = op
        self.inputs = inputs
        self.outputs = outputs
        self.timeout = timeout
        self.reduce = reduce
        self.root = root
        self.peer = peer
        self.tag = tag
        self.in_counts: tuple[int, ...] | None = None
        self.out_counts: tuple[int, ...] | None = None
        self.even = False
        self.signature = 0
        self.seq = 0
        self.site = ""
        self.source = -1
        self.partial = False
        self.envelope: tuple[int, int, int] | None = None
        self.refused = ""
        self.compression = ""
        self.options: CallOptions | None = None
        self.timed = False
        self.watched_as = 0
        self.kind: Described | None = None

    @property
    def ended(self) -> EndedCall:
        """What is kept of the call when it has ended: not its arrays, unless the library made it
        within another one."""
        return self.seq, self.kind or self

    @property
    def dtype(self) -> DType | None:
        """Element type of the call's arrays; None where there are none."""
        buffers = self.inputs or self.outputs
        return buffers[0].dtype if buffers else None

    def accepts(self, code: int, size: int) -> bool:
        """True if the array of a receive takes a message of this element type (its code) and size
        in bytes."""
        buffer = self.outputs[0]
        if buffer.dtype.code != code:
            return False
        return size == buffer.nbytes or (
            self.partial and size < buffer.nbytes and not size % buffer.dtype.itemsize
        )

    def matched(self, peer: int, tag: int, code: int, size: int) -> None:
        """Set what is known of the message that a receive or probe has got."""
        self.source = peer
        if self.partial:
            self.envelope = tag, code, size

    def write_back(self) -> None:
        """Copy packed results into the users' strided arrays."""
        for buffer in self.outputs:
            if buffer.unpack is not None:
                buffer.unpack()

    def describe_with_number(self) -> str:
        """The call in words and its number; sends and receives have none."""
        return f"{self.describe()} #{self.seq}" if self.seq else self.describe()

    def describe(self) -> str:
        """The call in words, for errors: ``all_reduce(float32[4], SUM)``."""
        parts = []
        op = self.op
        if op.uneven and op.sizes is not Sizes.EXCHANGED:
            own, listed = (
                (self.inputs, self.outputs)
                if op.sizes is Sizes.GATHERED
                else (self.outputs, self.inputs)
            )
            parts.append(_describe_parts(listed or own))
        elif op.scattered and self.outputs:
            parts.append(str(self.outputs[0]))
        elif self.inputs or self.outputs:
            parts.append(str((self.inputs or self.outputs)[0]))
        if self.reduce is not None:
            parts.append(str(self.reduce))
        if self.compression:
            parts.append(f"compression={self.compression}")
        if self.root >= 0:
            parts.append(f"root={self.root}")
        if op.message:
            parts.append(f"peer={self.peer if self.peer >= 0 else 'any'}")
            parts.append(f"tag={'any' if self.tag is None else self.tag}")
        return f"{op.name}({', '.join(parts)})"


def without_arrays(call: Call) -> Call:
    """A copy for messages, which does not keep the arrays alive."""
    inputs, outputs = (
        tuple([Buffer(None, b.dtype, b.shape, None, count=b.count) for b in buffers])
        for buffers in (call.inputs, call.outputs)
    )
    copy = Call(call.op, inputs, outputs, call.timeout, call.reduce, call.root, call.peer, call.tag)
    copy.seq, copy.site, copy.kind = call.seq, call.site, call.kind
    return copy


class ProxyCall(Call):
    """An internal call made for a user's call; it has the number, call site and description of that
    call.

    Attributes:
        of: the user's call.
    """

    __slots__ = ("of",)

    def __init__(
        self,
        of: Call,
        op: Op,
        inputs: tuple[Buffer, ...],
        outputs: tuple[Buffer, ...],
        timeout: float,
        reduce: Reduction | None = None,
        root: int = -1,
    ) -> None:
        super().__init__(op, inputs, outputs, timeout, reduce, root, of.peer, of.tag)
        self.of = of
        self.partial = of.partial
        self.seq, self.site, self.refused, self.timed = of.seq, of.site, of.refused, of.timed
        self.compression = of.compression

    def describe(self) -> str:
        return self.of.describe()


class OneSidedCall(Call):
    """A put, a signal, or a wait for signals. Its one input gives the stream, and for a put the
    data.

    Attributes:
        signals: number of signals by the other rank in the group.
        window, offset: target of a put: the user's window, and elements from its start.
        handle: for a put, the backend's handle of the window.
    """

    __slots__ = ("handle", "offset", "signals", "window")

    signals: dict[int, int]
    window: Any
    offset: int
    handle: int


def _describe_parts(parts: Sequence[Buffer]) -> str:
    if len({b.shape for b in parts}) == 1:
        return str(parts[0])
    return f"{parts[0].dtype} of sizes {[b.count for b in parts]}"
