"""Arrays on the simulated device that behave like CuPy's: a current stream by thread and device, and CuPy's pool.

    use(simulation)
    x = array(np.arange(4.0))       # on the current device; the copy is put on the current stream
    with Stream():                  # a stream that does not synchronize with the legacy one
        y = x + 1
    y.numpy()                       # blocks the host

Importing this module registers the arrays with unicoll.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np

from tests.simulated_nccl.cuda import SimulatedCuda, Simulation
from tests.simulated_nccl.memory import Chunk, Memory
from tests.simulated_nccl.streams import Op, Range
from unicoll.arrays.buffer import Buffer, WriteBack, register_current_stream
from unicoll.arrays.conversion import register_family
from unicoll.arrays.types import BY_NAME, Device, DType
from unicoll.errors import DistTypeError

__all__ = [
    "Array",
    "Stream",
    "adopt",
    "array",
    "current_stream",
    "device",
    "empty",
    "full",
    "simulation",
    "use",
]

Host = Any
"""A NumPy array."""


class _Current(threading.local):
    """The calling thread's streams, by device."""

    def __init__(self) -> None:
        self.streams: dict[int, int] = {}


_simulation: Simulation | None = None
_current = _Current()


def use(simulation: Simulation | None) -> None:
    """Create arrays on the devices of this simulation from now on."""
    global _simulation, _current
    _simulation, _current = simulation, _Current()


def simulation() -> Simulation:
    """The simulation on which arrays are created."""
    assert _simulation is not None, "call tests.simulated_nccl.arrays.use() first"
    return _simulation


def _current_device() -> int:
    return max(0, simulation().cuda.current_device())


def current_stream(on: int | None = None) -> int:
    """Handle of the current stream of a device (the current one); 0 is the legacy default stream."""
    return _current.streams.get(_current_device() if on is None else on, 0)


@contextmanager
def device(index: int) -> Iterator[None]:
    """Make a device current within the block."""
    cuda = simulation().cuda
    before = _current_device()
    cuda.set_device(index)
    try:
        yield
    finally:
        cuda.set_device(before)


class Stream:
    """A stream of the current device, made the current one by ``with``, and destroyed with the last reference to it.

    Args:
        handle: of an existing stream; 0 is the legacy default stream.
    """

    def __init__(self, handle: int | None = None) -> None:
        self._cuda: SimulatedCuda | None = None
        self._cuda = simulation().cuda
        self.device = _current_device()
        self._own = handle is None
        self.ptr: int = self._cuda.create_stream(self.device) if handle is None else handle
        self._before: list[int] = []

    def __enter__(self) -> Stream:
        self._before.append(current_stream(self.device))
        _current.streams[self.device] = self.ptr
        return self

    def __exit__(self, *rest: object) -> None:
        _current.streams[self.device] = self._before.pop()

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        cuda = self._cuda
        if is_finalizing():  # see Chunk
            return
        if self._own and cuda is not None and cuda.stream(self.ptr).capture is None:
            cuda.destroy_stream(self.ptr)

    def synchronize(self) -> None:
        """Block the host until the stream is done."""
        with device(self.device):
            simulation().synchronize_stream(self.ptr)

    def wait_for(self, other: Stream) -> None:
        """Make later operations on this stream run after all that is on another one now."""
        cuda = simulation().cuda
        event = cuda.create_event(other.device)
        with device(other.device):
            cuda.record(event, other.ptr)
        with device(self.device):
            cuda.wait_event(self.ptr, event)
        cuda.destroy_event(event)


class _Layout:
    """Elements in device memory for a kernel: address and strides, without a reference that keeps the memory alive."""

    __slots__ = ("dtype", "ptr", "range", "shape", "strides")

    def __init__(
        self, ptr: int, shape: tuple[int, ...], strides: tuple[int, ...], dtype: np.dtype[Any]
    ) -> None:
        self.ptr = ptr
        self.shape = shape
        self.strides = strides
        self.dtype = dtype
        spans = [(n - 1) * s for n, s in zip(shape, strides, strict=True)]
        low = sum(min(0, s) for s in spans)
        high = sum(max(0, s) for s in spans) + dtype.itemsize
        self.range: Range = (ptr + low, high - low if 0 not in shape else 0)

    def view(self, memory: Memory) -> Host:
        """The elements now."""
        start, nbytes = self.range
        if not nbytes:
            return np.empty(self.shape, self.dtype)
        return np.ndarray(self.shape, self.dtype, memory.view(start, nbytes), self.ptr - start, self.strides)


