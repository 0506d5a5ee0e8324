"""One call of a collective as a case of the conformance suite, and how a rank runs it and judges
the result.

Every rank makes all ranks' inputs from the case's seed, so it can compute what it must receive.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

import unicoll as dist
from unicoll.calls.ops import OPS, Arity, Sizes
from unicoll.testing import reference
from unicoll.testing.families import GuardedArray, family

Array = Any
_PENDING = 4
"""Asynchronous cases in flight at a time."""


@dataclass(frozen=True)
class Case:
    """One call.

    Attributes:
        op, dtype, reduce: names; ``reduce`` is None where the operation does not reduce.
        count: elements of one rank's share (twice as many in the two-dimensional layouts).
        layout: how the arrays lie in memory, see the families.
        async_op: whether it goes on in the background, up to four at a time.
        group: "world", "subset" (all but one rank) or "reversed".
        in_place: whether input and output share memory, where the operation allows it.
        uneven: whether ranks' shares differ in size, where the operation allows it; with ``count``
            0 some are empty.
        special: whether NaN and infinities are among the values.
        family: of arrays.
        seed: of the values, the root and the left-out rank.
        arithmetic: of the backend's reductions.
    """

    op: str
    dtype: str
    reduce: str | None
    count: int = 5
    layout: str = "contiguous"
    async_op: bool = False
    group: str = "world"
    in_place: bool = False
    uneven: bool = False
    special: bool = False
    family: str = "numpy"
    seed: int = 0
    arithmetic: reference.Arithmetic = field(default=reference.STRICT, repr=False)


# --- groups ---------------------------------------------------------------------------------------

USING: dict[str, Any] = {}
"""Options with which this rank does its calls."""
_groups: dict[tuple[int, ...], Any] = {}


def members(case: Case, size: int) -> tuple[int, ...]:
    """Global ranks of the case's group, in its order."""
    ranks = list(range(size))
    if case.group == "subset" and size > 1:
        ranks.remove(case.seed % size)
    return tuple(reversed(ranks) if case.group == "reversed" else ranks)


def _group(ranks: tuple[int, ...]) -> Any:
    found = _plain_group(ranks)
    world: Any = dist.group.WORLD
    return (found or world).using(**USING) if USING else found


def _plain_group(ranks: tuple[int, ...]) -> Any:
    if len(ranks) == dist.get_world_size() and ranks == tuple(sorted(ranks)):
        return None
    if ranks not in _groups:
        _groups[ranks] = dist.new_group(list(ranks), sort_ranks=False)
    return _groups[ranks]


# --- a case on one rank ---------------------------------------------------------------------------


