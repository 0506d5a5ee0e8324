"""Objects as bytes: a typed format for plain objects, pickle for the rest.

Plain objects are None, bool, int (any size), float, complex, str, bytes, bytearray, list, tuple, dict, set,
frozenset, and NumPy arrays and scalars of bool, integer, float, complex and datetime dtypes, nested as you
like, shared or cyclic references included. They never touch pickle, so reading them runs no code. A subclass
of these types (an IntEnum, a namedtuple, an OrderedDict) and everything else is pickled whole, where that is
allowed.

The first byte says which of the two follows. In the typed format a value is a one-byte tag and its body;
integers and lengths are little-endian. Values that can be shared get numbers in the order in which they are
met, on both sides; a later occurrence is only a reference to the number. Tuples and frozensets inside a key
or a set's item are the exception: hashing them walks them, and references would make that walk exponential.
Reading checks every length against the bytes that are left before it allocates, and bounds the nesting.
"""

from __future__ import annotations

import pickle
import re
import struct
from collections.abc import Callable
from math import prod
from typing import Any, NoReturn, TypeVar

import numpy as np
import numpy.typing as npt

from .errors import DistError, PickleRefusedError

__all__ = ["MAX_DEPTH", "dumps", "loads"]

TYPED, PICKLED = 1, 2
MAX_DEPTH = 100
"""Containers nested deeper than this are pickled; typed data that claims to be deeper is refused."""

_LENGTH = struct.Struct("<Q")
_INT = struct.Struct("<q")
_FLOAT = struct.Struct("<d")
_COMPLEX = struct.Struct("<dd")
_SHARED_FROM = 64  # a str, bytes or int body at least this long is remembered, so that repeats cost 9 bytes
_DTYPE_KINDS = "biufcmM"
_DTYPE_NAME = re.compile(r"[|<>][biufcmM]\d{1,2}(\[\d{0,9}[a-zA-Z]{1,2}\])?")

HOW_TO_ALLOW = (
    "Pickle is not allowed here. Send plain objects (numbers, str, bytes, lists, tuples, dicts, sets, NumPy "
    "arrays), or allow it: start every rank with the same UNICOLL_SECRET (unicoll's launcher makes one), and "
    "without UNICOLL_ALLOW_PICKLE=0."
)
"""How a refusal ends: what to do about it."""

Bytes = bytes | bytearray | memoryview
T = TypeVar("T")


def dumps(obj: object, allow_pickle: bool) -> bytes:
    """``obj`` as bytes that :func:`loads` turns back into an equal object of the same type.

    Args:
        obj: any object.
        allow_pickle: whether an object that is not plain (see the module) may be pickled.

    Raises:
        PickleRefusedError: the object needs pickle and ``allow_pickle`` is false; the message names the type.
        DistError: pickle cannot serialise the object.
    """
    writer = _Writer()
    try:
        writer.write(obj, 0)
    except _NotPlainError as reason:
        return _pickled(obj, allow_pickle, str(reason))
    except RecursionError:
        return _pickled(obj, allow_pickle, f"a deeply nested {_type_name(obj)}")
    return b"".join(writer.parts)


def loads(data: Bytes, allow_pickle: bool) -> Any:
    """The object that :func:`dumps` wrote into ``data``.

    Arrays come back C-contiguous, writable and independent of ``data``.

    Raises:
        PickleRefusedError: the data is a pickle and ``allow_pickle`` is false.
        DistError: the data is malformed, cut short or too long, or unpickling failed.
    """
    view = memoryview(data)
    if view.nbytes == 0:
        raise DistError("malformed object data: it is empty")
    view = view.cast("B")
    if view[0] == TYPED:
        return _load_typed(view)
    if view[0] != PICKLED:
        raise DistError(f"malformed object data: unknown format {view[0]}")
    if not allow_pickle:
        raise PickleRefusedError(f"a pickled object of {len(view) - 1} bytes arrived. {HOW_TO_ALLOW}")
    try:
        return pickle.loads(view[1:])
    except Exception as error:
        raise DistError(f"cannot unpickle an object: {type(error).__name__}: {error}") from error


def _type_name(obj: object) -> str:
    kind = type(obj)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def _pickled(obj: object, allowed: bool, reason: str) -> bytes:
    if not allowed:
        raise PickleRefusedError(f"{reason} can only travel by pickle. {HOW_TO_ALLOW}")
    try:
        return bytes((PICKLED,)) + pickle.dumps(obj, protocol=pickle.HIGHEST_PROTOCOL)
    except Exception as error:
        raise DistError(f"cannot pickle {_type_name(obj)}: {type(error).__name__}: {error}") from error


