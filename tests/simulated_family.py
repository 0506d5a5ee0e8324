"""Arrays of the simulated device for the conformance suite; ranks that import this know them as "simulated"."""

from __future__ import annotations

from typing import Any

import numpy as np
import simulated_arrays

from unicoll.testing.families import CANARY, FAMILIES, VIEWS, Held, base_shape

__all__ = ["SimulatedFamily"]


class SimulatedFamily:
    """Arrays on the simulated device."""

    on_device = True
    layouts = ("contiguous", "step", "rows", "transposed")

    def hold(self, values: Any, layout: str, read_only: bool = False) -> Held:
        if values.ndim == 0 or layout not in self.layouts:
            layout = "contiguous"
        view = VIEWS[layout]
        shape = base_shape(layout, values.shape)
        guard = np.frombuffer(bytes([CANARY]) * (int(np.prod(shape)) * values.itemsize), values.dtype)
        base = simulated_arrays.array(guard.reshape(shape))
        array = view(base)
        array.set(values)

        def intact() -> bool:
            raw = base.numpy().view(f"V{values.itemsize}")
            view(raw)[...] = np.frombuffer(bytes([CANARY]) * values.itemsize, raw.dtype)[0]
            return bool(raw.tobytes() == bytes([CANARY]) * raw.nbytes)

        return Held(array, array.numpy, intact)

    def part(self, held: Held, start: int, stop: int) -> Held:
        """Rows of an array, as an array of the same memory."""
        array = held.array[start:stop]
        return Held(array, array.numpy, lambda: True)


FAMILIES["simulated"] = SimulatedFamily
