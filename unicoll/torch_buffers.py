"""torch's tensors as buffers: plain ones, parameters, and subclasses seen as plain ones.

torch comes from the module that the tensors came from; nothing here imports it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from ctypes import c_char
from functools import cache, partial
from typing import Any

import numpy as np

from .buffers import Adapter, Buffer, FlatArray, register_current
from .errors import DistTypeError
from .types import DTYPES, Device, DType

__all__ = ["torch_family"]


def torch_family(kind: type) -> Adapter | None:
    """The adapter of a type of tensors; None if it is no tensor's.

    Raises:
        DistTypeError: its memory need not hold its elements.
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
            f"tensors of type {name} cannot be communicated: it defines __torch_dispatch__, so its own memory need not"
            " hold its elements; give the tensor that it wraps (of a DTensor its to_local())"
        )
    if torch.nn.parameter.UninitializedTensorMixin in kind.__mro__:
        raise DistTypeError(f"tensors of type {name} cannot be communicated before they have a shape")
    without_overrides = torch._C.DisableTorchFunctionSubclass
    detach = torch.Tensor.detach
    requires_grad, grad_fn = torch.Tensor.requires_grad.__get__, torch.Tensor.grad_fn.__get__

    def adapt_subclass(tensor: Any) -> Buffer:
        with without_overrides():
            plain = detach(tensor)
            in_a_graph = requires_grad(tensor) and grad_fn(tensor) is not None
        buffer = adapt(plain)
        buffer.owner = tensor
        buffer.writable = not in_a_graph or not torch.is_grad_enabled()
        return buffer

    return adapt_subclass


@cache
def _torch_adapter(torch: Any) -> Adapter:
    """What makes buffers of plain tensors and of parameters."""
    by_torch = {getattr(torch, d.name): d for d in DTYPES if hasattr(torch, d.name)}
    strided = torch.strided
    on_cuda = _torch_on_cuda(torch)
    grad_enabled = torch.is_grad_enabled

    def adapt(tensor: Any) -> Buffer:
        dtype = by_torch.get(tensor.dtype)
        if dtype is None:
            raise DistTypeError(f"tensors of dtype {tensor.dtype} cannot be communicated")
        if tensor.layout is not strided:
            raise DistTypeError(
                f"tensors of layout {tensor.layout} cannot be communicated; make it dense first"
            )
        if not tensor.is_cpu:
            device = tensor.device
            if device.type != "cuda":
                raise DistTypeError(f"tensors on device {device} cannot be communicated")
            return on_cuda(tensor, dtype, device)
        try:
            shape = tuple(tensor.shape)
        except RuntimeError as e:  # a nested tensor has none
            raise DistTypeError(f"tensors without a shape cannot be communicated: {e}") from None
        unpack, packed = None, tensor
        if not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
            packed, unpack = _packed_tensor(tensor.detach())
        writable = not tensor.requires_grad or tensor.grad_fn is None or not grad_enabled()
        return Buffer(tensor, dtype, shape, _memory(packed, dtype), writable, unpack)

    return adapt


def _memory(tensor: Any, dtype: DType) -> FlatArray:
    """The memory of a contiguous tensor on the CPU, which the view keeps alive.

    Its own ``numpy()`` would keep torch from ever resizing the tensor's storage, and FSDP lives on that.
    """
    nbytes = tensor.numel() * dtype.itemsize
    if not nbytes:
        return np.empty(0, dtype.storage)
    memory: Any = (c_char * nbytes).from_address(tensor.data_ptr() or _no_memory(tensor))
    memory.tensor = tensor
    return np.frombuffer(memory, dtype.storage)


def _no_memory(tensor: Any) -> int:
    raise DistTypeError(
        f"a tensor of shape {list(tensor.shape)} without memory cannot be communicated: a functional tensor of torch's"
        " tracing, or one whose storage was freed"
    )


def _packed_tensor(source: Any) -> tuple[Any, Callable[[], None]]:
    """A copy of a tensor in plain contiguous memory, and what writes it back."""
    packed = source.resolve_conj().resolve_neg().contiguous()

    def unpack() -> None:
        source.copy_(packed)

    return packed, unpack


def _torch_on_cuda(torch: Any) -> Callable[[Any, DType, Any], Buffer]:
    """What makes buffers of CUDA tensors."""
    places: dict[int, tuple[Device, Callable[[], int]]] = {}
    current = getattr(torch._C, "_cuda_getCurrentRawStream", None)
    grad_enabled = torch.is_grad_enabled

    def place(index: int) -> tuple[Device, Callable[[], int]]:
        here: Callable[[], int] = partial(current, index) if current is not None else lambda: slowly(index)
        found = places[index] = (Device("cuda", index), here)
        register_current(index, here)
        return found

    def slowly(index: int) -> int:
        return int(torch.cuda.current_stream(index).cuda_stream)

    def adapt(tensor: Any, dtype: DType, device: Any) -> Buffer:
        where, here = places.get(device.index) or place(device.index)
        unpack, packed = None, tensor
        if not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
            packed, unpack = _packed_tensor(tensor.detach())
        writable = not tensor.requires_grad or tensor.grad_fn is None or not grad_enabled()
        return Buffer(
            tensor, dtype, tuple(tensor.shape), None, writable, unpack, where,
            packed.data_ptr() or (packed.numel() and _no_memory(packed)), packed.numel(), here(), here,
        )  # fmt: skip

    return adapt
