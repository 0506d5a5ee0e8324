"""Conversion of arrays to buffers: ``as_buffer(array) -> Buffer``, with one adapter per array
family.

The family follows from the array's type: NumPy, torch, CuPy, then any type with
``__sycl_usm_array_interface__``, ``__dlpack__``, ``__cuda_array_interface__`` or the buffer
protocol. The adapters for torch and CuPy take the module from ``sys.modules`` and import nothing.

Backends always get contiguous memory. An array that is not contiguous is packed into a copy, and a
result is copied back with :meth:`Buffer.write_back`; the array keeps its strides.

An array of a subclass is first viewed as a plain array with the methods of the family's base class,
so no override of the subclass is called. A subclass whose memory does not hold its elements raises
an error that names it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import cache, partial
from importlib import import_module
from typing import Any

import numpy as np

from unicoll.arrays import dlpack
from unicoll.arrays.buffer import (
    Adapter,
    Buffer,
    FlatArray,
    WriteBack,
    has_shared_elements,
    register_current_stream,
)
from unicoll.arrays.torch_tensors import torch_family
from unicoll.arrays.types import BY_NAME, DTYPES, Device, DType
from unicoll.devices import runtimes
from unicoll.devices.device_runtime import LEGACY_STREAM
from unicoll.errors import DistArgumentError, DistTypeError

__all__ = ["Buffer", "as_buffer", "as_buffers", "register_family"]

# --- NumPy ----------------------------------------------------------------------------------------

_OBJECTS = "the functions for objects, such as broadcast_object_list"
_INSTEAD = {
    "O": f" (use {_OBJECTS})",
    "M": " (use .view('int64'))",
    "m": " (use .view('int64'))",
    **dict.fromkeys("SUV", " (use .view('uint8') to copy the array's bytes)"),
}
_BY_NUMPY: dict[np.dtype[Any], DType] = {d.storage: d for d in DTYPES if d.native}


def _numpy_dtype(dtype: np.dtype[Any]) -> DType:
    found = _BY_NUMPY.get(dtype)
    if found is None:
        # NumPy itself has no such type: it may be one of ml_dtypes.
        found = BY_NAME.get(dtype.name) if dtype.isnative else None
        if found is None or found.native:
            reason = (
                _INSTEAD.get(dtype.kind, "")
                if dtype.isnative
                else " (byte order is not this machine's; use .astype(dtype.newbyteorder('=')))"
            )
            raise DistTypeError(
                f"arrays of dtype {dtype.str} ({dtype.name}) cannot be communicated{reason}"
            )
        _BY_NUMPY[dtype] = found
    return found


_MASKED = "masked arrays cannot be communicated: fill them, or send data and mask"


def _from_numpy(array: FlatArray) -> Buffer:
    dtype = _BY_NUMPY.get(array.dtype) or _numpy_dtype(array.dtype)
    flags = array.flags
    if flags.c_contiguous:
        flat = array if array.ndim == 1 else array.reshape(-1)
        if not dtype.native:
            flat = flat.view(dtype.storage)
        return Buffer(array, dtype, array.shape, flat, flags.writeable)
    packed = np.ascontiguousarray(array)
    flat = packed.reshape(-1).view(dtype.storage)

    def copy_back() -> None:
        array[...] = packed

    writable = flags.writeable and not has_shared_elements(
        array.shape, array.strides, array.itemsize
    )
    unpack = WriteBack(copy_back, array.__array_interface__["data"][0], array.strides)
    return Buffer(array, dtype, array.shape, flat, writable, unpack)


def _numpy_family(kind: type) -> Adapter | None:
    if np.ndarray not in kind.__mro__:
        return None
    if any(str(base.__module__).startswith("numpy.ma") for base in kind.__mro__):
        raise DistTypeError(_MASKED)
    return _from_numpy if kind is np.ndarray else _from_numpy_subclass


def _from_numpy_subclass(array: Any) -> Buffer:
    buffer = _from_numpy(np.ndarray.view(array, np.ndarray))
    buffer.owner = array
    return buffer


# --- arrays on devices ----------------------------------------------------------------------------


def _from_cuda_interface(array: Any) -> Buffer:
    """An array with ``__cuda_array_interface__``, version 2 or 3 (defined in the documentation of
    Numba and CuPy)."""
    cai = array.__cuda_array_interface__
    dtype = _numpy_dtype(np.dtype(array.dtype if hasattr(array, "dtype") else cai["typestr"]))
    shape = tuple(int(n) for n in cai["shape"])
    count = int(np.prod(shape, dtype=np.int64))
    if cai.get("mask") is not None:
        raise DistTypeError(_MASKED)
    pointer, read_only = cai["data"]
    device = getattr(array, "device", None)
    index = getattr(device, "id", device if isinstance(device, int) else None)
    if index is None:
        # The interface does not give the device, so it is found by the address, which an empty
        # array may lack.
        index = max(0, runtimes.runtime("cuda").device_of(int(pointer))) if pointer else 0
    stream = cai.get("stream") or 0
    # LEGACY_STREAM and 0 are handles of the same stream, which has one handle here.
    if stream == LEGACY_STREAM:
        stream = 0
    strides = cai.get("strides")
    if strides is not None and not dlpack.is_contiguous(shape, strides, dtype.itemsize):
        views: dict[str, Callable[[Any], Any]] = {
            "cupy": lambda cupy: cupy.asarray(array),
            "torch": lambda torch: torch.as_tensor(array, device=f"cuda:{index}"),
        }
        buffer = _from_strided(array, "CUDA", int(index), stream, views)
        buffer.writable = buffer.writable and not read_only
        return buffer
    return Buffer(
        array,
        dtype,
        shape,
        None,
        not read_only,
        None,
        Device("cuda", int(index)),
        int(pointer or 0),
        count,
        stream,
        lambda: stream,
    )


def _from_strided(
    array: Any, protocol: str, index: int, stream: int, views: Mapping[str, Callable[[Any], Any]]
) -> Buffer:
    """An array on a CUDA device that is not contiguous: CuPy or torch packs it, in the order of its
    stream.

    Args:
        index: of the device.
        views: by library a function that makes a view of the array, given the library.
    """
    reason: Exception | None = None
    # A library that the program has imported is preferred: another one is imported only if there is
    # none.
    for name in [name for name in views if name in sys.modules] or views:
        try:
            library = import_module(name)
            if name != "torch" or library.cuda.is_available():
                buffer = _pack_by(library, array, views[name], Device("cuda", index), stream)
                if buffer is not None:
                    return buffer
        except ImportError:
            continue
        except Exception as e:
            # The libraries raise errors of many types, for example without a driver or without
            # memory.
            reason = e
    failed = f" ({type(reason).__name__}: {reason})" if reason else ""
    raise DistArgumentError(
        f"a {protocol} array that is not contiguous can be communicated if CuPy or torch is"
        f" installed, which packs it{failed}; or copy it first"
    ) from reason


def _pack_by(
    library: Any, array: Any, view: Callable[[Any], Any], device: Device, stream: int
) -> Buffer | None:
    """The buffer of a strided array, packed by a library; None if that has copied the array to
    another place."""
    in_order = partial(_in_stream, library, device.index, stream)
    with in_order():
        packed = as_buffer(view(library))
    unpack = packed.unpack
    if unpack is None or packed.device != device:
        return None

    def write_back() -> None:
        with in_order():
            unpack()

    return Buffer(
        array,
        packed.dtype,
        packed.shape,
        None,
        packed.writable,
        (
            WriteBack(write_back, unpack.address, unpack.strides)
            if isinstance(unpack, WriteBack)
            else write_back
        ),
        device,
        packed.ptr,
        packed.count,
        stream,
        lambda: stream,
    )


@contextmanager
def _in_stream(library: Any, index: int, stream: int) -> Iterator[None]:
    """Make a device and a stream current in CuPy or torch."""
    with ExitStack() as stack:
        if library.__name__ == "torch":
            stack.enter_context(
                library.cuda.stream(library.cuda.ExternalStream(stream, device=index))
            )
        else:
            stack.enter_context(library.cuda.Device(index))
            stack.enter_context(library.cuda.ExternalStream(stream))
        yield


def _from_dlpack(array: Any) -> Buffer:
    """An array with ``__dlpack__`` on the CPU, or on a device, where its library's default stream
    orders it."""
    kind, index = dlpack.device_of(array)
    immutable = type(array).__module__.partition(".")[0] in _IMMUTABLE
    if kind in dlpack.HOST_DEVICES:
        view, dtype = dlpack.import_host(array)
        buffer = _from_numpy(view)
        # The array of NumPy has only the bits of a type that NumPy lacks, so its type is not the
        # array's.
        buffer.owner, buffer.dtype = array, dtype
        buffer.writable = buffer.writable and not immutable
        return buffer
    if kind in dlpack.CUDA_DEVICES or kind == dlpack.ROCM_DEVICE:
        # DLPack does not allow stream 0 on CUDA, where it has two meanings; on ROCm it is the
        # default stream.
        default = 0 if kind == dlpack.ROCM_DEVICE else LEGACY_STREAM
        device, memory = Device("cuda", index), dlpack.import_memory(array, default, 0)
    elif kind == dlpack.ONEAPI_DEVICE:
        queue = _sycl().default_queue(index)
        index, stream = _sycl().place_of(queue)
        device, memory = Device("xpu", index), dlpack.import_memory(array, queue, stream)
    else:
        raise DistTypeError(f"arrays on a device of DLPack type {kind} cannot be communicated")
    count = int(np.prod(memory.shape, dtype=np.int64))
    writable = not (memory.read_only or immutable)
    if memory.strides is not None:
        if device.type != "cuda":
            raise DistArgumentError(
                "a SYCL array that is not contiguous cannot be communicated; copy it first"
            )
        views = dict.fromkeys(("cupy", "torch"), lambda library: library.from_dlpack(array))
        buffer = _from_strided(array, "DLPack", index, 0, views)
        buffer.writable = buffer.writable and writable
        return buffer
    return Buffer(
        array,
        memory.dtype,
        memory.shape,
        None,
        writable,
        None,
        device,
        memory.ptr,
        count,
        memory.stream,
        memory.current_stream,
    )


def _sycl() -> Any:
    return runtimes.runtime("xpu")


def _from_usm_interface(array: Any) -> Buffer:
    """An array with ``__sycl_usm_array_interface__``, version 1 (in dpctl's documentation), ordered
    by its queue."""
    found = array.__sycl_usm_array_interface__
    dtype = _numpy_dtype(np.dtype(found["typestr"]))
    shape = tuple(int(n) for n in found["shape"])
    strides, packed, unpack = found.get("strides"), array, None
    if strides is not None and not dlpack.is_contiguous(shape, strides):
        namespace = getattr(array, "__array_namespace__", None)
        if namespace is None:
            raise DistArgumentError(
                "a SYCL array that is not contiguous cannot be communicated; copy it first"
            )
        packed = namespace().asarray(array, order="C")

        def copy_back() -> None:
            array[...] = packed

        first = int(found["data"][0] or 0) + found.get("offset", 0) * dtype.itemsize
        unpack = WriteBack(copy_back, first, [step * dtype.itemsize for step in strides])
    pointer, read_only = packed.__sycl_usm_array_interface__["data"][0], found["data"][1]
    offset = packed.__sycl_usm_array_interface__.get("offset", 0)
    queue = found["syclobj"]
    # It may also be a context, or the name of a device; dpctl then finds the queue.
    if not hasattr(queue, "sycl_device"):
        queue = import_module("dpctl.memory").as_usm_memory(array).sycl_queue
    index, stream = _sycl().place_of(queue)
    return Buffer(
        array,
        dtype,
        shape,
        None,
        not read_only,
        unpack,
        Device("xpu", index),
        int(pointer or 0) + offset * dtype.itemsize,
        int(np.prod(shape, dtype=np.int64)),
        stream,
        lambda: stream,
    )


_IMMUTABLE = frozenset(("jax", "jaxlib", "tensorflow"))
"""Modules whose arrays are immutable even where DLPack reports them writable; they cannot be
outputs."""


def _cupy_family(kind: type) -> Adapter | None:
    cupy = sys.modules["cupy"]
    if cupy.ndarray not in kind.__mro__:
        return None
    adapt = _cupy_adapter(cupy)
    view, plain = cupy.ndarray.view, cupy.ndarray

    def adapt_subclass(array: Any) -> Buffer:
        buffer = adapt(view(array, plain))
        buffer.owner = array
        return buffer

    return adapt if kind is plain else adapt_subclass


@cache
def _cupy_adapter(cupy: Any) -> Adapter:
    """A function that makes buffers of plain CuPy arrays."""
    get_current_stream = cupy.cuda.get_current_stream
    known: dict[int, tuple[Device, Callable[[], int]]] = {}

    def add_device(index: int) -> tuple[Device, Callable[[], int]]:
        def current_stream() -> int:
            return int(get_current_stream(index).ptr)

        found = known[index] = (Device("cuda", index), current_stream)
        register_current_stream(*found)
        return found

    def adapt(array: Any) -> Buffer:
        dtype = _BY_NUMPY.get(array.dtype) or _numpy_dtype(array.dtype)
        index = array.device.id
        device, current_stream = known.get(index) or add_device(index)
        unpack, packed, writable = None, array, True
        if not array.flags.c_contiguous:
            writable = not has_shared_elements(array.shape, array.strides, array.itemsize)
            # CuPy allocates and copies on the current device, which may be another one.
            with cupy.cuda.Device(index):
                packed = cupy.ascontiguousarray(array)

            def copy_back() -> None:
                with cupy.cuda.Device(index):
                    array[...] = packed

            unpack = WriteBack(copy_back, array.data.ptr, array.strides)

        return Buffer(
            array,
            dtype,
            array.shape,
            None,
            writable,
            unpack,
            device,
            packed.data.ptr,
            packed.size,
            current_stream(),
            current_stream,
        )

    return adapt


# --- buffer protocol ------------------------------------------------------------------------------


def _hint(array: Any) -> str:
    """What to give instead of an object without memory, after "; "; "" if nothing is known."""
    kind = type(array)
    if any(
        base.__name__ == "Tracer" and base.__module__.startswith("jax.") for base in kind.__mro__
    ):
        return (
            "; a function that JAX traces has no values: call this outside, or under jit with"
            " jax.experimental.io_callback"
        )
    if not hasattr(kind, "__array__"):
        return ""
    return f"; give {'its .to_numpy()' if hasattr(kind, 'to_numpy') else 'np.asarray of it'}"


def _memory_of(array: Any) -> memoryview:
    kind = type(array).__name__
    try:
        return memoryview(array)
    except TypeError:
        raise DistTypeError(
            f"expected an array (NumPy, CuPy, torch), got {kind}{_hint(array)}"
        ) from None
    except ValueError as e:
        # Memory that was released raises this.
        raise DistTypeError(f"{kind}: {e}") from None


def _from_memory(array: Any) -> Buffer:
    view = _memory_of(array)
    flat = np.asarray(view)
    buffer = _from_numpy(flat)
    buffer.owner = array
    buffer.writable = not view.readonly
    return buffer


# --- recognition ----------------------------------------------------------------------------------

_FAMILIES: dict[str, Callable[[type], Adapter | None]] = {
    "numpy": _numpy_family,
    "torch": torch_family,
    "cupy": _cupy_family,
}
"""By module or package of a base class: a function that returns the adapter for a type derived from
that class, or None if the type is no array of the family."""
_ADAPTERS: dict[type, Adapter] = {np.ndarray: _from_numpy}
"""Adapters by exact type."""


def _family_of(module: str) -> Callable[[type], Adapter | None] | None:
    """The family registered for a module or for the closest package that contains it."""
    while module and module not in _FAMILIES:
        module = module.rpartition(".")[0]
    return _FAMILIES.get(module)


def register_family(module: str, factory: Callable[[], Adapter]) -> None:
    """Register an array family.

    Args:
        module: module or package of the arrays' types, for example ``"jax"``.
        factory: called once per array type, with its first array; returns a function from array to
            :class:`Buffer`.
    """
    _FAMILIES[module] = lambda kind: factory()


def as_buffer(array: Any, what: str = "") -> Buffer:
    """The buffer of an array of any supported family; a contiguous array is not copied.

    Args:
        array: NumPy, CuPy or torch array, or an object with DLPack, ``__cuda_array_interface__``,
            ``__sycl_usm_array_interface__`` or the buffer protocol.
        what: operation and argument, for errors: ``"broadcast: tensor"``.

    Raises:
        DistTypeError: the object is no array, or its dtype or layout cannot be communicated.
        DistArgumentError: the array's memory is not contiguous and cannot be packed.
    """
    try:
        adapter = _ADAPTERS.get(type(array))
        if adapter is None:
            adapter = _find_adapter(type(array), array)
        return adapter(array)
    except DistArgumentError as e:
        if not what:
            raise
        raise type(e)(f"{what}: {e}", op=what.partition(":")[0]) from e.__cause__


def as_buffers(arrays: Iterable[Any], what: str) -> tuple[Buffer, ...]:
    """:func:`as_buffer` of each array of a list; short for arrays of NumPy with one dimension."""
    made = []
    for array in arrays:
        if (
            type(array) is np.ndarray
            and array.ndim == 1
            and (flags := array.flags).c_contiguous
            and (dtype := _BY_NUMPY.get(array.dtype)) is not None
            and dtype.native
        ):
            made.append(Buffer(array, dtype, array.shape, array, flags.writeable))
        else:
            made.append(as_buffer(array, what))
    return tuple(made)


def has_only_memory(kind: type) -> bool:
    """True if objects of a type, of which :func:`as_buffer` has had one, are arrays by the buffer
    protocol only."""
    return _ADAPTERS.get(kind) is _from_memory


def numpy_view(array: Any, buffer: Buffer) -> FlatArray:
    """A NumPy array over the memory of an array in host memory, with its shape and strides; of
    ``DType.storage`` if NumPy lacks its type.

    Args:
        buffer: of the array.

    Raises:
        DistArgumentError: the memory is not contiguous, and the family that is registered for the
            array gives no view.
    """
    adapter = _ADAPTERS.get(type(array))
    if adapter is _from_memory:
        return np.asarray(_memory_of(array))
    if adapter is _from_dlpack:
        return dlpack.import_host(array)[0]
    if buffer.unpack is not None or buffer.flat is None:
        raise DistArgumentError(
            f"{type(array).__name__}: its memory is not contiguous; make a contiguous one first"
        )
    return buffer.flat.reshape(buffer.shape)


def _find_adapter(kind: type, array: Any) -> Adapter:
    if (
        issubclass(kind, np.generic | list | tuple | int | float | complex | str | bytes | type)
        or array is None
    ):
        hint = "" if array is None else f"; make an array of it with np.array, or use {_OBJECTS}"
        raise DistTypeError(f"expected an array (NumPy, CuPy, torch), got {kind.__name__}{hint}")
    adapter: Adapter | None = None
    for base in kind.__mro__:
        family = _family_of(str(base.__module__))
        if family is not None and (adapter := family(kind)) is not None:
            break
    # Some objects have every attribute, with None or another object as its value.
    if adapter is None and isinstance(getattr(array, "__sycl_usm_array_interface__", None), dict):
        adapter = _from_usm_interface
    if adapter is None and hasattr(kind, "__dlpack_device__"):
        adapter = _from_dlpack
    if adapter is None and isinstance(getattr(array, "__cuda_array_interface__", None), dict):
        adapter = _from_cuda_interface
    if adapter is None:
        # This raises for what has no memory, before an adapter is kept for its type.
        _memory_of(array)
        adapter = _from_memory
    _ADAPTERS[kind] = adapter
    return adapter
