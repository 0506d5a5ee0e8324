"""JSON of other processes, in messages and files: of limited size, with finite numbers, and of the
expected kind.

A process of an open job, or of another version, may send anything. Here all of it is a ValueError;
``json.loads``, and what uses its result, raise other errors for nesting, ``Infinity`` or a missing
name.
"""

from __future__ import annotations

import errno
import json
import math
import os
import stat
from functools import partial
from typing import Any, NoReturn

from unicoll.errors import DistStoreError

MAX_SIZE = 1 << 20
"""Bytes of a text unless the reader passes another limit."""

MAX_FILE = 1 << 29
"""A dump of the most calls that a flight recorder keeps, 2**20, has about 400 MB."""

MALFORMED = (
    ValueError,
    KeyError,
    IndexError,
    TypeError,
    AttributeError,
    OverflowError,
    RecursionError,
)
"""The errors of code that reads fields of a value whose kind was not checked."""


def parse(text: bytes | str, kind: Any = object, most: int = MAX_SIZE) -> Any:
    """The value of a JSON text.

    Args:
        kind: what the value must be: a class or a union of classes, where an int is also a float
            and a bool is neither; ``[kind]``, a list of any length; ``(kind, kind)``, a list of so
            many; ``{name: kind}``, an object with at least these names.
        most: bytes of the text.

    Raises:
        ValueError: the text is longer, is not JSON, has a number that is not finite, is nested too
            deeply, or its value is of another kind.
    """
    if len(text) > most:
        raise ValueError(f"it has {len(text)} bytes, the maximum is {most}")
    # The text is decoded here, since json.loads() guesses the encoding of bytes.
    decoded = text.decode() if isinstance(text, bytes) else text
    try:
        # By itself json accepts NaN and Infinity, and reads 1e999 as infinity.
        value = json.loads(decoded, parse_constant=_refuse, parse_float=_finite)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    check(value, kind)
    return value


def read_json(path: str, directory: int | None = None) -> Any:
    """The content of a regular file of at most 512 MiB with JSON.

    Args:
        directory: descriptor of the directory that a relative path starts from, in place of the
            working directory.

    Raises:
        OSError: it cannot be read. It is something else, whose end might never come, or is larger.
        ValueError: it is not JSON, or nested too deeply.
    """
    with open(path, "rb", opener=partial(_open_at_once, directory)) as file:
        # The check is of the open file, which no other one can replace. A device may have no end.
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode):
            raise OSError(errno.EINVAL, "it is not a regular file", path)
        if found.st_size > MAX_FILE:
            raise OSError(
                errno.EFBIG, f"it has {found.st_size} bytes, the maximum is {MAX_FILE}", path
            )
        # The file may have grown since.
        text = file.read(MAX_FILE)
    return parse(text, most=MAX_FILE)


def from_store(key: str, text: bytes, kind: Any = object) -> Any:
    """The value of a JSON text that another process has stored under a key.

    Raises:
        DistStoreError: it is not of ``kind``, see :func:`parse`.
    """
    try:
        return parse(text, kind)
    except ValueError as error:
        raise foreign_value(key, error) from error


def foreign_value(key: str, error: Exception) -> DistStoreError:
    """The error for a value in a store that is not this version's."""
    return DistStoreError(f"the store's {key} is of another program or version of unicoll: {error}")


def _open_at_once(directory: int | None, path: str, flags: int) -> int:
    # Otherwise the open of a FIFO waits until another process writes to it.
    return os.open(path, flags | os.O_NONBLOCK, dir_fd=directory)


def check(value: Any, kind: Any, place: str = "it") -> None:
    """ValueError if the value is not of ``kind``, see :func:`parse`; ``place`` names it."""
    if isinstance(kind, dict):
        if not isinstance(value, dict):
            raise _wrong(place, "an object")
        for name, inner in kind.items():
            if name not in value:
                raise _wrong(place, f"an object with {name!r}")
            check(value[name], inner, f"its {name!r}")
    elif isinstance(kind, (list, tuple)):
        if not isinstance(value, list):
            raise _wrong(place, "a list")
        if not (isinstance(kind, list) or len(value) == len(kind)):
            raise _wrong(place, f"a list of {len(kind)}")
        for number, inner in enumerate(value):
            check(inner, kind[0 if isinstance(kind, list) else number], f"{place}[{number}]")
    else:
        accepted = kind | int if kind is float else kind
        is_number = isinstance(value, bool) and kind in (int, float)
        if not isinstance(value, accepted) or is_number:
            raise _wrong(place, getattr(kind, "__name__", str(kind)))


def _wrong(place: str, what: str) -> ValueError:
    return ValueError(f"{place} is not {what}")


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"it has {constant}")


def _finite(text: str) -> float:
    if not math.isfinite(value := float(text)):
        raise ValueError(f"it has {text[:32]}, which no float is")
    return value
