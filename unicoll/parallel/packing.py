"""Several arrays packed into one for communication: kinds of arrays, buckets, and the copies.

CuPy and torch are taken from ``sys.modules``; this module imports neither.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from unicoll.arrays.conversion import as_buffer
from unicoll.arrays.torch_tensors import as_integers
from unicoll.arrays.types import BY_NAME, QUANTIZED, DType
from unicoll.errors import (
    BackendUnavailableError,
    DistArgumentError,
    DistTypeError,
)

Arrays = Sequence[Any] | Mapping[str, Any]
"""Arrays in the same order on every rank; the keys of a mapping are used as names in messages."""


_SMALL_BUCKET = 1 << 16
"""Bytes up to which symmetric memory is of no use."""


class Kind(NamedTuple):
    """Properties that arrays in one flat array have in common.

    Attributes:
        family: array library, ``"numpy"``, ``"cupy"`` or ``"torch"``.
        device: ``"cpu"`` or ``"cuda:0"``, for example.
        dtype: dtype object of the library.
    """

    family: str
    device: str
    dtype: Any

    @property
    def on_host(self) -> bool:
        return self.device == "cpu"

    def __str__(self) -> str:
        where = "" if self.on_host else f" on {self.device}"
        return f"{self.family} {str(self.dtype).removeprefix('torch.')}{where}"


def of_known_library(array: Any) -> Any:
    """The array itself if NumPy, CuPy or torch made it; else a NumPy array over its memory, which
    is in host memory.

    Raises:
        DistTypeError: it is no array, or is on a device, or of a type that NumPy lacks.
        DistArgumentError: its memory is not contiguous.
    """
    if _family(array) is not None:
        return array
    name = type(array).__name__
    buffer = as_buffer(array)
    if buffer.flat is None or not buffer.dtype.native:
        raise DistTypeError(
            "expected an array of NumPy, CuPy or torch, or in host memory and of a type that NumPy"
            f" has, got {name}"
        )
    if buffer.unpack is not None:
        raise DistArgumentError(
            f"{name}: its memory is not contiguous; make a contiguous one first"
        )
    view = buffer.flat.reshape(buffer.shape)
    view.flags.writeable = view.flags.writeable and buffer.writable
    return view


def kind_of(array: Any) -> Kind:
    """The array's kind; NumPy's scalars count as arrays of shape (). DistTypeError if it is not an
    array."""
    family = _family(array)
    if family == "numpy":
        return Kind(family, "cpu", array.dtype)
    if family == "torch":
        return Kind(family, str(array.device), array.dtype)
    if family == "cupy":
        return Kind(family, f"cuda:{array.device.id}", array.dtype)
    raise DistTypeError(f"expected an array of NumPy, CuPy or torch, got {type(array).__name__}")


def is_of_known_library(array: Any) -> bool:
    """True if NumPy, CuPy or torch made it."""
    return _family(array) is not None


def _family(array: Any) -> str | None:
    """The library that made the array; None: another one, or it is no array."""
    if isinstance(array, np.ndarray | np.generic):
        return "numpy"
    for module, name in (("torch", "Tensor"), ("cupy", "ndarray")):
        if isinstance(array, getattr(sys.modules.get(module), name, ())):
            return module
    return None


def element_type(kind: Kind) -> DType:
    """The element type of a kind; DistTypeError if no collective supports it, or if its bytes are
    not its values."""
    found = BY_NAME.get(str(kind.dtype).removeprefix("torch."))
    # Another rank's scale may differ.
    if found is None or found.name in QUANTIZED:
        reason = "" if found is None else ": their scale and zero point are not in their memory"
        raise DistTypeError(f"arrays of {kind} cannot be communicated{reason}")
    return found


def named(arrays: Arrays) -> tuple[list[str], list[Any]]:
    """Names and arrays, in order, with :func:`of_known_library`; those of a sequence are called
    ``#0``, ``#1``...

    Raises:
        DistTypeError, DistArgumentError: as that function, with the name.
    """
    if isinstance(arrays, Mapping):
        names, given = list(arrays), list(arrays.values())
    else:
        names, given = [f"#{i}" for i in range(len(arrays))], list(arrays)
    found = []
    for name, array in zip(names, given, strict=True):
        try:
            found.append(of_known_library(array))
        except DistArgumentError as e:
            raise type(e)(f"{name}: {e}") from None
    return names, found


def listed(names: Sequence[str]) -> str:
    """``parameters a, b and 3 more``, for messages; the first eight."""
    most = 8
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ("parameter " if len(names) == 1 else "parameters ") + ", ".join(names[:most]) + more


def without_history(array: Any) -> Any:
    """An array over the same memory without autograd history."""
    return array.detach() if hasattr(array, "detach") else array


def flat_like(array: Any, count: int) -> Any:
    """An uninitialised 1-D array of ``count`` elements, of the same kind and on the same device."""
    kind = kind_of(array)
    if kind.family == "numpy":
        return np.empty(count, array.dtype)
    if kind.family == "torch":
        return array.new_empty(count)
    with array.device:
        return sys.modules["cupy"].empty(count, array.dtype)


def bucket_like(group: Any, array: Any, count: int) -> Any:
    """:func:`flat_like` in symmetric memory of the group where that is of use; all members call it.

    On a CPU the ranks then average without copies.
    """
    kind = kind_of(array)
    nbytes = count * element_type(kind).itemsize
    if not kind.on_host or nbytes <= _SMALL_BUCKET:
        return flat_like(array, count)
    try:
        memory = group.symmetric_empty(nbytes, "uint8", device="cpu")
    except BackendUnavailableError:
        # All members get this error or none does, so their buckets are of one kind.
        return flat_like(array, count)
    if kind.family == "torch":
        return sys.modules["torch"].from_numpy(memory).view(kind.dtype)
    return memory.view(kind.dtype)


def host_bytes(array: Any) -> npt.NDArray[np.uint8]:
    """The elements' bytes in C order, in host memory; shares memory with a contiguous array on the
    CPU."""
    kind = kind_of(array)
    if kind.family == "torch":
        array = array.detach().cpu()
    else:
        array = array.get() if kind.family == "cupy" else np.asarray(array)
    flat = as_buffer(array).flat
    # The array is on the CPU by now.
    assert flat is not None
    return flat.view(np.uint8)


def byte_array(data: npt.NDArray[np.uint8], like: Any) -> Any:
    """The bytes as an array of the library and on the device of ``like``."""
    kind = kind_of(like)
    if kind.family == "numpy":
        return data
    if kind.family == "torch":
        return sys.modules["torch"].from_numpy(data).to(like.device)
    with like.device:
        return sys.modules["cupy"].asarray(data)


def plan_buckets(
    kinds: Sequence[Hashable], sizes: Sequence[int], order: Iterable[int], first_cap: int, cap: int
) -> list[list[int]]:
    """Group arrays into buckets.

    Args:
        kinds: per array, its kind; the arrays of a bucket have the same kind.
        sizes: bytes per array.
        order: the arrays' indices, in the order in which they fill the buckets.
        first_cap: maximum bytes of the first bucket of a kind.
        cap: maximum bytes of each further bucket. A larger array has its own bucket.

    Returns:
        The buckets, each a list of indices, in the order in which they are complete if arrays
        arrive in ``order``.
    """
    filling: dict[Hashable, tuple[list[int], int]] = {}
    limits: dict[Hashable, int] = {}
    full: list[list[int]] = []
    position: dict[int, int] = {}
    for index in order:
        position[index] = len(position)
        kind = kinds[index]
        members, used = filling.get(kind, ([], 0))
        if members and used + sizes[index] > limits.setdefault(kind, first_cap):
            full.append(members)
            limits[kind] = cap
            members, used = [], 0
        members.append(index)
        filling[kind] = (members, used + sizes[index])
    full += [members for members, _ in filling.values()]
    return sorted(full, key=lambda members: position[members[-1]])


def parts(flat: Any, shapes: Iterable[Sequence[int]]) -> list[Any]:
    """Consecutive parts of a flat array, as views with these shapes."""
    found, start = [], 0
    for shape in shapes:
        end = start + math.prod(shape)
        found.append(flat[start:end].reshape(shape))
        start = end
    return found


class Packer:
    """Arrays of one kind and a flat array for their communication; a single contiguous array is
    used without a copy."""

    def __init__(self, arrays: Sequence[Any]) -> None:
        arrays = [without_history(a) for a in arrays]
        first = arrays[0]
        # The pairs are arrays, and their parts of the flat array.
        self._copied: list[tuple[Any, Any]] = []
        if len(arrays) == 1 and is_contiguous(first):
            self.flat = first.reshape(-1)
        else:
            shapes = [array.shape for array in arrays]
            self.flat = flat_like(first, sum(map(math.prod, shapes)))
            self._copied = [
                (_copyable(array), _copyable(part))
                for array, part in zip(arrays, parts(self.flat, shapes), strict=True)
            ]

    def pack(self) -> None:
        for array, part in self._copied:
            part[...] = array

    def unpack(self) -> None:
        for array, part in self._copied:
            array[...] = part


def _copyable(array: Any) -> Any:
    """A view of an array of which the library can copy the elements."""
    kind = kind_of(array)
    return as_integers(array, element_type(kind)) if kind.family == "torch" else array


def is_contiguous(array: Any) -> bool:
    """True if the elements are in C order without gaps."""
    return bool(
        array.is_contiguous() if hasattr(array, "is_contiguous") else array.flags.c_contiguous
    )


def check_writable(name: str, array: Any) -> None:
    """Raise DistArgumentError for a read-only array, DistTypeError if it is not an array of a
    supported dtype."""
    try:
        element_type(kind_of(array))
    except DistTypeError as e:
        raise DistTypeError(f"{name}: {e}") from None
    if isinstance(array, np.generic):
        raise DistTypeError(
            f"{name} is a NumPy scalar, not an array; results cannot be written to it"
        )
    if isinstance(array, np.ndarray) and not array.flags.writeable:
        raise DistArgumentError(f"{name} is read-only; results cannot be written to it")
