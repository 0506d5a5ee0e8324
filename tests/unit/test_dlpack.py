"""Arrays that are accessible by DLPack only: CPU arrays as NumPy views, CUDA arrays by their capsule."""

from __future__ import annotations

import ctypes
import gc
import sys
import weakref
from contextlib import nullcontext
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from tests.support.other_arrays import Exported
from unicoll.arrays import conversion, dlpack
from unicoll.arrays.conversion import Buffer, as_buffer
from unicoll.arrays.types import BY_NAME, Device
from unicoll.errors import DistArgumentError, DistTypeError


class Producer:
    """An array of an unknown library; its memory is a NumPy array's, on any device that it reports."""

    def __init__(self, array: Any, device: tuple[int, int] = (1, 0), old: bool = False) -> None:
        self.array = array
        self.device = device
        self.streams: list[Any] = []
        self._old = old

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device

    def __dlpack__(self, *, stream: Any = None, **options: Any) -> Any:
        if self._old and options:
            raise TypeError("unexpected keyword arguments")
        self.streams.append(stream)
        return self.array.__dlpack__(**{k: v for k, v in options.items() if k == "max_version"})


@pytest.mark.parametrize("old", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "int64", "uint8", "complex64", "bool"])
def test_a_cuda_array_is_read_from_its_capsule(dtype: str, old: bool) -> None:
    array = np.zeros((3, 4), dtype)
    producer = Producer(array, (2, 1), old)
    buffer = as_buffer(producer)
    assert (buffer.ptr, buffer.shape, buffer.count) == (array.ctypes.data, (3, 4), 12)
    assert (buffer.dtype.name, str(buffer.device), buffer.flat) == (dtype, "cuda:1", None)
    assert producer.streams == [1], "the producer must order its work before the legacy default stream"
    assert buffer.current_stream is not None
    assert buffer.current_stream() == buffer.stream == 0
    assert buffer.writable


def test_an_amd_array_is_a_cuda_array_ordered_by_stream_0() -> None:
    """DLPack's type of ROCm devices, which has no stream 1."""
    producer = Producer(np.zeros(3), (10, 1))
    buffer = as_buffer(producer)
    assert (str(buffer.device), buffer.stream) == ("cuda:1", 0)
    assert producer.streams == [0]


@pytest.mark.parametrize(("device", "old"), [((2, 0), False), ((1, 0), True)])
def test_memory_is_kept_alive_by_the_buffer(device: tuple[int, int], old: bool) -> None:
    class Array(np.ndarray[Any, Any]):
        pass

    array = np.zeros(3).view(Array)
    ref = weakref.ref(array)
    producer = Producer(array, device, old)
    buffer = as_buffer(producer)
    producer.array = None
    del array, producer
    buffer.owner = None
    gc.collect()
    assert ref() is not None
    del buffer
    gc.collect()
    assert ref() is None


@pytest.mark.parametrize("device", [1, 3, 11], ids=["CPU", "pinned by CUDA", "pinned by ROCm"])
@pytest.mark.parametrize("array", [np.arange(5.0), np.zeros((0, 3)), np.ones(()), np.ones((2, 3), bool)])
def test_an_array_in_host_memory_is_a_view(array: Any, device: int) -> None:
    producer = Producer(array, (device, 0))
    buffer = as_buffer(producer)
    assert buffer.flat is not None
    assert buffer.flat.size == 0 or buffer.flat.ctypes.data == array.ctypes.data
    assert (buffer.shape, buffer.dtype.storage, buffer.unpack) == (array.shape, array.dtype, None)
    assert buffer.owner is producer


class Relabelled(Producer):
    """The capsule says another element type of the same width."""

    def __init__(self, array: Any, code: int, device: tuple[int, int]) -> None:
        super().__init__(array, device, old=True)
        self.code = code

    def __dlpack__(self, *, stream: Any = None, **options: Any) -> Any:
        capsule = super().__dlpack__(stream=stream, **options)
        # DLTensor: pointer, device (two int32), int32, and then the uint8 code
        address = dlpack._get_pointer(capsule, b"dltensor")
        ctypes.c_uint8.from_address(address + 8 + 8 + 4).value = self.code
        return capsule


