"""The backend ``fake``: calls are checked, numbered and counted, and return at once; nothing is
exchanged.

For dry runs: one process runs the program of any rank of a world of any size. torch.distributed has
a backend of this name and purpose. A call leaves what it would if every other rank had passed the
same arrays as this one:

==================================================  ================================================
operations                                          outputs of arrays in host memory
==================================================  ================================================
reductions (``all_reduce``, root's ``reduce``)      the reduction of n equal arrays: SUM n times the
                                                    input, AVG, MIN and MAX the input
prefix reductions (``scan``, ``exscan``)            the reduction of rank + 1, of rank equal arrays
reductions of parts (``reduce_scatter``)            the reduction of n times the own part
gathers (``all_gather``, ``gather`` on the root)    n copies of the input
``scatter`` on the root                             the own entry of the list
exchanges (``all_to_all``)                          n copies of what the input has for this rank
all else (``broadcast``, ``recv``)                  unchanged
==================================================  ================================================

n is the size of the group. Of an output that is larger than what is copied the rest is unchanged;
of a smaller one, the copy is cut. A receive from any rank comes from the next one. Arrays on a
device are never written.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from unicoll.arrays.kernels import Flat, kernel_for
from unicoll.arrays.types import ReduceOp
from unicoll.backend.contract import Backend, Caps, Context, Job
from unicoll.backend.group_state import GroupState
from unicoll.backend.host.coalescing import merge_all_reduces
from unicoll.calls.call import Call
from unicoll.calls.flight_recorder import CallKind
from unicoll.calls.ops import OPS, Sizes
from unicoll.calls.work import HostCompletion
from unicoll.errors import DistArgumentError

if TYPE_CHECKING:
    from unicoll.calls.work import Completion

_RECV = OPS["recv"]
_counts: dict[Any, tuple[CallKind, int]] = {}
_lock = threading.Lock()


def counts() -> list[tuple[CallKind, int]]:
    """What was called how often since the last ``init_process_group("fake")``, whatever the flight
    recorder keeps.

    Calls count as equal if group, operation, arrays, reduction, compression and root are.
    """
    with _lock:
        return list(_counts.values())


def backend_class() -> type[FakeBackend]:
    """The class, for the registry."""
    return FakeBackend


class FakeBackend(Backend):
    """The backend of one group."""

    name: ClassVar[str] = "fake"
    caps: ClassVar[Caps] = Caps(frozenset({"cpu", "cuda"}), frozenset(OPS), compresses=True)
    compares: ClassVar[bool] = True
    fake: ClassVar[bool] = True

    def __init__(self, context: Context) -> None:
        self._context = context
        self._state = GroupState(context)
        self._sequence = 0

    @classmethod
    def prepare(cls, job: Job) -> None:
        with _lock:
            _counts.clear()

    def post(self, calls: Sequence[Call], stream: Any = None) -> Completion:
        """Do the calls; they have ended when this returns."""
        batch = tuple(calls)
        completion = HostCompletion(batch)
        completion.begin()
        error: BaseException | None = None
        try:
            self._state.check()
            # Calls are merged as HostBackend.post() does it, so that they get the numbers that they
            # would have there.
            for call in batch if batch[0].op.message else merge_all_reduces(batch):
                self._number(call)
                if not call.refused:
                    self._do(call)
            self._count(batch)
        except BaseException as e:
            error = e
        completion.finish(error)
        return completion

    def _number(self, call: Call) -> None:
        if not call.op.message:
            with _lock:
                self._sequence = call.seq = self._sequence + 1
        elif self._context.size == 1:
            raise DistArgumentError(
                f"{call.op.name}: the group has size 1: no peer", op=call.op.name
            )
        elif call.op is _RECV:
            call.source = (
                call.peer if call.peer >= 0 else (self._context.rank + 1) % self._context.size
            )

    def _do(self, call: Call) -> None:
        if call.outputs and not call.op.message and call.outputs[0].flat is not None:
            with np.errstate(all="ignore"):
                _write(call, self._context.rank, self._context.size)
            call.write_back()

    def _count(self, calls: Sequence[Call]) -> None:
        context = self._context
        for call in calls:
            kind = CallKind(call, context.job.number, context.name, context.ranks, self.name)
            arrays = kind.inputs, kind.outputs
            key = (kind.group, kind.op, arrays, kind.reduce, kind.compression, kind.root)
            with _lock:
                first, number = _counts.get(key, (kind, 0))
                _counts[key] = first, number + 1

    @property
    def sequence(self) -> int:
        return self._sequence

    def describe(self) -> str:
        return "fake: nothing is exchanged; results are as if all ranks had passed the same arrays"

    def abort(self, error: Exception) -> None:
        self._state.abort(error)

    def close(self) -> None:
        self._state.close()


def _write(call: Call, rank: int, size: int) -> None:
    """Write the outputs of a collective, see the table above."""
    sizes = call.op.sizes
    inputs: list[Any] = [buffer.flat for buffer in call.inputs]
    outputs: list[Any] = [buffer.flat for buffer in call.outputs]
    if call.reduce is not None:
        own = inputs[rank if sizes is Sizes.SCATTERED else 0]
        if sizes is Sizes.SCATTERED_FLAT:
            own = own.reshape(size, -1)[rank]
        ranks = size if not call.op.prefix else rank if call.op.exclusive else rank + 1
        if ranks:
            _reduce(call, own, ranks, outputs[0])
    elif sizes is Sizes.GATHERED_FLAT:
        outputs[0].reshape(size, -1)[...] = inputs[0]
    elif sizes is Sizes.GATHERED:
        for output in outputs:
            _copy(inputs[0], output)
    elif sizes is Sizes.SCATTERED and inputs:
        _copy(inputs[rank], outputs[0])
    elif sizes is Sizes.EXCHANGED:
        if call.op.joined:
            assert call.in_counts is not None
            assert call.out_counts is not None
            own = _cut(inputs[0], call.in_counts)[rank].copy()
            outputs = _cut(outputs[0], call.out_counts)
        else:
            own = inputs[rank].copy()
        for output in outputs:
            _copy(own, output)


def _copy(source: Flat, target: Flat) -> None:
    count = min(source.size, target.size)
    target[:count] = source[:count]


def _cut(array: Flat, counts: Sequence[int]) -> list[Flat]:
    return np.split(array, np.cumsum(counts)[:-1])


def _reduce(call: Call, values: Flat, ranks: int, out: Flat) -> None:
    """The reduction of ``ranks`` equal arrays in about log2(ranks) steps: reductions are
    associative."""
    assert call.reduce is not None
    kernel = kernel_for(call.outputs[0].dtype, call.reduce)
    if kernel.average:
        out[...] = values
        return
    # The exact sum of equal arrays is the number of ranks times one of them, rounded once.
    if kernel.at_once:
        kernel_for(call.outputs[0].dtype, ReduceOp.PREMUL_SUM(ranks)).combine([values], out)
        return
    # This is the reduction of 1, 2, 4 and so on of the arrays.
    power = np.empty(values.size, kernel.acc)
    kernel.begin(power, values)
    result = None
    while ranks:
        if ranks & 1:
            result = power if result is None else kernel.ufunc(result, power)
        ranks >>= 1
        if ranks:
            power = kernel.ufunc(power, power)
    assert result is not None
    kernel.finish(result, out, 1)
