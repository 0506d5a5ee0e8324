"""Data-parallel training: samplers, gradient averaging and parameter synchronisation.

Arrays are those of NumPy, CuPy and torch, and contiguous ones in host memory that the collectives
take from other libraries: with DLPack, of registered families, memoryviews. NumPy arrays over their
memory take their place.

``DistributedDataParallel`` is torch's class over unicoll groups; accessing it imports torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from unicoll.parallel.exact_sum import ExactSum
from unicoll.parallel.gradient_buckets import GradientBuckets
from unicoll.parallel.parameters import (
    average_gradients,
    broadcast_parameters,
    check_identical,
    parameters_digest,
)
from unicoll.parallel.sampler import DistributedSampler

if TYPE_CHECKING:
    from unicoll.torch_plugin.ddp import DistributedDataParallel as DistributedDataParallel

# The class DistributedDataParallel is not listed, so that "import *" does not import torch.
__all__ = [
    "DistributedSampler",
    "ExactSum",
    "GradientBuckets",
    "average_gradients",
    "broadcast_parameters",
    "check_identical",
    "parameters_digest",
]


def __getattr__(name: str) -> Any:
    if name == "DistributedDataParallel":
        from unicoll.torch_plugin.ddp import DistributedDataParallel

        return DistributedDataParallel
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
