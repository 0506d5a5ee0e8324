"""torch tensors on the simulated device, for a torch without CUDA.

    install()                        # in a rank of tests.simulated_nccl.ranks.SimulatedJob
    x = full(8, 1.0)                 # a tensor with device cuda:<rank>
    dist.all_reduce(x)               # torch.distributed's function, on a group of the plug-in's
    values(x)                        # blocks the host

A tensor is a view of the memory of a simulated array, whose kernels and streams are used: torch's own operations would
access that memory at once. torch.distributed's Python functions take such tensors; torch's C++ code (DDP, functional
collectives) sees tensors of the CPU.

Importing this module registers the tensors with unicoll.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, TypeVar

import numpy as np
import torch

from tests.simulated_nccl import arrays, ranks
from unicoll.arrays.conversion import Buffer, register_family

__all__ = ["Tensor", "captured", "full", "install", "values"]


class Tensor(torch.Tensor):
    """A tensor in the memory of :attr:`array`."""

    __torch_function__ = torch._C._disabled_torch_function_impl
    array: arrays.Array
    is_cuda, is_cpu = True, False

    @property
    def device(self) -> torch.device:
        """The simulated device."""
        return torch.device("cuda", self.array.device)


def full(count: int, value: float, dtype: Any = np.float32) -> Any:
    """A flat tensor whose elements are all equal, filled on the current stream of the simulation."""
    array = arrays.full(count, value, dtype)
    memory = arrays.simulation().memory.view(array.ptr, array.nbytes)
    made = torch.Tensor._make_subclass(Tensor, torch.from_numpy(memory.view(dtype)))
    made.array = array
    return made


def values(tensor: Any) -> list[float]:
    """The different elements, after the current stream's operations; blocks the host."""
    return sorted(set(tensor.array.numpy().tolist()))


def _adapt(tensor: Tensor) -> Buffer:
    buffer = arrays._adapt(tensor.array)
    buffer.owner = tensor
    return buffer


register_family(__name__, lambda: _adapt)


@contextmanager
def captured(stream: arrays.Stream, mode: str = "global") -> Iterator[list[Any]]:
    """Record a stream, as torch.cuda.graph does; the list contains the graph afterwards."""
    with stream, ranks.simulation().capture(stream.ptr, mode) as graphs:
        yield graphs


def _is_capturing() -> bool:
    return arrays.simulation().cuda.capturing(arrays.current_stream())


T = TypeVar("T")


class _Future(torch.futures.Future[T]):  # type: ignore[misc]
    """A future of a device, whose result is ordered by the stream on which it was set."""

    def __new__(cls, *, devices: Any = None) -> Any:
        return super().__new__(cls)

    def __init__(self, *, devices: Any = None) -> None:
        super().__init__()
        self._stream = arrays.Stream(handle=arrays.current_stream()) if devices else None

    def wait(self) -> Any:
        """The result, for which the current stream waits."""
        if self._stream is not None:
            arrays.Stream(handle=arrays.current_stream()).wait_for(self._stream)
        return super().wait()


def install() -> None:
    """Replace the functions of torch.cuda and torch.accelerator that the plug-in calls."""
    torch.cuda.is_initialized = lambda: True
    torch.cuda.is_current_stream_capturing = _is_capturing
    torch.cuda.Stream = cache(lambda device: ranks.stream_of_a_library())  # torch has a pool of them
    torch.cuda.stream = lambda stream: stream
    torch.futures.Future = _Future
    torch.accelerator.is_available = lambda: True
    torch.accelerator.device_count = lambda: arrays.simulation().cuda.device_count()
    torch.accelerator.current_accelerator = lambda check_available=False: torch.device("cuda")
