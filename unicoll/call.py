"""One operation, as the group hands it to a backend."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from .buffers import Buffer
from .ops import Op, Sizes
from .options import CallOptions
from .types import DType, Reduction

__all__ = ["Call", "OneSidedCall", "ProxyCall", "calls_with"]


class Call:
    """One operation as a backend gets it.

    Attributes:
        op: its row in the table.
        inputs, outputs: contiguous buffers; the same tuple for operations in place.
        reduce: the reduction, or None.
        root: rank in the group of the special rank, or -1.
        peer: for send and recv the other rank in the group; -1 receives from anyone.
        tag: for send and recv.
        in_counts, out_counts: for all_to_all, elements per rank.
        even: for all_to_all_single, whether no split sizes were given.
        timeout: seconds the operation may take.
        signature: see :func:`unicoll.checks.sign`.
        seq: position in the group's order (from 1), given by the backend when it accepts the call.
        site: ``file:line`` of the caller where it was recorded, else "".
        source: for a receive from anyone, the rank in the group that the message came from.
        options: what :meth:`~unicoll.group.ProcessGroup.using` said for this call, or None.
        refused: on the root of a gather or scatter why it refused its list, which the others are told; else "".
        timed: whether its duration is asked for.
        carry: does the call in place of the backend, which it is given; None where the backend does it itself.
    """

    __slots__ = (
        "carry", "even", "in_counts", "inputs", "op", "options", "out_counts", "outputs", "peer", "reduce", "refused",
        "root", "seq", "signature", "site", "source", "tag", "timed", "timeout",
    )  # fmt: skip

    def __init__(
        self,
        op: Op,
        inputs: tuple[Buffer, ...],
        outputs: tuple[Buffer, ...],
        timeout: float,
        reduce: Reduction | None = None,
        root: int = -1,
        peer: int = -1,
        tag: int = 0,
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
        self.refused = ""
        self.options: CallOptions | None = None
        self.timed = False
        self.carry: Callable[[Callable[[Call], None]], None] | None = None

    @property
    def dtype(self) -> DType | None:
        """Element type of the call's arrays; None where there are none."""
        buffers = self.inputs or self.outputs
        return buffers[0].dtype if buffers else None

    def write_back(self) -> None:
        """Copy packed results into the users' strided arrays."""
        for buffer in self.outputs:
            if buffer.unpack is not None:
                buffer.unpack()

    def describe(self) -> str:
        """The call in words, for errors: ``all_reduce(float32[4], SUM)``."""
        parts = []
        op = self.op
        if op.uneven and op.sizes is not Sizes.EXCHANGED:
            own, pieces = (self.inputs, self.outputs) if op.sizes is Sizes.GATHERED else (self.outputs, self.inputs)
            parts.append(_describe_pieces(pieces or own))
        elif op.scattered and self.outputs:
            parts.append(str(self.outputs[0]))
        elif self.inputs or self.outputs:
            parts.append(str((self.inputs or self.outputs)[0]))
        if self.reduce is not None:
            parts.append(str(self.reduce))
        if self.root >= 0:
            parts.append(f"root={self.root}")
        if op.name in ("send", "recv"):
            parts.append(f"peer={self.peer if self.peer >= 0 else 'any'}, tag={self.tag}")
        return f"{op.name}({', '.join(parts)})"


def calls_with(options: CallOptions | None, timed: bool) -> Callable[..., Call]:
    """What makes calls with options; not a method, since views of one call should leave no circle behind."""

    def make(*args: Any, **more: Any) -> Call:
        call = Call(*args, **more)
        call.options = options
        call.timed = timed
        return call

    return make


class ProxyCall(Call):
    """A call that a backend is given on behalf of a user's, of whose place and words it is.

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
        self.seq, self.site, self.refused, self.timed = of.seq, of.site, of.refused, of.timed

    def describe(self) -> str:
        return self.of.describe()


class OneSidedCall(Call):
    """A put, a signal, or a wait for signals. Its one input says on which stream, and what is put.

    Attributes:
        signals: how many signals by the other rank in the group.
        window, offset: of a put, where to: what the user gave, and elements from its begin.
        handle: of a put, the backend's own name of the window.
    """

    __slots__ = ("handle", "offset", "signals", "window")

    signals: dict[int, int]
    window: Any
    offset: int
    handle: int


def _describe_pieces(pieces: Sequence[Buffer]) -> str:
    if len({b.shape for b in pieces}) == 1:
        return str(pieces[0])
    return f"{pieces[0].dtype} of sizes {[b.count for b in pieces]}"
