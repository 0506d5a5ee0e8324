"""Some of PyTorch's own tests of torch.distributed, run by ``scripts/torch_suite.py``, which runs them all."""

from __future__ import annotations

import importlib.util
import json
import random
from collections.abc import Sequence
from typing import Any

from tests.support.ranks import ROOT

RECORDED = json.loads((ROOT / "benchmarks" / "torch_suite.json").read_text())
"""Tests that passed in a full run, by backend and number of ranks."""


def run_sample(backend: str, size: int, rng: random.Random, count: int, always: Sequence[str]) -> None:
    """Run a sample of the tests recorded as passed, and ``always``; AssertionError unless all pass."""
    passed = RECORDED["results"][f"{backend}/{size}"]["passed"]
    names = sorted({*rng.sample(passed, count), *always})
    found = {test["name"]: test for test in _script().run(backend, size, 60.0, names)}
    assert list(found) == names
    wrong = [f"{name}:\n{test.get('output')}" for name, test in found.items() if test["state"] != "passed"]
    assert not wrong, "\n\n".join(wrong)


def _script() -> Any:
    spec = importlib.util.spec_from_file_location("torch_suite", ROOT / "scripts" / "torch_suite.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