class Array:
    """An array in device memory.

    Attributes:
        shape, dtype, strides: as NumPy's; strides in bytes.
        device: index of its device.
        ptr: address of its first element.
    """

    def __init__(
        self,
        chunk: Chunk,
        on: int,
        shape: tuple[int, ...],
        dtype: np.dtype[Any],
        strides: tuple[int, ...],
        ptr: int,
    ) -> None:
        self._chunk = chunk
        self.device = on
        self.shape = shape
        self.dtype = dtype
        self.strides = strides
        self.ptr = ptr

    @property
    def size(self) -> int:
        """Number of elements."""
        return int(np.prod(self.shape, dtype=np.int64))

    @property
    def nbytes(self) -> int:
        """Bytes of payload."""
        return self.size * self.dtype.itemsize

    @property
    def contiguous(self) -> bool:
        """True if the elements are contiguous in C order."""
        return self.size == 0 or self._mirror().flags.c_contiguous

    def _mirror(self) -> Host:
        """A host array with the same layout, for its flags and for slicing."""
        start, nbytes = self._layout.range
        return np.ndarray(
            self.shape, self.dtype, np.empty(nbytes or 1, np.uint8), self.ptr - start, self.strides
        )

    @property
    def _layout(self) -> _Layout:
        return _Layout(self.ptr, self.shape, self.strides, self.dtype)

    def _view(self, take: Callable[[Host], Host]) -> Array:
        mirror = self._mirror() if self.size else np.empty(self.shape, self.dtype)
        taken = take(mirror)
        offset = taken.ctypes.data - mirror.ctypes.data if self.size else 0
        return Array(self._chunk, self.device, taken.shape, self.dtype, taken.strides, self.ptr + offset)

    def __getitem__(self, key: Any) -> Array:
        return self._view(lambda mirror: mirror[key] if mirror.ndim else mirror)

    @property
    def T(self) -> Array:
        """The transpose, of the same memory."""
        return self._view(lambda mirror: mirror.T)

    # --- operations on the current stream ---

    def _kernel(self, label: str, work: Callable[..., None], *others: Array) -> None:
        """Put ``work(own elements, others' elements...)`` on the current stream; it writes its own elements."""
        made = simulation()
        target, sources = self._layout, [a._layout for a in others]
        memory = made.memory

        def body(op: Op) -> None:
            with np.errstate(all="ignore"):
                work(target.view(memory), *(s.view(memory) for s in sources))

        with device(self.device):
            stream = made.cuda.stream(current_stream(self.device))
        op = Op(label, body, reads=[s.range for s in sources], writes=[target.range])
        made.scheduler.put(stream, op)

    def fill(self, value: Any) -> None:
        """Set all elements."""
        self._kernel(f"fill with {value}", lambda own: own.fill(value))

    def set(self, values: Any) -> None:
        """Copy from host memory; later changes there have no effect."""
        copied = np.array(values, self.dtype).reshape(np.shape(values))
        self._kernel("copy from the host", lambda own: np.copyto(own, copied))

    def __setitem__(self, key: Any, values: Any) -> None:
        part = self if key is Ellipsis else self[key]
        if isinstance(values, Array):
            part._kernel("copy", np.copyto, values)
        elif np.ndim(values):
            part.set(values)
        else:
            part.fill(values)

    def __iadd__(self, other: Any) -> Array:
        if isinstance(other, Array):
            self._kernel("add", lambda own, more: np.add(own, more, out=own), other)
        else:
            number = self.dtype.type(other)
            self._kernel(f"add {other}", lambda own: np.add(own, number, out=own))
        return self

    def __imul__(self, other: Any) -> Array:
        number = self.dtype.type(other)
        self._kernel(f"multiply by {other}", lambda own: np.multiply(own, number, out=own))
        return self

    def copy(self) -> Array:
        """A contiguous copy."""
        made = empty(self.shape, self.dtype, self.device)
        made[...] = self
        return made

    def __add__(self, other: Any) -> Array:
        made = self.copy()
        made += other
        return made

    def __mul__(self, other: Any) -> Array:
        made = self.copy()
        made *= other
        return made

    def numpy(self) -> Host:
        """The elements in host memory; blocks the host."""
        made = simulation()
        out = np.empty(self.shape, self.dtype)
        layout, memory = self._layout, made.memory

        def body(op: Op) -> None:
            np.copyto(out, layout.view(memory))

        with device(self.device):
            made.cuda.refuse_under_capture("a copy to the host")
            stream = made.cuda.stream(current_stream(self.device))
        op = made.scheduler.put(stream, Op("copy to the host", body, reads=[layout.range]))
        made.scheduler.wait_for(op, "a copy to the host")
        return out

    def __repr__(self) -> str:
        return f"Array({self.dtype}{list(self.shape)} at {self.ptr:#x} on cuda:{self.device})"


