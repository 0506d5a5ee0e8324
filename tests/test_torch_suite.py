"""A sample of PyTorch's own tests of torch.distributed, by the printed seed; scripts/torch_suite runs them all."""

from __future__ import annotations

import importlib.util
import json
import random
from typing import Any

import pytest
from ranks import ROOT

for needed in ("torch", "expecttest"):
    if importlib.util.find_spec(needed) is None:
        pytest.skip(f"{needed} is not installed", allow_module_level=True)

pytestmark = pytest.mark.torch
RECORDED = json.loads((ROOT / "benchmarks" / "torch_suite.json").read_text())
ALWAYS = ("test_all_to_all", "test_monitored_barrier_gloo", "test_sparse_all_reduce_sum")


def test_what_is_recorded_is_no_less_than_gloo() -> None:
    results = RECORDED["results"]
    assert {"gloo/2", "gloo/3", "unicoll-gloo/2", "unicoll-gloo/3", "unicoll-mpi/2"} <= results.keys()
    for label, found in results.items():
        theirs = results[f"gloo/{label.partition('/')[2]}"]["passed"]
        assert len(theirs) >= 100
        assert set(theirs) <= set(found["passed"]), label
        if label.startswith("unicoll"):
            assert "test_all_to_all" in found["passed"]


def suite() -> Any:
    """The script, as a module."""
    spec = importlib.util.spec_from_file_location("torch_suite", ROOT / "scripts" / "torch_suite.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("size", [2, 3])
def test_a_sample_passes(size: int, seed: int) -> None:
    passed = RECORDED["results"][f"unicoll-gloo/{size}"]["passed"]
    names = sorted({*random.Random(seed + size).sample(passed, 20), *ALWAYS})
    found = {test["name"]: test for test in suite().run("unicoll-gloo", size, 60.0, names)}
    assert list(found) == names
    wrong = [f"{name}:\n{test.get('output')}" for name, test in found.items() if test["state"] != "passed"]
    assert not wrong, "\n\n".join(wrong)
