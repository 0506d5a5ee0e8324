"""Arrays that lend their memory by DLPack alone: on the CPU as NumPy views, on a CUDA device by the capsule."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import numpy as np
import pytest

from unicoll.buffers import as_buffer
from unicoll.errors import DistArgumentError, DistTypeError


class Lender:
    """An array of a library that nobody knows; its memory is NumPy's, wherever it says that it is."""

    def __init__(self, array: Any, device: tuple[int, int] = (1, 0), old: bool = False) -> None:
        self.array = array
        self.device = device
        self.asked: list[Any] = []
        self._old = old

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device

    def __dlpack__(self, *, stream: Any = None, **more: Any) -> Any:
        if self._old and more:
            raise TypeError("unexpected keyword arguments")
        self.asked.append(stream)
        return self.array.__dlpack__(**{k: v for k, v in more.items() if k == "max_version"})


@pytest.mark.parametrize("old", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "int64", "uint8", "complex64", "bool"])
def test_a_cuda_array_is_read_from_its_capsule(dtype: str, old: bool) -> None:
    array = np.zeros((3, 4), dtype)
    lender = Lender(array, (2, 1), old)
    buffer = as_buffer(lender)
    assert (buffer.ptr, buffer.shape, buffer.count) == (array.ctypes.data, (3, 4), 12)
    assert (buffer.dtype.name, str(buffer.device), buffer.flat) == (dtype, "cuda:1", None)
    assert lender.asked == [1], "the producer must order its work before the legacy default stream"
    assert buffer.here is not None
    assert buffer.here() == buffer.stream == 0
    assert buffer.writable


def test_the_memory_is_held_as_long_as_the_buffer() -> None:
    class Array(np.ndarray[Any, Any]):
        pass

    array = np.zeros(3).view(Array)
    gone = weakref.ref(array)
    lender = Lender(array, (2, 0))
    buffer = as_buffer(lender)
    lender.array = None
    del array, lender
    buffer.owner = None
    gc.collect()
    assert gone() is not None
    del buffer
    gc.collect()
    assert gone() is None


def test_a_cpu_array_is_a_view() -> None:
    array = np.arange(5.0)
    lender = Lender(array)
    buffer = as_buffer(lender)
    assert buffer.flat is not None
    assert np.shares_memory(buffer.flat, array)
    assert buffer.owner is lender


def test_read_only_memory_is_not_written() -> None:
    array = np.zeros(3)
    array.flags.writeable = False
    try:
        buffer = as_buffer(Lender(array, (2, 0)))
    except BufferError:  # NumPy before 2.1 does not lend it at all
        pytest.skip("this NumPy does not lend read-only memory")
    assert not buffer.writable


def test_what_cannot_be_communicated_is_refused() -> None:
    with pytest.raises(DistArgumentError, match="not contiguous"):
        as_buffer(Lender(np.zeros((4, 4))[:, ::2], (2, 0)))
    with pytest.raises(DistTypeError, match="DLPack type 10"):
        as_buffer(Lender(np.zeros(3), (10, 0)))
