"""Tensors that autograd knows: sent as they are, and refused as results where gradients would come out wrong."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import unicoll as dist
from unicoll.errors import DistArgumentError

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch


@pytest.fixture(autouse=True)
def _alone() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_non_leaf_tensors_are_refused_as_outputs() -> None:
    weight = torch.ones(3, requires_grad=True)
    computed = weight * 2
    for attempt in (
        lambda: dist.all_reduce(computed),
        lambda: dist.all_gather([computed], torch.ones(3)),
        lambda: dist.all_gather_into_tensor(computed, torch.ones(3)),
    ):
        with pytest.raises(
            DistArgumentError, match=r"requires grad and was computed from other tensors.*\.detach\(\)"
        ):
            attempt()
    computed.sum().backward()
    assert weight.grad.tolist() == [2.0, 2.0, 2.0]


def test_non_leaf_tensors_are_valid_inputs() -> None:
    computed = torch.ones(3, requires_grad=True) * 2
    out = torch.zeros(3)
    dist.all_gather_into_tensor(out, computed)
    assert out.tolist() == [2.0, 2.0, 2.0]


def test_parameters_and_detached_tensors_are_valid_outputs() -> None:
    parameter = torch.nn.Parameter(torch.ones(3))
    dist.broadcast(parameter, 0)
    dist.all_reduce(parameter)
    computed = parameter * 2
    dist.all_reduce(computed.detach())
    with torch.no_grad():
        dist.all_reduce(computed)
    assert computed.tolist() == [2.0, 2.0, 2.0]