@pytest.mark.parametrize(
    ("name", "code", "width"),  # dlpack.h's DLDataTypeCode
    [
        ("bfloat16", 4, 2),
        ("float8_e4m3fn", 10, 1),
        ("float8_e5m2", 12, 1),
        ("float8_e3m4", 7, 1),
        ("float8_e4m3", 8, 1),
        ("float8_e4m3b11fnuz", 9, 1),
        ("float8_e4m3fnuz", 11, 1),
        ("float8_e5m2fnuz", 13, 1),
        ("float8_e8m0fnu", 14, 1),
        ("complex32", 5, 4),
    ],
)
@pytest.mark.parametrize("device", [1, 2, 3])
def test_types_that_numpy_lacks(name: str, code: int, width: int, device: int) -> None:
    array = np.arange(12, dtype=f"u{width}").reshape(3, 4)
    buffer = as_buffer(Relabelled(array, code, (device, 0)))
    assert (buffer.dtype.name, buffer.shape, buffer.count) == (name, (3, 4), 12)
    assert (buffer.flat is None) == (device == 2)
    if buffer.flat is not None:
        assert buffer.flat.tolist() == list(range(12))
        turned = as_buffer(Relabelled(array[::-1].T, code, (device, 0)))
        assert turned.dtype.name == name
        assert turned.flat is not None
        assert turned.flat.tolist() == array[::-1].T.reshape(-1).tolist()
        turned.flat[0] = 77
        turned.write_back()
        assert array[2, 0] == 77


@pytest.mark.parametrize("dtype", ["float32", "float16", "int64", "complex64", "bool"])
def test_unversioned_memory_is_writable(dtype: str) -> None:
    array = np.zeros((3, 4), dtype)
    producer = Producer(array, old=True)
    buffer = as_buffer(producer)
    assert buffer.writable
    assert buffer.owner is producer
    assert (buffer.dtype.name, buffer.shape) == (dtype, (3, 4))
    assert buffer.flat is not None
    buffer.flat[:] = 1
    assert (array == 1).all()
    transposed = np.zeros((4, 3), dtype)
    buffer = as_buffer(Producer(transposed.T, old=True))
    assert buffer.flat is not None
    buffer.flat[:] = np.arange(12) % 2
    buffer.write_back()
    assert (transposed.T.reshape(-1) == (np.arange(12) % 2).astype(dtype)).all()


@pytest.mark.parametrize("device", [(1, 0), (2, 0)])
def test_read_only_memory_is_not_writable(device: tuple[int, int]) -> None:
    array = np.zeros(3)
    array.flags.writeable = False
    try:
        buffer = as_buffer(Producer(array, device))
    except BufferError:  # NumPy before 2.1 does not export it
        pytest.skip("this NumPy does not export read-only memory")
    assert not buffer.writable


class Packed:
    """An array of a library that packs it."""

    def __init__(self, producer: Producer, device: Device) -> None:
        self.producer, self.device = producer, device

    def buffer(self) -> Buffer:
        array = self.producer.array
        packed = np.ascontiguousarray(array)

        def unpack() -> None:
            array[...] = packed

        address = packed.ctypes.data
        return Buffer(
            self, BY_NAME["float64"], array.shape, None, True, unpack, self.device, address, packed.size
        )


