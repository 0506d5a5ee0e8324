"""Objects as bytes: a typed format for plain objects, or JSON for small ones; pickle for other objects.

Plain objects are None, bool, int (any size), float, complex, str, bytes, bytearray, list, tuple, dict, set,
frozenset, and NumPy arrays and scalars of bool, integer, float, complex and datetime dtypes, in any nesting, with
shared and cyclic references. They never use pickle, so reading them runs no code. An object that contains a subclass
of these types (an IntEnum, a namedtuple, an OrderedDict) or another type is pickled whole, if pickle is allowed.

:mod:`unicoll.net.object_writer` and :mod:`~unicoll.net.object_reader` write and read the typed format, which
:mod:`~unicoll.net.object_format` defines, and :mod:`~unicoll.net.object_text` the JSON.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

from unicoll.errors import DistError, PickleRefusedError
from unicoll.net import object_text
from unicoll.net.object_format import PICKLED, TEXT, TYPED, NotPlainError, type_name
from unicoll.net.object_reader import Reader
from unicoll.net.object_writer import Writer

HOW_TO_ALLOW = (
    "Pickle is not allowed in this job. Send plain objects (numbers, str, bytes, lists, tuples, dicts, sets, NumPy "
    "arrays), or allow it: start every rank with the same UNICOLL_SECRET (unicoll's launcher makes one), and "
    "without UNICOLL_ALLOW_PICKLE=0."
)
"""The end of a refusal's message."""

Bytes = bytes | bytearray | memoryview
Allowed = bool | Callable[[], bool]
"""True if pickle may be used, or a function that says so, which is called only if it matters."""
_CONTAINERS = frozenset((dict, list))
"""Types of objects that may be written as JSON."""


def dumps(obj: object, allow_pickle: Allowed) -> bytes:
    """``obj`` as bytes, from which :func:`loads` makes an equal object of the same type.

    Args:
        obj: any object.
        allow_pickle: if an object that is not plain (see the module) may be pickled.

    Raises:
        PickleRefusedError: the object needs pickle and ``allow_pickle`` is false; the message has the type.
        DistError: pickle cannot serialise the object.
    """
    if type(obj) in _CONTAINERS and (text := object_text.write(obj)) is not None:
        return text
    writer = Writer()
    try:
        writer.write(obj, 0)
    except NotPlainError as reason:
        return _pickle(obj, allow_pickle, str(reason))
    except RecursionError:
        return _pickle(obj, allow_pickle, f"a deeply nested {type_name(obj)}")
    return b"".join(writer.parts)


def loads(data: Bytes, allow_pickle: Allowed) -> Any:
    """The object that :func:`dumps` has written to ``data``.

    Arrays are C-contiguous, writable and independent of ``data``.

    Raises:
        PickleRefusedError: the data is a pickle and ``allow_pickle`` is false.
        DistError: the data is malformed, cut short or too long, or unpickling failed.
    """
    view = memoryview(data)
    if view.nbytes == 0:
        raise DistError("malformed object data: it is empty")
    view = view.cast("B")
    kind = view[0]
    if kind == TEXT:
        return _load_text(view)
    if kind == TYPED:
        return _load_typed(view)
    if kind != PICKLED:
        raise DistError(f"malformed object data: unknown format {kind}")
    if not _is(allow_pickle):
        raise PickleRefusedError(f"received a pickled object of {len(view) - 1} bytes. {HOW_TO_ALLOW}")
    try:
        return pickle.loads(view[1:])
    except Exception as error:
        raise DistError(f"cannot unpickle an object: {type(error).__name__}: {error}") from error


def _is(allowed: Allowed) -> bool:
    return allowed() if callable(allowed) else allowed


def _pickle(obj: object, allowed: Allowed, reason: str) -> bytes:
    if not _is(allowed):
        raise PickleRefusedError(f"{reason} can be sent only by pickle. {HOW_TO_ALLOW}")
    try:
        return bytes((PICKLED,)) + pickle.dumps(obj, protocol=pickle.HIGHEST_PROTOCOL)
    except Exception as error:
        raise DistError(f"cannot pickle {type_name(obj)}: {type(error).__name__}: {error}") from error


def _load_text(view: memoryview) -> Any:
    try:
        return object_text.read(view)
    except (ValueError, RecursionError, MemoryError) as error:
        raise DistError(f"malformed object data in JSON: {error}") from error


def _load_typed(view: memoryview) -> Any:
    reader = Reader(view)
    try:
        obj = reader.read(0)
    except DistError:
        raise
    # Malformed bytes can still cause these after the checks of lengths: bad UTF-8, an unhashable key, an
    # impossible shape or dtype, a stack that was deep before the call.
    except (ValueError, TypeError, SyntaxError, OverflowError, RecursionError, MemoryError) as error:
        raise DistError(f"malformed object data near byte {reader.at}: {error}") from error
    if reader.at != len(view):
        reader.fail(f"{len(view) - reader.at} bytes too many")
    return obj
