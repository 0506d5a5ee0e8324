"""Writes plain objects in the typed format (:mod:`unicoll.net.objects.object_format`)."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from unicoll.net.objects.object_format import (
    COMPLEX,
    LENGTH,
    MAX_DEPTH,
    MIN_SHARED_SIZE,
    TYPED,
    NotPlainError,
    is_plain_dtype,
    type_name,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

_FIRST = bytes((TYPED,))
# These pack the tag and the value together.
_PACK_INT, _PACK_FLOAT, _PACK_LENGTH = [struct.Struct(f"<c{code}").pack for code in "qdQ"]


class Writer:
    """Collects the parts of one typed message; :meth:`write` dispatches on the exact type.

    Raises:
        NotPlainError: (from :meth:`write`) the typed format cannot hold the object.
    """

    def __init__(self) -> None:
        self.parts: list[Any] = [_FIRST]
        self._numbers: dict[
            int,
            int,
            # By id: the object that is being written keeps all others, and so their ids, alive.
        ] = {}
        # The tuples and frozensets that are being written, and are not numbered yet.
        self._unfinished: set[int] = set()
        # The number of enclosing keys and items of sets.
        self._hashed_depth = 0

    def write(self, obj: Any, depth: int) -> None:
        write = _WRITERS.get(type(obj))
        if write is None:
            if not isinstance(obj, np.generic):
                raise NotPlainError(type_name(obj))
            write = Writer.write_scalar
        write(self, obj, depth)

    def write_none(self, obj: None, depth: int) -> None:
        self.parts.append(b"N")

    def write_bool(self, obj: bool, depth: int) -> None:
        self.parts.append(b"T" if obj else b"F")

    def write_int(self, obj: int, depth: int) -> None:
        if -(1 << 63) <= obj < 1 << 63:
            self.parts.append(_PACK_INT(b"i", obj))
        else:
            self._write_shared(
                b"I", obj, obj.to_bytes(obj.bit_length() // 8 + 1, "little", signed=True)
            )

    def write_float(self, obj: float, depth: int) -> None:
        self.parts.append(_PACK_FLOAT(b"f", obj))

    def write_complex(self, obj: complex, depth: int) -> None:
        self.parts.append(b"c" + COMPLEX.pack(obj.real, obj.imag))

    def write_str(self, obj: str, depth: int) -> None:
        body = obj.encode("utf-8", "surrogatepass")
        if len(body) < MIN_SHARED_SIZE:
            self.parts += (_PACK_LENGTH(b"s", len(body)), body)
        else:
            self._write_shared(b"s", obj, body)

    def write_bytes(self, obj: bytes, depth: int) -> None:
        self._write_shared(b"b", obj, obj)

    def write_bytearray(self, obj: bytearray, depth: int) -> None:
        if not self._write_reference(obj):
            self._number(obj)
            self.parts += (b"B" + LENGTH.pack(len(obj)), bytes(obj))

    def write_list(self, obj: list[Any], depth: int) -> None:
        if not self._write_reference(obj):
            self._number(obj)
            self._write_items(b"l", obj, depth)

    def write_set(self, obj: set[Any], depth: int) -> None:
        if not self._write_reference(obj):
            self._number(obj)
            self._hashed_depth += 1
            self._write_items(b"S", obj, depth)
            self._hashed_depth -= 1

    def write_dict(self, obj: dict[Any, Any], depth: int) -> None:
        if self._write_reference(obj):
            return
        self._number(obj)
        self._check_depth(obj, depth)
        self.parts.append(_PACK_LENGTH(b"d", len(obj)))
        write = self.write
        depth += 1
        for key, value in obj.items():
            self._hashed_depth += 1
            write(key, depth)
            self._hashed_depth -= 1
            write(value, depth)

    def write_tuple(self, obj: tuple[Any, ...], depth: int) -> None:
        self._write_frozen(b"t", obj, depth, 0)

    def write_frozenset(self, obj: frozenset[Any], depth: int) -> None:
        self._write_frozen(b"Z", obj, depth, 1)

    def write_array(self, obj: NDArray[Any], depth: int) -> None:
        if self._write_reference(obj):
            return
        if not is_plain_dtype(obj.dtype):
            raise NotPlainError(f"a NumPy array of dtype {obj.dtype}")
        self._number(obj)
        header = struct.pack(f"<B{obj.ndim}Q", obj.ndim, *obj.shape)
        self.parts += (b"a", _dtype_field(obj.dtype), header)
        self.parts.append(np.ascontiguousarray(obj).reshape(-1).view(np.uint8).data)

    def write_scalar(self, obj: np.generic, depth: int) -> None:
        dtype = obj.dtype
        # A subclass of a scalar type would come back as the type itself.
        if not is_plain_dtype(dtype) or np.dtype(dtype.str).type is not type(obj):
            raise NotPlainError(type_name(obj))
        self.parts += (b"n", _dtype_field(dtype), obj.tobytes())

    def _write_items(self, tag: bytes, items: Any, depth: int) -> None:
        self._check_depth(items, depth)
        self.parts.append(tag + LENGTH.pack(len(items)))
        for item in items:
            self.write(item, depth + 1)

    def _write_frozen(self, tag: bytes, obj: Any, depth: int, hashed: int) -> None:
        """The reader creates an immutable container after its items, so it is numbered after
        them."""
        numbered = not self._hashed_depth
        if numbered and self._write_reference(obj):
            return
        if id(obj) in self._unfinished:
            raise NotPlainError(f"a {type_name(obj)} that contains itself")
        self._unfinished.add(id(obj))
        self._hashed_depth += hashed
        self._write_items(tag, obj, depth)
        self._hashed_depth -= hashed
        self._unfinished.remove(id(obj))
        if numbered:
            self._number(obj)

    def _write_shared(self, tag: bytes, obj: Any, body: bytes) -> None:
        if len(body) >= MIN_SHARED_SIZE:
            if self._write_reference(obj):
                return
            self._number(obj)
        self.parts += (_PACK_LENGTH(tag, len(body)), body)

    def _write_reference(self, obj: Any) -> bool:
        number = self._numbers.get(id(obj))
        if number is None:
            return False
        self.parts.append(b"r" + LENGTH.pack(number))
        return True

    def _number(self, obj: Any) -> None:
        self._numbers[id(obj)] = len(self._numbers)

    @staticmethod
    def _check_depth(obj: Any, depth: int) -> None:
        if depth >= MAX_DEPTH:
            raise NotPlainError(f"a {type_name(obj)} more than {MAX_DEPTH} levels deep")


_WRITERS: dict[type, Callable[[Writer, Any, int], None]] = {
    type(None): Writer.write_none,
    bool: Writer.write_bool,
    int: Writer.write_int,
    float: Writer.write_float,
    complex: Writer.write_complex,
    str: Writer.write_str,
    bytes: Writer.write_bytes,
    bytearray: Writer.write_bytearray,
    list: Writer.write_list,
    tuple: Writer.write_tuple,
    dict: Writer.write_dict,
    set: Writer.write_set,
    frozenset: Writer.write_frozenset,
    np.ndarray: Writer.write_array,
}


def _dtype_field(dtype: np.dtype[Any]) -> bytes:
    name: bytes = dtype.str.encode("ascii")
    return bytes((len(name),)) + name