def test_a_cuda_array_that_is_not_contiguous_is_packed_by_cupy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not if CuPy has copied it to another device."""
    library: Any = ModuleType("cupy")
    streams: list[int] = []
    library.cuda = SimpleNamespace(
        Device=lambda index: nullcontext(), ExternalStream=lambda s: nullcontext(streams.append(s))
    )
    monkeypatch.setitem(sys.modules, "cupy", library)
    monkeypatch.setitem(conversion._ADAPTERS, Packed, Packed.buffer)
    array = np.arange(16.0).reshape(4, 4)
    producer = Producer(array[:, ::2], (2, 1))
    library.from_dlpack = lambda given: Packed(given, Device("cuda", 1))
    buffer = as_buffer(producer)
    assert (buffer.owner, buffer.device, buffer.shape, buffer.writable) == (
        producer,
        Device("cuda", 1),
        (4, 2),
        True,
    )
    packed = np.frombuffer((ctypes.c_double * 8).from_address(buffer.ptr))
    assert packed.tolist() == [*range(0, 16, 2)]
    packed += 0.5
    buffer.write_back()
    assert (array == np.arange(16.0).reshape(4, 4) + [0.5, 0, 0.5, 0]).all()
    assert streams == [0, 0]
    library.from_dlpack = lambda given: Packed(given, Device("cuda", 0))
    with pytest.raises(DistArgumentError, match="a DLPack array that is not contiguous can be"):
        as_buffer(producer)
    failure = RuntimeError("no memory")
    library.from_dlpack = Mock(side_effect=failure)
    with pytest.raises(DistArgumentError, match=r"send: .* packs it \(RuntimeError: no memory\)") as caught:
        as_buffer(producer, "send: tensor")
    assert caught.value.__cause__ is failure


def test_unsupported_arrays_raise() -> None:
    with pytest.raises(DistArgumentError, match="not contiguous"):
        as_buffer(Producer(np.zeros((4, 4))[:, ::2], (2, 0)))
    with pytest.raises(DistTypeError, match="DLPack type 8"):
        as_buffer(Producer(np.zeros(3), (8, 0)))


class Refusing:
    """What a library raises for what DLPack lacks."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def __dlpack_device__(self) -> tuple[int, int]:
        return 1, 0

    def __dlpack__(self, **options: Any) -> Any:
        raise self.error


@pytest.mark.parametrize("error", [BufferError, RuntimeError, TypeError, ValueError])
def test_what_its_library_does_not_export_is_refused(error: type[Exception]) -> None:
    words = rf"broadcast: tensor: .*\.Refusing cannot be communicated: its __dlpack__ raises {error.__name__}: not this"
    with pytest.raises(DistTypeError, match=words):
        as_buffer(Refusing(error("not this")), "broadcast: tensor")


def test_two_elements_in_a_byte() -> None:
    torch = pytest.importorskip("torch")
    if not hasattr(torch, "float4_e2m1fn_x2"):
        pytest.skip("this torch has no float4")
    tensor = torch.arange(6, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
    buffer = as_buffer(Exported(tensor))
    assert (buffer.dtype.name, buffer.shape) == ("float4_e2m1fn_x2", (6,))
    assert buffer.flat is not None
    assert buffer.flat.tolist() == list(range(6))


class Anything:
    """Has every attribute."""

    def __getattr__(self, name: str) -> Any:
        return None


@pytest.mark.parametrize("given", [np.ndarray, Producer, Anything(), Anything])
def test_what_is_no_array_is_refused(given: Any) -> None:
    with pytest.raises(DistTypeError, match="expected an array"):
        as_buffer(given)


def test_a_released_memoryview_is_refused() -> None:
    view = memoryview(bytearray(4))
    view.release()
    with pytest.raises(DistTypeError, match="memoryview: operation forbidden on released"):
        as_buffer(view)


@pytest.mark.parametrize("dtype", ["bfloat16", "complex32", "float64"])
def test_another_byte_order_is_refused(dtype: str) -> None:
    kind = np.dtype(dtype if dtype == "float64" else getattr(pytest.importorskip("ml_dtypes"), dtype))
    with pytest.raises(DistTypeError, match="byte order"):
        as_buffer(np.zeros(3, kind).view(kind.newbyteorder()))
