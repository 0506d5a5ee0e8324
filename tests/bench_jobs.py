"""What ranks do in the tests of the benchmark on the simulated device."""

from __future__ import annotations

import contextlib
import io
import time
from typing import Any

import simulated_arrays

from unicoll.bench import arrays, main
from unicoll.types import DType


class SimulatedFamily(arrays.Family):
    """Arrays on the simulated device; its marks are the host's clock once the device is through."""

    name = "simulated"

    def empty(self, count: int, dtype: DType) -> Any:
        return simulated_arrays.empty(count, dtype.storage)

    def put(self, array: Any, elements: arrays.Flat) -> None:
        array.set(elements.view(array.dtype))

    def get(self, array: Any) -> arrays.Flat:
        elements: arrays.Flat = array.numpy()
        return elements

    def finish(self) -> None:
        simulated_arrays.simulation().synchronize_stream(simulated_arrays.current_stream())

    def mark(self) -> Any:
        self.finish()
        return time.perf_counter()


def bench(argv: tuple[str, ...]) -> tuple[int, str]:
    """The benchmark as this rank; its exit status and what it prints."""
    arrays.register("simulated", SimulatedFamily)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        status = main(argv)
    return status, printed.getvalue()
