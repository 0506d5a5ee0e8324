"""A sample of PyTorch's own tests of torch.distributed, by the printed seed; scripts/torch_suite runs them all."""

from __future__ import annotations

import importlib.util
import random

import pytest

from tests.torch.torch_suite_sample import RECORDED, run_sample

for needed in ("torch", "expecttest"):
    if importlib.util.find_spec(needed) is None:
        pytest.skip(f"{needed} is not installed", allow_module_level=True)


pytestmark = pytest.mark.torch
ALWAYS = ("test_all_to_all", "test_monitored_barrier_gloo", "test_sparse_all_reduce_sum")


def test_recorded_results_are_at_least_those_of_gloo() -> None:
    results = RECORDED["results"]
    assert {
        "gloo/2",
        "gloo/3",
        "unicoll-gloo/2",
        "unicoll-gloo/3",
        "unicoll-mpi/2",
        "unicoll-mpi/3",
    } <= results.keys()
    for label, found in results.items():
        theirs = results[f"gloo/{label.partition('/')[2]}"]["passed"]
        assert len(theirs) >= 100
        assert set(theirs) <= set(found["passed"]), label
        if label.startswith("unicoll"):
            assert "test_all_to_all" in found["passed"]


@pytest.mark.every(n=2)
@pytest.mark.parametrize("size", [2, 3])
def test_a_sample_passes(size: int, seed: int) -> None:
    run_sample("unicoll-gloo", size, random.Random(seed + size), 12, ALWAYS)
