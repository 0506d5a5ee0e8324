"""Device arrays over backends of the host: the conformance suite, on ranks with a simulated device and small chunks."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tests.simulated_nccl import ranks
from tests.simulated_nccl.family import SimulatedFamily
from tests.support.ranks import Pool
from tests.support.suite import Suite
from unicoll.staging import backend
from unicoll.testing.sampling import sampled

__all__ = ["CHUNK", "Staged", "prepare"]

CHUNK = 4096
"""Bytes of a chunk in the tests."""


def prepare(settings: ranks.Settings, chunk: int = CHUNK) -> None:
    """What a rank does before it joins."""
    backend.CHUNK = chunk
    ranks.prepare(settings)


class Staged(Suite):
    """What a backend of the host does with arrays of a device."""

    families = ("simulated",)
    sample = 10
    sizes = barrier_sizes = (1, 2, 3)
    coalesced_sizes = (2, 3)
    layouts = (*SimulatedFamily.layouts, "scalar")

    def boundaries(self, op: str, itemsize: int, size: int) -> Sequence[int]:
        one, share = CHUNK // itemsize, CHUNK // size // itemsize
        return [0, 1, 7, share, share + 1, one - 1, one, one + 1, 3 * one, 4 * one + 5]

    def large(self, itemsize: int) -> int:
        return (50 * CHUNK // itemsize + 11) | 1

    @sampled("async_op", "layout", 2)
    def test_every_layout(self, layout: str, async_op: bool, pool: Callable[[int], Pool]) -> None:
        super().test_every_layout(layout, async_op, pool)

    test_torch_tensors = None  # type: ignore[assignment]  # CPU tensors go another way
