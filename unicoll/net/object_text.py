"""Simple plain objects as JSON, which Python writes and reads in C: several times faster than the typed format.

Only objects that JSON gives back exactly are written so: lists, and dicts whose keys are strings, of None, bool, 64-bit
int, float but NaN (whose bits would change) and short str, of few containers, none of which occurs twice.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from unicoll.net.object_format import MAX_DEPTH, MIN_SHARED_SIZE, TEXT

_OTHERS = frozenset((bool, type(None)))
_FIRST = bytes((TEXT,))


@cache
def _json() -> tuple[Callable[[Any], str], Callable[[str], tuple[Any, int]]]:
    """The functions that write a text, and that read one and say where it ends."""
    import json  # in a job it is there already; ``import unicoll`` does without it

    encoder = json.JSONEncoder(ensure_ascii=False, check_circular=False, separators=(",", ":"))
    return encoder.encode, json.JSONDecoder().raw_decode


def write(obj: Any) -> bytes | None:
    """A list or dict as a message in JSON; None if it is not simple enough."""
    if not _is_simple(obj):
        return None
    try:
        text = _json()[0](obj)
    except RecursionError:  # the stack was deep before the call
        return None
    return _FIRST + text.encode("utf-8", "surrogatepass") if _is_flat(text) else None


def read(message: memoryview) -> Any:
    """The list or dict of a message.

    Raises:
        ValueError, RecursionError: it is malformed.
    """
    text = str(message[1:], "utf-8", "surrogatepass")
    if text[:1] not in ("{", "["):
        raise ValueError("no list or dict")
    if not _is_flat(text):
        raise ValueError(f"more than {MAX_DEPTH} containers")
    obj, end = _json()[1](text)
    if end != len(text):
        raise ValueError(f"{len(text) - end} characters too many")
    return obj


def _is_flat(text: str) -> bool:
    """True if a text has so few brackets that it cannot be nested deeper than :data:`MAX_DEPTH`."""
    return text.count("[") + text.count("{") <= MAX_DEPTH


def _is_simple(root: Any) -> bool:
    """True if JSON holds a list or dict exactly."""
    containers = [root]
    for container in containers:  # which grows
        values = container
        if type(container) is dict:
            for key in container:
                if type(key) is not str or len(key) >= MIN_SHARED_SIZE:
                    return False
            values = container.values()
        for value in values:
            kind = type(value)
            if kind is str:
                if len(value) >= MIN_SHARED_SIZE:  # the typed format writes it once
                    return False
            elif kind is int:
                if not -(1 << 63) <= value < 1 << 63:
                    return False
            elif kind is float:
                if value != value:
                    return False
            elif kind is dict or kind is list:
                if len(containers) == MAX_DEPTH:
                    return False
                containers.append(value)
            elif kind not in _OTHERS:
                return False
    return len(containers) == 1 or len(set(map(id, containers))) == len(containers)
