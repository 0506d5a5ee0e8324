"""Arrays of the simulated device for the conformance suite, registered as the family "simulated"."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.simulated_nccl import arrays
from unicoll.testing.families import CANARY, FAMILIES, VIEWS, GuardedArray, base_shape

__all__ = ["SimulatedFamily"]


class SimulatedFamily:
    """Arrays on the simulated device."""

    on_device = True
    layouts = ("contiguous", "step", "rows", "transposed")

    def hold(self, values: Any, layout: str, read_only: bool = False) -> GuardedArray:
        if values.ndim == 0 or layout not in self.layouts:
            layout = "contiguous"
        view = VIEWS[layout]
        shape = base_shape(layout, values.shape)
        guard = np.frombuffer(bytes([CANARY]) * (int(np.prod(shape)) * values.itemsize), values.dtype)
        base = arrays.array(guard.reshape(shape))
        array = view(base)
        array.set(values)

        def intact() -> bool:
            raw = base.numpy().view(f"V{values.itemsize}")
            view(raw)[...] = np.frombuffer(bytes([CANARY]) * values.itemsize, raw.dtype)[0]
            return bool(raw.tobytes() == bytes([CANARY]) * raw.nbytes)

        return GuardedArray(array, array.numpy, intact)

    def part(self, held: GuardedArray, start: int, stop: int) -> GuardedArray:
        """A view of some rows of an array."""
        array = held.array[start:stop]
        return GuardedArray(array, array.numpy, lambda: True)


FAMILIES["simulated"] = SimulatedFamily
