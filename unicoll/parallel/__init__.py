"""Data-parallel training: which samples each rank reads, and how gradients become the same on all ranks."""

from unicoll.parallel.buckets import GradientBuckets
from unicoll.parallel.ddp import average_gradients, broadcast_parameters, check_identical, parameters_digest
from unicoll.parallel.sampler import DistributedSampler

__all__ = [
    "DistributedSampler",
    "GradientBuckets",
    "average_gradients",
    "broadcast_parameters",
    "check_identical",
    "parameters_digest",
]
