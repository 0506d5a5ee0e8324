"""Buffers of torch tensors: plain tensors, parameters, and subclasses viewed as plain tensors.

torch is taken from ``sys.modules``; this module does not import it.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from ctypes import c_char
from functools import cache, partial
from types import SimpleNamespace
from typing import Any

import numpy as np

from unicoll.arrays.buffer import (
    Adapter,
    Buffer,
    FlatArray,
    WriteBack,
    has_shared_elements,
    register_current_stream,
)
from unicoll.arrays.types import ALL_DTYPES, Device, DType
from unicoll.devices import runtimes
from unicoll.errors import DistTypeError


def torch_family(kind: type) -> Adapter | None:
    """The adapter for a tensor type; None if ``kind`` is not derived from ``torch.Tensor``.

    Raises:
        DistTypeError: the memory of such tensors need not hold their elements.
    """
    torch = sys.modules["torch"]
    if torch.Tensor not in kind.__mro__:
        return None
    adapt = _torch_adapter(torch)
    if kind in (torch.Tensor, torch.nn.Parameter):
        return adapt
    name = f"{kind.__module__}.{kind.__qualname__}"
    if kind.__torch_dispatch__ is not torch._C._disabled_torch_dispatch_impl:  # type: ignore[attr-defined]
        raise DistTypeError(
            f"tensors of type {name} cannot be communicated: it defines __torch_dispatch__, so its"
            " own memory need not hold its elements; pass the tensor that it wraps (for a DTensor:"
            " to_local())"
        )
    if torch.nn.parameter.UninitializedTensorMixin in kind.__mro__:
        raise DistTypeError(
            f"tensors of type {name} cannot be communicated before they have a shape"
        )
    without_overrides = torch._C.DisableTorchFunctionSubclass
    detach = torch.Tensor.detach
    requires_grad, grad_fn = torch.Tensor.requires_grad.__get__, torch.Tensor.grad_fn.__get__

    def adapt_subclass(tensor: Any) -> Buffer:
        with without_overrides():
            plain = detach(tensor)
            # A detached tensor has no history, so whether autograd needs the values is asked of the
            # tensor itself.
            in_a_graph = requires_grad(tensor) and grad_fn(tensor) is not None
        buffer = adapt(plain)
        buffer.owner = tensor
        buffer.writable = buffer.writable and (not in_a_graph or not torch.is_grad_enabled())
        return buffer

    return adapt_subclass


class ProfilerWatch:
    """The state of ``torch.profiler`` at the last call with a tensor.

    Attributes:
        running: True if it was recording then.
        changed: called with the new value when that has changed, before the call starts.
    """

    running = False
    changed: Callable[[bool], None] | None = None

    def __init__(self) -> None:
        self._lock = threading.Lock()

    def update(self, profiler: Any) -> None:
        """Set :attr:`running` from torch's module, and call :attr:`changed`; several threads may
        call this at once."""
        with self._lock:
            # Another thread may have handled the change since the caller compared the two.
            running = profiler._is_profiler_enabled
            if running is not self.running:
                self.running = running
                if self.changed is not None:
                    self.changed(running)


profiler_watch = ProfilerWatch()


@cache
def _torch_adapter(torch: Any) -> Adapter:
    """A function that makes buffers of plain tensors and of parameters."""
    by_torch = {getattr(torch, d.name): d for d in ALL_DTYPES if hasattr(torch, d.name)}
    strided = torch.strided
    on_device = {kind: _torch_on_device(torch, kind) for kind in _STREAM_FUNCTIONS}
    grad_enabled = torch.is_grad_enabled
    profiler, watch = torch.autograd.profiler, profiler_watch
    if not hasattr(profiler, "_is_profiler_enabled"):
        profiler = SimpleNamespace(_is_profiler_enabled=False)

    def adapt(tensor: Any) -> Buffer:
        # This reads two attributes per call; the lock is taken only at a change.
        if profiler._is_profiler_enabled is not watch.running:
            watch.update(profiler)
        dtype = by_torch.get(tensor.dtype)
        if dtype is None:
            raise DistTypeError(f"tensors of dtype {tensor.dtype} cannot be communicated")
        if tensor.layout is not strided:
            raise DistTypeError(
                f"tensors of layout {tensor.layout} cannot be communicated; make it dense first"
            )
        if not tensor.is_cpu:
            device = tensor.device
            if device.type not in on_device:
                raise DistTypeError(f"tensors on device {device} cannot be communicated")
            return on_device[device.type](tensor, dtype, device)
        try:
            shape = tuple(tensor.shape)
        except RuntimeError as e:
            # A nested tensor has none.
            raise DistTypeError(f"tensors without a shape cannot be communicated: {e}") from None
        unpack, packed = None, tensor
        writable = not tensor.requires_grad or tensor.grad_fn is None or not grad_enabled()
        if not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
            packed, unpack = _packed_tensor(tensor.detach(), dtype)
            writable = writable and not has_shared_elements(tensor.shape, tensor.stride())
        return Buffer(tensor, dtype, shape, _memory(packed, dtype), writable, unpack)

    return adapt


def _memory(tensor: Any, dtype: DType) -> FlatArray:
    """The memory of a contiguous CPU tensor as a 1-D array, which keeps the tensor alive.

    ``Tensor.numpy()`` would make the tensor's storage non-resizable, and FSDP resizes storages.
    """
    nbytes = tensor.numel() * dtype.itemsize
    if not nbytes:
        return np.empty(0, dtype.storage)
    memory: Any = (c_char * nbytes).from_address(tensor.data_ptr() or _no_memory(tensor))
    memory.tensor = tensor
    return np.frombuffer(memory, dtype.storage)


def _no_memory(tensor: Any) -> int:
    raise DistTypeError(
        f"a tensor of shape {list(tensor.shape)} without memory cannot be communicated: it is a"
        " functional tensor of torch's tracing, or its storage was freed"
    )


def as_integers(tensor: Any, dtype: DType) -> Any:
    """A view whose elements torch can copy: of integers, where the tensor's type is moved only."""
    # Such a view of a quantized tensor is not usable; torch copies these.
    if dtype.kind != "x" or tensor.is_quantized or tensor.is_conj():
        return tensor
    integers = {1: "uint8", 2: "int16", 4: "int32"}[dtype.itemsize]
    return tensor.view(getattr(sys.modules["torch"], integers))


