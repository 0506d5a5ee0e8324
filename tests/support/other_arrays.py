"""Arrays in host memory of libraries that unicoll does not know, over the memory of a NumPy array."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from unicoll.arrays.conversion import Buffer, as_buffer, register_family


class Exported:
    """Accessible by DLPack."""

    def __init__(self, array: Any) -> None:
        self.array = array

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.array.__dlpack_device__()  # type: ignore[no-any-return]

    def __dlpack__(self, **arguments: Any) -> Any:
        return self.array.__dlpack__(**arguments)


class Registered:
    """Of a registered family."""

    __module__ = "tests.registered_arrays"

    def __init__(self, array: Any) -> None:
        self.array = array


def _adapt(registered: Any) -> Buffer:
    buffer = as_buffer(registered.array)
    buffer.owner = registered
    return buffer


register_family(Registered.__module__, lambda: _adapt)

KINDS: dict[str, Callable[[Any], Any]] = {
    "memoryview": memoryview,
    "DLPack": Exported,
    "registered": Registered,
}
"""By name: the function that makes an array of the kind over a NumPy array."""
