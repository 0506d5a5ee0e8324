"""Reads objects in the typed format (:mod:`unicoll.net.objects.object_format`) from untrusted
bytes."""

from __future__ import annotations

import struct
from collections.abc import Callable
from math import prod
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import numpy as np

from unicoll.errors import DistError
from unicoll.net.objects.object_format import (
    COMPLEX,
    DTYPE_NAME,
    FLOAT,
    INT,
    LENGTH,
    MAX_DEPTH,
    MIN_SHARED_SIZE,
    is_plain_dtype,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

T = TypeVar("T")
_UNPACK_INT, _UNPACK_FLOAT, _UNPACK_LENGTH = INT.unpack_from, FLOAT.unpack_from, LENGTH.unpack_from


class Reader:
    """Reads one typed message; ``at`` is the position of the next byte.

    Every length is checked against the remaining bytes before memory is allocated, and the nesting
    is bounded.
    """

    def __init__(self, view: memoryview) -> None:
        self.view = view
        self.at = 1
        self._end = len(view)
        self._shared: list[Any] = []
        self._hashed_depth = 0

    def fail(self, reason: str) -> NoReturn:
        raise DistError(f"malformed object data at byte {self.at} of {len(self.view)}: {reason}")

    def read(self, depth: int) -> Any:
        at = self.at
        if at >= self._end:
            # This raises. Where it would not, its steps are written out here, which is faster than
            # a call.
            self._advance(1)
        self.at = at + 1
        read = _READERS.get(self.view[at])
        if read is None:
            self.fail(f"unknown tag {self.view[at]}")
        return read(self, depth)

    def read_int(self, depth: int) -> int:
        at = self.at
        if at + 8 > self._end:
            # This raises.
            self._advance(8)
        self.at = at + 8
        value: int = _UNPACK_INT(self.view, at)[0]
        return value

    def read_long(self, depth: int) -> int:
        body = self._body()
        return self._add_shared_if_long(int.from_bytes(body, "little", signed=True), len(body))

    def read_float(self, depth: int) -> float:
        at = self.at
        if at + 8 > self._end:
            # This raises.
            self._advance(8)
        self.at = at + 8
        value: float = _UNPACK_FLOAT(self.view, at)[0]
        return value

    def read_complex(self, depth: int) -> complex:
        return complex(*COMPLEX.unpack(self._read_bytes(16)))

    def read_str(self, depth: int) -> str:
        body = self._body()
        text = str(body, "utf-8", "surrogatepass")
        if len(body) >= MIN_SHARED_SIZE:
            self._shared.append(text)
        return text

    def read_bytes(self, depth: int) -> bytes:
        body = self._body()
        return self._add_shared_if_long(bytes(body), len(body))

    def read_bytearray(self, depth: int) -> bytearray:
        return self._add_shared(bytearray(self._body()))

    def read_list(self, depth: int) -> list[Any]:
        # The list is numbered before its items, which may refer to it.
        result: list[Any] = self._add_shared([])
        for _ in range(self._count(depth)):
            result.append(self.read(depth + 1))
        return result

    def read_set(self, depth: int) -> set[Any]:
        result: set[Any] = self._add_shared(set())
        result.update(self._hashed_items(depth))
        return result

    def read_dict(self, depth: int) -> dict[Any, Any]:
        result: dict[Any, Any] = {}
        self._shared.append(result)
        count, read = self._count(depth), self.read
        depth += 1
        for _ in range(count):
            self._hashed_depth += 1
            key = read(depth)
            self._hashed_depth -= 1
            result[key] = read(depth)
        if len(result) != count:
            self.fail("a key occurs twice")
        return result

    def read_tuple(self, depth: int) -> tuple[Any, ...]:
        # A tuple exists only once its items do, so it is numbered after them, as in the writer.
        return self._add_shared_frozen(
            tuple([self.read(depth + 1) for _ in range(self._count(depth))])
        )

    def read_frozenset(self, depth: int) -> frozenset[Any]:
        return self._add_shared_frozen(self._hashed_items(depth))

    def read_array(self, depth: int) -> NDArray[Any]:
        dtype = self._dtype()
        ndim = self.view[self._advance(1)]
        shape = struct.unpack(f"<{ndim}Q", self._read_bytes(8 * ndim))
        return self._add_shared(self._elements(dtype, prod(shape)).reshape(shape))

    def read_scalar(self, depth: int) -> np.generic:
        scalar: np.generic = self._elements(self._dtype(), 1)[0]
        return scalar

    def read_reference(self, depth: int) -> Any:
        number = self._length()
        if number >= len(self._shared):
            self.fail(f"reference to value {number} of {len(self._shared)}")
        obj = self._shared[number]
        # The writer makes no such reference. Each one would have the items hashed again, and nested
        # ones exponentially often.
        if self._hashed_depth and isinstance(obj, (tuple, frozenset)):
            self.fail("a reference to a container inside a key")
        return obj

    def _advance(self, count: int) -> int:
        """Go on by ``count`` bytes, which must be there; returns the position of the first of
        them."""
        at = self.at
        end = at + count
        if end > self._end:
            self.fail(f"{count} bytes expected, {self._end - at} left")
        self.at = end
        return at

    def _read_bytes(self, count: int) -> memoryview:
        at = self._advance(count)
        return self.view[at : self.at]

    def _length(self) -> int:
        length: int = LENGTH.unpack_from(self.view, self._advance(8))[0]
        return length

    def _body(self) -> memoryview:
        start = self.at + 8
        if start <= self._end:
            end: int = start + _UNPACK_LENGTH(self.view, self.at)[0]
            if end <= self._end:
                self.at = end
                return self.view[start:end]
        # This raises, in one of the two calls.
        return self._read_bytes(self._length())

    def _count(self, depth: int) -> int:
        """The number of items that follow; each has at least one byte."""
        count = self._length()
        if count > self._end - self.at:
            self.fail(f"{count} items expected, {self._end - self.at} bytes left")
        if depth >= MAX_DEPTH:
            self.fail(f"nested more than {MAX_DEPTH} levels deep")
        return count

    def _hashed_items(self, depth: int) -> frozenset[Any]:
        count = self._count(depth)
        self._hashed_depth += 1
        items = frozenset([self.read(depth + 1) for _ in range(count)])
        self._hashed_depth -= 1
        if len(items) != count:
            self.fail("an item of a set occurs twice")
        return items

    def _dtype(self) -> np.dtype[Any]:
        name = str(self._read_bytes(self.view[self._advance(1)]), "ascii")
        if DTYPE_NAME.fullmatch(name):
            dtype: np.dtype[Any] = np.dtype(name)
            if dtype.str == name and is_plain_dtype(dtype):
                return dtype
        self.fail(f"dtype {name!r}")

    def _elements(self, dtype: np.dtype[Any], count: int) -> NDArray[Any]:
        raw = np.frombuffer(self._read_bytes(count * dtype.itemsize), np.uint8)
        # NumPy relies on it that a bool is 0 or 1.
        if dtype.kind == "b" and raw.size and raw.max() > 1:
            self.fail("a bool that is neither 0 nor 1")
        # A copy can be written to, and does not keep the whole message alive.
        elements: NDArray[Any] = raw.copy().view(dtype)
        return elements

    def _add_shared_frozen(self, obj: T) -> T:
        return obj if self._hashed_depth else self._add_shared(obj)

    def _add_shared(self, obj: T) -> T:
        self._shared.append(obj)
        return obj

    def _add_shared_if_long(self, obj: T, length: int) -> T:
        return self._add_shared(obj) if length >= MIN_SHARED_SIZE else obj


_READERS: dict[int, Callable[[Reader, int], Any]] = {
    ord("N"): lambda reader, depth: None,
    ord("T"): lambda reader, depth: True,
    ord("F"): lambda reader, depth: False,
    ord("i"): Reader.read_int,
    ord("I"): Reader.read_long,
    ord("f"): Reader.read_float,
    ord("c"): Reader.read_complex,
    ord("s"): Reader.read_str,
    ord("b"): Reader.read_bytes,
    ord("B"): Reader.read_bytearray,
    ord("l"): Reader.read_list,
    ord("S"): Reader.read_set,
    ord("d"): Reader.read_dict,
    ord("t"): Reader.read_tuple,
    ord("Z"): Reader.read_frozenset,
    ord("a"): Reader.read_array,
    ord("n"): Reader.read_scalar,
    ord("r"): Reader.read_reference,
}
