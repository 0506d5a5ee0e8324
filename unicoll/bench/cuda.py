"""The CUDA device that a rank measures on."""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.util import find_spec

from unicoll.arrays import cuda as streams
from unicoll.bench.contract import BenchJob


def use_cuda(job: BenchJob) -> str:
    """Select this rank's device in the driver and in the imported array libraries; returns ``"cuda:N"``."""
    cuda = streams.cuda()
    index = job.local_rank % cuda.device_count()
    cuda.set_device(index)
    if find_spec("torch") is not None:
        torch = import_module("torch")
        if torch.cuda.is_available():
            torch.cuda.set_device(index)
    if "cupy" in sys.modules:
        sys.modules["cupy"].cuda.Device(index).use()
    return f"cuda:{index}"


def facts(device: str) -> streams.DeviceFacts:
    """The driver's description of the device ``"cuda:N"``."""
    return streams.cuda().facts(int(device.partition(":")[2]))
