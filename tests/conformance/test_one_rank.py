"""The checks of one_rank.py, on the simulated device and, where there is one, on a GPU."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from tests.conformance import one_rank
from tests.simulated_nccl.cuda import Simulation
from tests.simulated_nccl.nccl import SimulatedNccl
from tests.support.programs import python

GPU_TIMEOUT_S = 600
ASK = """
from nccl_comm.library import locate
from unicoll.devices import runtimes as devices
found = locate.find()
print(devices.reason_against("cuda") or (found if isinstance(found, str) else ""))
"""


@pytest.mark.parametrize("version", [21803, 22605, 23007])
@pytest.mark.parametrize("check", one_rank.CHECKS, ids=lambda check: check.__name__)
def test_on_the_simulated_device(check: Callable[[one_rank.Bench], None], version: int) -> None:
    simulation = Simulation(policy="newest")
    nccl = SimulatedNccl(simulation, version)
    try:
        one_rank.run(check, simulation.cuda, nccl)
        assert simulation.faults == []
        assert nccl.communicators == []
    finally:
        nccl.close()
        simulation.close()


@pytest.fixture(scope="module")
def on_gpu() -> dict[str, Any]:
    """What each check said on the GPU; they run in a process of their own, since CUDA and NCCL leave threads."""
    asked = python("-c", ASK)
    asked.check_returncode()
    if reason := asked.stdout.strip():
        pytest.skip(reason)
    done = python("-m", "tests.conformance.one_rank", timeout=GPU_TIMEOUT_S)
    reports = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return {r["check"]: r["error"] for r in reports if "check" in r} | {"": done.stderr}


@pytest.mark.gpu
@pytest.mark.parametrize("check", [check.__name__ for check in one_rank.CHECKS])
def test_on_a_gpu(check: str, on_gpu: dict[str, Any]) -> None:
    assert check in on_gpu, on_gpu[""]
    assert on_gpu[check] is None
