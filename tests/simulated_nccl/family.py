"""Arrays of the simulated device for the conformance suite, registered as the family "simulated"."""

from __future__ import annotations

from typing import Any

from tests.simulated_nccl import arrays
from unicoll.testing.families import FAMILIES, ArrayFamily

__all__ = ["SimulatedFamily"]


class SimulatedFamily(ArrayFamily):
    """Arrays on the simulated device."""

    def from_numpy(self, values: Any) -> Any:
        return arrays.array(values)

    def to_numpy(self, array: Any) -> Any:
        return array.numpy()


FAMILIES["simulated"] = SimulatedFamily
