"""Objects as bytes: by pickle where it is allowed, else plain objects in a typed format.

Plain objects are None, bool, int (any size), float, complex, str, bytes, bytearray, list, tuple,
dict, set, frozenset, and NumPy arrays and scalars of bool, integer, float, complex and datetime
dtypes, in any nesting, with shared and cyclic references. Reading the typed format runs no code. A
subclass of these types (an IntEnum, a namedtuple, an OrderedDict) is not plain.

:mod:`unicoll.net.objects.object_writer` and :mod:`~unicoll.net.objects.object_reader` write and
read the typed format, which :mod:`~unicoll.net.objects.object_format` defines.
"""

from __future__ import annotations

import pickle
from io import BytesIO
from typing import Any

from unicoll.errors import DistError, PickleRefusedError
from unicoll.net.objects.object_format import PICKLED, TYPED, NotPlainError, type_name
from unicoll.net.objects.object_reader import Reader
from unicoll.net.objects.object_writer import Writer

HOW_TO_ALLOW = (
    "Pickle is not allowed in this job. Send plain objects (numbers, str, bytes, lists, tuples,"
    " dicts, sets, NumPy arrays), or allow it: start every rank with the same UNICOLL_SECRET, for"
    " example the output of `openssl rand -hex 32` (unicoll's launcher makes one on one node), and"
    " without UNICOLL_ALLOW_PICKLE=0."
)
"""The end of a refusal's message."""

Bytes = bytes | bytearray | memoryview
_PICKLED = bytes((PICKLED,))


def dumps(obj: object, allow_pickle: bool) -> bytes:
    """``obj`` as bytes, from which :func:`loads` makes an equal object of the same type.

    Args:
        obj: any object.
        allow_pickle: True to pickle it; else it must be plain (see the module).

    Raises:
        PickleRefusedError: the object is not plain and ``allow_pickle`` is false; the message has
            the type.
        DistError: pickle cannot serialise the object.
    """
    if allow_pickle:
        try:
            # The pickle is written behind the tag at once: to join the two would copy a large one.
            pickled = BytesIO()
            pickled.write(_PICKLED)
            pickle.dump(obj, pickled, protocol=pickle.HIGHEST_PROTOCOL)
            return pickled.getvalue()
        except Exception as error:
            name = type_name(_first_unpicklable(obj))
            raise DistError(f"cannot pickle {name}: {type(error).__name__}: {error}") from error
    writer = Writer()
    try:
        writer.write(obj, 0)
    except NotPlainError as error:
        reason = str(error)
    except RecursionError:
        reason = f"a deeply nested {type_name(obj)}"
    else:
        return b"".join(writer.parts)
    raise PickleRefusedError(f"{reason} can be sent only by pickle. {HOW_TO_ALLOW}")


def loads(data: Bytes, allow_pickle: bool) -> Any:
    """The object that :func:`dumps` has written to ``data``.

    Arrays are writable and independent of ``data``.

    Raises:
        PickleRefusedError: the data is a pickle and ``allow_pickle`` is false.
        DistError: the data is malformed, cut short or too long, or unpickling failed.
    """
    view = memoryview(data)
    if view.nbytes == 0:
        raise DistError("malformed object data: it is empty")
    view = view.cast("B")
    kind = view[0]
    if kind == PICKLED:
        # The permission of the sender is not that of this process.
        if not allow_pickle:
            raise PickleRefusedError(
                f"received a pickled object of {len(view) - 1} bytes. {HOW_TO_ALLOW}"
            )
        try:
            return pickle.loads(view[1:])
        except Exception as error:
            raise DistError(
                f"cannot unpickle an object: {type(error).__name__}: {error}"
            ) from error
    if kind == TYPED:
        return _load_typed(view)
    raise DistError(f"malformed object data: unknown format {kind}")


def _first_unpicklable(obj: object) -> object:
    """The first entry of a list that pickle refuses, or the object itself; for an error."""
    for entry in obj if type(obj) is list else ():
        try:
            pickle.dumps(entry)
        except Exception:
            return entry
    return obj


def _load_typed(view: memoryview) -> Any:
    reader = Reader(view)
    try:
        obj = reader.read(0)
    except DistError:
        raise
    # Malformed bytes can still cause these after the checks of lengths: bad UTF-8, an unhashable
    # key, an impossible shape or dtype, a stack that was deep before the call.
    except (
        ValueError,
        TypeError,
        SyntaxError,
        OverflowError,
        RecursionError,
        MemoryError,
    ) as error:
        raise DistError(f"malformed object data near byte {reader.at}: {error}") from error
    if reader.at != len(view):
        reader.fail(f"{len(view) - reader.at} bytes too many")
    return obj
