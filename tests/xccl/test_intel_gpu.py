"""The backend xccl on Intel GPUs, with the real oneCCL and torch's or dpctl's arrays; pending where there is no GPU."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest

import unicoll as dist
from tests.support import worker
from tests.support.on_ranks import on_ranks
from tests.support.ranks import ProcessJob, run_ranks
from tests.support.suite import Suite
from tests.xccl.sycl_ranks import SyclFamily
from unicoll.devices import runtimes
from unicoll.run.cpu_affinity import gpu_addresses
from unicoll.testing.cases import Case
from unicoll.testing.families import FAMILIES, TorchFamily
from unicoll.testing.ranks import Runner
from unicoll.testing.reference import NCCL

GPUS = len(gpu_addresses("Level Zero"))
if not GPUS:
    pytest.skip("pending: there is no Intel GPU here", allow_module_level=True)

MOST = min(GPUS, 4)


def prepare() -> None:
    """What a rank does before it joins: its device is the one with its number."""
    rank, _ = worker.rank_and_size()
    if importlib.util.find_spec("torch") is not None:
        import torch

        if torch.xpu.is_available():
            torch.xpu.set_device(rank)
            FAMILIES["xpu"] = partial(TorchFamily, "xpu")
    if "xpu" not in FAMILIES:
        FAMILIES["xpu"] = SyclFamily
        importlib.import_module("dpctl")
        runtimes.runtime("xpu").set_device(rank)
    worker.use("cpu:gloo,xpu:xccl")


class XpuJob(ProcessJob):
    """A job whose ranks have a GPU each. oneCCL writes to standard error."""

    def __init__(self, size: int, **options: Any) -> None:
        super().__init__(size, prepare=(prepare,), quiet=False, **options)


class TestXPU(Suite):
    backend = "xccl"
    families = ("xpu",)
    arithmetic = NCCL
    sizes = barrier_sizes = coalesced_sizes = tuple(sorted({1, MOST}))

    @classmethod
    def start(cls, size: int) -> ProcessJob:
        return XpuJob(size)

    def boundaries(self, op: str, itemsize: int, size: int) -> Sequence[int]:
        return [0, 1, 7, 1000]

    def check_cases(self, pool: Runner, cases: Sequence[Case], timeout: float = 300.0) -> None:
        super().check_cases(pool, cases, timeout)

    test_torch_tensors = None  # type: ignore[assignment]  # CPU tensors are another backend's


def array(values: Sequence[float]) -> Any:
    import numpy as np

    return FAMILIES["xpu"]().from_numpy(np.array(values, "f4"))


@on_ranks(MOST, start=partial(run_ranks, start=XpuJob))
def test_an_operation_follows_its_producer_and_precedes_its_consumer() -> None:
    """The host does not wait: a long chain of kernels before and after each call, on the current stream."""
    size = dist.get_world_size()
    x = array([1.0] * (1 << 20))
    expected = 1.0
    for _ in range(20):
        x += 1.0
        work = dist.all_reduce(x, async_op=True)
        work.wait()
        x /= size
        expected += 1.0
    assert (FAMILIES["xpu"]().to_numpy(x) == expected).all()


@on_ranks(MOST, start=partial(run_ranks, start=XpuJob))
def test_a_group_is_split() -> None:
    half = dist.new_subgroups(max(1, MOST // 2))[0]
    x = array([float(dist.get_rank())])
    dist.all_reduce(x, group=half)
    assert FAMILIES["xpu"]().to_numpy(x) == sum(dist.get_process_group_ranks(half))
