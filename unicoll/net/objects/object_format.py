"""The typed format of objects.

The first byte of a message is :data:`TYPED` or :data:`PICKLED`. In the typed format a value is a
one-byte tag and its body; integers and lengths are little-endian. Values that can be shared are
numbered in order of first occurrence, on both sides; each later occurrence is a reference to the
number. Tuples and frozensets inside a key or a set's item are not numbered: hashing them visits all
their items, and references would make that exponential.
"""

from __future__ import annotations

import re
import struct
from typing import Any

import numpy as np

TYPED, PICKLED = 1, 2
MAX_DEPTH = 100
"""Containers nested deeper than this are refused."""

LENGTH = struct.Struct("<Q")
INT = struct.Struct("<q")
FLOAT = struct.Struct("<d")
COMPLEX = struct.Struct("<dd")
MIN_SHARED_SIZE = 64
"""Bytes from which a str, bytes or int body is numbered, so that a repetition takes 9 bytes."""
DTYPE_NAME = re.compile(r"[|<>][biufcmM]\d{1,2}(\[\d{0,9}[a-zA-Z]{1,2}\])?")

_DTYPE_KINDS = "biufcmM"


class NotPlainError(Exception):
    """The typed format cannot hold an object; the message names its type."""


def is_plain_dtype(dtype: np.dtype[Any]) -> bool:
    """True if ``dtype.str`` defines the dtype completely, on every machine (long double differs
    between machines)."""
    if dtype.kind not in _DTYPE_KINDS or dtype.itemsize > (16 if dtype.kind == "c" else 8):
        return False
    return dtype.metadata is None and np.dtype(dtype.str) == dtype


def type_name(obj: object) -> str:
    """The qualified name of an object's type, without ``builtins``."""
    kind = type(obj)
    return (
        kind.__qualname__
        if kind.__module__ == "builtins"
        else f"{kind.__module__}.{kind.__qualname__}"
    )
