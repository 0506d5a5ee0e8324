"""torch tensors in unicoll's own API share their memory with it, whatever their type; those that cannot say why."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from unicoll.buffers import as_buffer
from unicoll.errors import DistTypeError
from unicoll.types import DTYPES

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch


@pytest.mark.parametrize("dtype", [d.name for d in DTYPES])
def test_every_type_is_taken_without_a_copy(dtype: str) -> None:
    tensor = torch.zeros(6, 4, dtype=getattr(torch, dtype))[2:4]
    buffer = as_buffer(tensor)
    assert buffer.dtype.name == dtype
    assert (buffer.shape, buffer.count, buffer.writable, buffer.unpack) == ((2, 4), 8, True, None)
    assert buffer.flat is not None
    assert buffer.flat.ctypes.data == tensor.data_ptr()
    assert buffer.flat.nbytes == tensor.numel() * tensor.element_size()
    buffer.flat.view(np.uint8)[:] = 1
    assert (tensor.contiguous().view(torch.uint8) == 1).all()


def test_no_type_of_torchs_is_forgotten() -> None:
    """Types that are left out have no arithmetic on any backend: quantised ones, and bits."""
    known = {getattr(torch, d.name) for d in DTYPES}
    there = {t for t in vars(torch).values() if isinstance(t, torch.dtype)}
    left = {str(t).removeprefix("torch.") for t in there - known}
    odd = ("q", "bits", "int1", "int2", "int3", "int4", "int5", "int6", "int7", "uint1", "uint2", "uint3", "uint4",
           "uint5", "uint6", "uint7", "float4", "float8", "complex32", "bcomplex32")  # fmt: skip
    assert all(name.startswith(odd) for name in left), left


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: torch.zeros(2, dtype=torch.float8_e4m3fnuz), "dtype torch.float8_e4m3fnuz"),
        (lambda: torch.eye(2).to_sparse(), "layout torch.sparse_coo"),
        (lambda: torch.zeros(2, device="meta"), "device meta"),
    ],
    ids=["dtype", "sparse", "meta"],
)
def test_what_cannot_be_says_why(make: Any, said: str) -> None:
    with pytest.raises(DistTypeError, match=f"tensors o[fn] {said} cannot be communicated"):
        as_buffer(make())