class _NotPlainError(Exception):
    """Carries the name of what the typed format does not hold."""


def _plain_dtype(dtype: np.dtype[Any]) -> bool:
    """Whether ``dtype.str`` says all there is to say, on every machine (long double differs between them)."""
    if dtype.kind not in _DTYPE_KINDS or dtype.itemsize > (16 if dtype.kind == "c" else 8):
        return False
    return dtype.metadata is None and np.dtype(dtype.str) == dtype


# Writing ------------------------------------------------------------


class _Writer:
    """Collects the parts of one message; ``write`` dispatches on the exact type."""

    def __init__(self) -> None:
        self.parts: list[Any] = [bytes((TYPED,))]
        self._numbers: dict[int, int] = {}  # id -> number; the root object keeps every id alive
        self._open: set[int] = (
            set()
        )  # tuples and frozensets that are being written: they cannot be referred to
        self._hashed = 0  # how many keys and set items we are inside of

    def write(self, obj: Any, depth: int) -> None:
        write = _WRITERS.get(type(obj))
        if write is None:
            if not isinstance(obj, np.generic):
                raise _NotPlainError(_type_name(obj))
            write = _Writer.write_scalar
        write(self, obj, depth)

    def write_none(self, obj: None, depth: int) -> None:
        self.parts.append(b"N")

    def write_bool(self, obj: bool, depth: int) -> None:
        self.parts.append(b"T" if obj else b"F")

    def write_int(self, obj: int, depth: int) -> None:
        if -(1 << 63) <= obj < 1 << 63:
            self.parts.append(b"i" + _INT.pack(obj))
        else:
            self._write_shared(b"I", obj, obj.to_bytes(obj.bit_length() // 8 + 1, "little", signed=True))

    def write_float(self, obj: float, depth: int) -> None:
        self.parts.append(b"f" + _FLOAT.pack(obj))

    def write_complex(self, obj: complex, depth: int) -> None:
        self.parts.append(b"c" + _COMPLEX.pack(obj.real, obj.imag))

    def write_str(self, obj: str, depth: int) -> None:
        self._write_shared(b"s", obj, obj.encode("utf-8", "surrogatepass"))

    def write_bytes(self, obj: bytes, depth: int) -> None:
        self._write_shared(b"b", obj, obj)

    def write_bytearray(self, obj: bytearray, depth: int) -> None:
        if not self._referred(obj):
            self._number(obj)
            self.parts += (b"B" + _LENGTH.pack(len(obj)), bytes(obj))

    def write_list(self, obj: list[Any], depth: int) -> None:
        if not self._referred(obj):
            self._number(obj)
            self._write_items(b"l", obj, depth)

    def write_set(self, obj: set[Any], depth: int) -> None:
        if not self._referred(obj):
            self._number(obj)
            self._hashed += 1
            self._write_items(b"S", obj, depth)
            self._hashed -= 1

    def write_dict(self, obj: dict[Any, Any], depth: int) -> None:
        if self._referred(obj):
            return
        self._number(obj)
        self._check_depth(obj, depth)
        self.parts.append(b"d" + _LENGTH.pack(len(obj)))
        for key, value in obj.items():
            self._hashed += 1
            self.write(key, depth + 1)
            self._hashed -= 1
            self.write(value, depth + 1)

    def write_tuple(self, obj: tuple[Any, ...], depth: int) -> None:
        self._write_frozen(b"t", obj, depth, 0)

    def write_frozenset(self, obj: frozenset[Any], depth: int) -> None:
        self._write_frozen(b"Z", obj, depth, 1)

    def write_array(self, obj: npt.NDArray[Any], depth: int) -> None:
        if self._referred(obj):
            return
        if not _plain_dtype(obj.dtype):
            raise _NotPlainError(f"a NumPy array of dtype {obj.dtype}")
        self._number(obj)
        header = struct.pack(f"<B{obj.ndim}Q", obj.ndim, *obj.shape)
        self.parts += (b"a", _dtype_field(obj.dtype), header)
        self.parts.append(np.ascontiguousarray(obj).reshape(-1).view(np.uint8).data)

    def write_scalar(self, obj: np.generic, depth: int) -> None:
        dtype = obj.dtype
        if not _plain_dtype(dtype) or np.dtype(dtype.str).type is not type(obj):
            raise _NotPlainError(_type_name(obj))
        self.parts += (b"n", _dtype_field(dtype), obj.tobytes())

    def _write_items(self, tag: bytes, items: Any, depth: int) -> None:
        self._check_depth(items, depth)
        self.parts.append(tag + _LENGTH.pack(len(items)))
        for item in items:
            self.write(item, depth + 1)

    def _write_frozen(self, tag: bytes, obj: Any, depth: int, hashes_items: int) -> None:
        """An immutable container exists only once its items do, so it is numbered after them."""
        numbered = not self._hashed
        if numbered and self._referred(obj):
            return
        if id(obj) in self._open:
            raise _NotPlainError(f"a {_type_name(obj)} that contains itself")
        self._open.add(id(obj))
        self._hashed += hashes_items
        self._write_items(tag, obj, depth)
        self._hashed -= hashes_items
        self._open.remove(id(obj))
        if numbered:
            self._number(obj)

    def _write_shared(self, tag: bytes, obj: Any, body: bytes) -> None:
        if len(body) >= _SHARED_FROM:
            if self._referred(obj):
                return
            self._number(obj)
        self.parts += (tag + _LENGTH.pack(len(body)), body)

    def _referred(self, obj: Any) -> bool:
        number = self._numbers.get(id(obj))
        if number is None:
            return False
        self.parts.append(b"r" + _LENGTH.pack(number))
        return True

    def _number(self, obj: Any) -> None:
        self._numbers[id(obj)] = len(self._numbers)

    @staticmethod
    def _check_depth(obj: Any, depth: int) -> None:
        if depth >= MAX_DEPTH:
            raise _NotPlainError(f"a {_type_name(obj)} more than {MAX_DEPTH} levels deep")


_WRITERS: dict[type, Callable[[_Writer, Any, int], None]] = {
    type(None): _Writer.write_none,
    bool: _Writer.write_bool,
    int: _Writer.write_int,
    float: _Writer.write_float,
    complex: _Writer.write_complex,
    str: _Writer.write_str,
    bytes: _Writer.write_bytes,
    bytearray: _Writer.write_bytearray,
    list: _Writer.write_list,
    tuple: _Writer.write_tuple,
    dict: _Writer.write_dict,
    set: _Writer.write_set,
    frozenset: _Writer.write_frozenset,
    np.ndarray: _Writer.write_array,
}


def _dtype_field(dtype: np.dtype[Any]) -> bytes:
    name = dtype.str.encode("ascii")
    return bytes((len(name),)) + name


# Reading ------------------------------------------------------------


def _load_typed(view: memoryview) -> Any:
    reader = _Reader(view)
    try:
        obj = reader.read(0)
    except DistError:
        raise
    # What bytes in disorder can provoke once lengths are checked: bad UTF-8, an unhashable key, an impossible
    # shape or dtype, a stack that was already deep.
    except (ValueError, TypeError, SyntaxError, OverflowError, RecursionError, MemoryError) as error:
        raise DistError(f"malformed object data near byte {reader.at}: {error}") from error
    if reader.at != len(view):
        reader.fail(f"{len(view) - reader.at} bytes too many")
    return obj


class _Reader:
    """Reads one message; ``at`` is the position of the next byte."""

    def __init__(self, view: memoryview) -> None:
        self.view = view
        self.at = 1
        self._shared: list[Any] = []
        self._hashed = 0

    def fail(self, what: str) -> NoReturn:
        raise DistError(f"malformed object data at byte {self.at} of {len(self.view)}: {what}")

    def read(self, depth: int) -> Any:
        tag = self._take(1)[0]
        read = _READERS.get(tag)
        if read is None:
            self.fail(f"unknown tag {tag}")
        return read(self, depth)

    def read_int(self, depth: int) -> int:
        return int(_INT.unpack(self._take(8))[0])

    def read_long(self, depth: int) -> int:
        body = self._body()
        return self._remember_long(int.from_bytes(body, "little", signed=True), len(body))

    def read_float(self, depth: int) -> float:
        return float(_FLOAT.unpack(self._take(8))[0])

    def read_complex(self, depth: int) -> complex:
        return complex(*_COMPLEX.unpack(self._take(16)))

    def read_str(self, depth: int) -> str:
        body = self._body()
        return self._remember_long(str(body, "utf-8", "surrogatepass"), len(body))

    def read_bytes(self, depth: int) -> bytes:
        body = self._body()
        return self._remember_long(bytes(body), len(body))

    def read_bytearray(self, depth: int) -> bytearray:
        return self._remember(bytearray(self._body()))

    def read_list(self, depth: int) -> list[Any]:
        result: list[Any] = self._remember([])
        for _ in range(self._count(depth)):
            result.append(self.read(depth + 1))
        return result

    def read_set(self, depth: int) -> set[Any]:
        result: set[Any] = self._remember(set())
        result.update(self._hashed_items(depth))
        return result

    def read_dict(self, depth: int) -> dict[Any, Any]:
        result: dict[Any, Any] = self._remember({})
        count = self._count(depth)
        for _ in range(count):
            self._hashed += 1
            key = self.read(depth + 1)
            self._hashed -= 1
            result[key] = self.read(depth + 1)
        if len(result) != count:
            self.fail("a key comes twice")
        return result

    def read_tuple(self, depth: int) -> tuple[Any, ...]:
        return self._remember_frozen(tuple([self.read(depth + 1) for _ in range(self._count(depth))]))

    def read_frozenset(self, depth: int) -> frozenset[Any]:
        return self._remember_frozen(self._hashed_items(depth))

    def read_array(self, depth: int) -> npt.NDArray[Any]:
        dtype = self._dtype()
        ndim = self._take(1)[0]
        shape = struct.unpack(f"<{ndim}Q", self._take(8 * ndim))
        return self._remember(self._elements(dtype, prod(shape)).reshape(shape))

    def read_scalar(self, depth: int) -> np.generic:
        scalar: np.generic = self._elements(self._dtype(), 1)[0]
        return scalar

    def read_reference(self, depth: int) -> Any:
        number = self._length()
        if number >= len(self._shared):
            self.fail(f"reference to value {number} of {len(self._shared)}")
        obj = self._shared[number]
        if self._hashed and isinstance(obj, (tuple, frozenset)):
            self.fail("a reference to a container inside a key")
        return obj

    def _take(self, count: int) -> memoryview:
        end = self.at + count
        if end > len(self.view):
            self.fail(f"{count} bytes expected, {len(self.view) - self.at} left")
        taken = self.view[self.at : end]
        self.at = end
        return taken

    def _length(self) -> int:
        return int(_LENGTH.unpack(self._take(8))[0])

    def _body(self) -> memoryview:
        return self._take(self._length())

    def _count(self, depth: int) -> int:
        """The number of items that follow; each takes a byte at least."""
        count = self._length()
        if count > len(self.view) - self.at:
            self.fail(f"{count} items expected, {len(self.view) - self.at} bytes left")
        if depth >= MAX_DEPTH:
            self.fail(f"nested more than {MAX_DEPTH} levels deep")
        return count

    def _hashed_items(self, depth: int) -> frozenset[Any]:
        count = self._count(depth)
        self._hashed += 1
        items = frozenset([self.read(depth + 1) for _ in range(count)])
        self._hashed -= 1
        if len(items) != count:
            self.fail("an item of a set comes twice")
        return items

    def _dtype(self) -> np.dtype[Any]:
        name = str(self._take(self._take(1)[0]), "ascii")
        if _DTYPE_NAME.fullmatch(name):
            dtype: np.dtype[Any] = np.dtype(name)
            if dtype.str == name and _plain_dtype(dtype):
                return dtype
        self.fail(f"dtype {name!r}")

    def _elements(self, dtype: np.dtype[Any], count: int) -> npt.NDArray[Any]:
        raw = np.frombuffer(self._take(count * dtype.itemsize), np.uint8)
        if dtype.kind == "b" and raw.size and raw.max() > 1:
            self.fail("a bool that is neither 0 nor 1")
        return raw.copy().view(dtype)

    def _remember_frozen(self, obj: T) -> T:
        return obj if self._hashed else self._remember(obj)

    def _remember(self, obj: T) -> T:
        self._shared.append(obj)
        return obj

    def _remember_long(self, obj: T, length: int) -> T:
        return self._remember(obj) if length >= _SHARED_FROM else obj


_READERS: dict[int, Callable[[_Reader, int], Any]] = {
    ord("N"): lambda reader, depth: None,
    ord("T"): lambda reader, depth: True,
    ord("F"): lambda reader, depth: False,
    ord("i"): _Reader.read_int,
    ord("I"): _Reader.read_long,
    ord("f"): _Reader.read_float,
    ord("c"): _Reader.read_complex,
    ord("s"): _Reader.read_str,
    ord("b"): _Reader.read_bytes,
    ord("B"): _Reader.read_bytearray,
    ord("l"): _Reader.read_list,
    ord("S"): _Reader.read_set,
    ord("d"): _Reader.read_dict,
    ord("t"): _Reader.read_tuple,
    ord("Z"): _Reader.read_frozenset,
    ord("a"): _Reader.read_array,
    ord("n"): _Reader.read_scalar,
    ord("r"): _Reader.read_reference,
}
