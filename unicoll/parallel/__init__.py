"""Data-parallel training: which samples each rank reads, and how gradients become the same on all ranks.

``DistributedDataParallel``, for torch modules, is found here, too; torch is imported when it is asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from unicoll.parallel.buckets import GradientBuckets
from unicoll.parallel.ddp import average_gradients, broadcast_parameters, check_identical, parameters_digest
from unicoll.parallel.sampler import DistributedSampler

if TYPE_CHECKING:
    from unicoll.parallel.torch_ddp import DistributedDataParallel as DistributedDataParallel

# without DistributedDataParallel: "import *" is no reason to import torch
__all__ = [
    "DistributedSampler",
    "GradientBuckets",
    "average_gradients",
    "broadcast_parameters",
    "check_identical",
    "parameters_digest",
]


def __getattr__(name: str) -> Any:
    if name == "DistributedDataParallel":
        from unicoll.parallel.torch_ddp import DistributedDataParallel

        return DistributedDataParallel
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