class Trial:
    """A case as one rank of its group runs it."""

    def __init__(self, case: Case, ranks: tuple[int, ...], group: Any) -> None:
        self.case = case
        self.ranks = ranks
        self.size = len(ranks)
        self.rank = ranks.index(dist.get_rank())
        self.root = case.seed // 7 % self.size
        self.row = OPS[case.op]
        self.group = group
        self.family = family(case.family)
        # all_to_all_single: rows from rank i to rank j.
        self.rows: Any = None
        self.given = [self._inputs_of(r) for r in range(self.size)]
        self.inputs: list[GuardedArray] = []
        self.outputs: list[GuardedArray] = []
        self.work: Any = None
        self._lay_out()

    # shapes and values

    def _shape(self, count: int) -> tuple[int, ...]:
        if self.case.layout == "scalar":
            return ()
        two = self.case.layout in ("transposed", "rows")
        return (count, 2) if two else (count,)

    def _values(self, shape: tuple[int, ...], rng: np.random.Generator) -> Any:
        case = self.case
        return reference.values(case.dtype, case.reduce, shape, rng, case.special)

    def _share(self, *ranks: int) -> tuple[int, ...]:
        """Shape of a piece between two ranks, or of one rank's own."""
        more = (
            sum((i + 1) * r for i, r in enumerate(ranks))
            if self.case.uneven and self.row.uneven
            else 0
        )
        return self._shape(self.case.count + more)

    def _inputs_of(self, rank: int) -> list[Any]:
        rng = np.random.default_rng([self.case.seed, rank])
        row = self.row
        if row.inputs is Arity.NONE:
            return []
        if row.sizes is Sizes.EXCHANGED and row.joined:
            if self.rows is None:
                self.rows = self._exchange_table()
            tail = self._shape(1)[1:]
            return [self._values((int(self.rows[rank].sum()), *tail), rng)]
        if row.sizes is Sizes.EXCHANGED:
            return [self._values(self._share(rank, i), rng) for i in range(self.size)]
        if row.sizes is Sizes.SCATTERED:
            return [self._values(self._share(i), rng) for i in range(self.size)]
        if row.sizes is Sizes.SCATTERED_FLAT:
            return [self._values(self._times(self._shape(self.case.count)), rng)]
        return [self._values(self._share(rank), rng)]

    def _times(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return (self.size * shape[0], *shape[1:]) if shape else (self.size,)

    def _exchange_table(self) -> Any:
        size, count = self.size, self.case.count
        uneven = self.case.uneven
        return np.array(
            [[count + (i + 2 * j if uneven else 0) for j in range(size)] for i in range(size)]
        )

    # memory

    def _lay_out(self) -> None:
        case, mine = self.case, self.given[self.rank]
        hold, layout = self.family.hold, case.layout
        row, at_root = self.row, self.rank == self.root
        written = case.in_place or row.in_place
        # The array is only read on the source, and on all ranks but the destination.
        if row.in_place and row.rooted:
            written = at_root == (row.outputs is Arity.ONE_AT_ROOT)
        read_only = not written and case.family == "numpy" and case.seed % 2 == 0
        giving = at_root or row.inputs is not Arity.PER_RANK_AT_ROOT
        self.inputs = [hold(x, layout, read_only) for x in mine] if giving else []
        self.expected = self._expected()
        blanks = [
            np.full(self._output_shape(i), 1).astype(_dtype(case))
            for i in range(len(self.expected))
        ]
        if row.in_place:
            self.outputs = self.inputs
            return
        self.outputs = [hold(b, layout) for b in blanks]
        if case.in_place:
            self._overlay(mine)

    def _overlay(self, mine: list[Any]) -> None:
        sizes, rank, shape = self.row.sizes, self.rank, self._shape(self.case.count)
        if sizes is Sizes.GATHERED and self.outputs:
            self.outputs[rank] = self.inputs[0]
        elif sizes is Sizes.SCATTERED and self.inputs:
            self.outputs = [self.inputs[rank]]
        elif sizes is Sizes.GATHERED_FLAT and shape:
            whole = self.outputs[0]
            part = self.family.part(whole, rank * shape[0], (rank + 1) * shape[0])
            part.array[...] = self.inputs[0].array
            self.inputs = [part]
        elif sizes is Sizes.SCATTERED_FLAT and shape:
            self.outputs = [
                self.family.part(self.inputs[0], rank * shape[0], (rank + 1) * shape[0])
            ]

    def _expected(self) -> list[list[Any]]:
        counts = None if self.rows is None else self.rows * int(np.prod(self._shape(1)[1:]))
        return reference.contributions(self.case.op, self.given, self.rank, self.root, counts)

    def _output_shape(self, i: int) -> tuple[int, ...]:
        shape = self._shape(1)
        if not shape:
            return (self.size,) if self.row.sizes is Sizes.GATHERED_FLAT else ()
        return (self.expected[i][0].size // math.prod(shape), *shape[1:])

    # the call

    def start(self) -> None:
        case = self.case
        arrays_in, arrays_out = [h.array for h in self.inputs], [h.array for h in self.outputs]
        row = self.row
        arrays = {"input": arrays_in, "output": arrays_out, "both": arrays_in}
        args: list[Any] = []
        for parameter in row.parameters:
            if parameter.side == "splits":
                continue
            arity = row.outputs if parameter.side == "output" else row.inputs
            given = arrays[parameter.side]
            if arity is Arity.PER_RANK_AT_ROOT:
                args.append(given if self.rank == self.root else None)
            else:
                args.append(given if arity is Arity.PER_RANK else given[0])
        options: dict[str, Any] = {"group": self.group, "async_op": case.async_op}
        if row.rooted:
            if case.seed % 3:
                options[row.root_name] = self.ranks[self.root]
            else:
                options["group_" + row.root_name] = self.root
        if case.reduce is not None:
            options["op"] = reference.reduction_of(case.reduce, case.dtype)
        if self.rows is not None and case.uneven:
            options["output_split_sizes"] = self.rows[:, self.rank].tolist()
            options["input_split_sizes"] = self.rows[self.rank].tolist()
        self.work = getattr(dist, case.op)(*args, **options)

    def finish(self) -> tuple[str | None, str]:
        """Wait, and compare: what is wrong (or None), and a digest of the outputs."""
        if self.case.async_op:
            assert self.work.wait() is True
            # On a device the operation has only been put in order.
            if not self.family.on_device:
                self._assert_success()
        else:
            assert self.work is None
        digest = hashlib.sha256()
        for i, (held, given) in enumerate(zip(self.outputs, self.expected, strict=True)):
            got = held.read()
            digest.update(got.tobytes())
            reduces = (
                self.case.reduce
                if len(given) > 1 or (self.row.reduces and self._reduced_here())
                else None
            )
            wrong = reference.complaint(self.case.dtype, reduces, given, got, self.case.arithmetic)
            if wrong:
                return f"output {i}: {wrong}", ""
            if not held.intact():
                return f"output {i}: memory around the array was overwritten", ""
        changed = self._inputs_changed()
        if self.case.async_op:
            self.work.synchronize()
            self._assert_success()
        return changed, digest.hexdigest()

    def _assert_success(self) -> None:
        assert self.work.is_completed()
        assert self.work.is_success()

    def _reduced_here(self) -> bool:
        if self.row.exclusive and self.rank == 0:
            return False
        return self.row.outputs is not Arity.ONE_AT_ROOT or self.rank == self.root

    def _inputs_changed(self) -> str | None:
        shared = [h.array for h in self.outputs]
        for i, (held, value) in enumerate(zip(self.inputs, self.given[self.rank], strict=False)):
            if self.case.in_place and (
                len(self.inputs) == 1 or any(held.array is s for s in shared)
            ):
                continue
            if any(held.array is s for s in shared):
                continue
            if reference.complaint(self.case.dtype, None, [value.reshape(-1)], held.read()):
                return f"input {i} was changed"
            if not held.intact():
                return f"input {i}: memory around the array was overwritten"
        return None


def _dtype(case: Case) -> np.dtype[Any]:
    found = reference.numpy_dtype(case.dtype)
    assert found is not None
    return found


Verdict = tuple[str | None, str]


def run_cases(cases: Sequence[Case]) -> list[Verdict | None]:
    """Run all cases, in order; for each what is wrong and a digest, or None on ranks outside its
    group."""
    size, me = dist.get_world_size(), dist.get_rank()
    verdicts: list[Verdict | None] = [None] * len(cases)
    pending: list[tuple[int, Trial]] = []

    def settle() -> None:
        for i, trial in pending:
            try:
                verdicts[i] = trial.finish()
            except Exception as e:
                raise RuntimeError(f"{trial.case}") from e
        pending.clear()

    for i, case in enumerate(cases):
        ranks = members(case, size)
        group = _group(ranks)
        if me not in ranks:
            continue
        try:
            trial = Trial(case, ranks, group)
            trial.start()
        except Exception as e:
            raise RuntimeError(f"{case}") from e
        pending.append((i, trial))
        if not case.async_op or len(pending) >= _PENDING:
            settle()
    settle()
    return verdicts
