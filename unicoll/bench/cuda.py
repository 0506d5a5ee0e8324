"""The CUDA device that a rank measures on."""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.util import find_spec

from .. import streams
from .contract import World

__all__ = ["facts", "use_cuda"]


def use_cuda(world: World) -> str:
    """Make this rank's device the current one of the driver and of the array libraries that are there: ``"cuda:N"``."""
    cuda = streams.cuda()
    index = world.local_rank % cuda.device_count()
    cuda.set_device(index)
    if find_spec("torch") is not None:
        torch = import_module("torch")
        if torch.cuda.is_available():
            torch.cuda.set_device(index)
    if "cupy" in sys.modules:
        sys.modules["cupy"].cuda.Device(index).use()
    return f"cuda:{index}"


def facts(device: str) -> streams.DeviceFacts:
    """What the driver says of ``"cuda:N"``."""
    return streams.cuda().facts(int(device.partition(":")[2]))