def _packed_tensor(source: Any, dtype: DType) -> tuple[Any, Callable[[], None]]:
    """A contiguous copy of a tensor, and the function that copies it back."""
    source = as_integers(source, dtype)
    # The memory of a conjugated or negated tensor has the elements before that operation.
    packed = source.resolve_conj().resolve_neg().contiguous()

    def copy_back() -> None:
        source.copy_(packed)

    return packed, WriteBack(
        copy_back, source.data_ptr(), [n * dtype.itemsize for n in source.stride()]
    )


def _cuda_stream(torch: Any, index: int) -> Callable[[], int]:
    raw_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)

    # The public function is slower than the private one.
    def public_api() -> int:
        return int(torch.cuda.current_stream(index).cuda_stream)

    return public_api if raw_stream is None else partial(raw_stream, index)


def _xpu_stream(torch: Any, index: int) -> Callable[[], int]:
    current_stream = getattr(runtimes.runtime("xpu"), "current_stream", None)
    if current_stream is None:
        raise DistTypeError(
            "tensors on xpu cannot be communicated: dpctl's devices were used before torch was"
            " imported; import torch before init_process_group()"
        )
    return partial(current_stream, index)


_STREAM_FUNCTIONS = {"cuda": _cuda_stream, "xpu": _xpu_stream}
"""By device type: returns the function that returns the handle of torch's current stream on a
device."""


def _torch_on_device(torch: Any, kind: str) -> Callable[[Any, DType, Any], Buffer]:
    """A function that makes buffers of tensors on devices of a type."""
    known: dict[int, tuple[Device, Callable[[], int]]] = {}
    grad_enabled = torch.is_grad_enabled

    def add_device(index: int) -> tuple[Device, Callable[[], int]]:
        found = known[index] = (Device(kind, index), _STREAM_FUNCTIONS[kind](torch, index))
        register_current_stream(*found)
        return found

    def adapt(tensor: Any, dtype: DType, torch_device: Any) -> Buffer:
        index = torch_device.index
        device, current_stream = known.get(index) or add_device(index)
        unpack, packed = None, tensor
        writable = not tensor.requires_grad or tensor.grad_fn is None or not grad_enabled()
        if not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
            packed, unpack = _packed_tensor(tensor.detach(), dtype)
            writable = writable and not has_shared_elements(tensor.shape, tensor.stride())
        return Buffer(
            tensor,
            dtype,
            tuple(tensor.shape),
            None,
            writable,
            unpack,
            device,
            packed.data_ptr() or (packed.numel() and _no_memory(packed)),
            packed.numel(),
            current_stream(),
            current_stream,
        )

    return adapt
