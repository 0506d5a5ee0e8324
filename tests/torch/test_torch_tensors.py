"""torch tensors in unicoll's own API: all types are used without a copy; unsupported ones raise."""

from __future__ import annotations

import ctypes
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import unicoll as dist
from unicoll.arrays.conversion import as_buffer
from unicoll.arrays.types import ALL_DTYPES
from unicoll.errors import DistArgumentError, DistTypeError

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch


TYPES = [d.name for d in ALL_DTYPES if hasattr(torch, d.name)]


def numbered(dtype: str, rows: int, columns: int) -> tuple[Any, Any]:
    """A tensor whose bytes are 0, 1, 2..., and they as a NumPy array over its memory, one item for each element."""
    kind = getattr(torch, dtype)
    if dtype.startswith("q"):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch is to drop quantized tensors
            tensor: Any = torch._empty_affine_quantized([rows, columns], scale=0.5, zero_point=0, dtype=kind)
    else:
        tensor = torch.empty(rows, columns * kind.itemsize, dtype=torch.uint8).view(kind)
    memory: Any = (ctypes.c_ubyte * (rows * columns * kind.itemsize)).from_address(tensor.data_ptr())
    memory.tensor = tensor
    array = np.frombuffer(memory, np.uint8)
    array[:] = np.arange(array.size) % (2 if dtype == "bool" else 256)
    return tensor, array.view(f"V{kind.itemsize}").reshape(rows, columns)


@pytest.mark.parametrize("dtype", TYPES)
def test_every_type_is_used_without_a_copy(dtype: str) -> None:
    tensor, memory = numbered(dtype, 6, 4)
    part = tensor[2:4]
    buffer = as_buffer(part)
    assert buffer.dtype.name == dtype
    assert (buffer.shape, buffer.count, buffer.writable, buffer.unpack) == ((2, 4), 8, True, None)
    assert buffer.flat is not None
    assert buffer.flat.ctypes.data == part.data_ptr() == memory[2:].ctypes.data
    assert buffer.flat.nbytes == memory[2:4].nbytes


@pytest.mark.parametrize("dtype", TYPES)
def test_every_type_is_packed_and_written_back(dtype: str) -> None:
    tensor, memory = numbered(dtype, 6, 4)
    buffer = as_buffer(tensor.T)
    expected = memory.T.copy()
    assert buffer.flat is not None
    assert buffer.flat.tobytes() == expected.tobytes()
    buffer.flat[:] = buffer.flat[::-1].copy()
    buffer.write_back()
    assert memory.T.tobytes() == expected.reshape(-1)[::-1].tobytes()


def test_all_torch_types_are_covered() -> None:
    """But those of which several elements are in one byte, and bits without a width."""
    there = {t for t in vars(torch).values() if isinstance(t, torch.dtype)}
    left = {str(t).removeprefix("torch.") for t in there - {getattr(torch, name) for name in TYPES}}
    assert left <= {"quint4x2", "quint2x4", "bit"}


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: torch.empty(2, dtype=torch.quint4x2), "dtype torch.quint4x2"),
        (lambda: torch.eye(2).to_sparse(), "layout torch.sparse_coo"),
        (lambda: torch.zeros(2, device="meta"), "device meta"),
    ],
    ids=["dtype", "sparse", "meta"],
)
def test_what_cannot_be_says_why(make: Any, said: str) -> None:
    with pytest.raises(DistTypeError, match=f"tensors o[fn] {said} cannot be communicated"):
        as_buffer(make())


# --- subclasses ------------------------------------------------------------------------------------------------------


class Hostile(torch.Tensor):
    """Raises whatever is asked of it but by methods of torch's own class."""

    dtype = layout = is_cpu = device = shape = requires_grad = grad_fn = property(lambda self: 1 / 0)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise ZeroDivisionError

    def detach(self) -> Any:
        raise ZeroDivisionError

    data_ptr = is_contiguous = numel = contiguous = copy_ = detach


class Quantity(torch.Tensor):
    """A subclass with torch's manners: what is computed from it is of its type."""


class Dispatching(torch.Tensor):
    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("cls", [Hostile, Quantity, torch.nn.Parameter])
@pytest.mark.parametrize("strided", [False, True])
def test_a_subclass_is_communicated_as_its_memory(cls: Any, strided: bool) -> None:
    values = torch.arange(12.0).reshape(4, 3)
    base = values[:, :2] if strided else values
    given = torch.Tensor._make_subclass(cls, base)
    buffer = as_buffer(given)
    assert buffer.owner is given
    assert buffer.shape == ((4, 2) if strided else (4, 3))
    assert buffer.writable
    assert (buffer.unpack is not None) == strided
    flat: Any = buffer.flat
    flat += 1
    buffer.write_back()
    assert torch.equal(base, (torch.arange(12.0).reshape(4, 3) + 1)[:, : base.shape[1]])


@pytest.mark.parametrize("cls", [torch.Tensor, Quantity])
def test_an_expanded_tensor_is_sent_and_refused_as_a_result(cls: Any) -> None:
    expanded = torch.ones(1).expand(4).as_subclass(cls)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(DistArgumentError, match=r"elements in the same memory; give its .clone\(\)"):
            dist.all_reduce(expanded)
        out = torch.zeros(4)
        dist.all_gather_into_tensor(out, expanded)
        assert out.tolist() == [1.0] * 4
    finally:
        dist.destroy_process_group()


def test_a_subclass_that_was_computed_with_gradients_is_not_written_to() -> None:
    leaf = torch.ones(3, requires_grad=True)
    computed = (leaf * 2).as_subclass(Quantity)
    assert not as_buffer(computed).writable
    assert as_buffer(leaf.detach().as_subclass(Quantity)).writable
    with torch.no_grad():
        assert as_buffer(computed).writable


def _fake() -> Any:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        return torch.ones(3)


def _jagged() -> Any:
    return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)


def _nested() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])


def _asynchronous() -> Any:
    from torch.distributed._functional_collectives import AsyncCollectiveTensor

    return AsyncCollectiveTensor(torch.ones(3))


def _distributed() -> Any:
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    mesh: Any = None
    spec = DTensorSpec(mesh, (), TensorMeta(torch.Size([3]), (1,), torch.float32))
    return DTensor.__new__(DTensor, torch.ones(3), spec, requires_grad=False)


def _freed() -> Any:
    tensor = torch.ones(3)
    tensor.untyped_storage().resize_(0)
    return tensor


@pytest.mark.parametrize(
    ("made", "says"),
    [
        (
            lambda: Dispatching(torch.ones(3)),
            "type .*Dispatching cannot be communicated: it defines __torch_dispatch",
        ),
        (_fake, "FakeTensor cannot be communicated"),
        (_jagged, "NestedTensor cannot be communicated"),
        (_asynchronous, "AsyncCollectiveTensor cannot be communicated"),
        (_distributed, r"DTensor cannot be communicated.*to_local\(\)"),
        (_nested, "tensors without a shape cannot be communicated"),
        (_freed, "without memory cannot be communicated"),
        (lambda: torch._to_functional_tensor(torch.ones(3)), "without memory cannot be communicated"),
        (lambda: torch.nn.UninitializedParameter(), "cannot be communicated before they have a shape"),
        (lambda: torch.Size([3]), "expected an array .*, got Size"),
        (lambda: torch.float32, "expected an array .*, got dtype"),
    ],
)
def test_unsupported_subclasses_raise_with_their_name(made: Callable[[], Any], says: str) -> None:
    with pytest.raises(DistTypeError, match=says):
        as_buffer(made(), "all_reduce: tensor")
