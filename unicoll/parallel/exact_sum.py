"""Exact sums of arrays that a rank adds up one after another, as the gradients of micro-batches,
and of all ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from unicoll.api import world
from unicoll.arrays.conversion import Buffer, as_buffer
from unicoll.arrays.exact_arithmetic import Accumulator, Summation
from unicoll.arrays.families import family_of, numpy_dtype
from unicoll.arrays.half_precision import HALVES, Flat
from unicoll.arrays.kernels import quiet_runner
from unicoll.arrays.types import ALL_DTYPES
from unicoll.errors import DistArgumentError, DistTypeError
from unicoll.process.timeouts import Timeout

if TYPE_CHECKING:
    from unicoll.group.process_group import ProcessGroup

Array = Any


class ExactSum:
    """The sum of arrays of several ranks and steps as real numbers, rounded once.

    Its bits do not depend on the order of the arrays, nor on which rank adds which of them: eight
    micro-batches of one rank and one of each of eight ranks give the same sum.
    :mod:`unicoll.arrays.exact_arithmetic` has the definition, which is that of
    ``ReduceOp.EXACT_SUM``, and the sources::

        gradients = unicoll.ExactSum(parameters)
        for batch in micro_batches:
            gradients.add(backward(batch))
        gradients.all_reduce()
        for parameter, gradient in zip(parameters, gradients.result()):
            parameter -= rate / number_of_micro_batches * gradient
        gradients.reset()

    It holds 8 bytes for each element, and 16 if the sum of an element does not fit into float64;
    from the first :meth:`all_reduce` on about twice as much, and the result. Not for use from
    several threads at once.

    Args:
        like: an array, or a list or dict of arrays, in host memory: those that are added have the
            same shapes and element type, one of float16, bfloat16, float32, float64, complex64 and
            complex128. They are not read.

    Raises:
        DistTypeError: another element type, several types, or an array on a device.
    """

    def __init__(self, like: Array | Sequence[Array] | Mapping[str, Array]) -> None:
        self._like = like
        buffers = self._buffers("ExactSum", like)
        if not buffers:
            raise DistArgumentError("ExactSum: no arrays given")
        self._shapes = [buffer.shape for buffer in buffers]
        self._dtype = dtype = buffers[0].dtype
        if (
            dtype.kind not in "fc"
            or dtype.itemsize == 1
            or any(buffer.dtype is not dtype for buffer in buffers)
        ):
            names = ", ".join(dict.fromkeys(str(buffer.dtype) for buffer in buffers))
            raise DistTypeError(
                f"ExactSum: expected arrays of one floating-point type, not float8, got {names}"
            )
        complex_part = np.dtype(f"f{dtype.itemsize // 2}") if dtype.kind == "c" else None
        self._number = complex_part or dtype.storage
        self._count = sum(buffer.count for buffer in buffers) * (2 if complex_part else 1)
        self._half = HALVES.get(dtype.name)
        self._quietly = quiet_runner()
        self._kept: dict[str, Flat] = {}
        self._sum = Accumulator(self._count, self._number, self._half)
        self._reduced: Flat | None = None

    def reset(self) -> None:
        """Begin another sum."""
        self._sum.clear()
        self._reduced = None

    def add(self, arrays: Array | Sequence[Array] | Mapping[str, Array]) -> None:
        """Add arrays like those of the constructor.

        Raises:
            DistArgumentError: other shapes, names or another element type; or :meth:`all_reduce`
                has been called, and :meth:`reset` has not.
            DistTypeError: not arrays in host memory.
        """
        self._refuse_after_all_reduce("add")
        buffers = self._checked("ExactSum.add", arrays)
        flats = [self._numbers(buffer) for buffer in buffers]
        self._quietly(self._sum.add, flats[0] if len(flats) == 1 else np.concatenate(flats))

    def all_reduce(self, group: ProcessGroup | None = None, *, timeout: Timeout = None) -> None:
        """Make it the sum over all ranks of a group; all of them call it, also those that have
        added nothing.

        Args:
            group: None means the default group. Outside the group: a warning, and nothing changes.
            timeout: of each of its collectives (timedelta, or seconds); None takes the group's.

        Raises:
            DistArgumentError: the ranks' arrays differ in size or element type; raised on all of
                them. Or it has been called, and :meth:`reset` has not.
            DistError: as the collectives raise. The sum of this rank is unchanged.
        """
        pg = world.resolve(group)
        if pg is not None:
            self._refuse_after_all_reduce("all_reduce")
            self._reduced = self._reduce(pg, timeout)

    def result(self, out: Array | Sequence[Array] | Mapping[str, Array] | None = None) -> Any:
        """The sum: of this rank, or after :meth:`all_reduce` of all ranks.

        Args:
            out: arrays for it, like those of the constructor; None makes new ones.

        Returns:
            ``out``, or an array, list or dict, as the constructor got.
        """
        found = self._reduced
        if found is None:
            total, missing, rest = self._sum.total, self._sum.missing, self._sum.rest
            found = np.empty(self._count, self._number)
            parts = [total] if missing is None else [total, -missing]
            self._quietly(self._summation().combine_with_rest, parts, rest, found)
        if out is None:
            out = self._new_arrays()
        start = 0
        for buffer in self._checked("ExactSum.result", out, writes=True):
            flat = self._numbers(buffer)
            flat[...] = found[start : start + flat.size]
            start += flat.size
            buffer.write_back()
        return out

    def _refuse_after_all_reduce(self, method: str) -> None:
        if self._reduced is not None:
            raise DistArgumentError(
                f"ExactSum.{method}: all_reduce() has ended this sum; reset() begins another one"
            )

    # --- the ranks --------------------------------------------------------------------------------

    def _reduce(self, group: ProcessGroup, timeout: Timeout) -> Flat:
        """Every rank adds a part of the arrays of all, and the ranks exchange the parts."""
        size, rank, local = group.size(), group.rank(), self._sum
        rest = np.array(
            [(i, value) for i, values in local.rest.items() for value in values]
        ).reshape(-1)
        own = np.array(
            [self._count, self._dtype.code, local.missing is not None, rest.size], np.int64
        )
        table = np.empty((size, own.size), np.int64)
        group.all_gather_into_tensor(table, own, timeout=timeout)
        # All ranks compare the same table, so all of them raise or none does.
        self._compare(group, table)
        bounds = [self._count * r // size for r in range(size + 1)]
        counts = [stop - start for start, stop in pairwise(bounds)]
        start, mine = bounds[rank], counts[rank]

        def exchanged(numbers: Flat, name: str) -> Flat:
            """This rank's part of the numbers of all ranks."""
            found = self._memory(name, mine * size)
            group.all_to_all_single(found, numbers, [mine] * size, counts, timeout=timeout)
            return found.reshape(size, mine)

        parts = [*exchanged(local.total, "totals")]
        # Every rank finds this in the table, also one that has nothing missing itself.
        if table[:, 2].any():
            missing = exchanged(
                np.zeros(self._count) if local.missing is None else local.missing, "missing"
            )
            parts.extend(np.negative(missing, out=missing))
        others: dict[int, list[float]] = {}
        if table[:, 3].any():
            told = [np.empty(int(n)) for n in table[:, 3]]
            group.all_gather(told, rest, timeout=timeout)
            for i, value in np.concatenate(told).reshape(-1, 2).tolist():
                if start <= i < start + mine:
                    others.setdefault(int(i) - start, []).append(value)
        result = self._memory("result", self._count, self._number)
        results = [result[a:b] for a, b in pairwise(bounds)]
        self._quietly(self._summation().combine_with_rest, parts, others, results[rank])
        group.all_gather(results, results[rank], timeout=timeout)
        return result

    def _compare(self, group: ProcessGroup, table: Flat) -> None:
        """Raise if the arrays of the ranks differ."""
        differ = np.flatnonzero((table[:, :2] != table[0, :2]).any(axis=1))
        if differ.size:
            names = {dtype.code: dtype.name for dtype in ALL_DTYPES}
            texts = [
                f"{table[rank, 0]} numbers of {names[table[rank, 1]]}" for rank in (0, differ[0])
            ]
            raise DistArgumentError(
                f"ExactSum.all_reduce: ranks 0 and {differ[0]} of group {group.name!r} have"
                f" different arrays: {texts[0]}, {texts[1]}"
            )

    def _memory(self, name: str, count: int, dtype: Any = np.float64) -> Flat:
        """Memory that is kept for the next sum."""
        found = self._kept.get(name)
        if found is None or found.size != count:
            found = self._kept[name] = np.empty(count, dtype)
        return found

    # --- the arrays -------------------------------------------------------------------------------

    def _summation(self) -> Summation:
        return Summation(self._number, self._half, from_float64=True)

    def _buffers(self, what: str, arrays: Any) -> list[Buffer]:
        """The buffers of arrays, those of a dict in the order of its sorted names, which is equal
        on all ranks."""
        listed = arrays if isinstance(arrays, list | tuple) else [arrays]
        if isinstance(self._like, Mapping):
            if not isinstance(arrays, Mapping) or arrays.keys() != self._like.keys():
                got = sorted(arrays) if isinstance(arrays, Mapping) else type(arrays).__name__
                raise DistArgumentError(
                    f"{what}: expected a dict of {sorted(self._like)}, got {got}"
                )
            listed = [arrays[name] for name in sorted(arrays)]
        found = [as_buffer(array, f"{what}: array") for array in listed]
        for buffer in found:
            if buffer.flat is None:
                raise DistTypeError(
                    f"{what}: expected an array in host memory, got one on {buffer.device}"
                )
        return found

    def _checked(self, what: str, arrays: Any, writes: bool = False) -> list[Buffer]:
        found = self._buffers(what, arrays)
        shapes = [buffer.shape for buffer in found]
        if shapes != self._shapes or any(buffer.dtype is not self._dtype for buffer in found):
            texts = [
                ", ".join(map(str, found)),
                ", ".join(f"{self._dtype}{list(shape)}" for shape in self._shapes),
            ]
            raise DistArgumentError(f"{what}: got {texts[0] or 'no array'}, expected {texts[1]}")
        if writes and not all(buffer.writable for buffer in found):
            raise DistArgumentError(f"{what}: an array is read-only")
        return found

    def _numbers(self, buffer: Buffer) -> Flat:
        assert buffer.flat is not None
        return buffer.flat.view(self._number)

    def _new_arrays(self) -> Any:
        like = self._like
        if isinstance(like, Mapping):
            return {name: _new_like(array) for name, array in like.items()}
        return (
            [_new_like(array) for array in like]
            if isinstance(like, list | tuple)
            else _new_like(like)
        )


def _new_like(array: Any) -> Any:
    buffer = as_buffer(array)
    family = family_of(array)
    if family is not None:
        return family.empty_like(array, buffer.count).reshape(array.shape)
    try:
        return np.empty(buffer.shape, numpy_dtype(buffer.dtype))
    except DistTypeError as e:
        raise DistTypeError(
            f"ExactSum.result: {e}, or give the arrays for the result, out="
        ) from None