def empty(shape: int | Sequence[int], dtype: Any = np.float64, on: int | None = None) -> Array:
    """An uninitialized array, from the arena of the current stream."""
    made = simulation()
    index = _current_device() if on is None else on
    shape = (shape,) if isinstance(shape, int) else tuple(int(n) for n in shape)
    kind = np.dtype(dtype)
    strides: list[int] = []
    step = kind.itemsize
    for n in reversed(shape):
        strides.insert(0, step)
        step *= max(1, n)
    with device(index):
        stream = made.cuda.stream(current_stream(index))
    chunk = made.pool.malloc(int(np.prod(shape, dtype=np.int64)) * kind.itemsize, stream)
    return Array(chunk, index, shape, kind, tuple(strides), chunk.ptr)


def full(shape: int | Sequence[int], value: Any, dtype: Any = np.float64, on: int | None = None) -> Array:
    """An array whose elements are all equal."""
    made = empty(shape, dtype, on)
    made.fill(value)
    return made


def array(values: Any, dtype: Any = None, on: int | None = None) -> Array:
    """An array with the elements of a host array."""
    host = np.asarray(values, dtype)
    made = empty(host.shape, host.dtype, on)
    made.set(host)
    return made


def adopt(memory: Any, dtype: Any = None) -> Array:
    """An array in the memory of an object with ``__cuda_array_interface__``; a flat one if a type is given."""
    interface = memory.__cuda_array_interface__
    shape, typestr, ptr = interface["shape"], interface["typestr"], interface["data"][0]
    like = np.empty(shape, typestr) if dtype is None else np.empty(shape, typestr).reshape(-1).view(dtype)
    chunk: Any = SimpleNamespace(memory=memory)  # kept alive
    on = simulation().cuda.device_of(ptr)
    return Array(chunk, on, like.shape, like.dtype, like.strides, ptr)


# --- the adapter for unicoll ---

_BY_NUMPY: dict[np.dtype[Any], DType] = {d.storage: d for d in BY_NAME.values() if d.native}
_registered: set[Device] = set()


def _adapt(array: Array) -> Buffer:
    dtype = _BY_NUMPY.get(array.dtype) or BY_NAME.get(array.dtype.name)
    if dtype is None:
        raise DistTypeError(f"arrays of dtype {array.dtype.name} cannot be communicated")
    packed = array if array.contiguous else array.copy()

    def copy_back() -> None:
        array[...] = packed

    device = Device(simulation().cuda.device_type, array.device)
    if device not in _registered:
        _registered.add(device)
        register_current_stream(device, partial(current_stream, array.device))
    return Buffer(
        array,
        dtype,
        array.shape,
        None,
        True,
        None if packed is array else WriteBack(copy_back, array.ptr, array.strides),
        device,
        packed.ptr,
        packed.size,
        current_stream(array.device),
        partial(current_stream, array.device),
    )


register_family(__name__, lambda: _adapt)
